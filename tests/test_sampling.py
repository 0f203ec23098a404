from __future__ import annotations

import numpy as np
import pytest
import reference
from scipy import stats as scipy_stats

from mismatch_sim import rng, sampling

INF = np.inf


def keys(count: int, seed: int = 0) -> np.ndarray:
    return rng.fold(rng.key(seed), np.arange(count)).astype(np.uint32)


def test_log_softmax_equals_its_definition(xp):
    logits = (5 * np.random.default_rng(0).normal(size=(4, 3, 40))).astype(np.float32)
    logits[0, 0, 5:] = -INF
    logits[1, 1, 0] = 1e4
    got = xp.call(sampling.log_softmax, logits)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference.log_softmax(logits), rtol=1e-6, atol=1e-6)


def test_log_softmax_of_a_one_token_support_is_exactly_zero(xp):
    got = xp.call(sampling.log_softmax, np.array([[-INF, 7.3, -INF]], np.float32))
    assert got.tolist() == [[-INF, 0.0, -INF]]


def test_take_gathers_on_the_last_axis(xp):
    table = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tokens = np.array([[0, 3, 1], [2, 2, 0]], np.int32)
    assert xp.call(sampling.take, table, tokens).tolist() == [[0, 7, 9], [14, 18, 20]]


def test_impossible_tokens_are_never_chosen(xp):
    logits = np.full((64, 6), -INF, np.float32)
    logits[:, 2], logits[:, 4] = -1e4, -1e4
    for greedy in (False, True):
        tokens, logprobs = xp.call(sampling.sample, logits, keys(64), np.bool_(greedy))
        assert tokens.dtype == np.int32
        assert set(tokens) == ({2} if greedy else {2, 4})
        np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_greedy_takes_the_first_best_token(xp):
    logits = np.resize(np.array([[0, 3, 3, 1, 0, 0], [2, 1, 0, 0, 0, 2]], np.float32), (64, 6))
    tokens, logprobs = xp.call(sampling.sample, logits, keys(64), np.bool_(True))
    assert tokens.tolist() == [1, 0] * 32
    np.testing.assert_allclose(
        logprobs, np.take_along_axis(reference.log_softmax(logits), tokens[:, None], -1)[:, 0], 1e-6
    )


def test_greedy_may_be_a_python_bool():
    logits = np.array([[0.0, 5.0, -INF]])
    noise = np.array([[9.0, 0.0, 9.0]])
    assert sampling.choose(logits, noise, False).tolist() == [0]
    assert sampling.choose(logits, noise, True).tolist() == [1]


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_follow_the_softmax(seed):
    count = 40_000
    logits = np.array([0.0, -1.0, 2.0, -4.0, -INF, 1.0, 0.5], np.float32)
    tokens, _ = sampling.sample(np.broadcast_to(logits, (count, 7)), keys(count, seed), False)
    observed = np.bincount(tokens, minlength=7)
    expected = count * np.exp(reference.log_softmax(logits))
    assert observed[4] == 0
    on = expected > 0
    assert scipy_stats.chisquare(observed[on], expected[on]).pvalue > 1e-3


def test_tokens_and_recorded_logprobs_agree_across_frameworks(xp):
    logits = (2 * np.random.default_rng(3).normal(size=(64, 6))).astype(np.float32)
    want, _ = sampling.sample(logits, keys(64), False)
    tokens, logprobs = xp.call(sampling.sample, logits, keys(64), np.bool_(False))
    assert tokens.tolist() == want.tolist()
    by_definition = np.take_along_axis(reference.log_softmax(logits), want[:, None], -1)[:, 0]
    np.testing.assert_allclose(logprobs, by_definition, rtol=1e-6, atol=1e-6)


def test_a_row_draws_the_same_in_any_batch():
    logits = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    whole, _ = sampling.sample(logits, keys(8), False)
    order = [5, 2, 7]
    assert (
        sampling.sample(logits[order], keys(8)[order], False)[0].tolist() == whole[order].tolist()
    )

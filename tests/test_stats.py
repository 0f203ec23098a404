from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from mismatch_sim import stats


def prompts(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """KL sums and lengths of n responses, correlated; their ratio of expectations is 0.02."""
    draw = np.random.default_rng(seed)
    length = draw.integers(4, 30, size=n)
    return length * 0.02 * draw.lognormal(-0.125, 0.5, size=n), length


def test_bootstrap_agrees_with_scipy():
    top, bottom = prompts(128)
    value, low, high = stats.bootstrap_ratio(top, bottom, seed_key=1, resamples=20_000)
    want = scipy_stats.bootstrap(
        (top, bottom),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = want.high - want.low
    assert value == top.sum() / bottom.sum()
    assert abs(low - want.low) < 0.03 * width and abs(high - want.high) < 0.03 * width


def test_bootstrap_is_a_function_of_its_key():
    top, bottom = prompts(40)
    assert stats.bootstrap_ratio(top, bottom, 3) == stats.bootstrap_ratio(top, bottom, 3)
    assert stats.bootstrap_ratio(top, bottom, 3) != stats.bootstrap_ratio(top, bottom, 4)


def test_bootstrap_covers_what_it_says():
    hits = 0
    for seed in range(300):
        top, bottom = prompts(100, seed)
        _, low, high = stats.bootstrap_ratio(top, bottom, seed, resamples=400)
        hits += low <= 0.02 <= high
    assert 0.90 < hits / 300 <= 0.99


def test_bootstrap_draws_clusters_together():
    """Five copies of each prompt carry no more information than one."""
    top, bottom = prompts(60)
    once = stats.bootstrap_ratio(top, bottom, 2, resamples=4000)
    ids = np.repeat(np.arange(60) * 7 + 3, 5)
    copies = np.repeat(top, 5), np.repeat(bottom, 5)
    clustered = stats.bootstrap_ratio(*copies, 2, resamples=4000, clusters=ids)
    np.testing.assert_allclose(clustered, once, rtol=1e-12)
    _, low, high = stats.bootstrap_ratio(*copies, 2, resamples=4000)
    assert high - low < 0.6 * (once[2] - once[1])


def test_bootstrap_draws_every_row_equally_often():
    for n in (3, 128, 1000):
        sums = stats._resampled_sums(np.eye(1, n, n - 1)[0], 0, 2000)
        assert abs(sums.mean() - 1) < 4 / math.sqrt(2000)  # binomial(n, 1 / n)
        assert abs(sums.var() - (1 - 1 / n)) < 0.25
        blocks = stats._resampled_sums(np.ones(n), 0, 2000)
        assert blocks.shape == (2000,) and (blocks == n).all()


def test_bootstrap_in_blocks_equals_itself(monkeypatch):
    top, bottom = prompts(50)
    whole = stats.bootstrap_ratio(top, bottom, 5)
    monkeypatch.setattr(stats, "_BLOCK", 50 * 8)
    assert stats.bootstrap_ratio(top, bottom, 5) == whole


def test_bootstrap_edge_cases():
    assert stats.bootstrap_ratio(np.zeros(4), np.ones(4), 0) == (0.0, 0.0, 0.0)
    assert stats.bootstrap_ratio([3.0], [2.0], 0) == (1.5, 1.5, 1.5)
    value, low, high = stats.bootstrap_ratio([1.0, np.inf, 1.0, 1.0], np.ones(4), 0)
    assert value == high == np.inf and low == 1.0
    _, low, high = stats.bootstrap_ratio([0.0, 1.0, 2.0], [0.0, 1.0, 1.0], 0)
    assert (low, high) == (1.0, 2.0)
    for bad in (([1.0], [0.0]), ([1.0, 1.0], [2.0, -1.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="denominators"):
            stats.bootstrap_ratio(*bad, 0)


@pytest.mark.parametrize("n", [1, 7, 100, 5000])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_wilson_equals_scipy(n, level):
    for successes in {0, n // 3, n - 1, n}:
        want = scipy_stats.binomtest(successes, n).proportion_ci(level, method="wilson")
        np.testing.assert_allclose(stats.wilson(successes, n, level), want, atol=1e-12)


def test_wilson_contains_the_share_and_stays_a_share():
    assert stats.wilson(0, 0) == (0.0, 1.0)
    for successes in range(21):
        low, high = stats.wilson(successes, 20)
        assert 0 <= low <= successes / 20 <= high <= 1


def test_lognormal_interval_equals_scipy():
    values = np.random.default_rng(0).lognormal(-8, 0.7, size=8)
    logs = np.log(values)
    want = scipy_stats.t(7, logs.mean(), scipy_stats.sem(logs)).interval(0.9)
    got = stats.lognormal_t_interval(values, 0.9)
    np.testing.assert_allclose(got, np.exp([logs.mean(), *want]), rtol=1e-12)


def test_lognormal_interval_covers_what_it_says():
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        _, low, high = stats.lognormal_t_interval(draw.lognormal(0.0, 0.8, size=8))
        hits += low <= 1.0 <= high
    assert 0.93 < hits / 1000 < 0.97


def test_lognormal_interval_of_zeros_equal_and_single_draws():
    assert stats.lognormal_t_interval([0.0, 0.0]) == (0.0, 0.0, 0.0)
    assert stats.lognormal_t_interval([0.0]) == (0.0, 0.0, 0.0)
    assert stats.lognormal_t_interval([0.1] * 8) == (0.1, 0.1, 0.1)
    assert stats.lognormal_t_interval([0.1]) == (0.1, 0.0, math.inf)
    draws = np.array([0.0, 0.1, 0.2, 0.3])
    centre, low, high = stats.lognormal_t_interval(draws)
    half = scipy_stats.t(3).ppf(0.975) * scipy_stats.sem(draws)
    np.testing.assert_allclose((centre, low, high), (0.15, max(0.15 - half, 0), 0.15 + half))
    for bad in ([], [-0.1, 0.2], [math.inf, 1.0], [math.nan]):
        with pytest.raises(ValueError, match="finite"):
            stats.lognormal_t_interval(bad)

from __future__ import annotations

import subprocess
import sys

import numpy as np
import reference

from mismatch_sim import metrics, sampling
from mismatch_sim.types import Prompts, Rollout

B, N, V = 5, 6, 8


def case(dtype: type = np.float32, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Rollout]:
    """Logits of mu and pi, and a rollout whose recorded log-probabilities are slightly off."""
    draw = np.random.default_rng(seed)
    mu = (2 * draw.normal(size=(B, N, V))).astype(dtype)
    pi = (mu + 0.3 * draw.normal(size=(B, N, V))).astype(dtype)
    tokens = draw.integers(0, V, size=(B, N)).astype(np.int32)
    lengths = np.array([6, 1, 3, 5, 2])
    mask = (np.arange(N) < lengths[:, None]).astype(np.int32)
    recorded = np.take_along_axis(reference.log_softmax(mu), tokens[..., None], -1)[..., 0]
    recorded = recorded + 0.01 * draw.normal(size=(B, N))
    one = np.ones((B, 2), np.int32)
    rollout = Rollout(Prompts(one, one), tokens, mask, (recorded * mask).astype(dtype))
    return mu, pi, rollout


def expected(mu: np.ndarray, pi: np.ndarray, rollout: Rollout) -> dict[str, float]:
    """All scalars of ``mismatch_metrics`` by the naive definitions."""
    mask, tokens = rollout.mask_BN, rollout.tokens_BN
    exact = reference.divergences(mu, pi)
    at = lambda logits: np.take_along_axis(
        reference.log_softmax(logits), tokens[..., None], axis=-1
    )[..., 0]
    delta = at(pi) - rollout.logprobs_BN
    gap = at(mu) - rollout.logprobs_BN
    per_token = {
        "kl_exact": exact["kl"],
        **{name: exact[name] for name in ("kl_reverse", "js", "tv", "uncovered_mass", "entropy")},
        "k1": -delta,
        "k2": delta**2 / 2,
        "k3": np.exp(delta) - 1 - delta,
        "logprob_abs_diff": np.abs(delta),
        "sampler_gap": gap,
        "sampler_gap_abs": np.abs(gap),
    }
    out = {f"mismatch/{k}": reference.mean_on_mask(x, mask) for k, x in per_token.items()}
    out["mismatch/length_mean"] = mask.sum() / len(mask)
    out["mismatch/seq_kl"] = sum((exact["kl"] * mask).sum(1)) / len(mask)
    return out | reference.rollout_corr(rollout.logprobs_BN, at(pi), mask)


def test_metrics_equal_their_definitions(xp):
    mu, pi, rollout = case(np.float64 if xp.has_float64 else np.float32)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if xp.has_float64 else {"rtol": 2e-6, "atol": 1e-6}
    scalars, rows, positions = xp.call(metrics.mismatch_metrics, mu, pi, rollout)
    want = expected(mu, pi, rollout)
    assert set(scalars) == set(want)
    for tag, value in want.items():
        np.testing.assert_allclose(scalars[tag], value, err_msg=tag, **tolerance)
        assert np.shape(scalars[tag]) == ()
    exact, mask = reference.divergences(mu, pi), rollout.mask_BN
    np.testing.assert_allclose(rows["kl_sum"], (exact["kl"] * mask).sum(1), **tolerance)
    assert rows["tokens"].tolist() == mask.sum(1).tolist()
    assert set(positions) == {"kl", "kl_reverse", "tv"}
    for name, value in positions.items():
        columns = (exact[name] * mask).sum(0) / mask.sum(0)
        np.testing.assert_allclose(value, columns, err_msg=name, **tolerance)


def test_ratio_of_row_sums_is_the_dose(xp):
    scalars, rows, _ = xp.call(metrics.mismatch_metrics, *case())
    ratio = rows["kl_sum"].sum() / rows["tokens"].sum()
    np.testing.assert_allclose(scalars["mismatch/kl_exact"], ratio, rtol=1e-6)


def test_identical_policies_measure_exactly_zero(xp):
    mu, _, rollout = case()
    scalars, rows, positions = xp.call(metrics.mismatch_metrics, mu, mu.copy(), rollout)
    for tag in ("kl_exact", "kl_reverse", "js", "tv", "uncovered_mass", "seq_kl"):
        assert scalars[f"mismatch/{tag}"] == 0.0, tag
    assert (rows["kl_sum"] == 0).all()
    assert all((x == 0).all() for x in positions.values())
    np.testing.assert_allclose(
        scalars["mismatch/k1"], -scalars["mismatch/sampler_gap"], rtol=1e-6, atol=1e-7
    )


def test_values_off_the_mask_cannot_poison(xp):
    mu, pi, rollout = case()
    clean = xp.call(metrics.mismatch_metrics, mu, pi, rollout)
    clean_distill = xp.call(metrics.distill_metrics, mu, pi, rollout)
    off = rollout.mask_BN == 0
    mu[off], pi[off] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        dirty = xp.call(
            metrics.mismatch_metrics,
            mu,
            pi,
            rollout._replace(logprobs_BN=np.where(off, np.nan, rollout.logprobs_BN)),
        )
        dirty_distill = xp.call(metrics.distill_metrics, mu, pi, rollout)
    for want, got in zip((*clean, *clean_distill), (*dirty, *dirty_distill), strict=True):
        for tag in want:
            np.testing.assert_array_equal(got[tag], want[tag], tag)


def test_expected_k1_is_the_dose_less_the_sampler_gap():
    """Every token of the vocabulary in turn, weighted by mu: no Monte Carlo."""
    mu, pi, rollout = case(np.float64)
    bias = 0.02 * np.random.default_rng(9).normal(size=mu.shape)  # recorded - rescored
    weights = np.exp(reference.log_softmax(mu))
    k1 = gap = 0.0
    for v in range(V):
        tokens = np.full((B, N), v, np.int32)
        recorded = reference.log_softmax(mu)[..., v] + bias[..., v]
        mask = rollout.mask_BN
        for b, n in zip(*np.nonzero(mask), strict=True):
            one_token = np.zeros_like(mask)
            one_token[b, n] = 1
            scalars, _, _ = metrics.mismatch_metrics(
                mu, pi, Rollout(rollout.prompts, tokens, one_token, recorded)
            )
            k1 += weights[b, n, v] * scalars["mismatch/k1"] / mask.sum()
            gap += weights[b, n, v] * scalars["mismatch/sampler_gap"] / mask.sum()
    dose = metrics.mismatch_metrics(mu, pi, rollout)[0]["mismatch/kl_exact"]
    assert abs(k1 - (dose - gap)) < 1e-12 and abs(gap) > 1e-4


def test_truncated_support_shows_in_the_right_tags(xp):
    mu, pi, rollout = case()
    mu = np.where(mu < np.median(mu, axis=-1, keepdims=True), -np.inf, pi).astype(np.float32)
    tokens = np.argmax(mu, axis=-1).astype(np.int32)
    logprobs = np.asarray(sampling.take(sampling.log_softmax(mu), tokens))
    rollout = rollout._replace(tokens_BN=tokens, logprobs_BN=logprobs * rollout.mask_BN)
    scalars, _, positions = xp.call(metrics.mismatch_metrics, mu, pi, rollout)
    assert 0 < scalars["mismatch/uncovered_mass"] < 1
    assert scalars["mismatch/kl_exact"] > scalars["mismatch/uncovered_mass"]
    assert np.isinf(scalars["mismatch/kl_reverse"]) and np.isinf(positions["kl_reverse"]).all()
    assert not any(np.isnan(x) for x in scalars.values())
    assert abs(scalars["mismatch/sampler_gap_abs"]) < 1e-6


def test_rows_without_tokens_are_no_sequences(xp):
    mu, pi, rollout = case()
    short = [x[1:] for x in (mu, pi)]
    mask = rollout.mask_BN.copy()
    mask[0] = 0
    got = xp.call(metrics.mismatch_metrics, mu, pi, rollout._replace(mask_BN=mask))[0]
    smaller = Rollout(rollout.prompts, *(x[1:] for x in rollout[1:]))
    want = xp.call(metrics.mismatch_metrics, *short, smaller)[0]
    for tag in want:
        if tag not in ("mismatch/length_mean", "mismatch/seq_kl"):
            np.testing.assert_allclose(got[tag], want[tag], rtol=1e-6, atol=1e-8, err_msg=tag)


def test_distill_metrics_equal_their_definitions(xp):
    student, teacher, rollout = case()
    scalars, rows = xp.call(metrics.distill_metrics, student, teacher, rollout)
    mask = rollout.mask_BN
    forth, back = reference.divergences(student, teacher), reference.divergences(teacher, student)
    want = {
        "distill/reverse_kl": forth["kl"],
        "distill/forward_kl": back["kl"],
        "distill/entropy": forth["entropy"],
        "distill/teacher_entropy": back["entropy"],
    }
    assert set(scalars) == set(want)
    for tag, value in want.items():
        value = reference.mean_on_mask(value, mask)
        np.testing.assert_allclose(scalars[tag], value, rtol=1e-6, err_msg=tag)
    np.testing.assert_allclose(rows["reverse_kl_sum"], (forth["kl"] * mask).sum(1), rtol=1e-6)
    assert rows["tokens"].tolist() == mask.sum(1).tolist()


def test_jax_compiles_one_program_for_all_batches(monkeypatch):
    import jax

    traces = []
    original = metrics.token_divergences
    monkeypatch.setattr(
        metrics, "token_divergences", lambda *args: traces.append(1) or original(*args)
    )
    mu, pi, rollout = jax.tree.map(lambda x: jax.numpy.asarray(x[:3]), case())
    metrics.mismatch_metrics(mu, pi, rollout)
    metrics.mismatch_metrics(pi, mu, rollout)
    assert len(traces) == 1


def test_array_code_imports_no_framework():
    modules = "metrics, objectives, stats, sampling, divergences"
    code = (
        f"import sys; from mismatch_sim import {modules}; "
        "print([m for m in ('jax', 'torch', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

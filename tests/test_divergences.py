from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import reference

from mismatch_sim import divergences as dv

INF = np.inf


def random_logits(*shape: int, scale: float = 2.0, seed: int = 0) -> np.ndarray:
    return scale * np.random.default_rng(seed).normal(size=shape)


def pair_near(kl: float, vocabulary: int = 64, rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Rollout and trainer logits in float32 whose divergence is about ``kl``."""
    mu = random_logits(rows, vocabulary).astype(np.float32)
    noise = random_logits(rows, vocabulary, scale=np.sqrt(2 * kl), seed=1)
    return mu, (mu + noise).astype(np.float32)


def check(got: dv.Divergences, mu: np.ndarray, pi: np.ndarray, **tolerance: float) -> None:
    for name, want in reference.divergences(mu, pi).items():
        np.testing.assert_allclose(getattr(got, name), want, err_msg=name, **tolerance)


def test_divergences_equal_their_definitions_in_float64(xp):
    if not xp.has_float64:
        pytest.skip("float64 is off")
    mu, pi = random_logits(7, 5, 6), random_logits(7, 5, 6, seed=1)
    mu[0, 0, :3] = -INF
    mu[1, 0, 1:] = -INF
    mu[2, 0, :2] = pi[2, 0, :2] = -INF
    check(xp.call(dv.token_divergences, mu, pi), mu, pi, rtol=1e-12, atol=1e-12)


def test_divergences_on_every_small_distribution():
    grid = [w for w in itertools.product((0.0, 0.1, 1.0, 7.0), repeat=3) if sum(w)]
    with np.errstate(divide="ignore"):
        logs = np.log(np.array(grid))
    mu, pi = (x.reshape(-1, 3) for x in np.broadcast_arrays(logs[:, None], logs[None]))
    got = dv.token_divergences(mu, pi)
    check(got, mu, pi, rtol=1e-12, atol=1e-12)
    assert not any(np.isnan(x).any() for x in got)


def test_divergences_agree_across_frameworks_in_float32(xp):
    mu, pi = random_logits(200, 64).astype("f4"), random_logits(200, 64, seed=1).astype("f4")
    check(xp.call(dv.token_divergences, mu, pi), mu, pi, rtol=1e-6, atol=1e-6)


def test_kl_errs_by_less_than_1e_8_near_1e_6(xp):
    mu, pi = pair_near(1e-6)
    got = xp.call(dv.token_divergences, mu, pi)
    assert 3e-7 < got.kl.mean() < 3e-6
    check(got, mu, pi, rtol=1e-6, atol=1e-6)
    want = reference.divergences(mu, pi)
    for name in ("kl", "kl_reverse", "js"):
        np.testing.assert_allclose(getattr(got, name), want[name], rtol=0, atol=1e-8)
    assert abs(got.kl.mean() - want["kl"].mean()) < 1e-9


@pytest.mark.parametrize("shape", [(9, 4099), (200, 64)])
def test_identical_logits_give_exactly_zero(xp, shape):
    logits = random_logits(*shape, scale=5.0).astype(np.float32)
    logits[0, 0] = -INF
    got = xp.call(dv.token_divergences, logits, logits.copy())
    for name in ("kl", "kl_reverse", "js", "tv", "uncovered_mass"):
        assert (getattr(got, name) == 0.0).all(), name
    assert (got.entropy >= 0).all()


def test_extreme_logits_are_finite_or_rightly_infinite(xp):
    mu = np.array(
        [
            [0.0, -69.0, -69.0],  # probabilities of 1e-30
            [0.0, -69.0, -1e4],
            [0.0, -1e4, 3.0],
            [0.0, -INF, -INF],  # one-token support
            [0.0, 0.0, -INF],
            [0.0, 1.0, 2.0],  # more support than pi: KL is infinite
            [0.0, -200.0, 0.0],  # exp underflows, the support is there all the same
            [-3e38, 0.0, 0.0],  # a "mask" of the lowest float
        ]
    )
    pi = np.array(
        [
            [-69.0, 0.0, -69.0],
            [0.0, -1e4, -69.0],
            [-1e4, 0.0, 0.0],
            [0.0, 1.0, -INF],
            [0.0, 2.0, 1.0],
            [0.0, 1.0, -INF],
            [0.0, -INF, 0.0],
            [-3e38, 0.0, 1.0],
        ]
    )
    got = xp.call(dv.token_divergences, mu.astype(np.float32), pi.astype(np.float32))
    want = reference.divergences(mu, pi)
    for name, value in want.items():
        np.testing.assert_allclose(getattr(got, name), value, rtol=2e-6, atol=1e-6, err_msg=name)
    assert np.isinf(got.kl).tolist() == [False] * 5 + [True, True, False]


def test_nan_logits_do_not_look_fine(xp):
    logits = np.zeros((8, 3), np.float32)
    logits[0, 1] = np.nan
    got = xp.call(dv.token_divergences, logits, np.zeros_like(logits))
    assert np.isnan(got.kl).tolist() == [True] + [False] * 7


def test_chunk_does_not_change_a_bit(xp):
    vocabulary = 4099
    mu = random_logits(9, vocabulary).astype(np.float32)
    pi = mu + random_logits(9, vocabulary, scale=0.1, seed=1).astype(np.float32)
    tokens = np.argmax(pi, axis=-1).astype(np.int32)
    whole = xp.call(dv.token_divergences, mu, pi)
    whole_logprobs = xp.call(dv.token_logprobs, mu, tokens)
    chunks = (4 * vocabulary,) if xp.name.startswith("jax") else (1, 4 * vocabulary, 8 * vocabulary)
    # JAX outside jit compiles the slices but not the whole, so there the last bit may differ.
    rtol = 1e-5 if xp.name == "jax" else 0
    for chunk in chunks:
        parts = xp.call(dv.token_divergences, mu, pi, chunk=chunk)
        for name in dv.Divergences._fields:
            one, other = getattr(parts, name), getattr(whole, name)
            np.testing.assert_allclose(one, other, rtol=rtol, atol=0, err_msg=name)
        logprobs = xp.call(dv.token_logprobs, mu, tokens, chunk=chunk)
        np.testing.assert_allclose(logprobs, whole_logprobs, rtol=rtol, atol=0)


def test_a_large_vocabulary_does_not_need_large_memory():
    mu = np.zeros((24, 152_000), np.float32)
    mu[:, :100] = 3.0
    pi = mu + 1.0
    chunk = 2 * mu.shape[1]
    tracemalloc.start()
    dv.token_divergences(mu, pi, chunk=chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * 4 * chunk <= mu.nbytes


def test_entropy_and_token_logprobs_equal_their_definitions(xp):
    logits = random_logits(3, 4, 9).astype(np.float32)
    tokens = np.argmin(logits, axis=-1).astype(np.int32)
    want = reference.log_softmax(logits)
    got = xp.call(dv.token_logprobs, logits, tokens)
    np.testing.assert_allclose(got, np.min(want, axis=-1), rtol=1e-6)
    got = xp.call(dv.entropy, logits)
    want_rows = [reference.entropy(row) for row in want.reshape(-1, 9)]
    np.testing.assert_allclose(got.ravel(), want_rows, rtol=1e-6)


# --- sampled estimators, by enumeration of the token -------------------------------------------


def test_k1_and_k3_average_to_the_kl_and_k2_does_not(xp):
    if not xp.has_float64:
        pytest.skip("float64 is off")
    log_mu = reference.log_softmax(random_logits(20, 5))
    log_pi = reference.log_softmax(random_logits(20, 5, seed=1))
    exact = [reference.kl(m, p) for m, p in zip(log_mu, log_pi, strict=True)]
    k1, k2, k3 = xp.call(dv.sampled_estimators, log_mu, log_pi)
    mean = lambda k: np.sum(np.exp(log_mu) * k, axis=-1)
    np.testing.assert_allclose(mean(k1), exact, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean(k3), exact, rtol=0, atol=1e-12)
    np.testing.assert_allclose(k2, (log_mu - log_pi) ** 2 / 2, atol=1e-12)
    assert (k3 >= 0).all() and np.abs(mean(k2) - exact).max() > 1e-2


def test_k3_loses_the_uncovered_mass_under_truncation():
    pi = random_logits(6, 5)
    mu = pi.copy()
    mu[:, 3:] = -INF
    got = dv.token_divergences(mu, pi)
    log_mu, log_pi = reference.log_softmax(mu), reference.log_softmax(pi)
    k1, _, k3 = (k[:, :3] for k in dv.sampled_estimators(np.where(mu > -INF, log_mu, 0.0), log_pi))
    weight = np.exp(log_mu[:, :3])
    np.testing.assert_allclose((weight * k1).sum(-1), got.kl, atol=1e-12)
    np.testing.assert_allclose((weight * k3).sum(-1), got.kl - got.uncovered_mass, atol=1e-12)
    np.testing.assert_allclose(got.kl, -np.log(1 - got.uncovered_mass), atol=1e-12)
    assert np.isinf(got.kl_reverse).all()


def test_k3_is_exact_for_small_log_ratios(xp):
    delta = np.array([1e-5, -1e-4, 0.0, 1e-3], np.float32)
    _, _, k3 = xp.call(dv.sampled_estimators, np.zeros_like(delta), delta)
    exact = delta.astype(np.float64) ** 2 / 2 + delta.astype(np.float64) ** 3 / 6
    np.testing.assert_allclose(k3, exact, rtol=0, atol=2e-10)


# --- the scale is the KL of whole responses ----------------------------------------------------


@pytest.mark.parametrize("truncated", [False, True])
def test_kl_times_length_is_the_kl_of_whole_responses(truncated):
    vocabulary, eos, max_length = 3, 0, 4
    prefixes = {s[:n] for s in reference.sequences(vocabulary, eos, max_length) for n in range(4)}
    mu = {p: random_logits(3, seed=i) for i, p in enumerate(sorted(prefixes))}
    pi = {p: random_logits(3, seed=1000 + i) for i, p in enumerate(sorted(prefixes))}
    if truncated:
        mu[(1,)][2] = -INF
    responses = reference.sequences(vocabulary, eos, max_length)
    shape = (len(responses), max_length)
    mu_BNV, pi_BNV = np.zeros((*shape, 3)), np.zeros((*shape, 3))
    mask, log_mu, log_pi = np.zeros(shape, int), np.zeros(shape[0]), np.zeros(shape[0])
    for b, response in enumerate(responses):
        for n, token in enumerate(response):
            mu_BNV[b, n], pi_BNV[b, n] = mu[response[:n]], pi[response[:n]]
            mask[b, n] = 1
            log_mu[b] += reference.log_softmax(mu[response[:n]])[token]
            log_pi[b] += reference.log_softmax(pi[response[:n]])[token]
    assert abs(np.exp(log_mu).sum() - 1) < 1e-12
    kl = dv.token_divergences(mu_BNV, pi_BNV).kl
    summed, length = dv.sequence_sums(kl, mask), dv.sequence_sums(np.ones(shape), mask)
    weight = np.exp(log_mu)
    dose = np.sum(weight * summed) / np.sum(weight * length)
    drawn = weight > 0
    want = np.sum(weight[drawn] * (log_mu - log_pi)[drawn])
    assert abs(dose * np.sum(weight * length) - want) < 1e-12


# --- masked means ------------------------------------------------------------------------------


def test_masked_means_equal_loops_and_cannot_be_poisoned(xp):
    x = random_logits(4, 6).astype(np.float32)
    mask = (np.random.default_rng(0).random((4, 6)) < 0.6).astype(np.int32)
    mask[:, 5], mask[2] = 0, 0
    clean = np.where(mask == 1, x, 0.0)
    x[mask == 0] = np.resize([np.nan, INF, -INF], (mask == 0).sum())
    got = xp.call(dv.masked_mean, x, mask)
    np.testing.assert_allclose(got, reference.mean_on_mask(clean, mask), rtol=1e-6)
    columns = clean.sum(0) / np.maximum(mask.sum(0), 1)
    np.testing.assert_allclose(xp.call(dv.by_position, x, mask), columns, rtol=1e-6)
    np.testing.assert_allclose(xp.call(dv.sequence_sums, x, mask), clean.sum(1), rtol=1e-6)
    means = clean.sum(1) / np.maximum(mask.sum(1), 1)
    np.testing.assert_allclose(xp.call(dv.sequence_means, x, mask), means, rtol=1e-6)
    assert xp.call(dv.masked_mean, x, np.zeros_like(mask)) == 0


# --- the differentiable KL ---------------------------------------------------------------------


def value_and_gradient(name: str, fn, x: np.ndarray, *rest: np.ndarray):
    """(value, gradient in x) of a scalar function, by JAX or torch."""
    if name == "torch":
        import torch

        z = torch.tensor(x, requires_grad=True)
        value = fn(z, *map(torch.tensor, rest))
        value.backward()
        return value.detach().numpy(), z.grad.numpy()
    import jax

    value, gradient = jax.jit(jax.value_and_grad(fn))(x, *rest)
    return np.asarray(value), np.asarray(gradient)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_reverse_kl_has_the_right_gradient_at_extremes(name):
    from mismatch_sim.sampling import log_softmax

    student = random_logits(6, 5).astype(np.float32)
    teacher = random_logits(6, 5, seed=1).astype(np.float32)
    student[0, 1], teacher[1, 2] = -1e4, -1e4
    student[2, :2] = -1e4
    teacher[2, 2:] = -1e4
    student[3, 0] = -INF
    student[4], teacher[4] = [60, 0, 0, 0, 0], [-60, 0, 0, 0, 0]
    teacher[5] = student[5]

    def loss(z, q):
        return dv.reverse_kl(log_softmax(z), log_softmax(q)).sum()

    value, gradient = value_and_gradient(name, loss, student, teacher)
    finite = np.where(student == -INF, -1e5, student)
    want = [reference.kl_gradient(z, q) for z, q in zip(finite, teacher, strict=True)]
    kl = reference.divergences(finite, teacher)["kl"]
    assert (
        np.abs(gradient - want).max(axis=-1) < 1e-6 * (1 + kl)
    ).all()  # s (log s/q - KL) cancels
    assert (gradient[5] == 0).all()
    np.testing.assert_allclose(value, kl.sum(), rtol=1e-6)

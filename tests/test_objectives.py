from __future__ import annotations

import numpy as np
import pytest
import reference

from mismatch_sim import objectives
from mismatch_sim.objectives import opd
from mismatch_sim.types import Prompts, Rollout

B, N, V = 3, 4, 5


def case(dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray, Rollout, np.ndarray]:
    draw = np.random.default_rng(0)
    student, teacher = draw.normal(size=(2, B, N, V)).astype(dtype)
    tokens = draw.integers(0, V, size=(B, N)).astype(np.int32)
    mask = (np.arange(N) < np.array([4, 1, 3])[:, None]).astype(np.int32)
    one = np.ones((B, 2), np.int32)
    weights = draw.uniform(0.5, 2.0, size=(B, N)).astype(dtype)
    return student, teacher, Rollout(Prompts(one, one), tokens, mask, mask * -1.0), weights


def gradient(name: str, loss, student, teacher, rollout, weights):
    """(loss, gradient in the student's logits) by torch (float64 kept) or jitted JAX."""
    if name == "torch":
        import torch

        z = torch.tensor(student, requires_grad=True)
        rollout = Rollout(Prompts(*map(torch.tensor, rollout[0])), *map(torch.tensor, rollout[1:]))
        value, _ = loss(z, torch.tensor(teacher), rollout, torch.tensor(weights))
        value.backward()
        return value.detach().numpy(), z.grad.numpy()
    import jax

    value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, _), g = value_and_grad(student, teacher, rollout, weights)
    return np.asarray(value), np.asarray(g)


def by_formula(name: str, student, teacher, rollout, weights) -> tuple[float, np.ndarray]:
    """Loss and gradient of each objective, token by token in float64."""
    log_s, log_q = reference.log_softmax(student), reference.log_softmax(teacher)
    total, g = 0.0, np.zeros(student.shape)
    for b, n in zip(*np.nonzero(rollout.mask_BN), strict=True):
        s, q, y = log_s[b, n], log_q[b, n], rollout.tokens_BN[b, n]
        w = float(weights[b, n])
        score = np.eye(V)[y] - np.exp(s)  # d log s(y) / dz
        if name == "reverse_kl":
            total += w * reference.kl(s, q)
            g[b, n] = w * reference.kl_gradient(student[b, n], teacher[b, n])
        elif name == "sampled_reverse_kl":
            total -= w * (q[y] - s[y]) * s[y]
            g[b, n] = -w * (q[y] - s[y]) * score
        else:
            total -= w * s[y]
            g[b, n] = -w * score
    return total / rollout.mask_BN.sum(), g / rollout.mask_BN.sum()


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_values_equal_the_formula(xp, name):
    student, teacher, rollout, weights = case()
    loss, scalars = xp.call(objectives.get(name), student, teacher, rollout, weights)
    want, _ = by_formula(name, student, teacher, rollout, weights)
    np.testing.assert_allclose(loss, want, rtol=1e-6, atol=1e-6)
    assert np.shape(loss) == () and all(np.shape(x) == () for x in scalars.values())


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_gradients_equal_the_formula(name, framework):
    dtype, tolerance = (np.float64, 1e-12) if framework == "torch" else (np.float32, 1e-6)
    arguments = case(dtype)
    value, got = gradient(framework, objectives.get(name), *arguments)
    want_value, want = by_formula(name, *arguments)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(value, want_value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["reverse_kl", "cross_entropy"])
def test_gradients_equal_finite_differences(name):
    """Of the value itself; the sampled loss is a surrogate and has no such property."""
    student, *rest = case(np.float64)
    loss = objectives.get(name)
    _, got = gradient("torch", loss, student, *rest)
    step = 1e-5
    for index in [(0, 0, 0), (0, 3, 4), (1, 0, 2), (2, 1, 1), (1, 3, 0)]:
        up, down = student.copy(), student.copy()
        up[index] += step
        down[index] -= step
        slope = (loss(up, *rest)[0] - loss(down, *rest)[0]) / (2 * step)
        assert abs(got[index] - slope) < 1e-9


def enumerated_gradient(law: np.ndarray, weights_of) -> np.ndarray:
    """Expected gradient of the sampled loss when y ~ law at every position, by enumeration."""
    student, teacher, rollout, _ = case(np.float64)
    total = np.zeros(student.shape)
    for v in range(V):
        tokens = np.full((B, N), v, np.int32)
        _, g = gradient(
            "torch",
            opd.sampled_reverse_kl,
            student,
            teacher,
            rollout._replace(tokens_BN=tokens),
            weights_of(v),
        )
        total += law[..., v, None] * g
    return total


def test_sampled_gradient_averages_to_the_full_vocabulary_one():
    student, teacher, rollout, _ = case(np.float64)
    ones = np.ones((B, N))
    _, want = gradient("torch", opd.reverse_kl, student, teacher, rollout, ones)
    got = enumerated_gradient(np.exp(reference.log_softmax(student)), lambda v: ones)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_importance_weights_repair_tokens_from_another_policy():
    student, teacher, rollout, _ = case(np.float64)
    ones = np.ones((B, N))
    mu = np.exp(reference.log_softmax(student + np.random.default_rng(5).normal(size=(B, N, V))))
    ratio = np.exp(reference.log_softmax(student)) / mu
    _, want = gradient("torch", opd.reverse_kl, student, teacher, rollout, ones)
    np.testing.assert_allclose(enumerated_gradient(mu, lambda v: ratio[..., v]), want, atol=1e-12)
    assert np.abs(enumerated_gradient(mu, lambda v: ones) - want).max() > 1e-3


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_values_off_the_mask_poison_neither_value_nor_gradient(name, framework):
    student, teacher, rollout, weights = case()
    clean = gradient(framework, objectives.get(name), student, teacher, rollout, weights)
    off = rollout.mask_BN == 0
    student[off], teacher[off], weights[off] = np.nan, -np.inf, np.inf
    dirty = gradient(framework, objectives.get(name), student, teacher, rollout, weights)
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    assert (dirty[1][off] == 0).all()


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_extreme_logits_keep_gradients_finite(name, framework):
    student, teacher, rollout, weights = case()
    student[0, 0, 1], teacher[0, 1, 2], student[0, 2] = -1e4, -1e4, [1e4, 0, 0, 0, -1e4]
    value, g = gradient(framework, objectives.get(name), student, teacher, rollout, weights)
    assert np.isfinite(value) and np.isfinite(g).all()


def test_a_student_equal_to_its_teacher_has_nothing_to_learn():
    student, _, rollout, weights = case()
    for framework in ("torch", "jax"):
        for loss in (opd.reverse_kl, opd.sampled_reverse_kl):
            value, g = gradient(framework, loss, student, student.copy(), rollout, weights)
            assert value == 0 and (g == 0).all()


def test_advantage_scalars_are_token_means(xp):
    student, teacher, rollout, weights = case()
    _, scalars = xp.call(opd.sampled_reverse_kl, student, teacher, rollout, weights)
    at = lambda logits: np.take_along_axis(
        reference.log_softmax(logits), rollout.tokens_BN[..., None], axis=-1
    )[..., 0]
    advantage = at(teacher) - at(student)
    for tag, x in (("mean", advantage), ("abs", np.abs(advantage))):
        want = reference.mean_on_mask(x, rollout.mask_BN)
        np.testing.assert_allclose(scalars[f"advantage_{tag}"], want, rtol=2e-6)


def test_unknown_objective_says_what_there_is():
    with pytest.raises(ValueError, match=r"reverse_kl, .*did you mean 'reverse_kl'"):
        objectives.get("reverse-kl")
    assert objectives.get("cross_entropy") is opd.cross_entropy

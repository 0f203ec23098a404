"""Losses of on-policy distillation: the student learns on prefixes that the rollout policy wrote.

All three are sums over response tokens, sum_t m w l_t / sum_t m, with m the mask and w the
correction's weights. Prefixes are data: no gradient flows through how the student's choices shape
later prefixes (a *discount-0* gradient), as in every OPD system we know. So with student s, teacher
q and prefixes y_<t ~ mu, the true objective of both distillation losses is

    J = E_{x, y ~ mu} [ sum_t m_t KL(s(.|x, y_<t) || q(.|x, y_<t)) ],   mu held fixed.

``reverse_kl`` differentiates J itself, exactly at each prefix. ``sampled_reverse_kl`` estimates the
same gradient from the one token that was drawn; it is unbiased if that token came from s, and
biased when mu differs from s, which weights w_t = s(y_t) / mu(y_t) repair (not the prefixes).

Left out for now: discounts above 0 and other divergences. See ``docs/metrics.md`` for the tags.
"""

from __future__ import annotations

from mismatch_sim import divergences, ops
from mismatch_sim.divergences import masked_mean, on_mask
from mismatch_sim.sampling import log_softmax, take
from mismatch_sim.types import Array, Rollout


def reverse_kl(
    student_logits_BNV: Array, teacher_logits_BNV: Array, rollout: Rollout, weights_BN: Array
) -> tuple[Array, dict[str, Array]]:
    """Full-vocabulary distillation loss, sum_t m w KL(student || teacher) / sum_t m.

    The gradient is that of J (module docstring) without sampling error at each prefix; which tokens
    were drawn matters only through the prefixes.

    Args:
        student_logits_BNV: ``[B, N, V]``, differentiated.
        teacher_logits_BNV: ``[B, N, V]``, constant.
        rollout: whose mask is used.
        weights_BN: correction weights.

    >>> import numpy as np
    >>> from mismatch_sim.types import Prompts
    >>> one = np.ones((1, 1), np.int32)
    >>> rollout = Rollout(Prompts(one, one), one, one, np.log([[0.5]]))
    >>> student, teacher = np.log([[[0.5, 0.5]]]), np.log([[[0.25, 0.75]]])
    >>> round(float(reverse_kl(student, teacher, rollout, np.ones((1, 1)))[0]), 4)
    0.1438

    Source: Agarwal et al., "On-policy distillation of language models" (ICLR 2024).
    """
    mask_BN = rollout.mask_BN
    student_BNV, teacher_BNV = _logprobs(student_logits_BNV, teacher_logits_BNV, mask_BN)
    kl_BN = divergences.reverse_kl(student_BNV, teacher_BNV)
    return masked_mean(on_mask(weights_BN, mask_BN) * kl_BN, mask_BN), {}


def sampled_reverse_kl(
    student_logits_BNV: Array, teacher_logits_BNV: Array, rollout: Rollout, weights_BN: Array
) -> tuple[Array, dict[str, Array]]:
    """One-sample distillation loss, -sum_t m w A_t log s(y_t) / sum_t m: reverse KL as advantage.

    A_t = stop_gradient(log q(y_t) - log s(y_t)). For y_t ~ s the expected gradient is that of J at
    the given prefixes, sum_v s(v) (log s(v) - log q(v)) grad log s(v); the *value* of this loss is
    not J and means nothing by itself. Under y_t ~ mu it needs w_t = s(y_t) / mu(y_t).

    The student's log-probability in A_t is recomputed here, so it is the trainer policy's.

    Args:
        student_logits_BNV: ``[B, N, V]``, differentiated.
        teacher_logits_BNV: ``[B, N, V]``, constant.
        rollout: tokens and mask.
        weights_BN: correction weights.

    Returns:
        The loss and ``advantage_mean`` (minus a one-sample estimate of KL(s || q)) and
        ``advantage_abs``, token means.

    >>> import numpy as np
    >>> from mismatch_sim.types import Prompts
    >>> one = np.ones((1, 1), np.int32)
    >>> rollout = Rollout(Prompts(one, one), one, one, np.log([[0.5]]))
    >>> student, teacher = np.log([[[0.5, 0.5]]]), np.log([[[0.25, 0.75]]])
    >>> loss, scalars = sampled_reverse_kl(student, teacher, rollout, np.ones((1, 1)))
    >>> round(float(loss), 4), round(float(scalars["advantage_mean"]), 4)
    (0.281, 0.4055)

    Source: Lu and Thinking Machines Lab, "On-policy distillation" (2025).
    """
    mask_BN = rollout.mask_BN
    student_BNV, teacher_BNV = _logprobs(student_logits_BNV, teacher_logits_BNV, mask_BN)
    student_BN = take(student_BNV, rollout.tokens_BN)
    advantage_BN = sampled_advantage(take(teacher_BNV, rollout.tokens_BN), student_BN)
    loss_BN = -on_mask(weights_BN, mask_BN) * advantage_BN * student_BN
    scalars = {
        "advantage_mean": masked_mean(advantage_BN, mask_BN),
        "advantage_abs": masked_mean(ops.xp_of(loss_BN).abs(advantage_BN), mask_BN),
    }
    return masked_mean(loss_BN, mask_BN), scalars


def sampled_advantage(teacher_logprobs_BN: Array, student_logprobs_BN: Array) -> Array:
    """A_t = log q(y_t) - log s(y_t), a constant for differentiation.

    Which log s(y_t) goes in is the caller's choice: recomputed by the trainer, or the one recorded
    while generating (cheaper, and off by the mismatch).

    >>> import numpy as np
    >>> round(float(sampled_advantage(np.log(0.75), np.log(0.5))), 4)
    0.4055
    """
    return ops.stop_gradient(teacher_logprobs_BN - student_logprobs_BN)


def cross_entropy(
    student_logits_BNV: Array, teacher_logits_BNV: Array, rollout: Rollout, weights_BN: Array
) -> tuple[Array, dict[str, Array]]:
    """Negative log-likelihood of the rollout's tokens, -sum_t m w log s(y_t) / sum_t m.

    Supervised learning: the tokens are the target and the teacher is ignored. It trains the
    built-in checkpoints. Its true objective is the forward KL(p || s) to whoever wrote the tokens,
    up to that writer's entropy.

    >>> import numpy as np
    >>> from mismatch_sim.types import Prompts
    >>> one = np.ones((1, 1), np.int32)
    >>> rollout = Rollout(Prompts(one, one), one, one, np.log([[0.5]]))
    >>> logits = np.log([[[0.75, 0.25]]])
    >>> round(float(cross_entropy(logits, logits, rollout, np.ones((1, 1)))[0]), 4)
    1.3863
    """
    mask_BN = rollout.mask_BN
    student_BNV = log_softmax(on_mask(student_logits_BNV, mask_BN[..., None]))
    nll_BN = -take(student_BNV, rollout.tokens_BN)
    return masked_mean(on_mask(weights_BN, mask_BN) * nll_BN, mask_BN), {}


def _logprobs(student_BNV: Array, teacher_BNV: Array, mask_BN: Array) -> tuple[Array, Array]:
    """Log-probabilities of both; off the mask logits are 0 first, for 0 * NaN poisons gradients."""
    mask_BN1 = mask_BN[..., None]
    return log_softmax(on_mask(student_BNV, mask_BN1)), log_softmax(on_mask(teacher_BNV, mask_BN1))

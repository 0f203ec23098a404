"""What a step reports: mismatch of mu from pi, verl's ``rollout_corr/*`` numbers, distillation KL.

One array function per question, compiled as one program on JAX. Each takes logits that the one
scorer made on the rollout's own prefixes (temperature applied) and returns three dicts: *scalars*
for the log, *rows* ``[B]`` for the bootstrap over prompts, *positions* ``[N]`` for prefix analysis.

Exact numbers compare the two *scored* policies. Sampled ones (k1, k2, k3, ``rollout_corr/*``) take
the log-probability *recorded* while generating, as production systems must; the distance between
the recorded and the rescored one is ``mismatch/sampler_gap``, and E[k1] = D - gap.

``docs/metrics.md`` lists every tag with its expectation and its trap. Left out: chi2 and effective
sample sizes, which come with the weights, and intervals, which are host code (``stats``).
"""

from __future__ import annotations

import math

from mismatch_sim import ops
from mismatch_sim.divergences import (
    by_position,
    entropy,
    masked_mean,
    on_mask,
    sampled_estimators,
    sequence_means,
    sequence_sums,
    token_divergences,
    token_logprobs,
)
from mismatch_sim.types import Array, Rollout

Scalars = dict[str, Array]


@ops.jit
def mismatch_metrics(
    rollout_logits_BNV: Array, trainer_logits_BNV: Array, rollout: Rollout
) -> tuple[Scalars, dict[str, Array], dict[str, Array]]:
    """Mismatch KL(mu || pi) and its relatives on tokens y ~ mu; D = sum m KL / sum m.

    Args:
        rollout_logits_BNV: mu's logits, rescored, hooks applied; ``[B, N, V]``.
        trainer_logits_BNV: pi's logits from the same scorer.
        rollout: the tokens, their mask and their recorded log-probabilities.

    Returns:
        scalars: tags ``mismatch/*`` and ``rollout_corr/*``, 0-d.
        rows: ``kl_sum`` (exact KL summed over the response) and ``tokens``, ``[B]``; the ratio of
            their sums is D.
        positions: ``kl``, ``kl_reverse``, ``tv``, ``[N]``.

    >>> import numpy as np
    >>> from mismatch_sim.types import Prompts
    >>> one = np.ones((1, 1), np.int32)
    >>> rollout = Rollout(Prompts(one, one), one, one, np.log([[0.5]]))
    >>> scalars, _, _ = mismatch_metrics(np.log([[[0.5, 0.5]]]), np.log([[[0.75, 0.25]]]), rollout)
    >>> [round(float(scalars[f"mismatch/{tag}"]), 4) for tag in ("kl_exact", "k1", "k3")]
    [0.1438, 0.6931, 0.1931]
    """
    mask_BN, tokens_BN = rollout.mask_BN, rollout.tokens_BN
    exact = token_divergences(rollout_logits_BNV, trainer_logits_BNV)
    recorded_BN = on_mask(rollout.logprobs_BN, mask_BN)
    rescored_BN = on_mask(token_logprobs(rollout_logits_BNV, tokens_BN), mask_BN)
    trainer_BN = on_mask(token_logprobs(trainer_logits_BNV, tokens_BN), mask_BN)
    k1, k2, k3 = sampled_estimators(recorded_BN, trainer_BN)

    xp = ops.xp_of(mask_BN)
    gap_BN = rescored_BN - recorded_BN
    tokens_B = sequence_sums(xp.ones_like(k1), mask_BN)
    mean_length = xp.mean(tokens_B)
    means = {
        "kl_exact": exact.kl,
        "kl_reverse": exact.kl_reverse,
        "js": exact.js,
        "tv": exact.tv,
        "uncovered_mass": exact.uncovered_mass,
        "entropy": exact.entropy,
        "k1": k1,
        "k2": k2,
        "k3": k3,
        "logprob_abs_diff": xp.abs(k1),
        "sampler_gap": gap_BN,
        "sampler_gap_abs": xp.abs(gap_BN),
    }
    scalars = {f"mismatch/{tag}": masked_mean(x_BN, mask_BN) for tag, x_BN in means.items()}
    scalars["mismatch/seq_kl"] = scalars["mismatch/kl_exact"] * mean_length
    scalars["mismatch/length_mean"] = mean_length
    scalars |= rollout_corr(recorded_BN, trainer_BN, mask_BN)
    rows = {"kl_sum": sequence_sums(exact.kl, mask_BN), "tokens": tokens_B}
    positions = {
        name: by_position(getattr(exact, name), mask_BN) for name in ("kl", "kl_reverse", "tv")
    }
    return scalars, rows, positions


def rollout_corr(recorded_BN: Array, trainer_BN: Array, mask_BN: Array) -> Scalars:
    """verl's off-policy metrics, same names and definitions, on tokens y ~ mu.

    ``kl`` and ``k3_kl`` are token means; the perplexities are means over *sequences* of a function
    of the sequence's mean log-probability, so short responses weigh more than in D. k3 is written
    with expm1 (verl subtracts from exp and loses float32 digits). Rows without a token are no
    sequences and are left out.

    Args:
        recorded_BN: log-probability of each token as recorded while generating.
        trainer_BN: log-probability of the same token under the trainer policy.
        mask_BN: response mask.

    >>> import numpy as np
    >>> out = rollout_corr(np.log([[0.5, 0.5]]), np.log([[0.25, 0.5]]), np.ones((1, 2)))
    >>> [round(float(out[f"rollout_corr/{tag}"]), 4) for tag in ("kl", "rollout_ppl", "ppl_ratio")]
    [0.3466, 2.0, 1.4142]

    Source: verl, ``verl/trainer/ppo/rollout_corr_helper.py`` (definitions only).
    """
    xp = ops.xp_of(recorded_BN, trainer_BN, mask_BN)
    k1, _, k3 = sampled_estimators(recorded_BN, trainer_BN)
    is_sequence = xp.any(xp.astype(mask_BN, xp.bool), axis=-1)
    rollout_B = -sequence_means(recorded_BN, mask_BN)
    trainer_B = -sequence_means(trainer_BN, mask_BN)
    diff_B = trainer_B - rollout_B
    means = {
        "training_ppl": xp.exp(trainer_B),
        "training_log_ppl": trainer_B,
        "rollout_ppl": xp.exp(rollout_B),
        "rollout_log_ppl": rollout_B,
        "log_ppl_diff": diff_B,
        "log_ppl_abs_diff": xp.abs(diff_B),
        "ppl_ratio": xp.exp(diff_B),
    }
    values = {tag: masked_mean(x_B, is_sequence) for tag, x_B in means.items()}
    values["kl"] = masked_mean(k1, mask_BN)
    values["k3_kl"] = masked_mean(k3, mask_BN)
    values["log_ppl_diff_max"] = xp.max(xp.where(is_sequence, diff_B, -math.inf))
    values["log_ppl_diff_min"] = xp.min(xp.where(is_sequence, diff_B, math.inf))
    return {f"rollout_corr/{tag}": value for tag, value in values.items()}


@ops.jit
def distill_metrics(
    student_logits_BNV: Array, teacher_logits_BNV: Array, rollout: Rollout
) -> tuple[Scalars, dict[str, Array]]:
    """Distillation KL in both directions on the rollout's prefixes, token-weighted.

    Args:
        student_logits_BNV: the student (trainer policy, or whoever is evaluated), ``[B, N, V]``.
        teacher_logits_BNV: the teacher on the same prefixes.
        rollout: whose prefixes and mask; the tokens' own log-probabilities play no part.

    Returns:
        scalars: ``distill/reverse_kl`` = KL(student || teacher), ``distill/forward_kl`` =
            KL(teacher || student), ``distill/entropy`` (student), ``distill/teacher_entropy``.
        rows: ``reverse_kl_sum`` and ``tokens``, ``[B]``.

    >>> import numpy as np
    >>> from mismatch_sim.types import Prompts
    >>> one = np.ones((1, 1), np.int32)
    >>> rollout = Rollout(Prompts(one, one), one, one, np.log([[0.5]]))
    >>> scalars, _ = distill_metrics(np.log([[[0.5, 0.5]]]), np.log([[[0.75, 0.25]]]), rollout)
    >>> [round(float(scalars[f"distill/{tag}"]), 4) for tag in ("reverse_kl", "entropy")]
    [0.1438, 0.6931]
    """
    mask_BN = rollout.mask_BN
    exact = token_divergences(student_logits_BNV, teacher_logits_BNV)
    means = {
        "reverse_kl": exact.kl,
        "forward_kl": exact.kl_reverse,
        "entropy": exact.entropy,
        "teacher_entropy": entropy(teacher_logits_BNV),
    }
    scalars = {f"distill/{tag}": masked_mean(x_BN, mask_BN) for tag, x_BN in means.items()}
    ones_BN = ops.xp_of(exact.kl).ones_like(exact.kl)
    rows = {
        "reverse_kl_sum": sequence_sums(exact.kl, mask_BN),
        "tokens": sequence_sums(ones_BN, mask_BN),
    }
    return scalars, rows

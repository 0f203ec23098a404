"""What the student minimises: the one place where objectives are named.

An objective is a module-level function

    loss(student_logits_BNV, teacher_logits_BNV, rollout, weights_BN) -> (loss, scalars)

that a backend differentiates in its first argument. Logits are float32 at the task's temperature,
on the rollout's own prefixes; ``weights_BN`` are the correction's weights (ones where there is
none). To add one, write the function and give it a name below; nothing else changes.

Left out: a class or a plugin registry. A loss is a function.
"""

from __future__ import annotations

from mismatch_sim.errors import did_you_mean
from mismatch_sim.objectives import opd
from mismatch_sim.types import Loss

OBJECTIVES: dict[str, Loss] = {
    "reverse_kl": opd.reverse_kl,
    "sampled_reverse_kl": opd.sampled_reverse_kl,
    "cross_entropy": opd.cross_entropy,
}


def get(name: str) -> Loss:
    """The objective called ``name``.

    Raises:
        ValueError: there is none; the message names what there is.

    >>> get("reverse_kl").__name__
    'reverse_kl'
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    hint = did_you_mean(name, OBJECTIVES)
    raise ValueError(f"objective={name!r} is not one of {', '.join(OBJECTIVES)}{hint}")

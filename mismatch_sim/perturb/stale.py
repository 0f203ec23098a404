"""Staleness: the rollout policy runs on the weights of k updates ago.

The ring of snapshots is operator state, so it is saved, restored and composed like any other. It is
a Python tuple of parameter dicts, not one stacked array: a snapshot is then free in JAX, where
arrays never change, and a copy where they do, and k appears in no compiled program.

Left out: staleness that varies from token to token within a response (in-flight weight updates).
"""

from __future__ import annotations

from typing import NamedTuple

from mismatch_sim import ops
from mismatch_sim.perturb.base import Perturbation
from mismatch_sim.types import Key, Params


class Ring(NamedTuple):
    """The last k + 1 published versions, oldest first, and the step of the newest."""

    snapshots: tuple[Params, ...]
    step: int


def stale(k: int) -> Perturbation:
    """Publish exactly the weights of step t - k; the initial ones while t < k.

    ``publish`` takes a snapshot for every step it is called at, that is for every weight version;
    called again at the same step, it replaces that snapshot.

    Args:
        k: lag in optimiser updates, >= 0.

    Raises:
        ValueError: k is negative or not an integer.

    >>> import numpy as np
    >>> op, live = stale(2), {"w": np.zeros(1)}
    >>> state, seen = op.init(live), []
    >>> for step in range(5):
    ...     rollout, state = op.publish(None, step, live, state)
    ...     seen.append(rollout["w"].item())
    ...     live["w"] += 1.0  # an in-place update must not reach the ring
    >>> seen
    [0.0, 0.0, 0.0, 1.0, 2.0]
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"stale: k must be an integer >= 0, got {k!r}")

    def init(params: Params) -> Ring:
        return Ring((_snapshot(params),) * (k + 1), -1)

    def publish(rng: Key, step: int, params: Params, state: Ring) -> tuple[Params, Ring]:
        kept = state.snapshots[:-1] if step == state.step else state.snapshots[1:]
        ring = (*kept, _snapshot(params))
        return ring[0], Ring(ring, step)

    return Perturbation("stale", init, publish)


def _snapshot(params: Params) -> Params:
    return {name: ops.snapshot(w) for name, w in params.items()}

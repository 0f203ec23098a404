"""Schedules: a strength or a learning rate as a function of the step, in plain Python.

A schedule is frozen data with a canonical text, so it survives flags, JSON and hashes. It is
evaluated on the host into a short table; programs read the table, so no framework appears here and
no schedule is ever compiled. Past its last step a schedule keeps its last value. Making one raises
``ValueError`` if a number is not finite or a step count is too small.

Left out: schedules of anything but the step, and composition (``warmup_cosine`` is the one joint).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from mismatch_sim.errors import check_real, check_whole


@dataclass(frozen=True)
class Linear:
    """From ``start`` at step 0 to ``end`` at step ``steps``, then constant.

    >>> [linear(0.0, 0.2, 4)(t) for t in (0, 2, 4, 9)]
    [0.0, 0.1, 0.2, 0.2]
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check(self, reals=("start", "end"), whole="steps", low=1)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class Cosine:
    """From ``start`` at step 0 to ``end`` at step ``steps`` along half a cosine, then constant.

    >>> round(cosine(1.0, 0.0, 10)(5), 6)
    0.5
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check(self, reals=("start", "end"), whole="steps", low=1)

    def __call__(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Onset:
    """0 before step ``begin``, then ``value`` (a step function: a fault that sets in).

    >>> [onset(0.3, 5)(t) for t in (0, 4, 5, 6)]
    [0.0, 0.0, 0.3, 0.3]
    """

    value: float
    begin: int

    def __post_init__(self) -> None:
        _check(self, reals=("value",), whole="begin", low=0)

    def __call__(self, step: int) -> float:
        return self.value if step >= self.begin else 0.0

    @property
    def steps(self) -> int:
        return self.begin


def _check(schedule: Any, reals: tuple[str, ...], whole: str, low: int) -> None:
    """Validate the fields and store them as float and int, so that equal schedules hash equal."""
    kind = type(schedule).__name__.lower()
    for name in reals:
        value = check_real(f"{kind}: {name}", getattr(schedule, name))
        object.__setattr__(schedule, name, value)
    value = check_whole(f"{kind}: {whole}", getattr(schedule, whole), low=low)
    object.__setattr__(schedule, whole, value)


Schedule = Linear | Cosine | Onset
Strength = float | Linear | Cosine | Onset

SCHEDULES: dict[str, Any] = {"linear": Linear, "cosine": Cosine, "onset": Onset}
linear, cosine, onset = Linear, Cosine, Onset


def to_text(value: Strength) -> str:
    """The canonical text of a number or a schedule; ``perturb.spec`` parses it back.

    >>> to_text(Linear(0.0, 0.01, 100)), to_text(0.01)
    ('linear(start=0.0, end=0.01, steps=100)', '0.01')
    """
    if isinstance(value, int | float):
        return repr(value)
    arguments = ", ".join(f"{f.name}={getattr(value, f.name)!r}" for f in fields(value))
    return f"{type(value).__name__.lower()}({arguments})"


def table(value: Strength) -> list[float]:
    """Values at steps 0, 1, ... up to where they stop changing; one value for a number.

    >>> table(0.5), table(Linear(0.0, 1.0, 2))
    ([0.5], [0.0, 0.5, 1.0])
    """
    if isinstance(value, int | float):
        return [float(value)]
    return [value(t) for t in range(value.steps + 1)]


def warmup_cosine(step: int, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Learning rate: linear to ``peak`` over ``warmup`` steps, then a cosine to ``floor`` * peak.

    Step 0 already has peak / warmup, so no update is wasted, and step ``total`` reaches the floor.

    >>> [round(warmup_cosine(t, 1.0, 2, 10), 3) for t in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * share)))

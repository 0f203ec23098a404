"""Operators as data: text <-> frozen objects <-> JSON, and from objects to operators.

One frozen dataclass per operator; its fields are the arguments of the operator's factory. A stack
of them is what a flag, a config file, a sweep axis and a run's hash all hold, so there is exactly
one text per stack: arguments by keyword, defaults left out except for the first, floats by
``repr``, no ``identity`` among others. The text is read through Python's ``ast`` and never
evaluated: operators, schedules, numbers, quoted strings, and ``|`` from first to last.

    >>> print(parse("stale(4) | identity() | weight_noise(linear(0, 0.01, 100), exclude='norm')"))
    stale(k=4)|weight_noise(sigma=linear(start=0.0, end=0.01, steps=100), exclude='norm')

No array is imported here, so a command line answers at once; ``build`` imports the factory.

Left out: arithmetic and variables in the text (a sweep does that in Python).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mismatch_sim import schedules
from mismatch_sim.errors import (
    check_choice,
    check_pattern,
    check_real,
    check_switch,
    check_whole,
    shown,
)
from mismatch_sim.perturb import grammar
from mismatch_sim.perturb.grammar import check_strength
from mismatch_sim.schedules import Strength

if TYPE_CHECKING:
    from mismatch_sim.perturb.base import Perturbation

SCHEMES = ("int8",)
"""Number formats that ``fake_quant`` knows; the only list of them."""

RESAMPLE = ("rollout", "version", "never")
"""How often weight noise is drawn anew."""


@dataclass(frozen=True)
class Operator:
    """What all operators share: their text and their JSON."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return grammar.text_of(self)

    def to_json(self) -> dict[str, Any]:
        """``{"name": ..., argument: value}`` with every argument, nested the same way."""
        return grammar.to_dict(self)

    def build(self) -> Perturbation:
        """The operator itself; abstract, as every operator imports a factory of its own."""
        raise TypeError(f"{type(self).__name__} is no operator: it defines no build()")

    def _store(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Identity(Operator):
    """Changes nothing; a stack drops it."""

    name: ClassVar[str] = "identity"

    def build(self) -> Perturbation:
        from mismatch_sim.perturb import base

        return base.identity()


@dataclass(frozen=True)
class Stale(Operator):
    """The weights of ``k`` updates ago."""

    name: ClassVar[str] = "stale"
    k: int

    def __post_init__(self) -> None:
        self._store(k=check_whole("stale: k", self.k, low=0))
        if self.k > 10_000:  # every update of lag is a snapshot in memory
            raise ValueError(f"stale: k must be an integer from 0 to 10000, got {shown(self.k)}")

    def build(self) -> Perturbation:
        from mismatch_sim.perturb import stale

        return stale.stale(self.k)


@dataclass(frozen=True)
class FakeQuant(Operator):
    """Weights rounded to a number format."""

    name: ClassVar[str] = "fake_quant"
    scheme: str = "int8"

    def __post_init__(self) -> None:
        check_choice("fake_quant: scheme", self.scheme, SCHEMES)

    def build(self) -> Perturbation:
        from mismatch_sim.perturb import quant

        return quant.fake_quant(self.scheme)


@dataclass(frozen=True)
class WeightNoise(Operator):
    """Gaussian noise on weights, of standard deviation ``sigma`` times each tensor's RMS."""

    name: ClassVar[str] = "weight_noise"
    sigma: Strength
    relative: bool = True
    resample: Literal["rollout", "version", "never"] = "rollout"
    include: str = ""
    exclude: str = ""

    def __post_init__(self) -> None:
        self._store(sigma=check_strength("weight_noise: sigma", self.sigma))
        check_switch("weight_noise: relative", self.relative)
        check_choice("weight_noise: resample", self.resample, RESAMPLE)
        check_pattern("weight_noise: include", self.include)
        check_pattern("weight_noise: exclude", self.exclude)

    def build(self) -> Perturbation:
        from mismatch_sim.perturb import noise

        return noise.weight_noise(
            self.sigma, self.relative, self.resample, self.include, self.exclude
        )


@dataclass(frozen=True)
class LogitNoise(Operator):
    """Gaussian noise on logits, of standard deviation ``sigma`` nats."""

    name: ClassVar[str] = "logit_noise"
    sigma: Strength

    def __post_init__(self) -> None:
        self._store(sigma=check_strength("logit_noise: sigma", self.sigma))

    def build(self) -> Perturbation:
        from mismatch_sim.perturb import noise

        return noise.logit_noise(self.sigma)


@dataclass(frozen=True)
class Masked(Operator):
    """``op`` on the parameters whose names match, by regular expression."""

    name: ClassVar[str] = "masked"
    op: Operator
    include: str = ""
    exclude: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.op, Operator):
            raise ValueError(f"masked: op must be one operator, got {shown(self.op)}")
        if isinstance(self.op, Identity | LogitNoise):
            raise ValueError(f"masked: op must touch weights, got {self.op}")
        check_pattern("masked: include", self.include)
        check_pattern("masked: exclude", self.exclude)

    def build(self) -> Perturbation:
        from mismatch_sim.perturb import base

        return base.masked(self.op.build(), self.include, self.exclude)


@dataclass(frozen=True)
class Custom(Operator):
    """An operator of the user's own: a function in an importable module, found in this folder too.

    ``custom('my_ops:head_scale', 0.9)`` calls ``head_scale(0.9)`` of ``my_ops.py``; without a value
    the function is called without arguments.
    """

    name: ClassVar[str] = "custom"
    factory: str
    value: Strength | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(self.factory)):
            raise ValueError(
                f"custom: factory must be 'module:function', got {shown(self.factory)}"
            )
        if self.value is not None and not isinstance(self.value, schedules.Schedule):
            self._store(value=check_real("custom: value", self.value))

    def load(self) -> Any:
        """The factory; the module may lie in the current folder.

        Raises:
            ValueError: no such module or function.
        """
        module, function = self.factory.split(":")
        sys.path.insert(0, "")
        try:
            return getattr(importlib.import_module(module), function)
        except Exception as error:  # whatever importing the user's own code raises
            raise ValueError(f"custom: {self.factory!r} cannot be imported: {error}") from None
        finally:
            sys.path.remove("")

    def build(self) -> Perturbation:
        factory = self.load()
        try:
            made = factory() if self.value is None else factory(self.value)
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(f"custom: {self.factory!r} cannot be called so: {error}") from None
        from mismatch_sim.perturb.base import Perturbation

        if not isinstance(made, Perturbation):
            raise ValueError(
                f"custom: {self.factory!r} must return a Perturbation, got {shown(made)}"
            )
        return made


OPERATORS: dict[str, type[Operator]] = {
    kind.name: kind
    for kind in (Identity, Stale, FakeQuant, WeightNoise, LogitNoise, Masked, Custom)
}

_TABLE: dict[str, Any] = {**OPERATORS, **schedules.SCHEDULES}


@dataclass(frozen=True)
class Stack:
    """Operators in the order in which they act; the empty stack is the identity.

    >>> stack = Stack((Identity(), Stale(2), Stack((LogitNoise(1),))))
    >>> print(stack), print(Stack())
    stale(k=2)|logit_noise(sigma=1.0)
    identity()
    (None, None)
    """

    ops: tuple[Any, ...] = ()
    """Operators; stacks among them are spliced in."""

    def __post_init__(self) -> None:
        flat: list[Operator] = []
        for op in self.ops:
            if not isinstance(op, Operator | Stack):
                raise ValueError(f"must be operators ({', '.join(OPERATORS)}), got {shown(op)}")
            flat.extend(op.ops if isinstance(op, Stack) else (op,))
        kept = tuple(op for op in flat if not isinstance(op, Identity))
        object.__setattr__(self, "ops", kept)

    def __str__(self) -> str:
        return "|".join(map(str, self.ops)) or "identity()"

    def to_json(self) -> list[dict[str, Any]]:
        """One dict per operator, all arguments spelled out; ``from_json`` reads it back."""
        return [op.to_json() for op in self.ops]

    def build(self) -> Perturbation:
        """The operators, chained into one."""
        from mismatch_sim.perturb import base

        return base.chain(*(op.build() for op in self.ops))


def parse(text: str, setting: str = "perturb") -> Stack:
    """The stack that ``text`` describes.

    Args:
        text: such as ``"stale(4)|masked(weight_noise(0.01), include='mlp')"``.
        setting: what the user knows it by; it starts every message.

    Raises:
        ValueError: unreadable text, an unknown operator or argument, or a value out of bounds.

    >>> parse("stale(4)") == Stack((Stale(k=4),))
    True
    """
    try:
        return Stack(tuple(grammar.read(text, _TABLE)))
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def from_json(data: list | str, setting: str = "perturb") -> Stack:
    """The stack that ``to_json`` wrote, as a list or as JSON text; operator text does as well.

    Raises:
        ValueError: as ``parse``.

    >>> from_json(parse("fake_quant('int8')").to_json()) == from_json("fake_quant()")
    True
    """
    if isinstance(data, str) and not data.lstrip().startswith("["):
        return parse(data, setting)
    try:
        items = json.loads(data) if isinstance(data, str) else data
        if not isinstance(items, list | tuple):
            raise ValueError(f"must be text or a list of operators, got {shown(items)}")
        return Stack(tuple(grammar.from_dict(item, _TABLE) for item in items))
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def max_staleness(stack: Stack) -> int:
    """The most updates by which published weights can lag; lags in a chain add up.

    >>> max_staleness(parse("stale(4)|masked(stale(2), 'mlp')|weight_noise(0.1)"))
    6
    """
    return sum(_lag(op) for op in stack.ops)


def _lag(op: Operator) -> int:
    if isinstance(op, Masked):
        return _lag(op.op)
    return op.k if isinstance(op, Stale) else 0

"""What a perturbation operator is, and how operators compose.

An operator turns the trainer policy into the rollout policy. It is a NamedTuple of pure functions;
state goes in and comes out, so jit, resume and composition come for free (the way of optax). An
absent hook is ``None`` and is skipped when the program is built: the identity operator is the
unperturbed code path itself, and its mismatch is exactly zero.

Two rules keep compiled programs few. Strengths live in the *state* (``init`` closes over them, the
hooks read them), so changing one compiles nothing. And hooks are interned: a factory makes them
behind ``functools.cache``, keyed by the settings that change the program, so that two operators of
one structure share the very same function objects and hence one compiled program.

Left out: base classes and a plugin registry. A new operator is a function returning this tuple.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from mismatch_sim import rng as rng_lib
from mismatch_sim.types import Array, Hooks, Key, Params, Policy

State = Any


def _stateless(params: Params) -> State:
    return ()


class Perturbation(NamedTuple):
    """One operator: trainer policy -> rollout policy.

    ``publish(rng, step, params, state) -> (rollout_params, state)`` runs once per weight version
    (after every update); the three forward hooks run inside the rollout policy's forward pass and
    once more when its responses are scored. ``rng`` of every hook is already folded with the
    operator's name and its occurrence in the chain, and, in the forward, with the step.
    """

    name: str
    init: Callable[[Params], State] = _stateless
    publish: Callable[[Key, Any, Params, State], tuple[Params, State]] | None = None
    on_linear_input: Callable | None = None
    on_kv: Callable | None = None
    on_logits: Callable | None = None

    def hooks(self) -> Hooks:
        """The forward hooks alone, as a backend takes them."""
        return Hooks(self.on_linear_input, self.on_kv, self.on_logits)


def identity() -> Perturbation:
    """The operator that changes nothing: mu = pi, so D is exactly 0.

    >>> identity().publish is None and identity().hooks() == Hooks()
    True
    """
    return Perturbation("identity")


def publish(
    op: Perturbation, rng: Key, step: int, params: Params, state: State
) -> tuple[Params, State]:
    """The weights that the rollout policy sees at ``step``; ``params`` if ``op`` has no say."""
    if op.publish is None:
        return params, state
    return op.publish(rng, step, params, state)


def chain(*ops: Perturbation) -> Perturbation:
    """Operators one after the other, as one operator; the first sees the trainer's weights.

    ``chain(f, g)`` publishes g(f(params)) and hands logits through f's hook, then g's. Each member
    has its own state and its own key, folded with its name and its occurrence among operators of
    that name, so adding another operator moves no member's noise. A chain inside a chain is
    flattened, hence associative to the bit. ``chain()`` is the identity.
    """
    flat = [m for op in ops for m, _ in members_of(op) if m != identity()]
    members = tuple(flat)
    labels = tuple((m.name, sum(n.name == m.name for n in flat[:i])) for i, m in enumerate(flat))

    def init(params: Params) -> State:
        return tuple(m.init(params) for m in members)

    init.members = tuple(zip(members, labels, strict=True))  # type: ignore[attr-defined]

    def publish_all(rng: Key, step: int, params: Params, state: State) -> tuple[Params, State]:
        states = []
        for member, label, member_state in zip(members, labels, state, strict=True):
            key = rng_lib.fold(rng, *label)
            params, member_state = publish(member, key, step, params, member_state)
            states.append(member_state)
        return params, tuple(states)

    return Perturbation(
        "chain",
        init,
        publish_all if any(m.publish for m in members) else None,
        _chain_linear_input(labels, tuple(m.on_linear_input for m in members)),
        _chain_kv(labels, tuple(m.on_kv for m in members)),
        _chain_logits(labels, tuple(m.on_logits for m in members)),
    )


def members_of(op: Perturbation) -> tuple[tuple[Perturbation, tuple[str, int]], ...]:
    """The operators a chain is made of, each with its key label (name, occurrence)."""
    return getattr(op.init, "members", ((op, (op.name, 0)),))


def rollout_policy(op: Perturbation, published: Params, state: State, rng: Key) -> Policy:
    """The rollout policy: published weights, forward hooks, and the part of the state they read.

    A ring of snapshots is no hook's business: handed to a compiled forward pass it would make one
    program per lag.
    """
    hooks = op.hooks()
    if not any(hooks):
        return Policy(published)
    if op.name == "chain":
        state = tuple(
            s if any(member.hooks()) else ()
            for (member, _), s in zip(members_of(op), state, strict=True)
        )
    return Policy(published, hooks, state, rng)


@functools.cache
def _chain_linear_input(labels: tuple, hooks: tuple) -> Callable | None:
    if not any(hooks):
        return None

    def on_linear_input(rng: Key, name: str, x: Array, mask: Array, state: State) -> Array:
        for hook, label, member_state in zip(hooks, labels, state, strict=True):
            if hook:
                x = hook(rng_lib.fold(rng, *label), name, x, mask, member_state)
        return x

    return on_linear_input


@functools.cache
def _chain_kv(labels: tuple, hooks: tuple) -> Callable | None:
    if not any(hooks):
        return None

    def on_kv(
        rng: Key, layer: int, k: Array, v: Array, mask: Array, state: State
    ) -> tuple[Array, Array]:
        for hook, label, member_state in zip(hooks, labels, state, strict=True):
            if hook:
                k, v = hook(rng_lib.fold(rng, *label), layer, k, v, mask, member_state)
        return k, v

    return on_kv


@functools.cache
def _chain_logits(labels: tuple, hooks: tuple) -> Callable | None:
    if not any(hooks):
        return None

    def on_logits(rng: Key, logits: Array, state: State, row: Array, position: Array) -> Array:
        for hook, label, member_state in zip(hooks, labels, state, strict=True):
            if hook:
                logits = hook(rng_lib.fold(rng, *label), logits, member_state, row, position)
        return logits

    return on_logits


def select(params: Params, include: str = "", exclude: str = "", min_ndim: int = 0) -> list[str]:
    """Names of the parameters an operator touches, by regular expression (``re.search``).

    Args:
        params: name -> array.
        include: keep names that match; empty keeps all of at least ``min_ndim`` dimensions.
        exclude: then drop names that match; empty drops none.
        min_ndim: only applies while ``include`` is empty: a pattern says exactly what it means.

    Raises:
        ValueError: nothing is selected, or ``exclude`` matches nothing that ``include`` kept: a
            pattern that selects nothing is a misspelt pattern.
    """
    names = [
        n for n, w in params.items() if (re.search(include, n) if include else w.ndim >= min_ndim)
    ]
    if not names:
        raise ValueError(_no_match("include", include, params))
    kept = [n for n in names if not (exclude and re.search(exclude, n))]
    if exclude and len(kept) == len(names):
        raise ValueError(_no_match("exclude", exclude, dict.fromkeys(names)))
    if not kept:
        raise ValueError(
            f"exclude={exclude!r} drops every parameter that include={include!r} keeps"
        )
    return kept


def _no_match(setting: str, pattern: str, names: dict) -> str:
    some = list(names)
    listing = ", ".join(some[:4]) + (f", ... ({len(some)} in all)" if len(some) > 4 else "")
    return f"{setting}={pattern!r} matches no parameter; there are {listing}"


def masked(op: Perturbation, include: str = "", exclude: str = "") -> Perturbation:
    """``op`` on the parameters that match, the others passed through; forward hooks unchanged.

    ``op`` keeps its own rule on top (weight noise touches matrices only, say), and its noise is the
    noise it would draw unmasked, since keys depend on parameter names alone.

    Raises:
        ValueError: at ``init``, if the patterns select nothing.
    """

    def init(params: Params) -> State:
        names = select(params, include, exclude)
        return op.init({n: params[n] for n in names})

    def publish_selected(rng: Key, step: int, params: Params, state: State) -> tuple[Params, State]:
        names = select(params, include, exclude)
        chosen, state = publish(op, rng, step, {n: params[n] for n in names}, state)
        return {**params, **chosen}, state

    if op.publish is None:
        raise ValueError(
            f"masked: {op.name} does not touch weights, so patterns mean nothing to it"
        )
    return op._replace(init=init, publish=publish_selected)

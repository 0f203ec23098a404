"""The ``xp`` fixture: one test, every framework, jitted too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

FRAMEWORKS = ("numpy", "array-api-strict", "torch", "jax", "jax-jit")


class Framework(NamedTuple):
    """How a test speaks to one framework: NumPy in, NumPy out."""

    name: str

    @property
    def has_float64(self) -> bool:
        return not self.name.startswith("jax")

    def array(self, x: Any) -> Any:
        """A NumPy array (or number) as an array of this framework."""
        if self.name == "array-api-strict":
            import array_api_strict

            return array_api_strict.asarray(np.asarray(x))
        if self.name == "torch":
            import torch

            torch.set_num_threads(1)
            return torch.as_tensor(np.array(x))
        if self.name.startswith("jax"):
            import jax.numpy

            return jax.numpy.asarray(x)
        return np.asarray(x)

    def call(self, fn: Callable, *args: Any, **static: Any) -> Any:
        """``fn`` on the arrays in ``args`` (any tree), jitted for jax-jit; the result in NumPy."""
        if self.name != "jax-jit":
            return tree_map(to_numpy, fn(*tree_map(self.array, args), **static))
        return tree_map(to_numpy, jitted(fn, **static)(*tree_map(self.array, args)))


@functools.cache
def jitted(fn: Callable, **static: Any) -> Callable:
    """One compiled program per function and static arguments, whichever tests share it."""
    import jax

    return jax.jit(lambda *args: fn(*args, **static))


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach() if hasattr(x, "detach") else x)


def tree_map(fn: Callable, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: tree_map(fn, v) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [tree_map(fn, v) for v in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return fn(tree)


@pytest.fixture(params=FRAMEWORKS)
def xp(request: pytest.FixtureRequest) -> Framework:
    return Framework(request.param)


@pytest.fixture
def compilations() -> Iterator[Any]:
    """``with compilations() as count``: how many programs JAX compiled inside (its own events)."""
    import contextlib

    import jax.monitoring

    seen: list[str] = []
    active = [False]

    def listen(event: str, duration: float, **tags: Any) -> None:
        if active[0] and event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    @contextlib.contextmanager
    def watch() -> Iterator[Callable[[], int]]:
        seen.clear()
        active[0] = True
        try:
            yield lambda: len(seen)
        finally:
            active[0] = False

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield watch
    jax.monitoring.unregister_event_duration_listener(listen)

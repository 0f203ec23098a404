"""The seam: the few things that NumPy, torch and JAX spell differently.

Everything else takes its namespace from its input (``xp = xp_of(x)``, array-api-compat) and is
written once. Only this file and ``backends/`` may name jax or torch (a test enforces it), and here
only lazily and by looking at arrays that already exist: a JAX run never imports torch, nor the
reverse.

Left out on purpose: autograd, model forwards, loops over tokens and optimisers; those own
parameters and belong to a backend.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from mismatch_sim.types import Array

_MASK = 0xFFFFFFFF


def framework(x: Array) -> str:
    """'jax', 'torch' or 'numpy': who made this array (traced JAX values included).

    >>> framework(np.zeros(2))
    'numpy'
    """
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].Array):
        return "jax"
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return "torch"
    return "numpy"


def xp_of(*arrays: Array) -> Any:
    """The array namespace of the arguments (array-api-compat); raises on a mix of frameworks."""
    return array_api_compat.array_namespace(*arrays, use_compat=None)


def as_float32(x: Array) -> Array:
    """Cast to float32 in any framework."""
    xp = xp_of(x)
    return xp.astype(x, xp.float32)


def to_numpy(x: Array) -> np.ndarray:
    """A NumPy copy or view on the host, detached from any gradient tape."""
    return x.detach().cpu().numpy() if framework(x) == "torch" else np.asarray(x)


def asarray_like(value: Any, like: Array) -> Array:
    """``value`` as an array of the framework (and device) of ``like``.

    32-bit words (keys) become int64 in torch, whose uint32 lacks arithmetic.
    """
    if framework(like) == "torch":
        import torch

        if isinstance(value, np.ndarray | np.generic) and value.dtype == np.uint32:
            value = value.astype(np.int64)
        return torch.as_tensor(value, device=like.device)
    return xp_of(like).asarray(value)


def snapshot(x: Array) -> Array:
    """What later updates of ``x`` cannot change: a copy, or ``x`` where arrays never change.

    JAX arrays are immutable; torch and NumPy update in place, and a ring of references to live
    weights would make staleness silently zero.
    """
    name = framework(x)
    if name == "torch":
        return x.detach().clone()
    return np.array(x, copy=True) if name == "numpy" else x


def stop_gradient(x: Array) -> Array:
    """``x`` as a constant for differentiation."""
    name = framework(x)
    if name == "jax":
        import jax

        return jax.lax.stop_gradient(x)
    return x.detach() if name == "torch" else x


def erfinv(x: Array) -> Array:
    """The inverse error function."""
    name = framework(x)
    if name == "jax":
        import jax

        return jax.scipy.special.erfinv(x)
    if name == "torch":
        import torch

        return torch.erfinv(x)
    import scipy.special

    return scipy.special.erfinv(x)


def exact_divide(x: Array, divisor: Array) -> Array:
    """``x / divisor``, correctly rounded, also under jit.

    XLA rewrites a division by a broadcast value into a multiplication by its reciprocal, which
    moves a third of the quotients by one ulp and flips codes at ties; a barrier on the broadcast
    divisor keeps the division.
    """
    if framework(x) == "jax":
        import jax

        jnp = jax.numpy
        divisor = jax.lax.optimization_barrier(jnp.broadcast_to(divisor, x.shape))
    return x / divisor


def fingerprint(x: Array) -> Array:
    """A 32-bit checksum of the bits of a float32 array: equal weights, equal number, any framework.

    The sum of its words modulo 2^32, as a scalar that ``rng.fold`` accepts.
    """
    name = framework(x)
    if name == "jax":
        import jax

        words = jax.lax.bitcast_convert_type(x.astype("float32"), "uint32")
        return words.sum(dtype="uint32")
    if name == "torch":
        import torch

        words = x.detach().to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
        return words.sum() & _MASK
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.asarray(bits.sum(dtype=np.uint64) & np.uint64(_MASK), dtype=np.uint32)


def map_slices(
    fn: Callable[..., tuple[Array, ...]], arrays: Sequence[Array], starts: Sequence[int], size: int
) -> tuple[Array, ...]:
    """``fn`` on slices ``[start, start + size)`` of the first axis, one after the other, stacked.

    One slice is in memory at a time, and in JAX one program serves all of them (``lax.map``): a
    Python loop would be unrolled, compile for minutes, and bound nothing.
    """
    if framework(arrays[0]) == "jax":
        import jax

        def at(start: Array) -> tuple[Array, ...]:
            return fn(*(jax.lax.dynamic_slice_in_dim(a, start, size) for a in arrays))

        return jax.lax.map(at, jax.numpy.asarray(starts))
    parts = [fn(*(a[start : start + size, ...] for a in arrays)) for start in starts]
    xp = xp_of(*arrays)
    return tuple(xp.stack(list(column)) for column in zip(*parts, strict=True))


def jit(fn: Callable) -> Callable:
    """``fn``, compiled by ``jax.jit`` when its array arguments are JAX arrays; as is otherwise.

    The compiled function is kept for the life of ``fn``: make ``fn`` once per *structure* (at
    module level, or behind ``functools.cache``) and pass what varies, strengths included, as
    arrays. Python numbers among the arguments are traced, so a new step or seed compiles nothing.
    """
    compiled: list[Callable] = []

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if "jax" not in sys.modules or not _any_jax(args):
            return fn(*args)
        if not compiled:
            compiled.append(sys.modules["jax"].jit(fn))
        return compiled[0](*args)

    return call


def _any_jax(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_any_jax(v) for v in tree.values())
    if isinstance(tree, tuple | list):
        return any(_any_jax(v) for v in tree)
    return framework(tree) == "jax"


# --- random words: jax.random where it is JAX, the same Threefry on integers elsewhere ----------


def fold_in(rng: Array, data: Any) -> Array:
    """Keys ``[..., 2]`` with integers folded in: ``jax.random.fold_in``, batched."""
    if framework(rng) == "jax" or framework(data) == "jax":
        import jax

        jnp = jax.numpy
        data = np.uint32(data & _MASK) if isinstance(data, int) else data
        rng, data = jnp.asarray(rng), jnp.asarray(data).astype("uint32")
        shape = jnp.broadcast_shapes(rng.shape[:-1], data.shape)
        flat_rng = jnp.broadcast_to(rng, (*shape, 2)).reshape(-1, 2)
        flat_data = jnp.broadcast_to(data, shape).reshape(-1)
        return jax.vmap(jax.random.fold_in)(flat_rng, flat_data).reshape(*shape, 2)
    if isinstance(data, int | np.integer) and isinstance(rng, np.ndarray) and rng.ndim == 1:
        return np.array(_threefry(int(rng[0]), int(rng[1]), 0, int(data) & _MASK), dtype=np.uint32)
    rng, data = _int64(rng, data), _int64(data, rng)
    xp = xp_of(rng, data)
    k0, k1, data = xp.broadcast_arrays(rng[..., 0], rng[..., 1], data & _MASK)
    return xp.stack(_threefry(k0, k1, data * 0, data), axis=-1)


def random_bits(rng: Array, count: int, bits: int = 32) -> Array:
    """The top ``bits`` bits of ``count`` words per key, ``[..., count]``: ``jax.random.bits``."""
    if framework(rng) == "jax":
        import jax

        flat = rng.reshape(-1, 2)
        words = jax.vmap(lambda k: jax.random.bits(k, (count,)))(flat)
        return words.reshape(*rng.shape[:-1], count) >> (32 - bits)
    rng = _int64(rng, rng)
    xp = xp_of(rng)
    counter = asarray_like(np.arange(count, dtype=np.int64), rng)
    k0, k1, counter = xp.broadcast_arrays(rng[..., 0:1], rng[..., 1:2], counter)
    a, b = _threefry(k0, k1, counter * 0, counter)
    return (a ^ b) >> (32 - bits)


def _int64(x: Any, like: Array) -> Array:
    """Integers as int64 arrays (torch has no full uint32), on the framework of whichever is one."""
    if framework(x) == "torch":
        return x.long()
    target = like if framework(like) == "torch" or isinstance(x, int | np.integer) else x
    return asarray_like(np.asarray(x, dtype=np.int64), target)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds on Python ints or int64 arrays holding 32-bit words."""
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + k0) & _MASK, (x1 + k1) & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << rotation) & _MASK) | (x1 >> (32 - rotation))) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & _MASK
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _MASK
    return x0, x1

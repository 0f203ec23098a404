"""Random numbers by key: the same words, in the same order, in NumPy, torch and JAX.

A draw is a pure function of its key, and a key is made by *folding* data into another: operator
name, occurrence, parameter name, step, row, position. Nothing is split by order, so adding a layer
or an operator moves no other noise, a resumed run draws what the uninterrupted one drew, and the
scorer redraws exactly the noise the generator drew.

The generator is Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), the one ``jax.random`` uses; keys and 32-bit words here are bit-equal to
``jax.random.fold_in`` and ``jax.random.bits``. Turning words into floats is written once, below;
the three frameworks then differ by the last bit of ``log`` and ``erfinv`` alone.

Left out: splitting (order-dependent) and other generators.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from mismatch_sim import ops
from mismatch_sim.types import Array, Key


def key(seed: int) -> Key:
    """The root key of a seed, on the host: ``uint32 [2]``, as ``jax.random.key(seed)``.

    >>> key(7).tolist()
    [0, 7]
    """
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], dtype=np.uint32)


def fold(rng: Key, *data: int | str | Array) -> Key:
    """Fold data into a key, left to right; strings by ``crc32``, integers and int arrays as is.

    Args:
        rng: key ``[..., 2]``.
        data: names, integers, or int arrays whose shape broadcasts against the key's batch shape
            (so folding a row index of shape ``[B]`` into one key gives ``[B, 2]`` keys).

    >>> fold(key(0), "weight_noise", 3).tolist()
    [207043438, 1631536070]
    """
    for item in data:
        rng = ops.fold_in(rng, zlib.crc32(item.encode()) if isinstance(item, str) else item)
    return rng


def uniform(rng: Key, count: int) -> Array:
    """Uniform numbers of the open interval (0, 1): float32 ``[..., count]`` for keys ``[..., 2]``.

    (word + 1/2) / 2^32, rounded to float32 and kept below 1: fine near 0, so the exponential
    below resolves tails down to 1e-10, where the usual 23-bit mantissa stops at 1e-7.
    """
    words = ops.as_float32(ops.random_bits(rng, count))
    xp = ops.xp_of(words)
    return xp.clip((words + 0.5) * 2.0**-32, max=1.0 - 2.0**-24)


def gumbel(rng: Key, count: int) -> Array:
    """Standard Gumbel numbers, -log(-log(1 - u)): float32 ``[..., count]``, always finite."""
    u = uniform(rng, count)
    xp = ops.xp_of(u)
    return -xp.log(-xp.log1p(-u))


def normal(rng: Key, count: int) -> Array:
    """Standard normal numbers, sqrt(2) erfinv(u), u symmetric in (-1, 1): float32 ``[..., count]``.

    u has 23 bits and is symmetric, so the largest magnitude is 5.3 and the law has mean zero.
    """
    words = ops.as_float32(ops.random_bits(rng, count, bits=23))
    return ops.erfinv((words + 0.5) * 2.0**-22 - 1.0) * math.sqrt(2.0)

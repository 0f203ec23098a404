"""Fake quantisation: values on a number format's grid, stored as float.

A first scheme only: ``int8``, symmetric weights with one scale per output channel, on the linear
layers of the decoder blocks (as rollout engines do: embedding, head and norms stay as they are).
``formats.py``, activations, KV caches and engine profiles come into this place; the linear-input
and KV hooks they need are in the operator already.
"""

from __future__ import annotations

from mismatch_sim import ops
from mismatch_sim.perturb.base import Perturbation, select
from mismatch_sim.types import Array, Key, Params

LINEAR = r"_proj\.weight$"


def fake_quant(scheme: str = "int8") -> Perturbation:
    """The weights the rollout engine would run with, in scheme ``scheme``.

    ``int8``: s = amax_j |w_ij| (1 / 127) per output channel i; w -> clip(rne(w / s), -127, 127) s.

    Source: vLLM's INT8 weight rule (amax / 127, codes of -127..127). The scale is written as a
    product because XLA would make it one anyway, and every framework must see the same bits.

    Raises:
        ValueError: unknown scheme, or (at ``init``) a model without such linear layers.

    >>> import numpy as np
    >>> op = fake_quant("int8")
    >>> w = {"mlp.up_proj.weight": np.array([[127.0, 3.4], [2.54, 0.0]], np.float32)}
    >>> op.publish(None, 0, w, op.init(w))[0]["mlp.up_proj.weight"].round(3).tolist()
    [[127.0, 3.0], [2.5399999618530273, 0.0]]
    """
    if scheme != "int8":
        raise ValueError(f"fake_quant: scheme {scheme!r} is unknown; allowed: 'int8'")

    def init(params: Params) -> tuple:
        select(params, LINEAR)
        return ()

    return Perturbation("fake_quant", init, _publish_int8)


@ops.jit
def _publish_int8(rng: Key, step: Array, params: Params, state: tuple) -> tuple[Params, tuple]:
    return {**params, **{n: int8_per_channel(params[n]) for n in select(params, LINEAR)}}, state


def int8_per_channel(w_OI: Array) -> Array:
    """Quantise and dequantise one weight matrix ``[out, in]``; a row of zeros stays zero."""
    xp = ops.xp_of(w_OI)
    scale = xp.max(xp.abs(w_OI), axis=-1, keepdims=True) * (1.0 / 127.0)
    scale = xp.where(scale > 0, scale, xp.ones_like(scale))
    codes = xp.clip(xp.round(ops.exact_divide(w_OI, scale)), -127.0, 127.0)
    return codes * scale

"""The Llama family as pure functions over a flat dict of Hugging Face parameters.

One forward pass serves scoring, training, prompt prefill and cached decoding: it takes new tokens,
the positions they stand at, which keys each may attend to, and (when decoding) a key/value cache to
write into. A member of the family is frozen, hashable data, so a compiled program is shared by all
checkpoints of one shape. Qwen2 differs by biases on q, k, v; Qwen3 by RMS norms on each head's q
and k; both are read from the config here, and a checkpoint lacking their tensors is refused.

Arithmetic is float32 throughout: RMSNorm, softmax and rotary angles follow
``transformers.models.llama`` 5.24 (rotate-half layout), against which logits and gradients are
tested.

Left out: rotary scaling, sliding windows, mixture of experts, encoder models. Configs that need
them are refused, by name.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from mismatch_sim.errors import UserError
from mismatch_sim.types import Array, Hooks, Params

FAMILIES = ("llama",)
NO_HOOKS = Hooks()


@dataclass(frozen=True)
class Model:
    """The architecture: everything of ``config.json`` that the forward pass depends on."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tied: bool
    attention_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def from_folder(folder: Path) -> Model:
        """Read ``config.json``.

        Raises:
            UserError: no such file, not JSON, or an architecture that is not supported.
        """
        path = folder / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: a checkpoint folder needs one") from None
        except (json.JSONDecodeError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"{path}: model_type={family!r} is not supported by --backend jax;"
                f" allowed: {', '.join(FAMILIES)}"
            )
        rope = raw.get("rope_parameters") or {}
        legacy = raw.get("rope_scaling") or {}
        scaling = rope.get("rope_type") or legacy.get("rope_type") or legacy.get("type")
        if scaling not in (None, "default"):
            raise UserError(f"{path}: rope_type={scaling!r} is not supported; allowed: 'default'")
        if raw.get("hidden_act", "silu") != "silu":
            raise UserError(f"{path}: hidden_act={raw['hidden_act']!r} is not supported; only silu")
        if raw.get("mlp_bias"):
            raise UserError(f"{path}: mlp_bias=true is not supported")
        try:
            heads = raw["num_attention_heads"]
            return Model(
                family=family,
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
                rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
                norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tied=bool(raw.get("tie_word_embeddings", False)),
                attention_bias=bool(raw.get("attention_bias", False)),
            )
        except KeyError as missing:
            raise UserError(f"{path}: {missing} is missing") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, in forward order: the contract of a checkpoint."""
        d, ffn = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for i in range(self.num_layers):
            at = f"model.layers.{i}."
            shapes[at + "input_layernorm.weight"] = (d,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, d)
                if self.attention_bias:
                    shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
            if self.qk_norm:
                shapes[at + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[at + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[at + "self_attn.o_proj.weight"] = (d, q)
            if self.attention_bias and self.family == "llama":
                shapes[at + "self_attn.o_proj.bias"] = (d,)
            shapes[at + "post_attention_layernorm.weight"] = (d,)
            shapes[at + "mlp.gate_proj.weight"] = (ffn, d)
            shapes[at + "mlp.up_proj.weight"] = (ffn, d)
            shapes[at + "mlp.down_proj.weight"] = (d, ffn)
        shapes["model.norm.weight"] = (d,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


def load(folder: Path) -> tuple[Model, Params]:
    """Read a Hugging Face folder; weights from safetensors only, as float32.

    Raises:
        UserError: a file is absent or unreadable, or a tensor is missing, unexpected or misshapen.
    """
    model = Model.from_folder(Path(folder))
    path = Path(folder) / "model.safetensors"
    if not path.exists():
        raise UserError(f"{path} does not exist: weights are read from safetensors only")
    try:
        stored = safetensors.numpy.load_file(path)
    except Exception as error:  # the library raises its own type for every malformed file
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None
    for parameter, shape in model.shapes().items():
        if parameter not in stored:
            raise UserError(f"{path}: tensor {parameter} is missing")
        if stored[parameter].shape != shape:
            raise UserError(
                f"{path}: tensor {parameter} has shape {list(stored[parameter].shape)},"
                f" config.json says {list(shape)}"
            )
        if not np.isfinite(stored[parameter].astype(np.float32)).all():
            raise UserError(f"{path}: tensor {parameter} holds NaN or infinity")
    extra = sorted(
        set(stored) - set(model.shapes()) - ({"lm_head.weight"} if model.tied else set())
    )
    if extra:
        raise UserError(f"{path}: tensor {extra[0]} is not part of a {model.family} model")
    return model, {n: jnp.asarray(stored[n].astype(np.float32)) for n in model.shapes()}


Cache = tuple[tuple[Array, Array], ...]
"""Per layer (keys, values), each ``[B, S, kv_heads, head_dim]``."""


def empty_cache(model: Model, batch: int, length: int) -> Cache:
    """A zeroed cache of ``length`` slots per row."""
    shape = (batch, length, model.num_kv_heads, model.head_dim)
    return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(model.num_layers))


def hidden_states(
    model: Model,
    params: Params,
    tokens_BT: Array,
    positions_BT: Array,
    mask_BT: Array,
    allowed_BTS: Array,
    hooks: Hooks = NO_HOOKS,
    rng: Any = None,
    state: Any = (),
    cache: Cache | None = None,
    start: Array | int = 0,
    last: int | None = None,
) -> tuple[Array, Cache | None]:
    """Final normed hidden states of new tokens, and the cache with their keys and values written.

    Args:
        positions_BT: rotary positions, 0 at a row's first real token.
        mask_BT: 1 on real tokens (handed to the hooks).
        allowed_BTS: which of the S keys each of the T tokens attends to; S = T without a cache.
        start: first cache slot of the new tokens.
        last: how many of the new tokens, at the end, have a hidden state of interest: ``[B, last,
            d]`` comes back, and the top layer computes only keys and values for the others.
    """
    rope = list(_rope_tables(model, positions_BT))
    bias_BTS = jnp.where(allowed_BTS, 0.0, jnp.finfo(jnp.float32).min)
    x = params["model.embed_tokens.weight"][tokens_BT]
    written = []
    for i in range(model.num_layers):
        at = f"model.layers.{i}."
        h = _rms_norm(x, params[at + "input_layernorm.weight"], model.norm_eps)
        linear = _linear(params, hooks, rng, state, mask_BT)
        k, v = (_heads(model, linear(f"{at}self_attn.{n}_proj", h)) for n in "kv")
        k_rope, k_mask_BT = rope, mask_BT
        if last is not None and i == model.num_layers - 1:
            x, h, mask_BT, bias_BTS, *rope = (
                y[:, -last:] for y in (x, h, mask_BT, bias_BTS, *rope)
            )
            linear = _linear(params, hooks, rng, state, mask_BT)
        q = _heads(model, linear(f"{at}self_attn.q_proj", h))
        if model.qk_norm:
            q = _rms_norm(q, params[at + "self_attn.q_norm.weight"], model.norm_eps)
            k = _rms_norm(k, params[at + "self_attn.k_norm.weight"], model.norm_eps)
        q, k = _rotate(q, *rope), _rotate(k, *k_rope)
        if hooks.on_kv is not None:
            k, v = hooks.on_kv(rng, i, k, v, k_mask_BT, state)
        if cache is not None:
            k = jax.lax.dynamic_update_slice_in_dim(cache[i][0], k, start, axis=1)
            v = jax.lax.dynamic_update_slice_in_dim(cache[i][1], v, start, axis=1)
            written.append((k, v))
        x = x + linear(at + "self_attn.o_proj", _attend(model, q, k, v, bias_BTS))
        h = _rms_norm(x, params[at + "post_attention_layernorm.weight"], model.norm_eps)
        gated = jax.nn.silu(linear(at + "mlp.gate_proj", h)) * linear(at + "mlp.up_proj", h)
        x = x + linear(at + "mlp.down_proj", gated)
    x = _rms_norm(x, params["model.norm.weight"], model.norm_eps)
    return x, tuple(written) if cache is not None else None


def head(
    model: Model, params: Params, hidden: Array, hooks: Hooks, rng: Any, state: Any, mask: Array
) -> Array:
    """Logits of hidden states ``[B, T, d]``: the tied embedding, or ``lm_head``."""
    if model.tied:
        params = {"lm_head.weight": params["model.embed_tokens.weight"]}
    return _linear(params, hooks, rng, state, mask)("lm_head", hidden)


def _linear(params: Params, hooks: Hooks, rng: Any, state: Any, mask_BT: Array) -> Any:
    """``linear(name, x)``: x W^T + b with the hook on x; where activation quantisation will sit."""

    def linear(name: str, x: Array) -> Array:
        if hooks.on_linear_input is not None:
            x = hooks.on_linear_input(rng, name, x, mask_BT, state)
        weight = params[name + ".weight"]
        y = x.reshape(-1, x.shape[-1]) @ weight.T
        if name + ".bias" in params:
            y = y + params[name + ".bias"]
        return y.reshape(*x.shape[:-1], weight.shape[0])

    return linear


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return weight * (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))


def _heads(model: Model, x: Array) -> Array:
    return x.reshape(*x.shape[:-1], -1, model.head_dim)


def _rope_tables(model: Model, positions_BT: Array) -> tuple[Array, Array]:
    """cos and sin of position x theta^(-2i/d), ``[B, T, 1, head_dim / 2]``."""
    half = model.head_dim // 2
    frequency = model.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attend(model: Model, q: Array, k: Array, v: Array, bias_BTS: Array) -> Array:
    """Grouped-query attention; queries of one group share a key/value head."""
    batch, new = q.shape[:2]
    q = q.reshape(batch, new, model.num_kv_heads, -1, model.head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(model.head_dim)
    weights = jax.nn.softmax(scores + bias_BTS[:, None, None], axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, new, -1)

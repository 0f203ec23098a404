"""The JAX backend: cheap sweeps of small models, every program compiled once per shape.

All jitted functions live at module level with the architecture, hooks and objective as hashable
static arguments; parameters, operator state (strengths included), keys, learning rate and
temperature are traced. So runs that differ in seed or strength share every program, a second run in
one process compiles nothing, and the persistent cache makes the next process start quickly.

Scoring and training are different programs on purpose: the mismatch compares two policies scored by
the *same* program, and the differentiated forward pass is fused otherwise (other bits).

Left out: vmap over runs (it gained little on two cores; separate processes gain more) and device
placement beyond JAX's default.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mismatch_sim import rng as rng_lib
from mismatch_sim import sampling
from mismatch_sim.backends.jax_model import Model, empty_cache, head, hidden_states
from mismatch_sim.backends.jax_model import load as load
from mismatch_sim.types import Array, Hooks, Loss, Params, Policy, Prompts, Rollout

name = "jax"

NO_KEY = np.zeros(2, np.uint32)

# Noise is defined by these words (``rng``); an environment variable must not choose others.
jax.config.update("jax_threefry_partitionable", True)


def start_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in ``folder``, however small, so that the next process starts fast."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def versions() -> dict[str, str]:
    """What besides the config can change a run's bytes: libraries, device kind, thread count."""
    device = jax.devices()[0]
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("XLA_", "JAX_", "NPROC")) and "CACHE" not in name
    }
    return {
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "optax": optax.__version__,
        "device": f"{device.platform} {device.device_kind}",
        "threads": str(len(os.sched_getaffinity(0))),
        "environment": json.dumps(settings),
    }


def wait(tree: Any) -> None:
    """Return when every array of the tree is computed."""
    jax.block_until_ready(tree)


def from_numpy(tree: Any) -> Any:
    """Host arrays into JAX arrays, same tree; Python numbers stay as they are."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


# --- rollout ----------------------------------------------------------------------------------


def generate(
    model: Model,
    policy: Policy,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    rng: Any,
    temperature: float,
    greedy: bool = False,
) -> Rollout:
    """Sample one response per prompt with a KV cache, until every row has its EOS.

    Each draw is keyed by ``rng`` folded with row and position, so a row's tokens depend on its
    index and not on how the others fare. Rows that are done emit the pad id with mask 0.
    """
    tokens, mask, logprobs = _generate(
        model,
        policy.hooks,
        max_new_tokens,
        eos_id,
        pad_id,
        policy.params,
        policy.state,
        NO_KEY if policy.rng is None else policy.rng,
        prompts,
        rng,
        np.float32(temperature),
        np.bool_(greedy),
    )
    return Rollout(prompts, tokens, mask, logprobs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(
    model: Model,
    hooks: Hooks,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    params: Params,
    state: Any,
    hook_rng: Array,
    prompts: Prompts,
    rng: Array,
    temperature: Array,
    greedy: Array,
) -> tuple[Array, Array, Array]:
    batch, width = prompts.tokens_BP.shape
    slots = width + max_new_tokens
    rows = jnp.arange(batch)
    lengths = prompts.mask_BP.sum(axis=1)
    row_keys = rng_lib.fold(rng, rows)
    prompt_slots = jnp.zeros((batch, slots), bool).at[:, :width].set(prompts.mask_BP > 0)

    def choose(hidden: Array, mask: Array, t: Array) -> tuple[Array, Array]:
        logits = head(model, params, hidden, hooks, hook_rng, state, mask)[:, 0] / temperature
        position = jnp.full((batch,), t)
        if hooks.on_logits is not None:
            logits = hooks.on_logits(hook_rng, logits, state, rows, position)
        return sampling.sample(logits, rng_lib.fold(row_keys, position), greedy)

    def put(buffers: tuple, t: Array, chosen: tuple, alive: Array) -> tuple:
        token = jnp.where(alive, chosen[0], pad_id).astype(jnp.int32)
        values = (token, alive.astype(jnp.int32), jnp.where(alive, chosen[1], 0.0))
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(b, v[:, None], t, axis=1)
            for b, v in zip(buffers, values, strict=True)
        )

    hidden, cache = hidden_states(
        model,
        params,
        prompts.tokens_BP,
        jnp.maximum(jnp.cumsum(prompts.mask_BP, axis=1) - 1, 0),
        prompts.mask_BP,
        _causal(prompts.mask_BP, slots),
        hooks,
        hook_rng,
        state,
        empty_cache(model, batch, slots),
        last=1,
    )
    shape = (batch, max_new_tokens)
    buffers = (jnp.full(shape, pad_id, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
    alive = jnp.ones(batch, bool)
    first = choose(hidden, prompts.mask_BP[:, -1:], 0)
    buffers = put(buffers, 0, first, alive)

    def unfinished(carry: tuple) -> Array:
        t, alive, *_ = carry
        return (t < max_new_tokens) & alive.any()

    def advance(carry: tuple) -> tuple:
        t, alive, last, cache, buffers = carry
        slot = jnp.arange(slots)[None, :]
        allowed = prompt_slots | ((slot >= width) & (slot < width + t))
        mask = alive[:, None].astype(jnp.int32)
        hidden, cache = hidden_states(
            model,
            params,
            last[:, None],
            (lengths + t - 1)[:, None],
            mask,
            allowed[:, None],
            hooks,
            hook_rng,
            state,
            cache,
            width + t - 1,
        )
        chosen = choose(hidden, mask, t)
        buffers = put(buffers, t, chosen, alive)
        return t + 1, alive & (chosen[0] != eos_id), chosen[0], cache, buffers

    carry = (jnp.int32(1), alive & (first[0] != eos_id), first[0], cache, buffers)
    return jax.lax.while_loop(unfinished, advance, carry)[-1]


def _causal(mask_BT: Array, slots: int | None = None) -> Array:
    """``[B, T, S]``: token t attends to real tokens s <= t (slots beyond T are never allowed)."""
    width = mask_BT.shape[1]
    key = jnp.pad(mask_BT > 0, ((0, 0), (0, (slots or width) - width)))
    return key[:, None, :] & (jnp.arange(slots or width)[None, :] <= jnp.arange(width)[:, None])


# --- scoring ----------------------------------------------------------------------------------


def logits(model: Model, policy: Policy, rollout: Rollout, temperature: float) -> Array:
    """Logits over temperature that predict each generated token: float32 ``[B, N, V]``.

    One program scores every policy of an architecture; the ``on_logits`` hook runs on its output in
    a program of its own, so a policy with logit noise shares the scorer's bits with the trainer.
    """
    scored = _score(
        model,
        policy.hooks._replace(on_logits=None),
        policy.params,
        policy.state,
        NO_KEY if policy.rng is None else policy.rng,
        rollout,
        np.float32(temperature),
    )
    if policy.hooks.on_logits is None:
        return scored
    return _hooked(policy.hooks.on_logits, policy.rng, scored, policy.state)


def _response_logits(
    model: Model,
    hooks: Hooks,
    params: Params,
    state: Any,
    hook_rng: Array | None,
    rollout: Rollout,
    temperature: Array,
) -> Array:
    # the last generated token predicts nothing: its column never enters the forward pass
    tokens = jnp.concatenate([rollout.prompts.tokens_BP, rollout.tokens_BN[:, :-1]], axis=1)
    mask = jnp.concatenate([rollout.prompts.mask_BP, rollout.mask_BN[:, :-1]], axis=1)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    count = rollout.tokens_BN.shape[1]
    hidden, _ = hidden_states(
        model, params, tokens, positions, mask, _causal(mask), hooks, hook_rng, state, last=count
    )
    mask = mask[:, -count:]
    return head(model, params, hidden, hooks, hook_rng, state, mask) / temperature


_score = jax.jit(_response_logits, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=0)
def _hooked(on_logits: Any, rng: Array, scored: Array, state: Any) -> Array:
    batch, count, _ = scored.shape
    return on_logits(rng, scored, state, jnp.arange(batch)[:, None], jnp.arange(count)[None, :])


# --- update -----------------------------------------------------------------------------------


@functools.cache
def _optimizer(optim: Any) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is a traced argument of the update."""
    steps = [] if optim.clip == 0 else [optax.clip_by_global_norm(optim.clip)]
    steps.append(optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.eps))
    if optim.weight_decay:
        matrices = lambda params: {n: w.ndim >= 2 for n, w in params.items()}  # noqa: E731
        steps.append(optax.add_decayed_weights(optim.weight_decay, mask=matrices))
    return optax.chain(*steps)


def init_optimizer(params: Params, optim: Any) -> Any:
    """Zero moments for ``params``."""
    return _optimizer(_static(optim)).init(params)


def _static(optim: Any) -> Any:
    """The optimiser settings that change a program; those of the learning rate do not."""
    return optim.static()


def update(
    model: Model,
    params: Params,
    opt_state: Any,
    optim: Any,
    lr: float,
    loss: Loss,
    rollout: Rollout,
    teacher_logits_BNV: Array,
    weights_BN: Array,
    temperature: float,
) -> tuple[Params, Any, dict[str, Array]]:
    """One AdamW update (decoupled decay on matrices, global-norm clipping) on ``loss``."""
    return _update(
        model,
        _static(optim),
        loss,
        params,
        opt_state,
        np.float32(lr),
        rollout,
        teacher_logits_BNV,
        weights_BN,
        np.float32(temperature),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _update(
    model: Model,
    optim: Any,
    loss: Loss,
    params: Params,
    opt_state: Any,
    lr: Array,
    rollout: Rollout,
    teacher_logits_BNV: Array,
    weights_BN: Array,
    temperature: Array,
) -> tuple[Params, Any, dict[str, Array]]:
    def objective(params: Params) -> tuple[Array, dict[str, Array]]:
        student = _response_logits(model, Hooks(), params, (), None, rollout, temperature)
        return loss(student, teacher_logits_BNV, rollout, weights_BN)

    (value, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
    direction, opt_state = _optimizer(optim).update(grads, opt_state, params)
    params = {n: w - lr * direction[n] for n, w in params.items()}
    return params, opt_state, {**metrics, "loss": value, "grad_norm": optax.tree.norm(grads)}

"""Shapes and protocols that every layer agrees on.

Names carry their dimensions as suffixes: ``B`` prompts in the batch, ``P`` prompt positions
(left-padded), ``N`` generated positions, ``V`` vocabulary, so ``tokens_BN`` is one generated token
per row and position. Parameters are a flat ``dict`` from Hugging Face name to array in torch's
``[out, in]`` layout, in every backend: one regular expression selects the same weights everywhere,
and "per output channel" is axis 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

Array = Any
"""An array of NumPy, JAX (traced or not) or torch. The namespace is taken from the array itself."""

Params = dict[str, Array]
"""Hugging Face parameter name -> array."""

Key = Array
"""A counter-based random key: 32-bit words ``[..., 2]`` (see ``mismatch_sim.rng``)."""


class Prompts(NamedTuple):
    """A batch of prompts, left-padded to one width so that all rows end at the same position."""

    tokens_BP: Array
    """Token ids, int32; pad id where the mask is 0."""
    mask_BP: Array
    """1 on prompt tokens, 0 on padding, int32."""


class Rollout(NamedTuple):
    """Responses as the rollout policy sampled them, with what it recorded about each token."""

    prompts: Prompts
    tokens_BN: Array
    """Generated token ids, int32; pad id where the mask is 0."""
    mask_BN: Array
    """Response mask m: 1 on generated tokens, the EOS included, int32."""
    logprobs_BN: Array
    """Log-probability of each generated token *recorded while generating*, float32; 0 off mask."""


LinearInputHook = Callable[[Key, str, Array, Array, Any], Array]
"""``(rng, name, x_BTI, mask_BT, state) -> x_BTI``: the input of the linear layer ``name``."""

KVHook = Callable[[Key, int, Array, Array, Array, Any], tuple[Array, Array]]
"""``(rng, layer, k_BTHD, v_BTHD, mask_BT, state) -> (k, v)``: newly written K/V, once."""

LogitsHook = Callable[[Key, Array, Any, Array, Array], Array]
"""``(rng, logits, state, row, position) -> logits``: logits at the task's temperature, in nats.

Shapes: ``logits [..., V]``, ``row`` and ``position`` broadcastable to ``[...]``. The hook must draw
from ``rng`` folded with row and position only, so that scoring redraws what generation drew.
"""


class Hooks(NamedTuple):
    """The forward hooks of a rollout policy; an absent one is skipped when the program is built."""

    on_linear_input: LinearInputHook | None = None
    on_kv: KVHook | None = None
    on_logits: LogitsHook | None = None


class Policy(NamedTuple):
    """Everything that decides the law of the next token, given the model's architecture."""

    params: Params
    hooks: Hooks = Hooks()
    state: Any = ()
    """State of the operator the hooks belong to."""
    rng: Key | None = None
    """Key of the hooks' noise for this batch of rollouts."""


Loss = Callable[..., tuple[Array, dict[str, Array]]]
"""An objective: see ``mismatch_sim.objectives``."""


class Backend(Protocol):
    """What a framework must be able to do; everything else is shared array code.

    A *model* is whatever the backend needs beside parameters to run a forward pass (for JAX a
    frozen, hashable description of the architecture).
    """

    name: str

    def load(self, folder: Any) -> tuple[Any, Params]:
        """Read a Hugging Face folder (config.json + safetensors) into (model, params)."""
        ...

    def generate(
        self,
        model: Any,
        policy: Policy,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        eos_id: int,
        pad_id: int,
        rng: Key,
        temperature: float,
        greedy: bool = False,
    ) -> Rollout:
        """Sample one response per prompt; row and position key every draw."""
        ...

    def logits(self, model: Any, policy: Policy, rollout: Rollout, temperature: float) -> Array:
        """Logits over temperature that predict each generated token: float32 ``[B, N, V]``.

        The one scorer of every policy (rollout, trainer, teacher), compiled at one shape per
        architecture; ``on_logits`` is applied to its *output*, by a program of its own.
        """
        ...

    def init_optimizer(self, params: Params, optim: Any) -> Any:
        """A fresh optimiser state."""
        ...

    def update(
        self,
        model: Any,
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
        """One optimiser update on ``loss``; returns params, optimiser state and scalars."""
        ...

    def start_compilation_cache(self, folder: Any) -> None:
        """Keep compiled programs in ``folder`` for the next process, where the framework can."""
        ...

    def versions(self) -> dict[str, str]:
        """What of the framework and the machine can change a run's bytes."""
        ...

    def wait(self, tree: Any) -> None:
        """Return when every array of the tree is computed."""
        ...

    def from_numpy(self, tree: Any) -> Any:
        """Host arrays of a checkpoint back into this backend's arrays, same tree."""
        ...

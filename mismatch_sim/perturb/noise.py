"""Gaussian noise on weights or on logits: mismatch with a dial.

Weight noise is a *persistent* error of the policy for as long as one draw lives, so its law depends
on how often it is drawn anew (``resample``); logit noise is fresh for every token. Both draw by key
(operator, parameter name, step, row, position), never from a stream, so nothing that is added
elsewhere moves them.

Left out: noise other than Gaussian, and noise on activations (a linear-input hook; quantisation is
the activation error that exists).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from mismatch_sim import ops, schedules
from mismatch_sim import rng as rng_lib
from mismatch_sim.perturb.base import Perturbation, select
from mismatch_sim.types import Array, Key, Params

Resample = Literal["rollout", "version", "never"]


class NoiseState(NamedTuple):
    """The dial (values by step, and the one at the last published step) and the first key seen."""

    table: Array
    sigma: Array
    first_key: Array
    """Key of the first publication: the one draw that ``resample="never"`` keeps."""
    published: Array
    """0 before the first publication, then 1."""


def _initial_state(sigma: schedules.Strength, params: Params) -> NoiseState:
    like = next(iter(params.values()))
    values = (
        np.array(schedules.table(sigma), np.float32),
        np.float32(0.0),
        np.zeros(2, np.uint32),
        np.int32(0),
    )
    return NoiseState(*(ops.asarray_like(v, like) for v in values))


def _advance(state: NoiseState, rng: Key, step: Array) -> NoiseState:
    """The dial at ``step`` (a table's last value holds from there on), the first key remembered."""
    xp = ops.xp_of(state.table)
    count = state.table.shape[0]
    at = xp.arange(count) == xp.clip(ops.asarray_like(step, state.table), max=count - 1)
    return NoiseState(
        state.table,
        xp.sum(xp.where(at, state.table, 0.0)),
        xp.where(state.published > 0, state.first_key, ops.asarray_like(rng, state.table)),
        xp.ones_like(state.published),
    )


def weight_noise(
    sigma: schedules.Strength,
    relative: bool = True,
    resample: Resample = "rollout",
    include: str = "",
    exclude: str = "",
) -> Perturbation:
    """Gaussian noise on the weights: w + sigma * rms(w) * n, n ~ N(0, 1).

    Args:
        sigma: standard deviation, relative to each tensor's root mean square; a number or a
            schedule of the step.
        relative: ``False`` makes sigma absolute.
        resample: ``rollout`` draws anew for every rollout batch, ``version`` for every weight
            version (the key is the checksum of the weights themselves), ``never`` once for the run.
        include, exclude: regular expressions on parameter names; without ``include``, every
            parameter of two or more dimensions.

    ``never`` keeps the key of the operator's first publication in its state, so a probe that starts
    from the run's first publication measures the very draw the run lived with.

    Raises:
        ValueError: at ``init``, if the patterns select nothing.

    >>> import numpy as np
    >>> params = {"w": np.ones((2, 3), np.float32), "norm": np.ones(3, np.float32)}
    >>> op = weight_noise(0.1)
    >>> noisy, _ = op.publish(rng_lib.key(0), 0, params, op.init(params))
    >>> bool((noisy["norm"] == 1).all()), bool(np.abs(noisy["w"] - 1).max() < 0.3)
    (True, True)
    """

    def init(params: Params) -> NoiseState:
        select(params, include, exclude, min_ndim=2)
        return _initial_state(sigma, params)

    return Perturbation("weight_noise", init, _weight_publish(relative, resample, include, exclude))


@functools.cache
def _weight_publish(relative: bool, resample: Resample, include: str, exclude: str) -> Callable:
    @ops.jit
    def publish(rng: Key, step: Array, params: Params, state: NoiseState) -> tuple:
        state = _advance(state, rng, step)
        drawn_from = state.first_key if resample == "never" else rng
        noisy = {}
        for name in select(params, include, exclude, min_ndim=2):
            w = params[name]
            xp = ops.xp_of(w)
            drawn_for = {"rollout": step, "version": ops.fingerprint(w), "never": 0}[resample]
            key = rng_lib.fold(ops.asarray_like(drawn_from, w), name, drawn_for)
            noise = xp.reshape(rng_lib.normal(key, math.prod(w.shape)), w.shape)
            scale = state.sigma * (xp.sqrt(xp.mean(w * w)) if relative else 1.0)
            noisy[name] = w + scale * noise
        return {**params, **noisy}, state

    return publish


def logit_noise(sigma: schedules.Strength) -> Perturbation:
    """Gaussian noise on the logits, fresh for every token: l + sigma * n, in nats.

    Given the noise, D is near sigma^2 (1 - sum_v p_v^2) / 2 for small sigma. Noise is drawn for the
    full vocabulary by row and position, so scoring redraws what generation drew.

    Args:
        sigma: standard deviation in nats, at the task's temperature; a number or a schedule.

    >>> import numpy as np
    >>> op = logit_noise(0.5)
    >>> state = op.init({"w": np.ones(1, np.float32)})
    >>> rows, t = np.arange(2), np.zeros(2, int)
    >>> op.on_logits(rng_lib.key(1), np.zeros((2, 4), np.float32), state, rows, t).shape
    (2, 4)
    """

    def init(params: Params) -> NoiseState:
        return _initial_state(sigma, params)

    return Perturbation("logit_noise", init, _logit_publish, on_logits=_add_logit_noise)


@ops.jit
def _logit_publish(rng: Key, step: Array, params: Params, state: NoiseState) -> tuple:
    return params, _advance(state, rng, step)


def _add_logit_noise(
    rng: Key, logits: Array, state: NoiseState, row: Array, position: Array
) -> Array:
    keys = rng_lib.fold(ops.asarray_like(rng, logits), row, position)
    return logits + state.sigma * rng_lib.normal(keys, logits.shape[-1])

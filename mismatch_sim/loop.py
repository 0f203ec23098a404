"""The one loop: publish -> roll out -> score -> loss -> update -> log -> evaluate.

It is the same for every backend, objective and operator, and nothing in it knows which is at work.
Step t starts from the weights after t updates; its line in ``metrics.jsonl`` holds the mismatch of
its rollouts, the update made from them, and, on evaluation steps, the quality *before* that update.
The last line (t = steps) is an evaluation alone. Every random draw is keyed by purpose and step, so
a resumed run draws what the uninterrupted one would have drawn.

The mismatch is measured by scoring the rollout policy and the trainer policy with one program,
apart from the differentiated forward pass of the update, which has other bits.

Left out: several updates per rollout and samples per prompt (they come with the RL objectives).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mismatch_sim import metrics as metrics_lib
from mismatch_sim import objectives, ops, schedules, stats, treestore
from mismatch_sim import rng as rng_lib
from mismatch_sim.errors import RunError
from mismatch_sim.evaluate import evaluate
from mismatch_sim.perturb import base
from mismatch_sim.runlog import RunFolder
from mismatch_sim.types import Array, Params, Policy, Rollout
from mismatch_sim.world import World

Metrics = dict[str, Any]


class TrainState(NamedTuple):
    """Everything that an update changes, and hence everything a checkpoint holds."""

    params: Params
    opt_state: Any
    operator_state: Any


class Interrupted(Exception):
    """The run was asked to stop; its folder is resumable from ``step``."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


def initial_state(world: World) -> TrainState:
    """Initial student, zero optimiser moments, fresh operator state."""
    return TrainState(
        world.student,
        world.backend.init_optimizer(world.student, world.config.optim),
        world.operator.init(world.student),
    )


def rollout_policy(
    world: World, params: Params, operator_state: Any, step: int
) -> tuple[Policy, Any]:
    """mu at ``step``: the trainer's weights after all operators, with their forward hooks."""
    key = rng_lib.fold(world.key, "publish")
    published, operator_state = base.publish(world.operator, key, step, params, operator_state)
    hooks_key = rng_lib.fold(world.key, "forward", step)
    mu = base.rollout_policy(world.operator, published, operator_state, hooks_key)
    return mu, operator_state


def train_step(
    world: World, state: TrainState, step: int, beside: Executor | None = None
) -> tuple[TrainState, Metrics, Metrics]:
    """One update from rollouts of the perturbed policy: new state, metrics, seconds per phase.

    Args:
        beside: where to measure the mismatch while teacher and update run; the measurement needs
            nothing of them, and two programs of small models fill two cores better than one.

    Raises:
        RunError: a loss or a divergence is NaN; the state given is still the last good one.
    """
    config, clock = world.config, _Clock(world)
    mu, operator_state = rollout_policy(world, state.params, state.operator_state, step)
    prompts = world.problems("train", config.batch, "prompts", step)
    rollout = world.generate(mu, prompts, rng_lib.fold(world.key, "sample", step))
    clock.lap("time/rollout", rollout)

    wanted = bool(config.measure_every) and step % config.measure_every == 0
    measuring = (world, mu, Policy(state.params), rollout, step)
    measured = beside.submit(measure, *measuring) if wanted and beside else None
    teacher_logits = world.score_teacher(rollout)
    clock.lap("time/teacher", teacher_logits)
    out: Metrics = {}

    lr = schedules.warmup_cosine(
        step, config.optim.lr, config.optim.warmup, config.steps, config.optim.floor
    )
    params, opt_state, update_metrics = world.backend.update(
        world.student_model,
        state.params,
        state.opt_state,
        config.optim,
        lr,
        objectives.get(config.objective),
        rollout,
        teacher_logits,
        np.ones(rollout.mask_BN.shape, np.float32),
        config.temperature,
    )
    out |= {f"optim/{tag}": _number(value) for tag, value in update_metrics.items()}
    out["optim/lr"] = lr
    clock.lap("time/update", params)
    if wanted:
        values, seconds, pi_logits = measured.result() if measured else measure(*measuring)
        distill, _ = metrics_lib.distill_metrics(pi_logits, teacher_logits, rollout)
        out |= values | {tag: _number(value) for tag, value in distill.items()}
        clock.times["time/measure"] = seconds
        clock.lap("time/measure_wait", ())
    _check(world, state, out, rollout, params, step)
    return TrainState(params, opt_state, operator_state), out, clock.times


def measure(
    world: World, mu: Policy, pi: Policy, rollout: Rollout, step: int
) -> tuple[Metrics, float, Array]:
    """``mismatch/*`` and ``rollout_corr/*`` of rollouts of mu; seconds taken; logits of pi."""
    began = time.perf_counter()
    mu_logits, pi_logits = world.score(mu, rollout), world.score(pi, rollout)
    scalars, rows, positions = metrics_lib.mismatch_metrics(mu_logits, pi_logits, rollout)
    out: Metrics = {tag: _number(value) for tag, value in scalars.items()}
    seed = int(rng_lib.fold(world.key, "bootstrap", step)[0])
    _, out["mismatch/kl_exact_low"], out["mismatch/kl_exact_high"] = stats.bootstrap_ratio(
        ops.to_numpy(rows["kl_sum"]), ops.to_numpy(rows["tokens"]), seed
    )
    for name, values in positions.items():
        out[f"mismatch/{name}_by_position"] = [float(v) for v in ops.to_numpy(values)]
    return out, time.perf_counter() - began, pi_logits


def train(
    world: World,
    folder: RunFolder,
    window_steps: frozenset[int] = frozenset(),
    report: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> None:
    """Run (or go on with) the whole training in ``folder``, which ends with its last evaluation.

    Args:
        window_steps: steps whose weights are kept in ``windows/`` (the clean reference's).
        report: called after every step with its metrics.

    Raises:
        RunError: something turned NaN. The last good state is checkpointed.
        Interrupted: SIGINT or SIGTERM came; the state at the end of that step is checkpointed.
    """
    config = world.config
    restored = folder.restore(initial_state(world))
    state, start = restored if restored else (initial_state(world), 0)
    state = world.backend.from_numpy(state)
    with _stop_requests() as stop_requested, ThreadPoolExecutor(1) as beside:
        for step in range(start, config.steps + 1):
            if step in window_steps:
                treestore.save(folder.path / "windows" / window_name(step), state.params, {})
            line: Metrics = {}
            times: Metrics = {}
            began = time.perf_counter()
            every = config.eval.every
            if step == config.steps or step == 0 or (every and step % every == 0):
                line |= evaluate(world, state.params).metrics()
                times["time/eval"] = time.perf_counter() - began
            if step < config.steps:
                try:
                    state, step_metrics, step_times = train_step(world, state, step, beside)
                except RunError:
                    folder.checkpoint(state, step)
                    raise
                line |= step_metrics
                times |= step_times
            times["time/total"] = time.perf_counter() - began
            folder.log_step(step, line)
            folder.log_time(step, times)
            report(step, {**line, **times})
            last = step == config.steps
            if last or stop_requested() or (step + 1) % config.checkpoint_every == 0:
                folder.checkpoint(state, step + 1)
            if stop_requested() and not last:
                raise Interrupted(step + 1)


def window_name(step: int) -> str:
    """File name of the weights kept at a step."""
    return f"step-{step:08d}.safetensors"


def _number(value: Any) -> float:
    return float(ops.to_numpy(value))


class _Clock:
    """Seconds per phase; each lap waits for the phase's results."""

    def __init__(self, world: World) -> None:
        self.wait, self.last = world.backend.wait, time.perf_counter()
        self.times: Metrics = {}

    def lap(self, name: str, results: Any) -> None:
        self.wait(results)
        now = time.perf_counter()
        self.times[name], self.last = now - self.last, now


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a request; a second one stops at once.

    A step is then never cut in two: its metrics line and its state belong together.
    """
    received: list[int] = []

    def request(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever owns the process handles its signals
        previous = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check(
    world: World, before: TrainState, out: Metrics, rollout: Rollout, after: Params, step: int
) -> None:
    """Stop at the first step at which a number that training depends on is not one.

    Also where nothing is measured, and before the new state is anybody's: what is checkpointed has
    passed.
    """
    watched = ("mismatch/kl_exact", "optim/loss", "optim/grad_norm")
    bad = [tag for tag in watched if math.isnan(out.get(tag, 0.0))]
    bad += [tag for tag in watched[1:] if math.isinf(out[tag])]
    if not bad and np.isnan(ops.to_numpy(rollout.logprobs_BN)).any():
        out["rollout_logprobs"] = math.nan
        bad.append("rollout_logprobs")
    if not bad and not _all_finite(after):
        out["updated weights"] = math.nan
        bad.append("updated weights")
    if not bad:
        return
    if culprit := _breaks_weights(world, before, step):
        where = f"phase publish, operator {culprit},"
    elif np.isnan(ops.to_numpy(rollout.logprobs_BN)).any():
        where = "phase rollout,"
    else:
        where = f"phase {'score' if bad[0] == watched[0] else 'update'},"
    raise RunError(
        f"{bad[0]} is {out[bad[0]]} at step {step}: {where} of {world.config.stack()};"
        " the state before this step is kept in checkpoint/"
    )


def _breaks_weights(world: World, before: TrainState, step: int) -> str | None:
    """The first operator whose published weights are not finite, found by publishing once more."""
    params = before.params
    key = rng_lib.fold(world.key, "publish")
    members = base.members_of(world.operator)
    states = before.operator_state if world.operator.name == "chain" else (before.operator_state,)
    for (member, label), state in zip(members, states, strict=True):
        params, _ = base.publish(member, rng_lib.fold(key, *label), step, params, state)
        if not _all_finite(params):
            return member.name
    return None


def _all_finite(params: Params) -> bool:
    return all(np.isfinite(ops.to_numpy(w)).all() for w in params.values())

"""The clean reference run, and the dose measured on it.

The x axis of every dose-response curve is not the mismatch a run happened to have (a collapsing
student changes its own entropy) but its *dose*: the mismatch its operators make on the policies of
a **clean** run, all else equal. The clean run is found by its hash or run first, and kept. It saves
the weights of windows [t - K, t] at sampled steps t, K being the largest staleness asked of it;
there the operators are applied, and D is averaged over the run, weighted by tokens.

Left out: a dose for operators that learn from the run they perturb; none does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_sim import loop, metrics, ops, runlog, stats, tensorboard_log, treestore
from mismatch_sim import rng as rng_lib
from mismatch_sim.config import RunConfig
from mismatch_sim.perturb import base, spec
from mismatch_sim.types import Params, Policy
from mismatch_sim.world import World, provenance

MIN_WINDOW = 8
"""Windows kept even when less staleness is asked for, so that a small later k finds them."""


def probed_steps(steps: int, checkpoints: int, draws: int) -> list[list[int]]:
    """For each draw, the steps at which it is measured: evenly spaced, each draw shifted a little.

    Draw j stands at (i + (j + 1/2) / draws) / checkpoints of the run, i = 0, 1, ...: a systematic
    sample of the rollouts, in which the draws together see ``checkpoints * draws`` different steps.
    D is concentrated in the few steps at which the policy moves most; one grid for all draws steps
    over them unseen (with 4, 8, 16 points the dose of ``stale(4)`` came out as 0.0048, 0.0098,
    0.017, each with a narrow interval), while shifted grids find them and let the interval tell.

    >>> probed_steps(100, 4, 2)
    [[6, 31, 56, 81], [18, 43, 68, 93]]
    """
    share = [
        [(i + (j + 0.5) / draws) / checkpoints for i in range(checkpoints)] for j in range(draws)
    ]
    return [sorted({int(steps * x) for x in row}) for row in share]


def window_steps(config: RunConfig, width: int) -> frozenset[int]:
    """Every step of the windows [t - width, t] at the probed steps t."""
    rows = probed_steps(config.steps, config.dose.checkpoints, config.dose.draws)
    return frozenset(s for row in rows for t in row for s in range(max(0, t - width), t + 1))


def is_clean(config: RunConfig) -> bool:
    """Is this run its own clean reference?"""
    return not config.stack().ops and config.correction == "none"


def clean_world(world: World) -> World:
    """The same run with the identity stack."""
    return replace(world, config=world.config.clean(), operator=base.identity())


def ensure_clean_run(
    world: World, report: Callable[[int, dict[str, Any]], None] = lambda step, line: None
) -> Path:
    """The folder of the clean reference of ``world``, with the windows its dose needs.

    It is looked up by run hash under ``--clean-dir``; if it is absent, unfinished, or was kept with
    narrower windows, it is run (or gone on with) first.
    """
    clean = clean_world(world)
    config = clean.config
    code = provenance(clean)
    identity = config.identity(code)
    path = Path(config.clean_dir) / identity
    needed = needed_steps(world)
    if is_complete(path, needed):
        return path
    with runlog.RunFolder.claim(
        path, config.to_json(), identity, code, wait=True, flag="--clean-dir"
    ) as run:
        if is_complete(path, needed):  # another process made it while this one waited
            return path
        if lacks_windows(path, run.next_step(), needed):
            run.restart()
        width = max(MIN_WINDOW, spec.max_staleness(world.config.stack()))
        keep = needed | window_steps(config, width)
        with tensorboard_log.RunWriter(path, config) as board:

            def report_and_write(step: int, line: dict[str, Any]) -> None:
                report(step, line)
                board.write(step, line)

            loop.train(clean, run, keep, report_and_write)
            result = run_result(clean, path) | {"dose": ZERO, "hash": identity}
            board.finish(result)
        run.finish(result)
    return path


ZERO = {"value": 0.0, "low": 0.0, "high": 0.0}
"""The dose of no operator."""


def is_complete(path: Path, needed: frozenset[int]) -> bool:
    """Is there a finished clean run in ``path``, with the windows wanted?"""
    finished = (path / "result.json").exists()
    return finished and not lacks_windows(path, max(needed) + 1, needed)


def lacks_windows(path: Path, before: int, needed: frozenset[int]) -> bool:
    """Is a window missing that a run gone on with at step ``before`` would not save any more?"""
    windows = (path / "windows" / loop.window_name(s) for s in needed if s < before)
    return not all(window.exists() for window in windows)


def needed_steps(world: World) -> frozenset[int]:
    """Steps whose clean weights the dose of this run's operators is measured on."""
    return window_steps(world.config, spec.max_staleness(world.config.stack()))


def run_result(world: World, folder: Path) -> dict[str, Any]:
    """What ``result.json`` says of a finished run, read from its metrics; the dose comes apart.

    ``quality*`` and ``teacher_kl`` are value and 95 % interval at the first or last evaluation;
    ``kl_exact_mean`` is the mean of D over the measured steps (None if there are none).
    """
    config, lines = world.config, runlog.read_metrics(folder)
    first, *_, last = [m for m in lines if "quality/sampled_accuracy" in m]
    measured = [m["mismatch/kl_exact"] for m in lines if "mismatch/kl_exact" in m]

    def interval(line: dict[str, Any], name: str) -> dict[str, float]:
        ends = zip(("value", "low", "high"), ("", "_low", "_high"), strict=True)
        return {key: line[f"quality/{name}{end}"] for key, end in ends}

    return {
        "quality": interval(last, "sampled_accuracy"),
        "quality_start": interval(first, "sampled_accuracy"),
        "quality_greedy": interval(last, "greedy_accuracy"),
        "teacher_kl": interval(last, "teacher_kl"),
        "steps": last["step"],
        "kl_exact_mean": sum(measured) / len(measured) if measured else None,
        "kl_exact_last": measured[-1] if measured else None,
        "perturb": str(config.stack()),
        "out": str(folder),
        **{name: getattr(config, name) for name in ("pair", "backend", "objective", "seed")},
    }


def dose(
    world: World,
    folder: Path,
    report: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
) -> tuple[float, float, float]:
    """Dose of the world's operators on a clean run: value and 95 % interval, nats per token.

    At step t, the operators see the weights of the window [t - k, t] one after the other, as in
    training; probe prompts are rolled out by the resulting mu and scored under mu and under pi (the
    weights at t). With S_tj the KL summed over the tokens of draw j there, and T_tj the tokens,

        dose_j = sum_t S_tj / sum_t T_tj        over the steps of draw j (see ``probed_steps``),

    the value pools all draws, and the interval is Student's t on log dose_j. A draw has its own
    noise, prompts and steps, so the interval covers all three; an operator drawn once for the run
    (``resample="never"``) keeps the run's draw.
    """
    config = world.config
    if world.operator.publish is None and not any(world.operator.hooks()):
        return 0.0, 0.0, 0.0
    rows = probed_steps(config.steps, config.dose.checkpoints, config.dose.draws)
    staleness = spec.max_staleness(config.stack())
    sums = np.zeros((config.dose.draws, 2))
    window: dict[int, Params] = {}
    for number, (t, j) in enumerate(sorted((t, j) for j, row in enumerate(rows) for t in row)):
        needed = range(max(0, t - staleness), t + 1)
        window = {s: window[s] if s in window else _load(world, folder, s) for s in needed}
        sums[j] += probe(world, window, t, j, config.dose.prompts)
        report(number, {})
    _, low, high = stats.lognormal_t_interval(sums[:, 0] / sums[:, 1])
    value = float(sums[:, 0].sum() / sums[:, 1].sum())
    return value, min(low, value), max(high, value)


def probe(
    world: World, window: dict[int, Params], step: int, draw: int, count: int
) -> tuple[float, float]:
    """KL(mu || pi) summed over tokens, and tokens, of one draw of the operators at one step."""
    own_key = rng_lib.fold(world.key, "publish")
    key = rng_lib.fold(world.key, "dose", draw)
    # the run's own first publication fixes what is drawn once for the run; a ring forgets it again,
    # either by the second publication at step 0 or by a window of later steps
    state = world.operator.init(world.student)
    published, state = base.publish(world.operator, own_key, 0, world.student, state)
    for s, params in window.items():
        published, state = base.publish(
            world.operator, rng_lib.fold(key, "publish"), s, params, state
        )
    forward_key = rng_lib.fold(key, "forward", step)
    mu = base.rollout_policy(world.operator, published, state, forward_key)
    prompts = world.problems("probe", count, "probe", step, draw)
    rollout = world.generate(mu, prompts, rng_lib.fold(key, "sample", step))
    mu_logits, pi_logits = world.score(mu, rollout), world.score(Policy(window[step]), rollout)
    _, rows, _ = metrics.mismatch_metrics(mu_logits, pi_logits, rollout)
    kl, tokens = (ops.to_numpy(rows[n]).astype(np.float64).sum() for n in ("kl_sum", "tokens"))
    return float(kl), float(tokens)


def _load(world: World, folder: Path, step: int) -> Params:
    tree, _ = treestore.load(folder / "windows" / loop.window_name(step), world.student)
    return world.backend.from_numpy(tree)

"""``mismatch-sim run``: one on-policy distillation run under a perturbed rollout policy.

Three parts, each resumable and each with its bar: the clean reference (found by hash, or run), the
run itself, and the dose of its operators on the clean run. The summary and ``result.json`` set
quality against dose.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_sim import cli
from mismatch_sim.config import out_folder
from mismatch_sim.errors import UserError
from mismatch_sim.perturb import spec

if TYPE_CHECKING:
    from mismatch_sim.world import World

INTERRUPTED = 130


@cli.guard
def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    config = cli.parse_run(argv)
    out = out_folder(config)
    say = functools.partial(print, file=sys.stderr, flush=True)
    say(f"mismatch-sim run: pair {config.pair}, operators {config.stack()}, in {out}")
    if spec.max_staleness(config.stack()) >= config.steps:
        say("warning: as stale as the run is long, so every rollout uses the initial weights")
    from mismatch_sim import world as world_lib

    world = world_lib.build(config)
    world.backend.start_compilation_cache(cache_folder())
    if config.dry_run:
        return _dry_run(world, out)
    from mismatch_sim import console, loop, runlog

    try:
        result = execute(world, out)
    except (loop.Interrupted, KeyboardInterrupt) as stop:
        after = f" after step {stop.step}" if isinstance(stop, loop.Interrupted) else ""
        go_on = f"; go on with: mismatch-sim run --out {shlex.quote(str(out))} --resume"
        say(f"interrupted{after}{go_on if (out / 'config.json').exists() else ''}")
        return INTERRUPTED
    if config.json:
        print(runlog.to_json(result))
    else:
        console.summary(result)
    return 0


def execute(world: World, out: Path) -> dict[str, Any]:
    """The whole job in the folder ``out``: clean reference, run, dose, result."""
    from mismatch_sim import console, loop, reference, runlog, tensorboard_log
    from mismatch_sim.world import provenance

    config = world.config
    began = time.perf_counter()
    code = provenance(world)
    identity = config.identity(code)
    if out.resolve().is_relative_to(config.clean_dir.resolve()):
        raise UserError(
            f"--out {out} lies in --clean-dir {config.clean_dir}; choose another folder"
        )
    with runlog.RunFolder.claim(out, config.to_json(), identity, code) as folder:
        if (out / "result.json").exists():
            return runlog.read_result(out)
        clean: Path | None = None
        if not (reference.is_clean(config) or config.dose.skip):
            with console.progress("1/3 clean reference (found or run)", config.steps + 1) as bar:
                clean = reference.ensure_clean_run(world, _reporter(bar))
        with tensorboard_log.RunWriter(out, config) as board:
            with console.progress("2/3 run", config.steps + 1) as bar:
                on_bar = _reporter(bar)

                def report(step: int, line: dict[str, Any]) -> None:
                    on_bar(step, line)
                    board.write(step, line)

                loop.train(world, folder, report=report)
            result = reference.run_result(world, out) | {"hash": identity}
            result["dose"] = reference.ZERO if reference.is_clean(config) else None
            if clean is not None:
                probes = config.dose.checkpoints * config.dose.draws
                with console.progress("3/3 dose", probes) as bar:
                    value, low, high = reference.dose(world, clean, _reporter(bar))
                result["dose"] = {"value": value, "low": low, "high": high}
                result |= _against_clean(result, runlog.read_result(clean))
            result["wall_seconds"] = round(time.perf_counter() - began, 3)
            board.finish(result)
        folder.finish(result)
    return result


def _against_clean(result: dict[str, Any], clean: dict[str, Any]) -> dict[str, Any]:
    """The clean run's quality and gain, and the change against it with its interval.

    The interval covers the draw of evaluation prompts and samples, not that of training seeds.
    """
    from mismatch_sim import stats

    new, old = (tuple(r["quality"][k] for k in ("value", "low", "high")) for r in (result, clean))
    change = dict(zip(("value", "low", "high"), stats.difference(new, old), strict=True))
    gain = old[0] - clean["quality_start"]["value"]
    about = {"quality": clean["quality"], "quality_gain": gain, "out": clean["out"]}
    return {"clean": about, "change": change}


def _reporter(bar: Any) -> Callable[[int, dict[str, Any]], None]:
    def report(step: int, line: dict[str, Any]) -> None:
        bar.update(
            step + 1,
            kl=line.get("mismatch/kl_exact"),
            quality=line.get("quality/sampled_accuracy"),
        )

    return report


def _dry_run(world: World, out: Path) -> int:
    """Say what would run, having checked everything that can be checked without running."""
    from mismatch_sim import reference, runlog
    from mismatch_sim.world import provenance

    config = world.config
    clean = reference.clean_world(world)
    clean_identity = clean.config.identity(provenance(clean))
    found = runlog.find_run(config.clean_dir, clean_identity)
    plan = {
        "out": str(out),
        "hash": config.identity(provenance(world)),
        "operators": str(config.stack()),
        "student_parameters": sum(w.size for w in world.student.values()),
        "teacher_parameters": sum(w.size for w in world.teacher.values()),
        "clean_reference": str(found)
        if found
        else f"to be run: {config.clean_dir / clean_identity}",
        "config": config.to_json(),
    }
    print(json.dumps(plan) if config.json else json.dumps(plan, indent=2))
    return 0


def cache_folder() -> Path:
    """Where compiled programs are kept between processes."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mismatch_sim" / "jax"


if __name__ == "__main__":
    sys.exit(main())

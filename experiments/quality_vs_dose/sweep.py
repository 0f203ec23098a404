"""Runs of the first look at quality against dose: ``python -m experiments.quality_vs_dose.sweep``.

One run after the other in one process, so that nothing is compiled twice. Finished runs are kept;
a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from mismatch_sim import run, world
from mismatch_sim.config import RunConfig
from mismatch_sim.errors import UserError

ROOT = Path("runs/quality_vs_dose")

STACKS = {
    "weight noise": [f"weight_noise({s})" for s in (0.01, 0.03, 0.1, 0.2, 0.3)],
    "logit noise": [f"logit_noise({s})" for s in (0.1, 0.3, 1.0, 2.0)],
    "staleness": [f"stale({k})" for k in (2, 8, 16, 32)],
    "int8 weights": ["fake_quant('int8')"],
}
SEEDS = (0, 1, 2)

BASE = RunConfig(clean_dir=ROOT / "clean")


def configs(debug: bool = False) -> list[tuple[str, RunConfig]]:
    """(source, config) of every run; ``debug`` takes the first of each source, a few steps long."""
    base = replace(BASE, steps=4, batch=16) if debug else BASE
    runs = [("clean", "identity()")]
    for source, stacks in STACKS.items():
        runs += [(source, stack) for stack in (stacks[:1] if debug else stacks)]
    return [
        (source, replace(base, perturb=stack, seed=seed))
        for seed in (SEEDS[:1] if debug else SEEDS)
        for source, stack in runs
    ]


def folder(config: RunConfig, root: Path = ROOT) -> Path:
    """Where a run of the sweep lives."""
    return root / f"{config.stack()}-seed{config.seed}".replace("|", "+").replace("'", "")


def main() -> None:
    """Run what is not finished yet."""
    runs = configs()
    for number, (source, config) in enumerate(runs, 1):
        out = folder(config)
        print(f"[{number}/{len(runs)}] {source}: {config.stack()}, seed {config.seed}", flush=True)
        built = world.build(replace(config, json=True))
        built.backend.start_compilation_cache(run.cache_folder())
        try:
            result = run.execute(built, out)
        except UserError as error:
            sys.exit(f"error: {error}")
        print(f"    dose {result['dose']['value']:.3g}, quality {result['quality']['value']:.3f}")


if __name__ == "__main__":
    main()

"""Runs of the first look at quality against dose: ``python -m experiments.quality_vs_dose.sweep``.

One run after the other in one process, so that nothing is compiled twice. Finished runs are kept;
a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from mismatch_sim import run, world
from mismatch_sim.config import DoseConfig, EvalConfig, RunConfig
from mismatch_sim.errors import UserError

ROOT = Path("runs/quality_vs_dose")

STACKS = {
    "weight noise": [f"weight_noise({s})" for s in (0.01, 0.03, 0.1, 0.3)],
    "logit noise": [f"logit_noise({s})" for s in (0.3, 1.0, 3.0)],
    "staleness": [f"stale({k})" for k in (4, 16, 48)],
    "int8 weights": ["fake_quant('int8')"],
}
OBJECTIVES = ("reverse_kl", "sampled_reverse_kl")
SEEDS = (0, 1, 2)

BASE = RunConfig(
    clean_dir=ROOT / "clean",
    eval=EvalConfig(every=20, samples=2048),
    dose=DoseConfig(prompts=64),
)


def configs() -> list[tuple[str, RunConfig]]:
    """(source, config) of every run, the clean runs of an objective and seed first."""
    runs = [("clean", "identity()")]
    runs += [(source, stack) for source, stacks in STACKS.items() for stack in stacks]
    return [
        (source, replace(BASE, perturb=stack, seed=seed, objective=objective))
        for seed in SEEDS
        for objective in OBJECTIVES
        for source, stack in runs
    ]


def folder(config: RunConfig, root: Path = ROOT) -> Path:
    """Where a run of the sweep lives."""
    stack = str(config.stack()).replace("'", "")
    return root / config.objective / f"{stack}-seed{config.seed}"


def main() -> None:
    """Run what is not finished yet."""
    runs = configs()
    for number, (source, config) in enumerate(runs, 1):
        out = folder(config)
        print(f"[{number}/{len(runs)}] {source}: {out}", flush=True)
        built = world.build(replace(config, json=True))
        built.backend.start_compilation_cache(run.cache_folder())
        try:
            result = run.execute(built, out)
        except UserError as error:
            sys.exit(f"error: {error}")
        print(f"    dose {result['dose']['value']:.3g}, quality {result['quality']['value']:.3f}")


if __name__ == "__main__":
    main()

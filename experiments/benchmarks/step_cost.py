"""What a step costs, and what perturbing and measuring add to it.

    python -m experiments.benchmarks.step_cost [--prototype]

The bare step is rollout, teacher and update, with no operator and nothing measured; the full step
has the default command's operators and the exact KL every step. Both run in turn in one process
(A B A B ...), so that a noisy machine slows both; medians and their ratio are printed, and where
the time of the full step goes. ``--prototype`` takes the shape of the first prototype: two layers
of width 32 for student and teacher, 128 prompts of 8 tokens, 5 generated.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from mismatch_sim import loop, world
from mismatch_sim.backends import jax_backend
from mismatch_sim.config import RunConfig
from mismatch_sim.pairs.train import initial_params
from mismatch_sim.types import Prompts

PROTOTYPE = {"width": 8, "max_new_tokens": 5}


def prototype(built: world.World) -> world.World:
    """The prototype's shape, with random weights and prompts of 4 to 8 tokens."""
    model = replace(
        built.student_model, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8
    )
    student, teacher = (
        jax_backend.from_numpy(initial_params(model.shapes(), seed)) for seed in (0, 1)
    )
    numbers = np.random.default_rng(0)
    mask = (np.arange(8) >= 8 - numbers.integers(4, 9, (128, 1))).astype(np.int32)
    prompts = Prompts((numbers.integers(2, 16, (128, 8)) * mask).astype(np.int32), mask)

    class Fixed(world.World):
        def problems(self, *arguments):
            return prompts

    return Fixed(
        **{
            **{f: getattr(built, f) for f in built.__dataclass_fields__},
            "student_model": model,
            "teacher_model": model,
            "student": student,
            "teacher": teacher,
            **PROTOTYPE,
        }
    )


def measure(full_config: RunConfig, steps: int, shape, beside) -> dict:
    """Alternate bare and full steps; seconds of each, and the full step's phases."""
    bare_config = replace(full_config, perturb="identity()", staleness=0, measure_every=0)
    bare_config = replace(bare_config, noise=type(full_config.noise)())
    worlds = [shape(world.build(c)) for c in (bare_config, full_config)]
    states = [loop.initial_state(w) for w in worlds]
    seconds: list[list[float]] = [[], []]
    phases: list[dict] = []
    for step in range(steps):
        for i, built in enumerate(worlds):
            began = time.perf_counter()
            states[i], _, times = loop.train_step(built, states[i], step, beside)
            seconds[i].append(time.perf_counter() - began)
        phases.append(times)
    warm = steps // 5
    bare, full = (1e3 * float(np.median(s[warm:])) for s in seconds)
    where = {k: 1e3 * float(np.median([p[k] for p in phases[warm:]])) for k in phases[-1]}
    return {"bare_ms": bare, "full_ms": full, "overhead": full / bare - 1, "full_phases_ms": where}


def main() -> None:
    """Print one JSON line a variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prototype", action="store_true")
    arguments = parser.parse_args()
    config = RunConfig(perturb="stale(4)|weight_noise(0.01)", steps=arguments.steps)
    shape = prototype if arguments.prototype else lambda built: built
    with ThreadPoolExecutor(1) as pool:
        for name, beside in (("measured beside the update", pool), ("one after the other", None)):
            result = measure(config, arguments.steps, shape, beside)
            numbers = {k: round(v, 3) for k, v in result.items() if k != "full_phases_ms"}
            where = {k: round(v, 2) for k, v in result["full_phases_ms"].items()}
            print(json.dumps({"variant": name, **numbers, "phases_ms": where}))


if __name__ == "__main__":
    main()

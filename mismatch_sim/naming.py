"""Names of runs and of their folders: short, readable, the same for the same settings.

A name says what is perturbed and the seed, not everything: two runs may share one, and the folder
of the second then ends in ``-2``. What tells runs apart for certain is ``RunConfig.identity``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_sim.errors import UserError, shown
from mismatch_sim.perturb import spec
from mismatch_sim.perturb.grammar import text_of
from mismatch_sim.schedules import Strength

if TYPE_CHECKING:
    from mismatch_sim.config import RunConfig


def run_name(config: RunConfig) -> str:
    """A short name that says what is perturbed, the same for flags and --perturb.

    >>> from mismatch_sim.config import NoiseConfig, RunConfig
    >>> run_name(RunConfig(staleness=4, noise=NoiseConfig(sigma=0.01)))
    'arith-stale4-noise0.01-seed0'
    """
    parts = [Path(config.pair).name, *map(_op_name, config.stack().ops)]
    if config.objective != type(config).objective:
        parts.append(config.objective)
    name = "-".join([*parts, f"seed{config.seed}"])
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")
    if len(name) <= 100:
        return name
    return f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-seed{config.seed}"


def _op_name(op: spec.Operator) -> str:
    match op:
        case spec.Stale(k):
            return f"stale{k}"
        case spec.FakeQuant(scheme):
            return scheme
        case spec.WeightNoise(sigma, relative, resample, include, exclude):
            kind = "noise" if relative else "absnoise"
            often = "" if resample == "rollout" else f"-{resample}"
            where = "-part" if include or exclude else ""
            return f"{kind}{_strength_name(sigma)}{often}{where}"
        case spec.LogitNoise(sigma):
            return f"logit{_strength_name(sigma)}"
        case spec.Masked(inner):
            return f"{_op_name(inner)}-part"
    return op.name


def _strength_name(value: Strength) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    numbers = (getattr(value, f.name) for f in fields(value))
    return "_".join([text_of(value).partition("(")[0], *(f"{n:g}" for n in numbers)])


def out_folder(config: RunConfig, root: Path = Path("runs")) -> Path:
    """Where the run goes: ``--out``, or the first of root/NAME, root/NAME-2, ... that is free.

    Raises:
        UserError: ``--out`` holds a run already (and ``--resume`` is not set), or is a file.
    """
    if config.out is None:
        name, number = run_name(config), 1
        while (out := root / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return out
    if config.out.exists() and not config.out.is_dir():
        raise UserError(f"--out must be a folder, got the file {shown(str(config.out))}")
    if (config.out / "config.json").exists() and not config.resume:
        raise UserError(
            f"--out {config.out} holds a run already; add --resume to go on with it, or give "
            "another folder"
        )
    return config.out

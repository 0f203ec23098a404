"""What stays fixed during a run: the pair, the backend, the two models, the operator, the keys.

The loop, the evaluation and the dose all see a run through this one object, so that a policy is
generated from and scored in the same way wherever it is looked at.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mismatch_sim
from mismatch_sim import pairs
from mismatch_sim import rng as rng_lib
from mismatch_sim.config import RunConfig
from mismatch_sim.errors import UserError, user_input
from mismatch_sim.perturb import spec
from mismatch_sim.perturb.base import Perturbation
from mismatch_sim.types import Array, Backend, Key, Params, Policy, Prompts, Rollout


@dataclass(frozen=True)
class World:
    """A run's fixed surroundings; ``build`` makes one from a config."""

    config: RunConfig
    backend: Backend
    pair: pairs.Pair
    operator: Perturbation
    student_model: Any
    student: Params
    """Initial weights."""
    teacher_model: Any
    teacher: Params
    width: int
    """Padded prompt width."""
    max_new_tokens: int
    key: Key
    """Root key of the run's seed."""

    def generate(self, policy: Policy, prompts: Prompts, key: Key, greedy: bool = False) -> Rollout:
        """Responses of a policy of the student's architecture, at the task's temperature."""
        return self.backend.generate(
            self.student_model,
            policy,
            prompts,
            max_new_tokens=self.max_new_tokens,
            eos_id=self.pair.eos_id,
            pad_id=self.pair.pad_id,
            rng=key,
            temperature=self.config.temperature,
            greedy=greedy,
        )

    def score(self, policy: Policy, rollout: Rollout) -> Array:
        """Logits of a policy of the student's architecture on a rollout, ``[B, N, V]``."""
        return self.backend.logits(self.student_model, policy, rollout, self.config.temperature)

    def score_teacher(self, rollout: Rollout) -> Array:
        """Logits of the teacher on a rollout, ``[B, N, V]``."""
        policy = Policy(self.teacher)
        return self.backend.logits(self.teacher_model, policy, rollout, self.config.temperature)

    def problems(self, split: Any, count: int, *name: int | str) -> Prompts:
        """Encoded prompts of a split, drawn by the run's seed and ``name`` (purpose, step)."""
        seed = rng_lib.fold(self.key, *name)
        numbers = np.random.default_rng(seed.tolist())
        drawn = self.pair.task.draw(split, count, numbers, self.config.length)
        return self.pair.encode(drawn, self.width)


def build(config: RunConfig) -> World:
    """Load everything a run needs.

    Raises:
        UserError: whatever is wrong with pair, checkpoints, prompts, length or operator patterns.
    """
    pair = pairs.load(config.pair, config.prompts)
    shortest, longest = pair.task.lengths
    if not shortest <= config.length <= longest:
        raise UserError(
            f"--length {config.length} is outside what task {pair.task.name} offers:"
            f" {shortest} to {longest}"
        )
    backend: Any = get_backend(config.backend)
    student_model, student = backend.load(pair.student)
    teacher_model, teacher = backend.load(pair.teacher)
    if teacher_model.vocab_size != student_model.vocab_size:
        raise UserError(
            f"--pair {config.pair}: teacher and student differ in vocab_size"
            f" ({teacher_model.vocab_size} and {student_model.vocab_size})"
        )
    with user_input(f"--perturb {config.stack()}"):
        operator = config.stack().build()
        operator.init(student)
    return World(
        config=config,
        backend=backend,
        pair=pair,
        operator=operator,
        student_model=student_model,
        student=student,
        teacher_model=teacher_model,
        teacher=teacher,
        width=pair.prompt_width(config.length),
        max_new_tokens=pair.task.max_new_tokens(config.length),
        key=rng_lib.key(config.seed),
    )


def get_backend(name: str) -> Any:
    """The backend module of a name, imported on demand."""
    return importlib.import_module(f"mismatch_sim.backends.{name}_backend")


@functools.cache
def _source() -> bytes:
    """This package's own source, as it was when first asked for: what this process runs."""
    root = Path(mismatch_sim.__file__).parent
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.py")}
    return b"".join(name.encode() + b"\0" + files[name] + b"\0" for name in sorted(files))


def _cpu() -> str:
    """Model and instruction set of the processor: kernels, and so bits, are chosen by them."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.platform()
    kept = [line for line in first if line.startswith(("model name", "flags", "Features"))]
    return f"{platform.machine()} {hashlib.sha256(''.join(kept).encode()).hexdigest()[:8]}"


def provenance(world: World) -> dict[str, str]:
    """What besides the config can change a run's bytes; it enters the run hash.

    Pair and prompts by digest, library versions and settings, processor, device, thread count, and
    a digest of this package's own source, so that other code's results are never taken for its own.
    """
    source = hashlib.sha256(_source())
    for op in world.config.stack().ops:
        while isinstance(op, spec.Masked):
            op = op.op
        if isinstance(op, spec.Custom):
            source.update(Path(inspect.getfile(op.load())).read_bytes())
    return {
        "mismatch_sim": importlib.metadata.version("mismatch-sim"),
        "source": source.hexdigest()[:16],
        "pair": world.pair.digest(),
        "numpy": np.__version__,
        "cpu": _cpu(),
        **world.backend.versions(),
    }

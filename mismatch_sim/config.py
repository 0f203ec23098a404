"""The one typed config: it is parsed from flags, run, saved, hashed and swept, never copied.

Flags, JSON and Python make the same object. The check of each setting stands beside it, in the
field, and its message names the flag. Every setting enters the run's hash (``identity``) unless its
field says ``bytes=False``: a setting added later can cost a cache miss, never a wrong hit.

The rollout policy has two spellings, flags in the default order (``--staleness 4 --noise.sigma
0.01``) and any order by ``--perturb``; ``stack()`` is what both mean, and ``resolved()`` writes it
in the second.

    >>> RunConfig(staleness=4).resolved() == RunConfig(perturb="stale(4)").resolved()
    True

Left out: config files with inheritance; a preset is a Python value that flags override.
"""

# ruff: noqa: RUF009  (the helpers of `settings` return dataclass fields)

import hashlib
import json as json_lib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro

from mismatch_sim import settings
from mismatch_sim.naming import out_folder as out_folder
from mismatch_sim.naming import run_name as run_name
from mismatch_sim.perturb import spec
from mismatch_sim.perturb.grammar import check_strength, text_of
from mismatch_sim.schedules import Schedule, Strength
from mismatch_sim.settings import Checked, choice, path, real, setting, switch, text, whole

OBJECTIVES = ("reverse_kl", "sampled_reverse_kl")
"""Names of the distillation losses in ``mismatch_sim.objectives``."""


def _perturb(flag: str, value: Any) -> str:
    return "" if value == "" else str(spec.from_json(value, flag))


StrengthFlag = Annotated[
    Strength,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT|SCHEDULE",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str | int | float | Schedule),
        str_from_instance=lambda value: [text_of(value)],
    ),
]
"""A number or a schedule; the text becomes one in the config's own check, for JSON as well."""


@dataclass(frozen=True)
class NoiseConfig(Checked):
    """Gaussian noise in the rollout policy."""

    PREFIX = "noise."

    sigma: StrengthFlag = setting(0.0, check_strength)
    """Weight noise: standard deviation relative to each tensor's RMS. A number, or a schedule of
    the step: linear(start, end, steps), cosine(start, end, steps), onset(value, begin)."""
    logit_sigma: StrengthFlag = setting(0.0, check_strength)
    """Logit noise: standard deviation in nats. A number or a schedule."""
    resample: Literal["rollout", "version", "never"] = choice("rollout", *spec.RESAMPLE)
    """When weight noise is drawn anew: every rollout batch, every weight version, or once a run."""
    relative: bool = switch(True)
    """Weight noise relative to each tensor's RMS; otherwise absolute."""


@dataclass(frozen=True)
class OptimConfig(Checked):
    """AdamW and its learning rate."""

    PREFIX = "optim."

    lr: float = real(1e-3, low=0)
    """Peak learning rate."""
    warmup: int = whole(10, low=0)
    """Steps of linear warm-up; then half a cosine to the last step."""
    floor: float = real(0.0, low=0, high=1)
    """Learning rate at the last step, as a share of the peak."""
    weight_decay: float = real(0.0, low=0)
    """Decoupled decay, on matrices only."""
    clip: float = real(1.0, low=0)
    """Largest global norm of the gradient; 0 does not clip."""
    beta1: float = real(0.9, low=0, below=1)
    """Adam's first-moment decay."""
    beta2: float = real(0.99, low=0, below=1)
    """Adam's second-moment decay."""
    eps: float = real(1e-8, above=0)
    """Adam's epsilon."""

    def static(self) -> Self:
        """The settings that change a compiled update; those of the learning rate do not."""
        return replace(self, lr=0.0, warmup=0, floor=0.0)


@dataclass(frozen=True)
class EvalConfig(Checked):
    """How quality is measured, on prompts that no training or probing sees."""

    PREFIX = "eval."

    every: int = whole(50, low=0)
    """Steps between evaluations; the first and the last policy always are. 0: only those two."""
    samples: int = whole(5120, low=1)
    """Responses per evaluation."""
    batch: int = whole(512, low=1)
    """Responses generated at a time."""


@dataclass(frozen=True)
class DoseConfig(Checked):
    """How the dose is measured, on the clean reference run."""

    PREFIX = "dose."

    skip: bool = switch(False)
    """Do not measure the dose (and need no clean reference run)."""
    checkpoints: int = whole(8, low=1)
    """Evenly spaced steps of the clean run per draw at which the operators are applied; every draw
    has its own, so that all draws together see checkpoints x draws steps."""
    draws: int = whole(8, low=2)
    """Draws of noise, prompts and steps; the interval is over them."""
    prompts: int = whole(128, low=1)
    """Probe prompts per draw and checkpoint."""


@dataclass(frozen=True)
class RunConfig(Checked):
    """One on-policy distillation run under one rollout policy."""

    pair: str = text("arith")
    """Student and teacher: a built-in pair, or a folder holding student/ and teacher/."""
    backend: Literal["jax"] = choice("jax", "jax")
    """What runs the models."""
    objective: str = choice("reverse_kl", *OBJECTIVES)
    """Distillation loss: reverse_kl (over the full vocabulary) or sampled_reverse_kl."""
    correction: Literal["none"] = choice("none", "none")
    """Importance correction of the loss."""
    steps: int = whole(100, low=1)
    """Optimiser updates."""
    batch: int = whole(128, low=1)
    """Prompts per rollout, one response each."""
    length: int = whole(6, low=1)
    """How long problems are: for arith, the most operations in a prompt (1 to 12); with --prompts,
    the most tokens generated."""
    temperature: float = real(1.0, above=0)
    """Sampling temperature of student, rollout policy and teacher alike."""
    seed: int = whole(0, low=0, high=2**32 - 1)
    """Decides every random draw of the run."""
    perturb: Annotated[str, tyro.conf.arg(metavar="OPERATORS")] = setting("", _perturb)
    """Operators from left to right, quoted, in place of --staleness, --quant and --noise.*:
    "stale(4)|fake_quant('int8')|weight_noise(0.01)|logit_noise(0.3)"; also
    masked(weight_noise(0.01), include='mlp'), and custom('my_module:my_function', 0.5) for your
    own."""
    staleness: int = whole(0, low=0, high=10_000)
    """Roll out with the weights of this many updates ago."""
    quant: str = choice("none", "none", *spec.SCHEMES)
    """Fake-quantise the rollout weights: none or int8."""
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    dose: DoseConfig = field(default_factory=DoseConfig, metadata={"bytes": False})
    measure_every: int = whole(1, low=0)
    """Steps between measurements of the mismatch; 0 never measures it."""
    checkpoint_every: int = whole(25, low=1, bytes=False)
    """Steps between checkpoints, from which --resume goes on."""
    prompts: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = path(None)
    """Prompts of your own in place of the task's: {"prompt": "...", "answer": "..."} a line."""
    clean_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = path(Path("runs/clean"), bytes=False)
    """Where clean reference runs are kept and found."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = path(None, bytes=False, saved=False)
    """The run's folder. Without it, runs/NAME, with -2, -3, ... if taken."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = path(
        None, bytes=False, saved=False
    )
    """Take the settings of this config.json of an earlier run; flags given go before it."""
    resume: bool = switch(False, bytes=False, saved=False)
    """Go on with the run in --out, with the settings it was started with."""
    json: bool = switch(False, bytes=False, saved=False)
    """Make the last line of stdout the content of result.json."""
    dry_run: bool = switch(False, bytes=False, saved=False)
    """Check everything, say what would run, and stop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out, the folder of the run to go on with")
        given = [SHORTHAND[n] for n in SHORTHAND if getattr(self, n) != _default(n)]
        if self.perturb and given:
            both = ", ".join(given)
            raise ValueError(f"--perturb says all of {both} itself; give one or the other")

    def stack(self) -> spec.Stack:
        """The operators, from --perturb or from the flags in the default order.

        A flag of value 0 adds no operator; what --perturb spells out is kept.

        >>> print(RunConfig(quant="int8", staleness=2).stack())
        stale(k=2)|fake_quant(scheme='int8')
        """
        if self.perturb:
            return spec.parse(self.perturb, "--perturb")
        ops: list[spec.Operator] = []
        if self.staleness:
            ops.append(spec.Stale(self.staleness))
        if self.quant != "none":
            ops.append(spec.FakeQuant(self.quant))
        if self.noise.sigma != 0:
            noise = self.noise
            ops.append(spec.WeightNoise(noise.sigma, noise.relative, noise.resample))
        if self.noise.logit_sigma != 0:
            ops.append(spec.LogitNoise(self.noise.logit_sigma))
        return spec.Stack(tuple(ops))

    def resolved(self) -> Self:
        """The same run with its stack in ``perturb`` and the flags for it at their defaults."""
        shorthand: dict[str, Any] = {name: _default(name) for name in SHORTHAND}
        return replace(self, perturb=str(self.stack()), **shorthand)

    def as_flags(self) -> Self:
        """The same run with its stack in the flags; as it is where they cannot say it."""
        kinds = {type(op): op for op in self.stack().ops}
        blank = replace(self.resolved(), perturb="")
        noise: Any = kinds.get(spec.WeightNoise, spec.WeightNoise(0.0))
        written = replace(
            blank,
            staleness=getattr(kinds.get(spec.Stale), "k", 0),
            quant=getattr(kinds.get(spec.FakeQuant), "scheme", "none"),
            noise=NoiseConfig(
                noise.sigma,
                getattr(kinds.get(spec.LogitNoise), "sigma", 0.0),
                noise.resample,
                noise.relative,
            ),
        )
        return written if written.stack() == self.stack() else self

    def clean(self) -> Self:
        """The clean reference of this run: identity stack, no correction, all else equal.

        Settings of this invocation alone (``out``, ``resume``, ...) are at their defaults.
        """
        local: dict[str, Any] = {
            f.name: f.default for f in fields(self) if not f.metadata.get("saved", True)
        }
        return replace(self.resolved(), perturb="identity()", correction="none", **local)

    def to_json(self) -> dict[str, Any]:
        """What config.json holds: every setting but those of one invocation; re-runnable as is."""
        return settings.to_json(self.resolved())

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The config of a JSON object; settings that are absent have their defaults.

        Raises:
            ValueError: an unknown key or a bad value, named by its flag. ``perturb`` may be text or
                the structured list of ``Stack.to_json``.
        """
        return settings.from_json(cls, data)

    def byte_settings(self) -> dict[str, Any]:
        """Flat ``{setting: value}`` of all that can change the bytes of metrics.jsonl."""
        return dict(settings.byte_settings(self.resolved()))

    def identity(self, extra: dict[str, Any]) -> str:
        """Hash of what can change the bytes of metrics.jsonl: equal hash, equal bytes.

        Args:
            extra: what no flag says: digests of pair and prompts, package versions, threads.
        """
        content = {"config": self.byte_settings(), "extra": extra}
        text = json_lib.dumps(content, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


SHORTHAND = {"staleness": "--staleness", "quant": "--quant", "noise": "--noise.*"}
"""Settings that spell the stack in the default order, and their flags."""


def _default(name: str) -> Any:
    """The default of a setting of RunConfig; a group's is the group with all its defaults."""
    return NoiseConfig() if name == "noise" else getattr(RunConfig, name)

"""The config: one object from flags, JSON and Python; every setting checked and in the hash."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from mismatch_sim import cli
from mismatch_sim.config import (
    DoseConfig,
    EvalConfig,
    NoiseConfig,
    OptimConfig,
    RunConfig,
    out_folder,
    run_name,
)
from mismatch_sim.errors import UserError
from mismatch_sim.perturb.spec import FakeQuant, LogitNoise, Stack, Stale, WeightNoise, parse
from mismatch_sim.schedules import linear, onset


def from_flags(*argv):
    return cli.parse(RunConfig, argv, "run", "")


# --- the stack, spelled three ways ------------------------------------------------------------

SPELLINGS = [
    ([], Stack()),
    (["--staleness", "0", "--noise.sigma", "0", "--quant", "none"], Stack()),
    (["--staleness", "4"], Stack((Stale(4),))),
    (["--noise.sigma", "0.01"], Stack((WeightNoise(0.01),))),
    (["--noise.logit-sigma", "1"], Stack((LogitNoise(1.0),))),
    (["--quant", "int8"], Stack((FakeQuant("int8"),))),
    (
        [
            "--noise.logit-sigma=onset(0.5,3)",
            "--noise.sigma=linear(0,0.01,100)",
            "--noise.resample=never",
            "--noise.no-relative",
            "--quant=int8",
            "--staleness=2",
        ],
        Stack(
            (
                Stale(2),
                FakeQuant("int8"),
                WeightNoise(linear(0, 0.01, 100), relative=False, resample="never"),
                LogitNoise(onset(0.5, 3)),
            )
        ),
    ),
]


@pytest.mark.parametrize(("argv", "stack"), SPELLINGS, ids=lambda v: str(v)[:40])
def test_flags_text_and_json_make_the_same_run(argv, stack):
    config = from_flags(*argv)
    by_text = from_flags("--perturb", str(stack))
    by_list = RunConfig.from_json({"perturb": stack.to_json()})
    saved = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert config.stack() == by_text.stack() == by_list.stack() == saved.stack() == stack
    assert config.resolved() == by_text.resolved() == by_list.resolved() == saved
    assert len({c.identity({}) for c in (config, by_text, by_list, saved)}) == 1
    assert len({run_name(c) for c in (config, by_text, by_list, saved)}) == 1


@pytest.mark.parametrize(("argv", "stack"), SPELLINGS, ids=lambda v: str(v)[:40])
def test_as_flags_undoes_resolved(argv, stack):
    flags = from_flags(*argv).resolved().as_flags()
    assert flags.perturb == ""
    assert flags.stack() == stack


@pytest.mark.parametrize(
    "text", ["stale(0)", "logit_noise(1)|stale(2)", "stale(1)|stale(1)", "weight_noise(1, True, "
             "'rollout', 'mlp')", "masked(stale(1), 'mlp')"]
)  # fmt: skip
def test_as_flags_keeps_what_flags_cannot_say(text):
    config = RunConfig(perturb=text)
    assert config.as_flags() == config


def test_python_takes_text_where_flags_do():
    config = RunConfig(noise=NoiseConfig(sigma="linear(0, 1, 5)"), out="runs/x", prompts="p.jsonl")
    assert config.noise.sigma == linear(0, 1, 5)
    assert config.out == Path("runs/x")
    assert config.prompts == Path("p.jsonl")


def test_numbers_are_stored_as_their_kind():
    config = RunConfig(temperature=1)
    assert type(config.temperature) is float
    assert config == RunConfig() and hash(config) == hash(RunConfig())


def test_to_json_is_rerunnable_and_leaves_out_the_invocation():
    config = RunConfig(staleness=4, out="runs/x", resume=True, json=True, dry_run=True, seed=3)
    saved = config.to_json()
    assert saved["perturb"] == "stale(k=4)"
    assert not {"out", "resume", "json", "dry_run"} & set(saved)
    assert RunConfig.from_json(saved) == RunConfig(perturb="stale(4)", seed=3)


def test_clean_changes_the_policy_and_nothing_else():
    config = RunConfig(staleness=4, seed=3, steps=7, out="runs/x", json=True)
    assert config.clean() == RunConfig(perturb="identity()", seed=3, steps=7)
    assert config.clean().clean() == config.clean()
    assert config.clean().identity({}) == RunConfig(seed=3, steps=7).identity({})


# --- the hash ----------------------------------------------------------------------------------

GROUPS = {"noise": NoiseConfig, "optim": OptimConfig, "eval": EvalConfig, "dose": DoseConfig}


def _other(value):
    """Another valid value of the same kind, or None."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 or 0.25
    others = {"reverse_kl": "sampled_reverse_kl", "arith": "arith2", "": "stale(3)"}
    others |= {"none": "int8", "rollout": "never"}
    return Path("elsewhere") if value is None or isinstance(value, Path) else others.get(value)


def _changed():
    """(dotted name, config with that one setting changed, can it change bytes) of all settings."""
    # Noise is on, so that its resample and relative say something.
    base = RunConfig(noise=NoiseConfig(sigma=0.5))
    for f in fields(base):
        value = getattr(base, f.name)
        if f.name in ("backend", "correction"):  # one allowed value so far
            continue
        if is_dataclass(value):
            for g in fields(value):
                group = replace(value, **{g.name: _other(getattr(value, g.name))})
                marks = f.metadata.get("bytes", True) and g.metadata["bytes"]
                yield f"{f.name}.{g.name}", replace(base, **{f.name: group}), marks
        elif f.name == "perturb":
            yield f.name, RunConfig(perturb="stale(3)"), True
        elif f.name == "resume":
            yield f.name, replace(base, resume=True, out=Path("x")), False
        else:
            yield f.name, replace(base, **{f.name: _other(value)}), f.metadata["bytes"]


CHANGED = list(_changed())
BYTES_FREE = {"out", "config", "resume", "json", "dry_run", "clean_dir", "checkpoint_every"} | {
    f"dose.{f.name}" for f in fields(DoseConfig)
}


def test_hash_changes_with_every_setting_that_can_change_bytes():
    base = RunConfig(noise=NoiseConfig(sigma=0.5)).identity({"pair": "p"})
    hashes = [config.identity({"pair": "p"}) for _, config, bytes_ in CHANGED if bytes_]
    assert len(hashes) >= 20
    assert len({base, *hashes}) == len(hashes) + 1


@pytest.mark.parametrize("name", sorted(BYTES_FREE))
def test_hash_ignores_what_cannot_change_bytes(name):
    base = RunConfig(noise=NoiseConfig(sigma=0.5)).identity({})
    config = next(config for changed, config, _ in CHANGED if changed == name)
    assert config != RunConfig(noise=NoiseConfig(sigma=0.5))
    assert config.identity({}) == base


def test_marks_are_as_listed():
    assert {name for name, _, bytes_ in CHANGED if not bytes_} == BYTES_FREE


def test_hash_covers_the_extra_facts_and_is_stable():
    config = RunConfig()
    assert config.identity({"a": 1, "b": 2}) == config.identity({"b": 2, "a": 1})
    assert config.identity({"a": 1}) != config.identity({"a": 2})
    assert len(config.identity({})) == 16
    assert RunConfig.from_json({}).identity({}) == config.identity({})


# --- errors --------------------------------------------------------------------------------------

BAD = [
    ({"steps": 0}, "--steps must be an integer >= 1, got 0"),
    ({"steps": 10.0}, "--steps must be an integer >= 1, got 10.0"),
    ({"steps": True}, "--steps must be an integer >= 1, got True"),
    ({"steps": "10"}, "--steps must be an integer >= 1, got '10'"),
    ({"batch": 0}, "--batch must be an integer >= 1, got 0"),
    ({"length": 0}, "--length must be an integer >= 1, got 0"),
    ({"temperature": 0}, "--temperature must be a finite number > 0, got 0"),
    ({"temperature": float("inf")}, "--temperature must be a finite number > 0, got inf"),
    ({"seed": -1}, "--seed must be an integer >= 0 and <= 4294967295, got -1"),
    ({"seed": 2**32}, "--seed must be an integer >= 0 and <= 4294967295, got 4294967296"),
    ({"staleness": -1}, "--staleness must be an integer >= 0 and <= 10000, got -1"),
    ({"measure_every": -1}, "--measure-every must be an integer >= 0, got -1"),
    ({"checkpoint_every": 0}, "--checkpoint-every must be an integer >= 1, got 0"),
    ({"backend": "torhc"}, "--backend must be one of jax, got 'torhc'"),
    ({"objective": "reverse_k"}, "did you mean 'reverse_kl'?"),
    ({"quant": "int9"}, "--quant must be one of none, int8, got 'int9'; did you mean 'int8'?"),
    ({"pair": ""}, "--pair must be a name or a folder, got ''"),
    ({"out": ""}, "--out must be a path other than the current folder, got ''"),
    ({"out": 3}, "--out must be a path other than the current folder, got 3"),
    ({"json": 1}, "--json must be True or False, got 1"),
    ({"perturb": "stael(4)"}, "--perturb: unknown name 'stael'"),
    ({"perturb": None}, "--perturb: must be text or a list of operators, got None"),
    ({"perturb": []}, None),
    ({"noise": {"sigma": -1.0}}, "--noise.sigma must be a finite number >= 0, got -1.0"),
    ({"noise": {"sigma": "ramp(1)"}}, "--noise.sigma: unknown name 'ramp'; allowed: linear,"),
    ({"noise": {"sigma": "onset(1, 2)|onset(1, 2)"}}, "--noise.sigma must be one schedule"),
    ({"noise": {"logit_sigma": "x"}}, "--noise.logit-sigma must be a finite number >= 0 or a sch"),
    ({"noise": {"resample": "x"}}, "--noise.resample must be one of rollout, version, never"),
    ({"noise": {"sgima": 1}}, "unknown setting 'noise.sgima'; did you mean 'sigma'?"),
    ({"noise": 0.1}, "noise must be an object, got 0.1"),
    ({"optim": {"lr": -1}}, "--optim.lr must be a finite number >= 0, got -1"),
    ({"optim": {"beta2": 1}}, "--optim.beta2 must be a finite number >= 0 and < 1, got 1"),
    ({"optim": {"floor": 1.1}}, "--optim.floor must be a finite number >= 0 and <= 1, got 1.1"),
    ({"optim": {"eps": 0}}, "--optim.eps must be a finite number > 0, got 0"),
    ({"eval": {"samples": 0}}, "--eval.samples must be an integer >= 1, got 0"),
    ({"dose": {"draws": 1}}, "--dose.draws must be an integer >= 2, got 1"),
    ({"stalness": 4}, "unknown setting 'stalness'; did you mean 'staleness'?"),
    ({"resume": True}, "--resume needs --out"),
    ({"perturb": "stale(1)", "staleness": 2}, "--perturb says all of --staleness itself"),
    ({"perturb": "identity()", "quant": "int8"}, "--perturb says all of --quant itself"),
    ({"perturb": "stale(1)", "noise": {"resample": "never"}}, "says all of --noise.* itself"),
    ([], "config must be an object, got []"),
]


@pytest.mark.parametrize(("data", "expected"), BAD, ids=str)
def test_bad_settings_are_one_line_that_names_the_flag(data, expected):
    if expected is None:
        RunConfig.from_json(data)
        return
    with pytest.raises(ValueError) as caught:
        RunConfig.from_json(data)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_setting_has_a_check_and_every_group_its_prefix():
    for f in fields(RunConfig):
        assert "check" in f.metadata or f.name in GROUPS
    for name, group in GROUPS.items():
        assert name + "." == group.PREFIX
        assert all("check" in f.metadata for f in fields(group))


# --- names and folders -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (RunConfig(), "arith-seed0"),
        (RunConfig(staleness=4, noise=NoiseConfig(sigma=0.01)), "arith-stale4-noise0.01-seed0"),
        (RunConfig(quant="int8", seed=3), "arith-int8-seed3"),
        (RunConfig(noise=NoiseConfig("linear(0, 0.01, 9)")), "arith-noiselinear_0_0.01_9-seed0"),
        (RunConfig(perturb="masked(stale(2), 'mlp')"), "arith-stale2-part-seed0"),
        (RunConfig(objective="sampled_reverse_kl"), "arith-sampled_reverse_kl-seed0"),
        (RunConfig(pair="/data/My Pair/"), "My_Pair-seed0"),
    ],
)  # fmt: skip
def test_run_name_says_what_is_perturbed(config, name):
    assert run_name(config) == name


def test_run_name_of_a_long_stack_is_short_and_its_own():
    a, b = (RunConfig(perturb="|".join(["stale(1)"] * n)) for n in (30, 31))
    assert run_name(a) != run_name(b)
    assert max(len(run_name(a)), len(run_name(b))) < 110


def test_out_folder_takes_the_first_free_name(tmp_path):
    config = RunConfig(staleness=4)
    for name in ("arith-stale4-seed0", "arith-stale4-seed0-2", "arith-stale4-seed0-3"):
        assert out_folder(config, tmp_path) == tmp_path / name
        (tmp_path / name).mkdir()


def test_out_folder_never_overwrites_a_run(tmp_path):
    config = RunConfig(out=tmp_path)
    assert out_folder(config) == tmp_path
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="--resume"):
        out_folder(config)
    assert out_folder(replace(config, resume=True)) == tmp_path
    with pytest.raises(UserError, match="--out must be a folder"):
        out_folder(RunConfig(out=tmp_path / "config.json"))


def test_static_optimiser_settings_ignore_the_learning_rate():
    assert OptimConfig(lr=1, warmup=3, floor=0.5).static() == OptimConfig().static()
    assert OptimConfig(clip=0).static() != OptimConfig().static()
    assert parse("stale(1)").ops == RunConfig(staleness=1).stack().ops

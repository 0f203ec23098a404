"""The command line: whatever the user gets wrong is one line on stderr and exit status 2."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from mismatch_sim import cli
from mismatch_sim.config import RunConfig
from mismatch_sim.errors import RunError, UserError, user_input
from mismatch_sim.settings import flag

ROOT = Path(__file__).parents[1]

# What a command's main looks like, without a run behind it.
SCRIPT = """
import sys
from mismatch_sim import cli

@cli.guard
def main(argv=None):
    print(cli.parse_run(argv).resolved())

sys.exit(main())
"""


def python(*argv, **env):
    return subprocess.run(
        [sys.executable, "-W", "error", *argv],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def command(capsys):
    """Runs the command in this process: (status, stdout, stderr)."""

    @cli.guard
    def main(argv):
        print(cli.parse_run(argv).to_json())

    def call(*argv):
        status = main(list(argv))
        return status, *capsys.readouterr()

    return call


BAD = [
    (["--nosie.sigma", "1"], "unknown option --nosie.sigma; did you mean --noise.sigma?"),
    (["--nosie.sigma=1"], "unknown option --nosie.sigma; did you mean --noise.sigma?"),
    (["--stalness", "4"], "unknown option --stalness; did you mean --staleness?"),
    (["--sigma", "1"], "--noise.sigma?"),
    (["--qqqqqq", "1"], "unknown option --qqqqqq"),
    (["--noise.sigma", "-1"], "--noise.sigma must be a finite number >= 0, got -1.0"),
    (["--noise.sigma", "abc"], "or a schedule (linear, cosine, onset), got 'abc'"),
    (["--noise.sigma", "linaer(0, 1, 2)"], "did you mean 'linear'?"),
    (["--noise.sigma", "linear(0, 1)"], "--noise.sigma: linear needs steps"),
    (["--noise.resample", "nevr"], "--noise.resample must be one of rollout, version, never, got"),
    (["--quant", "int9"], "--quant must be one of none, int8, got 'int9'; did you mean 'int8'?"),
    (["--backend", "torch"], "--backend must be one of jax, got 'torch'"),
    (["--steps"], "--steps needs a value"),
    (["--perturb", "--json"], "--perturb needs a value"),
    (["--steps", "ten"], "--steps must be an integer, got 'ten'"),
    (["--steps", "1.5"], "--steps must be an integer, got '1.5'"),
    (["--steps", "0"], "--steps must be an integer >= 1, got 0"),
    (["--temperature", "hot"], "--temperature must be a number, got 'hot'"),
    (["--optim.lr", "nan"], "--optim.lr must be a finite number >= 0, got nan"),
    (["--out", ""], "--out must be a path other than the current folder"),
    (["--json", "true"], "unexpected 'true': options start with --"),
    (["bogus"], "unexpected 'bogus': options start with --"),
    (["--perturb", "stael(4)"], "--perturb: unknown name 'stael'; allowed: identity, stale,"),
    (["--perturb", "stale(4"], "--perturb: cannot read 'stale(4': '(' was never closed"),
    (["--perturb", "stale(4)\n|x"], "--perturb: cannot read"),
    (["--perturb", "stale(1)", "--staleness", "4"], "--perturb says all of --staleness itself"),
    (["--resume"], "--resume needs --out"),
    (
        ["--resume", "--out", "no/such"],
        "cannot read the settings in no/such/config.json: No such file",
    ),
]


@pytest.mark.parametrize(("argv", "expected"), BAD, ids=lambda v: str(v)[:40])
def test_wrong_use_is_one_line_and_status_2(command, argv, expected):
    status, out, err = command(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    assert expected in err
    assert not set(err) & set("│╭╰─\x1b")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nosie.sigma", "1"], "unknown option --nosie.sigma; did you mean --noise.sigma?"),
        (["--noise.sigma", "-1"], "--noise.sigma must be a finite number >= 0, got -1.0"),
        (["--noise.resample", "x"], "--noise.resample must be one of rollout, version, never, got"),
    ],
)
def test_wrong_use_of_a_process_whatever_the_terminal(argv, expected):
    for encoding in ("utf-8", "ascii"):
        done = python("-c", SCRIPT, *argv, COLUMNS="20", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1 and expected in done.stderr


def test_help_names_every_flag_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.parse_run(["--help"])
    out, err = capsys.readouterr()
    assert not stop.value.code and err == ""
    for f in fields(RunConfig):
        if is_dataclass(f.type):
            for g in fields(f.type):
                assert _help_of(out, flag(f"{f.name}.{g.name}"))
        else:
            assert _help_of(out, flag(f.name))


def _help_of(help_text, name):
    """The help after a flag: words, up to the default that ends it."""
    words = " ".join(re.sub(r"[│|] | [│|]", " ", help_text).split())
    entry = re.search(rf" {name}(,| [A-Z{{]).*?\(default: ", words)
    return entry and len(entry.group().split()) > 4


def test_flags_reach_the_config():
    config = cli.parse_run(
        ["--noise.sigma", "0.01", "--staleness", "4", "--eval.every=5", "--json", "--steps", "7"]
    )
    assert str(config.stack()) == "stale(k=4)|weight_noise(sigma=0.01)"
    assert (config.eval.every, config.json, config.steps) == (5, True, 7)


# --- --resume ----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    config = cli.parse_run(
        ["--steps=7", "--staleness=4", "--noise.sigma=linear(0,1,5)", "--noise.resample=never"]
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    return tmp_path, config


@pytest.mark.parametrize(
    "again",
    [
        [],
        ["--steps", "7"],
        ["--staleness", "4"],
        ["--noise.sigma", "linear(0, 1, 5)"],
        ["--noise.no-relative", "--noise.relative"],
        ["--perturb", "stale(4)|weight_noise(linear(0, 1, 5), resample='never')"],
        ["--staleness=4", "--noise.sigma=linear(0,1,5)", "--noise.resample=never"],
        ["--json", "--checkpoint-every", "2", "--dose.skip", "--clean_dir", "c"],
    ],
)
def test_resume_takes_the_settings_of_the_run(saved, again):
    folder, config = saved
    resumed = cli.parse_run(["--resume", "--out", str(folder), *again])
    assert resumed.byte_settings() == config.byte_settings()
    assert resumed.resume and resumed.out == folder
    assert resumed.checkpoint_every == (2 if "--checkpoint-every" in again else 25)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps", "8"], "these differ: steps: 7 -> 8;"),
        (["--steps", "8", "--seed", "1"], "these differ: steps: 7 -> 8, seed: 0 -> 1;"),
        (["--optim.lr", "1"], "optim.lr: 0.001 -> 1.0"),
        (["--staleness", "0"], "perturb: stale(k=4)|weight_noise("),
        (["--staleness", "5"], "-> stale(k=5)|weight_noise(sigma=linear("),
        (["--perturb", "stale(4)"], "-> stale(k=4);"),
        (["--perturb", ""], "-> identity();"),
    ],
)
def test_resume_refuses_to_become_another_run(saved, command, argv, expected):
    status, out, err = command("--resume", "--out", str(saved[0]), *argv)
    assert (status, out) == (2, "")
    assert expected in err and err.count("\n") == 1


def test_resume_of_a_stack_that_flags_cannot_say(tmp_path, command):
    saved = RunConfig(perturb="logit_noise(1)|stale(4)").to_json()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    status, _, err = command("--resume", "--out", str(tmp_path), "--staleness", "4")
    assert status == 2 and err.count("\n") == 1
    assert "--staleness" in err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stepz": 1}', '{"steps": 0}'])
def test_resume_of_a_broken_config_is_one_line(tmp_path, command, text):
    (tmp_path / "config.json").write_text(text)
    status, out, err = command("--resume", "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("error: cannot read the settings in ") and err.count("\n") == 1


# --- main and guard --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["rnu"], "error: unknown command 'rnu'; allowed: run; did you mean 'run'?\n"),
        (["--hlp"], "error: unknown option '--hlp'; allowed: run; did you mean '--help'?\n"),
        (["--qqq", "3"], "error: unknown option '--qqq'; allowed: run\n"),
    ],
)  # fmt: skip
def test_unknown_command(capsys, argv, expected):
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", expected)


def test_main_lists_commands_and_version(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mismatch-sim ")


def test_module_runs_as_the_script_does():
    done = python("-m", "mismatch_sim", "rnu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown command 'rnu'; allowed: run; did you mean 'run'?\n"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("--a must be b"), 2, "error: --a must be b\n"),
        (RunError("loss is nan\nat step 3"), 1, "error: loss is nan at step 3\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_guard_turns_errors_into_a_line_and_a_status(capsys, error, status, line):
    @cli.guard
    def body():
        raise error

    assert body() == status
    assert capsys.readouterr() == ("", line)


def test_guard_lets_bugs_through():
    @cli.guard
    def body():
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        body()


def test_user_input_marks_value_errors_as_the_users():
    with pytest.raises(UserError, match="--perturb: no match"), user_input("--perturb"):
        raise ValueError("no match")
    with pytest.raises(UserError, match=r"^named$"), user_input("--perturb"):
        raise UserError("named")


def test_parse_leaves_the_environment_alone(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    cli.parse_run([])
    assert "COLUMNS" not in os.environ
    monkeypatch.setenv("COLUMNS", "33")
    with pytest.raises(UserError):
        cli.parse_run(["--steps", "x"])
    assert os.environ["COLUMNS"] == "33"

"""``mismatch-sim run`` as a user meets it: processes, kills, mistakes, prompts of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_sim import run as run_module
from mismatch_sim.tasks import arith

SMALL = [
    *("--steps", "12", "--batch", "16", "--length", "2", "--checkpoint-every", "2"),
    *("--eval.samples", "32", "--eval.batch", "32", "--eval.every", "5"),
    *("--dose.checkpoints", "2", "--dose.draws", "2", "--dose.prompts", "32"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs shared by the processes of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(cache, tmp_path):
    """``command(*flags)`` -> a finished process, in an empty folder; ``.start`` -> a live one."""

    def start(*flags, **more):
        env = os.environ | {"XDG_CACHE_HOME": str(cache)}
        return subprocess.Popen(
            [sys.executable, "-m", "mismatch_sim.run", *map(str, flags)],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def finish(*flags):
        process = start(*flags)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(flags, process.returncode, out, err)

    finish.start = start
    return finish


def one_error_line(done, status, *words):
    assert done.returncode == status, done.stderr
    lines = [x for x in done.stderr.splitlines() if x.startswith("error:")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(word in lines[0] for word in words), lines[0]


# --- a run from start to finish -----------------------------------------------------------------


def test_a_run_prints_a_summary_and_json_holds_result_json(command, tmp_path):
    flags = (*SMALL, "--noise.sigma", 0.01, "--staleness", 2)
    done = command(*flags, "--out", "a")
    assert done.returncode == 0, done.stderr
    for word in ("stale(k=2) | weight_noise(sigma=0.01)", "dose", "quality", "change", "runs"):
        assert word in done.stdout or word == "runs"
    done = command(*flags, "--out", "b", "--json")
    assert done.returncode == 0 and "3/3 dose" in done.stderr  # progress, apart from stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "b" / "result.json").read_text())
    for key in ("quality", "quality_start", "dose"):
        assert result[key]["low"] <= result[key]["value"] <= result[key]["high"]
    assert {"kl_exact_mean", "kl_exact_last", "steps", "out", "clean"} <= set(result)
    assert result["steps"] == 12 and result["out"] == "b"
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (
        tmp_path / "b/metrics.jsonl"
    ).read_bytes()
    times = {"time/rollout", "time/teacher", "time/measure", "time/update", "time/total"}
    assert times <= set(json.loads((tmp_path / "a/timing.jsonl").read_text().splitlines()[1]))
    # the clean reference was run once and is a run like any other
    (clean,) = (tmp_path / "runs" / "clean").iterdir()
    assert json.loads((clean / "result.json").read_text())["dose"]["value"] == 0.0
    # config.json is re-runnable as it is, and flags go before it
    again = command("--config", "b/config.json", "--out", "c", "--json")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "c/metrics.jsonl").read_bytes() == (
        tmp_path / "b/metrics.jsonl"
    ).read_bytes()
    plan = json.loads(
        command("--config", "b/config.json", "--noise.sigma", 0.5, "--dry-run").stdout
    )
    assert plan["operators"] == "stale(k=2)|weight_noise(sigma=0.5)"
    # a finished run is not run again
    again = command("--out", "b", "--resume", "--json")
    assert again.returncode == 0 and json.loads(again.stdout) == result


def test_a_clean_run_needs_no_reference_and_has_dose_zero(command, tmp_path):
    result = json.loads(command(*SMALL, "--json").stdout)
    assert result["dose"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert not (tmp_path / "runs" / "clean").exists()
    assert command(*SMALL, "--json").returncode == 0  # a default folder never collides
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_dry_run_says_what_would_run_and_writes_nothing(command, tmp_path):
    done = command(*SMALL, "--staleness", 3, "--dry-run")
    plan = json.loads(done.stdout)
    assert plan["operators"] == "stale(k=3)" and len(plan["hash"]) == 16
    assert list(tmp_path.iterdir()) == []


# --- kills and interrupts -----------------------------------------------------------------------

KILLS = [pytest.param(3), pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kills", KILLS)
def test_killed_at_random_steps_and_resumed_the_bytes_are_the_same(command, tmp_path, kills):
    steps = 4 * kills
    flags = [*SMALL, "--steps", steps, "--dose.skip", "--perturb"]
    flags += ["stale(3)|weight_noise(0.02)|logit_noise(0.1)"]
    assert command(*flags, "--out", "whole").returncode == 0
    numbers = random.Random(kills)
    targets = sorted(numbers.sample(range(1, steps), kills))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for target in targets:
        resume = ["--resume"] if metrics.exists() else []
        process = command.start(*(flags if not resume else []), "--out", "killed", *resume)
        while process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= target:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert command("--out", "killed", "--resume").returncode == 0
    assert metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_folder_that_goes_on(command, tmp_path, number):
    flags = [*SMALL, "--steps", 200, "--dose.skip", "--staleness", 2, "--eval.every", 0]
    metrics = tmp_path / "a" / "metrics.jsonl"
    process = command.start(*flags, "--out", "a")
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--out a --resume" in err and "Traceback" not in err
    assert command("--out", "a", "--resume").returncode == 0
    assert command(*flags, "--out", "whole").returncode == 0
    assert metrics.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


# --- mistakes -----------------------------------------------------------------------------------


def test_a_newcomers_three_mistakes_get_one_clear_line_each(command, tmp_path):
    one_error_line(command("--nosie.sigma", 0.1), 2, "--nosie.sigma", "--noise.sigma")
    one_error_line(command("--noise.sigma", -1), 2, "--noise.sigma", ">= 0", "-1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    one_error_line(command(*SMALL, "--out", "mine"), 2, "--out", "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert len(list((tmp_path / "mine").iterdir())) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pair", "airth"], ["--pair", "airth", "arith"]),
        (["--quant", "int9"], ["--quant", "int9", "int8"]),
        (["--noise.sigma", "nan"], ["--noise.sigma", "nan"]),
        (["--staleness", "-2"], ["--staleness", "-2"]),
        (["--length", "99"], ["--length", "99", "1 to 12"]),
        (["--perturb", "masked(weight_noise(0.1), 'mpl')"], ["mpl", "matches no parameter"]),
        (["--perturb", "stale(4)|fake_qaunt()"], ["fake_qaunt", "fake_quant"]),
        (["--perturb", "custom('nowhere:f')"], ["nowhere", "cannot be imported"]),
        (["--perturb", "custom('math:sqrt')"], ["math:sqrt", "cannot be called"]),
        (["--config", "absent.json"], ["absent.json"]),
        (["--perturb", "custom('time:time')"], ["time:time", "Perturbation"]),
        (["--staleness", "5000000"], ["5000000", "10000"]),
        (["--clean-dir", "c", "--out", "c/x"], ["--out", "--clean-dir"]),
        (["--prompts", "absent.jsonl"], ["--prompts", "absent.jsonl"]),
        (["--out", "file/below"], ["--out"]),
        (["--out", "nothing", "--resume"], ["nothing"]),
        (["--clean-dir", "file", "--staleness", "1"], ["--clean-dir"]),
    ],
)
def test_bad_input_is_one_line_with_the_setting_and_what_is_allowed(
    command, tmp_path, flags, words
):
    (tmp_path / "file").write_text("a file, not a folder")
    one_error_line(command(*SMALL, *flags), 2, *words)


def test_resuming_with_other_settings_names_them(command, tmp_path):
    assert command(*SMALL, "--out", "a", "--dose.skip").returncode == 0
    done = command("--out", "a", "--resume", "--noise.sigma", 0.5)
    one_error_line(done, 2, "0.5")
    one_error_line(command(*SMALL, "--out", "a"), 2, "--resume")


def test_a_run_that_blows_up_exits_1_and_keeps_its_checkpoint(command, tmp_path):
    flags = [*SMALL, "--optim.lr", "1e30", "--optim.warmup", 0, "--staleness", 1, "--dose.skip"]
    one_error_line(command(*flags, "--out", "a"), 1, "step", "stale(k=1)", "phase")
    assert (tmp_path / "a" / "checkpoint" / "state.safetensors").exists()
    assert not (tmp_path / "a" / "result.json").exists()


# --- prompts of one's own -----------------------------------------------------------------------


def write_prompts(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def good_lines(count=60):
    problems = {f"{a}+{b}=" for a in range(10) for b in range(10)}
    return [json.dumps({"prompt": p, "answer": arith.solve(p)}) for p in sorted(problems)][:count]


def test_a_prompt_file_takes_the_tasks_place(command, tmp_path):
    write_prompts(tmp_path / "p.jsonl", good_lines())
    done = command(*SMALL, "--prompts", "p.jsonl", "--json", "--staleness", 1)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quality"]["value"] > 0.5


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["p.jsonl", "empty"]),
        ([*good_lines(4), "{nope"], ["p.jsonl", "line 5", "JSON"]),
        ([*good_lines(4), '{"prompt": "1+1="}'], ["p.jsonl", "line 5", "answer"]),
        ([*good_lines(4), '{"prompt": "1+1=", "answer": 2}'], ["line 5"]),
        ([*good_lines(4), good_lines(1)[0]], ["line 5", "line 1"]),
        ([*good_lines(60), '{"prompt": "1+x=", "answer": "2"}'], ["line 61", "1+x="]),
        (good_lines(1), ["none of its 1 prompts", "split"]),
    ],
)
def test_a_broken_prompt_file_is_named_with_its_line(command, tmp_path, lines, words):
    write_prompts(tmp_path / "p.jsonl", lines)
    one_error_line(command(*SMALL, "--prompts", "p.jsonl"), 2, *words)


def test_the_cache_folder_follows_the_standard(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert run_module.cache_folder() == Path("/somewhere/mismatch_sim/jax")

"""Run folders: resumable to the byte after any kill, and never another's."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mismatch_sim.errors import RunError, UserError
from mismatch_sim.runlog import (
    RunFolder,
    find_run,
    ownership,
    read_metrics,
    read_result,
    to_json,
)

CONFIG = {"steps": 5, "noise": {"sigma": 0.01}, "pair": "arith"}
CODE = {"numpy": "2.4", "pair": "abc"}
RUN = (CONFIG, "h4sh", CODE)


def metrics(step):
    return {"b/x": 0.1 * step, "a/list": [1.0, math.inf], "c/nan": math.nan, "d/n": step}


def train(folder, steps=5, stop=None, every=2):
    """A run of ``steps`` steps that checkpoints at every second one, as the loop does."""
    restored = folder.restore({"w": np.zeros(3)})
    tree, start = restored or ({"w": np.zeros(3)}, 0)
    for step in range(start, steps):
        if step == stop:
            return
        folder.log_step(step, metrics(step) | {"w": float(tree["w"].sum())})
        folder.log_time(step, {"time/total": 0.1})
        tree = {"w": tree["w"] + 1 / 3}
        if (step + 1) % every == 0 or step + 1 == steps:
            folder.checkpoint(tree, step + 1)
    folder.finish({"quality": {"value": 0.5, "low": math.nan}, "steps": steps})


@pytest.fixture
def reference(tmp_path):
    with RunFolder.create(tmp_path / "reference", *RUN) as folder:
        train(folder)
    return (tmp_path / "reference" / "metrics.jsonl").read_bytes()


def test_a_new_folder_says_what_it_is(tmp_path):
    with RunFolder.create(tmp_path / "a" / "b", *RUN) as folder:
        assert folder.restore({}) is None
    assert json.loads((folder.path / "config.json").read_text()) == CONFIG
    code = json.loads((folder.path / "code.json").read_text())
    assert code["hash"] == "h4sh" and code["code"] == CODE and {"git", "python"} <= code.keys()


def test_lines_are_strict_sorted_and_read_back(tmp_path):
    with RunFolder.create(tmp_path / "a", *RUN) as folder:
        folder.log_step(0, {"b": np.float32(0.1), "a": math.nan, "c": [math.inf, -math.inf, 1]})
        folder.log_time(0, {"time/total": 1.5})
    text = (folder.path / "metrics.jsonl").read_text()
    assert text == '{"step": 0, "a": "nan", "b": 0.10000000149011612, "c": ["inf", "-inf", 1]}\n'
    [line] = read_metrics(folder.path)
    assert math.isnan(line["a"]) and line["c"] == [math.inf, -math.inf, 1]
    [line] = read_metrics(folder.path, "timing.jsonl")
    assert line["time/total"] == 1.5 and abs(line["unix_time"] - time.time()) < 60


def test_result_is_one_strict_line_that_reads_back(tmp_path):
    with RunFolder.create(tmp_path / "a", *RUN) as folder:
        folder.finish({"dose": None, "quality": {"value": 0.5, "low": math.nan}, "out": "ü"})
    text = (folder.path / "result.json").read_text()
    assert text.count("\n") == 1 and json.loads(text)["quality"]["low"] == "nan"
    result = read_result(folder.path)
    assert math.isnan(result["quality"]["low"]) and result["out"] == "ü"
    with pytest.raises(RunError, match=r"cannot read .*result\.json: No such file"):
        read_result(tmp_path)


@pytest.mark.parametrize("stop", range(5))
def test_a_resumed_run_has_the_same_bytes(stop, tmp_path, reference):
    with RunFolder.create(tmp_path / "run", *RUN) as folder:
        train(folder, stop=stop)
    with open(folder.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 99, "cut in the mid')
    with RunFolder.open(tmp_path / "run", *RUN) as folder:
        train(folder)
    assert (folder.path / "metrics.jsonl").read_bytes() == reference
    assert len(read_metrics(folder.path, "timing.jsonl")) == 5
    assert read_result(folder.path)["steps"] == 5


def test_a_finished_run_is_gone_on_with_to_no_effect(tmp_path, reference):
    for _ in range(2):
        with RunFolder.claim(tmp_path / "run", *RUN) as folder:
            train(folder)
    assert (folder.path / "metrics.jsonl").read_bytes() == reference


def test_a_restarted_run_forgets_result_and_checkpoint(tmp_path, reference):
    root = tmp_path / "clean"
    assert find_run(root, "h4sh") is None
    with RunFolder.claim(root / "h4sh", *RUN) as folder:
        train(folder)
    assert find_run(root, "h4sh") == root / "h4sh"
    assert find_run(root, "other") is None
    with RunFolder.claim(root / "h4sh", *RUN) as folder:
        folder.restart()
        assert find_run(root, "h4sh") is None
        assert folder.restore({"w": np.zeros(3)}) is None
        train(folder)
    assert (folder.path / "metrics.jsonl").read_bytes() == reference


def test_an_existing_run_is_not_begun_again(tmp_path):
    RunFolder.create(tmp_path / "a", *RUN).close()
    with pytest.raises(UserError, match=r"--out .*a exists already: continue it with --resume, or"):
        RunFolder.create(tmp_path / "a", *RUN)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "code.json"])
def test_a_foreign_folder_is_left_alone(name, tmp_path):
    (tmp_path / name).write_text("{}")
    for begin in (RunFolder.create, RunFolder.claim):
        with pytest.raises(UserError, match=r"--clean-dir .* is not empty and") as error:
            begin(tmp_path, *RUN, flag="--clean-dir")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="holds no run to go on with"):
        RunFolder.open(tmp_path, *RUN)
    assert os.listdir(tmp_path) == [name]


def test_a_path_that_cannot_be_a_folder_names_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"^--out .* cannot be a run folder: \w+"):
            RunFolder.create(path, *RUN)
    with pytest.raises(UserError, match="holds no run to go on with"):
        RunFolder.open(tmp_path / "none", *RUN)


@pytest.mark.parametrize(
    "left", [[], [".lock"], [".lock", ".code.json.tmp"], [".lock", "code.json", ".config.json.tmp"]]
)
def test_whatever_a_kill_leaves_while_creating_can_be_created(left, tmp_path):
    RunFolder.create(tmp_path / "whole", *RUN).close()
    path = tmp_path / "run"
    path.mkdir()
    for name in left:
        source = tmp_path / "whole" / name
        (path / name).write_bytes(source.read_bytes() if source.exists() else b'{"ha')
    with pytest.raises(UserError, match="start it without --resume"):
        RunFolder.open(path, *RUN)
    with RunFolder.create(path, *RUN) as folder:
        train(folder)
    assert read_result(path)["steps"] == 5


def test_a_run_of_another_hash_is_refused_and_the_difference_named(tmp_path):
    RunFolder.create(tmp_path / "a", *RUN).close()
    config = {**CONFIG, "noise": {"sigma": 0.02}}
    with pytest.raises(UserError) as error:
        RunFolder.open(tmp_path / "a", config, "other", {**CODE, "pair": "abd", "threads": 2})
    message = str(error.value)
    for part in ("noise.sigma: 0.01 -> 0.02", "code.pair: abc -> abd", "code.threads: None -> 2"):
        assert part in message
    assert "steps" not in message and "\n" not in message
    with pytest.raises(UserError, match="hash h4sh"):
        RunFolder.claim(tmp_path / "a", CONFIG, "other", CODE)
    with RunFolder.open(tmp_path / "a", {**CONFIG, "checkpoint_every": 3}, "h4sh", {}) as folder:
        assert folder.restore({}) is None  # equal hash: settings that change no byte may differ


def test_damage_is_an_error_of_one_line(tmp_path):
    with RunFolder.create(tmp_path / "a", *RUN) as folder:
        train(folder)
    template, log = {"w": np.zeros(3)}, folder.path / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:50])
    with (
        RunFolder.open(folder.path, *RUN) as again,
        pytest.raises(RunError, match=r"metrics\.jsonl is damaged"),
    ):
        again.restore(template)
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1 is damaged"):
        read_metrics(folder.path)
    log.write_bytes(whole + b"[1]\n")
    with pytest.raises(RunError, match="line 6 is damaged"):
        read_metrics(folder.path)
    log.write_bytes(whole)
    folder.state_file.write_bytes(folder.state_file.read_bytes()[:-1])
    with RunFolder.open(folder.path, *RUN) as again, pytest.raises(RunError, match="damaged"):
        again.restore(template)
    assert log.read_bytes() == whole
    RunFolder.create(tmp_path / "b", CONFIG, "b", {}).close()
    folder.state_file.unlink()
    with RunFolder.open(folder.path, *RUN) as again:
        again.checkpoint({"w": np.zeros(3)}, 1)
    os.renames(folder.state_file, tmp_path / "b" / "checkpoint" / "state.safetensors")
    with (
        RunFolder.open(tmp_path / "b", CONFIG, "b", {}) as other,
        pytest.raises(RunError, match="of another run: h4sh"),
    ):
        other.restore(template)


def test_a_full_disk_is_an_error_of_one_line(tmp_path):
    with RunFolder.create(tmp_path / "a", *RUN) as folder:
        folder.log_step(0, {})
        folder._logs["metrics.jsonl"].close()
        folder._logs["metrics.jsonl"] = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: No space left"):
            folder.log_step(1, {"x": 1.0})


def test_one_process_at_a_time(tmp_path):
    first = RunFolder.create(tmp_path / "a", *RUN)
    code = (
        "import sys; from mismatch_sim.runlog import RunFolder\n"
        f"with RunFolder.claim(sys.argv[1], *{RUN!r}, wait=True): print('waited')"
    )
    for begin in (RunFolder.open, RunFolder.claim):
        with pytest.raises(UserError, match="in use: another process is writing this run"):
            begin(tmp_path / "a", *RUN)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    ) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1.0)
        first.close()
        assert waiting.communicate(timeout=30)[0] == "waited\n"
    RunFolder.open(tmp_path / "a", *RUN).close()


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def no_locks(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(ownership.fcntl, "flock", no_locks)
    with RunFolder.create(tmp_path / "a", *RUN) as folder:
        train(folder)


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
import test_runlog as t
with t.RunFolder.claim(sys.argv[1], *t.RUN) as folder:
    print("ready", flush=True)
    t.train(folder, steps=150)
"""


def test_runs_killed_at_any_moment_end_with_the_same_bytes(tmp_path):
    with RunFolder.create(tmp_path / "reference", *RUN) as folder:
        train(folder, steps=150)
    run, kills = tmp_path / "run", 0
    for attempt in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(run), os.path.dirname(__file__)],
            stdout=subprocess.PIPE,
        ) as child:
            if attempt:  # the first is killed before or while the folder is made
                child.stdout.readline()
            if attempt < 10:
                try:
                    child.wait(0.01 * attempt if attempt else 0.5)
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGKILL)
            child.wait(60)
        kills += child.returncode == -signal.SIGKILL
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
    assert kills >= 3
    bytes_of = [(p / "metrics.jsonl").read_bytes() for p in (tmp_path / "reference", run)]
    assert bytes_of[0] == bytes_of[1]
    assert [line["step"] for line in read_metrics(run, "timing.jsonl")] == list(range(150))
    assert read_result(run)["steps"] == 150


def test_git_commit_is_of_this_code_or_none():
    commit = ownership.git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_to_json_refuses_what_is_no_json():
    assert to_json({"x": (np.int64(3), np.bool_(True), None)}) == '{"x": [3, true, null]}'
    with pytest.raises(TypeError):
        to_json({"x": object()})

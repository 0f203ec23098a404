"""What a person reads: complete, at most 80 columns, and silent where it must be."""

import io
import itertools
import math
import subprocess
import sys

import pytest

from mismatch_sim import console


def interval(value, low, high):
    return {"value": value, "low": low, "high": high}


RESULT = {
    "perturb": "stale(k=4)|fake_quant(scheme='int8')|masked(op=weight_noise(sigma=0.01), "
    "include='mlp')|logit_noise(sigma=linear(0.0, 0.1, 500))",
    "pair": "arith",
    "backend": "jax",
    "objective": "reverse_kl",
    "seed": 0,
    "steps": 100,
    "dose": interval(1.234e-3, 1.1e-3, 1.4e-3),
    "kl_exact_mean": 2e-3,
    "kl_exact_last": 0.0,
    "quality": interval(0.875, 0.866, 0.884),
    "quality_start": interval(0.25, 0.24, 0.26),
    "quality_greedy": interval(0.9, 0.89, 0.91),
    "teacher_kl": interval(0.05, 0.04, 0.06),
    "clean": {"quality": interval(0.9, 0.89, 0.91), "quality_gain": 0.65, "out": "runs/clean/x"},
    "change": interval(-0.025, -0.039, -0.011),
    "out": "my runs/a",
    "wall_seconds": 75.2,
    "hash": "h4sh",
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_table_has_every_number_in_80_plain_columns():
    text = console.summary_text(RESULT)
    assert text.isascii() and all(len(line) <= 80 for line in text.splitlines())
    for part in (
        "stale(k=4) | fake_quant(scheme='int8') | masked(op=weight_noise(sigma=0.01),",
        "logit_noise(sigma=linear(0.0, 0.1, 500))",
        "arith, jax, reverse_kl, 100 steps, seed 0",
        "1.23e-03 [1.10e-03, 1.40e-03] nats per token",
        "2.00e-03 on average, 0 at the end",
        "25.0 % -> 87.5 % [86.6, 88.4]",
        "90.0 % [89.0, 91.0]",
        "-2.5 points [-3.9, -1.1] against clean, a loss of 3.8 % of the clean gain",
        "1 min 15 s",
        "my runs/a",
        "tensorboard --logdir 'my runs'",
    ):
        assert part in text.replace("\n" + " " * 15, " "), part


def test_a_long_path_is_not_broken():
    path = "runs/" + "x" * 120
    assert path in console.summary_text({"out": path}).split()


@pytest.mark.parametrize("missing", [None, math.nan, "nan", interval(None, None, None), {}])
def test_any_value_may_be_missing(missing):
    for name in RESULT:
        text = console.summary_text({**RESULT, name: missing} if missing is None else RESULT)
        assert "nan" not in text and "None" not in text
    for name in (
        "dose",
        "quality",
        "quality_start",
        "kl_exact_mean",
        "kl_exact_last",
        "teacher_kl",
    ):
        text = console.summary_text({**RESULT, name: missing})
        assert "nan" not in text.replace("nats", "") and "None" not in text
    assert console.summary_text({}) == ""
    assert "points" not in console.summary_text({**RESULT, "change": missing})
    clean = {"quality": missing, "quality_gain": missing}
    assert "clean gain" not in console.summary_text({**RESULT, "clean": clean})


def test_special_values_read_well():
    dose = {"dose": interval(0.0, 0.0, 0.0), "perturb": "identity()"}
    assert "0 [0, 0] nats per token" in console.summary_text(dose)
    assert "nothing: rollouts are on-policy" in console.summary_text(dose)
    assert "inf nats" in console.summary_text({"dose": {"value": "inf", "low": 1.0}})
    better = {"change": interval(0.0001, -0.01, 0.01), "clean": {"quality_gain": 0.1}}
    assert "+0.0 points [-1.0, +1.0] against clean" in console.summary_text(better)
    better = {**RESULT, "change": interval(0.05, 0.04, 0.06)}
    assert "clean gain" not in console.summary_text(better)


def test_the_table_goes_to_stdout(capsys):
    console.summary(RESULT)
    out = capsys.readouterr()
    assert out.out == console.summary_text(RESULT) + "\n" and out.err == ""


def test_disabled_shows_nothing(capsys):
    for file in (None, Terminal()):
        with console.progress("run", 10, enabled=False, file=file) as bar:
            bar.update(1, kl=0.1)
        assert file is None or file.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_a_line_at_once_and_then_seldom():
    clock, file = itertools.count(0.0, 3.0), io.StringIO()
    bar = console._Lines("run", 100, file, lambda: next(clock))
    assert file.getvalue() == "run: 0/100\n"
    for step in range(1, 10):
        bar.update(step, kl=1e-3 if step == 1 else None, quality=0.5 if step == 4 else None)
    lines = file.getvalue().splitlines()
    assert lines == [
        "run: 0/100",
        "run: 4/100  D 1.00e-03  quality 50.0 %  4 min 48 s left",
        "run: 8/100  D 1.00e-03  quality 50.0 %  4 min 36 s left",
    ]
    bar.update(100)
    assert file.getvalue().splitlines()[-1] == "run: 100/100  D 1.00e-03  quality 50.0 %"


def test_lines_go_to_stderr(capsys):
    with console.progress("run", 2) as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "run: 0/2\nrun: 2/2\n")


def test_a_terminal_gets_a_bar_of_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with console.progress("clean [reference]", 101, file=file) as bar:
        bar.update(51, kl=1e-3)
        bar.update(52, kl=2e-3, quality=0.875)
        bar.update(53, kl=None)
    text = file.getvalue()
    assert "clean [reference]" in text and "53/101" in text
    assert "D 2.00e-03  quality 87.5 %" in text


def test_an_error_passes_through_the_bar():
    for file in (Terminal(), io.StringIO()):
        with pytest.raises(KeyboardInterrupt), console.progress("run", 3, file=file):
            raise KeyboardInterrupt


def test_rich_is_imported_for_a_terminal_only():
    code = (
        "import sys; from mismatch_sim import console\n"
        "with console.progress('run', 1) as bar: bar.update(1)\n"
        "console.summary({'steps': 1}); print('rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert done.stderr == "run: 0/1\nrun: 1/1\n"

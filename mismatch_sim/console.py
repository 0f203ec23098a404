"""What a person sees of a run: a bar on stderr while it goes on, a table on stdout at its end.

stdout is for results alone, so that it can be piped. The bar is drawn by rich, imported only when
stderr is a terminal; a log file gets a plain line now and then instead, and ``--json`` nothing. The
table is plain ASCII of at most 80 columns, whatever the terminal: it is often pasted into a report.
Values that are missing are left out.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

WIDTH = 80
EVERY_SECONDS = 10.0
"""Between two plain lines."""


class Progress:
    """A bar's handle; this one shows nothing."""

    def update(self, completed: int, **fields: float | None) -> None:
        """Say how far it is; ``fields`` (``kl``, ``quality``, ...) keep their last known value."""


@contextlib.contextmanager
def progress(
    description: str, total: int, enabled: bool = True, file: TextIO | None = None
) -> Iterator[Progress]:
    """A progress bar with the time left, on stderr, for the length of the block.

    Args:
        description: what is going on, in a word or two.
        total: what ``update`` counts up to.
        enabled: False shows nothing (``--json``).
        file: in place of stderr.

    >>> with progress("run", 10, file=sys.stdout) as bar:
    ...     bar.update(10, kl=0.00123, quality=0.875)
    run: 0/10
    run: 10/10  D 1.23e-03  quality 87.5 %
    """
    file = sys.stderr if file is None else file
    if not enabled:
        yield Progress()
    elif file.isatty():
        with _bar(description, total, file) as bar:
            yield bar
    else:
        yield _Lines(description, total, file)


class _Lines(Progress):
    """One line at the start, then at most one every ten seconds, and one at the end."""

    def __init__(
        self,
        description: str,
        total: int,
        file: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.description, self.total, self.file, self.clock = description, total, file, clock
        self.fields: dict[str, float] = {}
        self.said = clock()
        self.began: tuple[float, int] | None = None
        self._say(0, "")

    def update(self, completed: int, **fields: float | None) -> None:
        now = self.clock()
        self.fields |= {name: x for name, x in fields.items() if x is not None}
        if self.began is None:  # the first step also compiles: it says nothing about the others
            self.began = now, completed
        if now - self.said < EVERY_SECONDS and completed < self.total:
            return
        self.said = now
        seconds, steps = now - self.began[0], completed - self.began[1]
        left = seconds / steps * (self.total - completed) if steps else 0.0
        self._say(completed, f"  {duration(left)} left" if left > 0 else "")

    def _say(self, completed: int, left: str) -> None:
        shown = _fields_text(self.fields)
        text = f"{self.description}: {completed}/{self.total}" + (f"  {shown}" if shown else "")
        print(text + left, file=self.file, flush=True)


@contextlib.contextmanager
def _bar(description: str, total: int, file: TextIO) -> Iterator[Progress]:
    from rich import console as rich_console
    from rich import progress as rich_progress

    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=12),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(compact=True),
        rich_progress.TextColumn("{task.fields[shown]}", markup=False),
        console=rich_console.Console(file=file),
        transient=True,
    )
    task = bar.add_task(description, total=total, shown="")

    class Bar(Progress):
        def __init__(self) -> None:
            self.fields: dict[str, float] = {}
            self.begun = False

        def update(self, completed: int, **fields: float | None) -> None:
            self.fields |= {name: x for name, x in fields.items() if x is not None}
            if not self.begun:  # time is left out that went into compiling, or into earlier runs
                bar.reset(task, total=total, completed=completed)
                self.begun = True
            bar.update(task, completed=completed, shown=_fields_text(self.fields))

    with bar:
        yield Bar()


def _fields_text(fields: Mapping[str, float]) -> str:
    formats = {"kl": ("D", number), "quality": ("quality", percent)}
    named = {name: formats.get(name, (name, number)) for name in fields}
    return "  ".join(f"{label} {form(fields[name])}" for name, (label, form) in named.items())


def summary(result: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print the table of ``summary_text`` to stdout (or ``file``)."""
    print(summary_text(result), file=sys.stdout if file is None else file, flush=True)


def summary_text(result: Mapping[str, Any]) -> str:
    """What was injected, at what dose, what it cost, and where it is written.

    >>> print(summary_text({
    ...     "perturb": "stale(k=4)", "pair": "arith", "backend": "jax", "steps": 100, "seed": 0,
    ...     "dose": {"value": 1.234e-3, "low": 1.1e-3, "high": 1.4e-3},
    ...     "quality": {"value": 0.875, "low": 0.866, "high": 0.884},
    ...     "quality_start": {"value": 0.25, "low": None, "high": None},
    ...     "clean": {"quality": {"value": 0.9}, "quality_gain": 0.65}, "out": "runs/a",
    ...     "change": {"value": -0.025, "low": -0.039, "high": -0.011},
    ... }))
    injected       stale(k=4)
    run            arith, jax, 100 steps, seed 0
    dose           1.23e-03 [1.10e-03, 1.40e-03] nats per token
    quality        25.0 % -> 87.5 % [86.6, 88.4]
    clean quality  90.0 %
    change         -2.5 points [-3.9, -1.1] against clean, a loss of 3.8 % of the
                   clean gain (interval: evaluation alone, this one seed)
    folder         runs/a
    TensorBoard    tensorboard --logdir runs   (HPARAMS tab: dose and quality)
    """
    rows = [(label, text) for label, text in _rows(result) if text]
    width = max((len(label) for label, _ in rows), default=0) + 2
    lines = []
    for label, text in rows:
        # A path or a command is never broken: it must survive copying.
        whole = label in ("folder", "TensorBoard")
        parts = [text] if whole else textwrap.wrap(text, WIDTH - width) or [""]
        lines += [f"{label:<{width}}{parts[0]}", *(" " * width + part for part in parts[1:])]
    return "\n".join(lines)


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def get(name: str) -> Any:
        return result.get(name)

    perturb = get("perturb") or ""
    nothing = perturb == "identity()"
    spaced = re.sub(r"\)\|(?=\w+\()", ") | ", perturb)  # between operators, not inside a pattern
    yield "injected", "nothing: rollouts are on-policy" if nothing else spaced
    steps, seed = get("steps"), get("seed")
    about = [
        get("pair"),
        get("backend"),
        get("objective"),
        None if steps is None else f"{steps} steps",
    ]
    about.append(None if seed is None else f"seed {seed}")
    yield "run", ", ".join(str(part) for part in about if part)
    yield "dose", _interval(get("dose"), number, " nats per token")
    mean, last = _known(get("kl_exact_mean")), _known(get("kl_exact_last"))
    if mean is not None:
        at_the_end = "" if last is None else f", {number(last)} at the end"
        yield "realised D", f"{number(mean)} on average{at_the_end}"
    final, start = get("quality"), _interval(get("quality_start"), percent, brief=True)
    yield "quality", f"{start} -> " * bool(start) + _interval(final, percent)
    yield "greedy", _interval(get("quality_greedy"), percent)
    yield "KL to teacher", _interval(get("teacher_kl"), number, " nats per token")
    clean = get("clean") or {}
    yield "clean quality", _interval(clean.get("quality"), percent)
    yield "change", _change(get("change"), clean.get("quality_gain"))
    if _known(get("wall_seconds")) is not None:
        yield "time", duration(get("wall_seconds"))
    if get("out"):
        yield "folder", str(get("out"))
        logdir = shlex.quote(str(Path(get("out")).parent))
        yield "TensorBoard", f"tensorboard --logdir {logdir}   (HPARAMS tab: dose and quality)"


def _change(change: Any, gain: Any) -> str:
    """The change in points, and what this evaluation could have seen: a loss below it is noise."""
    value = _value(change)
    if value is None:
        return ""
    points = [round(100 * x, 1) + 0.0 for x in (value, change["low"], change["high"])]  # no -0.0
    text = f"{points[0]:+.1f} points [{points[1]:+.1f}, {points[2]:+.1f}] against clean"
    known = _known(gain)
    if known is not None and known > 0 > points[2]:  # a loss that this evaluation can see
        text += f", a loss of {-value / known:.1%} of the clean gain".replace("%", " %")
    return text + " (interval: evaluation alone, this one seed)"


def _interval(value: Any, form: Callable[[float], str], unit: str = "", brief: bool = False) -> str:
    """``value [low, high]`` as far as it is known; the interval's ends carry no percent sign."""
    middle = _value(value)
    if middle is None:
        return ""
    ends = [_known(value.get(end)) for end in ("low", "high")] if isinstance(value, Mapping) else []
    low, high = ends or (None, None)
    if brief or low is None or high is None:
        return form(middle) + unit
    return f"{form(middle)} [{form(low)}, {form(high)}]{unit}".replace(" %,", ",").replace(
        " %]", "]"
    )


def _value(value: Any) -> float | None:
    return _known(value.get("value") if isinstance(value, Mapping) else value)


def _known(x: Any) -> float | None:
    """A number, infinities included; None for what is absent or not a number."""
    try:
        number = float(x)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def number(x: float) -> str:
    """Three significant digits, in the notation of small numbers; an exact zero is just 0.

    >>> number(0.00123), number(0.0), number(float("inf"))
    ('1.23e-03', '0', 'inf')
    """
    return "0" if x == 0 else f"{x:.2e}"


def percent(x: float) -> str:
    """
    >>> percent(0.875)
    '87.5 %'
    """
    return f"{100 * x:.1f} %"


def duration(seconds: float) -> str:
    """
    >>> duration(4.2), duration(75), duration(3725)
    ('4 s', '1 min 15 s', '1 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

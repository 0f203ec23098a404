"""What a user is told when a setting is wrong: one line that names it and says what is allowed.

Settings are checked where they are stored (an operator's spec, a schedule, the config), with the
few checks below, so that flags, JSON and Python callers all read the same sentence. They raise
plain ``ValueError``. A command turns what the user caused into :class:`UserError` (exit 2) and what
went wrong on the way into :class:`RunError` (exit 1); everything else is our bug and keeps its
traceback.

Left out: error codes and a hierarchy. A reader needs the sentence, a script the exit status.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import numbers
import re
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(ValueError):
    """Bad input: the command prints the message as one line and exits with 2."""


class RunError(RuntimeError):
    """A run that could not go on (diverged, disk full): one line, exit 1."""


@contextlib.contextmanager
def user_input(setting: str = "") -> Iterator[None]:
    """Inside, a ``ValueError`` is the user's: re-raised as :class:`UserError` naming ``setting``.

    For checks that need more than the setting itself, such as a pattern against a model's names.

    >>> with user_input("--perturb"):
    ...     raise ValueError("include='mpl' matches no parameter")
    Traceback (most recent call last):
    mismatch_sim.errors.UserError: --perturb: include='mpl' matches no parameter
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{setting}: {error}" if setting else str(error)) from error


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """The tail of an error message about an unknown name; empty if nothing is close.

    >>> "unknown operator 'stael'" + did_you_mean("stael", ["stale", "masked"])
    "unknown operator 'stael'; did you mean 'stale'?"
    """
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: Any, width: int = 60) -> str:
    """``repr`` of a bad value, on one line and not longer than a line.

    >>> shown("a" * 100, width=9)
    "'aaa ..."
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= width else text[: width - 5] + " ..."


def check_real(
    setting: str,
    value: Any,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> float:
    """``value`` as a float (-0.0 as 0.0), if it is a finite number within the bounds.

    Args:
        setting: the name the user knows it by, such as ``--noise.sigma``.
        value: any real number that is not a bool; NumPy scalars included.
        low, above, high, below: the bounds >=, >, <=, <.

    Raises:
        ValueError: not such a number.

    >>> check_real("--noise.sigma", -1.0, low=0)
    Traceback (most recent call last):
    ValueError: --noise.sigma must be a finite number >= 0, got -1.0
    """
    bounds = _bounds(low, above, high, below)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value) + 0.0  # -0.0 and 0.0 must not be two texts of one setting
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and _within(number, low, above, high, below):
            return number
    raise ValueError(f"{setting} must be a finite number{bounds}, got {shown(value)}")


def check_whole(setting: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """``value`` as an int, if it is an integer (no bool, no 4.0) with low <= value <= high.

    Raises:
        ValueError: not such an integer.

    >>> check_whole("--staleness", True, low=0)
    Traceback (most recent call last):
    ValueError: --staleness must be an integer >= 0, got True
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if whole and _within(int(value), low, None, high, None):
        return int(value)
    bounds = _bounds(low, None, high, None)
    raise ValueError(f"{setting} must be an integer{bounds}, got {shown(value)}")


def check_choice(setting: str, value: Any, allowed: Iterable[str]) -> str:
    """``value``, if it is one of the allowed words.

    Raises:
        ValueError: it is not; the message lists them and guesses which one was meant.

    >>> check_choice("--quant", "int9", ("none", "int8"))
    Traceback (most recent call last):
    ValueError: --quant must be one of none, int8, got 'int9'; did you mean 'int8'?
    """
    allowed = tuple(allowed)
    if isinstance(value, str) and value in allowed:
        return value
    guess = did_you_mean(value, allowed) if isinstance(value, str) else ""
    raise ValueError(f"{setting} must be one of {', '.join(allowed)}, got {shown(value)}{guess}")


def check_switch(setting: str, value: Any) -> bool:
    """``value``, if it is True or False (a 1 is not: in JSON it is likelier to be a slip)."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{setting} must be True or False, got {shown(value)}")


def check_pattern(setting: str, value: Any) -> str:
    """A regular expression, or empty.

    Raises:
        ValueError: not one, or one with control characters: "\\b" in an ordinary Python string is a
            backspace, which no parameter name contains.
    """
    if not isinstance(value, str):
        raise ValueError(f"{setting} must be a regular expression in quotes, got {shown(value)}")
    if not value.isprintable():
        raise ValueError(f"{setting} holds a control character in {shown(value)}; write r'...'")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"{setting} must be a regular expression, got {shown(value)}: {error}"
        ) from None
    return value


def _within(
    value: float,
    low: float | None,
    above: float | None,
    high: float | None,
    below: float | None,
) -> bool:
    return (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    )


def _bounds(low: float | None, above: float | None, high: float | None, below: float | None) -> str:
    signs = ((">=", low), (">", above), ("<=", high), ("<", below))
    said = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
    return " " + " and ".join(said) if said else ""

"""A config as a tree of settings: each field carries its check, its flag and two marks.

A config class lists its fields with the helpers below (``steps: int = whole(100, low=1)``) and
inherits ``Checked``. Then flags, JSON and Python callers meet the same check and the same message,
and JSON, hashing and comparing need no code per field.

The marks: ``bytes=False`` for a setting that cannot change the bytes of ``metrics.jsonl`` (it stays
out of the run's hash), ``saved=False`` for one that belongs to an invocation, not to the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from mismatch_sim.errors import (
    check_choice,
    check_real,
    check_switch,
    check_whole,
    did_you_mean,
    shown,
)
from mismatch_sim.perturb.grammar import text_of

Check = Callable[[str, Any], Any]
"""``(flag, value) -> value to store``, or ValueError."""

Config = TypeVar("Config")


def setting(default: Any, check: Check, bytes: bool = True, saved: bool = True) -> Any:
    """A field of a config class, with its check and its marks."""
    return field(default=default, metadata={"check": check, "bytes": bytes, "saved": saved})


def whole(default: int, low: int, high: int | None = None, **marks: bool) -> Any:
    """An integer."""
    return setting(default, functools.partial(check_whole, low=low, high=high), **marks)


def real(default: float, **bounds: Any) -> Any:
    """A finite number; ``bounds`` as in ``check_real``."""
    return setting(default, functools.partial(check_real, **bounds))


def choice(default: str, *allowed: str) -> Any:
    """One of a few words."""
    return setting(default, functools.partial(check_choice, allowed=allowed))


def switch(default: bool, **marks: bool) -> Any:
    """On or off."""
    return setting(default, check_switch, **marks)


def text(default: str) -> Any:
    """A name or a folder, as text."""
    return setting(default, _check_text)


def path(default: Path | None, **marks: bool) -> Any:
    """A path; ``None`` is allowed if it is the default."""
    check = _check_path if default is not None else _check_path_or_none
    return setting(default, check, **marks)


def _check_text(setting: str, value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"{setting} must be a name or a folder, got {shown(value)}")


def _check_path(setting: str, value: Any) -> Path:
    # "." is also what an empty argument turns into: --out "$UNSET" must not write right here.
    if isinstance(value, str | Path) and str(value).strip() not in ("", "."):
        return Path(value)
    raise ValueError(f"{setting} must be a path other than the current folder, got {shown(value)}")


def _check_path_or_none(setting: str, value: Any) -> Path | None:
    return None if value is None else _check_path(setting, value)


def flag(name: str) -> str:
    """The command-line spelling of a setting.

    >>> flag("noise.logit_sigma")
    '--noise.logit-sigma'
    """
    return "--" + name.replace("_", "-")


class Checked:
    """Runs the checks; a group of settings says in ``PREFIX`` where its flags live."""

    PREFIX = ""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            if "check" in f.metadata:
                value = f.metadata["check"](flag(self.PREFIX + f.name), getattr(self, f.name))
                object.__setattr__(self, f.name, value)


def to_json(config: Any) -> dict[str, Any]:
    """The saved settings as JSON values; schedules as their text."""
    return {
        f.name: _json_value(getattr(config, f.name))
        for f in fields(config)
        if f.metadata.get("saved", True)
    }


def _json_value(value: Any) -> Any:
    if isinstance(value, Checked):
        return to_json(value)
    if is_dataclass(value):
        return text_of(value)
    return str(value) if isinstance(value, Path) else value


def from_json(cls: type[Config], data: Any, prefix: str = "") -> Config:
    """The config that ``to_json`` wrote; absent settings have their defaults.

    Raises:
        ValueError: an unknown key, or a value its check refuses.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'config'} must be an object, got {shown(data)}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            guess = did_you_mean(key, known)
            raise ValueError(f"unknown setting {shown(prefix + key)}{guess}")
    groups: dict[str, Any] = {k: f.type for k, f in known.items() if is_dataclass(f.type)}
    return cls(
        **{
            key: from_json(groups[key], value, f"{prefix}{key}.") if key in groups else value
            for key, value in data.items()
        }
    )


def byte_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted name, JSON value)`` of every setting that can change ``metrics.jsonl``."""
    for f in fields(config):
        if not f.metadata.get("bytes", True):
            continue
        value = getattr(config, f.name)
        if isinstance(value, Checked):
            yield from byte_settings(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, _json_value(value)

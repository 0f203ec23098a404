"""Logs and results as strict JSON, in and out.

JSON has no NaN and no infinity, and both are results (a truncated sampler has an infinite reverse
KL). They are written as the strings "nan", "inf" and "-inf", which ``float``, NumPy and pandas read
back, and so do the readers here; ``null`` would make them one and the same. Floats are the shortest
text that round-trips, so equal numbers are equal bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_sim.errors import RunError

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON of numbers, text, lists and dicts; what is not finite becomes a string.

    >>> to_json({"low": float("nan"), "values": [np.float32(0.5), float("inf")]})
    '{"low": "nan", "values": [0.5, "inf"]}'
    """
    return json.dumps(_encode(value), indent=indent, allow_nan=False)


def read_metrics(folder: str | os.PathLike, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Every line of a run's ``metrics.jsonl`` (or ``timing.jsonl``).

    Raises:
        RunError: there is none, or a line is no JSON object; nothing is skipped.
    """
    path = Path(folder) / name
    *complete, rest = _read(path).split("\n")
    lines = []
    for number, line in enumerate([*complete, rest] if rest else complete, start=1):
        try:
            lines.append({key: _decode(value) for key, value in json.loads(line).items()})
        except (ValueError, AttributeError):
            raise RunError(f"{path}, line {number} is damaged: no JSON object") from None
    return lines


def read_result(folder: str | os.PathLike) -> dict[str, Any]:
    """The content of a finished run's ``result.json``.

    Raises:
        RunError: there is none, or it cannot be read.
    """
    path = Path(folder) / "result.json"
    try:
        return _decode(json.loads(_read(path)))
    except ValueError:
        raise RunError(f"{path} is damaged: no JSON") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {getattr(error, 'strerror', 'no text')}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value

"""The notation ``name(argument, key=value) | name(...)``: frozen dataclasses as text and as JSON.

It knows no operator: a table of names and dataclasses comes with every call. Text goes through
Python's ``ast`` and is never evaluated; allowed are calls of the names in the table, numbers,
quoted strings, True, False and, outermost, ``|``. Messages say what is allowed and guess at
misspellings.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from mismatch_sim import schedules
from mismatch_sim.errors import check_real, did_you_mean, shown
from mismatch_sim.schedules import Strength

Table = Mapping[str, Any]
"""Name in the text -> frozen dataclass."""


def read(text: str, table: Table) -> list[Any]:
    """The calls in ``text``, from first to last, as objects.

    Raises:
        ValueError: one line that shows the offending text.

    >>> from mismatch_sim.schedules import SCHEDULES
    >>> read("linear(0, 1, steps=10) | onset(0.5, 3)", SCHEDULES)
    [Linear(start=0.0, end=1.0, steps=10), Onset(value=0.5, begin=3)]
    """
    text = text.strip()
    try:
        with warnings.catch_warnings():
            # '\d' in a pattern means what it says; Python only warns about its spelling.
            warnings.simplefilter("ignore")
            node: ast.expr = ast.parse(text, mode="eval").body
        calls = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            calls.append(node.right)
            node = node.left
        return [_call(call, text, table) for call in (node, *reversed(calls))]
    except SyntaxError as error:
        raise ValueError(f"cannot read {shown(text)}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"cannot read {shown(text)}: nested too deeply") from None


def _call(node: ast.expr, text: str, table: Table) -> Any:
    if isinstance(node, ast.Name):
        _known(node.id, table)
        raise ValueError(f"{node.id} needs its parentheses: {node.id}(...)")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        source = shown(ast.get_source_segment(text, node) or text)
        raise ValueError(f"cannot read {source}; allowed: {', '.join(table)}, joined by |")
    if any(isinstance(arg, ast.Starred) for arg in node.args) or None in (
        keyword.arg for keyword in node.keywords
    ):
        raise ValueError(f"cannot read {shown(ast.get_source_segment(text, node))}: * is no value")
    _known(node.func.id, table)
    positional = [_value(arg, text, table) for arg in node.args]
    named = [(k.arg or "", _value(k.value, text, table)) for k in node.keywords]
    return make(node.func.id, positional, named, table)


def _value(node: ast.expr, text: str, table: Table) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand, text, table)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Call):
        return _call(node, text, table)
    source = shown(ast.get_source_segment(text, node) or text)
    hint = " (quote a string)" if isinstance(node, ast.Name) and node.id not in table else ""
    raise ValueError(
        f"cannot read {source} as a value{hint}; allowed: a number, a 'string', True, False, "
        "or one call"
    )


def _known(name: str, table: Table) -> None:
    if name not in table:
        raise ValueError(
            f"unknown name {shown(name)}; allowed: {', '.join(table)}{did_you_mean(name, table)}"
        )


def make(name: str, positional: list[Any], named: list[tuple[str, Any]], table: Table) -> Any:
    """``table[name](*positional, **named)``, with messages a user can act on.

    Raises:
        ValueError: too many, unknown, repeated or missing arguments, or a bad value.
    """
    _known(name, table)
    settings = fields(table[name])
    known = [f.name for f in settings]
    listing = ", ".join(known) or "none"
    if len(positional) > len(known):
        raise ValueError(f"{name} got {len(positional)} arguments; allowed: {listing}")
    bound = dict(zip(known, positional, strict=False))
    for key, value in named:
        if key not in known:
            guess = did_you_mean(key, known)
            raise ValueError(f"{name} has no argument {shown(key)}; allowed: {listing}{guess}")
        if key in bound:
            raise ValueError(f"{name} got {key} twice")
        bound[key] = value
    missing = [f.name for f in settings if f.default is MISSING and f.name not in bound]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}; allowed: {listing}")
    return table[name](**bound)


def text_of(item: Any) -> str:
    """The canonical text of an object, or of a value: keywords, no defaults but the first argument.

    >>> from mismatch_sim.schedules import onset
    >>> text_of(onset(1, 5)), text_of("mlp"), text_of(0.1)
    ('onset(value=1.0, begin=5)', "'mlp'", '0.1')
    """
    if not is_dataclass(item):
        return repr(item)
    given = [
        f"{f.name}={text_of(getattr(item, f.name))}"
        for i, f in enumerate(fields(item))
        if i == 0 or getattr(item, f.name) != f.default
    ]
    return f"{name_of(item)}({', '.join(given)})"


def name_of(item: Any) -> str:
    """The name of an object's class in the text."""
    return getattr(item, "name", type(item).__name__.lower())


def to_dict(item: Any) -> Any:
    """``{"name": ..., argument: value}`` with every argument; nested objects the same way."""
    if not is_dataclass(item):
        return item
    return {"name": name_of(item)} | {f.name: to_dict(getattr(item, f.name)) for f in fields(item)}


def from_dict(data: Any, table: Table) -> Any:
    """What ``to_dict`` wrote.

    Raises:
        ValueError: no such thing, or a bad argument.

    >>> from mismatch_sim.schedules import SCHEDULES
    >>> from_dict({"name": "onset", "value": 1, "begin": 5}, SCHEDULES)
    Onset(value=1.0, begin=5)
    """
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f'must be an object with a "name", got {shown(data)}')
    named = [
        (key, from_dict(value, table) if isinstance(value, dict) else value)
        for key, value in data.items()
        if key != "name"
    ]
    return make(data["name"], [], named, table)


def check_strength(setting: str, value: Any) -> Strength:
    """A strength: a finite number >= 0, a schedule of such numbers, or the text of either.

    Raises:
        ValueError: anything else.

    >>> check_strength("--noise.sigma", "linear(0, 0.01, 100)")
    Linear(start=0.0, end=0.01, steps=100)
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = _schedule(setting, value)
    if not isinstance(value, schedules.Schedule):
        return check_real(setting, value, low=0)
    for f in fields(value):
        check_real(f"{setting}: {name_of(value)}: {f.name}", getattr(value, f.name), low=0)
    return value


def _schedule(setting: str, text: str) -> Any:
    if "(" not in text:
        names = ", ".join(schedules.SCHEDULES)
        raise ValueError(
            f"{setting} must be a finite number >= 0 or a schedule ({names}), got {shown(text)}"
        )
    try:
        found = read(text, schedules.SCHEDULES)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    if len(found) != 1:
        raise ValueError(f"{setting} must be one schedule, got {shown(text)}")
    return found[0]

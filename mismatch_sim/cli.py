"""The command line: one subcommand per module, and what all of them share.

A command's module holds ``main(argv) -> exit status`` and is imported only when it is called, so
``--help`` answers at once. Whatever the user gets wrong is answered by one line on stderr that
names the setting and what is allowed, and exit status 2; a run that fails on the way exits with 1;
a traceback means a bug of ours.

    >>> main(["rnu"])
    2

Left out: nested subcommands and shell completion beyond what tyro gives each command.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mismatch_sim.errors import RunError, UserError, did_you_mean, shown

Config = TypeVar("Config")

COMMANDS = {
    "run": ("mismatch_sim.run", "distil one student under a perturbed rollout policy"),
}
"""Subcommand -> its module and one line of help."""

RUN_HELP = (
    "One on-policy distillation run whose rollout policy is perturbed on purpose: how large the "
    "mismatch is, in nats per token, and what it costs in quality."
)


def main(argv: Sequence[str] | None = None) -> int:
    """``mismatch-sim COMMAND ...``; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        listing = (f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items())
        print("usage: mismatch-sim COMMAND [OPTIONS]", "", "commands:", *listing, "", sep="\n")
        print("mismatch-sim COMMAND --help lists a command's options.")
        return 0
    if argv[0] == "--version":
        print(f"mismatch-sim {_version()}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "option" if argv[0].startswith("-") else "command"
        guess = did_you_mean(argv[0], [*COMMANDS, "--help", "--version"])
        names = ", ".join(COMMANDS)
        return _say(f"unknown {kind} {shown(argv[0])}; allowed: {names}{guess}", 2)
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])


def _version() -> str:
    try:
        return importlib.metadata.version("mismatch-sim")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from its source folder)"


def _say(message: str, status: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return status


def guard(body: Callable[..., int | None]) -> Callable[..., int]:
    """Decorator of a command's ``main``: errors that are not bugs become one line and a status.

    ``UserError`` -> 2, ``RunError`` -> 1, Ctrl-C -> 130; anything else keeps its traceback.

    >>> @guard
    ... def command(argv=None):
    ...     raise UserError("--steps must be an integer >= 1, got 0")
    >>> command([])
    2
    """

    @functools.wraps(body)
    def command(*args: Any, **kwargs: Any) -> int:
        try:
            return body(*args, **kwargs) or 0
        except UserError as error:
            return _say(str(error), 2)
        except RunError as error:
            return _say(str(error), 1)
        except KeyboardInterrupt:
            return _say("interrupted", 130)

    return command


def parse(
    cls: type[Config],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    default: Config | None = None,
) -> Config:
    """The config that the flags in ``argv`` describe, over ``default``.

    Args:
        cls: a frozen dataclass; ``ValueError`` from its checks is the user's.
        argv: flags, or ``None`` for those of this process.
        prog: the command, as the user types it.
        description: shown by ``--help``.
        default: values of the flags that are not given.

    Raises:
        UserError: a wrong flag or value, as one line.
        SystemExit: status 0, after ``--help``.
    """
    import tyro

    argv = sys.argv[1:] if argv is None else list(argv)
    extra: dict[str, Any] = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _wide(argv):
            config = tyro.cli(cls, args=argv, prog=prog, description=description, **extra)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(errors.getvalue())) from None
    sys.stderr.write(errors.getvalue())
    return config


@contextlib.contextmanager
def _wide(argv: Sequence[str]) -> Iterator[None]:
    """A terminal wide enough that no error is wrapped; help keeps the user's."""
    if {"-h", "--help"} & set(argv):
        yield
        return
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


_REWRITE = (
    (
        r"Error parsing (--\S+): invalid literal for int\(\) .*?: (.*)",
        r"\1 must be an integer, got \2",
    ),
    (
        r"Error parsing (--\S+): could not convert string to float: (.*)",
        r"\1 must be a number, got \2",
    ),
    (r"Error parsing (--\S+): (.*)", r"\1: \2"),
    (r"Error parsing [^:]*: (.*)", r"\1"),
    (r"Missing value for argument '(\S+)'.*", r"\1 needs a value"),
)


def one_line(box: str) -> str:
    """What tyro's error box says, as one line.

    >>> print(one_line("╭─╮\\n│ Missing value for argument '--steps'. Expected 1 values. │\\n╰─╯"))
    --steps needs a value
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    if "╭" in plain:
        rows = [row[1:-1].strip() for row in plain.splitlines() if row.startswith("│")]
    else:  # stdout is not UTF-8: no bars, and the title and a rule above the text
        rows = [row.strip() for row in plain.splitlines()[2:]]
    sections = re.split(r"^[─-]{3,}$", "\n".join(rows), flags=re.MULTILINE)
    sections = [" ".join(section.split()) for section in sections]
    message = sections[0]
    if message.startswith("Unrecognized options: "):
        return _unrecognized(message, rows)
    if match := re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)'\..*?\((.*)\)\.", message):
        value, name, listing = match.groups()
        allowed = re.findall(r"'([^']*)'", listing)
        guess = did_you_mean(value, allowed)
        return f"{name} must be one of {', '.join(allowed)}, got {value!r}{guess}"
    for pattern, replacement in _REWRITE:
        if re.fullmatch(pattern, message):
            return re.sub(pattern, replacement, message)
    return message


def _unrecognized(message: str, rows: list[str]) -> str:
    tokens = message.removeprefix("Unrecognized options: ").split(", ")
    unknown = next((token for token in tokens if token.startswith("-")), None)
    if unknown is None:
        return f"unexpected {tokens[0]!r}: options start with --, and on/off options take no value"
    start = next(
        (i for i, row in enumerate(rows) if row.startswith("Perhaps you meant")), len(rows)
    )
    meant = [row.split()[0].rstrip(",") for row in rows[start:] if re.match(r"--\w", row)]
    guess = f"; did you mean {' or '.join(dict.fromkeys(meant))}?" if meant else ""
    return f"unknown option {unknown.partition('=')[0]}{guess}"


def parse_run(argv: Sequence[str] | None = None, prog: str = "mismatch-sim run") -> Any:
    """The RunConfig of ``run``: flags, over the run's own config.json where ``--resume`` is set.

    With ``--resume --out DIR``, settings that are not given are those of ``DIR/config.json``; one
    that is given and would change the run's bytes is an error: a resumed run stays the run it is.

    Raises:
        UserError: a wrong flag or value; nothing to resume; settings that differ.
    """
    from mismatch_sim.config import RunConfig

    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse(RunConfig, argv, prog, RUN_HELP)
    if config.config is not None:
        if config.resume:
            raise UserError("--config and --resume exclude each other: a resumed run has its own")
        return parse(RunConfig, argv, prog, RUN_HELP, _spelt(load_config(config.config), argv))
    if not config.resume or config.out is None:
        return config
    saved = load_config(config.out / "config.json")
    config = parse(RunConfig, argv, prog, RUN_HELP, _spelt(saved, argv))
    old, new = saved.byte_settings(), config.byte_settings()
    changed = [f"{name}: {old[name]} -> {new[name]}" for name in old if old[name] != new[name]]
    if changed:
        raise UserError(
            f"--resume goes on with the settings of {config.out}, but these differ: "
            f"{', '.join(changed)}; drop them, or start a new run in another --out"
        )
    return config


def _spelt(saved: Any, argv: Sequence[str]) -> Any:
    """``saved`` with its stack in the spelling that the flags in ``argv`` use.

    A flag of the default order and the stack that config.json spells out are two ways to say one
    thing; in one spelling they can be compared and merged.
    """
    names = {token.partition("=")[0].replace("_", "-") for token in argv if token.startswith("--")}
    shorthand = any(re.match(r"--(staleness|quant|noise\..*)$", name) for name in names)
    return saved.as_flags() if shorthand else saved


def load_config(path: Path) -> Any:
    """The RunConfig of a config.json.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    from mismatch_sim.config import RunConfig

    try:
        return RunConfig.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read the settings in {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"cannot read the settings in {path}: {error}") from None

"""Whose a folder is: nobody's yet, this run's, another run's, another process's, something else's.

A folder is a run of ours once ``code.json`` (with its hash) and ``config.json`` are both there. One
that holds only what a kill leaves behind before that counts as empty. Any other is left alone.

Left out: Windows, whose files cannot be locked this way.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_sim.errors import UserError
from mismatch_sim.runlog.records import to_json

_LEFT_BY_A_KILL = {".lock", ".code.json.tmp", "code.json", ".config.json.tmp"}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


def find_run(root: str | os.PathLike, identity: str) -> Path | None:
    """The finished run of this hash under ``root``, kept as ``root/identity``; None if absent."""
    path = Path(root) / identity
    code = _code(path)
    if code is None or code["hash"] != identity or not (path / "result.json").exists():
        return None
    return path


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _code(path: Path) -> dict[str, Any] | None:
    """``code.json`` of a run folder; None where there is no such run."""
    code = _json(path / "code.json")
    return code if {"hash", "code"} <= code.keys() else None


def is_run(path: Path) -> bool:
    """Whether the folder holds a run of ours, begun or finished."""
    return _code(path) is not None and (path / "config.json").is_file()


def check_contents(path: Path, flag: str, new: bool) -> None:
    """Refuse a foreign folder, and, where a new one is wanted, one that holds a run.

    Raises:
        UserError: it is refused.
    """
    if is_run(path):
        if new:
            raise UserError(
                f"{flag} {path} exists already: continue it with --resume, or choose another {flag}"
            )
        return
    names = set(os.listdir(path))
    if names - _LEFT_BY_A_KILL or ("code.json" in names and _code(path) is None):
        raise UserError(
            f"{flag} {path} is not empty and holds no run of mismatch_sim; choose another {flag}"
        )


def check_identity(
    path: Path, config: Mapping[str, Any], identity: str, code: Mapping[str, Any], flag: str
) -> None:
    """Refuse to go on with a run whose hash is not ``identity``.

    Raises:
        UserError: it is not; what differs is named.
    """
    about = _code(path)
    assert about is not None
    if about["hash"] == identity:
        return
    old = dict(_flat({"code": about["code"], **_json(path / "config.json")}))
    new = dict(_flat(json.loads(to_json({"code": code, **config}))))
    changed = [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    raise UserError(
        f"{flag} {path} cannot be gone on with, since the run would not stay the same: "
        f"{', '.join(changed) or 'hash ' + about['hash']}; start a new one in another {flag}"
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def lock(path: Path, flag: str, wait: bool) -> int:
    """A handle that locks the folder until it is closed, by whatever end the process comes to."""
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{flag} {path} is in use: another process is writing this run") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            raise
        # Some cluster file systems have no locks: then keeping out of the way is the user's part.
    return handle


def git_commit() -> str | None:
    """Commit of the checkout this code runs from, ``-dirty`` if changed; None outside of one."""
    here = Path(__file__)
    if not _git(here, "ls-files", here.name):  # installed, perhaps into a folder of another project
        return None
    return _git(here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(here: Path, *command: str) -> str | None:
    git = ("git", "--no-optional-locks", "-C", str(here.parent))
    try:
        done = subprocess.run([*git, *command], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

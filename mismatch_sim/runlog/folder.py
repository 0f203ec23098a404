"""One run folder, held for writing: begin or go on, log, checkpoint, finish."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from mismatch_sim import treestore
from mismatch_sim.errors import RunError, UserError
from mismatch_sim.runlog.ownership import check_contents, check_identity, git_commit, is_run, lock
from mismatch_sim.runlog.records import to_json

LOGS = ("metrics.jsonl", "timing.jsonl")


class RunFolder:
    """A run folder held for writing by this process alone; a context manager.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with RunFolder.create(f"{root}/a", {"steps": 1}, "hash", {}) as run:
    ...         run.log_step(0, {"mismatch/kl_exact": 0.25})
    ...         run.checkpoint({"w": np.ones(2)}, step=1)
    ...         run.log_step(1, {"mismatch/kl_exact": 0.5})  # after the last checkpoint
    ...     with RunFolder.open(f"{root}/a", {"steps": 1}, "hash", {}) as run:
    ...         print(run.restore({"w": np.zeros(2)}))
    ...     (Path(root) / "a" / "metrics.jsonl").read_text()
    ({'w': array([1., 1.])}, 1)
    '{"step": 0, "mismatch/kl_exact": 0.25}\\n'
    """

    def __init__(self, path: Path, identity: str, lock: int) -> None:
        self.path, self.identity = path, identity
        self._lock = lock
        self._logs: dict[str, BinaryIO] = {}

    # --- making and opening ---------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        identity: str,
        code: Mapping[str, Any],
        flag: str = "--out",
    ) -> Self:
        """A new run folder.

        Args:
            path: absent or empty.
            config: what ``config.json`` holds.
            identity: the run hash.
            code: what besides the config entered the hash: versions, digests, thread count.
            flag: the setting that ``path`` came from, for messages.

        Raises:
            UserError: it holds something, is in use, or cannot be written.
        """
        return cls._enter(Path(path), config, identity, code, flag, new=True)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        identity: str,
        code: Mapping[str, Any],
        flag: str = "--out",
    ) -> Self:
        """The folder of a run to go on with; arguments as for ``create``.

        Raises:
            UserError: there is no run in it, it is in use, or it has another hash; what differs is
                named.
        """
        if not is_run(Path(path)):
            raise UserError(f"{flag} {path} holds no run to go on with; start it without --resume")
        return cls._enter(Path(path), config, identity, code, flag)

    @classmethod
    def claim(
        cls,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        identity: str,
        code: Mapping[str, Any],
        *,
        wait: bool = False,
        flag: str = "--out",
    ) -> Self:
        """The run in ``path``, begun or gone on with, whichever it takes.

        Args:
            wait: if another process is writing it, wait until that one is done.

        Raises:
            UserError: as ``create`` and ``open``.
        """
        return cls._enter(Path(path), config, identity, code, flag, wait=wait)

    @classmethod
    def _enter(
        cls,
        path: Path,
        config: Mapping[str, Any],
        identity: str,
        code: Mapping[str, Any],
        flag: str,
        new: bool = False,
        wait: bool = False,
    ) -> Self:
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_contents(path, flag, new)  # before leaving a lock file in a foreign folder
            folder = cls(path, identity, lock(path, flag, wait))
        except OSError as error:
            raise UserError(f"{flag} {path} cannot be a run folder: {error.strerror}") from None
        try:
            check_contents(path, flag, new)  # again, as another process may have come first
            if is_run(path):
                check_identity(path, config, identity, code, flag)
            else:
                folder._initialise(config, code)
        except BaseException:
            folder.close()
            raise
        return folder

    def _initialise(self, config: Mapping[str, Any], code: Mapping[str, Any]) -> None:
        about = {
            "hash": self.identity,
            "git": git_commit(),
            "python": platform.python_version(),
            "code": dict(code),
        }
        for name, content in (("code.json", about), ("config.json", dict(config))):
            with treestore.atomic_file(self.path / name) as file:
                file.write((to_json(content, indent=2) + "\n").encode())

    # --- writing --------------------------------------------------------------------------------

    @property
    def state_file(self) -> Path:
        """The checkpoint."""
        return self.path / "checkpoint" / "state.safetensors"

    def next_step(self) -> int:
        """The step that a run gone on with from here starts with: 0 without a checkpoint.

        Raises:
            RunError: the checkpoint is damaged.
        """
        if not self.state_file.exists():
            return 0
        return int(treestore.read_metadata(self.state_file)["step"])

    def restart(self) -> None:
        """Forget checkpoint and result: the run starts again from step 0."""
        (self.path / "result.json").unlink(missing_ok=True)  # first: no longer finished
        self.state_file.unlink(missing_ok=True)

    def restore(self, template: Any) -> tuple[Any, int] | None:
        """(tree, step) of the last checkpoint, or None; cuts the logs back to it.

        Args:
            template: a tree of the structure that was checkpointed.

        Raises:
            RunError: the checkpoint or a log is damaged.
        """
        if not self.state_file.exists():
            self._open_logs(dict.fromkeys(LOGS, 0))
            return None
        tree, about = treestore.load(self.state_file, template)
        if about["hash"] != self.identity:
            raise RunError(f"{self.state_file} is the checkpoint of another run: {about['hash']}")
        self._open_logs({name: int(about[name]) for name in LOGS})
        return tree, int(about["step"])

    def log_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``: numbers, or lists of numbers, by tag.

        Raises:
            RunError: it cannot be written.
        """
        self._append("metrics.jsonl", {"step": step, **dict(sorted(metrics.items()))})

    def log_time(self, step: int, times: Mapping[str, float]) -> None:
        """Append a line to ``timing.jsonl``, with the time of day.

        Raises:
            RunError: it cannot be written.
        """
        now = {"step": step, "unix_time": round(time.time(), 3)}
        self._append("timing.jsonl", {**now, **dict(sorted(times.items()))})

    def checkpoint(self, tree: Any, step: int) -> None:
        """Replace the checkpoint; a run restored from it goes on with ``step``.

        Raises:
            RunError: it cannot be written; the last checkpoint stays.
        """
        lengths = self._sync_logs()  # first: a checkpoint must not be ahead of its logs
        about = {"step": str(step), "hash": self.identity, **lengths}
        treestore.save(self.state_file, tree, about)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, which makes the run a finished one.

        Raises:
            RunError: it cannot be written.
        """
        self._sync_logs()
        with treestore.atomic_file(self.path / "result.json") as file:
            file.write((to_json(result) + "\n").encode())

    def close(self) -> None:
        """Release the folder."""
        for file in self._logs.values():
            file.close()
        self._logs = {}
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_logs(self, lengths: Mapping[str, int]) -> None:
        for file in self._logs.values():
            file.close()
        for name, length in lengths.items():
            path = self.path / name
            try:
                # Unbuffered: after a failed write, no remainder waits to be written on closing.
                self._logs[name] = file = open(path, "ab", buffering=0)  # noqa: SIM115
                if file.tell() < length:
                    raise RunError(f"{path} is damaged: the checkpoint saw {length} bytes of it")
                file.truncate(length)
            except OSError as error:
                raise RunError(f"cannot write {path}: {error.strerror}") from None

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if not self._logs:
            assert not self.state_file.exists(), "restore() comes before logging"
            self._open_logs(dict.fromkeys(LOGS, 0))
        data = (to_json(line) + "\n").encode()
        try:
            while data:
                data = data[self._logs[name].write(data) :]
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}") from None

    def _sync_logs(self) -> dict[str, str]:
        """Make the logs durable; their lengths in bytes."""
        try:
            for file in self._logs.values():
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write in {self.path}: {error.strerror}") from None
        return {name: str(self._logs[name].tell() if self._logs else 0) for name in LOGS}

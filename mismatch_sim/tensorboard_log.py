"""A run as TensorBoard shows it: a curve per metric, and one point of quality against dose.

Event files are a view of ``metrics.jsonl`` and ``timing.jsonl``, never a source: when a run is gone
on with, its old event files are deleted and the logs replayed, so that no step appears twice. They
are written by TensorBoard's own writer, which needs neither TensorFlow nor torch but half a second
to import; that is put off to the first step.

The curves lie in the run's folder, the point in ``hparams/`` below it, as a session of the HPARAMS
tab. Kept apart, its metrics are just the ``final/*`` ones and not every curve; and since no run
declares them, TensorBoard finds out which settings differ among the runs under ``--logdir``.

Left out: histograms, and by-position lists, which are no scalars.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mismatch_sim import runlog
from mismatch_sim.errors import RunError
from mismatch_sim.perturb import grammar, spec

if TYPE_CHECKING:
    from mismatch_sim.config import RunConfig

_SUFFIX = ".mismatch_sim"
"""Ends the names of our event files, so that no other program's are deleted."""

_FLAGS = {
    "stale.k": "staleness",
    "fake_quant.scheme": "quant",
    "weight_noise.sigma": "noise.sigma",
    "weight_noise.relative": "noise.relative",
    "weight_noise.resample": "noise.resample",
    "logit_noise.sigma": "noise.logit_sigma",
}
"""Arguments of operators that a flag has a name for; runs without the operator have its default."""


def hparams(config: RunConfig) -> dict[str, bool | int | float | str]:
    """The settings that can change a run's numbers, and the strength of every operator.

    >>> from mismatch_sim.config import RunConfig
    >>> some = hparams(RunConfig(perturb="stale(4)|logit_noise(0.1)"))
    >>> [some[name] for name in ("staleness", "quant", "noise.sigma", "noise.logit_sigma")]
    [4, 'none', 0.0, 0.1]
    >>> some["perturb"]
    'stale(k=4)|logit_noise(sigma=0.1)'
    """
    values = dict(config.byte_settings())
    for op in config.stack().ops:
        for name, value in _arguments(op):
            values[_FLAGS.get(name, name)] = value
    return {name: value for name, value in values.items() if value is not None}


def _arguments(op: spec.Operator) -> list[tuple[str, Any]]:
    """``stale.k`` and the like, those of a masked operator included."""
    found: list[tuple[str, Any]] = []
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, spec.Operator):
            found += _arguments(value)
        else:
            plain = isinstance(value, bool | int | float | str)
            found.append((f"{op.name}.{f.name}", value if plain else grammar.text_of(value)))
    return found


def final_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The ``final/*`` numbers of a result; those that are absent or not finite are left out.

    >>> final_metrics({"dose": {"value": 0.5, "low": 0.4, "high": 0.6}, "kl_exact_mean": None})
    {'final/dose': 0.5}
    """
    quality = _value(result.get("quality"))
    clean = _value((result.get("clean") or {}).get("quality"))
    numbers = {
        "dose": _value(result.get("dose")),
        "quality": quality,
        "quality_change": quality - clean if _is_number(quality) and _is_number(clean) else None,
        "kl_exact_mean": result.get("kl_exact_mean"),
        "kl_exact_last": result.get("kl_exact_last"),
    }
    return {f"final/{name}": x for name, x in numbers.items() if _is_number(x) and math.isfinite(x)}


def _value(interval: Any) -> Any:
    return interval.get("value") if isinstance(interval, Mapping) else interval


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


class RunWriter:
    """The event files of one run; a context manager.

    Args:
        folder: the run's folder, whose logs are replayed at the first call of ``write`` or
            ``finish`` (by then a run that is gone on with has cut them back).
        config: the run's settings, for the HPARAMS tab.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = Path(folder)
        self.hparams = hparams(config)
        self._curves: Any = None
        self._point: Any = None

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Add the scalars of one step: those of its metrics and times whose tag has a slash.

        Raises:
            RunError: a file cannot be written.
        """
        self._start(before=step)
        self._scalars(self._curves, step, line, time.time())

    def finish(self, result: Mapping[str, Any]) -> None:
        """Add the run's point: its final quality and its dose.

        Raises:
            RunError: a file cannot be written.
        """
        self._start(before=None)
        self._scalars(
            self._point, int(result.get("steps") or 0), final_metrics(result), time.time()
        )
        self._end(success=True)

    def close(self) -> None:
        """Write out what is buffered.

        Raises:
            RunError: a file cannot be written.
        """
        writers, self._curves, self._point = (self._curves, self._point), None, None
        try:
            for writer in writers:
                if writer is not None:
                    writer.close()
        except OSError as error:
            raise RunError(f"cannot write events in {self.folder}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self._point is not None:
            self._end(success=False)
        self.close()

    def _start(self, before: int | None) -> None:
        """Open new files in place of the old ones, with all logged steps (``before`` a step)."""
        if self._curves is not None:
            return
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        point = self.folder / "hparams"
        try:
            for old in (f for d in (self.folder, point) for f in d.glob(f"*.tfevents.*{_SUFFIX}")):
                old.unlink()
            self._curves, self._point = (
                EventFileWriter(
                    str(path), max_queue_size=100, flush_secs=5, filename_suffix=_SUFFIX
                )
                for path in (self.folder, point)
            )
        except OSError as error:
            raise RunError(f"cannot write events in {self.folder}: {error.strerror}") from None
        times = {line["step"]: line for line in self._log("timing.jsonl")}
        began = min((line["unix_time"] for line in times.values()), default=time.time())
        # An empty group name: every run is a group of its own, even with settings of another.
        session = hparams_pb(self.hparams, trial_id="", start_time_secs=began)
        self._add(self._point, session, 0, began)
        for line in self._log("metrics.jsonl"):
            step = line["step"]
            if before is None or step < before:
                clock = times.get(step, {})
                self._scalars(self._curves, step, {**line, **clock}, clock.get("unix_time", began))

    def _log(self, name: str) -> list[dict[str, Any]]:
        return runlog.read_metrics(self.folder, name) if (self.folder / name).exists() else []

    def _scalars(self, writer: Any, step: int, line: Mapping[str, Any], when: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=tag, simple_value=float(x))
            for tag, x in line.items()
            if "/" in tag and _is_number(x)
        ]
        self._add(writer, Summary(value=values), step, when)

    def _end(self, success: bool) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        value = Summary.Value(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(
                plugin_data_pb2.HParamsPluginData(session_end_info=info)
            ),
            tensor=metadata.NULL_TENSOR,
        )
        self._add(self._point, Summary(value=[value]), 0, time.time())

    def _add(self, writer: Any, summary: Any, step: int, when: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            writer.add_event(Event(wall_time=when, step=step, summary=summary))
        except OSError as error:
            raise RunError(f"cannot write events in {self.folder}: {error.strerror}") from None

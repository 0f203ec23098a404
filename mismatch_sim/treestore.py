"""Checkpoints: any tree of arrays in one safetensors file, written whole or not at all.

A tree is made of dicts, tuples, lists, NamedTuples and ``None``; its leaves are arrays of any
framework or Python numbers. The file holds one array per leaf, named by its path (``params/w``,
``opt_state/0/mu``), so any safetensors reader can look into it. Types of containers are not stored:
they come from a *template* of the same structure, and a leaf that is missing, unexpected or of
another shape is an error. Nothing is ever unpickled, so a checkpoint can run no code.

The bytes are a function of the values alone. Leaves of equal content are stored once: a staleness
ring holds the same snapshot k + 1 times at first. The writer is ours, since the library's writer
puts metadata in a random order and makes no durable file; the reader is the library's.

Left out: sharding over several files and partial loading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from mismatch_sim import ops
from mismatch_sim.errors import RunError

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_NUMBERS: dict[type, tuple[type, str]] = {
    bool: (np.bool_, "b"),
    int: (np.int64, "iu"),
    float: (np.float64, "f"),
}
"""Python number -> how it is stored, and the kinds of dtype it is read back from."""

_KEY = "mismatch_sim"


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write that appears under ``path`` complete and on disk, or not at all.

    It has a temporary name in the same folder (made if absent) until the block ends; a name that is
    always the same, so that whatever a kill leaves behind is overwritten by the next attempt. The
    caller makes sure that no two processes write the same path.

    Raises:
        RunError: the file cannot be written (disk full, no permission); the old one is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            _sync_folder(path.parent.parent)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # a full disk gets its space back
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(path: str | os.PathLike, tree: Any, metadata: dict[str, str]) -> None:
    """Write ``tree`` and ``metadata`` to one file, atomically.

    Raises:
        RunError: the file cannot be written.
        TypeError: a leaf is no array or number, or a dict key is no word (our bug).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/x.safetensors", {"w": np.ones(2), "step": 7}, {"who": "me"})
    ...     load(f"{folder}/x.safetensors", {"w": np.zeros(2), "step": 0})
    ({'w': array([1., 1.]), 'step': 7}, {'who': 'me'})
    """
    arrays: dict[str, np.ndarray] = {}
    same: dict[str, str] = {}
    digests: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, leaf in sorted(_leaves(tree), key=lambda item: item[0]):
        array = _to_array(name, leaf)
        digest = _digest(array)
        original = first.setdefault((digest, array.dtype.name, array.shape), name)
        if original == name:
            arrays[name], digests[name] = array, digest
        else:
            same[name] = original
    own = json.dumps({"metadata": metadata, "same": same, "digests": digests}, sort_keys=True)
    header: dict[str, Any] = {"__metadata__": {_KEY: own, "checksum": _digest(_text(own))}}
    # Widest items first keeps every array aligned, as the format's own writer does.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    start = 0
    for name in order:
        array = arrays[name]
        end = start + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes(arrays[name]))


def load(path: str | os.PathLike, template: Any) -> tuple[Any, dict[str, str]]:
    """The tree in ``path`` as NumPy arrays in the containers of ``template``, and its metadata.

    Args:
        template: a tree of the same structure; of its leaves, only shape and dtype count. Where it
            has a Python number, the result has one too.

    Raises:
        RunError: no such file, a damaged one, or one whose leaves are not those of the template.
    """
    path = Path(path)
    expected = dict(_leaves(template))
    try:
        with safe_open(path, framework="np") as file:
            own = _own(path, file)
            same, digests = own["same"], own["digests"]
            _check_names(path, expected, {*file.keys(), *same})
            values = {}
            for name, leaf in expected.items():
                source = same.get(name, name)
                array = file.get_tensor(source)  # read again for each: no two leaves share memory
                if _digest(array) != digests.get(source):
                    raise RunError(f"{path} is damaged: {source!r} does not match its checksum")
                values[name] = _restore(path, name, array, leaf)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None
    return _rebuild(template, "", values), own["metadata"]


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The metadata alone.

    Raises:
        RunError: no such file, or a damaged one.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="np") as file:
            return _own(path, file)["metadata"]
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _own(path: Path, file: Any) -> dict[str, Any]:
    header = file.metadata() or {}
    if _KEY not in header:
        raise RunError(f"{path} was not written by mismatch_sim")
    if header.get("checksum") != _digest(_text(header[_KEY])):
        raise RunError(f"{path} is damaged: its header does not match its checksum")
    return json.loads(header[_KEY])


def _unreadable(path: Path, error: Exception) -> RunError:
    if isinstance(error, FileNotFoundError):
        return RunError(f"cannot read {path}: no such file")
    return RunError(f"{path} is damaged or unreadable: {' '.join(str(error).split())}")


def _check_names(path: Path, expected: dict[str, Any], stored: set[str]) -> None:
    missing, extra = expected.keys() - stored, stored - expected.keys()
    for problem, names in (("lacks", missing), ("holds an unexpected", extra)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(f"{path} {problem} {min(names)!r}{more}: it is of another run")


def _restore(path: Path, name: str, array: np.ndarray, leaf: Any) -> Any:
    """``array`` as the template's leaf wants it: as it is, or as a Python number."""
    if type(leaf) in _NUMBERS:
        if array.shape == () and array.dtype.kind in _NUMBERS[type(leaf)][1]:
            return type(leaf)(array.item())
        want = f"one {type(leaf).__name__}"
    else:
        want = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    have = f"{array.dtype.name} {list(array.shape)}"
    if want != have:
        raise RunError(f"{path}: {name!r} is {have}, expected {want}")
    return array


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf."""
    parts = _parts(tree)
    if parts is None:
        yield path, tree
        return
    for key, part in parts:
        yield from _leaves(part, _join(path, key))


def _rebuild(template: Any, path: str, values: dict[str, Any]) -> Any:
    parts = _parts(template)
    if parts is None:
        return values[path]
    built = [(key, _rebuild(part, _join(path, key), values)) for key, part in parts]
    if template is None:
        return None
    if isinstance(template, dict):
        return type(template)(built)
    children = (child for _, child in built)
    return type(template)(*children) if hasattr(template, "_fields") else type(template)(children)


def _parts(tree: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container (none of ``None``), or None for a leaf."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        bad = [key for key in tree if not isinstance(key, str) or key in ("", "__metadata__")]
        if bad:
            raise TypeError(f"a dict key must be a word, got {bad[0]!r}")
        return list(tree.items())
    if hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, tuple | list):
        return [(str(i), part) for i, part in enumerate(tree)]
    return None


def _join(path: str, key: str) -> str:
    """JSON pointer's escapes, so that a key with a slash is no two keys."""
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{path}/{key}" if path else key


def _to_array(name: str, leaf: Any) -> np.ndarray:
    if type(leaf) in _NUMBERS:
        return np.asarray(leaf, dtype=_NUMBERS[type(leaf)][0])
    array = np.asarray(ops.to_numpy(leaf), order="C")  # unlike ascontiguousarray, keeps 0-d
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"{name!r} is no array of numbers: {array.dtype}")
    return array


def _bytes(array: np.ndarray) -> memoryview:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def _text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(_bytes(array), digest_size=16).hexdigest()

"""Checkpoint trees: what goes in comes out, whole or not at all, and damage is named."""

import os
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from mismatch_sim import treestore
from mismatch_sim.errors import RunError


class Ring(NamedTuple):
    snapshots: tuple
    step: int


DTYPES = [
    "bool", "uint8", "int8", "int32", "int64", "uint32", "uint64", "float16", "float32", "float64",
    ml_dtypes.bfloat16,
]  # fmt: skip


def tree() -> dict[str, Any]:
    w = {"model.layers.0.mlp/up~x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    return {
        "params": w,
        "opt": ((), [None, np.array(3, np.int32)], {"empty": {}}),
        "ring": Ring((w, w, w), 1000),
        "numbers": (True, -7, 0.1, float("inf")),
        "all": {str(np.dtype(t)): np.array([0, 1, 1]).astype(t) for t in DTYPES},
        "shapes": [np.zeros((0, 4), np.float32), np.array(2.5), np.ones((1, 1, 3)).T],
    }


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
    if isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


def test_round_trip_keeps_containers_dtypes_shapes_and_numbers(tmp_path):
    path = tmp_path / "deep" / "x.safetensors"
    treestore.save(path, tree(), {"step": "7", "b": "ü", "a": ""})
    loaded, metadata = treestore.load(path, tree())
    assert_equal(tree(), loaded)
    assert metadata == treestore.read_metadata(path) == {"step": "7", "b": "ü", "a": ""}
    assert os.listdir(path.parent) == ["x.safetensors"]


def test_nan_and_negative_zero_keep_their_bits(tmp_path):
    x = np.array([0x7FC00001, 0xFFC00000, 0x80000000], np.uint32).view(np.float32)
    treestore.save(tmp_path / "x", {"x": x}, {})
    loaded, _ = treestore.load(tmp_path / "x", {"x": x})
    assert loaded["x"].tobytes() == x.tobytes()


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_arrays_of_any_framework(framework, tmp_path):
    if framework == "jax":
        import jax.numpy as jnp

        live = {"w": jnp.ones((2, 3), jnp.bfloat16), "key": jnp.zeros(2, jnp.uint32)}
    else:
        import torch

        live = {"w": torch.nn.Parameter(torch.ones(2, 3)), "key": torch.zeros(2, dtype=torch.int64)}
    treestore.save(tmp_path / "x", live, {})
    loaded, _ = treestore.load(tmp_path / "x", live)
    assert {str(x.dtype) for x in loaded.values()} == {
        str(x.dtype).removeprefix("torch.") for x in live.values()
    }
    assert loaded["w"].sum() == 6


def test_bytes_depend_on_the_values_alone(tmp_path):
    def saved(tree, metadata):
        treestore.save(tmp_path / "x", tree, metadata)
        return (tmp_path / "x").read_bytes()

    w, v = np.ones(3), np.zeros(3)
    one = saved({"a": w, "b": v, "c": w}, {"p": "1", "q": "2"})
    assert one == saved({"c": w.copy(), "b": v, "a": np.ones(6)[::2]}, {"q": "2", "p": "1"})
    assert one != saved({"a": w, "b": v, "c": w}, {"p": "1", "q": "3"})


def test_equal_leaves_are_stored_once_and_loaded_apart(tmp_path):
    w = np.random.default_rng(0).normal(size=10_000)
    treestore.save(tmp_path / "x", [w] * 5, {})
    assert (tmp_path / "x").stat().st_size < 1.1 * w.nbytes
    loaded, _ = treestore.load(tmp_path / "x", [w] * 5)
    loaded[0][:] = 0  # an in-place update of one must not reach the others
    np.testing.assert_array_equal(loaded[4], w)


def test_any_safetensors_reader_can_look_into_it(tmp_path):
    treestore.save(tmp_path / "x", {"a": {"b": np.arange(3)}, "c": np.ones(2, np.float32)}, {})
    with safe_open(tmp_path / "x", framework="np") as file:
        assert sorted(file.keys()) == ["a/b", "c"]
        assert file.get_tensor("a/b").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"w": np.ones((2, 3)), "n": 1, "new": np.ones(1)}, "lacks 'new'"),
        ({"w": np.ones((2, 3)), "n": 1, "x": [np.ones(1)] * 3}, "lacks 'x/0' and 2 more"),
        ({"w": np.ones((2, 3))}, "unexpected 'n'"),
        ({"w": np.ones((2, 3)), "n": None}, "unexpected 'n'"),
        ({"w": np.ones((3, 2)), "n": 1}, r"'w' is float64 \[2, 3\], expected float64 \[3, 2\]"),
        ({"w": np.ones((2, 3), np.float32), "n": 1}, r"float64 \[2, 3\], expected float32"),
        ({"w": np.ones((2, 3)), "n": 1.0}, r"'n' is int64 \[\], expected one float"),
        ({"w": 1.0, "n": 1}, "expected one float"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named(template, message, tmp_path):
    treestore.save(tmp_path / "x", {"w": np.ones((2, 3)), "n": 1}, {})
    with pytest.raises(RunError, match=message) as error:
        treestore.load(tmp_path / "x", template)
    assert "\n" not in str(error.value) and str(tmp_path / "x") in str(error.value)


@pytest.mark.parametrize("bad", [{"x": "text"}, {"x": object()}, {1: np.ones(1)}, {"": np.ones(1)}])
def test_what_is_no_tree_of_numbers_is_refused(bad, tmp_path):
    with pytest.raises(TypeError):
        treestore.save(tmp_path / "x", bad, {})
    assert not list(tmp_path.iterdir())


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path):
    path, small = tmp_path / "x", {"w": np.arange(4.0), "n": 3, "again": np.arange(4.0)}
    treestore.save(path, small, {"step": "12"})
    whole = path.read_bytes()
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in range(len(whole))]
    damaged += [whole + b"\0", b"", b"{}" * 50]
    for data in damaged:
        path.write_bytes(data)
        try:
            loaded, metadata = treestore.load(path, small)
        except RunError as error:
            assert "\n" not in str(error)
        else:  # a changed space between two header entries changes nothing
            assert_equal(small, loaded)
            assert metadata == {"step": "12"}


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(RunError, match="no such file"):
        treestore.load(tmp_path / "none", {})
    from safetensors.numpy import save_file

    save_file({"w": np.ones(2)}, tmp_path / "foreign")
    with pytest.raises(RunError, match="not written by mismatch_sim"):
        treestore.load(tmp_path / "foreign", {"w": np.ones(2)})


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x"
    treestore.save(path, {"w": np.ones(2)}, {})

    def disk_full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(RunError, match=r"cannot write .*: No space left on device"):
        treestore.save(path, {"w": np.zeros(2)}, {})
    assert os.listdir(tmp_path) == ["x"]
    assert treestore.load(path, {"w": np.ones(2)})[0]["w"].tolist() == [1, 1]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        treestore.save(tmp_path / "file" / "x", {}, {})


CHILD = """
import sys, numpy as np
from mismatch_sim import treestore
for i in range(10**6):
    treestore.save(sys.argv[1], {"w": np.full(50_000, i), "n": i}, {"step": str(i)})
    if i == 0:
        print("ready", flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path, template = tmp_path / "x", {"w": np.zeros(50_000, np.int64), "n": 0}
    for attempt in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            try:
                child.wait(0.02 + 0.0137 * attempt)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        loaded, metadata = treestore.load(path, template)
        assert str(loaded["n"]) == metadata["step"]
        assert (loaded["w"] == loaded["n"]).all()
    treestore.save(path, template, {})  # and what the kills left behind is in nobody's way
    assert os.listdir(tmp_path) == ["x"]

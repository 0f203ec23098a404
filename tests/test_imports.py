"""Who may import whom, and that a command line answers before any framework is loaded."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mismatch_sim"
FRAMEWORKS = {"jax", "jaxlib", "torch", "optax", "flax", "transformers", "tensorflow"}
SLOW = {"jax", "torch", "transformers", "optax", "numpy", "scipy", "tensorboard"}

# Imports go one way, from a higher layer to a lower one. A module that is in no layer counts as a
# command, the highest.
LAYERS = [
    {"types", "errors"},
    {"ops", "schedules"},
    {"rng"},
    {"formats", "divergences", "corrections", "sampling", "stats", "metrics", "treestore"},
    {"perturb", "objectives"},
    {"settings", "naming", "config"},
    {"backends", "tasks", "pairs", "runlog", "tensorboard_log"},
    {"world", "evaluate"},
    {"loop"},
    {"reference"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """Dotted names of all that a file imports, inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(name):
    """``perturb`` of ``mismatch_sim.perturb.spec.parse``; empty for the package itself."""
    part = [*name.split("."), ""][1]
    known = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()
    return part if known else ""


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_only_the_seam_and_the_backends_name_a_framework(path):
    if path == PACKAGE / "ops.py" or PACKAGE / "backends" in path.parents:
        return
    assert not {name.split(".")[0] for name in imported(path)} & FRAMEWORKS


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_one_way(path):
    mine = top(dotted(path))
    others = {top(n) for n in imported(path) if n.split(".")[0] == "mismatch_sim"} - {"", mine}
    assert "experiments" not in {n.split(".")[0] for n in imported(path)}
    above = {name for name in others if LAYER.get(name, 99) > LAYER.get(mine, 99)}
    assert not above, f"{dotted(path)} imports from a layer above its own: {above}"


def test_backends_know_no_operator_and_no_correction():
    for path in (PACKAGE / "backends").rglob("*.py"):
        names = {top(n) for n in imported(path) if n.startswith("mismatch_sim.")}
        assert not names & {"perturb", "objectives", "corrections"}, path


def loaded_by(*argv):
    """Top-level modules in sys.modules after running python with ``argv``; its exit status."""
    code = f"""
import atexit, runpy, sys
atexit.register(lambda: print("LOADED", *{{m.split(".")[0] for m in sys.modules}}))
sys.argv = {list(argv)!r}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert lines[-1].startswith("LOADED ")
    return set(lines[-1].split()), done.returncode, "\n".join(lines[:-1])


@pytest.mark.parametrize(
    "argv",
    [
        ("mismatch_sim.run", "--help"),
        ("mismatch_sim", "run", "--help"),
        ("mismatch_sim", "--help"),
        ("mismatch_sim", "--version"),
    ],
    ids=" ".join,
)
def test_help_loads_no_framework_and_no_arrays(argv):
    names, status, out = loaded_by(*argv)
    assert status == 0
    assert not names & SLOW
    if "run" in argv[:2] or argv[0].endswith(".run"):
        assert "--noise.sigma" in out


def test_importing_the_package_loads_no_framework():
    names, _, _ = loaded_by("mismatch_sim.config")
    assert not names & SLOW
    code = "import sys, mismatch_sim; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & SLOW

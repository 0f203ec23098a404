"""What README and docs say is run: commands, the ten-line operator, docstring examples, tags."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mismatch_sim
from mismatch_sim.tasks import arith

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SMALL = shlex.split(
    "--steps 4 --batch 8 --eval.samples 16 --eval.batch 16 --length 2"
    " --dose.checkpoints 2 --dose.draws 2 --dose.prompts 16"
)
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(mismatch_sim.__path__, "mismatch_sim.")
    if not m.name.endswith("__main__")
)


def blocks(language=""):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands():
    """Every ``mismatch-sim run`` line of the README, comments cut off."""
    lines = [line for block in blocks() for line in block.splitlines()]
    found = [shlex.split(x, comments=True) for x in lines if x.startswith("mismatch-sim run")]
    return [words[2:] for words in found]


def test_readme_commands_run_in_the_order_in_which_they_stand(tmp_path):
    """Each as it stands but smaller (the last of a repeated flag wins), in one folder."""
    (tmp_path / "my_ops.py").write_text(blocks("python")[0])
    problems = [f"{a}+{b}*{a}=" for a in range(10) for b in range(10)]
    lines = [json.dumps({"prompt": p, "answer": arith.solve(p)}) for p in problems]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert len(commands()) >= 9
    for words in commands():
        small = [] if "--resume" in words else SMALL
        done = subprocess.run(
            [sys.executable, "-m", "mismatch_sim", "run", *words, *small],
            cwd=tmp_path,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)
        if "--json" in words:
            json.loads(done.stdout.splitlines()[-1])


def test_make_run_is_the_command_the_readme_names():
    makefile = (ROOT / "Makefile").read_text()
    named = re.search(r"then: python -m (.*)$", README, flags=re.MULTILINE)
    assert named and f"$(BIN)/python -m {named[1]}" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_operator_in_the_readme_has_ten_lines():
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 10


def test_links_and_files_named_in_readme_and_docs_exist():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
    for module in re.findall(r"python -m ((?:experiments|mismatch_sim)[\w.]*)", README):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_every_public_function_has_a_docstring():
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__doc__, name
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if callable(value):
                assert value.__doc__, f"{name}.{attribute}"


def test_logged_tags_and_documented_tags_are_the_same(tmp_path):
    flags = [*SMALL, "--staleness", "1", "--objective", "sampled_reverse_kl", "--dose.skip"]
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_sim", "run", *flags, "--out", "a"],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logged = set()
    for file in ("metrics.jsonl", "timing.jsonl"):
        for line in (tmp_path / "a" / file).read_text().splitlines():
            logged |= {tag for tag in json.loads(line) if "/" in tag}
    documented = set()
    for row in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if row.startswith("| `"):
            area = base = ""
            for tag in re.findall(r"`([^`]+)`", row.split("|")[1]):
                if tag.startswith("_"):
                    tag = base + tag
                elif "/" not in tag:
                    tag = f"{area}/{tag}"
                area, base = tag.split("/")[0], re.sub(r"_(low|high|max|min)$", "", tag)
                documented.add(tag)
    assert logged - documented == set(), "logged but not documented"
    assert documented - logged == set(), "documented but not logged"

"""Prompts of the user's own: one JSON object a line, ``{"prompt": "...", "answer": "..."}``.

The verifier is equality with ``answer`` after stripping white space. ``--length`` is the largest
number of generated tokens. Lines are sorted into train, probe and eval by the checksum of the
prompt, so the splits stay the same when lines are added or reordered.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mismatch_sim.errors import UserError
from mismatch_sim.tasks import Problem, Split, split_of


class Jsonl:
    """A task read from a file; see the module."""

    lengths = (1, 1 << 16)

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.name = path.stem
        self.path = path
        self.splits: dict[Split, list[Problem]] = {"train": [], "probe": [], "eval": []}
        for problem in problems:
            self.splits[split_of(problem.prompt)].append(problem)

    def draw(
        self, split: Split, count: int, rng: np.random.Generator, length: int
    ) -> list[Problem]:
        """Lines of the split, drawn with replacement."""
        lines = self.splits[split]
        return [lines[i] for i in rng.integers(0, len(lines), count)]

    def longest(self, length: int) -> list[Problem]:
        """Every line: the file is all there is."""
        return [problem for lines in self.splits.values() for problem in lines]

    def max_new_tokens(self, length: int) -> int:
        """The dial itself."""
        return length

    def correct(self, problem: Problem, response: str) -> bool:
        """Equality with the answer, white space at the ends aside."""
        return response.strip() == problem.answer.strip()


def read(path: Path) -> Jsonl:
    """Read and check a prompt file.

    Raises:
        UserError: no such file, no line, a line that is not such an object (with its number), a
            prompt given twice, or a split that no prompt falls into.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path} cannot be read: {error}") from None
    seen: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--prompts {path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
        ok = isinstance(entry, dict) and all(
            isinstance(entry.get(k), str) and entry[k] for k in ("prompt", "answer")
        )
        if not ok:
            raise UserError(
                f'{where}: expected {{"prompt": "...", "answer": "..."}} with non-empty texts'
            )
        if entry["prompt"] in seen:
            raise UserError(f"{where}: the prompt of line {seen[entry['prompt']]} again")
        seen[entry["prompt"]] = number
        problems.append(Problem(entry["prompt"], entry["answer"]))
    if not problems:
        raise UserError(f"--prompts {path} is empty: expected one JSON object a line")
    task = Jsonl(Path(path), problems)
    for split, members in task.splits.items():
        if not members:
            raise UserError(
                f"--prompts {path}: none of its {len(problems)} prompts falls into the {split}"
                " split (80/10/10 by checksum of the prompt); give more prompts"
            )
    return task

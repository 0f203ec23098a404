"""Tasks: prompts with a verifiable answer, in splits that cannot overlap.

A prompt belongs to the split that a checksum of its text says (80 % train, 10 % probe, 10 % eval),
for built-in tasks and for files alike: the splits are disjoint by construction, whatever is drawn
from them, and a prompt never changes sides between runs, seeds or lengths.

A task is a small object with a few members (see ``Task``). Left out: rewards other than right or
wrong, and multi-turn tasks.
"""

from __future__ import annotations

import difflib
import zlib
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from mismatch_sim.errors import UserError

Split = Literal["train", "probe", "eval"]


class Problem(NamedTuple):
    """A prompt and the response that answers it (the verifier's reference)."""

    prompt: str
    answer: str


class Task(Protocol):
    """What the loop needs of a task."""

    name: str
    lengths: tuple[int, int]
    """Smallest and largest value of the length dial."""

    def draw(
        self, split: Split, count: int, rng: np.random.Generator, length: int
    ) -> list[Problem]:
        """``count`` problems of a split, drawn independently (so they may repeat)."""
        ...

    def longest(self, length: int) -> list[Problem]:
        """Problems among which is one with the longest prompt (it sets the padded width)."""
        ...

    def max_new_tokens(self, length: int) -> int:
        """Tokens of the longest right response, its EOS included."""
        ...

    def correct(self, problem: Problem, response: str) -> bool:
        """Does the response (special tokens removed) answer the problem?"""
        ...


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to, by the CRC-32 of its text.

    >>> split_of("3+4*2="), split_of("5-6=")
    ('train', 'probe')
    """
    bucket = zlib.crc32(prompt.encode()) % 10
    return "probe" if bucket == 8 else "eval" if bucket == 9 else "train"


def get(name: str, prompts: Path | None = None) -> Task:
    """The built-in task ``name``, or the prompts of a JSONL file in its place.

    Raises:
        UserError: unknown name, or a broken file.
    """
    from mismatch_sim.tasks import arith, jsonl

    if prompts is not None:
        return jsonl.read(prompts)
    tasks: dict[str, Task] = {"arith": arith.TASK}
    if name not in tasks:
        close = difflib.get_close_matches(name, tasks, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"task {name!r} is unknown{hint}; allowed: {', '.join(tasks)}")
    return tasks[name]

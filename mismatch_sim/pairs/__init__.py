"""Pairs: two Hugging Face checkpoint folders with one tokenizer, and the task they are trained on.

A pair is a folder holding ``teacher/`` and ``student/`` (each config.json + model.safetensors +
tokenizer.json) and ``pair.json`` naming its task. Built-in pairs are such folders inside this
package, small enough that anyone can run them, trained by ``pairs/train.py``; a path to a folder of
the user's own works in the same place.

Left out: pairs with two tokenizers (no token-level KL exists between them) and code from a
checkpoint folder, which is never run.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mismatch_sim import tasks
from mismatch_sim.errors import UserError
from mismatch_sim.types import Prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HERE = Path(__file__).parent


class Pair(NamedTuple):
    """A student, its teacher, their tokenizer and their task."""

    name: str
    teacher: Path
    student: Path
    task: tasks.Task
    tokenizer: Tokenizer
    eos_id: int
    pad_id: int

    def encode(self, problems: list[tasks.Problem], width: int) -> Prompts:
        """Token ids of the prompts, left-padded to ``width`` (``[B, width]``, int32).

        Raises:
            UserError: a prompt has a token the tokenizer does not know, or more than ``width``.
        """
        tokens = np.full((len(problems), width), self.pad_id, np.int32)
        mask = np.zeros((len(problems), width), np.int32)
        encoded = self.tokenizer.encode_batch_fast([p.prompt for p in problems])
        for row, (problem, encoding) in enumerate(zip(problems, encoded, strict=True)):
            ids = encoding.ids
            if not 0 < len(ids) <= width:
                raise UserError(
                    f"prompt {problem.prompt!r} has {len(ids)} tokens; allowed: 1 to {width}"
                )
            tokens[row, width - len(ids) :] = ids
            mask[row, width - len(ids) :] = 1
        return Prompts(tokens, mask)

    def decode(self, tokens_BN: np.ndarray, mask_BN: np.ndarray) -> list[str]:
        """Texts of the responses, special tokens removed."""
        rows = [t[m > 0].tolist() for t, m in zip(tokens_BN, mask_BN, strict=True)]
        return self.tokenizer.decode_batch(rows, skip_special_tokens=True)

    def prompt_width(self, length: int) -> int:
        """Tokens of the longest prompt at a length."""
        texts = [p.prompt for p in self.task.longest(length)]
        return max(len(e.ids) for e in self.tokenizer.encode_batch_fast(texts))

    def digest(self) -> str:
        """SHA-256 over every file of both checkpoints and of the prompts: the pair's identity."""
        digest = hashlib.sha256()
        folders = (self.teacher, self.student)
        files = [p for folder in folders for p in sorted(folder.iterdir()) if p.is_file()]
        if hasattr(self.task, "path"):
            files.append(self.task.path)
        for path in files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]


def built_in() -> list[str]:
    """Names of the pairs shipped in the package."""
    return sorted(p.parent.name for p in HERE.glob("*/pair.json"))


def load(name: str, prompts: Path | None = None) -> Pair:
    """A built-in pair by name, or the folder of one.

    Raises:
        UserError: unknown name, a missing file, two tokenizers, no EOS, or a broken prompt file.
    """
    folder = HERE / name if name in built_in() else Path(name)
    if not folder.is_dir():
        close = difflib.get_close_matches(name, built_in(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"--pair {name!r} is unknown{hint}; allowed: {', '.join(built_in())},"
            " or a folder with teacher/ and student/"
        )
    teacher, student = folder / "teacher", folder / "student"
    for checkpoint in (teacher, student):
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            if not (checkpoint / file).is_file():
                raise UserError(f"--pair {name}: {checkpoint / file} does not exist")
    if (teacher / "tokenizer.json").read_bytes() != (student / "tokenizer.json").read_bytes():
        raise UserError(f"--pair {name}: teacher and student have different tokenizer.json files")
    card = folder / "pair.json"
    if prompts is None and not card.is_file():
        raise UserError(f"--pair {name} has no pair.json naming a task: give --prompts FILE.jsonl")
    task_name = _read_json(card).get("task", "") if prompts is None else ""
    task = tasks.get(task_name, prompts)

    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(student / "tokenizer.json"))
    except Exception as error:  # the library raises a bare Exception for every malformed file
        raise UserError(f"{student / 'tokenizer.json'} cannot be read: {error}") from None
    config = _read_json(student / "config.json")
    eos, pad = config.get("eos_token_id"), config.get("pad_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int) or isinstance(eos, bool):
        raise UserError(f"{student / 'config.json'}: eos_token_id is missing")
    pair = Pair(name, teacher, student, task, tokenizer, eos, eos if pad is None else pad)
    _check_prompts(pair, prompts)
    return pair


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object")
    return content


def _check_prompts(pair: Pair, prompts: Path | None) -> None:
    """Every character of a prompt file must survive the tokenizer: name the line that does not."""
    if prompts is None:
        return
    lines = prompts.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            text = json.loads(line)["prompt"]
            decoded = pair.tokenizer.decode(pair.tokenizer.encode(text).ids)
            if decoded.strip() != text.strip():
                raise UserError(
                    f"--prompts {prompts}, line {number}: the tokenizer of pair {pair.name} cannot"
                    f" represent {text!r} (it reads back as {decoded!r})"
                )

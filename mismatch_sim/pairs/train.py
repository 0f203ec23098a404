"""Train the built-in pairs' checkpoints: ``python -m mismatch_sim.pairs.train arith``.

Teacher and student are trained on right responses (cross-entropy) over all lengths of the task.
The teacher is trained to the end of its schedule; the student is smaller and stopped early, at the
first check at which its sampled accuracy reaches ``stop_at``, so that distillation has work to do.
Each folder gets config.json, model.safetensors, tokenizer.json, as Hugging Face lays them out.

Everything is seeded; on one machine the same command writes the same files.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mismatch_sim import pairs, rng, schedules, tasks
from mismatch_sim.config import OptimConfig
from mismatch_sim.objectives import opd
from mismatch_sim.tasks import arith
from mismatch_sim.types import Backend, Params, Policy, Prompts, Rollout

PAD, EOS = 0, 1


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made: its shape, and when its training ends."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    steps: int
    seed: int
    stop_at: float = math.inf
    """Sampled accuracy at which training ends early."""
    check_every: int = 50
    lr: float = 3e-3
    batch: int = 128


RECIPES = {
    "arith": {
        "teacher": Recipe(64, 192, 2, 4, 2, steps=5000, seed=0, check_every=500),
        "student": Recipe(48, 96, 2, 4, 2, steps=5000, seed=1, check_every=50, stop_at=0.3),
    }
}
CHECK_LENGTH = 6


def character_tokenizer(characters: str) -> Tokenizer:
    """One token a character, ids in the order given, after pad and EOS."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def llama_config(recipe: Recipe, vocab_size: int) -> dict[str, Any]:
    """``config.json`` of a Llama checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_hidden_layers,
        "num_attention_heads": recipe.num_attention_heads,
        "num_key_value_heads": recipe.num_key_value_heads,
        "head_dim": recipe.hidden_size // recipe.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
    }


def initial_params(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Matrices N(0, 1 / fan_in), norms one, keyed by name."""
    params = {}
    for name, shape in shapes.items():
        noise = rng.normal(rng.fold(rng.key(seed), name), int(np.prod(shape))).reshape(shape)
        is_matrix = len(shape) > 1
        params[name] = noise * np.float32(shape[-1] ** -0.5) if is_matrix else np.ones(shape)
    return {n: w.astype(np.float32) for n, w in params.items()}


def gold(pair: pairs.Pair, problems: list[tasks.Problem], length: int) -> Rollout:
    """The right responses, in the shape of a rollout."""
    count = pair.task.max_new_tokens(length)
    prompts = pair.encode(problems, pair.prompt_width(length))
    tokens = np.full((len(problems), count), PAD, np.int32)
    mask = np.zeros_like(tokens)
    for row, problem in enumerate(problems):
        ids = [*pair.tokenizer.encode(problem.answer).ids, EOS]
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    return Rollout(prompts, tokens, mask, np.zeros(tokens.shape, np.float32))


def accuracy(pair: pairs.Pair, backend: Backend, model: Any, params: Params, length: int) -> float:
    """Sampled accuracy on 1,024 evaluation prompts."""
    problems = pair.task.draw("eval", 1024, np.random.default_rng(1), length)
    out = backend.generate(
        model,
        Policy(params),
        Prompts(*pair.encode(problems, pair.prompt_width(length))),
        max_new_tokens=pair.task.max_new_tokens(length),
        eos_id=EOS,
        pad_id=PAD,
        rng=rng.key(2),
        temperature=1.0,
    )
    texts = pair.decode(np.asarray(out.tokens_BN), np.asarray(out.mask_BN))
    hits = [pair.task.correct(p, t) for p, t in zip(problems, texts, strict=True)]
    return float(np.mean(hits))


def train(folder: Path, role: str, recipe: Recipe) -> None:
    """Train one checkpoint of the pair in ``folder`` and write it there."""
    from mismatch_sim.backends import jax_backend as backend

    started = time.time()
    target = folder / role
    pair = pairs.Pair(folder.name, target, target, arith.TASK, _tokenizer(target), EOS, PAD)
    model = backend.Model.from_folder(target)
    params = backend.from_numpy(initial_params(model.shapes(), recipe.seed))
    optim = OptimConfig(lr=recipe.lr, warmup=100, weight_decay=0.01)
    opt_state = backend.init_optimizer(params, optim)
    numbers = np.random.default_rng(recipe.seed)
    lengths = list(range(2, arith.TASK.lengths[1] + 1, 2))
    for step in range(recipe.steps):
        length = lengths[step % len(lengths)]
        rollout = gold(pair, pair.task.draw("train", recipe.batch, numbers, length), length)
        none = np.zeros((1, 1, 1), np.float32)
        lr = schedules.warmup_cosine(step, optim.lr, optim.warmup, recipe.steps, 0.02)
        weights = np.ones(rollout.mask_BN.shape, np.float32)
        params, opt_state, metrics = backend.update(
            model, params, opt_state, optim, lr, opd.cross_entropy, rollout, none, weights, 1.0
        )
        if (step + 1) % recipe.check_every == 0 or step + 1 == recipe.steps:
            right = accuracy(pair, backend, model, params, CHECK_LENGTH)
            print(
                f"{role} step {step + 1}: loss {float(metrics['loss']):.4f}, sampled accuracy"
                f" {right:.3f}, {time.time() - started:.0f} s",
                flush=True,
            )
            if right >= recipe.stop_at:
                break
    stored = {n: np.asarray(w) for n, w in params.items()}
    safetensors.numpy.save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    for length in (2, 6, 12):
        right = accuracy(pair, backend, model, params, length)
        print(f"{role} length {length}: sampled accuracy {right:.3f}", flush=True)


def _tokenizer(target: Path) -> Tokenizer:
    return Tokenizer.from_file(str(target / "tokenizer.json"))


def main(argv: list[str] | None = None) -> None:
    """Write ``pairs/<name>/``; a role as second argument trains that checkpoint alone."""
    arguments = sys.argv[1:] if argv is None else argv
    name, roles = arguments[0], arguments[1:] or ["teacher", "student"]
    folder = Path(__file__).parent / name
    tokenizer = character_tokenizer(arith.CHARACTERS)
    for role in roles:
        recipe = RECIPES[name][role]
        target = folder / role
        target.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(target / "tokenizer.json"))
        wrapper: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
        }
        wrapper |= {"pad_token": "<pad>", "clean_up_tokenization_spaces": False}
        (target / "tokenizer_config.json").write_text(json.dumps(wrapper, indent=2) + "\n")
        config = llama_config(recipe, tokenizer.get_vocab_size())
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        train(folder, role, recipe)
    (folder / "pair.json").write_text(json.dumps({"task": name}, indent=2) + "\n")


if __name__ == "__main__":
    main()

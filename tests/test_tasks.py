"""Tasks and pairs: right answers, disjoint splits, checkpoints that are what their card says."""

import json
import re

import numpy as np
import pytest

from mismatch_sim import pairs, rng, tasks, world
from mismatch_sim.config import EvalConfig, RunConfig
from mismatch_sim.errors import UserError
from mismatch_sim.evaluate import evaluate
from mismatch_sim.tasks import arith

SPLITS = ("train", "probe", "eval")


def test_answers_equal_pythons_own_arithmetic():
    for problem in arith.TASK.draw("train", 300, np.random.default_rng(0), 12):
        numbers = re.findall(r"\d|[-+*]", problem.prompt)
        value, steps = numbers[0], []
        for operation, digit in zip(numbers[1::2], numbers[2::2], strict=True):
            value = str(eval(f"({value}) {operation} {digit}") % 10)
            steps.append(value)
        assert problem.answer == "".join(steps)
        assert arith.TASK.correct(problem, problem.answer)
        assert not arith.TASK.correct(problem, problem.answer + "0")
        assert not arith.TASK.correct(problem, problem.answer[:-1])


@pytest.mark.parametrize("length", [1, 2, 6, 12])
def test_splits_are_disjoint_by_construction_and_have_their_shares(length):
    drawn = {
        split: {p.prompt for p in arith.TASK.draw(split, 500, np.random.default_rng(1), length)}
        for split in SPLITS
    }
    for split, prompts in drawn.items():
        assert all(tasks.split_of(p) == split for p in prompts)
    shares = np.array([len(p) for p in drawn.values()])
    if length == 1:
        assert shares.sum() <= 300 and abs(shares[0] / shares.sum() - 0.8) < 0.12
    sizes = {len(p) // 2 - 1 for prompts in drawn.values() for p in prompts}
    assert sizes == set(range((length + 1) // 2, length + 1))


def test_drawing_is_decided_by_its_generator_alone():
    draw = lambda seed: arith.TASK.draw("train", 50, np.random.default_rng(seed), 6)
    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("name", pairs.built_in())
def test_built_in_checkpoints_are_small_and_load_in_transformers(name):
    transformers = pytest.importorskip("transformers")
    pair = pairs.load(name)
    for folder in (pair.teacher, pair.student):
        assert sum(f.stat().st_size for f in folder.iterdir()) <= 2_000_000
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        prompts = [p.prompt for p in pair.task.longest(4)]
        ids = pair.encode(pair.task.longest(4), pair.prompt_width(4)).tokens_BP
        assert tokenizer(prompts)["input_ids"] == ids.tolist()
        assert tokenizer.eos_token_id == pair.eos_id and tokenizer.pad_token_id == pair.pad_id
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_encoding_pads_left_and_decoding_drops_special_tokens():
    pair = pairs.load("arith")
    problems = [tasks.Problem("1+2=", "3"), tasks.Problem("1+2*3=", "39")]
    prompts = pair.encode(problems, 8)
    assert prompts.mask_BP.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert (prompts.tokens_BP[prompts.mask_BP == 0] == pair.pad_id).all()
    assert pair.decode(prompts.tokens_BP, prompts.mask_BP) == ["1+2=", "1+2*3="]
    ended = np.array([[*pair.tokenizer.encode("39").ids, pair.eos_id, pair.pad_id]])
    assert pair.decode(ended, np.array([[1, 1, 1, 0]])) == ["39"]
    with pytest.raises(UserError, match="allowed: 1 to 3"):
        pair.encode(problems, 3)


@pytest.fixture(scope="module")
def arith_quality(tmp_path_factory):
    built = world.build(RunConfig(eval=EvalConfig(samples=1024, batch=512)))
    built.backend.start_compilation_cache(tmp_path_factory.mktemp("xla"))
    return built, evaluate(built, built.student)


def test_the_student_is_clearly_below_its_teacher(arith_quality):
    built, student = arith_quality
    assert 0.3 < student.sampled[0] < 0.5
    prompts = built.problems("eval", 512, "teacher")
    from mismatch_sim.types import Policy

    rollout = built.backend.generate(
        built.teacher_model,
        Policy(built.teacher),
        prompts,
        max_new_tokens=built.max_new_tokens,
        eos_id=built.pair.eos_id,
        pad_id=built.pair.pad_id,
        rng=rng.key(0),
        temperature=1.0,
    )
    texts = built.pair.decode(np.asarray(rollout.tokens_BN), np.asarray(rollout.mask_BN))
    questions = built.pair.decode(prompts.tokens_BP, prompts.mask_BP)
    right = [arith.solve(q) == t for q, t in zip(questions, texts, strict=True)]
    assert np.mean(right) > 0.99


def test_evaluation_is_what_a_plain_loop_over_batches_finds(arith_quality):
    """Accuracy and KL to the teacher, recomputed from generation and scoring alone."""
    built, quality = arith_quality
    from mismatch_sim.types import Policy

    problems = built.pair.task.draw("eval", 1024, np.random.default_rng(0), 6)
    right, kl, tokens = 0, 0.0, 0
    for number in range(2):
        batch = problems[512 * number : 512 * (number + 1)]
        prompts = built.pair.encode(batch, built.width)
        rollout = built.generate(
            Policy(built.student), prompts, rng.fold(built.key, "eval", number)
        )
        mask = np.asarray(rollout.mask_BN)
        for problem, ids, kept in zip(batch, np.asarray(rollout.tokens_BN), mask, strict=True):
            right += built.pair.tokenizer.decode(list(ids[kept > 0])) == problem.answer
        logs = []
        for z in (built.score(Policy(built.student), rollout), built.score_teacher(rollout)):
            z = np.asarray(z, np.float64)
            z = z - z.max(-1, keepdims=True)
            logs.append(z - np.log(np.exp(z).sum(-1, keepdims=True)))
        kl += ((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1) * mask).sum()
        tokens += mask.sum()
    assert quality.sampled[0] == right / 1024
    assert quality.teacher_kl[0] == pytest.approx(kl / tokens, rel=1e-4)


def test_a_pair_may_be_a_folder_and_must_be_whole(tmp_path):
    source = pairs.HERE / "arith"
    for role in ("teacher", "student"):
        (tmp_path / role).mkdir()
        for file in (source / role).iterdir():
            (tmp_path / role / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="--prompts"):
        pairs.load(str(tmp_path))
    (tmp_path / "pair.json").write_text(json.dumps({"task": "arith"}))
    assert pairs.load(str(tmp_path)).digest() == pairs.load("arith").digest()
    (tmp_path / "teacher" / "model.safetensors").write_bytes(b"other")
    assert pairs.load(str(tmp_path)).digest() != pairs.load("arith").digest()
    (tmp_path / "student" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="different tokenizer"):
        pairs.load(str(tmp_path))
    (tmp_path / "teacher" / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        pairs.load(str(tmp_path))

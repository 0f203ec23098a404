"""The loop as a whole: exact zero, exact staleness, laws of D, determinism, compilations."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_sim import loop, reference, rng, runlog, world
from mismatch_sim.config import DoseConfig, EvalConfig, NoiseConfig, OptimConfig, RunConfig
from mismatch_sim.errors import RunError
from mismatch_sim.evaluate import accuracy
from mismatch_sim.perturb import base, noise
from mismatch_sim.types import Policy

CONFIG = RunConfig(
    steps=8,
    batch=32,
    length=3,
    eval=EvalConfig(every=4, samples=64, batch=64),
    dose=DoseConfig(prompts=32, draws=2, checkpoints=3),
    checkpoint_every=3,
)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """One compilation cache for the module: programs are shared by what they compute."""
    world.get_backend("jax").start_compilation_cache(tmp_path_factory.mktemp("xla"))


def run(config, path, **more):
    """Train in ``path``; the bytes of metrics.jsonl and its lines."""
    w = world.build(config)
    code = world.provenance(w)
    with runlog.RunFolder.claim(path, config.to_json(), config.identity(code), code) as folder:
        loop.train(w, folder, **more)
    data = (Path(path) / "metrics.jsonl").read_bytes()
    return data, runlog.read_metrics(path)


def test_identity_is_exactly_zero_at_every_step_and_position(tmp_path):
    _, lines = run(CONFIG.clean(), tmp_path / "a")
    zero = ("kl_exact", "kl_exact_low", "kl_exact_high", "kl_reverse", "js", "tv", "seq_kl")
    for line in lines[:-1]:
        assert [line[f"mismatch/{tag}"] for tag in zero] == [0.0] * len(zero)
        assert set(line["mismatch/kl_by_position"]) == {0.0}
        assert line["mismatch/sampler_gap_abs"] < 1e-5  # reported, and not part of the scale
        assert line["mismatch/k1"] == pytest.approx(-line["mismatch/sampler_gap"], abs=1e-9)


@pytest.mark.parametrize("stack", ["identity()", "stale(0)", "weight_noise(0.0)|stale(0)"])
def test_inert_operators_roll_out_the_unperturbed_tokens_bit_for_bit(stack):
    w = world.build(CONFIG)
    inert = world.build(replace(CONFIG, perturb=stack))
    state, inert_state = loop.initial_state(w), loop.initial_state(inert)
    for step in range(2):
        rollouts = []
        for one, its in ((w, state), (inert, inert_state)):
            mu, _ = loop.rollout_policy(one, its.params, its.operator_state, step)
            prompts = one.problems("train", 32, "prompts", step)
            rollouts.append(one.generate(mu, prompts, rng.fold(one.key, "sample", step)))
        for a, b in zip(rollouts[0][1:], rollouts[1][1:], strict=True):
            np.testing.assert_array_equal(a, b)
        state, line, _ = loop.train_step(w, state, step)
        inert_state, inert_line, _ = loop.train_step(inert, inert_state, step)
        assert line == inert_line


def test_the_loop_rolls_out_the_weights_of_exactly_k_updates_ago():
    w = world.build(replace(CONFIG, staleness=3, measure_every=0))
    seen = []

    class Spy:
        def __getattr__(self, name):
            return getattr(w.backend, name)

        def generate(self, model, policy, *rest, **more):
            seen.append(policy.params)
            return w.backend.generate(model, policy, *rest, **more)

    spied = replace(w, backend=Spy())
    state, history = loop.initial_state(spied), []
    for step in range(7):
        history.append({n: np.array(x) for n, x in state.params.items()})
        state, _, _ = loop.train_step(spied, state, step)
    for step, used in enumerate(seen):
        expected = history[max(0, step - 3)]
        assert all((np.asarray(used[n]) == expected[n]).all() for n in expected)
    name = "model.layers.0.mlp.up_proj.weight"
    assert len({h[name].tobytes() for h in history}) == 7, "weights must move for this to mean much"


def measured(stack, draws=6, temperature=1.0):
    """D of a stack on the initial student, pooled over draws of noise and prompts."""
    config = replace(CONFIG, perturb=stack, batch=256, temperature=temperature)
    w = world.build(config)
    sums = np.zeros(2)
    for draw in range(draws):
        sums += reference.probe(w, {0: w.student}, 0, draw, 256)
    return sums[0] / sums[1]


def test_weight_noise_follows_sigma_squared():
    sigmas = np.array([0.001, 0.002, 0.004])
    doses = [measured(f"weight_noise({s})") for s in sigmas]
    slope = np.polyfit(np.log(sigmas), np.log(doses), 1)[0]
    assert abs(slope - 2) < 0.1, (slope, doses)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logit_noise_is_near_its_second_order_law(temperature):
    """D = sigma^2 (1 - sum p^2) / 2 + O(sigma^4), p the trainer's law at the task's temperature."""
    sigma = 0.05
    w = world.build(replace(CONFIG, batch=256, temperature=temperature))
    terms, tokens = 0.0, 0.0
    for draw in range(6):
        prompts = w.problems("probe", 256, "probe", 0, draw)
        rollout = w.generate(Policy(w.student), prompts, rng.fold(w.key, draw))
        logits = np.asarray(w.score(Policy(w.student), rollout), np.float64)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mask = np.asarray(rollout.mask_BN)
        terms += (sigma**2 * (1 - (p**2).sum(-1)) / 2 * mask).sum()
        tokens += mask.sum()
    assert measured(f"logit_noise({sigma})", temperature=temperature) == pytest.approx(
        terms / tokens, rel=0.08
    )


def test_same_config_same_bytes_and_another_seed_other_bytes(tmp_path):
    config = replace(CONFIG, perturb="stale(2)|fake_quant()|weight_noise(0.01)|logit_noise(0.1)")
    first, lines = run(config, tmp_path / "a")
    second, _ = run(config, tmp_path / "b")
    other, _ = run(replace(config, seed=1), tmp_path / "c")
    assert first == second != other
    assert len(lines) == config.steps + 1
    assert [m["step"] for m in lines if "quality/sampled_accuracy" in m] == [0, 4, 8]


def test_stopped_anywhere_and_resumed_gives_the_same_bytes(tmp_path):
    config = replace(
        CONFIG, perturb="stale(2)|weight_noise(0.02, resample='never')|logit_noise(0.1)"
    )
    whole, _ = run(config, tmp_path / "whole")
    for stop in (0, 2, 5, 7):

        def die(step, line, stop=stop):
            if step == stop:
                raise ZeroDivisionError  # like a kill: no handler of ours runs

        path = tmp_path / f"stop{stop}"
        with pytest.raises(ZeroDivisionError):
            run(config, path, report=die)
        assert run(config, path)[0] == whole


def test_a_run_with_another_seed_and_strength_compiles_nothing(tmp_path, compilations):
    config = replace(CONFIG, staleness=2, noise=NoiseConfig(sigma=0.01, logit_sigma=0.1))
    run(config, tmp_path / "a")
    changed = replace(
        config,
        seed=7,
        temperature=0.8,
        noise=NoiseConfig(sigma=0.03, logit_sigma=0.2),
        optim=OptimConfig(lr=2e-3, warmup=2),
    )
    with compilations() as count:
        run(changed, tmp_path / "b")
    assert count() == 0


def test_settings_outside_the_hash_change_no_byte(tmp_path):
    """The other half of "equal hash, equal bytes": what the hash leaves out must not matter."""
    config = replace(CONFIG, perturb="stale(2)|weight_noise(0.02)", out=tmp_path / "a")
    data, _ = run(config, tmp_path / "a")
    code = world.provenance(world.build(config))
    for number, change in enumerate(
        (
            {"checkpoint_every": 1},
            {"dose": DoseConfig(draws=3, checkpoints=2)},
            {"clean_dir": tmp_path / "elsewhere", "json": True},
            {"perturb": "", "staleness": 2, "noise": NoiseConfig(sigma=0.02)},
        )
    ):
        changed = replace(config, **change)
        assert changed.identity(code) == config.identity(code), change
        assert run(changed, tmp_path / str(number))[0] == data, change


@pytest.mark.slow
def test_settings_inside_the_hash_are_those_that_change_bytes(tmp_path):
    """20 single changes: each changes the hash, and the bytes."""
    config = replace(CONFIG, perturb="stale(1)|weight_noise(0.02)", steps=3)
    optim, evaluation = config.optim, config.eval
    changes = [
        *({"seed": 1}, {"batch": 31}, {"length": 2}, {"steps": 4}, {"temperature": 0.9}),
        *({"objective": "sampled_reverse_kl"}, {"measure_every": 2}),
        *({"perturb": p} for p in ("identity()", "stale(1)|weight_noise(0.021)", "stale(2)")),
        *({"perturb": p} for p in ("weight_noise(0.02)|stale(1)", "stale(1)|logit_noise(0.02)")),
        {"perturb": "stale(1)|weight_noise(0.02, resample='never')"},
        *({"optim": replace(optim, **o)} for o in ({"lr": 2e-3}, {"warmup": 1}, {"clip": 0.1})),
        *({"optim": replace(optim, **o)} for o in ({"weight_decay": 0.1}, {"beta2": 0.9})),
        *({"eval": replace(evaluation, **e)} for e in ({"every": 1}, {"samples": 32})),
    ]
    assert len(changes) == 20
    code = world.provenance(world.build(config))
    hashes = {replace(config, **c).identity(code) for c in changes} | {config.identity(code)}
    assert len(hashes) == 21
    data = {run(config, tmp_path / "base")[0]}
    for number, change in enumerate(changes):
        data.add(run(replace(config, **change), tmp_path / str(number))[0])
    assert len(data) == 21


def test_the_second_whole_command_in_a_process_compiles_nothing(tmp_path, compilations):
    """Clean reference, run, evaluation and dose: everything, with other seed and strengths."""
    from mismatch_sim.run import execute

    config = replace(CONFIG, json=True, clean_dir=tmp_path / "clean", staleness=1)
    config = replace(config, noise=NoiseConfig(sigma=0.01, logit_sigma=0.1))
    execute(world.build(config), tmp_path / "a")
    other = replace(config, seed=5, staleness=2, noise=NoiseConfig(sigma=0.05, logit_sigma=0.3))
    with compilations() as count:
        execute(world.build(other), tmp_path / "b")
    assert count() == 0


def test_measuring_less_changes_no_update(tmp_path):
    config = replace(CONFIG, staleness=1)
    _, always = run(config, tmp_path / "a")
    _, never = run(replace(config, measure_every=0), tmp_path / "b")
    _, some = run(replace(config, measure_every=3), tmp_path / "c")
    for a, b, c in zip(always, never, some, strict=True):
        assert a.get("optim/loss") == b.get("optim/loss") == c.get("optim/loss")
    assert [m["step"] for m in some if "mismatch/kl_exact" in m] == [0, 3, 6]
    assert not any("mismatch/kl_exact" in m for m in never)


@pytest.mark.parametrize("objective", ["reverse_kl", "sampled_reverse_kl"])
def test_each_objective_brings_the_student_closer_to_its_teacher(tmp_path, objective):
    config = replace(CONFIG, objective=objective, steps=30, batch=64, eval=EvalConfig(every=0))
    _, lines = run(config, tmp_path / "a")
    assert lines[-1]["quality/teacher_kl_high"] < lines[0]["quality/teacher_kl_low"]


# --- faults -------------------------------------------------------------------------------------


def test_an_exploding_update_stops_with_one_line_and_keeps_the_last_good_state(tmp_path):
    config = replace(CONFIG, staleness=1, optim=OptimConfig(lr=1e30, warmup=0))
    with pytest.raises(RunError) as error:
        run(config, tmp_path / "a")
    text = str(error.value)
    assert "\n" not in text and "stale(k=1)" in text and "step" in text
    w = world.build(config)
    code = world.provenance(w)
    path = tmp_path / "a"
    with runlog.RunFolder.claim(path, config.to_json(), config.identity(code), code) as folder:
        _, step = folder.restore(loop.initial_state(w))
    assert len(runlog.read_metrics(path)) == step
    assert step < 8


def test_nan_is_seen_where_nothing_is_measured_and_before_the_state_is_kept():
    def publish(key, step, params, state):
        return {n: x * float("nan") for n, x in params.items()}, state

    w = world.build(replace(CONFIG, measure_every=0))
    w = replace(w, operator=base.chain(base.Perturbation("broken", publish=publish)))
    with pytest.raises(RunError, match=r"step 0: phase publish, operator broken,"):
        loop.train_step(w, loop.initial_state(w), 0)
    w = world.build(CONFIG)

    class Spoiled:
        def __getattr__(self, name):
            return getattr(w.backend, name)

        def update(self, *arguments):
            params, *rest = w.backend.update(*arguments)
            return ({n: x * float("nan") for n, x in params.items()}, *rest)

    with pytest.raises(RunError, match=r"updated weights is nan at step 0: phase update"):
        loop.train_step(replace(w, backend=Spoiled()), loop.initial_state(w), 0)


def test_a_broken_operator_is_named_with_phase_and_step(tmp_path):
    def publish(key, step, params, state):
        bad = {n: x * (float("nan") if step == 2 else 1.0) for n, x in params.items()}
        return bad, state

    w = world.build(replace(CONFIG, staleness=1))
    broken = base.chain(w.operator, base.Perturbation("broken", publish=publish))
    w = replace(w, operator=broken)
    state = loop.initial_state(w)
    for step in range(2):
        state, _, _ = loop.train_step(w, state, step)
    with pytest.raises(RunError, match=r"step 2: phase publish, operator broken,"):
        loop.train_step(w, state, 2)


# --- dose and quality ---------------------------------------------------------------------------


def test_dose_is_the_token_weighted_mean_of_its_definition(tmp_path):
    """Brute force from the definition: stale(2) needs no operator code, only the saved weights."""
    config = replace(CONFIG, staleness=2, clean_dir=tmp_path)
    w = world.build(config)
    clean = reference.ensure_clean_run(w)
    value, low, high = reference.dose(w, clean)
    rows = [[0, 3, 6], [2, 4, 7]]  # 8 steps x (i + 1/4) / 3 and (i + 3/4) / 3, rounded down
    kl, tokens = np.zeros(2), np.zeros(2)
    for j, steps in enumerate(rows):
        for t in steps:
            then, now = (reference._load(w, clean, s) for s in (max(0, t - 2), t))
            prompts = w.problems("probe", 32, "probe", t, j)
            key = rng.fold(w.key, "dose", j, "sample", t)
            rollout = w.generate(Policy(then), prompts, key)
            mask = np.asarray(rollout.mask_BN)
            logs = []
            for params in (then, now):
                z = np.asarray(w.score(Policy(params), rollout), np.float64)
                z -= z.max(-1, keepdims=True)
                logs.append(z - np.log(np.exp(z).sum(-1, keepdims=True)))
            kl[j] += ((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1) * mask).sum()
            tokens[j] += mask.sum()
    assert value == pytest.approx(kl.sum() / tokens.sum(), rel=1e-4)
    from scipy import stats as scipy_stats

    logs = np.log(kl / tokens)
    half = scipy_stats.t.ppf(0.975, 1) * logs.std(ddof=1) / np.sqrt(2)
    assert low == pytest.approx(np.exp(logs.mean() - half), rel=1e-3)
    assert high == pytest.approx(np.exp(logs.mean() + half), rel=1e-3)


def test_the_dose_does_not_depend_on_how_finely_it_is_sampled(tmp_path):
    """A grid shared by all draws would step over the few steps at which the policy moves."""
    evaluation = EvalConfig(every=0, samples=16, batch=16)
    config = replace(CONFIG, steps=60, batch=64, staleness=4, eval=evaluation, measure_every=0)
    config = replace(config, clean_dir=tmp_path)
    doses = []
    for checkpoints in (3, 15):
        sampled = replace(config, dose=DoseConfig(prompts=64, draws=4, checkpoints=checkpoints))
        w = world.build(sampled)
        doses.append(reference.dose(w, reference.ensure_clean_run(w)))
    (coarse, low, high), (fine, _, _) = doses
    assert low < fine < high
    assert abs(np.log(coarse / fine)) < 0.35


def test_the_clean_run_is_found_again_and_widened_when_more_staleness_is_asked(tmp_path):
    config = replace(CONFIG, steps=60, staleness=1, clean_dir=tmp_path, measure_every=0)
    config = replace(config, dose=DoseConfig(checkpoints=1, draws=2))  # probes at 15 and 45
    steps = []
    report = lambda step, line: steps.append(step)
    clean = reference.ensure_clean_run(world.build(config), report)
    assert len(steps) == 61
    before = (clean / "metrics.jsonl").read_bytes()
    for same in (replace(config, noise=NoiseConfig(sigma=0.1)), replace(config, staleness=8)):
        assert reference.ensure_clean_run(world.build(same), report) == clean
    assert len(steps) == 61, "found, not run again"
    assert reference.ensure_clean_run(world.build(replace(config, staleness=10)), report) == clean
    assert len(steps) == 122, "wider windows need the run again"
    assert (clean / "metrics.jsonl").read_bytes() == before
    other = reference.ensure_clean_run(world.build(replace(config, seed=1)), report)
    assert other != clean


def test_a_draw_kept_for_the_run_is_the_draw_the_dose_measures():
    """resample="never": every probe sees the noise of the run's first publication."""
    op = base.chain(noise.weight_noise(0.05, resample="never"))
    w = replace(world.build(CONFIG), operator=op)
    own = rng.fold(w.key, "publish")
    lived, _ = base.publish(op, own, 0, w.student, op.init(w.student))
    seen = []
    spied = replace(w, backend=_recording(w.backend, seen))
    for draw in range(2):
        reference.probe(spied, {0: w.student}, 0, draw, 8)
    for used in seen:
        for n in lived:
            np.testing.assert_array_equal(used[n], lived[n])
    fresh = base.chain(noise.weight_noise(0.05))
    seen.clear()
    for draw in range(2):
        reference.probe(replace(spied, operator=fresh), {0: w.student}, 0, draw, 8)
    name = "model.embed_tokens.weight"
    assert (np.asarray(seen[0][name]) != np.asarray(seen[1][name])).all()


def _recording(backend, seen):
    class Spy:
        def __getattr__(self, name):
            return getattr(backend, name)

        def generate(self, model, policy, *rest, **more):
            seen.append(policy.params)
            return backend.generate(model, policy, *rest, **more)

    return Spy()


def test_accuracy_counts_each_prompt_once():
    hits = np.array([True] * 30 + [False] * 10)
    value, low, high = accuracy(hits, np.arange(40))
    assert value == 0.75 and low == pytest.approx(0.598, abs=2e-3) and high < 0.87
    _, low_clustered, high_clustered = accuracy(hits, np.arange(40) // 4)
    assert low_clustered < low and high_clustered > high


def test_probed_steps_are_even_within_a_draw_and_different_between_draws():
    rows = reference.probed_steps(100, 8, 8)
    assert all(len(row) == 8 and row[0] >= 0 and row[-1] < 100 for row in rows)
    assert all(11 <= b - a <= 14 for row in rows for a, b in itertools.pairwise(row))
    assert len({t for row in rows for t in row}) == 64
    assert reference.probed_steps(1, 8, 2) == [[0], [0]]


def test_config_json_runs_again_as_it_is(tmp_path):
    config = replace(CONFIG, staleness=1, steps=3)
    data, _ = run(config, tmp_path / "a")
    again = RunConfig.from_json(json.loads((tmp_path / "a" / "config.json").read_text()))
    assert run(again, tmp_path / "b")[0] == data

"""Laws of the operators: identity, composition, keys, staleness, noise, quantisation."""

import hashlib

import numpy as np
import pytest

from mismatch_sim import rng, schedules
from mismatch_sim.perturb import base, noise, quant, stale
from mismatch_sim.types import Hooks
from tests.conftest import Framework

KEY = rng.key(11)


def weights(seed=0):
    numbers = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (7, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
        "model.norm.weight": (4,),
    }
    return {n: (numbers.normal(size=s) * 3).astype(np.float32) for n, s in shapes.items()}


def run(op, xp, params, steps=1, key=KEY):
    """Publish ``steps`` times; the last published weights as NumPy, and the state."""
    arrays = {n: xp.array(w) for n, w in params.items()}
    state = op.init(arrays)
    for step in range(steps):
        published, state = base.publish(op, key, step, arrays, state)
    return {n: np.asarray(w) for n, w in published.items()}, state


EAGER = ("numpy", "torch", "jax")


@pytest.fixture(params=EAGER)
def fw(request):
    return Framework(request.param)


# --- identity and chain -------------------------------------------------------------------------


def test_identity_has_no_hooks_and_returns_the_very_same_weights():
    params = weights()
    published, _ = base.publish(base.identity(), KEY, 0, params, ())
    assert published is params
    assert base.identity().hooks() == Hooks()
    assert base.chain().hooks() == base.chain(base.identity()).hooks() == Hooks()
    assert base.chain(base.identity()).publish is None


def operators():
    return [stale.stale(2), quant.fake_quant(), noise.weight_noise(0.1), noise.logit_noise(0.3)]


def test_a_chain_applies_its_members_in_order(fw):
    params = weights()
    chained, _ = run(base.chain(quant.fake_quant(), noise.weight_noise(0.1)), fw, params)
    quantised, _ = run(quant.fake_quant(), fw, params)
    key = rng.fold(KEY, "weight_noise", 0)
    by_hand, _ = run(noise.weight_noise(0.1), fw, quantised, key=key)
    for name in params:
        np.testing.assert_array_equal(chained[name], by_hand[name])


def test_chains_nest_to_the_bit_and_adding_an_operator_moves_no_noise():
    params = weights()
    a, b, c, d = operators()
    flat = base.chain(a, b, c, d)
    nested = base.chain(base.chain(a, b), base.identity(), base.chain(c, base.chain(d)))
    assert flat.hooks() == nested.hooks(), "hooks are interned, so equal structure is equal code"
    xp = _numpy()
    for name, w in run(flat, xp, params, 4)[0].items():
        np.testing.assert_array_equal(w, run(nested, xp, params, 4)[0][name])
    alone, _ = run(base.chain(noise.weight_noise(0.1)), xp, params)
    with_more, _ = run(base.chain(stale.stale(1), noise.weight_noise(0.1)), xp, params)
    for name in params:
        np.testing.assert_array_equal(alone[name], with_more[name])
    twice = base.chain(noise.weight_noise(0.1), noise.weight_noise(0.1))
    first, _ = run(base.chain(noise.weight_noise(0.1)), xp, params)
    both, _ = run(twice, xp, params)
    name = "model.embed_tokens.weight"
    ratio = (both[name] - first[name]) / (first[name] - params[name])
    assert ratio.std() > 0.1, "two occurrences of one operator must draw different noise"


def test_equal_structure_shares_hooks_whatever_the_strength():
    strong, weak = noise.weight_noise(0.5), noise.weight_noise(0.1)
    assert strong.publish is weak.publish
    assert noise.weight_noise(0.1, relative=False).publish is not weak.publish
    logit = base.chain(noise.logit_noise(1.0)).hooks()
    assert logit == base.chain(noise.logit_noise(2.0)).hooks()


def test_chain_of_logit_hooks_threads_each_members_state():
    op = base.chain(noise.logit_noise(0.3), stale.stale(1), noise.logit_noise(0.4))
    _, state = run(op, _numpy(), weights())
    logits, rows, at = np.zeros((3, 9), np.float32), np.arange(3), np.zeros(3, int)
    expected = logits
    for occurrence, sigma in enumerate((0.3, 0.4)):
        keys = rng.fold(rng.fold(KEY, "logit_noise", occurrence), rows, at)
        expected = expected + np.float32(sigma) * rng.normal(keys, 9)
    np.testing.assert_allclose(op.on_logits(KEY, logits, state, rows, at), expected, rtol=1e-6)


def test_chains_of_linear_and_kv_hooks_compose():
    double = base.Perturbation("double", on_linear_input=lambda r, n, x, m, s: x * 2)
    add = base.Perturbation("add", on_linear_input=lambda r, n, x, m, s: x + 1)
    swap = base.Perturbation("swap", on_kv=lambda r, layer, k, v, m, s: (v, k))
    op = base.chain(double, swap, add)
    state = op.init(weights())
    assert op.on_linear_input(KEY, "n", np.ones(2), None, state).tolist() == [3, 3]
    assert op.on_kv(KEY, 0, 1, 2, None, state) == (2, 1)
    assert op.publish is None and op.on_logits is None


# --- selection ----------------------------------------------------------------------------------


def test_masked_touches_what_matches_with_the_noise_it_would_draw_unmasked(fw):
    params = weights()
    whole, _ = run(noise.weight_noise(0.1), fw, params)
    some, _ = run(base.masked(noise.weight_noise(0.1), include="mlp"), fw, params)
    changed = {n for n in params if (some[n] != params[n]).any()}
    assert changed == {"model.layers.0.mlp.up_proj.weight"}
    for name in changed:
        np.testing.assert_array_equal(some[name], whole[name])


@pytest.mark.parametrize(
    "op",
    [
        base.masked(noise.weight_noise(0.1), include="mpl"),
        base.masked(noise.weight_noise(0.1), exclude="nothing"),
        base.masked(noise.weight_noise(0.1), include="norm"),
        noise.weight_noise(0.1, include="mpl"),
        noise.weight_noise(0.1, include="mlp", exclude="mlp"),
        base.masked(quant.fake_quant(), include="embed"),
    ],
)
def test_a_pattern_that_selects_nothing_is_an_error(op):
    with pytest.raises(ValueError, match=r"matches no parameter|drops every parameter"):
        op.init(weights())


def test_weight_noise_leaves_vectors_alone_unless_a_pattern_says_so():
    params = weights()
    noisy, _ = run(noise.weight_noise(0.1), _numpy(), params)
    assert (noisy["model.norm.weight"] == params["model.norm.weight"]).all()
    assert all((noisy[n] != params[n]).all() for n in params if params[n].ndim == 2)
    named, _ = run(noise.weight_noise(0.1, include="norm"), _numpy(), params)
    assert (named["model.norm.weight"] != params["model.norm.weight"]).all()


# --- staleness ----------------------------------------------------------------------------------


def fingerprint(params):
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(np.ascontiguousarray(params[name]).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_rollouts_see_exactly_the_weights_of_k_updates_ago(fw, k):
    """Live weights change in place where the framework lets them: a ring of references fails."""
    live = {n: fw.array(w) for n, w in weights().items()}
    op = stale.stale(k)
    state, history = op.init(live), []
    for step in range(12):
        history.append(fingerprint(live))
        seen, state = op.publish(KEY, step, live, state)
        assert fingerprint(seen) == history[max(0, step - k)]
        for name in live:
            if fw.name == "jax":
                live[name] = live[name] + 0.5
            else:
                live[name] += 0.5
    assert len(set(history)) == 12


def test_a_ring_goes_on_from_a_saved_state():
    live = {"w": np.zeros((1, 1))}
    op = stale.stale(2)
    state = op.init(live)
    for step in range(5):
        _, state = op.publish(KEY, step, {"w": np.full((1, 1), step)}, state)
    seen, _ = op.publish(KEY, 5, {"w": np.full((1, 1), 5.0)}, state)
    again, _ = op.publish(KEY, 5, {"w": np.full((1, 1), 5.0)}, state)
    assert seen["w"].item() == again["w"].item() == 3
    _, state = op.publish(KEY, 4, {"w": np.full((1, 1), 44.0)}, state)  # same step: replaced
    _, state = op.publish(KEY, 5, {"w": np.full((1, 1), 5.0)}, state)
    seen, _ = op.publish(KEY, 6, {"w": np.full((1, 1), 6.0)}, state)
    assert seen["w"].item() == 44


@pytest.mark.parametrize("k", [-1, 1.5, True, "4"])
def test_a_lag_that_is_no_lag_is_refused(k):
    with pytest.raises(ValueError, match="k must be an integer >= 0"):
        stale.stale(k)


# --- noise --------------------------------------------------------------------------------------


def test_weight_noise_has_the_law_it_says(fw):
    params = {"w": np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32) * 7}
    rms = np.sqrt((params["w"].astype(np.float64) ** 2).mean())
    for relative, scale in ((True, rms), (False, 1.0)):
        noisy, _ = run(noise.weight_noise(0.01, relative=relative), fw, params)
        z = (noisy["w"].astype(np.float64) - params["w"]) / (0.01 * scale)
        assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01
        assert abs((z**4).mean() - 3) < 0.1


def test_frameworks_draw_the_same_noise(fw):
    params = weights()
    ours, _ = run(noise.weight_noise(0.1), fw, params, 3)
    numpy, _ = run(noise.weight_noise(0.1), _numpy(), params, 3)
    for name in params:
        np.testing.assert_allclose(ours[name], numpy[name], rtol=1e-5, atol=1e-6)


def test_resample_says_when_noise_is_drawn_anew(fw):
    params, other = weights(0), weights(1)
    name = "model.embed_tokens.weight"

    def draws(resample):
        """Noise at (step 0, weights 0), (step 1, weights 0), (step 2, weights 1), other key."""
        op = noise.weight_noise(0.1, relative=False, resample=resample)
        out, state = [], op.init({n: fw.array(w) for n, w in params.items()})
        for step, w, key in ((0, params, KEY), (1, params, KEY), (2, other, KEY), (2, other, None)):
            key = rng.key(99) if key is None else key
            noisy, state = op.publish(key, step, {n: fw.array(x) for n, x in w.items()}, state)
            out.append(np.round((np.asarray(noisy[name]) - w[name]) / 0.1, 3))
        return out

    a, b, c, d = draws("rollout")
    assert not np.allclose(a, b) and not np.allclose(b, c) and not np.allclose(c, d)
    a, b, c, d = draws("version")
    np.testing.assert_allclose(a, b, atol=2e-3)
    assert not np.allclose(b, c) and not np.allclose(c, d)
    a, b, c, d = draws("never")
    for later in (b, c, d):
        np.testing.assert_allclose(a, later, atol=2e-2)


def test_strength_follows_its_schedule_and_keeps_its_last_value(fw):
    params = {"w": np.ones((40, 50), np.float32)}
    op = noise.weight_noise(schedules.linear(0.0, 0.3, 3), relative=False)
    state = op.init({"w": fw.array(params["w"])})
    for step, sigma in enumerate((0.0, 0.1, 0.2, 0.3, 0.3, 0.3)):
        noisy, state = op.publish(KEY, step, {"w": fw.array(params["w"])}, state)
        assert abs((np.asarray(noisy["w"]) - 1).std() - sigma) < 0.02 * sigma + 1e-9


def test_logit_noise_is_keyed_by_row_and_position_for_the_full_vocabulary(fw):
    op = noise.logit_noise(0.5)
    _, state = run(op, fw, weights())
    rows, at = np.array([0, 1, 2]), np.array([4, 4, 4])
    zeros = fw.array(np.zeros((3, 8), np.float32))
    drawn = np.asarray(op.on_logits(KEY, zeros, state, fw.array(rows), fw.array(at)))
    shuffled = np.asarray(
        op.on_logits(KEY, zeros, state, fw.array(rows[::-1].copy()), fw.array(at))
    )
    np.testing.assert_array_equal(drawn, shuffled[::-1])
    grid = fw.array(np.zeros((3, 6, 8), np.float32))
    scored = op.on_logits(
        KEY, grid, state, fw.array(rows[:, None]), fw.array(np.arange(6)[None, :])
    )
    np.testing.assert_array_equal(np.asarray(scored)[:, 4], drawn)


def test_strength_zero_changes_no_bit(fw):
    params = weights()
    noisy, _ = run(noise.weight_noise(0.0), fw, params)
    for name in params:
        np.testing.assert_array_equal(noisy[name], params[name])


def test_a_new_strength_step_or_seed_compiles_nothing(compilations):
    fw = _framework("jax")
    odd = {n: w[:, :3] if w.ndim == 2 else w for n, w in weights().items()}
    with compilations() as count:
        run(noise.weight_noise(0.1), fw, odd)
    assert count() > 0, "the counter must see a compilation when there is one"
    run(noise.weight_noise(0.1), fw, weights(), 2)
    with compilations() as count:
        run(noise.weight_noise(0.2), fw, weights(), 3, key=rng.key(5))
    assert count() == 0


# --- fake quantisation --------------------------------------------------------------------------


def int8_oracle(w):
    """Row by row, element by element, in the order the docstring states, float32 operations."""
    out = np.empty_like(w)
    for i, row in enumerate(w):
        scale = np.float32(np.abs(row).max() * np.float32(1 / 127))
        for j, x in enumerate(row):
            code = np.float32(0) if scale == 0 else np.clip(np.rint(x / scale), -127, 127)
            out[i, j] = np.float32(code) * scale
    return out


def test_int8_equals_the_naive_loop_bit_for_bit(xp):
    numbers = np.random.default_rng(0)
    w = (numbers.normal(size=(40, 64)) * np.exp(numbers.normal(size=(40, 1)) * 5)).astype(
        np.float32
    )
    w[3] = 0.0
    np.testing.assert_array_equal(xp.call(quant.int8_per_channel, w), int8_oracle(w))


def test_int8_touches_block_linears_only_and_has_at_most_255_levels_a_row():
    params = weights()
    quantised, _ = run(quant.fake_quant("int8"), _numpy(), params)
    changed = {n for n in params if (quantised[n] != params[n]).any()}
    assert changed == {n for n in params if n.endswith("_proj.weight")}
    for name in changed:
        error = np.abs(quantised[name] - params[name])
        step = np.abs(params[name]).max(axis=1, keepdims=True) / 127
        assert (error <= step * 0.5001).all()


def test_an_unknown_scheme_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'int9'.*'int8'"):
        quant.fake_quant("int9")


def _numpy():
    return _framework("numpy")


def _framework(name):
    return Framework(name)

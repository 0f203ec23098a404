"""The JAX backend against transformers' Llama, against itself without a cache, and its faults."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mismatch_sim import objectives, rng
from mismatch_sim.backends import jax_backend as backend
from mismatch_sim.backends.jax_model import Model
from mismatch_sim.config import OptimConfig
from mismatch_sim.errors import UserError
from mismatch_sim.pairs.train import initial_params
from mismatch_sim.types import Hooks, Policy, Prompts, Rollout

SMALL = Model(
    family="llama",
    vocab_size=23,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=500.0,
    norm_eps=1e-5,
    tied=False,
)
VARIANTS = {
    "gqa": SMALL,
    "tied": replace(SMALL, tied=True),
    "mha": replace(SMALL, num_kv_heads=4),
    "bias": replace(SMALL, attention_bias=True),
    "wide_heads": replace(SMALL, head_dim=16),
}
EOS, PAD = 1, 0


def params_of(model, seed=0, spread=1.0):
    params = initial_params(model.shapes(), seed)
    numbers = np.random.default_rng(seed)
    return {
        n: (w * spread if w.ndim > 1 else w + 0.2 * numbers.normal(size=w.shape)).astype(np.float32)
        for n, w in params.items()
    }


def prompts_of(batch=5, width=7, seed=0):
    numbers = np.random.default_rng(seed)
    lengths = np.array([(1 + i * 3) % width + 1 for i in range(batch)])
    mask = (np.arange(width)[None] >= width - lengths[:, None]).astype(np.int32)
    return Prompts((numbers.integers(2, 23, (batch, width)) * mask).astype(np.int32), mask)


def policy_of(model, seed=0, **hooks):
    return Policy(backend.from_numpy(params_of(model, seed, 2.0)), Hooks(**hooks), (), rng.key(9))


def generate(model, policy, prompts, count=6, key=3, **more):
    settings = {"max_new_tokens": count, "eos_id": EOS, "pad_id": PAD, "temperature": 0.9} | more
    return backend.generate(model, policy, prompts, rng=rng.key(key), **settings)


def write_folder(folder, model, params, **config):
    folder.mkdir(exist_ok=True)
    raw = {
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "attention_bias": model.attention_bias,
    }
    (folder / "config.json").write_text(json.dumps(raw | config))
    safetensors.numpy.save_file(params, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- parity with transformers -------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS)
def both(request, tmp_path_factory):
    """One checkpoint on disk, loaded by the backend and by transformers."""
    transformers = pytest.importorskip("transformers")
    model = VARIANTS[request.param]
    folder = write_folder(tmp_path_factory.mktemp("hf") / "m", model, params_of(model))
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loaded, params = backend.load(folder)
    assert loaded == model
    return model, params, hf


def hf_logits(hf, rollout):
    """Logits on the response positions from transformers, each row alone and without padding."""
    import torch

    rows = []
    count = rollout.tokens_BN.shape[1]
    for prompt, mask, tokens in zip(*rollout.prompts, rollout.tokens_BN, strict=True):
        ids = torch.tensor(np.concatenate([prompt[mask > 0], tokens])[None].astype(np.int64))
        rows.append(hf(ids).logits[0, -count - 1 : -1])
    return torch.stack(rows)


def full_rollout(model, batch=5, count=6):
    numbers = np.random.default_rng(4)
    tokens = numbers.integers(2, model.vocab_size, (batch, count)).astype(np.int32)
    return Rollout(
        prompts_of(batch), tokens, np.ones_like(tokens), np.zeros(tokens.shape, np.float32)
    )


def test_logits_match_transformers_with_left_padding(both):
    model, params, hf = both
    rollout = full_rollout(model)
    ours = np.asarray(backend.logits(model, Policy(params), rollout, 1.0))
    np.testing.assert_allclose(ours, hf_logits(hf, rollout).detach().numpy(), atol=1e-4, rtol=1e-4)


def test_gradients_match_transformers(both):
    model, params, hf = both
    rollout = full_rollout(model)
    teacher = np.random.default_rng(5).normal(size=(5, 6, model.vocab_size)).astype(np.float32)
    weights = np.ones(rollout.mask_BN.shape, np.float32)
    loss = objectives.get("reverse_kl")

    def ours(p):
        arrays = backend.from_numpy(rollout)
        logits = backend._response_logits(model, Hooks(), p, (), None, arrays, 1.0)
        return loss(logits, jnp.asarray(teacher), arrays, jnp.asarray(weights))[0]

    grads = jax.grad(ours)(params)
    import torch

    as_torch = rollout._replace(
        tokens_BN=torch.tensor(rollout.tokens_BN).long(), mask_BN=torch.tensor(rollout.mask_BN)
    )
    hf.zero_grad()
    loss(hf_logits(hf, rollout), torch.tensor(teacher), as_torch, torch.tensor(weights))[
        0
    ].backward()
    for name, parameter in hf.named_parameters():
        expected = parameter.grad.numpy()
        scale = np.abs(expected).max()
        np.testing.assert_allclose(grads[name] / scale, expected / scale, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_three_adamw_updates_match_torch_on_the_same_gradients(decay, clip):
    torch = pytest.importorskip("torch")
    optim = OptimConfig(weight_decay=decay, clip=clip)
    params = {"w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
    live = {n: torch.nn.Parameter(torch.tensor(w)) for n, w in params.items()}
    groups = [
        {"params": [live["w"]], "weight_decay": decay},
        {"params": [live["b"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    ours, state = backend.from_numpy(params), backend.init_optimizer(params, optim)
    numbers = np.random.default_rng(0)
    for _ in range(3):
        grads = {n: numbers.normal(size=w.shape).astype(np.float32) for n, w in params.items()}
        direction, state = backend._optimizer(optim.static()).update(grads, state, ours)
        ours = {n: w - 0.01 * direction[n] for n, w in ours.items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        shrink = min(1.0, clip / norm) if clip else 1.0
        for n in live:
            live[n].grad = torch.tensor(grads[n] * shrink)
        reference.step()
    for n in live:
        np.testing.assert_allclose(ours[n], live[n].detach().numpy(), rtol=1e-6, atol=1e-6)


# --- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_cached_generation_records_what_the_scorer_computes(name):
    model = VARIANTS[name]
    policy, prompts = policy_of(model), prompts_of()
    rollout = generate(model, policy, prompts)
    logits = backend.logits(model, policy, rollout, 0.9)
    scored = jnp.take_along_axis(jax.nn.log_softmax(logits), rollout.tokens_BN[..., None], axis=-1)[
        ..., 0
    ]
    mask = np.asarray(rollout.mask_BN) > 0
    np.testing.assert_allclose(
        np.asarray(rollout.logprobs_BN)[mask], np.asarray(scored)[mask], atol=2e-5
    )


def test_generation_equals_a_loop_without_cache_token_by_token():
    policy, prompts = policy_of(SMALL), prompts_of()
    rollout = generate(SMALL, policy, prompts)
    rows = np.arange(5)
    tokens = np.full((5, 6), PAD, np.int32)
    mask = np.zeros((5, 6), np.int32)
    alive = np.ones(5, bool)
    for t in range(6):
        so_far = Rollout(prompts, tokens.copy(), mask.copy(), np.zeros((5, 6), np.float32))
        logits = np.asarray(backend.logits(SMALL, policy, so_far, 0.9))[:, t]
        noise = rng.gumbel(rng.fold(rng.fold(rng.key(3), rows), np.full(5, t)), 23)
        choice = (logits + noise).argmax(-1)
        tokens[:, t] = np.where(alive, choice, PAD)
        mask[:, t] = alive
        alive &= choice != EOS
    np.testing.assert_array_equal(rollout.tokens_BN, tokens)
    np.testing.assert_array_equal(rollout.mask_BN, mask)


def test_a_row_does_not_depend_on_padding_or_on_its_neighbours():
    policy, prompts = policy_of(SMALL), prompts_of()
    whole = generate(SMALL, policy, prompts)
    wider = Prompts(*(np.pad(x, ((0, 0), (4, 0))) for x in prompts))
    np.testing.assert_array_equal(whole.tokens_BN, generate(SMALL, policy, wider).tokens_BN)
    others = Prompts(np.where(np.arange(5)[:, None] < 2, prompts.tokens_BP, 2), prompts.mask_BP)
    np.testing.assert_array_equal(
        np.asarray(whole.tokens_BN)[:2], np.asarray(generate(SMALL, policy, others).tokens_BN)[:2]
    )


def test_rows_stop_at_their_eos_and_the_mask_includes_it():
    rollout = generate(SMALL, policy_of(SMALL), prompts_of(64), count=12)
    tokens, mask = np.asarray(rollout.tokens_BN), np.asarray(rollout.mask_BN)
    lengths = set()
    for row, kept in zip(tokens, mask, strict=True):
        ends = np.flatnonzero(row == EOS)
        length = ends[0] + 1 if len(ends) else 12
        assert kept.tolist() == [1] * length + [0] * (12 - length)
        assert (row[length:] == PAD).all()
        lengths.add(length)
    assert len(lengths) > 3, "the test needs responses of several lengths"


def test_greedy_takes_the_likeliest_token_and_shares_the_program():
    policy, prompts = policy_of(SMALL), prompts_of()
    generate(SMALL, policy, prompts)
    compiled = backend._generate._cache_size()
    greedy = generate(SMALL, policy, prompts, greedy=True)
    assert backend._generate._cache_size() == compiled
    best = np.asarray(backend.logits(SMALL, policy, greedy, 0.9)).argmax(-1)
    mask = np.asarray(greedy.mask_BN) > 0
    np.testing.assert_array_equal(np.asarray(greedy.tokens_BN)[mask], best[mask])


# --- hooks --------------------------------------------------------------------------------------


def halve_input(key, name, x, mask, state):
    return x * 0.5 if name.endswith("down_proj") else x


def keep_kv(key, layer, k, v, mask, state):
    return k * 1.5, v


@pytest.mark.parametrize("hooks", [{"on_linear_input": halve_input}, {"on_kv": keep_kv}])
def test_weight_side_hooks_act_alike_in_generation_and_scoring(hooks):
    plain, hooked = policy_of(SMALL), policy_of(SMALL, **hooks)
    rollout = generate(SMALL, hooked, prompts_of())
    logits = backend.logits(SMALL, hooked, rollout, 0.9)
    scored = jnp.take_along_axis(jax.nn.log_softmax(logits), rollout.tokens_BN[..., None], axis=-1)[
        ..., 0
    ]
    mask = np.asarray(rollout.mask_BN) > 0
    np.testing.assert_allclose(
        np.asarray(rollout.logprobs_BN)[mask], np.asarray(scored)[mask], atol=2e-5
    )
    assert np.abs(backend.logits(SMALL, plain, rollout, 0.9) - logits).max() > 1e-3


def test_hooked_linear_input_equals_scaled_weights():
    policy, rollout = policy_of(SMALL, on_linear_input=halve_input), full_rollout(SMALL)
    scaled = {n: w * 0.5 if n.endswith("down_proj.weight") else w for n, w in policy.params.items()}
    np.testing.assert_allclose(
        backend.logits(SMALL, policy, rollout, 1.0),
        backend.logits(SMALL, Policy(scaled), rollout, 1.0),
        atol=1e-5,
    )


# --- checkpoints that are not what they say -----------------------------------------------------


def _drop(params):
    del params["model.layers.1.mlp.up_proj.weight"]


def _reshape(params):
    params["model.norm.weight"] = np.ones(5, np.float32)


def _extra(params):
    params["model.layers.7.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)


def _poison(params):
    params["model.norm.weight"][3] = np.nan


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_drop, ["model.layers.1.mlp.up_proj.weight", "missing"]),
        (_reshape, ["model.norm.weight", "[5]", "[24]"]),
        (_extra, ["model.layers.7.mlp.up_proj.weight", "not part"]),
        (_poison, ["model.norm.weight", "NaN"]),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, damage, words):
    params = params_of(SMALL)
    damage(params)
    with pytest.raises(UserError) as error:
        backend.load(write_folder(tmp_path / "m", SMALL, params))
    assert all(word in str(error.value) for word in [*words, "model.safetensors"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, ["mamba", "llama"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["linear"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(tmp_path, config, words):
    with pytest.raises(UserError) as error:
        backend.load(write_folder(tmp_path / "m", SMALL, params_of(SMALL), **config))
    assert all(word in str(error.value) for word in words)


def test_broken_files_are_refused(tmp_path):
    folder = write_folder(tmp_path / "m", SMALL, params_of(SMALL))
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        backend.load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="safetensors only"):
        backend.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        backend.load(folder)

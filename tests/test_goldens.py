"""Our numbers against those of `transformers`, which the files in goldens/ hold; torch is not needed here.

If a golden fails and the change was meant, run tests/goldens/make_goldens.py and say why in the commit.
"""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from goldens.variants import ALL, NEW_TOKENS, VARIANTS, golden_path, has_bfloat16, has_states, kept, prompt_ids, prompts
from random_checkpoint import DENSE, GLM, checkpoint_hash, write_variant

from infer.generator import Generator
from infer.logits import all_logits
from mtp_jax.hf import load_checkpoint
from mtp_jax.layers.router import choose
from mtp_jax.mtp import MTPModel
from mtp_jax.state import DeltaState

TOLERANCE = 2e-4
ROUNDED = ("main_logits", "mtp_logits")
WITH_EXPERTS = [variant for variant in ALL if variant.family != DENSE]


def by_variant(variants=ALL):
    return pytest.mark.parametrize("variant", variants, ids=lambda variant: variant.name)


@cache
def golden(variant):
    with np.load(golden_path(variant)) as file:
        return dict(file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {variant: write_variant(root / variant.name, variant) for variant in ALL}


@by_variant()
def test_the_checkpoint_is_the_one_that_the_peer_saw(folders, variant):
    record = json.loads(str(golden(variant)["record"]))
    assert record["checkpoint_sha256"] == checkpoint_hash(folders[variant])
    assert record["seed"] == variant.seed
    assert record["peer"] == "transformers 5.24.0"
    # A greedy token may only be compared where no rounding decides it.
    assert record["least_greedy_gap"] > 2 * TOLERANCE
    # Nor an expert, whose scores are off by about 1e-6.
    assert variant.family == DENSE or record["least_router_gap"] > 2e-5


# Each length compiles anew, so the default run has every length for one variant and one length for every variant.
def cases(everywhere, chosen=lambda variant, prompt: True):
    return [
        pytest.param(variant, prompt, id=f"{variant.name}-{prompt}", marks=marks)
        for variant in ALL
        for prompt in prompts(variant)
        if chosen(variant, prompt)
        for marks in [() if variant is VARIANTS[0] or prompt in everywhere else pytest.mark.slow]
    ]


@pytest.mark.parametrize(("variant", "prompt"), cases(("65",)))
def test_float32_logits_and_hidden_states_of_trunk_and_head(folders, variant, prompt):
    checkpoint = load_checkpoint(folders[variant])
    result = all_logits(MTPModel(checkpoint.config), checkpoint.params, prompt_ids(variant, prompt))
    assert sorted(result) == ["chained_logits", "hidden", "hidden_before_norm", "main_logits", "mtp_logits"]
    assert golden(variant)[f"{prompt}/main_logits"].std() > 1, "logits are flat, so this would show little"
    for name, value in result.items():
        expected = golden(variant)[f"{prompt}/{name}"]
        # The peer drafts one token a layer if there are several, ours go on.
        value = value[:, : expected.shape[1]] if name == "chained_logits" else value[:, kept(value.shape[1])]
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=0, atol=TOLERANCE, err_msg=name)


@by_variant()
def test_states_and_greedy_tokens_after_a_ragged_prefill(folders, variant):
    """All prompts as one padded batch: states after prefill, then greedy decoding token by token."""
    checkpoint = load_checkpoint(folders[variant])
    model, params = MTPModel(checkpoint.config), checkpoint.params
    rows = [(name, row) for name in prompts(variant) for row in prompt_ids(variant, name)]
    lengths = jnp.array([len(row) for _, row in rows])
    longest = max(len(row) for _, row in rows)
    padded = jnp.array([np.pad(row, (0, longest - len(row))) for _, row in rows], jnp.int32)

    @jax.jit
    def extend(tokens, state, lengths):
        hidden, state = model.apply({"params": params}, tokens, state, lengths, method="extend")
        last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        logits = model.apply({"params": params}, last, method="logits")
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    state, _ = model.empty_state(len(rows), longest + NEW_TOKENS + longest)
    token, state = extend(padded, state, lengths)
    for index, (name, _) in enumerate(rows):
        for number, layer in enumerate(state.layers):
            if has_states(variant, name) and isinstance(layer, DeltaState):
                memory, conv = (golden(variant)[f"{name}/{part}_{number}"][0] for part in ("memory", "conv"))
                np.testing.assert_allclose(layer.memory[index], memory, rtol=0, atol=TOLERANCE)
                np.testing.assert_allclose(layer.conv[index], conv, rtol=0, atol=TOLERANCE)
    tokens = [token]
    for _ in range(NEW_TOKENS - 1):
        token, state = extend(token, state, jnp.ones_like(lengths))
        tokens.append(token)
    ours = np.concatenate(tokens, axis=1)
    expected = np.concatenate([golden(variant)[f"{name}/greedy"] for name in prompts(variant)])
    np.testing.assert_array_equal(ours, expected)


def choices(model, params, ids):
    """What every router chooses, [B, T, E] by the part of the model: experts in ascending order, and their weights."""
    chosen = {}

    def note(method, args, kwargs, context):
        result = method(*args, **kwargs)
        if context.module.name == "gate":  # of a mixture; a dense MLP's is gate_proj
            choice = choose(*result, model.config.moe)
            order = jnp.argsort(choice.experts, axis=-1)
            chosen[context.module.path[:-1]] = [
                jnp.take_along_axis(leaf, order, axis=-1) for leaf in (choice.experts, choice.weights)
            ]
        return result

    def run(bound, ids):
        documents = jnp.zeros_like(ids)
        hidden = bound(ids, documents)
        bound.mtp(hidden[:, :-1], ids[:, 1:], documents[:, 1:])

    @jax.jit
    def apply(params, ids):
        with nn.intercept_methods(note):
            model.apply({"params": params}, ids, method=run)
        return {"_".join(path): values for path, values in chosen.items()}

    return {
        name: [np.reshape(value, (len(ids), -1, value.shape[-1])) for value in values]
        for name, values in apply(params, jnp.asarray(ids, jnp.int32)).items()
    }


@pytest.mark.parametrize(
    ("variant", "prompt"), cases(("65",), lambda variant, prompt: variant in WITH_EXPERTS and prompt != "1")
)
def test_routers_choose_the_same_experts(folders, variant, prompt):
    checkpoint = load_checkpoint(folders[variant])
    ours = choices(MTPModel(checkpoint.config), checkpoint.params, prompt_ids(variant, prompt))
    expected = {name: value for name, value in golden(variant).items() if name.startswith(f"{prompt}/experts_")}
    assert len(expected) == len(ours)
    for name, experts in expected.items():
        layer = name.rpartition("_")[2]
        of_ours = ours[f"mtp_layers_{layer}_mlp" if "_mtp_" in name else f"trunk_layers_{layer}_mlp"]
        positions = kept(of_ours[0].shape[1])
        np.testing.assert_array_equal(of_ours[0][:, positions], experts, err_msg=name)
        weights = golden(variant)[name.replace("experts_", "weights_")]
        np.testing.assert_allclose(of_ours[1][:, positions], weights, rtol=0, atol=TOLERANCE, err_msg=name)


@by_variant([variant for variant in ALL if variant.family == GLM])
def test_speculation_accepts_what_the_peers_accepts(folders, variant):
    """Its greedy speculation takes one row at a time and as many drafts a round as there are MTP layers."""
    values = golden(variant)
    names = [name for name in prompts(variant) if f"{name}/speculative" in values]
    rows = [row.tolist() for name in names for row in prompt_ids(variant, name)]
    expected = np.concatenate([values[f"{name}/speculative"] for name in names])
    np.testing.assert_array_equal(expected, np.concatenate([values[f"{name}/greedy"] for name in names]))
    generator = Generator.from_pretrained(folders[variant])
    done = generator.generate(
        rows, max_new_tokens=NEW_TOKENS, num_draft_tokens=variant.mtp_layers, ignore_eos=True, draft_vocabulary=None
    )
    np.testing.assert_array_equal([completion.tokens for completion in done], expected)
    accepted = json.loads(str(values["record"]))["accepted"]
    assert accepted > 0, "the head never guesses right, so this would show little"
    assert sum(completion.accepted for completion in done) == accepted


@pytest.mark.parametrize(("variant", "prompt"), cases(("1", "65"), has_bfloat16))
def test_bfloat16_is_as_close_to_float32_as_the_peers(folders, variant, prompt):
    checkpoint = load_checkpoint(folders[variant], dtype=jnp.bfloat16)
    model = MTPModel(checkpoint.config, jnp.bfloat16)
    result = all_logits(model, checkpoint.params, prompt_ids(variant, prompt))
    for name in ROUNDED:
        exact, peer = (golden(variant)[f"{prefix}{prompt}/{name}"] for prefix in ("", "bfloat16/"))
        ours = result[name][:, kept(result[name].shape[1])]
        if exact.size:
            error, allowed = (float(np.sqrt(np.mean((x - exact) ** 2))) for x in (ours, peer))
            assert error <= 1.5 * allowed, f"{name}: ours {error:.4f}, the peer's {allowed:.4f}"

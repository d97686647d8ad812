"""Our numbers against those of `transformers`, which the files in goldens/ hold; torch is not needed here.

If a golden fails and the change was meant, run tests/goldens/make_goldens.py and say why in the commit.
"""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.variants import NEW_TOKENS, PROMPTS, VARIANTS, WITH_STATES, golden_path, kept, prompt_ids
from random_checkpoint import BF16, checkpoint_hash, write_variant

from infer.logits import all_logits
from mtp_jax.hf import load_checkpoint
from mtp_jax.mtp import MTPModel
from mtp_jax.state import DeltaState

TOLERANCE = 2e-4
ROUNDED = ("main_logits", "mtp_logits")
by_variant = pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])


@cache
def golden(variant):
    with np.load(golden_path(variant)) as file:
        return dict(file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {variant: write_variant(root / variant.name, variant) for variant in VARIANTS}


@by_variant
def test_the_checkpoint_is_the_one_that_the_peer_saw(folders, variant):
    record = json.loads(str(golden(variant)["record"]))
    assert record["checkpoint_sha256"] == checkpoint_hash(folders[variant])
    assert record["seed"] == variant.seed
    assert record["peer"] == "transformers 5.24.0"
    # A greedy token may only be compared where no rounding decides it.
    assert record["least_greedy_gap"] > 2 * TOLERANCE


# Each length compiles anew, so the default run has every length for one variant and one length for every variant.
def cases(variants, everywhere):
    return [
        pytest.param(variant, prompt, id=f"{variant.name}-{prompt}", marks=marks)
        for variant in variants
        for prompt in PROMPTS
        for marks in [() if variant is VARIANTS[0] or prompt in everywhere else pytest.mark.slow]
    ]


@pytest.mark.parametrize(("variant", "prompt"), cases(VARIANTS, ("65",)))
def test_float32_logits_and_hidden_states_of_trunk_and_head(folders, variant, prompt):
    checkpoint = load_checkpoint(folders[variant])
    result = all_logits(MTPModel(checkpoint.config), checkpoint.params, prompt_ids(variant, prompt))
    assert sorted(result) == ["chained_logits", "hidden", "hidden_before_norm", "main_logits", "mtp_logits"]
    assert golden(variant)[f"{prompt}/main_logits"].std() > 1, "logits are flat, so this would show little"
    for name, value in result.items():
        expected = golden(variant)[f"{prompt}/{name}"]
        if name != "chained_logits":
            value = value[:, kept(value.shape[1])]
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=0, atol=TOLERANCE, err_msg=name)


@by_variant
def test_states_and_greedy_tokens_after_a_ragged_prefill(folders, variant):
    """All prompts as one padded batch: states after prefill, then greedy decoding token by token."""
    checkpoint = load_checkpoint(folders[variant])
    model, params = MTPModel(checkpoint.config), checkpoint.params
    rows = [(name, row) for name in PROMPTS for row in prompt_ids(variant, name)]
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
            if name in WITH_STATES and isinstance(layer, DeltaState):
                memory, conv = (golden(variant)[f"{name}/{part}_{number}"][0] for part in ("memory", "conv"))
                np.testing.assert_allclose(layer.memory[index], memory, rtol=0, atol=TOLERANCE)
                np.testing.assert_allclose(layer.conv[index], conv, rtol=0, atol=TOLERANCE)
    tokens = [token]
    for _ in range(NEW_TOKENS - 1):
        token, state = extend(token, state, jnp.ones_like(lengths))
        tokens.append(token)
    ours = np.concatenate(tokens, axis=1)
    expected = np.concatenate([golden(variant)[f"{name}/greedy"] for name in PROMPTS])
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(("variant", "prompt"), cases([v for v in VARIANTS if v.dtype == BF16], ("1", "65")))
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

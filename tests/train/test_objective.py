"""The loss: what its terms are, what is masked, what documents learn of each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import PRESETS
from mtp_jax.mtp import MTPModel, init_params
from train.objective import losses, shift_within_document

EXPERIMENT = PRESETS["tiny"]().override(["vocab_size=37", "width=24", "mlp_width=40", "delta_head_k_dim=8"])
TIME, CHUNK = 21, 16  # one shape for all, so that little is compiled


@pytest.fixture(scope="module")
def model():
    return MTPModel(config=EXPERIMENT.model_config(), dtype=jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def params(model):
    # Small weights would hide a leak behind a nearly uniform softmax.
    return jax.tree.map(lambda x: x * 3.0 if x.ndim > 1 else x, init_params(model, jax.random.key(1)))


@pytest.fixture(scope="module")
def objective(model):
    return jax.jit(partial(losses, model), static_argnames="chunk")


@pytest.fixture(scope="module")
def gradient(model):
    return jax.jit(jax.grad(lambda p, *a: losses(model, p, *a, CHUNK)[0]))


def _tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 37, shape), jnp.int32)


def _weight(value):
    return jnp.asarray(value, jnp.float32)


def test_targets_stop_at_document_ends():
    tokens = jnp.arange(10, 20, dtype=jnp.int32)[None]
    segments = jnp.array([[1, 2, 2, 3, 3, 3, 1, 1, 1, 1]], jnp.int32)
    next_tokens, main = shift_within_document(tokens, segments, 1)
    second_tokens, mtp = shift_within_document(tokens, segments, 2)
    # Documents of 1, 2, 3 and 4 tokens have 0, 1, 2, 3 next tokens and 0, 0, 1, 2 second ones.
    np.testing.assert_array_equal(main[0], [0, 1, 0, 1, 1, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(mtp[0], [0, 0, 0, 1, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(next_tokens[main], tokens[0, 1:][main[0, :-1]])
    np.testing.assert_array_equal(second_tokens[mtp], tokens[0, 2:][mtp[0, :-2]])


def test_an_id_that_comes_back_is_another_document():
    segments = jnp.array([[1, 2, 1, 1]], jnp.int32)
    _, mask = shift_within_document(_tokens((1, 4)), segments, 2)
    np.testing.assert_array_equal(mask[0], [0, 0, 0, 0])


def test_padding_has_no_targets():
    _, mask = shift_within_document(_tokens((1, 5)), jnp.array([[1, 1, 0, 0, 0]], jnp.int32), 1)
    np.testing.assert_array_equal(mask[0], [1, 0, 0, 0, 0])


@pytest.mark.parametrize("time", [1, 2])
def test_rows_shorter_than_the_shift(time):
    _, mask = shift_within_document(_tokens((2, time)), jnp.ones((2, time), jnp.int32), 2)
    assert mask.shape == (2, time)
    assert not mask.any()


def test_loss_is_main_plus_lambda_mtp(objective, params):
    tokens, segments = _tokens((1, TIME)), jnp.ones((1, TIME), jnp.int32)
    without, report = objective(params, tokens, segments, _weight(0.0), chunk=CHUNK)
    with_head, _ = objective(params, tokens, segments, _weight(0.3), chunk=CHUNK)
    np.testing.assert_allclose(with_head - without, 0.3 * report.mtp_loss, rtol=1e-5)
    np.testing.assert_allclose(without, report.main_loss, rtol=1e-6)
    assert (report.main_count, report.mtp_count) == (20, 19)


def test_terms_equal_plain_cross_entropy_and_autodiff(model, params, gradient, objective):
    tokens = _tokens((1, TIME))
    segments = jnp.asarray(np.repeat([[1, 2, 3]], [9, 1, 11], axis=1), jnp.int32)
    next_tokens, main_mask = shift_within_document(tokens, segments, 1)
    second_tokens, mtp_mask = shift_within_document(tokens, segments, 2)

    def mean(logits, labels, mask):
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.sum(mask).astype(jnp.float32)

    @jax.jit
    def plain(params):
        bound = model.bind({"params": params})
        hidden = bound(tokens, segments)
        head = bound.mtp(hidden, next_tokens, segments)
        logits, draft = bound.logits(hidden), bound.logits(head)
        main, mtp = mean(logits, next_tokens, main_mask), mean(draft, second_tokens, mtp_mask)
        agreement = jnp.argmax(draft, -1)[:, :-1] == jnp.argmax(logits, -1)[:, 1:]
        return main + 0.7 * mtp, (main, mtp, jnp.argmax(draft, -1) == second_tokens, agreement)

    (_, (main, mtp, correct, agreement)), expected = jax.value_and_grad(plain, has_aux=True)(params)
    _, report = objective(params, tokens, segments, _weight(0.7), chunk=CHUNK)
    np.testing.assert_allclose(report.main_loss, main, rtol=1e-6)
    np.testing.assert_allclose(report.mtp_loss, mtp, rtol=1e-6)
    np.testing.assert_allclose(report.mtp_accuracy, correct[mtp_mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(report.mtp_agreement, agreement[mtp_mask[:, :-1]].mean(), rtol=1e-6)
    got = gradient(params, tokens, segments, _weight(0.7))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), got, expected)


def test_all_targets_masked_is_finite_with_zero_gradient(objective, gradient, params):
    tokens, segments = _tokens((1, TIME)), jnp.arange(1, TIME + 1, dtype=jnp.int32)[None]
    loss, report = objective(params, tokens, segments, _weight(0.3), chunk=CHUNK)
    assert (loss, report.mtp_accuracy, report.main_count) == (0.0, 0.0, 0.0)
    for leaf in jax.tree.leaves(gradient(params, tokens, segments, _weight(0.3))):
        np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_packed_document_learns_as_if_alone(gradient, params, depth):
    """Gradients of packed documents are the weighted mean of their own: nothing leaks, targets included.

    The loss is main + lambda mtp, so the MTP term's gradient is that at lambda = 1 less that at 0.
    """
    lengths = (7, 5, 9)
    documents = [_tokens((1, n), seed=n) for n in lengths]  # TIME tokens together

    def term(tokens, segments):
        main = gradient(params, tokens, segments, _weight(0.0))
        return jax.tree.map(jnp.subtract, gradient(params, tokens, segments, _weight(1.0)), main) if depth else main

    segments = jnp.asarray(np.repeat([4, 2, 4], lengths)[None], jnp.int32)
    together = term(jnp.concatenate(documents, axis=1), segments)

    def alone_in_a_row(document):
        filler = [(0, 0), (0, TIME - document.shape[1])]
        return term(jnp.pad(document, filler), jnp.pad(jnp.ones_like(document), filler))

    alone = map(alone_in_a_row, documents)
    targets = (np.array(lengths) - 1 - depth).astype(np.float32)
    expected = jax.tree.map(lambda *g: sum(n * x for n, x in zip(targets, g, strict=True)) / targets.sum(), *alone)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), together, expected)


def test_a_neighbour_changes_nothing(objective, params):
    """The first document's terms stay when the second one's tokens change, if the second has no targets."""
    segments = jnp.asarray(np.array([[1] * 17 + [2, 3, 4, 5]]), jnp.int32)
    first = _tokens((1, TIME))
    changed = first.at[0, 17:].set((first[0, 17:] + 5) % 37)
    one = objective(params, first, segments, _weight(0.3), chunk=CHUNK)[1]
    other = objective(params, changed, segments, _weight(0.3), chunk=CHUNK)[1]
    np.testing.assert_array_equal(one.loss, other.loss)
    assert one.mtp_count == 15

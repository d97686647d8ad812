"""The loss: what its terms are, what is masked, what documents learn of each other, what each gradient mode reaches."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import FAMILIES

from configs import PRESETS
from mtp_jax.hf.parameters import flatten
from mtp_jax.mtp import MTPModel, init_params
from train.batch import Batch
from train.experiment import GRADIENT_MODES, HEAD_LOSSES
from train.objective import count_targets, losses, mtp_figures, targets

VOCAB, TIME, DEPTHS = 37, 21, 3  # one shape for all, so that little is compiled
EXPERIMENT = (
    PRESETS["tiny"]()
    .override([f"vocab_size={VOCAB}", "width=24", "mlp_width=40", "delta_head_k_dim=8", "cross_entropy_chunk=24"])
    .override([f"depths={DEPTHS}", "depth_weights=decay"])
)
TINY = "tiny"
OTHERS = [name for name in FAMILIES if name != "dense hybrid"]


@pytest.fixture(scope="module", params=[TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def model(request):
    config = EXPERIMENT.model_config() if request.param == TINY else FAMILIES[request.param]
    return MTPModel(dataclasses.replace(config, vocab_size=VOCAB), jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def params(model):
    # Small weights would hide a leak behind a nearly uniform softmax.
    return jax.tree.map(lambda x: x * 3.0 if x.ndim > 1 else x, init_params(model, jax.random.key(1)))


@cache
def _compiled(model, **settings):
    """(params, batch, weight, counts=None) -> report and the gradient of the loss in all parameters."""
    experiment = dataclasses.replace(EXPERIMENT, **settings)

    @jax.jit
    def both(params, batch, weight, counts):
        function = jax.value_and_grad(lambda p: losses(model, p, batch, weight, experiment, counts), has_aux=True)
        (loss, report), gradient = function(params)
        return report, gradient, loss

    def call(params, batch, weight, counts=None):
        counts = count_targets(batch, DEPTHS) if counts is None else counts
        return both(params, batch, jnp.asarray(weight, jnp.float32), counts)

    return call


def _tokens(length=TIME, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (1, length)).astype(np.int32)


def _batch(tokens, lengths=None, ids=(4, 2, 4)):
    """One row of documents of these lengths, one after another, the rest padding."""
    lengths = lengths or (tokens.shape[1],)
    segment_ids = np.repeat([ids[: len(lengths)]], lengths, axis=1).astype(np.int32)
    filler = [(0, 0), (0, TIME - segment_ids.shape[1])]
    tokens, segment_ids = np.pad(tokens, filler), np.pad(segment_ids, filler)
    return Batch(tokens, segment_ids, segment_ids != 0)


def _assert_trees(compare, got, expected):
    jax.tree.map(compare, got, expected)


def _apart_from_routing(report):
    """Experts are chosen for every token, be it a target or not, and their balance is no sum over documents."""
    return report._replace(balance_loss=0.0, expert_load={})


def test_targets_by_place_stop_at_document_ends():
    segment_ids = np.array([[1, 2, 2, 3, 3, 3, 1, 1, 1, 1]], np.int32)
    batch = Batch(np.arange(10, 20, dtype=np.int32)[None], segment_ids, np.ones((1, 10), bool))
    labels, mask = targets(batch, 3)
    # Documents of 1, 2, 3 and 4 tokens have 0, 1, 2, 3 next tokens, 0, 0, 1, 2 second ones, and so on.
    np.testing.assert_array_equal(mask[0, 0], [0, 1, 0, 1, 1, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(mask[1, 0], [0, 0, 0, 0, 1, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(mask[2, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(mask[3, 0], np.zeros(10))
    np.testing.assert_array_equal(labels[0, :-1], np.arange(11, 20))
    np.testing.assert_array_equal(count_targets(batch, 3), [6, 3, 1, 0])


def test_an_id_that_comes_back_is_another_document():
    segment_ids = np.array([[1, 2, 1, 1]], np.int32)
    _, mask = targets(Batch(_tokens(4), segment_ids, np.ones((1, 4), bool)), 2)
    np.testing.assert_array_equal(mask[:, 0], [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_padding_and_masked_tokens_are_no_targets():
    batch = Batch(_tokens(6), np.array([[1, 1, 1, 1, 0, 0]], np.int32), np.array([[1, 0, 1, 1, 1, 1]], bool))
    np.testing.assert_array_equal(targets(batch, 1)[1][:, 0], [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize("time", [1, 2])
def test_rows_shorter_than_the_depth(time):
    tokens = _tokens(time)
    _, mask = targets(Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool)), 3)
    assert mask.shape == (4, 1, time)
    assert not mask[1:].any()


@partial(jax.jit, static_argnames="model")
def _all_logits(model, params, tokens, segment_ids):
    """Of the trunk, and of the head at each depth by its own index: [1 + D T vocab]."""
    bound = model.bind({"params": params})
    hidden = bound(tokens, segment_ids)
    chain, _ = bound.mtp_chain(hidden, tokens, segment_ids, DEPTHS)
    outputs = [bound.trunk_output(hidden), *(bound.head_output(own, depth) for depth, own in enumerate(chain, 1))]
    return jnp.stack([bound.logits(x)[0] for x in outputs])


def _log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def _head_loss(name, trunk, head, label):
    log_p, log_q = _log_softmax(trunk), _log_softmax(head)
    if name == "ce":
        return -log_q[label]
    if name == "kl":
        return np.sum(np.exp(log_p) * (log_p - log_q))
    return 1 - np.minimum(np.exp(log_p), np.exp(log_q)).sum()


@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_report_equals_its_definition_token_by_token(model, params, head_loss):
    """In float64, over three documents with some tokens masked; the depth-d target of index i is token i+d+1."""
    lengths = (9, 1, 11)
    batch = _batch(_tokens(), lengths)
    loss_mask = np.random.default_rng(3).uniform(size=batch.tokens.shape) > 0.3
    batch = batch._replace(loss_mask=loss_mask)
    logits = np.asarray(_all_logits(model, params, *map(jnp.asarray, batch[:2])), np.float64)
    document = np.repeat(np.arange(3), lengths)
    tokens = batch.tokens[0]

    sums = np.zeros((DEPTHS + 1, 4))  # count, loss, right, agreeing
    for depth in range(DEPTHS + 1):
        for index in range(TIME - depth - 1):
            target = index + depth + 1
            if document[index] != document[target] or not loss_mask[0, target]:
                continue
            own, trunk, label = logits[depth, index], logits[0, index + depth], tokens[target]
            loss = _head_loss(head_loss if depth else "ce", trunk, own, label)
            sums[depth] += 1, loss, own.argmax() == label, own.argmax() == trunk.argmax()
    counts = sums[:, 0]
    _, loss, right, agreeing = (sums / counts[:, None]).T
    weights = np.array([1, 0.6, 0.36]) / 1.96

    report, _, total = _compiled(model, head_loss=head_loss)(params, batch, 0.7)
    np.testing.assert_array_equal((report.main_count, *report.mtp_count), counts)
    np.testing.assert_allclose((report.main_loss, *report.depth_losses), loss, rtol=2e-5)
    np.testing.assert_allclose(report.mtp_loss, weights @ loss[1:], rtol=2e-5)
    np.testing.assert_allclose(report.loss, loss[0] + 0.7 * weights @ loss[1:], rtol=2e-5)
    np.testing.assert_allclose(total, report.loss, rtol=1e-6)
    np.testing.assert_allclose(report.mtp_accuracy, right[1:], rtol=1e-6)
    np.testing.assert_allclose(report.mtp_agreement, agreeing[1:], rtol=1e-6)


@pytest.mark.parametrize(("head_loss", "gradient_mode"), [("ce", "joint"), ("tv", "joint"), ("kl", "detached")])
def test_gradients_equal_autodiff_of_the_plain_loss(model, params, head_loss, gradient_mode):
    """Through logits of all tokens at once; the trunk's side of kl and tv is given, and so, when detached, is all that
    the MTP term takes from outside the head."""
    batch = _batch(_tokens(), (9, 1, 11))
    tokens, segment_ids = map(jnp.asarray, batch[:2])
    labels, mask = targets(batch, DEPTHS)
    weights = jnp.asarray([1, 0.6, 0.36], jnp.float32) / 1.96

    def mean(values, depth):
        return jnp.sum(jnp.where(mask[depth], values, 0.0)) / jnp.sum(mask[depth]).astype(jnp.float32)

    def at_label(log_probabilities):
        return jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]

    @jax.jit
    @jax.grad
    def plain(params):
        bound = model.bind({"params": params})
        hidden = bound(tokens, segment_ids)
        main = jax.nn.log_softmax(bound.logits(bound.trunk_output(hidden)))
        total = mean(-at_label(main), 0)
        if gradient_mode == "detached":
            hidden = jax.lax.stop_gradient(hidden)
            bound = model.bind({"params": jax.lax.stop_gradient(params) | {"mtp": params["mtp"]}})
        given = jax.lax.stop_gradient(main)
        for depth, own in enumerate(bound.mtp_chain(hidden, tokens, segment_ids, DEPTHS)[0], 1):
            log_q = jnp.roll(jax.nn.log_softmax(bound.logits(bound.head_output(own, depth))), depth, axis=1)
            if head_loss == "ce":
                values = -at_label(log_q)
            elif head_loss == "kl":
                values = jnp.sum(jnp.exp(given) * (given - log_q), axis=-1)
            else:
                values = 1 - jnp.sum(jnp.minimum(jnp.exp(given), jnp.exp(log_q)), axis=-1)
            total += 0.7 * weights[depth - 1] * mean(values, depth)
        return total

    _, got, _ = _compiled(model, head_loss=head_loss, gradient_mode=gradient_mode)(params, batch, 0.7)
    _assert_trees(partial(np.testing.assert_allclose, rtol=2e-4, atol=4e-6), got, plain(params))


def test_detached_and_head_only_reach_the_head_alone(model, params):
    """The MTP term's gradient is that at lambda = 1 less that at 0: exactly nothing outside `mtp`."""
    batch = _batch(_tokens())

    def gradient(mode, weight):
        return _compiled(model, head_loss="kl", gradient_mode=mode)(params, batch, weight)[1]

    joint, detached, alone = (gradient(mode, 1.0) for mode in GRADIENT_MODES)
    without = gradient("detached", 0.0)
    for name in params:
        if name != "mtp":
            _assert_trees(np.testing.assert_array_equal, detached[name], without[name])
            _assert_trees(lambda x, _: np.testing.assert_array_equal(x, 0.0), alone[name], alone[name])
    # The head's own gradient is the same in all modes, and none of its leaves is without one, but what only chooses.
    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    _assert_trees(same, detached["mtp"], joint["mtp"])
    _assert_trees(same, alone["mtp"], joint["mtp"])
    for path, leaf in flatten(alone["mtp"]).items():
        assert (np.abs(leaf).max() > 0) != path.endswith("gate/bias"), path
    # In joint training the MTP term does reach the trunk.
    assert np.abs(joint["lm_head"]["kernel"] - without["lm_head"]["kernel"]).max() > 1e-4


def test_a_zeroed_output_guesses_uniformly(model, params):
    """Also the head alone: with its last norm at zero its logits are zero, at every depth."""
    nothing = {"scale": jnp.full((model.config.width,), -1.0 if model.config.zero_centred_norms else 0.0)}
    zeroed = params | {
        "mtp": {name: nothing if name.startswith("norm") else leaf for name, leaf in params["mtp"].items()}
    }
    report, _, _ = _compiled(model)(zeroed, _batch(_tokens()), 0.3)
    np.testing.assert_allclose(report.depth_losses, np.log(VOCAB), rtol=1e-6)
    assert abs(report.main_loss - np.log(VOCAB)) > 1e-4
    blank = params | {"lm_head": jax.tree.map(jnp.zeros_like, params["lm_head"])}
    np.testing.assert_allclose(_compiled(model)(blank, _batch(_tokens()), 0.3)[0].main_loss, np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize("place", [3, 12])
def test_a_one_hot_mask_gives_that_tokens_losses(model, params, place):
    batch = _batch(_tokens())
    logits = np.asarray(_all_logits(model, params, *map(jnp.asarray, batch[:2])), np.float64)
    label = batch.tokens[0, place + 1]
    expected = [-_log_softmax(logits[depth, place - depth])[label] for depth in range(DEPTHS + 1)]
    one_hot = np.arange(TIME)[None] == place + 1
    report, _, _ = _compiled(model)(params, batch._replace(loss_mask=one_hot), 0.3)
    np.testing.assert_array_equal((report.main_count, *report.mtp_count), 1)
    np.testing.assert_allclose((report.main_loss, *report.depth_losses), expected, rtol=2e-5)


def test_a_masked_label_changes_nothing(model, params):
    """A row's last token is a label only, nothing reads it: with it masked, loss and gradients do not know it."""
    batch = _batch(_tokens(), (9, 12))
    masked = batch.loss_mask.copy()
    masked[0, -1] = False
    other = batch.tokens.copy()
    other[0, -1] = (other[0, -1] + 7) % VOCAB
    one, same = (
        _compiled(model)(params, Batch(tokens, batch.segment_ids, masked), 0.7) for tokens in (batch.tokens, other)
    )
    # An expert's gradient adds up in the order in which its tokens come.
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    _assert_trees(close if model.config.moe else np.testing.assert_array_equal, one[1:], same[1:])
    _assert_trees(np.testing.assert_array_equal, *map(_apart_from_routing, (one[0], same[0])))
    assert one[0].loss != _compiled(model)(params, batch, 0.7)[0].loss


@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_nothing_to_learn_is_finite_with_zero_gradient(model, params, head_loss):
    """Documents of one token each; all targets masked."""
    lonely = _batch(_tokens(), (1,) * TIME, ids=tuple(range(1, TIME + 1)))
    masked = _batch(_tokens())._replace(loss_mask=np.zeros((1, TIME), bool))
    for batch in (lonely, masked):
        report, gradient, loss = _compiled(model, head_loss=head_loss)(params, batch, 0.3)
        assert loss == 0
        for leaf in jax.tree.leaves((_apart_from_routing(report), gradient)):
            np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_packed_documents_learn_as_if_alone(model, params, head_loss):
    """Given the packed row's counts, its documents' own losses, of all depths, and gradients add up to its own."""
    lengths = (7, 5, 9)
    documents = [_tokens(n, seed=n) for n in lengths]
    packed = _batch(np.concatenate(documents, axis=1), lengths)
    counts = count_targets(packed, DEPTHS)
    np.testing.assert_array_equal(counts, [sum(lengths) - 3 * (1 + depth) for depth in range(DEPTHS + 1)])
    together = _compiled(model, head_loss=head_loss)(params, packed, 0.7)
    alone = [_compiled(model, head_loss=head_loss)(params, _batch(document), 0.7, counts) for document in documents]
    added_up = jax.tree.map(lambda *x: sum(x), *alone)
    _assert_trees(
        partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5),
        (_apart_from_routing(together[0]), *together[1:]),
        (_apart_from_routing(added_up[0]), *added_up[1:]),
    )
    # The head's counts also the places at a document's end, whose next tokens are the neighbour's.
    for path, load in together[0].expert_load.items():
        if path.startswith("trunk"):
            np.testing.assert_array_equal(load, added_up[0].expert_load[path], err_msg=path)


def test_a_neighbour_changes_nothing(model, params):
    """The first document's terms stay when the second one's tokens change, if the second has no targets."""
    lengths, ids = (17, 1, 1, 1, 1), (1, 2, 3, 4, 5)
    first = _tokens()
    changed = first.copy()
    changed[0, 17:] = (first[0, 17:] + 5) % VOCAB
    one, other = (_compiled(model)(params, _batch(tokens, lengths, ids), 0.3)[0] for tokens in (first, changed))
    np.testing.assert_array_equal(one.loss, other.loss)
    np.testing.assert_array_equal(one.mtp_count, [15, 14, 13])


def test_as_many_depths_as_the_row_allows_are_finite(model, params):
    tokens = _tokens(5)
    batch = Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
    experiment = EXPERIMENT.override(["sequence_length=5", "depths=4"])
    loss, report = jax.jit(partial(losses, model, experiment=experiment))(params, batch, jnp.asarray(0.3, jnp.float32))
    np.testing.assert_array_equal(report.mtp_count, [3, 2, 1, 0])
    assert np.isfinite(loss)
    assert report.depth_losses[3] == 0


def test_figures_are_named_by_depth(model, params):
    report, _, _ = _compiled(model)(params, _batch(_tokens()), 0.3)
    figures = mtp_figures(jax.device_get(report))
    assert list(figures)[:5] == ["mtp_accuracy", "mtp_agreement", "mtp_loss_d1", "mtp_loss_d2", "mtp_loss_d3"]
    assert list(figures)[5:] == ["mtp_accuracy_d2", "mtp_agreement_d2", "mtp_accuracy_d3", "mtp_agreement_d3"]
    assert figures["mtp_loss_d3"] == float(report.depth_losses[2])
    assert figures["mtp_agreement_d2"] == float(report.mtp_agreement[1])

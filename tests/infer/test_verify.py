"""What stands, what follows, and what counts, without a model."""

import jax.numpy as jnp
import numpy as np
import pytest

from infer.sampling import draw
from infer.verify import settle, verify_shared_noise

J, VOCAB = 3, 7
NO_END = jnp.full((2,), -1, jnp.int32)


def one_hot_logits(tokens):
    return jnp.asarray(np.eye(VOCAB, dtype=np.float32)[np.asarray(tokens)])


def verify_greedy(drafts, logits):
    return verify_shared_noise(drafts, logits, jnp.zeros_like(logits))


@pytest.mark.parametrize("right", range(J + 1))
def test_the_longest_right_prefix_stands(right):
    chosen = [[4, 2, 5, 1]]
    drafts = [[*chosen[0][:right], 6, *chosen[0][right + 1 : J]]]  # right again after the wrong one
    verdict = verify_greedy(jnp.asarray([drafts[0][:J]]), one_hot_logits(chosen))
    assert verdict.accepted.tolist() == [right]
    assert verdict.tokens.tolist() == chosen


def test_no_drafts_is_plain_decoding():
    verdict = verify_greedy(jnp.zeros((2, 0), jnp.int32), one_hot_logits([[4], [0]]))
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.tokens.tolist() == [[4], [0]]


def test_of_equal_scores_the_lowest_id_is_chosen():
    scores = jnp.asarray([[[0.0, 2.0, 1.0, 2.0]]])
    assert draw(scores, jnp.zeros_like(scores)).tolist() == [[1]]


# Of tokens 4 2 5 1 with `accepted` drafts: (remaining, end ids) -> (tokens, ended, drafted, accepted)
CASES = [
    (3, 9, [], (4, False, 3, 3)),
    (0, 9, [], (1, False, 3, 0)),
    (3, 3, [], (3, False, 3, 3)),
    (3, 2, [], (2, False, 2, 2)),
    (0, 1, [], (1, False, 1, 0)),
    (3, 0, [], (0, False, 0, 0)),
    (3, 9, [2], (2, True, 2, 2)),  # an accepted draft is the end: the third draft could not have been emitted
    (3, 9, [1], (4, True, 3, 3)),  # the end is the token after all drafts
    (1, 9, [2], (2, True, 3, 1)),  # the end is the correction: later drafts were wrong, and count
    (1, 9, [5], (2, False, 3, 1)),  # an end id that is not emitted
    (3, 9, [5, 2], (2, True, 2, 2)),  # the first of two
    (3, 2, [5], (2, False, 2, 2)),  # past the limit
    (3, 2, [2], (2, True, 2, 2)),  # at the limit
    (3, 0, [4], (0, False, 0, 0)),  # a finished row
]


@pytest.mark.parametrize(("accepted", "remaining", "end_ids", "expected"), CASES)
def test_settle(accepted, remaining, end_ids, expected):
    drafts = [[4, 2, 5][:accepted] + [6] * (J - accepted)]
    verdict = verify_greedy(jnp.asarray(drafts), one_hot_logits([[4, 2, 5, 1]]))
    padded = jnp.asarray(([*end_ids, -1, -1])[:2], jnp.int32)
    outcome = settle(verdict, jnp.asarray([remaining]), padded)
    assert tuple(x.item() for x in outcome) == expected


def test_rows_are_settled_apart():
    verdict = verify_greedy(jnp.asarray([[4, 6, 6], [4, 2, 5]]), one_hot_logits([[4, 2, 5, 1]] * 2))
    outcome = settle(verdict, jnp.asarray([9, 3]), NO_END)
    assert outcome.num_tokens.tolist() == [2, 3]
    assert outcome.accepted.tolist() == [1, 3]

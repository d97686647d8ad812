"""Noise is of its law into the far tail, and depends on a row's key, a position and a role alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.noise import Role, gumbel, row_key, uniform

VOCAB = 37


def keys(*rows):
    return jnp.asarray(np.stack([row_key(*row) for row in rows]))


def bits(x):
    return np.asarray(x).view(np.int32)


def test_a_rows_noise_is_the_same_in_every_shape():
    rows = keys((0, 0, 0), (0, 0, 1), (5, 1, 0))
    position = jnp.asarray([[3, 4, 5, 6], [0, 1, 2, 3], [90, 91, 92, 93]])
    for make in (lambda k, p: gumbel(k, p, VOCAB, Role.SHARED), lambda k, p: uniform(k, p, Role.ACCEPT)):
        for run in (make, jax.jit(make)):
            whole = run(rows, position)
            for b, t in itertools.product(range(3), range(4)):
                alone = run(rows[b : b + 1], position[b : b + 1, t : t + 1])
                np.testing.assert_array_equal(bits(alone)[0, 0], bits(whole)[b, t])


def test_keys_positions_and_roles_have_noise_of_their_own():
    rows, position = keys((0, 0, 0), (0, 0, 1)), jnp.asarray([[3, 4], [3, 5]])
    noise = np.stack([gumbel(rows, position, VOCAB, role) for role in Role]).reshape(-1, VOCAB)
    far_apart = np.abs(noise[:, None] - noise[None]).max(axis=-1) > 0.5
    np.testing.assert_array_equal(far_apart, ~np.eye(len(noise), dtype=bool))


def test_row_keys_differ():
    """Also where the numbers, written one after the other in words of 32 bits, would read the same."""
    numbers = [0, 1, 2, 2**32, 2**32 + 1, 2**64, 2**128, 2**160]
    rows = [(seed, prompt, sample) for seed in numbers for prompt in (0, 1, 7) for sample in (0, 1, 7)]
    assert len({row_key(*row).tobytes() for row in rows}) == len(rows)
    assert row_key(3, 2, 1).dtype == np.uint32
    np.testing.assert_array_equal(row_key(3, 2, 1), row_key(3, 2, 1))


def test_uniform_is_uniform():
    rows, positions = keys(*((seed, 0, 0) for seed in range(40))), jnp.broadcast_to(jnp.arange(1000), (40, 1000))
    x = np.sort(np.asarray(uniform(rows, positions, Role.ACCEPT)).ravel())
    assert x[0] >= 0
    assert x[-1] < 1
    # Kolmogorov and Smirnov's distance; its 0.9999 quantile is 2.2 / sqrt(n).
    assert np.abs(x - (np.arange(x.size) + 0.5) / x.size).max() < 2.2 / x.size**0.5


@pytest.fixture(scope="module")
def many():
    """2^25 numbers, sorted: those above 10, and all of a part."""
    run = jax.jit(lambda key, position: gumbel(key, position, 2**22, Role.SHARED))
    key, high, part = keys((1, 0, 0)), [], None
    for position in range(8):
        part = np.asarray(run(key, jnp.full((1, 1), position)))[0, 0]
        assert np.isfinite(part).all()
        high.append(part[part > 10])
    return np.sort(np.concatenate(high)), np.sort(part)


def test_gumbel_noise_is_of_its_law(many):
    _, x = many
    law = np.exp(-np.exp(-x.astype(np.float64)))
    assert np.abs(law - (np.arange(x.size) + 0.5) / x.size).max() < 2.2 / x.size**0.5


@pytest.mark.parametrize("height", [11, 12, 13, 14, 15, 16, 17])
def test_the_far_tail_is_there_and_of_its_law(many, height):
    """Noise of 23 bits has nothing above 16, of which 3.8 are expected here."""
    high, _ = many
    expected = 2**25 * -np.expm1(-np.exp(-float(height)))
    assert abs((high > height).sum() - expected) < 4 * expected**0.5
    if height == 16:
        assert (high > height).any()


def test_the_far_tail_is_not_a_few_values(many):
    """Noise of 23 bits has 19 values above 13, and here 76 numbers."""
    high, _ = many
    top = high[high > 13]
    assert len(np.unique(top)) > 0.95 * len(top)


@pytest.mark.slow
def test_improbable_tokens_are_drawn_as_often_as_they_should():
    """One token has nearly all the mass, and 250,000 of e^-18 each have 0.4 % together."""
    vocab, draws = 250_000, 2000
    tail = np.float32(-18.0)
    run = jax.jit(lambda key, position: gumbel(key, position, vocab, Role.SHARED))
    key = keys((2, 0, 0))
    drawn = 0
    for position in range(draws // 8):
        noise = np.asarray(run(key, 8 * position + jnp.arange(8)[None, :]))[0]
        drawn += (noise[:, 1:].max(axis=1) + tail > noise[:, 0]).sum()
    expected = draws * (vocab - 1) * np.exp(-18.0)
    assert abs(drawn - expected) < 3 * expected**0.5
    assert drawn > 0

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.argmax import argmax


@pytest.mark.parametrize("width", [1, 2, 127, 1000])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0, 2)])
def test_is_numpy_s(width: int, batch: tuple[int, ...]) -> None:
    scores = np.random.default_rng(width).integers(-3, 4, (*batch, width)).astype(np.float32)  # many equals
    result = jax.jit(argmax)(scores)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, np.argmax(scores, axis=-1))


@pytest.mark.parametrize("width", [7, 300])
def test_impossible_ids_and_nan(width: int) -> None:
    scores = np.full((4, width), -np.inf, np.float32)
    scores[1, width - 1] = -1e30
    scores[2, [width // 2, width - 2]] = np.inf
    scores[3, [width // 2, width - 2]] = np.nan
    scores[3, 0] = np.inf
    np.testing.assert_array_equal(jax.jit(argmax)(scores), np.argmax(scores, axis=-1))
    np.testing.assert_array_equal(argmax(jnp.asarray(scores)), [0, width - 1, width // 2, width // 2])


def test_every_place_is_found() -> None:
    np.testing.assert_array_equal(argmax(jnp.eye(261)), np.arange(261))

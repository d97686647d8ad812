"""How published tensors lie: against their definition, element by element, and there and back."""

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.hf.layouts import Convolution, Rows, RowsByHead, Same, converted, write

N, D, F, HEADS, K, V, SHARE = 3, 5, 7, 2, 3, 5, 2

LAYOUTS = {
    "same": (Same(), (D,)),
    "rows": (Rows(), (F, D)),
    "rows of a stack": (Rows(), (N, D, F)),
    "two parameters of a stack": (Rows(2), (N, 2 * F, D)),
    "convolution": (Convolution(), (F, 1, 4)),
    "by head, several kinds": (
        RowsByHead(HEADS, ((K, K, SHARE * V), (SHARE * V,))),
        (HEADS * (2 * K + 2 * SHARE * V), D),
    ),
    "by head, one kind each": (RowsByHead(HEADS, ((SHARE,), (SHARE,))), (HEADS * 2 * SHARE, D)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_taken_apart_is_put_together_again(name):
    layout, shape = LAYOUTS[name]
    tensor = np.arange(np.prod(shape)).reshape(shape)
    parts = layout.split(tensor)
    assert layout.published_shape([part.shape for part in parts]) == shape
    assert sorted(np.concatenate([part.ravel() for part in parts])) == list(range(tensor.size))
    np.testing.assert_array_equal(layout.join(parts), tensor)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_tensor_hold_rows_along_one_axis_of_its_parameters(name):
    layout, shape = LAYOUTS[name]
    tensor = np.arange(np.prod(shape)).reshape(shape)
    axis = layout.row_axis(len(shape))
    assert (axis is None) == (name.startswith("by head") or name == "convolution")
    if axis is not None:
        for rows in (slice(0, 1), slice(1, 3), slice(2, shape[0])):
            for part, few in zip(layout.split(tensor), layout.split(tensor[rows]), strict=True):
                np.testing.assert_array_equal(few, part[(slice(None),) * axis + (rows,)])


def test_rows_of_two_matrices_in_one_are_not_along_one_axis():
    assert Rows(2).row_axis(2) is None


def test_the_convolution_reads_oldest_first():
    tensor = np.arange(4 * F).reshape(F, 1, 4)
    np.testing.assert_array_equal(Convolution().split(tensor)[0][0], tensor[:, 0, 0])


def test_gate_rows_come_before_up_rows_in_each_expert():
    tensor = np.arange(N * 2 * F * D).reshape(N, 2 * F, D)
    gate, up = Rows(2).split(tensor)
    assert gate[1, 4, 6] == tensor[1, 6, 4]
    assert up[1, 4, 6] == tensor[1, F + 6, 4]


def test_fused_projections_are_grouped_by_key_head():
    """Rows of key head g: q (K), k (K), v (share V), z (share V); ours: q of all heads, then k, then v; and z."""
    layout, shape = LAYOUTS["by head, several kinds"]
    tensor = np.arange(np.prod(shape)).reshape(shape)
    qkv, z = layout.split(tensor)
    group = 2 * K + 2 * SHARE * V
    for g in range(HEADS):
        for i in range(K):
            np.testing.assert_array_equal(qkv[:, g * K + i], tensor[g * group + i])
            np.testing.assert_array_equal(qkv[:, HEADS * K + g * K + i], tensor[g * group + K + i])
        for i in range(SHARE * V):  # value head g * SHARE + i // V
            value = g * SHARE * V + i
            np.testing.assert_array_equal(qkv[:, 2 * HEADS * K + value], tensor[g * group + 2 * K + i])
            np.testing.assert_array_equal(z[:, value], tensor[g * group + 2 * K + SHARE * V + i])


@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (300, 7), (3, 300, 7), (2, 3, 5, 7)])
def test_copies_in_another_type_whatever_the_order_of_the_axes(shape, source, target):
    values = np.random.default_rng(0).normal(size=shape).astype(source)
    for view in (values, values.T, values.swapaxes(-1, -2) if len(shape) > 1 else values):
        copy = converted(view, np.dtype(target))
        assert copy.flags.c_contiguous
        np.testing.assert_array_equal(copy, view.astype(target))
        into = np.zeros(view.shape, target)
        write(view, into)
        np.testing.assert_array_equal(into, copy)


def test_every_bfloat16_keeps_its_bits_in_float32():
    """A NaN's too, in a matrix of several blocks of rows that are not whole ones."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 16)
    for view in (bits, bits.T, bits[:, 3:9].T, bits[5:333].T, bits[5:333, 3:9]):
        copy = converted(view.view(ml_dtypes.bfloat16), np.dtype(np.float32))
        np.testing.assert_array_equal(copy.view(np.uint32), view.astype(np.uint32) << 16)


def test_arrays_of_different_shapes_are_not_copied():
    with pytest.raises(ValueError, match=r"expected values of shape \(4, 300\), got \(4, 200\)"):
        write(np.zeros((200, 4), np.float32).T, np.empty((4, 300), np.float32))

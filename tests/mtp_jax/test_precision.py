"""Precision is asked for in the program itself: a global setting, as in these tests, would hide what users run."""

import jax
import jax.numpy as jnp
import pytest
from small_models import MODELS

from mtp_jax.mtp import MTPModel, init_params

CONFIG = MODELS["hybrid"].config
HEAD_DIMS = {CONFIG.delta.head_k_dim, CONFIG.delta.head_v_dim}


def products(jaxpr):
    """Every matrix product in a program, those of nested programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
                if hasattr(inner, "jaxpr"):
                    yield from products(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from products(inner)


def traced(method, dtype):
    model = MTPModel(CONFIG, dtype)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    trunk, head = jax.eval_shape(lambda: model.empty_state(2, 96))
    ids = jax.ShapeDtypeStruct((2, 70), jnp.int32)
    hidden = jax.ShapeDtypeStruct((2, 70, CONFIG.width), dtype)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    arguments = {
        "__call__": (ids, ids),
        "extend": (ids, trunk, lengths),
        "probe": (jax.ShapeDtypeStruct((2, 4), jnp.int32), trunk),
        "mtp": (hidden, ids, ids),
        "mtp_extend": (hidden, ids, head, lengths),
        "logits": (hidden,),
    }[method]

    def run(params, *x):
        return model.apply({"params": params}, *x, method=method)

    with jax.default_matmul_precision("default"):  # what a user has
        return list(products(jax.make_jaxpr(run)(params, *arguments).jaxpr))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", ["__call__", "extend", "probe"])
def test_delta_rule_products_are_float32_at_the_highest_precision(method, dtype):
    rule = [p for p in traced(method, dtype) if not any(_is_weight(v) for v in p.invars) and _touches_heads(p)]
    assert len(rule) >= 4
    for product in rule:
        assert product.outvars[0].aval.dtype == jnp.float32
        assert all(v.aval.dtype == jnp.float32 for v in product.invars)
        assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


def _is_weight(variable):
    return variable.aval.ndim == 2


def _touches_heads(product):
    """Attention's heads are 10 wide; chunks are 4, 64 or 16 long; DeltaNet's heads are 5 and 7 wide."""
    shapes = [v.aval.shape for v in product.invars]
    return not any(CONFIG.attention.head_dim in shape for shape in shapes) and any(
        HEAD_DIMS & set(shape[-2:]) for shape in shapes
    )


@pytest.mark.parametrize("method", ["__call__", "extend", "probe", "mtp", "mtp_extend"])
def test_attention_scores_are_float32_in_bfloat16(method):
    products_ = traced(method, jnp.bfloat16)
    scores = [p for p in products_ if p.params["preferred_element_type"] == jnp.float32 and _is_bfloat16(p)]
    assert scores


def _is_bfloat16(product):
    return all(v.aval.dtype == jnp.bfloat16 for v in product.invars)


def test_logits_are_accumulated_and_returned_in_float32():
    (product,) = traced("logits", jnp.bfloat16)
    assert product.params["preferred_element_type"] == jnp.float32
    assert product.outvars[0].aval.dtype == jnp.float32

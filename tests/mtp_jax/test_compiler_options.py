"""Options for the compiler, and those that the user set in XLA_FLAGS."""

import os
import subprocess
import sys

import pytest

from mtp_jax.compiler_options import DECODING, TRAINING, compiler_options


@pytest.mark.parametrize(
    ("flags", "width", "left_out"),
    [
        ("", "512", "cse_barrier_expander"),
        ("--xla_disable_hlo_passes=cse,dce", "512", "cse,dce,cse_barrier_expander"),
        ("--xla_disable_hlo_passes='cse' --xla_disable_hlo_passes=dce", "512", "cse,dce,cse_barrier_expander"),
        ("--xla_cpu_prefer_vector_width=256", None, "cse_barrier_expander"),
    ],
)
def test_what_the_user_set_stays(monkeypatch, flags, width, left_out):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert compiler_options(DECODING).get("xla_cpu_prefer_vector_width") == width
    assert compiler_options(TRAINING) == {"xla_disable_hlo_passes": left_out}


def test_another_backend_has_none(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert compiler_options(DECODING) == compiler_options(TRAINING) == {}


PROGRAM = """
import jax, jax.numpy as jnp
from mtp_jax.compiler_options import TRAINING, compiler_options
twice = jax.jit(lambda x: jnp.sin(x) + jnp.sin(x)).lower(jnp.ones(8))
print([twice.compile(options).as_text().count(" sine(") for options in (None, {}, compiler_options(TRAINING))])
"""


@pytest.mark.parametrize(
    ("flags", "sines"), [("", 1), ("--xla_disable_hlo_passes=dce --xla_disable_hlo_passes=cse", 2)]
)
def test_xla_leaves_out_the_passes_that_the_user_had_left_out(flags, sines):
    """`cse` would merge the two sines; in a process of its own, as XLA reads its flags once."""
    variables = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": "."}
    found = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=variables)
    assert found.split() == f"[{sines}, {sines}, {sines}]".split()

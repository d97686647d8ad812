"""What XLA is asked for when programs are compiled, by what they are for and the backend."""

import os
import re
from collections.abc import Mapping

import jax

PASSES_LEFT_OUT = "xla_disable_hlo_passes"

# Of 256 bits by default, also where the processor has 512: a product of one row with a matrix is 8 % slower then.
DECODING: Mapping[str, Mapping[str, str]] = {"cpu": {"xla_cpu_prefer_vector_width": "512"}}

# XLA on a CPU would merge what is made again for the backward pass (`remat`) with what was made first, and so keep it.
TRAINING: Mapping[str, Mapping[str, str]] = {"cpu": {PASSES_LEFT_OUT: "cse_barrier_expander"}}


def compiler_options(purpose: Mapping[str, Mapping[str, str]]) -> jax.stages.CompilerOptions:
    """Those of DECODING or TRAINING for the backend in use.

    An option given to the compiler replaces what the variable XLA_FLAGS says of it. So one that the user set there is
    left out here, and passes that the user had left out stay so beside ours.
    """
    options: jax.stages.CompilerOptions = {}
    for name, value in purpose.get(jax.default_backend(), {}).items():
        set_by_user = re.findall(rf"--{name}=[\"']?([^\s\"']+)", os.environ.get("XLA_FLAGS", ""))
        if name == PASSES_LEFT_OUT:
            options[name] = ",".join([*set_by_user, value])
        elif not set_by_user:
            options[name] = value
    return options

"""What a process does with memory that it has freed."""

import platform
import subprocess
import sys

import pytest

# A buffer as large as XLA's is used, freed, and asked for again; the second time's page faults count.
PROGRAM = """
import resource, sys
from train.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (1 << 25)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
faults()
print(faults())
"""


# Steps with 64 MiB of temporaries: whether each is done when its call returns, and how much memory they add at most.
STEPS = """
import re, sys
import jax, jax.numpy as jnp
from train.allocator import keep_freed_memory

keep_freed_memory()

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

@jax.jit(donate_argnums=0)
def step(x):
    product = x @ x.T
    return jnp.sort(product[:256])[:, :64].sum() + product @ x

x = jnp.ones((1 << 12, 64))
assert step.lower(x).compile().memory_analysis().temp_size_in_bytes >= 1 << 26
x, peaks = step(x), []
for _ in range(20):
    x = step(x)
    print("done" if x.is_ready() else "begun")
    jax.block_until_ready(x)
    peaks.append(peak())
print(peaks[-1] - peaks[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    def faults(mode):
        return int(subprocess.check_output([sys.executable, "-c", PROGRAM, mode], text=True))

    assert faults("keep") < 1000 < faults("default")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_s_temporaries_lie_where_the_last_one_s_were():
    """They may move once, if something small has come to lie there; freed by another thread they moved 1 to 5 times."""
    *steps, growth = subprocess.check_output([sys.executable, "-c", STEPS], text=True).split()
    assert set(steps) == {"done"}
    assert int(growth) < 100

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    def faults(mode):
        return int(subprocess.check_output([sys.executable, "-c", PROGRAM, mode], text=True))

    assert faults("keep") < 1000 < faults("default")

"""What this process does with memory that a step no longer needs."""

import ctypes
import sys

import jax

# Of mallopt(3), malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, for the next step, and have one pool of it for all threads.

    By default it returns large buffers to the system at once, and XLA on a CPU asks for them anew at every step: each
    page is then cleared by the kernel before its first use, a quarter of a step's time. Threads that exist already keep
    pools of their own, which return everything, so this comes before the first use of a device. Elsewhere than under
    glibc nothing is kept.

    A program on a CPU then runs in the thread that calls it. Otherwise another thread frees a step's temporaries some
    time after its results are there, when the next step may have asked for its own: there are two of them, and what
    was kept is in pieces that fit none of the steps to come.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_ARENA_MAX, 1)

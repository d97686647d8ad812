"""How this process gives memory back to the system."""

import ctypes
import sys

# Of mallopt(3), malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, for the next step, and have one pool of it for all threads.

    By default it returns large buffers to the system at once, and XLA on a CPU asks for them anew at every step: each
    page is then cleared by the kernel before its first use, a quarter of a step's time. Threads that exist already keep
    pools of their own, which return everything, so this comes before the first use of a device. Elsewhere than under
    glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_ARENA_MAX, 1)

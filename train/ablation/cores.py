"""The processor's cores, and how runs side by side share them."""

import os


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_cores(processes: int) -> list[list[int]]:
    """Cores for each of so many processes that run side by side, without overlap; empty where they are not to be bound:
    there is only one, fewer cores than processes, or a system without such a call."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * processes
    cores = sorted(os.sched_getaffinity(0))
    if processes == 1 or processes > len(cores):
        return [[]] * processes
    return [cores[len(cores) * k // processes : len(cores) * (k + 1) // processes] for k in range(processes)]

"""Sizes rounded up, so that calls of similar size share compiled programs."""


def bucket(size: int, smallest: int) -> int:
    """The smallest of `smallest`, 2 `smallest`, 4 `smallest`, ... that is at least `size`."""
    found = smallest
    while found < size:
        found *= 2
    return found

"""Work that is done once, before a thread that is there to stay computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """What `work` gives, called in a thread that ends with it.

    A thread that has run parallel torch work keeps its OpenMP team for as long as it lives. Where all teams together
    have more threads than the machine has cores, libgomp lets them sleep between two loops rather than spin, and every
    product of whoever else computes waits for them to wake: 1.2 to 1.3 times the time on 2 cores.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tamis-apart") as pool:
        return pool.submit(work).result()

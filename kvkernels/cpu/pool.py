"""Threads for nogil kernels: an own small pool instead of Numba's threading layers.

Numba's layers differ by what happens to be installed (omp is not fork-safe, workqueue is not
thread-safe, tbb may run one thread under a pinned affinity). Who computes an item never changes its
bits, so results do not depend on timing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvkernels.cpu.crew import Crew

if TYPE_CHECKING:
    from kvkernels.cpu.ahead.runtime import AheadKernel
    from kvkernels.cpu.crew import Slots


def available_threads() -> int:
    """CPUs this process may use: affinity, lowered by a cgroup v2 quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as f:
            quota, period = f.read().split()
        if quota != "max":
            count = min(count, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass
    return max(1, count)


class ThreadPool:
    """``n_threads`` workers, the caller being one of them; made anew after a fork."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._crew = Crew(n_threads)
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def ranges(self, work: Callable[[int, int], object], n_items: int, *, least: int = 1) -> None:
        """Run ``work(start, stop)`` over ``0 .. n_items``, at least ``least`` items a thread;
        re-raise errors.
        """
        parts = max(1, min(self.n_threads, n_items // least))
        if parts == 1:
            work(0, n_items)
            return
        edges = [n_items * i // parts for i in range(parts + 1)]
        executor = self._running()
        futures = [executor.submit(work, edges[i], edges[i + 1]) for i in range(1, parts)]
        try:
            work(edges[0], edges[1])
        finally:
            # Never leave while a worker still writes into the caller's arrays.
            errors = [f.exception() for f in futures]
        for error in errors:
            if error is not None:
                raise error

    def items(self, kernel: AheadKernel, slots: Slots, n_items: int, *, least: int = 1) -> None:
        """``kernel(start, stop, ..)`` over ``0 .. n_items`` from packed arguments, at least
        ``least`` items a thread. One call at a time.
        """
        if min(self.n_threads, n_items // least) <= 1:
            slots[1], slots[2] = 0, n_items
            kernel.launch(slots)
        elif os.name == "posix":
            self._crew.run(kernel, slots, n_items)
        else:

            def part(start: int, stop: int) -> None:
                own = slots.copy()
                own[1], own[2] = start, stop
                kernel.launch(own)

            self.ranges(part, n_items)

    def _running(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._pid != os.getpid():
                self._executor = ThreadPoolExecutor(self.n_threads - 1, "kvk-cpu")
                self._pid = os.getpid()
            return self._executor

"""Threads that share the items of one compiled launch without going through Python.

Waking a Python thread and collecting its result costs as much as a whole decode over a short
cache. Here workers wait inside compiled code for a moment after each launch, items are handed out
one by one through an atomic counter, and the caller takes part; a worker that found nothing to do
sleeps on a Python lock until a later launch wakes it. Which thread computes an item never changes
its bits, so results do not depend on timing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu.ahead import runtime

Slots = NDArray[np.int64]

#: most int64 slots of a launch's packed arguments
WIDTH = 128
#: turns of the waiting loop before a worker sleeps: some 100 us, longer than the Python between two
#: layers and shorter than would disturb an engine's own threads
PATIENCE = 4000
# Fields of a job, in int64; those that threads write lie on cache lines of their own.
_OPEN, _NEXT, _ACTIVE, _DONE, _STOP, _COUNT, _FUNCTION, _WANTED = 0, 8, 16, 24, 32, 40, 41, 42

# An item is taken only between `open` and `closed`, and the leader leaves only when nobody is
# active: a worker that comes late finds the job closed and cannot see arguments of the next one.
_IR = f"""
define internal void @work(ptr %job, ptr %args) {{
  %next = getelementptr i64, ptr %job, i64 {_NEXT}
  %done = getelementptr i64, ptr %job, i64 {_DONE}
  %count = getelementptr i64, ptr %job, i64 {_COUNT}
  %n = load i64, ptr %count
  %where = getelementptr i64, ptr %job, i64 {_FUNCTION}
  %function = load ptr, ptr %where
  %start = getelementptr i64, ptr %args, i64 1
  %stop = getelementptr i64, ptr %args, i64 2
  br label %take
take:
  %i = atomicrmw add ptr %next, i64 1 seq_cst
  %more = icmp slt i64 %i, %n
  br i1 %more, label %run, label %out
run:
  %j = add i64 %i, 1
  store i64 %i, ptr %start
  store i64 %j, ptr %stop
  call void %function(ptr %args)
  %before = atomicrmw add ptr %done, i64 1 seq_cst
  br label %take
out:
  ret void
}}
define internal void @until(ptr %flag, i64 %wanted) {{
entry:
  br label %look
look:
  %turn = phi i64 [ 0, %entry ], [ %later, %again ]
  %now = load atomic i64, ptr %flag seq_cst, align 8
  %there = icmp eq i64 %now, %wanted
  br i1 %there, label %out, label %again
again:
  %later = add i64 %turn, 1
  %rest = and i64 %later, 1023
  %long = icmp eq i64 %rest, 0
  call void @relax(i1 %long)
  br label %look
out:
  ret void
}}
define void @lead(ptr %job, ptr %args) {{
  %active = getelementptr i64, ptr %job, i64 {_ACTIVE}
  %done = getelementptr i64, ptr %job, i64 {_DONE}
  %count = getelementptr i64, ptr %job, i64 {_COUNT}
  %n = load i64, ptr %count
  store atomic i64 1, ptr %job seq_cst, align 8
  call void @work(ptr %job, ptr %args)
  call void @until(ptr %done, i64 %n)
  store atomic i64 0, ptr %job seq_cst, align 8
  call void @until(ptr %active, i64 0)
  ret void
}}
define i64 @serve(ptr %job, ptr %args, i64 %patience) {{
entry:
  %active = getelementptr i64, ptr %job, i64 {_ACTIVE}
  %next = getelementptr i64, ptr %job, i64 {_NEXT}
  %count = getelementptr i64, ptr %job, i64 {_COUNT}
  %stop = getelementptr i64, ptr %job, i64 {_STOP}
  br label %look
look:
  %turn = phi i64 [ %patience, %entry ], [ %fewer, %idle ], [ %patience, %leave ]
  %ended = load atomic i64, ptr %stop seq_cst, align 8
  %go = icmp eq i64 %ended, 0
  br i1 %go, label %seek, label %end
seek:
  %open = load atomic i64, ptr %job seq_cst, align 8
  %isopen = icmp ne i64 %open, 0
  br i1 %isopen, label %peek, label %idle
peek:
  %i = load atomic i64, ptr %next seq_cst, align 8
  %n = load atomic i64, ptr %count seq_cst, align 8
  %more = icmp slt i64 %i, %n
  br i1 %more, label %join, label %idle
join:
  %a = atomicrmw add ptr %active, i64 1 seq_cst
  %still = load atomic i64, ptr %job seq_cst, align 8
  %sure = icmp ne i64 %still, 0
  br i1 %sure, label %run, label %leave
run:
  call void @work(ptr %job, ptr %args)
  br label %leave
leave:
  %b = atomicrmw sub ptr %active, i64 1 seq_cst
  br label %look
idle:
  call void @relax(i1 false)
  %fewer = sub i64 %turn, 1
  %tired = icmp sle i64 %fewer, 0
  br i1 %tired, label %end, label %look
end:
  %result = phi i64 [ 1, %look ], [ 0, %idle ]
  ret i64 %result
}}
"""
_X86 = ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()")
_ARM = ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)")
_HINTS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_YIELD = ("declare i32 @sched_yield()", "%r = call i32 @sched_yield()")


def _relax() -> str:
    """How this machine waits: a hint to the core, and now and then its time to other threads."""
    hint = _HINTS.get(platform.machine().lower(), ("", ""))
    give = _YIELD if os.name == "posix" else ("", "")
    return f"""
{hint[0]}
{give[0]}
define internal void @relax(i1 %long) {{
  br i1 %long, label %give, label %short
give:
  {give[1]}
  ret void
short:
  {hint[1]}
  ret void
}}
"""


@cache
def _code() -> tuple[Any, Any]:
    """The functions ``lead(job, args)`` and ``serve(job, args, patience)``; both run without the
    interpreter lock.
    """
    text = _IR + _relax()
    lead, serve = runtime.machine_code(text, text, ("lead", "serve"))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    return (
        ctypes.CFUNCTYPE(None, pointer, pointer)(lead),
        ctypes.CFUNCTYPE(count, pointer, pointer, count)(serve),
    )


class Crew:
    """``n_threads`` threads, the caller being one of them; one launch at a time.

    Made anew after a fork: a child has none of its parent's threads.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._pid = 0
        self._workers: list[_Worker] = []

    def run(self, kernel: runtime.AheadKernel, slots: Slots, n_items: int) -> None:
        """``kernel`` for every item ``0 .. n_items``; its first two arguments, in slots 1 and 2,
        are the range of items.
        """
        if self._pid != os.getpid():
            self._start()
        self._job[_NEXT] = self._job[_DONE] = 0
        self._job[_COUNT] = n_items
        self._job[_FUNCTION] = kernel.address
        self._args[:, : slots.size] = slots
        self._job[_WANTED] = 1
        for worker in self._workers[: n_items - 1]:
            worker.wake()
        try:
            self._lead(self._job_at, self._args_at)
        finally:
            self._job[_WANTED] = 0

    def _start(self) -> None:
        self._lead, serve = _code()
        self._job = np.zeros(_WANTED + 1, np.int64)
        self._args = np.zeros((self.n_threads, WIDTH), np.int64)
        self._job_at, self._args_at = self._job.ctypes.data, self._args.ctypes.data
        self._workers = [
            _Worker(serve, self._job, row, f"kvk-cpu-{i}") for i, row in enumerate(self._args[1:])
        ]
        finalize(self, _dismiss, self._job, self._workers)
        self._pid = os.getpid()


class _Worker:
    """One thread; keeps no reference to its crew, so that a forgotten crew goes."""

    def __init__(self, serve: Any, job: Slots, args: Slots, name: str) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._asleep = False
        # A daemon: it holds no state that an ending interpreter would have to save.
        threading.Thread(target=self._live, args=(serve, job, args), name=name, daemon=True).start()

    def wake(self) -> None:
        """Only a worker that sleeps: the others look for themselves. Both sides hold the
        interpreter lock.
        """
        if self._asleep and self._lock.locked():
            self._lock.release()

    def _live(self, serve: Any, job: Slots, args: Slots) -> None:
        job_at, args_at = job.ctypes.data, args.ctypes.data
        while not serve(job_at, args_at, PATIENCE):
            self._asleep = True
            # Whoever asked while this thread was neither waiting nor asleep did not wake it.
            if not job[_WANTED] and not job[_STOP]:
                self._lock.acquire()
            self._asleep = False


def _dismiss(job: Slots, workers: list[_Worker]) -> None:
    job[_STOP] = 1
    for worker in workers:
        worker.wake()

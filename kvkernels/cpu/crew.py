"""Threads that share the items of one compiled launch without going through Python.

Waking a Python thread and collecting its result costs as much as a whole decode over a short
cache. Here workers live inside compiled code: they look for a next launch for a moment, then sleep
on a condition variable. Items are handed out one by one through an atomic counter, and the caller
takes part. Which thread computes an item never changes its bits, so results do not depend on
timing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from functools import cache
from typing import Any, NamedTuple
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
_OPEN, _NEXT, _ACTIVE, _DONE, _STOP, _COUNT, _FUNCTION = 0, 8, 16, 24, 32, 40, 41
# Fields of a bed, where one worker sleeps: a flag, and room for a pthread mutex and condition.
_MUTEX, _CONDITION, _BED = 8, 24, 40

# An item is taken only while the job is open, and the leader leaves only when nobody is active: a
# worker that comes late finds the job closed and cannot see arguments of the next one. A worker
# sets its flag and then looks at the job, the leader opens the job and then looks at the flags, so
# one of them sees the other.
_IR = f"""
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_signal(ptr)
declare i32 @sched_yield()
define void @make(ptr %bed) {{
  %mutex = getelementptr i64, ptr %bed, i64 {_MUTEX}
  %condition = getelementptr i64, ptr %bed, i64 {_CONDITION}
  %a = call i32 @pthread_mutex_init(ptr %mutex, ptr null)
  %b = call i32 @pthread_cond_init(ptr %condition, ptr null)
  ret void
}}
define void @wake(ptr %beds, i64 %n) {{
entry:
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %j, %next ]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %look, label %out
look:
  %at = mul i64 %i, {_BED}
  %bed = getelementptr i64, ptr %beds, i64 %at
  %flag = load atomic i64, ptr %bed seq_cst, align 8
  %asleep = icmp ne i64 %flag, 0
  br i1 %asleep, label %call, label %next
call:
  %mutex = getelementptr i64, ptr %bed, i64 {_MUTEX}
  %condition = getelementptr i64, ptr %bed, i64 {_CONDITION}
  %a = call i32 @pthread_mutex_lock(ptr %mutex)
  store atomic i64 0, ptr %bed seq_cst, align 8
  %b = call i32 @pthread_cond_signal(ptr %condition)
  %c = call i32 @pthread_mutex_unlock(ptr %mutex)
  br label %next
next:
  %j = add i64 %i, 1
  br label %each
out:
  ret void
}}
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
  br i1 %there, label %out, label %wait
wait:
  %later = add i64 %turn, 1
  %rest = and i64 %later, 255
  %long = icmp eq i64 %rest, 0
  br i1 %long, label %give, label %short
give:
  %r = call i32 @sched_yield()
  br label %again
short:
  call void @relax()
  br label %again
again:
  br label %look
out:
  ret void
}}
define void @lead(ptr %job, ptr %args, ptr %beds, i64 %n_wake) {{
  %active = getelementptr i64, ptr %job, i64 {_ACTIVE}
  %done = getelementptr i64, ptr %job, i64 {_DONE}
  %count = getelementptr i64, ptr %job, i64 {_COUNT}
  %n = load i64, ptr %count
  store atomic i64 1, ptr %job seq_cst, align 8
  call void @wake(ptr %beds, i64 %n_wake)
  call void @work(ptr %job, ptr %args)
  call void @until(ptr %done, i64 %n)
  store atomic i64 0, ptr %job seq_cst, align 8
  call void @until(ptr %active, i64 0)
  ret void
}}
define internal i64 @todo(ptr %job) {{
  %stop = getelementptr i64, ptr %job, i64 {_STOP}
  %ended = load atomic i64, ptr %stop seq_cst, align 8
  %end = icmp ne i64 %ended, 0
  br i1 %end, label %leave, label %seek
seek:
  %open = load atomic i64, ptr %job seq_cst, align 8
  %next = getelementptr i64, ptr %job, i64 {_NEXT}
  %count = getelementptr i64, ptr %job, i64 {_COUNT}
  %i = load atomic i64, ptr %next seq_cst, align 8
  %n = load atomic i64, ptr %count seq_cst, align 8
  %more = icmp slt i64 %i, %n
  %isopen = icmp ne i64 %open, 0
  %both = and i1 %more, %isopen
  %value = zext i1 %both to i64
  ret i64 %value
leave:
  ret i64 -1
}}
define void @serve(ptr %job, ptr %args, ptr %bed, i64 %patience) {{
entry:
  %active = getelementptr i64, ptr %job, i64 {_ACTIVE}
  %mutex = getelementptr i64, ptr %bed, i64 {_MUTEX}
  %condition = getelementptr i64, ptr %bed, i64 {_CONDITION}
  br label %look
look:
  %turn = phi i64 [ %patience, %entry ], [ %fewer, %idle ], [ %patience, %left ], [ 1, %up ]
  %what = call i64 @todo(ptr %job)
  switch i64 %what, label %end [ i64 1, label %join
                                 i64 0, label %idle ]
join:
  %a = atomicrmw add ptr %active, i64 1 seq_cst
  %still = load atomic i64, ptr %job seq_cst, align 8
  %sure = icmp ne i64 %still, 0
  br i1 %sure, label %run, label %left
run:
  call void @work(ptr %job, ptr %args)
  br label %left
left:
  %b = atomicrmw sub ptr %active, i64 1 seq_cst
  br label %look
idle:
  call void @relax()
  %fewer = sub i64 %turn, 1
  %tired = icmp sle i64 %fewer, 0
  br i1 %tired, label %lie, label %look
lie:
  %c = call i32 @pthread_mutex_lock(ptr %mutex)
  store atomic i64 1, ptr %bed seq_cst, align 8
  %now = call i64 @todo(ptr %job)
  %nothing = icmp eq i64 %now, 0
  br i1 %nothing, label %asleep, label %rise
asleep:
  %flag = load atomic i64, ptr %bed seq_cst, align 8
  %on = icmp ne i64 %flag, 0
  br i1 %on, label %sleep, label %rise
sleep:
  %d = call i32 @pthread_cond_wait(ptr %condition, ptr %mutex)
  br label %asleep
rise:
  store atomic i64 0, ptr %bed seq_cst, align 8
  %e = call i32 @pthread_mutex_unlock(ptr %mutex)
  br label %up
up:
  br label %look
end:
  ret void
}}
"""
_X86 = ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()")
_ARM = ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)")
_HINTS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}


class _Code(NamedTuple):
    """The functions of the module; all run without the interpreter lock."""

    make: Any
    wake: Any
    lead: Any
    serve: Any


@cache
def _code() -> _Code:
    hint = _HINTS.get(platform.machine().lower(), ("", ""))
    text = f"{_IR}\n{hint[0]}\ndefine internal void @relax() {{\n  {hint[1]}\n  ret void\n}}\n"
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    kinds = ((pointer,), (pointer, count), (pointer,) * 3 + (count,), (pointer,) * 3 + (count,))
    addresses = runtime.machine_code(text, text, _Code._fields)
    return _Code(
        *(ctypes.CFUNCTYPE(None, *kind)(at) for kind, at in zip(kinds, addresses, strict=True))
    )


class Crew:
    """``n_threads`` threads, the caller being one of them; one launch at a time. POSIX only.

    Made anew after a fork: a child has none of its parent's threads.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._pid = 0

    def run(self, kernel: runtime.AheadKernel, slots: Slots, n_items: int) -> None:
        """``kernel`` for every item ``0 .. n_items``; its first two arguments, in slots 1 and 2,
        are the range of items.
        """
        if self._pid != os.getpid():
            self._start()
        self._args[:, : slots.size] = slots
        self._job[_NEXT] = self._job[_DONE] = 0
        self._job[_FUNCTION] = kernel.address
        self._job[_COUNT] = n_items
        _code().lead(*self._at, max(0, min(n_items, self.n_threads) - 1))

    def _start(self) -> None:
        code, workers = _code(), self.n_threads - 1
        self._job = np.zeros(_FUNCTION + 1, np.int64)
        self._args = np.zeros((self.n_threads, WIDTH), np.int64)
        beds = np.zeros((workers, _BED), np.int64)
        self._at = (self._job.ctypes.data, self._args.ctypes.data, beds.ctypes.data)
        for i in range(workers):
            code.make(beds[i].ctypes.data)
            # A daemon: it holds no state that an ending interpreter would have to save.
            threading.Thread(
                target=_live, args=(self._job, self._args[1 + i], beds[i]), daemon=True,
                name=f"kvk-cpu-{i}",
            ).start()  # fmt: skip
        self._pid = os.getpid()
        finalize(self, _dismiss, self._job, beds, self._pid).atexit = False


def _live(job: Slots, args: Slots, bed: Slots) -> None:
    """A worker; keeps the arrays alive but not its crew, so that a forgotten one goes."""
    _code().serve(job.ctypes.data, args.ctypes.data, bed.ctypes.data, PATIENCE)


def _dismiss(job: Slots, beds: Slots, pid: int) -> None:
    if pid == os.getpid():  # in a forked child nobody sleeps in these
        job[_STOP] = 1
        _code().wake(beds.ctypes.data, len(beds))

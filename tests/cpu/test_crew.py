"""Threads that take the items of one compiled launch: each item once, and nobody left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from llvmlite.binding import llvm_version_info

from kvkernels.cpu.crew import _BED, WIDTH, Crew

pytestmark = pytest.mark.skipif(llvm_version_info[0] < 16, reason="this LLVM cannot read the IR")
POINTER = ctypes.POINTER(ctypes.c_int64)


class Kernel:
    """Looks like a shipped kernel; counts its items and who took them, and checks its arguments."""

    def __init__(self, n_items, sleep=0.0):
        self.seen = np.zeros(n_items, np.int64)
        self.threads = set()
        self.wrong = []
        self.expected = 0

        def body(slots):
            start, stop, mark = slots[1], slots[2], slots[3]
            self.seen[start:stop] += 1
            self.threads.add(threading.get_ident())
            if mark != self.expected:
                self.wrong.append((mark, self.expected))
            if sleep:
                time.sleep(sleep)

        self._keep = ctypes.CFUNCTYPE(None, POINTER)(body)
        self.address = ctypes.cast(self._keep, ctypes.c_void_p).value


def slots(mark):
    return np.array([0, 0, 0, mark], np.int64)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def asleep(crew):
    """Whether all workers sleep: the first word of each bed."""
    return all(
        ctypes.c_int64.from_address(crew._at[2] + 8 * _BED * i).value
        for i in range(crew.n_threads - 1)
    )


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_every_item_is_done_once_in_every_launch_with_that_launchs_arguments(n_threads):
    crew, kernel = Crew(n_threads), Kernel(23)
    for mark in range(1, 200):
        kernel.expected = mark
        n = mark % 24
        crew.run(kernel, slots(mark), n)
        want = np.zeros(23, np.int64)
        want[:n] = 1
        assert np.array_equal(kernel.seen, want), (mark, n)
        kernel.seen[:] = 0
        if mark % 50 == 0:
            time.sleep(0.02)  # long enough for the workers to fall asleep
    assert not kernel.wrong


def test_workers_sleep_when_there_is_nothing_to_do_and_wake_for_the_next_launch():
    crew, kernel = Crew(3), Kernel(9, sleep=0.01)
    crew.run(kernel, slots(0), 9)
    assert len(kernel.threads) == 3
    assert until(lambda: asleep(crew))
    kernel.threads.clear()
    crew.run(kernel, slots(0), 9)
    assert len(kernel.threads) == 3
    assert (kernel.seen == 2).all()


def test_few_items_wake_few_workers():
    crew, kernel = Crew(4), Kernel(2, sleep=0.01)
    crew.run(kernel, slots(0), 2)
    assert until(lambda: asleep(crew))
    crew.run(kernel, slots(0), 1)
    assert asleep(crew)


def test_the_threads_of_a_forgotten_crew_end():
    def alive():
        return {t for t in threading.enumerate() if t.name.startswith("kvk-cpu")}

    before = alive()
    crew = Crew(3)
    crew.run(Kernel(5), slots(0), 5)
    mine = alive() - before
    assert len(mine) == 2
    del crew
    gc.collect()
    assert until(lambda: not alive() & mine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_makes_its_own_threads():
    crew, kernel = Crew(3), Kernel(40)
    crew.run(kernel, slots(0), 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            crew.run(kernel, slots(0), 40)
            code = 0 if (kernel.seen == 2).all() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    crew.run(kernel, slots(0), 40)
    assert (kernel.seen == 2).all()


def test_the_interpreter_exits_with_waiting_and_with_sleeping_workers():
    code = f"""
import sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_crew import Crew, Kernel, slots
crew, kernel = Crew(4), Kernel(9)
crew.run(kernel, slots(0), 9)
time.sleep(float(sys.argv[1]))
crew.run(kernel, slots(0), 9)
"""
    for pause in ("0", "0.05"):
        done = subprocess.run(
            [sys.executable, "-c", code, pause], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_launch_with_more_slots_than_fit_is_an_error():
    with pytest.raises(ValueError, match="broadcast"):
        Crew(1).run(Kernel(1), np.zeros(WIDTH + 1, np.int64), 1)

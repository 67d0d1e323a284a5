"""Mutation of kernel sources: a barrier that can go without any test seeing it is not tested."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kvkernels.simt import program
from kvkernels.simt.emulator.driver import EmulatorDriver, EmulatorError

BARRIER = "BARRIER();"
SECONDS = 120  # after which a mutant counts as hanging, and so as noticed
ORDERS = (("ascending", 0), ("descending", 0), ("warps", 0), ("shuffled", 1), ("shuffled", 2))


def barriers(name: str) -> list[int]:
    """Lines of ``sources/<name>.inc``, counted from 1, that are a barrier and nothing else."""
    lines = program.part(f"{name}.inc").splitlines()
    assert all(line.strip() == BARRIER for line in lines if BARRIER in line), "one barrier a line"
    return [i for i, line in enumerate(lines, 1) if line.strip() == BARRIER]


@contextmanager
def source(name: str, text: str) -> Iterator[None]:
    """Programs assembled inside take ``text`` for ``sources/<name>.inc``. A driver keeps what it
    compiled before: use a new one.
    """
    original = program.part
    with patch.object(
        program, "part", lambda file: text if file == f"{name}.inc" else original(file)
    ):
        yield


def without_line(name: str, line: int) -> str:
    """The text of a source with one line emptied."""
    lines = program.part(f"{name}.inc").splitlines()
    lines[line - 1] = ""
    return "\n".join(lines) + "\n"


def survivors(name: str, run: Callable[[EmulatorDriver], bytes]) -> list[int]:
    """Barriers of a source whose removal nothing noticed: in every order of threads ``run`` gave
    the bytes that it gives with them, and no rendezvous failed. Runs must be quick: five each.
    """
    expected = run(EmulatorDriver())
    found = []
    for line in barriers(name):
        with source(name, without_line(name, line)):
            if not _noticed(run, expected):
                found.append(line)
    return found


def _noticed(run: Callable[[EmulatorDriver], bytes], expected: bytes) -> bool:
    """In a process of its own: a mutant may write anywhere, and a crash is a notice too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside idle threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            os._exit(1 if _differs(run, expected) else 0)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert status != 2 << 8, "a mutant failed in Python, see above"
    return status != 0


def _differs(run: Callable[[EmulatorDriver], bytes], expected: bytes) -> bool:
    driver = EmulatorDriver()
    for order, seed in ORDERS:
        driver.arrange(order, seed)
        try:
            if run(driver) != expected:
                return True
        except EmulatorError:
            return True
    return False

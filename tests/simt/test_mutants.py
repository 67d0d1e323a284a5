"""Every barrier of the portable kernels is needed, and tests see it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import numpy as np
import pytest
from attention import replay
from mutants import barriers, source, survivors
from simt_tools import buffers, contents, rows, spec, whole

from kvkernels.calls import CommitCall, GroupWrite, MaterializeCall, TailCall, TailWrite
from kvkernels.simt import program
from kvkernels.simt.commit import commit
from kvkernels.simt.commit_rows import commit_rows, commit_tail
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.materialize import materialize
from kvkernels.simt.scratch import Scratch
from kvkernels.simt.unfit import first_unfit
from kvkernels.storage import Pages, Storage, Stored
from kvkernels.testing.poison import Guards

GUARDS = Guards()
SOURCES = [
    file.name.removesuffix(".inc")
    for file in (files("kvkernels.simt") / "sources").iterdir()
    if file.name.endswith(".inc")
]


def seal(encoder: str) -> Callable[[EmulatorDriver], bytes]:
    layer = spec("kvarn2", "kvarn5", head_dim=128, encoder=encoder)
    shapes = (("k", 1), ("v", 1), ("q", 2))
    x = {n: rows(GUARDS, (128, h, 128), seed=i) for i, (n, h) in enumerate(shapes)}

    def run(driver: EmulatorDriver) -> bytes:
        held = buffers(GUARDS, layer, Pages(1, 1, 0), queries=True)
        commit(driver, CommitCall(layer, held, (whole(1, 0, 0, 0),), **x), Scratch(driver))
        return contents(held)

    return run


def tiles(driver: EmulatorDriver) -> bytes:
    layer = spec("q5_1", "q5_0", head_dim=160)
    held = buffers(GUARDS, layer, Pages(1, 0, 0))
    x = rows(GUARDS, (40, 1, 160))
    write = GroupWrite(0, 0, 5, 40, 0, 0, 0)
    commit_rows(driver, CommitCall(layer, held, (write,), x, x, None))
    return contents(held)


def ring(driver: EmulatorDriver) -> bytes:
    layer = spec("q4_0", "q4_0")
    plain = Storage.plain(layer)
    storage = Storage(body=plain.body, k="q4_0", v="q4_0", tail_rows=64, tail_dtype="f16")
    held = buffers(GUARDS, layer, Pages(1, 0, 1), storage=storage)
    x = rows(GUARDS, (64, 1, 64))
    commit_tail(driver, TailCall(layer, held, (TailWrite(0, -1, 0, 0, 64),), x, x))
    return contents(held)


def decoded(driver: EmulatorDriver) -> bytes:
    layer = spec("kvarn4", "kvarn3", head_dim=128)
    held = buffers(GUARDS, layer, Pages(1, 0, 0))
    held.k_records[:], held.v_records[:] = 0x35, 0x35
    found = b""
    for rotated in (True, False):
        out = [np.empty((1, 128, 128), np.float32) for _ in range(2)]
        materialize(driver, MaterializeCall(layer, held, np.zeros(1, np.int32), *out, rotated))
        found += b"".join(a.tobytes() for a in out)
    return found


def unfit(driver: EmulatorDriver) -> bytes:
    x = np.ones((40, 1, 64), np.float32)
    x[31, 0, 9] = 3e4
    y = np.full((4, 1, 64), 6e4, np.float32)
    found = [first_unfit(driver, [a], [Stored.ROTATED]) for a in (x, y)]
    return repr(found).encode()


def attended(*case_ids: str, mma: bool = False) -> Callable[[EmulatorDriver], bytes]:
    """Attention of parity cases; recorded when it is first asked for."""
    return lambda driver: replay(*case_ids, mma=mma)(driver)


# In a prefill: blocks that see nothing of some of their keys.
WINDOWS = "window/k4v4/d64/h4x2/kv1000/q200/w400", "window/k4v4/d64/h4x2/kv1000/q200/w60"
SEVERAL_SLICES = "decode/k2v8/d256/h4x2/kv450/q2"
RUNS: dict[str, Callable[[EmulatorDriver], bytes]] = {
    "turn": decoded,
    "stage": seal("published"),
    "balance": seal("published"),
    "seal": seal("published"),
    "axes": seal("aware"),
    "moments": seal("aware"),
    "feedback": seal("aware"),
    "elements": tiles,
    "rows": tiles,
    "tail": ring,
    "materialize": decoded,
    "check": unfit,
    "overflow": unfit,
    "attend": attended(*WINDOWS, SEVERAL_SLICES),
    "attend_mma": attended(*WINDOWS, SEVERAL_SLICES, mma=True),
    "softmax": attended(SEVERAL_SLICES),
    "records": attended(SEVERAL_SLICES),
    "tiles": attended("standard/q8_0-q4_0/d64/h4x2/kv257/q17/length"),
    "partial": attended("decode/k4v4/d64/h4x2/kv300/q1"),
    "rotate": attended(SEVERAL_SLICES),  # queries and merged results
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("driver")
def test_every_barrier_is_needed(name: str) -> None:
    assert survivors(name, RUNS[name]) == []


def test_how_many_there_are() -> None:
    """So that a source whose barriers are spelled otherwise does not pass for one without."""
    counted = {name: len(barriers(name)) for name in SOURCES}
    assert {name for name, n in counted.items() if n} <= RUNS.keys()
    assert counted["balance"] >= 6
    assert counted["feedback"] >= 6
    assert counted["attend"] >= 6


@pytest.mark.usefixtures("driver")
def test_a_barrier_too_many_is_found() -> None:
    line = barriers("seal")[-1]
    lines = program.part("seal.inc").splitlines()
    lines.insert(line, lines[line - 1])
    with source("seal", "\n".join(lines) + "\n"):
        assert survivors("seal", seal("published")) == [line, line + 1]

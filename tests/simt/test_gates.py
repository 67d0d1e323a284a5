"""What compiled kernels take: the tables' reader, the limits, and real compilers without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gates
import toolchains
from gates import QUICK, Row
from toolchains import Resources, Toolchain

CI = os.environ.get("CI") == "true"
_QUICK_PROGRAMS = "attend/d128/r[14]/k4v4"
_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_61'
ptxas info    : Function properties for attend
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 51 registers, used 1 barriers, 4160 bytes smem, 408 bytes cmem[0]
ptxas info    : Compiling entry function 'merge' for 'sm_61'
ptxas info    : Function properties for merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, 408 bytes cmem[0]
"""


def chains(kind: str) -> list[Toolchain]:
    found = [chain for chain in toolchains.toolchains() if chain.kind == kind]
    if not found:
        text = f"no {kind} here: ./test says how to get it"
        if CI:
            pytest.fail(text)
        pytest.skip(text)
    return found


def test_what_ptxas_says_is_read_kernel_by_kernel() -> None:
    assert toolchains.cuda_resources(_LOG) == {
        "attend": Resources(registers=51, stack=16, spill=20, shared=4160),
        "merge": Resources(registers=20, stack=0, spill=0, shared=0),
    }


def test_metadata_is_found_and_read_in_all_its_forms() -> None:
    kernel = {".name": "k" * 40, ".vgpr_count": 300, ".vgpr_spill_count": 2, ".wide": True}
    kernel[".sgpr_spill_count"] = 9
    kernel |= {".private_segment_fixed_size": 70000, ".group_segment_fixed_size": 5, ".none": None}
    packed = _pack({"amdhsa.kernels": [kernel], "amdhsa.version": [1, -1]})
    header = (7).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    note = header + (32).to_bytes(4, "little") + b"AMDGPU\0\0" + packed
    other = header + (10).to_bytes(4, "little") + b"AMDGPU\0\0"
    assert toolchains.hip_resources(b"\x7fELF AMDGPU\0" + other + note + b"rest") == {
        "k" * 40: Resources(registers=300, stack=70000, spill=8, shared=5)
    }


def _pack(value: object) -> bytes:
    if isinstance(value, bool) or value is None:
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        if -32 <= value < 128:
            return (value & 0xFF).to_bytes(1, "big")
        tag, size = (b"\xcd", 2) if value < 65536 else (b"\xce", 4)
        return tag + value.to_bytes(size, "big")
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 + len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw
    if isinstance(value, list):
        return bytes([0x90 + len(value)]) + b"".join(_pack(item) for item in value)
    assert isinstance(value, dict)
    pairs = b"".join(_pack(k) + _pack(v) for k, v in value.items())
    return bytes([0x80 + len(value)]) + pairs


def _row(name: str, registers: int = 40, spill: int = 0, shared: int = 0) -> Row:
    return (name, "attend", "sm_90", "nvrtc 13.5", str(registers), "0", str(spill), str(shared))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (_row("attend/d256/r4/k4v4", spill=4), "spills 4 bytes"),
        (_row("seal", spill=4), "spills 4 bytes"),
        (_row("attend/d512/r4/k4v4", spill=4), ""),
        (_row("attend/d64/r1/k4v4", shared=32769), "takes 32769 bytes of shared memory"),
        (_row("attend/d64/r1/k4v4", shared=32768), ""),
        (_row("attend/d64/r1/k4v4", registers=48), ""),
        (_row("attend/d64/r1/k4v4", registers=49), "takes 49 registers, the table has 40"),
        (_row("attend/d64/r9/k4v4", registers=255), ""),  # not in the table
    ],
)
def test_the_limits(row: Row, said: str) -> None:
    names = ("attend/d64/r1/k4v4", "attend/d256/r4/k4v4", "seal")
    table = {_row(name)[:4]: _row(name) for name in names}
    found = gates.problems([row], table)
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_the_table_is_whole_and_in_order(tmp_path: Path) -> None:
    table = gates.read_table()
    gates.write_table(reversed(table.values()), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == gates.TABLE.read_bytes()
    assert {row[0] for row in table.values()} == {*gates.first_rank(), *gates.second_rank()}


@pytest.mark.parametrize("kind", ["nvrtc", "hiprtc"])
def test_kernels_compile_within_their_limits(kind: str) -> None:
    rows, failures = gates.measure(chains(kind), ",".join(QUICK), _QUICK_PROGRAMS, 1)
    assert failures + gates.problems(rows, gates.read_table()) == []
    assert {row[2] for row in rows} == {
        t for t in QUICK if t.startswith("sm_") is (kind == "nvrtc")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvrtc", "hiprtc", "hipcc"])
def test_every_program_on_every_target(kind: str) -> None:
    rows, failures = gates.measure(chains(kind), "*", "*", os.cpu_count() or 1)
    assert failures + gates.problems(rows, gates.read_table()) == []
    assert rows


def test_a_compiler_that_ends_its_process_or_fails_is_said() -> None:
    chain = Toolchain("nvrtc", "nvrtc 0.0", "libnvrtc-that-is-not-there.so", ("sm_90",))
    found = toolchains.compile_all(chain, [("a", "sm_90", "")])
    assert "the compiler ended its process" in str(found["a", "sm_90"])
    for real in chains("nvrtc"):
        found = toolchains.compile_all(real, [("a", real.targets[-1], "no C++ at all")])
        assert "NvrtcFailed: NVRTC_ERROR_COMPILATION" in str(found["a", real.targets[-1]])

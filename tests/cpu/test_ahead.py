"""Kernels shipped as LLVM IR: fresh, self-contained, equal to what Numba compiles,
and never in the way.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from zipfile import ZipFile

import numpy as np
import pytest
from llvmlite.binding import llvm_version_info
from numpy.testing import assert_array_equal

from kvkernels import objects
from kvkernels.cpu.ahead import runtime
from kvkernels.cpu.ahead.signatures import SIGNATURES, dot_name, matrix_name
from kvkernels.cpu.columns import ROW_BLOCKS
from kvkernels.cpu.features import missing
from kvkernels.cpu.kernels import rotate
from kvkernels.cpu.probe import probe_cpu
from kvkernels.records.layout import BITS

SHIPPED = ("avx512_vnni", "avx2")
FEATURES = probe_cpu().features
HERE = [isa for isa in SHIPPED if not missing(isa, FEATURES)]


@pytest.mark.parametrize("isa", SHIPPED)
def test_every_bundle_is_of_the_present_sources_and_complete(isa):
    found = runtime.bundle(isa)
    assert found is not None, "run tools/ahead.py"
    names = {dot_name(b, r, m) for b in BITS for r in ROW_BLOCKS for m in ("i8", "i16")}
    names |= {matrix_name(r, k) for r in ROW_BLOCKS for k in range(3)}
    assert set(found.manifest["kernels"]) == names | set(SIGNATURES)


def test_an_instruction_set_without_a_bundle_and_a_stale_one_fall_back(monkeypatch):
    assert runtime.bundle("generic") is None
    assert runtime.kernel("generic", "merge.merge", lambda: "numba") == "numba"
    assert runtime.address("generic", "dot_4_4_i16", lambda: 17) == 17
    runtime.bundle.cache_clear()
    monkeypatch.setattr(runtime, "source_stamp", lambda: "other sources")
    try:
        assert all(runtime.bundle(isa) is None for isa in SHIPPED)
    finally:
        runtime.bundle.cache_clear()


def test_a_damaged_bundle_falls_back():
    with pytest.raises(runtime.BadZipFile):
        runtime.Bundle(b"not a zip file")


@pytest.mark.parametrize("isa", HERE)
def test_a_shipped_kernel_computes_what_numba_does(isa):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 256)).astype(np.float32)
    shipped = runtime.kernel(isa, "rotate.rotate_rows", lambda: None)
    if llvm_version_info[0] < 16:  # cannot read the IR: then Numba's function is what one gets
        assert shipped is None
        return
    assert isinstance(shipped, runtime.AheadKernel)
    want, got = np.empty_like(x), np.empty_like(x)
    rotate.rotate_rows(x, want)
    shipped(x, got)
    assert_array_equal(got, want)
    # a result, and memory from the runtime of the bundle
    top = runtime.kernel(isa, "rotate.largest_bits", lambda: None)
    parts = x.reshape(-1), -2 * x.reshape(-1), x[0]
    assert top(*parts) == rotate.largest_bits(*parts) == np.abs(2 * x).max().view(np.uint32)
    half_want, half_got = np.empty(x.shape, np.uint16), np.empty(x.shape, np.uint16)
    rotate.rotate_rows_to_half(x, half_want)
    runtime.kernel(isa, "rotate.rotate_rows_to_half", lambda: None)(x, half_got)
    assert_array_equal(half_got, half_want)
    frozen = x.copy()
    frozen.flags.writeable = False
    shipped(frozen, got)
    assert_array_equal(got, want)
    with pytest.raises(AssertionError):
        shipped(x[:, ::2], got[:, :128])  # strides are not passed on


_STEP = """
import sys, numpy as np, kvkernels as kvk
from kvkernels import objects
from kvkernels.cpu.ahead import runtime
if sys.argv[1] == "numba":
    runtime.bundle.__wrapped__  # the real one exists
    runtime.bundle = lambda isa: None
device = kvk.open_device("cpu:0")
spec = kvk.LayerSpec(
    n_head=6, n_kv_head=2, head_dim=128, k="kvarn5", v="kvarn3", softcap=20.0, encoder="published"
)
cache = kvk.plan([spec], device, kvk.Limits(n_ctx=1024)).allocate()
rng = np.random.default_rng(3)
for n in (400, 1, 3):
    q = rng.normal(size=(n, 6, 128)).astype("f4")
    k, v = rng.normal(size=(2, n, 2, 128)).astype("f4")
    with cache.step({0: n}) as step:
        out = step.attend(0, q, k, v)
    sys.stdout.buffer.write(out.tobytes())
"""


@pytest.mark.parametrize("isa", HERE)
def test_a_whole_step_agrees_between_bundle_and_numba(isa):
    env = {**os.environ, "KVK_CPU_ISA": isa}
    found = []
    for how in ("bundle", "numba"):
        done = subprocess.run([sys.executable, "-c", _STEP, how], env=env, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        found.append(np.frombuffer(done.stdout, np.float32))
    # Contraction of a * b + c is the code generator's choice, so bits may differ in the last place.
    assert np.abs(found[0] - found[1]).max() <= 1e-5 * np.abs(found[1]).max()


def test_no_bundle_asks_for_more_than_the_c_library():
    for isa in SHIPPED:
        path = runtime.resources.files("kvkernels.cpu.ahead") / f"{isa}.zip"
        with path.open("rb") as file, ZipFile(file) as bundle:
            for name in bundle.namelist():
                if not name.endswith(".ll"):
                    continue
                text = bundle.read(name).decode()
                outside = set(re.findall(r"^declare .*?@([\w.]+)\(", text, re.MULTILINE))
                outside = {n for n in outside if not n.startswith("llvm.")}
                assert outside <= {
                    "NRT_MemInfo_alloc_aligned", "NRT_MemInfo_call_dtor", "NRT_Free", "logf",
                    "log", "exp", "memset", "memcpy", "memmove",
                }, name  # fmt: skip


def test_a_step_with_shipped_kernels_imports_no_numba():
    code = (
        _STEP.replace("    sys.stdout.buffer.write(out.tobytes())", "")
        + "\nprint('numba' in sys.modules)"
    )
    for isa in HERE:
        env = {**os.environ, "KVK_CPU_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", code, "bundle"], env=env, capture_output=True, text=True
        )
        expected = str(llvm_version_info[0] < 16)
        assert done.stdout.strip() == expected, done.stdout + done.stderr


# --- machine code kept between processes


def _fresh(isa):
    """A bundle that has compiled nothing yet."""
    data = (runtime.resources.files("kvkernels.cpu.ahead") / f"{isa}.zip").read_bytes()
    return runtime.Bundle(data)


def _largest(found):
    kernel = runtime.AheadKernel("rotate.largest_bits", found.address("rotate.largest_bits"))
    return kernel(*(np.array([x, -x, 0], np.float32) for x in (1, 3, 2)))


_WANT = int(np.float32(3.0).view(np.uint32))
needs_ir = pytest.mark.skipif(llvm_version_info[0] < 16, reason="this LLVM cannot read the IR")


@pytest.fixture
def code_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("KVK_CACHE_DIR", str(tmp_path / "code"))
    return tmp_path / "code"


@needs_ir
@pytest.mark.parametrize("isa", HERE)
def test_kept_machine_code_is_used_instead_of_generating_it(isa, code_dir, monkeypatch):
    assert _largest(_fresh(isa)) == _WANT
    assert len(list(code_dir.iterdir())) == 1
    again = _fresh(isa)
    monkeypatch.setattr(again._zip, "read", lambda _: pytest.fail("the IR was read again"))
    assert _largest(again) == _WANT


@needs_ir
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "writable", "folder"])
def test_damaged_or_foreign_machine_code_counts_as_absent(damage, code_dir):
    assert _largest(_fresh(HERE[0])) == _WANT
    (file,) = code_dir.iterdir()
    good = file.read_bytes()
    if damage == "cut":
        file.write_bytes(good[:-1])
    elif damage == "flipped":
        file.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "writable":
        file.chmod(0o666)
    else:
        file.unlink()
        file.mkdir()
    assert objects.load(file.name) is None
    assert _largest(_fresh(HERE[0])) == _WANT
    if damage != "folder":  # made good again
        assert file.read_bytes() == good
        assert objects.load(file.name) is not None
    assert [f.name for f in code_dir.iterdir()] == [file.name], "no half-written file is left"


@needs_ir
@pytest.mark.parametrize("where", ["off", "/proc/none/here"])
def test_machine_code_is_not_kept_where_that_is_off_or_impossible(where, monkeypatch):
    monkeypatch.setenv("KVK_CACHE_DIR", where)
    assert _largest(_fresh(HERE[0])) == _WANT


@needs_ir
def test_kept_machine_code_is_told_apart_by_instruction_set_sources_and_compiler(code_dir):
    parts = ("stamp", "kernel", "cpu", "features", "triple", "22.1.0")
    names = {
        objects.file_name(*(p + "x" * (i == j) for i, p in enumerate(parts))) for j in range(7)
    }
    assert len(names) == 7
    for isa in HERE:
        _fresh(isa).address("merge.merge")
    assert len(list(code_dir.iterdir())) == len(HERE)

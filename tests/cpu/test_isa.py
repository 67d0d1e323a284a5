"""Choosing an instruction set, forcing one, and code for CPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

import kvkernels as kvk
from kvkernels.capabilities import Feature
from kvkernels.cpu.backend import CpuBackend
from kvkernels.cpu.features import ISAS, best, missing
from kvkernels.cpu.kernels.isa import EMITTERS
from kvkernels.cpu.kernels.simd import I32, I32V
from kvkernels.cpu.probe import probe_cpu
from kvkernels.errors import BackendUnavailable

ON, OFF = Feature(True, True), Feature(True, False)


def test_the_best_instruction_set_needs_its_features_enabled():
    assert best({}) == "generic"
    assert best({"avx2": ON}) == "avx2"
    assert best({"avx2": OFF}) == "generic"
    assert best({"avx2": ON, "avx512f": ON, "avx512bw": ON, "avx512_vnni": ON}) == "avx512_vnni"
    assert best({"avx2": ON, "avx512f": ON, "avx512bw": ON}) == "avx2"
    assert best({"dotprod": ON}) == "neon_dot"
    assert set(ISAS) == set(EMITTERS)


def test_a_forced_instruction_set_the_cpu_lacks_is_refused(monkeypatch):
    features = probe_cpu().features
    lacking = [isa for isa in ISAS if missing(isa, features)]
    assert lacking, "no CPU has both AVX and NEON"
    monkeypatch.setenv("KVK_CPU_ISA", lacking[0])
    assert CpuBackend().probe().state == "unavailable"
    with pytest.raises(BackendUnavailable, match="does not have enabled"):
        kvk.open_device("cpu:0")
    monkeypatch.setenv("KVK_CPU_ISA", "avx")
    with pytest.raises(BackendUnavailable, match=r"not one of .*did you mean 'avx2'"):
        kvk.open_device("cpu:0")


def test_a_forced_instruction_set_is_shown_and_used(monkeypatch):
    monkeypatch.setenv("KVK_CPU_ISA", "generic")
    device = kvk.open_device("cpu:0")
    assert device.caps.facts["isa"] == "generic"
    assert device.isa == "generic"


@pytest.mark.parametrize(
    ("isa", "triple", "cpu", "features", "instruction"),
    [
        ("neon_dot", "aarch64-linux-gnu", "neoverse-n1", "", "sdot"),
        ("avx512_vnni", "x86_64-linux-gnu", "icelake-server", "", "vpdpbusd"),
        ("avx_vnni", "x86_64-linux-gnu", "alderlake", "", "vpdpbusd"),
        ("avx2", "x86_64-linux-gnu", "haswell", "", "vpmaddubsw"),
    ],
)
def test_code_for_other_cpus_is_the_instruction_meant(isa, triple, cpu, features, instruction):
    """Compiled only: nothing here ran on such a CPU."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    kind = ir.FunctionType(I32V, [I32V, I32V, I32])
    function = ir.Function(module, kind, "f")
    builder = ir.IRBuilder(function.append_basic_block())
    total, codes, act = function.args
    emitter = EMITTERS[isa]
    running = emitter.add(builder, emitter.zero(), codes, act)
    builder.ret(builder.add(total, emitter.finish(builder, running)))
    module.triple = triple
    target = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    assembly = target.emit_assembly(llvm.parse_assembly(str(module)))
    assert instruction in assembly


HERE = [isa for isa in ISAS if not missing(isa, probe_cpu().features)]


@pytest.mark.parametrize("isa", HERE)
def test_parity_holds_with_every_instruction_set_of_this_cpu(isa):
    command = [sys.executable, "-m", "kvkernels", "parity", "--quick", "--json"]
    env = {**os.environ, "KVK_CPU_ISA": isa}
    for pattern in ("window*", "softcap*", "decode/k*d256*"):
        done = subprocess.run(
            [*command, "--filter", pattern], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert '"outcome": "ok"' in done.stdout

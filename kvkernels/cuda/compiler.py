"""NVRTC through CuPy's low-level interface, which needs no card: sources to machine code."""

from __future__ import annotations

from typing import Any

from kvkernels.simt.compiling import broken, compiled, uncompiled
from kvkernels.simt.probing import text_of
from kvkernels.simt.program import Program

#: results are the same on every card: no contraction, and no fast mathematics
OPTIONS = ("--std=c++17", "--fmad=false")
_INSTALL = "pip install 'kvkernels[cuda12]' or 'kvkernels[cuda13]', which brings the compiler"


class Nvrtc:
    """Compiles for ``arch`` as ``arch.target`` names it: ``sm_90``, or ``compute_90`` for PTX.

    Raises BackendUnavailable when there is no NVRTC, CompileError when it fails.
    """

    def __init__(self, cupy: Any, arch: str) -> None:
        try:
            self._nvrtc: Any = cupy.cuda.nvrtc
            major, minor = self._nvrtc.getVersion()
        except Exception as error:
            broken("cuda", f"CuPy finds no NVRTC: {text_of(error)}", _INSTALL)
        self.arch, self.version = arch, f"{major}.{minor}"
        self.options = (*OPTIONS, f"--gpu-architecture={arch}")

    def code(self, program: Program) -> bytes:
        """A cubin, or PTX; kept on disk between processes."""
        return compiled(
            program, "cuda", self.options, f"nvrtc {self.version}", lambda: self._make(program)
        )

    def _make(self, program: Program) -> bytes:
        nvrtc = self._nvrtc
        handle = nvrtc.createProgram(program.source("cuda"), "kvk.cu", (), ())
        try:
            nvrtc.compileProgram(handle, self.options)
            if self.arch.startswith("compute_"):
                ptx = nvrtc.getPTX(handle)
                return ptx.encode() if isinstance(ptx, str) else bytes(ptx)
            # CuPy 14.2 returns the cubin without its last byte, which is 0: one more does no harm.
            return bytes(nvrtc.getCUBIN(handle)) + b"\0"
        except Exception as error:
            name = f"NVRTC {self.version}"
            uncompiled(program, name, self.arch, text_of(error), _log(nvrtc, handle))
        finally:
            nvrtc.destroyProgram(handle)


def _log(nvrtc: Any, handle: Any) -> str:
    try:
        return str(nvrtc.getProgramLog(handle))
    except Exception:
        return ""

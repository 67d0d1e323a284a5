"""hiprtc: sources to code objects."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_void_p
from typing import Any

from kvkernels.hip.functions import COMPILER, Functions, at, strings
from kvkernels.simt.compiling import compiled, uncompiled
from kvkernels.simt.program import Program

#: results are the same on every card: no contraction, and no fast mathematics
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")


class Hiprtc:
    """Compiles for a gfx number without its flags: code for ``gfx90a`` runs with xnack and sramecc
    on or off, so one kept code object serves every setting, and every hiprtc takes the name.
    """

    def __init__(self, library: Any, gfx: str, version: str) -> None:
        self._call = Functions(library, COMPILER, "hiprtcGetErrorString")
        self.gfx, self.version = gfx, version
        self.options = (*OPTIONS, f"--offload-arch={gfx}")

    def code(self, program: Program) -> bytes:
        """A code object; kept on disk between processes. Raises CompileError."""
        return compiled(
            program, "hip", self.options, f"hiprtc {self.version}", lambda: self._make(program)
        )

    def _make(self, program: Program) -> bytes:
        call, handle = self._call, c_void_p()
        source = program.source("hip").encode()
        status = call.status("hiprtcCreateProgram", at(handle), source, b"kvk.hip", 0, None, None)
        if not status:
            options = strings(*self.options)
            status = call.status("hiprtcCompileProgram", handle, len(options), options)
        code = b""
        if not status:
            status, code = self._result("Code", handle)
        if status:
            log = self._result("ProgramLog", handle)[1] if handle else b""
            words = log.rstrip(b"\0").decode("utf-8", "replace")
            name = f"hiprtc {self.version}"
            uncompiled(program, name, self.gfx, call.text(status), words)
        call.status("hiprtcDestroyProgram", at(handle))
        return code

    def _result(self, what: str, handle: c_void_p) -> tuple[int, bytes]:
        size = c_size_t()
        status = self._call.status(f"hiprtcGet{what}Size", handle, at(size))
        if status or not size.value:
            return status, b""
        buffer = ctypes.create_string_buffer(size.value)
        return self._call.status(f"hiprtcGet{what}", handle, buffer), buffer.raw

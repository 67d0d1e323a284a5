"""The C functions of the HIP runtime and of hiprtc with their types, and their errors as ours."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NoReturn

from kvkernels.errors import DeviceLost
from kvkernels.simt.compiling import broken

_POINTER = POINTER(c_void_p)
_STRINGS = POINTER(c_char_p)
RUNTIME: dict[str, tuple[Any, ...]] = {
    "hipSetDevice": (c_int,),
    "hipMalloc": (_POINTER, c_size_t),
    "hipFree": (c_void_p,),
    "hipMemcpy": (c_void_p, c_void_p, c_size_t, c_int),
    "hipMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "hipMemGetInfo": (POINTER(c_size_t), POINTER(c_size_t)),
    "hipPointerGetAttributes": (c_void_p, c_void_p),
    "hipStreamSynchronize": (c_void_p,),
    "hipDeviceSynchronize": (),
    "hipModuleLoadData": (_POINTER, c_void_p),
    "hipModuleGetFunction": (_POINTER, c_void_p, c_char_p),
    "hipModuleLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, _POINTER, _POINTER),
}
COMPILER: dict[str, tuple[Any, ...]] = {
    "hiprtcCreateProgram": (_POINTER, c_char_p, c_char_p, c_int, _STRINGS, _STRINGS),
    "hiprtcCompileProgram": (c_void_p, c_int, _STRINGS),
    "hiprtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "hiprtcGetProgramLog": (c_void_p, c_char_p),
    "hiprtcGetCodeSize": (c_void_p, POINTER(c_size_t)),
    "hiprtcGetCode": (c_void_p, c_char_p),
    "hiprtcDestroyProgram": (_POINTER,),
}
OUT_OF_MEMORY, NO_BINARY = 2, 209
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # hipMemcpyKind


class Functions:
    """The functions of one library; every one returns a status. Raises BackendUnavailable when one
    is missing.
    """

    def __init__(self, library: Any, types: dict[str, tuple[Any, ...]], texts: str) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in types.items():
            function = getattr(library, name, None)
            if function is None:
                broken("hip", f"the HIP library lacks {name}", "Install ROCm 5, 6 or 7")
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._text = getattr(library, texts, None)
        if self._text is not None:
            self._text.argtypes, self._text.restype = (c_int,), c_char_p

    def status(self, name: str, *args: Any) -> int:
        """Call it; 0 is success."""
        return int(self._functions[name](*args))

    def text(self, status: int) -> str:
        """What the library says of a status."""
        said = self._text(status) if self._text is not None else None
        return f"{said.decode('utf-8', 'replace') if said else 'no text'} ({status})"

    def must(self, what: str, name: str, *args: Any) -> None:
        """Call it; a failure raises DeviceLost that says ``what`` was being done."""
        status = self.status(name, *args)
        if status:
            self.lost(what, name, status)

    def lost(self, what: str, name: str, status: int) -> NoReturn:
        """Raise DeviceLost: ``name`` failed with ``status``."""
        raise DeviceLost(
            f"{what}: {name}: {self.text(status)}. Caches on this card cannot be trusted any more; "
            "start a new process. HIP_LAUNCH_BLOCKING=1 shows which launch failed"
        )


def strings(*texts: str) -> Any:
    """A C array of C strings."""
    return (c_char_p * len(texts))(*(text.encode() for text in texts))


def at(variable: Any) -> Any:
    """The address of a variable for a result."""
    return ctypes.byref(variable)

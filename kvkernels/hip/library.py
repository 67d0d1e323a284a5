"""Finding the HIP runtime and its compiler, libraries of an installed ROCm, by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: newest first; with older ones the numbers of device attributes are others
RUNTIME = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
COMPILER = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5")


@dataclass(frozen=True, slots=True)
class Libraries:
    """Where the libraries are: sonames or paths, tried in order. Tests name their own.

    ``load`` opens one and raises OSError when it cannot.
    """

    runtime: Sequence[str] = RUNTIME
    compiler: Sequence[str] = COMPILER
    load: Callable[[str], Any] = ctypes.CDLL

    def open_runtime(self) -> tuple[Any, str]:
        """The first runtime that loads, and its name. Raises OSError with what the loader said of
        each.
        """
        said = []
        for name in self.runtime:
            try:
                return self.load(name), name
            except OSError as error:
                said.append(str(error) or name)
        raise OSError("; ".join(said))

    def open_compiler(self, runtime: Any, name: str) -> Any | None:
        """The compiler that goes with a runtime of that name, or None.

        Older runtimes have its functions themselves. A library of its own must have the soname
        version of the runtime: compilers do not tell theirs (hiprtcVersion is 9.0 in all), so that
        the runtime's stands for both.
        """
        if has(runtime, "hiprtcCompileProgram"):
            return runtime
        release = _soname_version(name)
        for candidate in self.compiler:
            if release is not None and _soname_version(candidate) not in (release, None):
                continue
            try:
                return self.load(candidate)
            except OSError:
                continue
        return None


def _soname_version(name: str) -> str | None:
    """``6`` of ``libamdhip64.so.6``; None of a path that ends otherwise."""
    stem, _, last = name.rpartition(".so.")
    return last.partition(".")[0] if stem and last else None


def has(library: Any, name: str) -> bool:
    """Whether ``library`` exports ``name``."""
    return getattr(library, name, None) is not None


def call(library: Any, name: str, *args: Any) -> int:
    """The status of a call, 0 when it worked; -1 where the library has no such function."""
    return int(getattr(library, name)(*args)) if has(library, name) else -1


def error_text(runtime: Any, code: int) -> str:
    """What the runtime calls an error: ``hipErrorNoDevice (100)``."""
    if not has(runtime, "hipGetErrorName"):
        return f"HIP error {code}"
    function = runtime.hipGetErrorName
    function.restype = ctypes.c_char_p
    name = function(code)
    return f"{name.decode('utf-8', 'replace') if name else 'HIP error'} ({code})"

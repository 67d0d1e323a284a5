"""Compiles kernel sources and the emulator's runtime with the machine's C++ compiler.

Results are kept in ``KVK_CACHE_DIR`` under the hash of source, options and compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

from kvkernels.backend import BackendStatus
from kvkernels.errors import BackendUnavailable
from kvkernels.settings import settings

_COMMON = ("-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
#: ways to build kernels: plain, and with a sanitizer (those only in a process that preloads its
#: runtime)
MODES = {
    "plain": ("-O2",),
    "asan": ("-O1", "-g", "-fsanitize=address", "-DKVK_PLAIN_SHARED"),
    "tsan": ("-O1", "-g", "-fsanitize=thread"),
    "ucontext": ("-O2", "-DKVK_UCONTEXT"),
}
#: the emulator itself is never instrumented: it tells a sanitizer what to know of fibers
RUNTIME_MODES = MODES | {"asan": ("-O2", "-g", "-DKVK_ASAN"), "tsan": ("-O2", "-g", "-DKVK_TSAN")}
HINT = "Install a C++ compiler (apt-get install g++), or name one in CXX"


@cache
def compiler() -> str | None:
    """The C++ compiler: ``CXX``, else g++, else clang++; None when there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


@cache
def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


@cache
def _folder() -> Path:
    kept = settings().cache_dir
    if kept is None:
        return Path(tempfile.mkdtemp(prefix="kvk-emulator-"))
    folder = Path(kept) / "emulator"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def options(mode: str) -> tuple[str, ...]:
    """Compiler options for kernels in a mode."""
    return (*_COMMON, *MODES[mode])


def runtime_options(mode: str) -> tuple[str, ...]:
    """Compiler options for the emulator itself."""
    return (*_COMMON, *RUNTIME_MODES[mode])


def build(source: str, name: str, flags: tuple[str, ...]) -> Path:
    """The shared library of a source, compiled when it is not there yet; ``name`` stands for it.

    Raises BackendUnavailable without a compiler, RuntimeError with the compiler's words.
    """
    cxx = compiler()
    if cxx is None:
        raise BackendUnavailable(BackendStatus("simt", "unavailable", "no C++ compiler", HINT))
    target = _folder() / f"{name}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_folder()) as work:
        text, result = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
        text.write_text(source, encoding="utf-8")
        command = [cxx, *flags, "-fno-gnu-unique", str(text), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        # A reader sees all of it or nothing, also when two processes build the same.
        os.replace(result, target)
    return target


def runtime_source() -> str:
    """The emulator itself."""
    return (files("kvkernels.simt") / "emulator" / "runtime.cpp").read_text(encoding="utf-8")


def compiler_version() -> str:
    """The compiler's first line of ``--version``, or nothing without one."""
    found = compiler()
    return _version(found) if found else ""

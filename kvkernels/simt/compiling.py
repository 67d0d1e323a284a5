"""Machine code of programs for one device: from the folder of ``KVK_CACHE_DIR``, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kvkernels import objects
from kvkernels.backend import BackendStatus
from kvkernels.errors import BackendUnavailable, CompileError, OutOfDeviceMemory
from kvkernels.simt.program import Program

#: of a compiler's log, in an error message
_LOG = 4000


def compiled(
    program: Program,
    target: str,
    options: tuple[str, ...],
    compiler: str,
    make: Callable[[], bytes],
) -> bytes:
    """The machine code of ``program`` for ``target`` under ``options`` (the architecture among
    them) by ``compiler`` (its name and version); ``make`` compiles when none is kept yet.
    """
    name = objects.file_name(program.digest(target, *options), compiler)
    code = objects.load(name)
    if code is None:
        code = make()
        objects.store(name, code)
    return code


def broken(backend: str, text: str, hint: str) -> NoReturn:
    """Raise BackendUnavailable: a part of ``backend`` does not do what the probe promised."""
    raise BackendUnavailable(BackendStatus(backend, "broken", text, hint)) from None


def uncompiled(program: Program, compiler: str, arch: str, said: str, log: str) -> NoReturn:
    """Raise CompileError: which compiler failed for what, and its words."""
    names = ", ".join(name for name, _ in program.kernels)
    raise CompileError(
        f"{names} did not compile for {arch} with {compiler}: {said}\n{log.strip()[:_LOG]}\n"
        "Another version of the compiler may do; report this with the output of `kvk probe`"
    ) from None


def no_room(what: str, nbytes: int, free: int | None, total: int | None) -> NoReturn:
    """Raise OutOfDeviceMemory: what was asked for, what there is, what helps."""
    there = "" if free is None or total is None else f"; {_gib(free)} of {_gib(total)} are free"
    raise OutOfDeviceMemory(
        f"{what}: {nbytes} bytes ({_gib(nbytes)}) were asked for{there}. Plan with a smaller "
        "n_ctx, fewer sequences, a smaller n_ubatch or fewer bits per value, or free device memory"
    ) from None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"

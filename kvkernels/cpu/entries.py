"""The compiled functions of an instruction set: from its bundle where there is one, else from
Numba.

Importing this module imports no Numba; a function that is not in a bundle does, when it is first
asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from kvkernels.cpu.ahead import runtime
from kvkernels.cpu.ahead.signatures import dot_name, matrix_name

# Numba's functions live as long as their addresses are used: for ever.
_compiled: list[Any] = []


def _kernels(module: str) -> Any:
    return import_module(f"kvkernels.cpu.kernels.{module}")


@cache
def compiled(isa: str, name: str) -> Any:
    """Kernel ``<module>.<function>`` of ``cpu/kernels`` for that instruction set."""
    module, function = name.split(".")
    return runtime.kernel(isa, name, lambda: getattr(_kernels(module), function))


@cache
def dot_address(bits: int, rows: int, mode: str, isa: str) -> int:
    """Address of a micro-kernel of ``kernels/dot.py``."""

    def with_numba() -> int:
        _compiled.append(_kernels("dot").dot_kernel(bits, rows, mode, isa))
        return int(_compiled[-1].address)

    return runtime.address(isa, dot_name(bits, rows, mode), with_numba)


@cache
def matrix_address(rows: int, kind: int, isa: str) -> int:
    """Address of a micro-kernel of ``kernels/matrix.py``; ``kind``: index in its ``KINDS``."""

    def with_numba() -> int:
        _compiled.append(_kernels("matrix").matrix_kernel(rows, kind))
        return int(_compiled[-1].address)

    return runtime.address(isa, matrix_name(rows, kind), with_numba)

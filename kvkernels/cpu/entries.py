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


@cache
def compiled(isa: str, name: str) -> Any:
    """Kernel ``<module>.<function>`` of ``cpu/kernels`` for that instruction set."""

    def with_numba() -> Any:
        module, function = name.split(".")
        return getattr(import_module(f"kvkernels.cpu.kernels.{module}"), function)

    return runtime.kernel(isa, name, with_numba)

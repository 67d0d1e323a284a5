"""Kernel sources put together: a target's prelude, the constants of one specialisation, the parts.

Sources are the files in ``sources/``. Nothing here compiles; the text is the same on any machine,
so its hash names what was compiled from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvkernels.errors import InputError

TARGETS = ("cuda", "hip", "opencl", "host")


@dataclass(frozen=True, slots=True)
class Program:
    """One translation unit: source ``parts`` by name, in order, under ``defines`` (name, value);
    ``kernels`` in it, and their threads per block. ``{target}`` in the name of a part stands for
    the target.
    """

    parts: tuple[str, ...]
    defines: tuple[tuple[str, int], ...]
    kernels: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, parts: tuple[str, ...], kernels: Mapping[str, int], **defines: int) -> Program:
        """A program from keywords; equal ones compare and hash equal."""
        return cls(parts, tuple(sorted(defines.items())), tuple(kernels.items()))

    def source(self, target: str) -> str:
        """The text to compile for ``target``. Raises InputError for an unknown one."""
        if target not in TARGETS:
            raise InputError("target", found=repr(target), needed=f"one of {', '.join(TARGETS)}")
        constants = "".join(f"#define {name} {value}\n" for name, value in self.defines)
        text = [part(f"prelude_{target}.h"), constants]
        names = [name.format(target=target) for name in self.parts]
        text += [f'#line 1 "{name}.inc"\n{part(f"{name}.inc")}' for name in names]
        if target == "host":
            text += [f"ENTRY({name})" for name, _ in self.kernels]
        return "\n".join(text) + "\n"

    def threads(self, kernel: str) -> int:
        """Threads of one block of ``kernel``."""
        return dict(self.kernels)[kernel]

    def digest(self, target: str, *more: str) -> str:
        """A name for what is compiled from this source with ``more`` (options, versions)."""
        text = "\0".join((self.source(target), *more))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def part(name: str) -> str:
    """The text of one file in ``sources/``."""
    return (files("kvkernels.simt") / "sources" / name).read_text(encoding="utf-8")

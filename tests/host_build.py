"""Stands in for NVRTC and hiprtc: the very source that they would get, built for the emulator.

As a script: ``host_build.py TARGET SOURCE RESULT``; exit status 1 with the compiler's words.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from kvkernels.simt.emulator.build import build, options
from kvkernels.simt.program import part

_KERNEL = re.compile(r"^KERNEL(?:_MIN)?\([^)]*\)\s*(\w+)\s*\(", re.M)


def library(target: str, source: str) -> bytes:
    """The shared library of a source for ``target``. Raises RuntimeError when it does not build."""
    prelude = part(f"prelude_{target}.h")
    if not source.startswith(prelude):
        raise RuntimeError("error: the source does not begin with the prelude")
    rest = source.removeprefix(prelude)
    entries = "".join(f"ENTRY({name})\n" for name in _KERNEL.findall(rest))
    text = part("prelude_host.h") + rest + entries
    name = hashlib.sha256("\0".join((text, *options("plain"))).encode()).hexdigest()[:32]
    return build(text, name, "plain").read_bytes()


if __name__ == "__main__":
    try:
        code = library(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"))
    except RuntimeError as failure:
        sys.exit(str(failure))
    Path(sys.argv[3]).write_bytes(code)

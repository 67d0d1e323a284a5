"""Stands in for NVRTC and hiprtc: the very source that they would get, built for the emulator.
And the parity cases that a driver is put through.

As a script: ``host_build.py TARGET SOURCE RESULT``; exit status 1 with the compiler's words.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

import pytest

from kvkernels.simt.emulator import build as builds
from kvkernels.simt.emulator.build import build, options
from kvkernels.simt.program import part

#: of every source of keys and every kind of commit, decode and prefill
CASES = (
    "decode/k4v4/d64/h4x2/kv300/q1",
    "decode/k3v5/d128/h4x2/kv300/q3",
    "prefill/k4v4/d64/h4x2/kv330/q17",
    "batch/k4v4/d64/h4x2/kv300+129+700/q1+17+3",
    "dtype/k4v4/d128/h4x2/kv300/q3/float16",
    "mask/k4v4/d64/h4x2/kv498/q3/bool-keys",
    "standard/q8_0-q4_0/d64/h4x2/kv257/q1/length",
    "tail/k5v4/d64/h4x2/kv300+129+700/q1+17+3/tail256",
    "logits/k4v4/d128/h4x2/kv300/q3/sink-logits",
    "aware/k4v4/d64/h6x2/kv450/q3",
)
_KERNEL = re.compile(r"^KERNEL(?:_MIN)?\([^)]*\)\s*(\w+)\s*\(", re.M)


@pytest.fixture(autouse=True)
def needs_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a C++ compiler CI fails and a desk skips; machine code is kept for one test only."""
    if builds.compiler() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no C++ compiler. {builds.HINT}")
        pytest.skip(builds.HINT)
    builds._folder()  # found before the variable changes: what the emulator built is kept
    monkeypatch.setenv("KVK_CACHE_DIR", str(tmp_path / "kept"))


def library(target: str, source: str) -> bytes:
    """The shared library of a source for ``target``. Raises RuntimeError when it does not build."""
    prelude = part(f"prelude_{target}.h")
    if not source.startswith(prelude):
        raise RuntimeError("error: the source does not begin with the prelude")
    rest = source.removeprefix(prelude)
    rest = rest.replace(part("prims_cuda.inc"), part("prims_host.inc"))
    entries = "".join(f"ENTRY({name})\n" for name in _KERNEL.findall(rest))
    text = part("prelude_host.h") + rest + entries
    name = hashlib.sha256("\0".join((text, *options("plain"))).encode()).hexdigest()[:32]
    return build(text, name, options("plain")).read_bytes()


if __name__ == "__main__":
    try:
        code = library(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"))
    except RuntimeError as failure:
        sys.exit(str(failure))
    Path(sys.argv[3]).write_bytes(code)

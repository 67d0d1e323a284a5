"""The HIP library of ``fakehip.cpp``, built once."""

from __future__ import annotations

import ctypes
import shlex
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from kvkernels.hip.library import Libraries
from kvkernels.settings import settings
from kvkernels.simt.emulator.build import build, compiler_version, options, runtime_source

HERE = Path(__file__).parent
# The emulator's own builds stay where they are when a test names another folder.
_PYTHON = shlex.join([sys.executable, str(HERE.parent / "host_build.py")])
COMPILER = f"KVK_CACHE_DIR={shlex.quote(settings().cache_dir or 'off')} {_PYTHON} hip"


@cache
def library() -> str:
    """The path of the shared library."""
    text = runtime_source() + (HERE / "fakehip.cpp").read_text(encoding="utf-8")
    key = "\0".join((text, *options("plain"), compiler_version()))
    return str(build(text, f"fakehip-{sha256(key.encode()).hexdigest()[:32]}", "plain"))


def load(name: str) -> ctypes.CDLL:
    """Global: what it loads asks it for barriers."""
    return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def libraries() -> Libraries:
    """Where a backend finds it."""
    return Libraries(runtime=(library(),), compiler=(), load=load)

"""Every environment variable of this library, read in one place and at plan time only.

Each is also a parameter where it applies; the parameter wins. Unset and empty mean the default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvkernels.errors import InputError

DEFAULT_WINDOW_CHUNK = 65_536
DEFAULT_PROBE_TIMEOUT = 20.0


class SettingDoc(NamedTuple):
    """One line of the generated settings page."""

    name: str
    meaning: str
    default: str


DOCS = (
    SettingDoc(
        "KVK_NUM_THREADS",
        "CPU threads, a whole number >= 1",
        "what the CPU affinity and the cgroup quota allow",
    ),
    SettingDoc(
        "KVK_WINDOW_CHUNK",
        "tokens materialised at a time in prefill; zero and negative mean the default",
        str(DEFAULT_WINDOW_CHUNK),
    ),
    SettingDoc(
        "KVK_CPU_ISA",
        "instruction set of the CPU kernels; one the CPU lacks is refused",
        "the best the CPU has",
    ),
    SettingDoc(
        "KVK_CACHE_DIR",
        "folder that keeps machine code of the CPU kernels between processes; `off` keeps none",
        "kvkernels in the user's cache folder",
    ),
    SettingDoc(
        "KVK_PROBE_TIMEOUT",
        "seconds that the probe of one backend may take, > 0",
        f"{DEFAULT_PROBE_TIMEOUT:g}",
    ),
    SettingDoc(
        "KVK_TAIL_ALLOW_GENERIC",
        "keep a requested tail where no device has a native tail entry; 0 is off, other text on",
        "off",
    ),
    SettingDoc(
        "KVK_GGML",
        "folder of a libggml that you built, for `kvk bench --peers`",
        "its rows say that there is none",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The values in force. ``num_threads`` None means affinity and cgroup decide; ``cache_dir``
    None that nothing is kept.
    """

    num_threads: int | None = None
    cpu_isa: str | None = None
    window_chunk: int = DEFAULT_WINDOW_CHUNK
    probe_timeout: float = DEFAULT_PROBE_TIMEOUT
    tail_allow_generic: bool = False
    cache_dir: str | None = None
    ggml: str | None = None


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the variables of ``environ`` (default: the process environment, as it is now).

    Raises InputError that names the variable when its text cannot be understood.
    """
    env = os.environ if environ is None else environ

    def text(name: str) -> str:
        return env.get(name, "").strip()

    def whole(name: str, needed: str) -> int | None:
        if not text(name):
            return None
        try:
            return int(text(name))
        except ValueError:
            raise InputError(name, found=repr(env[name]), needed=needed) from None

    threads = whole("KVK_NUM_THREADS", "a whole number >= 1")
    if threads is not None and threads < 1:
        raise InputError("KVK_NUM_THREADS", found=threads, needed="a whole number >= 1")
    chunk = whole("KVK_WINDOW_CHUNK", "a whole number of tokens")
    return Settings(
        num_threads=threads,
        cpu_isa=text("KVK_CPU_ISA") or None,
        window_chunk=chunk if chunk is not None and chunk > 0 else DEFAULT_WINDOW_CHUNK,
        probe_timeout=_seconds("KVK_PROBE_TIMEOUT", text("KVK_PROBE_TIMEOUT")),
        tail_allow_generic=text("KVK_TAIL_ALLOW_GENERIC") not in ("", "0"),
        cache_dir=_cache_dir(text("KVK_CACHE_DIR"), env),
        ggml=text("KVK_GGML") or None,
    )


def _cache_dir(text: str, env: Mapping[str, str]) -> str | None:
    if text.lower() == "off":
        return None
    if text:
        return os.path.expanduser(text)
    base = env.get("XDG_CACHE_HOME") or env.get("LOCALAPPDATA") or os.path.expanduser("~/.cache")
    # Without a home directory the tilde stays: nothing is kept then.
    return os.path.join(base, "kvkernels") if os.path.isabs(base) else None


def _seconds(name: str, text: str) -> float:
    if not text:
        return DEFAULT_PROBE_TIMEOUT
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(name, found=repr(text), needed="a finite number of seconds > 0")
    return value

"""Where parity passed on this machine: what makes an entry ``local`` on a device.

``kvk parity`` notes a pass in ``KVK_CACHE_DIR``; it counts for the same device, driver and library,
so an update of any of them asks for a new run. Whoever opens or lists devices adds the notes to
their capabilities.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvkernels.capabilities import DeviceCaps
from kvkernels.settings import settings

SCHEMA = "kvk.qualified/1"


def with_local(caps: DeviceCaps) -> DeviceCaps:
    """The capabilities with every entry that has passed here, and no other record, as ``local``."""
    noted = dict.fromkeys(_read(caps), "local")
    known = {entry: level for entry, level in caps.qualified.items() if level != "none"}
    return replace(caps, qualified=noted | known) if noted.keys() - known.keys() else caps


def note(caps: DeviceCaps, passed: Iterable[str], failed: Iterable[str]) -> Path | None:
    """Add the entries that passed, drop those that failed. The file, or None when nothing can be
    kept (no cache directory, or not writable).
    """
    bad = set(failed)
    entries = sorted((set(_read(caps)) | set(passed)) - bad)
    path = _path(caps)
    if path is None:
        return None
    text = json.dumps({"schema": SCHEMA, "device": caps.name, "entries": entries}, indent=1)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
        return path
    return None


def _read(caps: DeviceCaps) -> list[str]:
    # The name of a note takes a digest of the library: only where there is a note to be found.
    folder = _folder()
    if folder is None or not any(folder.glob(f"{caps.backend}-*.json")):
        return []
    path = _path(caps)
    if path is None:
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    entries = data.get("entries") if isinstance(data, dict) and data.get("schema") == SCHEMA else []
    prefix = f"{caps.backend}/"
    found = entries if isinstance(entries, list) else []
    return [entry for entry in found if isinstance(entry, str) and entry.startswith(prefix)]


def _folder() -> Path | None:
    kept = settings().cache_dir
    return None if kept is None else Path(kept) / "qualified"


def _path(caps: DeviceCaps) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    facts = {key: str(fact) for key, fact in sorted(caps.facts.items())}
    what = json.dumps([caps.id, caps.name, caps.driver, facts, _library()])
    return folder / f"{caps.backend}-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


@cache
def _library() -> str:
    """A name for the code of this library, kernels included: a pass says nothing about another."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".inc", ".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()

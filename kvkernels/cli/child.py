"""Probing in a child process: a driver that crashes or hangs becomes a status.

The parent side is ``probe_backend``; the child runs this module with a backend name and a file to
write to (its stdout belongs to whatever a driver prints).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvkernels.backend import BackendStatus
from kvkernels.cli.entries import entry_lines, features_used
from kvkernels.registry import backends, statuses

_TAIL = 300  # characters of a crashed child's stderr that are worth showing


def probe_backend(name: str, timeout_s: float) -> list[dict[str, Any]]:
    """Statuses of everything registered as ``name``, probed in a child; never raises."""
    with tempfile.TemporaryDirectory(prefix="kvk-probe-") as folder:
        target, talk = Path(folder) / "status.json", Path(folder) / "stderr"
        command = [sys.executable, "-m", "kvkernels.cli.child", name, str(target)]
        try:
            # A file, not a pipe: something the driver has started may keep a pipe open for ever.
            with talk.open("wb") as stream:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stream,
                    check=False,
                    timeout=timeout_s,
                )
        except subprocess.TimeoutExpired:
            text = f"its probe gave no answer within {timeout_s:g} s (KVK_PROBE_TIMEOUT)"
            return [_failed(name, text)]
        if done.returncode == 0 and target.exists():
            found: list[dict[str, Any]] = json.loads(target.read_text(encoding="utf-8"))
            return found
        words = talk.read_text(encoding="utf-8", errors="replace")
        last = words.strip()[-_TAIL:].splitlines()[-1:] or [""]
        text = f"its probe ended with {_ending(done.returncode)}"
        return [_failed(name, f"{text}: {last[0]}" if last[0] else text)]


def _ending(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit status {code}" if code else "no answer"


def _failed(name: str, text: str) -> dict[str, Any]:
    hint = f"Run `python -m kvkernels.cli.child {name} /dev/stdout` to see it happen"
    return _entries(BackendStatus(name, "broken", text, hint), None)


def _entries(status: BackendStatus, backend: Any) -> dict[str, Any]:
    data = status.to_json()
    table = backend.table if backend is not None else ()
    for caps, device in zip(status.devices, data["devices"], strict=True):
        device["entries"] = [line.to_json() for line in entry_lines(table, caps)]
        # What the table asks for, and what the backend says that its kernels use (optional).
        uses = getattr(backend, "uses", None)
        device["used"] = sorted(features_used(table) | set(uses(caps) if uses else ()))
    return data


def child(name: str, target: str) -> None:
    """Probe everything registered as ``name`` and write the statuses to ``target``."""
    backend = backends(name).get(name)
    data = [_entries(status, backend if status.ok else None) for status in statuses(name)]
    Path(target).write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    child(*sys.argv[1:3])

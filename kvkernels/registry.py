"""Which backends exist, and how each of them is. A broken one is a status, never a crash.

Built-in backends are listed here; others come from installed packages through the entry point group
``kvkernels.backends``, whose entry name is the backend's name. Nothing is imported before it is
asked for, and nothing is cached: a status is true when it is given.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from kvkernels.backend import API_VERSION, STATES, Backend, BackendStatus, Device
from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.errors import BackendUnavailable, KvkError, did_you_mean
from kvkernels.qualification import with_local

__all__ = ["BUILTIN", "GROUP", "BackendStatus", "backends", "names", "open_device", "statuses"]

GROUP = "kvkernels.backends"
BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "kvkernels.cpu.backend:CpuBackend",
        "cuda": "kvkernels.cuda.backend:CudaBackend",
        "hip": "kvkernels.hip.backend:HipBackend",
        "opencl": "kvkernels.opencl.backend:OpenclBackend",
    }
)
# Runs the kernels of GPUs on the CPU: for whoever names it, and listed nowhere.
NAMED_ONLY: Mapping[str, str] = MappingProxyType(
    {"simt": "kvkernels.simt.emulator.backend:EmulatorBackend"}
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
# A plugin that calls sys.exit() while it is imported must not end the caller's program.
_ANY = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    source: str  # who brings it, in words
    load: Callable[[], Any]
    refused: BackendStatus | None = None  # decided before loading: conflict or unusable name


def _load_builtin(target: str) -> Any:
    module, _, attr = target.partition(":")
    return getattr(importlib.import_module(module), attr)


def _plugins() -> Iterator[tuple[str, str, importlib.metadata.EntryPoint]]:
    """(name, distribution, entry point), one distribution at a time: a bad one hides no other."""
    seen = set()
    for dist in importlib.metadata.distributions():
        try:
            points = [p for p in dist.entry_points if p.group == GROUP]
            owner = str(dist.metadata["Name"] or "an unnamed package") if points else ""
        except _ANY:
            continue  # its metadata cannot be read, so it cannot say that it is a backend either
        for point in points:
            # The same package can be on the path twice (an editable install); the first one wins.
            if (point.name, owner, point.value) not in seen:
                seen.add((point.name, owner, point.value))
                yield point.name, owner, point


def _candidates(named: str | None = None) -> list[_Candidate]:
    """Everything that is registered, and the one that is only there when it is ``named``."""
    targets = {**BUILTIN, **{name: t for name, t in NAMED_ONLY.items() if name == named}}
    found = [
        _Candidate(name, "kvkernels", lambda target=target: _load_builtin(target))  # type: ignore[misc]
        for name, target in targets.items()
    ]
    plugins = sorted(_plugins(), key=lambda plugin: plugin[:2])
    count = Counter(name for name, _, _ in plugins)
    for name, owner, point in plugins:
        refused = None
        if name in BUILTIN or name in NAMED_ONLY:
            text = f"the package {owner!r} registers the name of a built-in backend"
            hint = f"Uninstall {owner}; the built-in backend is used"
            refused = BackendStatus(name, "conflict", text, hint)
        elif count[name] > 1:
            owners = ", ".join(sorted({o for n, o, _ in plugins if n == name}))
            text = f"registered {count[name]} times, by {owners}"
            refused = BackendStatus(name, "conflict", text, "Uninstall all but one of them")
        elif not _NAME.fullmatch(name):
            text = f"{owner!r} registers a name that cannot be part of a device id"
            hint = "A name is a lower-case letter, then letters, digits or '_'"
            refused = BackendStatus(name, "broken", text, hint)
        found.append(_Candidate(name, owner, point.load, refused))
    return found


def _error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _load(candidate: _Candidate) -> Backend | BackendStatus:
    """The backend object after every check that needs no device, else what is wrong with it."""
    name = candidate.name
    if candidate.refused is not None:
        return candidate.refused
    try:
        loaded = candidate.load()
        backend = loaded() if isinstance(loaded, type) else loaded
    except ModuleNotFoundError as error:
        if candidate.source == "kvkernels" and error.name:
            if error.name.startswith("kvkernels"):
                return BackendStatus(name, "unavailable", f"this build has no {error.name}")
            hint = f"Install the package that provides {error.name!r}"
            return BackendStatus(name, "unavailable", _error(error), hint)
        return _broken(candidate, f"its import failed: {_error(error)}")
    except _ANY as error:
        return _broken(candidate, f"loading it failed: {_error(error)}")
    try:
        return _check(candidate, backend)
    except _ANY as error:
        return _broken(candidate, f"reading its attributes failed: {_error(error)}")


def _check(candidate: _Candidate, backend: Any) -> Backend | BackendStatus:
    name = candidate.name
    # The version first: a backend for another version may rightly lack the rest.
    version = getattr(backend, "api_version", None)
    if version != API_VERSION:
        text = f"written for API version {version!r}, this library has {API_VERSION}"
        hint = f"Install versions of kvkernels and {candidate.source} that go together"
        return BackendStatus(name, "api_mismatch", text, hint)
    missing = [a for a in ("name", "table") if not hasattr(backend, a)]
    missing += [a for a in ("probe", "open") if not callable(getattr(backend, a, None))]
    if missing:
        return _broken(candidate, f"it has no usable {', '.join(missing)}")
    if backend.name != name:
        return _broken(candidate, f"registered as {name!r}, but calls itself {backend.name!r}")
    table = backend.table
    if not (isinstance(table, tuple) and all(isinstance(row, Capability) for row in table)):
        return _broken(candidate, "its table is not a tuple of Capability rows")
    if alien := [row.entry for row in table if not row.entry.startswith(f"{name}/")]:
        return _broken(candidate, f"its table has entries that are not {name}/...: {alien[0]}")
    return cast(Backend, backend)


def _broken(candidate: _Candidate, text: str) -> BackendStatus:
    hint = "" if candidate.source == "kvkernels" else f"Report it to {candidate.source}"
    return BackendStatus(candidate.name, "broken", text, hint)


def _probe(candidate: _Candidate, backend: Backend) -> BackendStatus:
    try:
        result = backend.probe()
        if isinstance(result, BackendStatus):
            status = result
        else:
            status = BackendStatus(candidate.name, devices=tuple(result))
    except _ANY as error:
        return _broken(candidate, f"its probe raised {_error(error)}")
    if status.name != candidate.name or status.state not in STATES:
        return _broken(candidate, f"its probe gave a status for {status.name!r}: {status.state!r}")
    for caps in status.devices:
        if not isinstance(caps, DeviceCaps) or caps.backend != candidate.name:
            return _broken(
                candidate, f"its probe listed something that is not its device: {caps!r}"
            )
    if status.ok and not status.devices:
        return BackendStatus(candidate.name, "unavailable", "the probe found no device")
    return replace(status, devices=tuple(with_local(caps) for caps in status.devices))


def names() -> tuple[str, ...]:
    """Every registered name, usable or not, without importing any of them."""
    return tuple(dict.fromkeys(candidate.name for candidate in _candidates()))


def backends(only: str | None = None) -> dict[str, Backend]:
    """The backends that load and follow the protocol, by name. Imports all (or just the one named
    ``only``), probes none.
    """
    chosen = [c for c in _candidates(only) if c.refused is None and only in (None, c.name)]
    loaded = {c.name: _load(c) for c in chosen}
    return {name: b for name, b in loaded.items() if not isinstance(b, BackendStatus)}


def statuses(only: str | None = None) -> tuple[BackendStatus, ...]:
    """Load and probe everything that is registered (as ``only``, when given); one status each,
    conflicts included.
    """
    found = []
    for candidate in _candidates(only):
        if only not in (None, candidate.name):
            continue
        backend = _load(candidate)
        is_status = isinstance(backend, BackendStatus)
        found.append(backend if is_status else _probe(candidate, cast(Backend, backend)))
    return tuple(cast(list[BackendStatus], found))


def open_device(device_id: str, **options: Any) -> Device:
    """Open ``<backend>:<index>``, and only that: never another device or backend instead.

    ``options`` are the backend's own (the CPU takes ``n_threads``).

    Raises BackendUnavailable, whose status says what is wrong and what to do.
    """
    name = str(device_id).partition(":")[0]
    candidates = [c for c in _candidates(name) if c.name == name]
    # A conflict with a built-in leaves the built-in usable; between plugins none is.
    candidate = next((c for c in candidates if c.refused is None), None)
    if candidate is None:
        if candidates:
            raise BackendUnavailable(cast(BackendStatus, candidates[0].refused))
        known = names()
        text = f"no backend of this name; registered: {', '.join(known)}"
        raise BackendUnavailable(
            BackendStatus(name, "unavailable", text, did_you_mean(name, known))
        )
    backend = _load(candidate)
    status = backend if isinstance(backend, BackendStatus) else _probe(candidate, backend)
    if isinstance(backend, BackendStatus) or not status.ok:
        raise BackendUnavailable(status)
    ids = [caps.id for caps in status.devices]
    if device_id not in ids:
        text = f"no device {device_id!r}; found: {', '.join(ids)}"
        hint = did_you_mean(str(device_id), ids)
        raise BackendUnavailable(BackendStatus(name, "unavailable", text, hint, status.devices))
    try:
        device = backend.open(device_id, **options)
        opened = device.caps.id
    except KvkError:
        raise
    except _ANY as error:
        text = f"opening {device_id} failed: {_error(error)}"
        raise BackendUnavailable(BackendStatus(name, "broken", text)) from error
    if opened != device_id:
        raise BackendUnavailable(_broken(candidate, f"asked for {device_id}, it opened {opened}"))
    return device

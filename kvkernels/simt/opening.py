"""Opening a device of a SIMT backend: the module with its driver is imported here at the earliest.

``kvkernels.<backend>.device`` provides ``open_<backend>(caps, index, **options) -> Device``.
"""

from __future__ import annotations

import importlib
from typing import cast

from kvkernels.backend import BackendStatus, Device
from kvkernels.capabilities import DeviceCaps
from kvkernels.errors import BackendUnavailable
from kvkernels.qualification import with_local


def listed(status: BackendStatus, device_id: str) -> DeviceCaps:
    """The device ``device_id`` of those that ``status`` lists. Raises BackendUnavailable."""
    if not status.ok:
        raise BackendUnavailable(status)
    caps = next((caps for caps in status.devices if caps.id == device_id), None)
    if caps is None:
        ids = ", ".join(caps.id for caps in status.devices)
        text = f"no device {device_id!r}; found: {ids}"
        raise BackendUnavailable(BackendStatus(status.name, "unavailable", text))
    return with_local(caps)


def open_listed(status: BackendStatus, device_id: str, **options: object) -> Device:
    """Open the device ``device_id`` of those that ``status`` lists.

    Raises BackendUnavailable: the probe found none, not this one, or the build has no driver.
    """
    name, caps = status.name, listed(status, device_id)
    module = f"kvkernels.{name}.device"
    try:
        opener = getattr(importlib.import_module(module), f"open_{name}")
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        text = f"this build has no {module}: devices are listed, but not yet opened"
        raise BackendUnavailable(BackendStatus(name, "unavailable", text)) from None
    return cast(Device, opener(caps, int(device_id.partition(":")[2]), **options))

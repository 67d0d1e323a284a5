"""Opening a card that the probe listed."""

from __future__ import annotations

import importlib

from kvkernels.capabilities import DeviceCaps
from kvkernels.cuda.driver import CudaDriver
from kvkernels.cuda.table import TABLE
from kvkernels.simt.compiling import broken
from kvkernels.simt.device import SimtDevice


def open_cuda(caps: DeviceCaps, index: int) -> SimtDevice:
    """Card ``index`` with facts ``caps``. Raises BackendUnavailable when it cannot be used."""
    arch = caps.facts.get("target")
    if not isinstance(arch, str):
        capability = caps.facts.get("compute_capability")
        text = f"the installed NVRTC compiles for no card like {caps.id} (capability {capability})"
        broken("cuda", text, "pip install 'kvkernels[cuda12]' for cards before 7.5")
    return SimtDevice(caps, TABLE, CudaDriver(importlib.import_module("cupy"), index, arch))

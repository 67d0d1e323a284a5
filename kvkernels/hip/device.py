"""Opening a card that the probe listed."""

from __future__ import annotations

from kvkernels.capabilities import DeviceCaps
from kvkernels.hip.compiler import Hiprtc
from kvkernels.hip.driver import HipDriver
from kvkernels.hip.library import Libraries
from kvkernels.hip.table import TABLE
from kvkernels.simt.compiling import broken
from kvkernels.simt.device import SimtDevice

_ROCM = "Install ROCm (5, 6 or 7) with its HIP runtime and hiprtc"


def open_hip(caps: DeviceCaps, index: int, libraries: Libraries | None = None) -> SimtDevice:
    """Card ``index`` with facts ``caps``. Raises BackendUnavailable when it cannot be used."""
    found = libraries or Libraries()
    try:
        runtime, name = found.open_runtime()
    except OSError as error:
        broken("hip", f"the HIP runtime cannot be loaded: {error}", _ROCM)
    compiler = found.open_compiler(runtime, name)
    if compiler is None:
        broken("hip", "the HIP runtime is there, but not its compiler (libhiprtc.so)", _ROCM)
    gfx = caps.facts.get("gfx")
    if not isinstance(gfx, str):
        broken("hip", f"{caps.id} does not say which gfx number it is", "Look at `rocminfo`")
    hiprtc = Hiprtc(compiler, gfx, f"{caps.facts.get('hiprtc')}")
    return SimtDevice(caps, TABLE, HipDriver(runtime, hiprtc, index))

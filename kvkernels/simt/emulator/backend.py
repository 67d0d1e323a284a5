"""The backend ``simt``: the kernels of CUDA, HIP and OpenCL on the CPU, for tests and never chosen
unless it is named. Slow, and no evidence about any GPU.
"""

from __future__ import annotations

from typing import Any

from kvkernels.backend import API_VERSION, BackendStatus
from kvkernels.capabilities import Capability, DeviceCaps, Feature
from kvkernels.simt.device import SimtDevice
from kvkernels.simt.emulator.build import HINT, compiler, compiler_version
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.opening import listed
from kvkernels.simt.table import mma_rows, simt_rows

# The portable entries first: they are what is chosen unless another one is named.
TABLE = (*simt_rows("simt"), *mma_rows("simt", ()))


class EmulatorDevice(SimtDevice):
    """Its memory is host memory: NumPy arrays are used as they are."""

    def upload(self, host: Any) -> Any:
        """The array itself."""
        return host

    def overwrite(self, array: Any, host: Any) -> None:
        """Copy, unless both are the same."""
        if array is not host:
            array[...] = host


class EmulatorBackend:
    """One device, ``simt:0``; needs a C++ compiler."""

    name = "simt"
    api_version = API_VERSION
    table: tuple[Capability, ...] = TABLE

    def probe(self) -> BackendStatus:
        """The emulator, or that there is no compiler."""
        if compiler() is None:
            return BackendStatus("simt", "unavailable", "no C++ compiler", HINT)
        caps = DeviceCaps(
            id="simt:0",
            backend="simt",
            name="emulator of GPU threads",
            driver=compiler_version(),
            facts={"max_threads": 1024, "local_memory": 49152, "lanes": 32},
            features={"fp64": Feature(True, True)},
            # The suite runs every entry on it, on any machine.
            qualified={row.entry: "local" for row in TABLE},
        )
        return BackendStatus("simt", devices=(caps,))

    def open(self, device_id: str, **options: Any) -> EmulatorDevice:
        """Open it; ``options`` are those of ``EmulatorDriver``. Raises BackendUnavailable."""
        caps = listed(self.probe(), device_id)
        return EmulatorDevice(caps, TABLE, EmulatorDriver(**options))

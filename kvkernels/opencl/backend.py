"""The backend object that the registry loads; imports no pyopencl until it is probed."""

from __future__ import annotations

from kvkernels.backend import API_VERSION, BackendStatus, Device
from kvkernels.capabilities import Capability
from kvkernels.opencl.probe import probe_opencl
from kvkernels.opencl.table import TABLE
from kvkernels.simt.opening import open_listed


class OpenclBackend:
    """Attention on OpenCL devices with pyopencl."""

    name = "opencl"
    api_version = API_VERSION
    table: tuple[Capability, ...] = TABLE

    def probe(self) -> BackendStatus:
        """Every device, ``opencl:<index>`` over all platforms in order; else why there is none."""
        return probe_opencl()

    def open(self, device_id: str) -> Device:
        """Open a device that ``probe`` listed. Raises BackendUnavailable."""
        return open_listed(self.probe(), device_id)

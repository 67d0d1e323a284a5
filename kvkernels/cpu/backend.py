"""The backend object that the registry loads; imports no Numba until a device is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkernels.backend import API_VERSION
from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.cpu.probe import probe_cpu
from kvkernels.cpu.table import TABLE
from kvkernels.settings import settings

if TYPE_CHECKING:
    from kvkernels.cpu.device import CpuDevice


class CpuBackend:
    """CPU attention with Numba."""

    name = "cpu"
    api_version = API_VERSION
    table: tuple[Capability, ...] = TABLE

    def probe(self) -> Sequence[DeviceCaps]:
        """Always one device, ``cpu:0``."""
        return (probe_cpu(),)

    def open(self, device_id: str) -> CpuDevice:
        """Open ``cpu:0``; threads from ``KVK_NUM_THREADS``, else affinity and cgroup."""
        from kvkernels.cpu.device import CpuDevice

        return CpuDevice(probe_cpu(), n_threads=settings().num_threads)

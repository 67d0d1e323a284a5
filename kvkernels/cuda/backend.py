"""The backend object that the registry loads; imports no CuPy until it is probed."""

from __future__ import annotations

from kvkernels.backend import API_VERSION, BackendStatus, Device
from kvkernels.capabilities import Capability
from kvkernels.cuda.probe import probe_cuda
from kvkernels.cuda.table import TABLE
from kvkernels.simt.opening import open_listed


class CudaBackend:
    """Attention on NVIDIA cards with CuPy."""

    name = "cuda"
    api_version = API_VERSION
    table: tuple[Capability, ...] = TABLE

    def probe(self) -> BackendStatus:
        """Every card that CuPy sees, ``cuda:<index>`` in CUDA's order; else why there is none."""
        return probe_cuda()

    def open(self, device_id: str) -> Device:
        """Open a card that ``probe`` listed. Raises BackendUnavailable."""
        return open_listed(self.probe(), device_id)

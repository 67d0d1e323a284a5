"""The backend object that the registry loads; loads no library until it is probed."""

from __future__ import annotations

from kvkernels.backend import API_VERSION, BackendStatus, Device
from kvkernels.capabilities import Capability
from kvkernels.hip.library import Libraries
from kvkernels.hip.probe import probe_hip
from kvkernels.hip.table import TABLE
from kvkernels.simt.opening import open_listed


class HipBackend:
    """Attention on AMD cards with the HIP runtime of an installed ROCm."""

    name = "hip"
    api_version = API_VERSION
    table: tuple[Capability, ...] = TABLE

    def __init__(self, libraries: Libraries | None = None) -> None:
        self.libraries = libraries

    def probe(self) -> BackendStatus:
        """Every card that HIP sees, ``hip:<index>`` in HIP's order; else why there is none."""
        return probe_hip(self.libraries)

    def open(self, device_id: str) -> Device:
        """Open a card that ``probe`` listed. Raises BackendUnavailable."""
        options = {} if self.libraries is None else {"libraries": self.libraries}
        return open_listed(self.probe(), device_id, **options)

"""The backend object that the registry loads; imports no Numba until a device is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkernels.backend import API_VERSION, BackendStatus
from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.cpu.features import ISAS, best, missing
from kvkernels.cpu.probe import probe_cpu
from kvkernels.cpu.table import TABLE
from kvkernels.errors import BackendUnavailable, InputError, did_you_mean
from kvkernels.settings import settings

if TYPE_CHECKING:
    from kvkernels.cpu.device import CpuDevice


class CpuBackend:
    """CPU attention with Numba."""

    name = "cpu"
    api_version = API_VERSION
    table: tuple[Capability, ...] = TABLE

    def probe(self) -> BackendStatus | Sequence[DeviceCaps]:
        """One device, ``cpu:0``; none when ``KVK_CPU_ISA`` asks for what the CPU does not have."""
        return _probe()

    def uses(self, caps: DeviceCaps) -> tuple[str, ...]:
        """Features that the kernels use on this device, for ``kvk probe``."""
        return ISAS.get(str(caps.facts.get("isa")), ())

    def open(self, device_id: str, *, n_threads: int | None = None) -> CpuDevice:
        """Open ``cpu:0`` with ``n_threads``, else ``KVK_NUM_THREADS``, else affinity and cgroup."""
        if n_threads is not None and (not isinstance(n_threads, int) or n_threads < 1):
            raise InputError("n_threads", found=repr(n_threads), needed="a whole number >= 1")
        from kvkernels.cpu.device import CpuDevice

        found = _probe()
        if isinstance(found, BackendStatus):
            raise BackendUnavailable(found)
        return CpuDevice(found[0], n_threads=n_threads or settings().num_threads)


def _probe() -> BackendStatus | tuple[DeviceCaps]:
    isa = settings().cpu_isa
    if isa is None:
        return (probe_cpu(),)
    if isa not in ISAS:
        text = f"KVK_CPU_ISA={isa!r} is not one of {', '.join(ISAS)}"
        return BackendStatus("cpu", "unavailable", text, did_you_mean(isa, ISAS))
    caps = probe_cpu(isa)
    lacking = missing(isa, caps.features)
    if lacking:
        text = f"KVK_CPU_ISA={isa} needs {', '.join(lacking)}, which this CPU does not have enabled"
        hint = f"Unset KVK_CPU_ISA; the best here is {best(caps.features)}"
        return BackendStatus("cpu", "unavailable", text, hint)
    return (caps,)

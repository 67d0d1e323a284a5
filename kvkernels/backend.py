"""What a backend provides. Structural types: a third party inherits nothing from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvkernels.calls import LayerBuffers
from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.op import AttentionOp, LayerSpec
from kvkernels.storage import Pages, Steps, Storage, Stored

API_VERSION = 3
"""Raised when a protocol below changes so that an old backend cannot work, or operations get fields
that an old table cannot know.
"""

STATES = ("ok", "unavailable", "broken", "conflict", "api_mismatch")


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a backend can be used. ``detail`` says why not, ``hint`` what to do about it."""

    name: str
    state: str = "ok"
    detail: str = ""
    hint: str = ""
    devices: tuple[DeviceCaps, ...] = ()

    @property
    def ok(self) -> bool:
        """True when the backend was probed and has at least one device."""
        return self.state == "ok"

    def __str__(self) -> str:
        text = f"{self.name}: {self.state}"
        text += f": {self.detail}" if self.detail else ""
        return f"{text}. {self.hint}" if self.hint else text

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "name": self.name,
            "state": self.state,
            "detail": self.detail,
            "hint": self.hint,
            "devices": [caps.to_json() for caps in self.devices],
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """A caller's array as the device's kernels take it, and the name of its own dtype ("f32",
    "f16", "bf16").
    """

    array: Any
    dtype: str


@runtime_checkable
class Device(Protocol):
    """One opened device. The backend's arrays go in and come out through ``run``."""

    @property
    def caps(self) -> DeviceCaps:
        """What this device has, with what is really enabled on it."""

    @property
    def table(self) -> tuple[Capability, ...]:
        """The rows that decisions about this device are made from."""

    @property
    def transient_bytes(self) -> int:
        """High water of workspace bytes."""

    def workspace_bytes(
        self, layers: Iterable[tuple[LayerSpec, Storage, bool]], steps: Steps
    ) -> int:
        """Transient bytes of the largest steps (M2); layers: (spec, storage, queries staged)."""

    def allocate(
        self, layer: LayerSpec, storage: Storage, pages: Pages, *, keep_queries: bool
    ) -> LayerBuffers:
        """Memory of one layer: ``storage`` says of what kind, ``pages`` how many."""

    def rows(self, field: str, array: Any) -> Rows:
        """A caller's array, checked to be on this device; raises InputError naming ``field``."""

    def empty(self, shape: tuple[int, ...]) -> Any:
        """An array for results."""

    def upload(self, host: Any) -> Any:
        """An array on this device with the values of a NumPy one (on the CPU, that one itself)."""

    def download(self, array: Any) -> Any:
        """A NumPy array with the values of one on this device (on the CPU, that one itself)."""

    def overwrite(self, array: Any, host: Any) -> None:
        """Give an array on this device the values of a NumPy one of its shape and dtype."""

    def first_unfit(
        self, arrays: Sequence[Any], stored: Sequence[Stored]
    ) -> tuple[int, tuple[int, ...]] | None:
        """(array, index in it) of the first value that cannot be used, or not be kept in the form
        in which it is ``stored``; or None. All arrays of one attention together: it is on the hot
        path.
        """

    def run(self, entry: str, op: AttentionOp, call: Any) -> None:
        """Run ``entry`` for a confirmed ``op``; ``call`` is one of ``kvkernels.calls``."""

    def synchronize(self) -> None:
        """Wait for everything that was enqueued; a failed launch surfaces here at the latest."""


@runtime_checkable
class Backend(Protocol):
    """One way to compute. ``table`` and the module itself must load with no driver installed."""

    @property
    def name(self) -> str:
        """The registered name; device ids are ``<name>:<index>``, entries ``<name>/<variant>``."""

    @property
    def api_version(self) -> int:
        """The ``API_VERSION`` this backend was written for."""

    @property
    def table(self) -> tuple[Capability, ...]:
        """Every row this backend has, on any device."""

    def probe(self) -> BackendStatus | Sequence[DeviceCaps]:
        """The devices found, or a status that says why there are none. Must not raise."""

    def open(self, device_id: str, **options: Any) -> Device:
        """Open a device that ``probe`` listed. ``options`` are this backend's own."""

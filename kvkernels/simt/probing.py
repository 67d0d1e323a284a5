"""What the probes of the SIMT backends share: a reason to stop, and that nothing escapes."""

from __future__ import annotations

from collections.abc import Callable

from kvkernels.backend import BackendStatus


class Stop(Exception):
    """Nothing can be listed: ``detail`` is the cause, ``hint`` the fix."""

    def __init__(self, detail: str, hint: str = "") -> None:
        super().__init__(detail)
        self.detail, self.hint = detail, hint


def probed(name: str, find: Callable[[], BackendStatus]) -> BackendStatus:
    """What ``find`` returns; ``unavailable`` where it stops, ``broken`` where it raises."""
    try:
        return find()
    except Stop as stop:
        return BackendStatus(name, "unavailable", stop.detail, stop.hint)
    except Exception as error:
        return BackendStatus(name, "broken", f"the probe failed: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """An error of somebody else's library in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")


def dotted(version: int) -> str:
    """12040 as '12.4'."""
    return f"{version // 1000}.{version % 1000 // 10}"

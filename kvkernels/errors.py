"""The exceptions that leave this library. Standard library only.

A user's mistake raises one of these; ``assert`` is for our own invariants; no third-party exception
escapes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class KvkError(Exception):
    """Base of every error of this library."""


class InputError(KvkError, ValueError):
    """An argument is wrong: names the field, what was found and what is needed.

    Raised before anything is stored or launched; the cache is what it was.
    """

    def __init__(self, field: str, *, found: object, needed: object, hint: str = "") -> None:
        self.field, self.found, self.needed, self.hint = field, str(found), str(needed), hint
        text = f"{field}: found {found}; needed {needed}"
        super().__init__(f"{text}. {hint}" if hint else text)


class NonFiniteError(InputError):
    """NaN or infinity in K, V or Q: names layer,
    sequence and the first position (codec.md section 8).
    """


class RequestError(InputError):
    """A request (type name, tail, encoder, entry) cannot be understood or met;
    shows what would be valid.
    """


class UnsupportedOp(KvkError):
    """No route for at least one operation.

    ``decisions`` hold every row tried with every unmet requirement; ``labels``, one per decision
    when given, say whose operation it is (for example ``layers 0-35``).
    """

    def __init__(self, decisions: Iterable[Any], labels: Iterable[str] = ()) -> None:
        self.decisions, self.labels = tuple(decisions), tuple(labels)
        heads = [f"{label}: " for label in self.labels] or [""] * len(self.decisions)
        texts = [h + d.explain() for h, d in zip(heads, self.decisions, strict=True)]
        super().__init__("\n".join(texts))


class RouteMismatch(KvkError):
    """The final built operation, of a cache's ``layer``, does not take the planned route; nothing
    was enqueued.
    """

    def __init__(self, planned: Any, final: Any, layer: int | None = None) -> None:
        self.planned, self.final, self.layer = planned, final, layer
        where = "" if layer is None else f"layer {layer}: "
        super().__init__(
            f"{where}planned {planned.route} by {planned.entry}, but the final operation gives:\n"
            f"{final.explain()}\n"
            "Plan again with limits that cover this operation."
        )


class BackendUnavailable(KvkError):
    """A backend or device cannot be used; ``status`` says why and what to install."""

    def __init__(self, status: Any) -> None:
        self.status = status
        super().__init__(str(status))


class CapacityError(KvkError):
    """The cache has no room: names what is full, what is needed and what is free."""


class RollbackError(KvkError):
    """A rollback beyond the horizon; raised before any change.

    ``largest`` is the largest row count that would work now, ``boundary`` the group boundary
    (a multiple of 128) a reprocess could start from.
    """

    def __init__(self, message: str, *, largest: int, boundary: int) -> None:
        self.largest, self.boundary = largest, boundary
        super().__init__(message)


class StepError(KvkError):
    """A step was used in the wrong order: closed, layer attended twice or not at all,
    unknown sequence.
    """


class StateError(KvkError):
    """The stored state of a sequence cannot be used; the message says what to do."""


class CompileError(KvkError):
    """A kernel did not compile; the message holds the compiler's words and what to do."""


class OutOfDeviceMemory(KvkError, MemoryError):
    """The device has no room: names what was asked for, what is free when that is known, and what
    to do.
    """


class DeviceLost(KvkError):
    """The device failed during a launch; its caches cannot be trusted any more."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """``'did you mean X?'`` for a near miss, else an empty string."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""

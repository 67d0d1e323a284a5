"""The text of a request (rule T1): parsed once into a value that knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvkernels.errors import RequestError, did_you_mean
from kvkernels.op import TAIL_DTYPES

AUTO_ROWS = 1024
MAX_ROWS = 2**32 - 1  # counts are unsigned 32-bit numbers in saved state
GRAMMAR = "'', 'auto', 'N', 'N0,N1' or 'full=N,swa=N'"
_ROWS = f"a whole number of rows, 0..{MAX_ROWS}"


class TailMode(StrEnum):
    """How a request names its counts."""

    DISABLED = "disabled"
    AUTOMATIC = "automatic"
    NUMERIC = "numeric"
    POSITIONAL = "positional"
    NAMED = "named"


def _count(entry: str, text: str, hint: str = "") -> int:
    # isdigit alone takes digits of every script, and int() alone takes signs, spaces and 1_000;
    # the length comes first because int() refuses thousands of digits with an error of its own.
    digits = text.isascii() and text.isdigit() and len(text.lstrip("0")) <= len(str(MAX_ROWS))
    if not digits or int(text) > MAX_ROWS:
        found = f"{text!r} in the entry {entry!r}" if text != entry else repr(entry)
        raise RequestError("tail", found=found, needed=_ROWS, hint=hint)
    return int(text)


@dataclass(frozen=True, slots=True)
class TailRequest:
    """What was asked for, before any model is known: immutable and hashable.

    ``counts`` are rows: none (off, auto), one for every group, one per group in canonical order,
    or one per name. ``names`` are sorted, so that the order of writing makes no difference.
    ``dtype`` of the exact rows: f16, bf16 or None (automatic). Raises RequestError on a state that
    no text could have given.
    """

    mode: TailMode = TailMode.DISABLED
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in TAIL_DTYPES:
            needed = f"{' or '.join(TAIL_DTYPES)}, or None for automatic"
            hint = did_you_mean(str(self.dtype), TAIL_DTYPES)
            raise RequestError("tail dtype", found=repr(self.dtype), needed=needed, hint=hint)
        # Lists and plain strings are left to fail here too: they would not hash, or not print.
        n = len(self.counts)
        fits = {
            TailMode.NUMERIC: n == 1,
            TailMode.POSITIONAL: n > 1,
            TailMode.NAMED: n >= 1,
        }.get(self.mode, n == 0) and isinstance(self.mode, TailMode)
        whole = isinstance(self.counts, tuple) and all(
            type(c) is int and 0 <= c <= MAX_ROWS for c in self.counts
        )
        named = self.names == tuple(sorted(set(self.names))) and not any(
            name == "" or "," in name or "=" in name for name in self.names
        )
        named &= len(self.names) == (n if self.mode is TailMode.NAMED else 0)
        if not (fits and whole and named):
            found = f"{self.mode} with counts {self.counts} and names {self.names}"
            raise RequestError("tail", found=found, needed=f"what one of {GRAMMAR} gives")

    @classmethod
    def parse(cls, spec: str, dtype: str | None = None) -> TailRequest:
        """Read ``spec`` (rule T1); RequestError names the entry that cannot be read.

        ``''`` off, ``auto`` 1024 rows, ``N`` rows, ``N0,N1`` per group in order of the lowest
        layer, ``full=N,swa=N`` by role or ``full@l0=N`` by group id.
        """
        if not isinstance(spec, str):
            raise RequestError("tail", found=repr(spec), needed=f"text: {GRAMMAR}")
        if spec == "":
            return cls(dtype=dtype)
        if spec == "auto":
            return cls(TailMode.AUTOMATIC, dtype=dtype)
        entries = spec.split(",")
        if "=" not in spec:
            near = did_you_mean(spec.strip().lower(), ["auto"])
            counts = tuple(_count(e, e, near or f"valid: {GRAMMAR}") for e in entries)
            mode = TailMode.NUMERIC if len(counts) == 1 else TailMode.POSITIONAL
            return cls(mode, counts, dtype=dtype)
        named: dict[str, int] = {}
        for entry in entries:
            name, *rest = entry.split("=")
            if len(rest) != 1:
                needed = "one '=' in an entry" if rest else "name=N in every entry, or in none"
                raise RequestError("tail", found=f"{entry!r} in {spec!r}", needed=needed)
            if not name:
                needed = "full, swa or a group id before '='"
                raise RequestError("tail", found=f"no name in {entry!r}", needed=needed)
            if name in named:
                found = f"{name!r} a second time, in {entry!r}"
                raise RequestError("tail", found=found, needed="every name once")
            named[name] = _count(entry, rest[0])
        names = tuple(sorted(named))
        return cls(TailMode.NAMED, tuple(named[n] for n in names), names, dtype)

    def __str__(self) -> str:
        if self.mode is TailMode.AUTOMATIC:
            return "auto"
        if self.mode is TailMode.NAMED:
            return ",".join(f"{n}={c}" for n, c in zip(self.names, self.counts, strict=True))
        return ",".join(map(str, self.counts))

    @property
    def asks(self) -> bool:
        """True when some group gets more than its own intrinsic rows."""
        return self.mode is TailMode.AUTOMATIC or any(self.counts)

    def for_draft(self) -> TailRequest:
        """The request of a draft beside this target: off, because drafts inherit nothing (T12)."""
        return TailRequest()

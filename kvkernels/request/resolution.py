"""What a request comes to for each cache group of a model (rules T2-T5 and A3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kvkernels.errors import RequestError
from kvkernels.op import GROUP, TAIL_DTYPES
from kvkernels.request.grammar import TailRequest
from kvkernels.request.groups import CacheGroup, Family, assign
from kvkernels.settings import settings
from kvkernels.values import whole


class Representation(StrEnum):
    """Where the exact rows lie: nowhere, in KVarN's own stage, in a ring over the compressed body,
    or in a ring (full attention: a plain exact cache) that replaces the body.
    """

    NONE = "none"
    STAGE = "stage"
    OVERLAY = "overlay"
    NATIVE_EXACT = "native_exact"


class TailOp(StrEnum):
    """The operations of a complete tail route; a missing one is named in the refusal."""

    WRITE = "K/V body and exact write"
    GATHER = "exact K/V gather"
    BODY_SCORE = "body K score"
    BODY_VALUE = "body V reduction"
    EXACT_SCORE = "exact K score"
    EXACT_VALUE = "exact V reduction"
    MERGE = "generic merge"
    NATIVE = "native attached-tail attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class TailRoute:
    """What the devices of a group can do for exact rows of one dtype.

    ``missing`` operations: none means a complete route. ``native``: some device that serves the
    group has a native tail entry, of whatever dtype. ``where`` names layers, device and types.
    """

    native: bool
    missing: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        text = f"no {', no '.join(self.missing)}" if self.missing else "complete"
        return f"{text} ({self.where})" if self.where else text


Ask = Callable[[CacheGroup, str], TailRoute]
Routes = Ask | Mapping[tuple[str, str], TailRoute]


@dataclass(frozen=True, slots=True)
class TailNote:
    """One line for the start-up log: stable id, whether it is a warning, and the text."""

    id: str
    warning: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedTail:
    """What a request comes to for one group. All counts in rows of one sequence.

    ``raw`` was asked for, ``requested`` is that by the rules of the family, ``effective`` is kept
    exact. ``dtype`` None: no exact rows. ``rollback`` R: rows that a ring holds beyond them; 0
    without a ring.
    """

    group: CacheGroup
    raw: int
    requested: int
    effective: int
    window: int
    dtype: str | None
    representation: Representation
    rollback: int
    notes: tuple[TailNote, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        data = asdict(self)
        data["group"] = self.group.id
        data["representation"] = str(self.representation)
        return data

    def explain(self) -> str:
        """In words, with the notes."""
        kind = str(self.representation).replace("_", " ")
        text = f"tail of {self.group.id}: {self.raw} rows asked for, {self.effective} exact"
        text += f" ({kind}{f', {self.dtype}' if self.dtype else ''}"
        text += f", {self.rollback} more for rollback)" if self.rollback else ")"
        return "\n".join([text, *(f"  {note.text}" for note in self.notes)])

    @property
    def warnings(self) -> tuple[TailNote, ...]:
        """The notes that a user should see without asking."""
        return tuple(note for note in self.notes if note.warning)


def resolve(
    request: TailRequest,
    groups: Sequence[CacheGroup],
    n_ctx: int,
    routes: Routes,
    *,
    rollback: int = 0,
    allow_generic: bool | None = None,
) -> tuple[ResolvedTail, ...]:
    """What ``request`` comes to for every group of a model, in the order of ``groups``.

    ``routes``: per (group, dtype) what the devices can do, as a function or as a mapping by
    (group id, dtype) in which an absent key means that nothing can be done. ``rollback``: rows a
    user may take back; with a ring it is at least 1. ``allow_generic`` None: as the environment
    says (T5). All or nothing: RequestError names the group and what is wrong.
    """
    given: object = request
    if not isinstance(given, TailRequest):
        hint = "TailRequest.parse('') is off"
        raise RequestError("tail", found=repr(given), needed="a TailRequest", hint=hint)
    whole("n_ctx", n_ctx, 1)
    whole("rollback", rollback, 0)
    if request.asks and not groups:
        needed = "no tail on a model without cache layers"
        raise RequestError("tail", found=repr(str(request)), needed=needed)
    ask = routes if callable(routes) else _looked_up(routes)
    raws = assign(request, groups)
    for group in groups:
        if group.k_only and raws[group.id]:  # rule A3
            found = f"a tail of {raws[group.id]} rows for {group.id} with K-only layer "
            found += ", ".join(map(str, group.k_only))
            raise RequestError("tail", found=found, needed="0 for a group with MLA layers")
    tails = [group for group in groups if raws[group.id]]
    # Presence of an entry, not its types: which types it takes is the question of T4.
    native = any(ask(group, dtype).native for group in tails for dtype in TAIL_DTYPES)
    if allow_generic is None and tails and not native:
        allow_generic = settings().tail_allow_generic
    resolved = []
    for group in groups:
        raw = raws[group.id]
        kept = raw if native or allow_generic else 0
        tail = _resolve_group(request, group, kept, min(group.window, n_ctx), ask, rollback)
        if raw and not native:
            text = f"{group.id}: {raw} rows asked for and no device with a native tail entry; "
            text += "kept all the same, slow and large" if kept else f"{tail.effective} stay exact"
            text += "" if kept else " (KVK_TAIL_ALLOW_GENERIC=1 keeps the rest)"
            tail = replace(tail, raw=raw, notes=(TailNote("tail.gate", True, text), *tail.notes))
        resolved.append(tail)
    return tuple(resolved)


def _looked_up(routes: Mapping[tuple[str, str], TailRoute]) -> Ask:
    unknown = TailRoute(native=False, missing=("known route",))
    return lambda group, dtype: routes.get((group.id, dtype), unknown)


def _resolve_group(
    request: TailRequest, group: CacheGroup, raw: int, window: int, ask: Ask, rollback: int
) -> ResolvedTail:
    if group.family is Family.KVARN:  # rule T3
        own = min(GROUP, window)
        requested = effective = max(own, min(-(-raw // GROUP) * GROUP, window))
    else:  # rule T2
        own, requested, effective = 0, raw, min(raw, window)
    covered = effective == window
    representation = Representation.NATIVE_EXACT if covered else Representation.OVERLAY
    dtype: str | None
    notes: list[TailNote] = []
    # Asked for in words, bf16 must be what the rows are where a ring can hold them.
    insists = covered and raw > 0 and request.dtype == "bf16"
    if effective > own or (insists and own):
        dtype = _exact_dtype(request, group, representation, ask, notes)
    elif group.family is Family.STANDARD:
        representation, dtype = Representation.NONE, None
    else:
        # Rows that the stage holds anyway get a ring only where it replaces body and stage.
        dtype = request.dtype or "f16"
        route = ask(group, dtype)
        if not covered or route.missing or not route.native:
            if raw and dtype != "f16":
                text = f"{group.id}: its {effective} rows lie in the stage, as f16 and not {dtype}"
                notes.append(TailNote("tail.stage", True, text))
            representation, dtype = Representation.STAGE, "f16"
    if raw and raw != effective:
        text = f"{group.id}: {raw} rows asked for, {effective} kept; the window is {window} rows"
        text += f", records seal {GROUP}" if group.family is Family.KVARN else ""
        notes.append(TailNote("tail.rows", False, text))
    ring = representation in (Representation.OVERLAY, Representation.NATIVE_EXACT)
    return ResolvedTail(
        group=group,
        raw=raw,
        requested=requested,
        effective=effective,
        window=window,
        dtype=dtype,
        representation=representation,
        rollback=max(1, rollback) if ring else 0,
        notes=tuple(notes),
    )


def _exact_dtype(
    request: TailRequest,
    group: CacheGroup,
    representation: Representation,
    ask: Ask,
    notes: list[TailNote],
) -> str:
    """The dtype of a ring (rule T4); RequestError names the missing operations."""
    if request.dtype is not None:
        tried = [request.dtype]
    else:
        tried = ["f16"] if group.family is Family.KVARN else ["bf16", "f16"]
    failures: list[str] = []
    for dtype in tried:
        route = ask(group, dtype)
        if not route.missing:
            if failures:
                text = f"{group.id}: {dtype} instead of {'; '.join(failures)}"
                notes.append(TailNote("tail.dtype", True, text))
            return dtype
        failures.append(f"{dtype}: {route}")
    others = [d for d in TAIL_DTYPES if d not in tried and not ask(group, d).missing]
    layers = ", ".join(map(str, group.layers))
    raise RequestError(
        "tail dtype",
        found=f"{representation} tail of {group.id} (layers {layers}), {'; '.join(failures)}",
        needed="a complete route",
        hint=f"{others[0]} has one" if others else "",
    )

"""The cache groups of a model, and how many rows a request names for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvkernels.errors import RequestError, did_you_mean
from kvkernels.op import LayerSpec
from kvkernels.request.grammar import AUTO_ROWS, TailMode, TailRequest
from kvkernels.values import whole


class Family(StrEnum):
    """Which rules the body of a group follows: T2 (standard types) or T3 (KVarN records)."""

    STANDARD = "standard"
    KVARN = "kvarn"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that share a window and a tail.

    ``window`` in tokens, at most n_ctx; ``k_only``: its layers whose V is read from K (MLA).
    ``applicable`` False: an engine keeps this group without a tail whatever is asked.
    """

    role: str
    id: str
    layers: tuple[int, ...]
    window: int
    family: Family
    k_only: tuple[int, ...] = ()
    applicable: bool = True


def cache_groups(layers: Sequence[LayerSpec], n_ctx: int) -> tuple[CacheGroup, ...]:
    """The groups of a model, by ascending lowest layer: the order of a positional request.

    Layers are one group when role, window and family agree. Most models have one group per role;
    with more, the role alone is ambiguous and the ids tell them apart. Windows are compared before
    they are capped at ``n_ctx``, so that a request means the same at every context length.
    """
    whole("n_ctx", n_ctx, 1)
    found: dict[tuple[int | None, bool], list[int]] = {}
    for index, layer in enumerate(layers):
        found.setdefault((layer.window, layer.is_kvarn), []).append(index)
    groups = []
    for (window, kvarn), members in found.items():  # first seen first: ascending lowest layer
        role = "full" if window is None else "swa"
        group = CacheGroup(
            role=role,
            id=f"{role}@l{members[0]}",
            layers=tuple(members),
            window=n_ctx if window is None else min(window, n_ctx),
            family=Family.KVARN if kvarn else Family.STANDARD,
            k_only=tuple(i for i in members if layers[i].attention == "mla"),
        )
        groups.append(group)
    return tuple(groups)


def assign(request: TailRequest, groups: Sequence[CacheGroup]) -> dict[str, int]:
    """Raw rows by group id; 0 where a tail is not applicable."""
    ids = [group.id for group in groups]
    if request.mode is TailMode.NAMED:
        counts = _by_name(request, groups)
    elif request.mode is TailMode.POSITIONAL:
        if len(request.counts) != len(ids):
            found = f"{len(request.counts)} counts in {str(request)!r}"
            needed = f"{len(ids)}, one for each of {', '.join(ids) or 'no group'}"
            raise RequestError("tail", found=found, needed=needed)
        counts = dict(zip(ids, request.counts, strict=True))
    else:
        every = AUTO_ROWS if request.mode is TailMode.AUTOMATIC else sum(request.counts)
        counts = dict.fromkeys(ids, every)
    return {group.id: counts[group.id] if group.applicable else 0 for group in groups}


def _by_name(request: TailRequest, groups: Sequence[CacheGroup]) -> dict[str, int]:
    ids = [group.id for group in groups]
    counts: dict[str, int] = {}
    alias: dict[str, str] = {}
    valid = list(dict.fromkeys([group.role for group in groups] + ids))
    for name, count in zip(request.names, request.counts, strict=True):
        named = [group.id for group in groups if name in (group.role, group.id)]
        if not named:
            needed = f"one of {', '.join(valid) or 'no group'}"
            hint = did_you_mean(name, valid)
            raise RequestError("tail", found=f"unknown {name!r}", needed=needed, hint=hint)
        if len(named) > 1:
            found = f"{name!r}, which stands for {len(named)} groups"
            raise RequestError("tail", found=found, needed=f"one of {', '.join(named)}")
        (group_id,) = named
        if group_id in counts:
            found = f"{group_id} twice, as {alias[group_id]!r} and as {name!r}"
            raise RequestError("tail", found=found, needed="every group once")
        counts[group_id], alias[group_id] = count, name
    if absent := [i for i in ids if i not in counts]:
        found = f"nothing for {', '.join(absent)} in {str(request)!r}"
        raise RequestError("tail", found=found, needed=f"every group once: {', '.join(ids)}")
    return counts

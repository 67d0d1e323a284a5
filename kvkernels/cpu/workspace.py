"""Bytes of workspaces that a plan's largest steps take: what ``Scratch`` will hold (M2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from kvkernels import tail
from kvkernels.calls import DECODE_ROWS
from kvkernels.cpu.launch import CHUNK, ROW_BLOCK
from kvkernels.op import GROUP, LayerSpec, oldest_key
from kvkernels.storage import Body, Steps, Storage

_FLOAT, _HALF = 4, 2
_LANES = 64


def predicted(layers: Iterable[tuple[LayerSpec, Storage, bool]], steps: Steps) -> int:
    """Sum over workspaces of the most that any layer asks of them; ``layers``: (spec, storage,
    whether its queries are staged).
    """
    most: Counter[str] = Counter()
    for spec, storage, staged in layers:
        most |= Counter(_decode(spec, storage, steps))
        most |= Counter(_prefill(spec, steps))
        if storage.body is Body.RECORDS:
            most |= Counter(_commit(spec, staged, steps))
    return sum(most.values())


def _decode(spec: LayerSpec, storage: Storage, steps: Steps) -> dict[str, int]:
    queries = min(steps.verify, DECODE_ROWS, steps.n_ubatch)
    n = max(0, steps.n_ctx - queries)
    rows, sequences = queries * spec.gqa, max(1, min(steps.n_seq, steps.n_ubatch // queries))
    items = 1  # current rows
    if storage.body is not Body.NONE:
        first = max(_oldest(spec, n), spec.sink_tokens) // GROUP
        # Tiles hold the open group too, records only sealed ones.
        stop = n // GROUP if storage.body is Body.RECORDS else -(-n // GROUP)
        items += len(list(pairwise(_edges(first, stop))))
    items += storage.body is Body.RECORDS  # sinks, previous and open group
    if storage.tail_rows:
        oldest = max(0, n - storage.tail_rows)
        items += -(-len(tail.runs(oldest, n, storage.capacity)) // CHUNK)
    parts = sequences * spec.n_kv_head * items
    return {"partial": parts * rows * (2 + spec.head_dim_v) * _FLOAT}


def _oldest(spec: LayerSpec, n: int) -> int:
    """The oldest row that a query at ``n`` may see; of chunks, the one at the end of a chunk."""
    kind = "sliding" if spec.window_kind == "chunked" else spec.window_kind
    return oldest_key(spec.window, kind, n)


def _edges(start: int, stop: int) -> list[int]:
    return sorted({start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), max(start, stop)})


def _prefill(spec: LayerSpec, steps: Steps) -> dict[str, int]:
    if steps.n_ubatch <= DECODE_ROWS:
        return {}
    rows = max(1, ROW_BLOCK // spec.gqa) * spec.gqa
    stride = -(-steps.n_ubatch // _LANES) * _LANES + _LANES
    return {
        "partial": rows * (2 + spec.head_dim_v) * _FLOAT,
        "k_transposed": spec.n_kv_head * spec.head_dim * stride * _FLOAT,
    }


def _commit(spec: LayerSpec, staged: bool, steps: Steps) -> dict[str, int]:
    heads = max(spec.n_kv_head, spec.n_head if staged else 0)
    row = spec.head_dim * _HALF
    found = {"rotated_rows": min(GROUP, steps.n_ubatch) * heads * row}
    # A group that is neither kept exact nor open when the step ends passes through a tile.
    if steps.n_ubatch > 2 * GROUP and steps.n_ctx > 2 * GROUP + spec.sink_tokens:
        tile = GROUP * row
        found |= {"k tiles": spec.n_kv_head * tile, "v tiles": spec.n_kv_head * tile}
        found |= {"query_tiles": spec.n_head * tile} if staged else {}
    return found

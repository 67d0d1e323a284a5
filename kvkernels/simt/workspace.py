"""Bytes of workspaces that a plan's largest steps take: what ``Scratch`` will hold (M2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvkernels import tail
from kvkernels.calls import DECODE_ROWS
from kvkernels.op import GROUP, LayerSpec, oldest_key
from kvkernels.simt.commit import workspaces
from kvkernels.simt.launch import CHUNK, block_rows, chunk_of
from kvkernels.storage import Body, Steps, Storage

_FLOAT = 4


def predicted(layers: Iterable[tuple[LayerSpec, Storage, bool]], steps: Steps) -> int:
    """Sum over workspaces of the most that any layer asks of them; ``layers``: (spec, storage,
    whether its queries are staged).
    """
    most: Counter[str] = Counter()
    for spec, storage, staged in layers:
        most |= Counter(_decode(spec, storage, steps))
        most |= Counter(_prefill(spec, storage, steps))
        if storage.body is Body.RECORDS:
            most |= Counter(workspaces(spec, steps, given=not staged))
    return sum(most.values())


def _attend(spec: LayerSpec, storage: Storage, rows: int, parts: int) -> dict[str, int]:
    records = storage.body is Body.RECORDS
    return {
        "rotated queries": rows * spec.n_head * spec.head_dim * _FLOAT if records else 0,
        "partial": parts * (2 + spec.head_dim_v) * _FLOAT,
    }


def _decode(spec: LayerSpec, storage: Storage, steps: Steps) -> dict[str, int]:
    """All sequences decode ``verify`` rows; or one as many as a decode takes, ending a prompt."""
    usual = min(steps.verify, DECODE_ROWS, steps.n_ubatch)
    most = min(DECODE_ROWS, steps.n_ubatch)
    others = max(0, min(steps.n_seq - 1, (steps.n_ubatch - most) // usual))
    alike = max(1, min(steps.n_seq, steps.n_ubatch // usual))
    # One launch serves them all: its blocks are those of the sequence with the most rows.
    found: Counter[str] = Counter()
    for counts in (((most, 1), (usual, others)), ((usual, alike),)):
        block = block_rows(spec, counts[0][0], prefill=False)
        parts = sum(n * _parts(spec, storage, steps, q, block) for q, n in counts)
        queries = sum(q * n for q, n in counts)
        found |= Counter(_attend(spec, storage, queries, parts))
    return dict(found)


def _parts(spec: LayerSpec, storage: Storage, steps: Steps, queries: int, block: int) -> int:
    """Rows of partial results of one sequence."""
    n = max(0, steps.n_ctx - queries)
    blocks = -(-queries * spec.gqa // block)
    items = 1  # current rows
    if storage.body is not Body.NONE:
        kind = "sliding" if spec.window_kind == "chunked" else spec.window_kind
        first = max(oldest_key(spec.window, kind, n), spec.sink_tokens) // GROUP
        # Tiles hold the open group too, records only sealed ones.
        stop = n // GROUP if storage.body is Body.RECORDS else -(-n // GROUP)
        chunk = chunk_of(stop)
        items += -(-stop // chunk) - first // chunk if first < stop else 0
    items += storage.body is Body.RECORDS  # sinks, previous and open group
    if storage.tail_rows:
        oldest = max(0, n - storage.tail_rows)
        items += -(-len(tail.runs(oldest, n, storage.capacity)) // CHUNK)
    return spec.n_kv_head * blocks * items * block


def _prefill(spec: LayerSpec, storage: Storage, steps: Steps) -> dict[str, int]:
    if steps.n_ubatch <= DECODE_ROWS:
        return {}
    block = block_rows(spec, steps.n_ubatch, prefill=True)
    sources = 1 + (storage.body is not Body.NONE) + (storage.body is Body.RECORDS)
    sources += storage.tail_rows > 0
    blocks = -(-steps.n_ubatch * spec.gqa // block)
    return _attend(spec, storage, steps.n_ubatch, sources * blocks * spec.n_kv_head * block)

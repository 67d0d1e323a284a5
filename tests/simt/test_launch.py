"""Launch lists: what items a sequence is cut into."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvkernels.calls import Batch, SeqView, TailView, Tile
from kvkernels.op import LayerSpec
from kvkernels.simt import launch
from kvkernels.simt.launch import BODY, CHUNK, CURRENT, EXACT, LONG, LONG_CHUNK, RING, Builder
from kvkernels.storage import Body

LAYER = LayerSpec(n_head=4, n_kv_head=2, head_dim=64)


def view(groups: int, first: int = 0, n_q: int = 1, seq: int = 0, at: int = 0) -> SeqView:
    """A sequence of that many sealed groups and 40 rows more."""
    table = np.arange(groups, dtype=np.int32)
    tiles = (Tile(0, groups * 128, 40, False),)
    return SeqView(seq, at, n_q, groups * 128 + 40, table, (first, groups), tiles)


def items(*views: SeqView, rows: int = 8, prefill: bool = False) -> list[tuple[int, ...]]:
    """(sequence, head, source, first, last, part, row, rows) of every item."""
    n_rows = sum(v.n_q for v in views)
    builder = Builder(LAYER, Body.RECORDS, rows, current=True, prefill=prefill)
    cuts = np.full(n_rows, 2**40)
    work = builder.build(Batch(tuple(views), n_rows), cuts)
    flat = np.asarray(work.lists)
    at = flat[1]
    return [tuple(int(x) for x in flat[at + 8 * i : at + 8 * i + 8]) for i in range(work.items)]


def spans(found: list[tuple[int, ...]], source: int, head: int = 0) -> list[tuple[int, int]]:
    return [item[3:5] for item in found if item[1:3] == (head, source)]


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 8, 9, 1023, 1024, 1025, 1040, 2000])
@pytest.mark.parametrize("first", [0, 2, 3, 7, 17, 1000])
def test_chunks_cover_the_body_and_are_cut_at_fixed_groups(groups: int, first: int) -> None:
    first = min(first, groups)
    found = spans(items(view(groups, first)), BODY)
    chunk = LONG_CHUNK if groups > LONG else CHUNK
    assert [g for a, b in found for g in range(a, b)] == list(range(first, groups))
    assert all(b % chunk == 0 for _, b in found[:-1])
    assert all(b - a <= chunk for a, b in found)


def test_long_sequences_have_longer_chunks() -> None:
    assert len(spans(items(view(LONG)), BODY)) == LONG // CHUNK
    assert len(spans(items(view(LONG + 1)), BODY)) == LONG // LONG_CHUNK + 1


def test_growing_by_a_group_moves_no_cut() -> None:
    """So that rows are added in one order as long as a sequence is not LONG."""
    for short, more in pairwise(range(1, 40)):
        a, b = (spans(items(view(n)), BODY) for n in (short, more))
        assert a[:-1] == b[: len(a) - 1]


def test_a_prefill_takes_every_source_whole() -> None:
    found = items(view(50, n_q=64), rows=16, prefill=True)
    assert set(spans(found, BODY)) == {(0, 50)}
    assert set(spans(found, EXACT)) == {(0, 1)}
    rows = [item[6:8] for item in found if item[1:3] == (1, CURRENT)]
    assert rows == [(row, 16) for row in range(0, 128, 16)]  # two heads share a KV head


def test_blocks_of_rows_are_alike_in_any_company() -> None:
    alone = items(view(9, n_q=3))
    company = items(view(2, n_q=2, seq=0), view(9, n_q=3, seq=1, at=2))

    def cut(item: tuple[int, ...]) -> tuple[int, ...]:
        """Head, source, rows, and the keys: tiles by their number among the sequence's own."""
        first = item[0] if item[2] == EXACT else 0  # each sequence has one
        return (*item[1:3], item[3] - first, item[4] - first, *item[6:])

    mine = [cut(item) for item in company if item[0] == 1]
    assert mine == [cut(item) for item in alone]
    assert [item[5] for item in company] == list(range(len(company)))


def test_runs_of_a_ring_are_counted_from_its_oldest() -> None:
    tail = TailView(0, 0, 700, 1024)
    seen = SeqView(0, 0, 1, 700, np.zeros(0, np.int32), (0, 0), (), tail)
    builder = Builder(LAYER, Body.NONE, 2, current=False, prefill=False)
    work = builder.build(Batch((seen,), 1), np.zeros(1, np.int64))
    flat = np.asarray(work.lists)
    found = flat[flat[1] :][: 8 * work.items].reshape(-1, 8)
    assert set(found[:, 2]) == {RING}
    assert [tuple(x) for x in found[found[:, 1] == 0][:, 3:5]] == [(0, 4), (4, 6)]
    assert work.sources == {RING}


def test_rows_of_a_block_follow_what_a_decode_asks_for() -> None:
    def rows(n_head: int, n_q: int) -> int:
        layer = LayerSpec(n_head=n_head, n_kv_head=1, head_dim=64)
        return launch.block_rows(layer, n_q, prefill=False)

    assert [rows(*x) for x in ((1, 1), (2, 1), (3, 1), (5, 1), (1, 16), (8, 16))] == [
        1, 2, 4, 8, 8, 8,
    ]  # fmt: skip

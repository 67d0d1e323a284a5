"""Pages as pure integers: pools never run out within the limits, counts are right, and every page
holds what its sequence says, whatever order of appends, rollbacks and forks.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import tail
from kvkernels.calls import GroupWrite
from kvkernels.errors import CapacityError
from kvkernels.op import oldest_key
from kvkernels.pages import PageClass, PageRules, SeqPages, Writes, view
from kvkernels.pools import PagePool, Taking
from kvkernels.records.layout import GROUP
from kvkernels.storage import Body

WINDOWS = st.sampled_from([None, None, 1, 100, 127, 128, 129, 150, 300, 640])


def rules(
    window: int | None = None, sink: int = 0, body: Body = Body.RECORDS, tail: int = 0,
    reserve: int = 0, kind: str = "sliding",
) -> PageRules:  # fmt: skip
    return PageRules(window, kind, sink, body, tail, reserve)


class Tokens:
    """One page class with sequences whose rows are numbered; pages hold row numbers."""

    def __init__(self, wanted: PageRules, n_ctx: int, n_ubatch: int, n_seq: int) -> None:
        pages = wanted.capacity(n_ctx=n_ctx, n_ubatch=n_ubatch, n_seq=n_seq)
        self.cls = PageClass(wanted, pages)
        self.limits = (n_ctx, n_ubatch, n_seq)
        self.rows: dict[int, list[int]] = {}
        self.pages: dict[int, SeqPages] = {}
        self.records: list[list[int]] = [[-1] * GROUP for _ in range(pages.slots)]
        self.blocks: list[list[int]] = [[-1] * GROUP for _ in range(pages.blocks)]
        self.rings: list[list[int]] = [[-1] * wanted.ring_rows for _ in range(pages.rings)]
        self.fresh = 0

    def append(self, n_tokens: dict[int, int], *, fail: bool = False) -> None:
        """A step, as the cache does it: all pages are taken, written, published, then let go."""
        taking, writes = Taking(), Writes()
        new: dict[int, tuple[list[int], SeqPages]] = {}
        fresh: list[int] = []
        for seq, n in n_tokens.items():
            old, rows = self.pages.get(seq, SeqPages()), self.rows.get(seq, [])
            pages = self.cls.append(old, len(rows), n, len(fresh), taking, writes)
            added = list(range(self.fresh, self.fresh + n))
            self.fresh += n
            fresh += added
            new[seq] = rows + added, pages
        for write in writes.groups:
            self._write(write, fresh)
        if fail:
            taking.give_back()
            return
        for w in writes.tails:
            if w.base >= 0:
                self.rings[w.ring] = list(self.rings[w.base])
            part = fresh[w.source : w.source + w.rows]
            self.rings[w.ring][w.slot : w.slot + w.rows] = part
            assert len(self.rings[w.ring]) == self.cls.rules.ring_rows
        for seq, (rows, pages) in new.items():
            old = self.pages.get(seq, SeqPages())
            self.rows[seq], self.pages[seq] = rows, pages
            self.cls.release(old, pages)

    def _write(self, w: GroupWrite, fresh: list[int]) -> None:
        part = fresh[w.source : w.source + w.rows]
        if self.cls.rules.body is Body.TILES:
            if w.row and w.base != w.slot:
                self.records[w.slot] = list(self.records[w.base])
            self.records[w.slot][w.row : w.row + w.rows] = part
            return
        if w.block >= 0:
            target = self.blocks[w.block]
            if w.base != w.block and w.row:
                target[: w.row] = self.blocks[w.base][: w.row]
        else:
            target = [-1] * GROUP
            assert w.row == 0 or w.base >= 0
            if w.row:
                target[: w.row] = self.blocks[w.base][: w.row]
        target[w.row : w.row + w.rows] = part
        if w.slot >= 0:
            self.records[w.slot] = list(target)

    def truncate(self, seq: int, n: int) -> None:
        old = self.pages[seq]
        self.pages[seq] = self.cls.truncate(old, n)
        self.rows[seq] = self.rows[seq][:n]
        self.cls.release(old, self.pages[seq])

    def fork(self, src: int, dst: int) -> None:
        old = self.pages.get(dst)
        self.cls.retain(self.pages[src])
        self.pages[dst], self.rows[dst] = self.pages[src], list(self.rows[src])
        if old is not None:
            self.cls.release(old)

    def remove(self, seq: int) -> None:
        self.cls.release(self.pages.pop(seq))
        del self.rows[seq]

    def check(self) -> None:
        slots: Counter[int] = Counter()
        blocks: Counter[int] = Counter()
        for seq, pages in self.pages.items():
            rows = self.rows[seq]
            n = len(rows)
            slots.update(pages.slots())
            blocks.update(pages.blocks.values())
            assert len(set(pages.slots())) == len(pages.slots())
            for group, slot in enumerate(pages.table):
                if slot >= 0:
                    part = rows[group * GROUP : (group + 1) * GROUP]
                    assert self.records[slot][: len(part)] == part
            for group, block in pages.blocks.items():
                part = rows[group * GROUP : (group + 1) * GROUP]
                assert self.blocks[block][: len(part)] == part
            self._check_view(pages, n)
        assert self.cls.slots._refs == [slots[i] for i in range(self.cls.slots.capacity)]
        assert self.cls.blocks._refs == [blocks[i] for i in range(self.cls.blocks.capacity)]
        rings = Counter(p.ring.ring for p in self.pages.values() if p.ring)
        assert self.cls.rings._refs == [rings[i] for i in range(self.cls.rings.capacity)]
        for pool in (self.cls.slots, self.cls.blocks, self.cls.rings):
            assert pool.free == pool._refs.count(0)
            assert sorted(pool._free) == [i for i, refs in enumerate(pool._refs) if not refs]

    def _check_view(self, pages: SeqPages, n: int) -> None:
        """Every row that the next query sees is in a record, an exact tile or the ring; in a record
        and a tile only where the tile is marked as the twin of a record.
        """
        if n == self.limits[0]:
            return  # no further query can come
        seen, wanted = view(self.cls, pages, seq=0, q_start=0, n_q=1, n_past=n), self.cls.rules
        records = set(range(seen.body[0] * GROUP, min(n, seen.body[1] * GROUP)))
        assert all(pages.table[group] >= 0 for group in range(*seen.body))
        exact = {t.base + i: t for t in seen.tiles for i in range(t.rows)}
        lowest = oldest_key(wanted.window, wanted.window_kind, n)
        ring = {}
        if seen.tail:
            oldest = max(seen.tail.start, n - wanted.tail_rows + 1)
            for run in tail.runs(oldest, n, wanted.ring_rows):
                ring |= {
                    run.base + i: run.slot + i for i in range(run.rows) if run.base + i >= oldest
                }
        for row, slot in ring.items():
            assert self.rings[seen.tail.ring][slot] == self.rows_of(pages)[row]
        if wanted.tail_rows and not pages.ring.flags:
            assert ring.keys() >= set(range(max(0, n - wanted.tail_rows + 1), n))
        assert set(range(lowest, n)) <= records | exact.keys() | ring.keys()
        for row in exact.keys() & records:
            assert exact[row].twin
        assert sum(t.twin for t in seen.tiles) <= 1  # one group number is all a launch carries

    def rows_of(self, pages: SeqPages) -> list[int]:
        return next(self.rows[seq] for seq, own in self.pages.items() if own is pages)


BODIES = st.sampled_from([(Body.RECORDS, 0), (Body.RECORDS, 256), (Body.TILES, 0), (Body.TILES, 50),
                          (Body.NONE, 1)])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    window=WINDOWS,
    kind=st.sampled_from(["sliding", "sliding", "chunked", "symmetric"]),
    body=BODIES,
    reserve=st.integers(1, 9),
    sink=st.sampled_from([0, 0, 128, 384]),
    n_ctx=st.integers(1, 300) | st.integers(1, 900),
    n_ubatch=st.integers(1, 700),
    n_seq=st.integers(1, 4),
    seed=st.integers(0, 10**9),
)
def test_pools_never_run_out_and_pages_never_mix(
    window: int | None, kind: str, body: tuple[Body, int], reserve: int, sink: int, n_ctx: int,
    n_ubatch: int, n_seq: int, seed: int,
) -> None:  # fmt: skip
    what, rows = body
    if what is Body.NONE:  # a covered window is all there is
        window = window or 150
        rows = min(window, n_ctx)
    has_sink = what is Body.RECORDS and window is None
    wanted = rules(
        window, sink if has_sink else 0, what, rows, reserve if rows else 0,
        kind if window else "sliding",
    )  # fmt: skip
    world = Tokens(wanted, n_ctx, n_ubatch, n_seq)
    source = random.Random(seed)
    for _ in range(40):
        known = sorted(world.pages)
        action = source.choice(["step"] * 6 + ["full", "fail", "rollback", "fork", "remove"])
        if action in ("step", "full", "fail"):
            room, step = n_ubatch, {}
            chosen = source.sample(range(n_seq), source.randint(1, n_seq))
            for i, seq in enumerate(chosen):
                free = min(n_ctx - len(world.rows.get(seq, [])), room - (len(chosen) - 1 - i))
                if free >= 1:
                    n = free if action == "full" and i == 0 else source.randint(1, free)
                    step[seq] = min(n, source.choice([1, 3, 130, 260, 900]))
                    room -= step[seq]
            if step:
                world.append(step, fail=action == "fail")
        elif not known:
            continue
        elif action == "rollback":
            seq = source.choice(known)
            n = len(world.rows[seq])
            world.truncate(seq, source.randint(world.cls.lowest(world.pages[seq], n), n))
        elif action == "fork":
            src, dst = source.choice(known), source.randrange(n_seq)
            if src != dst:
                world.fork(src, dst)
        else:
            world.remove(source.choice(known))
        world.check()
    for seq in list(world.pages):
        world.remove(seq)
    world.check()


@pytest.mark.parametrize("window", [None, 1, 150, 640])
def test_every_sequence_at_its_limit(window: int | None) -> None:
    """The largest steps there are, all sequences forked from one and then each on its own."""
    for n_seq in (1, 2, 3):
        for n_ubatch in (1, 128, 130, 260, 391):
            world = Tokens(rules(window, 0 if window else 128), 1100, n_ubatch, n_seq)
            while len(world.rows.get(0, [])) + n_ubatch <= 400:
                world.append({0: n_ubatch})
            if 0 in world.rows:
                for seq in range(1, n_seq):
                    world.fork(0, seq)
            while True:
                n = n_ubatch // n_seq
                step = {
                    s: min(n, 1100 - len(world.rows.get(s, [])))
                    for s in range(n_seq)
                    if len(world.rows.get(s, [])) < 1100
                }
                if not n or not step:
                    break
                world.append(step)
            world.check()


def test_capacity_is_no_larger_than_it_has_to_be() -> None:
    """One page less runs out somewhere: the formula is a bound, not a guess."""
    wanted = rules(sink=128)
    pages = wanted.capacity(n_ctx=512, n_ubatch=512, n_seq=1)
    assert pages == (3, 4 + 1, 0)
    cls = PageClass(wanted, pages._replace(slots=pages.slots - 1))
    with pytest.raises(CapacityError, match="no free record slot: all 2 are held"):
        cls.append(SeqPages(), 0, 512, 0, Taking(), Writes())


def test_pool() -> None:
    pool = PagePool("page", 3)
    assert [pool.take(), pool.take()] == [0, 1]
    assert pool.free == 1
    pool.retain(0)
    assert pool.shared(0)
    assert not pool.shared(1)
    pool.release(0)
    pool.release(0)
    assert pool.free == 2
    assert [pool.take(), pool.take()] == [0, 2]
    with pytest.raises(CapacityError, match=r"no free page: all 3 are held; remove a sequence"):
        pool.take()
    pool.release(1)
    with pytest.raises(AssertionError):
        pool.release(1)
    with pytest.raises(AssertionError):
        pool.retain(1)

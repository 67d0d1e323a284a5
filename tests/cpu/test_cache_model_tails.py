"""Any order of steps, sequence operations and faults over tails, standard types and kinds of
windows, against the list-of-rows model. Every operation is followed by a probe of every sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
from cache_tools import Twin, fingerprint, make, model_by_rules, spec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_cache_model import N_SEQ, N_UBATCH, SEQS, CacheMachine, run

import kvkernels as kvk
from kvkernels import errors
from kvkernels.registry import open_device

PROBE = 3  # rows that every sequence keeps free for its probe
ROLLBACK = 8
TOKENS = st.dictionaries(SEQS, st.integers(1, 200), min_size=1)


def plain(k: str, v: str, **changes: Any) -> kvk.LayerSpec:
    return spec(**({"k": k, "v": v, "head_dim": 32} | changes))


#: layers of one cache by what their rows are kept in
ROUTES: dict[str, tuple[kvk.LayerSpec, ...]] = {
    "records under a tail": (spec(tail=256, sink_tokens=128),),
    "records under a bf16 tail": (spec(tail=256, tail_dtype="bf16"),),
    "standard": (plain("q8_0", "q4_0", head_dim_v=64), plain("f16", "q5_1", window=150)),
    "standard under a tail": (plain("q8_0", "q4_0", tail=70, head_dim_v=64),),
    "standard window under a tail": (plain("q4_1", "q5_0", window=150, tail=40, tail_dtype="f16"),),
    "native exact window": (spec(window=150, tail=150, tail_dtype="bf16"),),
    "native exact window, standard": (plain("q4_0", "q4_0", window=60, tail=60),),
    "native exact": (spec(tail=4096), plain("q4_0", "q8_0", tail=4096)),
    "window of records under a tail": (spec(window=300, tail=256),),
    "chunked": (
        plain("q8_0", "q4_0", window=90, window_kind="chunked"),
        spec(window=150, window_kind="chunked"),
    ),
    "chunked under tails": (
        plain("q8_0", "q4_0", window=90, window_kind="chunked", tail=30),
        spec(window=300, window_kind="chunked", tail=256),
    ),
    "chunked, native exact": (spec(window=150, window_kind="chunked", tail=150),),
    "symmetric": (
        plain("q8_0", "q4_0", window=90, window_kind="symmetric"),
        plain("q8_0", "q4_0", window=200, window_kind="symmetric", tail=30),
    ),
    "mixed": (
        spec(tail=256, sink_tokens=128),
        spec(window=150, tail=150),
        plain("q8_0", "q8_0", tail=33),
    ),
}


class TailMachine(CacheMachine):
    """The machine of records with other layers, probes after every operation, and faults."""

    route = ""

    @initialize(short=st.booleans(), route=st.sampled_from(sorted(ROUTES)))
    def start(self, short: bool, route: str) -> None:
        layers = ROUTES[self.route or route]
        self.n_ctx = 300 if short else 600
        cache = make(
            open_device("cpu:0"), *layers, n_ctx=self.n_ctx, n_ubatch=N_UBATCH, n_seq=N_SEQ,
            rollback=ROLLBACK,
        )  # fmt: skip
        self.twin = Twin(cache, "tails", short, route)
        for layer, model in zip(layers, self.twin.model(0), strict=True):
            if layer.tail:
                wanted = model_by_rules(layer, self.n_ctx, ROLLBACK)
                assert (model.tail, model.spec.k) == (wanted.tail, wanted.spec.k)

    def fit(self, wanted: dict[int, int]) -> dict[int, int]:
        """What the limits leave, of sequences that take steps, with room for a probe."""
        alive = {seq: n for seq, n in wanted.items() if not self.twin.broken(seq)}
        self.n_ctx -= PROBE
        fitting = super().fit(alive)
        self.n_ctx += PROBE
        return fitting

    @rule(wanted=TOKENS, hide=st.sampled_from([0.0, 0.5]))
    def step_of_any_size(self, wanted: dict[int, int], hide: float) -> None:
        if fitting := self.fit(wanted):
            self.twin.step(fitting, hide=hide)
            for seq, n in fitting.items():
                if not self.twin.invalid(seq):
                    assert self.twin.cache.horizon(seq) >= min(ROLLBACK, n)

    @rule(wanted=TOKENS)
    def failed(self, wanted: dict[int, int]) -> None:
        if fitting := self.fit(wanted):
            before = fingerprint(self.twin.cache)
            self.twin.fail(fitting)
            assert fingerprint(self.twin.cache) == before

    @rule(wanted=TOKENS, at=st.integers(1, 8), after=st.booleans())
    def fault(self, wanted: dict[int, int], at: int, after: bool) -> None:
        known = self.twin.models
        wanted = {s: n for s, n in wanted.items() if s not in known or not self.twin.invalid(s)}
        if fitting := self.fit(wanted):
            self.twin.fault(fitting, at, after=after)

    @precondition(lambda self: self.known())
    @rule(seq=SEQS, n=st.integers(0, ROLLBACK))
    def rollback_a_little(self, seq: int, n: int) -> None:
        seq = self.known()[seq % len(self.known())]
        self.twin.rollback(seq, min(n, self.twin.cache.horizon(seq)))

    @invariant()
    def probe(self) -> None:
        if not hasattr(self, "twin"):
            return
        self.twin.check_coverage()
        self.twin.check_horizon()
        alive = [seq for seq in self.known() if not self.twin.broken(seq)]
        if alive:
            before = fingerprint(self.twin.cache)
            sizes = {seq: 1 + (self.twin.drawn + i) % PROBE for i, seq in enumerate(alive)}
            self.twin.step(sizes, commit=False, hide=0.4 if self.twin.drawn % 2 else 0.0)
            assert fingerprint(self.twin.cache) == before
        for seq in set(self.known()) - set(alive):
            with pytest.raises(errors.StateError, match=f"sequence {seq}"):
                self.twin.step({seq: 1}, commit=False)


@pytest.mark.parametrize("route", ROUTES)
def test_machine_of(route: str) -> None:
    run(4, 20, type("Machine", (TailMachine,), {"route": route}))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_machine_for_longer(route: str) -> None:
    run(16, 30, type("Machine", (TailMachine,), {"route": route}))


def _filled(*layers: kvk.LayerSpec, n: int = 500, **limits: Any) -> Twin:
    base: dict[str, Any] = {"n_ctx": 700, "n_ubatch": 280, "n_seq": 3, "rollback": ROLLBACK}
    twin = Twin(make(open_device("cpu:0"), *layers, **(base | limits)), "filled", layers)
    while (at := twin.cache.length(0)) < n:
        twin.step({0: min(200, n - at)})
    return twin


def _launches(twin: Twin, n_tokens: dict[int, int]) -> int:
    """Launches of one commit, which goes through."""
    return twin.fault(n_tokens, 10**6, after=False)


def test_C8_a_fault_before_the_ring_writes_changes_nothing() -> None:
    layers = (spec(tail=256), plain("q8_0", "q4_0", tail=64), spec(window=100, tail=100))
    twin = _filled(*layers, n=300)
    twin.step({1: 40})
    # The body of the first layer is the first thing that a commit writes.
    for after in (False, True):
        assert not twin.fault({0: 50, 1: 3, 2: 5}, 1, after=after)
        assert not twin.invalid(0) | twin.invalid(1)
        twin.check_coverage()
        twin.check_horizon()
        twin.step({0: 2, 1: 1}, commit=False)
    twin.step({0: 40, 1: 3, 2: 5})


def test_T11_a_fault_in_the_ring_of_an_overlay_costs_exactness_only() -> None:
    layer = plain("q8_0", "q4_0", tail=64, tail_dtype="f16")
    twin = _filled(layer, n=200)
    last = _launches(twin, {0: 30})
    # The ring is written last: a fault in the last launch is one there.
    assert not twin.fault({0: 30}, last, after=True)
    assert twin.invalid(0) == {0}
    twin.check_coverage()
    model = twin.models[0][0]
    assert model.ring is not None
    assert model.ring.exact() == 64 + ROLLBACK - 30
    twin.step({0: 3}, commit=False)
    twin.step({0: 40})
    assert twin.invalid(0) == {0}
    twin.step({0: 24})
    assert not twin.invalid(0)  # 64 rows later
    twin.check_coverage()


def test_a_fault_in_a_bodyless_ring_ends_the_sequence() -> None:
    layer = spec(window=100, tail=100)
    twin = _filled(layer, n=250)
    twin.step({1: 150})
    twin.cache.fork(1, 2)
    twin.models[2] = [model.copy() for model in twin.models[1]]
    last = _launches(twin, {0: 1})
    assert not twin.fault({0: 60}, last, after=True)
    assert twin.invalid(0) == {0}
    assert twin.broken(0)
    before = fingerprint(twin.cache)
    with pytest.raises(errors.StateError, match="sequence 0"):
        twin.cache.step({0: 1})
    with pytest.raises(errors.StateError, match="sequence 0"):
        twin.cache.step({1: 1, 0: 1})
    assert fingerprint(twin.cache) == before
    assert not twin.broken(1)
    twin.step({1: 5, 2: 7})
    twin.remove(0)
    twin.step({0: 30, 1: 5})
    assert not twin.invalid(0)


def test_a_fault_behind_the_window_breaks_nothing() -> None:
    twin = _filled(spec(window=100, tail=100), n=250)
    last = _launches(twin, {0: 1})
    # ROLLBACK + 1 rows overwrite what is just behind the window of the next query.
    assert not twin.fault({0: ROLLBACK + 1}, last, after=True)
    assert not twin.broken(0)
    twin.step({0: 2}, commit=False)
    twin.check_horizon()
    twin.step({0: 20})


def test_F10_every_rollback_inside_the_horizon_and_none_beyond() -> None:
    for layer in (spec(window=100, tail=100), plain("q4_0", "q8_0", window=60, tail=60)):
        twin = _filled(layer, n=300)
        for r in (0, 1, ROLLBACK - 1, ROLLBACK):
            twin.rollback(0, r)
            twin.step({0: 2}, commit=False)
            if r:
                twin.step({0: 40})
        for r in (ROLLBACK + 1, 127, 128, 129, twin.cache.length(0)):
            before = fingerprint(twin.cache)
            with pytest.raises(errors.RollbackError) as refusal:
                twin.cache.rollback(0, r)
            assert refusal.value.largest == ROLLBACK
            assert fingerprint(twin.cache) == before


def test_F10_rollbacks_in_small_pieces_do_not_renew_the_reserve() -> None:
    twin = _filled(spec(window=100, tail=100), n=300)
    twin.rollback(0, 5)
    twin.rollback(0, 3)
    assert twin.cache.horizon(0) == 0
    twin.step({0: 1})
    assert twin.cache.horizon(0) == 1
    with pytest.raises(errors.RollbackError):
        twin.cache.rollback(0, 2)
    twin.step({0: 20})
    assert twin.cache.horizon(0) == ROLLBACK


def test_F06_drafts_that_are_taken_back_over_and_over() -> None:
    layers = (spec(k="kvarn6", v="kvarn6", tail=256), plain("q4_0", "q4_0", tail=33))
    twin = _filled(*layers, n=280, n_ctx=900, n_ubatch=300)
    for i in range(60):
        twin.step({0: 3})
        twin.rollback(0, i % 3)
    twin.check_coverage()
    twin.check_horizon()


@pytest.mark.parametrize("layer", [spec(tail=256), plain("q8_0", "q4_0", tail=50)])
def test_F30_sequence_operations_move_body_and_ring_together(layer: kvk.LayerSpec) -> None:
    twin = _filled(layer, n=0)
    twin.step({0: 100, 1: 80, 2: 60})
    for _ in range(2):
        twin.step({0: 110, 1: 90, 2: 80})
    twin.reorder({0: 2, 1: 0, 2: 1})
    twin.step({0: 2, 1: 3, 2: 1}, commit=False)
    twin.step({0: 30, 1: 40, 2: 1})
    twin.fork(1, 0)
    twin.step({0: 3, 1: 2})
    twin.rollback(0, 2)
    twin.step({0: 2, 1: 2, 2: 2}, commit=False)
    twin.select(1)
    twin.step({1: 9})
    twin.fork(1, 0)
    twin.rewind(1, 256 if twin.cache.length(1) >= 256 else 128)
    twin.check_coverage()
    twin.step({0: 2, 1: 2}, commit=False)
    twin.step({1: 50})
    twin.step({0: 2, 1: 2}, commit=False)
    twin.check_coverage()

"""Any order of steps and sequence operations, against copies of the list-of-rows model."""

from __future__ import annotations

from typing import Any

import pytest
from cache_tools import Twin, contents, fingerprint, idle, make, spec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvkernels.errors import RollbackError
from kvkernels.records.layout import GROUP
from kvkernels.registry import open_device

N_SEQ, N_CTX, N_UBATCH = 3, 420, 280
SEQS = st.integers(0, N_SEQ - 1)
# Many small steps, and those that end at, just before and just after a group edge or two.
SIZES = st.sampled_from([1, 2, 3, 15, 16, 17, 60, 127, 128, 129, 140, 257])


class CacheMachine(RuleBasedStateMachine):
    """Rules are the cache's operations; ``Twin`` compares what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.twin: Twin

    @initialize(short=st.booleans(), sink=st.booleans())
    def start(self, short: bool, sink: bool) -> None:
        layers = (
            spec(n_head=4, n_kv_head=2, window=150),
            spec(n_head=4, n_kv_head=2, sink_tokens=128 if sink else 0),
        )
        # A context of two groups leaves the pools no slack.
        self.n_ctx = 256 if short else N_CTX
        cache = make(
            open_device("cpu:0"), *layers, n_ctx=self.n_ctx, n_ubatch=N_UBATCH, n_seq=N_SEQ
        )
        self.twin = Twin(cache, "machine", short, sink)

    def known(self) -> list[int]:
        return sorted(self.twin.models)

    def fit(self, wanted: dict[int, int]) -> dict[int, int]:
        """``wanted`` cut to what the limits leave."""
        room, found = N_UBATCH, {}
        for seq, n in wanted.items():
            n = min(n, self.n_ctx - self.twin.cache.length(seq), room)
            if n > 0:
                found[seq] = n
                room -= n
        return found

    @rule(wanted=st.dictionaries(SEQS, SIZES, min_size=1))
    def step(self, wanted: dict[int, int]) -> None:
        if fitting := self.fit(wanted):
            self.twin.step(fitting)

    @rule(wanted=st.dictionaries(SEQS, SIZES, min_size=1))
    def discarded(self, wanted: dict[int, int]) -> None:
        if fitting := self.fit(wanted):
            before = fingerprint(self.twin.cache)
            self.twin.step(fitting, commit=False)
            assert fingerprint(self.twin.cache) == before

    @precondition(lambda self: self.known())
    @rule(seq=SEQS, share=st.floats(0, 1))
    def rollback(self, seq: int, share: float) -> None:
        seq = self.known()[seq % len(self.known())]
        self.twin.rollback(seq, round(share * self.twin.cache.horizon(seq)))

    @precondition(lambda self: self.known())
    @rule(seq=SEQS, beyond=st.integers(1, 200))
    def rollback_too_far(self, seq: int, beyond: int) -> None:
        seq = self.known()[seq % len(self.known())]
        before = fingerprint(self.twin.cache)
        with pytest.raises(RollbackError):
            self.twin.cache.rollback(seq, self.twin.cache.horizon(seq) + beyond)
        assert fingerprint(self.twin.cache) == before

    @precondition(lambda self: self.known())
    @rule(seq=SEQS, group=st.integers(0, 3))
    def rewind(self, seq: int, group: int) -> None:
        seq = self.known()[seq % len(self.known())]
        to = min(group, self.twin.cache.length(seq) // GROUP) * GROUP
        before = fingerprint(self.twin.cache)
        try:
            self.twin.rewind(seq, to)
        except RollbackError:
            assert to
            assert fingerprint(self.twin.cache) == before

    @precondition(lambda self: self.known())
    @rule(src=SEQS, dst=SEQS)
    def fork(self, src: int, dst: int) -> None:
        src = self.known()[src % len(self.known())]
        if src != dst:
            self.twin.fork(src, dst)

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        known = self.known()
        self.twin.reorder({dst: data.draw(st.sampled_from(known)) for dst in known})

    @precondition(lambda self: self.known())
    @rule(seq=SEQS)
    def remove(self, seq: int) -> None:
        self.twin.remove(self.known()[seq % len(self.known())])

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def select(self, data: Any) -> None:
        self.twin.select(*data.draw(st.sets(st.sampled_from(self.known()), min_size=1)))

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "twin"):
            lengths = {seq: models[0].n for seq, models in self.twin.models.items()}
            assert {seq: s.n for seq, s in self.twin.cache.state.items()} == lengths

    def teardown(self) -> None:
        """Records are the reference encoder's, and everything can be let go."""
        if not hasattr(self, "twin"):
            return
        for seq in self.known():
            for layer, model in enumerate(self.twin.models[seq]):
                if not model.keeps_records:
                    continue
                for name, stored in contents(self.twin.cache, layer, seq).items():
                    if " " not in name:
                        sides = model.record_bytes(int(name[1:]))
                        assert stored == sides["kv".index(name[0])].tobytes()
            self.twin.remove(seq)
        assert idle(self.twin.cache)


def run(max_examples: int, steps: int, machine: type[CacheMachine] = CacheMachine) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_machine() -> None:
    run(25, 25)


@pytest.mark.slow
def test_machine_for_longer() -> None:
    run(250, 50)

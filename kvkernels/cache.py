"""The cache: published state of every sequence, and the step that replaces it.

A sequence's state is a frozen value (length, pages per class). A step reads published pages, keeps
the new rows in the caller's arrays, and on commit writes only pages that no published state shows;
then the whole state is replaced by one assignment. Whatever fails before that leaves the cache as
it was (C8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvkernels.dispatch import Decision, confirm
from kvkernels.errors import (
    CapacityError,
    InputError,
    RollbackError,
    RouteMismatch,
    StateError,
    StepError,
)
from kvkernels.memory import Memory
from kvkernels.op import AttentionOp, oldest_key
from kvkernels.pages import PageClass, SeqPages
from kvkernels.planner import Plan
from kvkernels.records.layout import GROUP
from kvkernels.step import Step
from kvkernels.storage import Body
from kvkernels.tail import Coverage
from kvkernels.values import whole

State = Mapping[int, "SeqState"]


@dataclass(frozen=True, slots=True)
class SeqState:
    """Published state of one sequence: its length in tokens and its pages in every page class."""

    n: int
    pages: tuple[SeqPages, ...]


class Cache:
    """Compressed K and V of several sequences; made by ``Plan.allocate()``.

    Sequence ids are any whole numbers >= 0, at most ``n_seq`` of them at a time; a sequence begins
    with its first step. Not thread-safe.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = plan.device
        self.classes = tuple(PageClass(rules, pages) for rules, pages in plan.pages.items())
        order = list(plan.pages)
        self.class_of = tuple(order.index(layer.rules) for layer in plan.layers)
        self.buffers = tuple(
            replace(
                self.device.allocate(
                    layer.spec,
                    layer.storage,
                    plan.pages[layer.rules],
                    keep_queries=plan.stages_queries(index),
                ),
                query_moment=plan.query_moment(index),
            )
            for index, layer in enumerate(plan.layers)
        )
        self.stored = tuple(plan.stored(i) for i in range(len(plan.layers)))
        self._state: State = MappingProxyType({})
        self._decisions: dict[AttentionOp, Decision] = {}
        self._open: Step | None = None

    # --- reading
    # ------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Published state by sequence id; a snapshot that never changes."""
        return self._state

    def length(self, seq: int) -> int:
        """Tokens of a sequence; 0 when it does not exist."""
        found = self._state.get(seq)
        return found.n if found else 0

    def horizon(self, seq: int) -> int:
        """Rows that ``rollback`` can take back now (C5)."""
        found = self._state.get(seq)
        return found.n - self._lowest(found) if found else 0

    def coverage(self, seq: int) -> tuple[Coverage, ...]:
        """How many of a sequence's newest rows are exact, per cache group, in the order of
        ``plan.tails`` (T11).
        """
        state, found = self._existing(seq), []
        for tail in self.plan.tails:
            index = self.class_of[tail.group.layers[0]]
            oldest, flags = self.classes[index].oldest_exact(state.pages[index], state.n)
            wanted = min(tail.effective, state.n)
            found.append(Coverage(tail.group.id, wanted, min(wanted, state.n - oldest), flags))
        return tuple(found)

    def tokens(self) -> tuple[int, int]:
        """(capacity, live) tokens over all sequences (M1)."""
        limits = self.plan.limits
        return limits.n_seq * limits.n_ctx, sum(state.n for state in self._state.values())

    def memory(self) -> Memory:
        """Bytes by owner: resident as allocated, transient as observed on the device (M1, M2)."""
        kept = self.plan.memory.to_json()
        fields = {k: v for k, v in kept.items() if k in Memory.__dataclass_fields__}
        fields["kv_transient_bytes"] = self.device.transient_bytes
        return Memory(**fields)

    # --- changing
    # -----------------------------------------------------------------------------------

    def step(self, n_tokens: Mapping[int, int]) -> Step:
        """Begin a step that adds ``n_tokens[seq]`` rows to each sequence, in that order in the
        arrays.

        Use as a context manager: leaving it commits all layers at once, an exception discards the
        step. Raises InputError, CapacityError or StepError before anything happens.
        """
        self._idle("begin a step")
        if not isinstance(n_tokens, Mapping) or not n_tokens:
            raise InputError(
                "n_tokens", found=repr(n_tokens), needed="{sequence id: rows}, not empty"
            )
        limits = self.plan.limits
        for seq, rows in n_tokens.items():
            whole("sequence id", seq, 0)
            whole(f"n_tokens[{seq}]", rows, 1)
            self._whole_rows(seq)
            if self.length(seq) + rows > limits.n_ctx:
                raise CapacityError(
                    f"sequence {seq}: {self.length(seq)} tokens + {rows} rows exceed "
                    f"n_ctx={limits.n_ctx}"
                )
        total = sum(n_tokens.values())
        if total > limits.n_ubatch:
            raise CapacityError(
                f"the step has {total} rows, n_ubatch is {limits.n_ubatch}; "
                "split it into several steps"
            )
        known = len(self._state.keys() | n_tokens.keys())
        if known > limits.n_seq:
            raise CapacityError(
                f"{known} sequences, n_seq is {limits.n_seq}; remove one or plan for more"
            )
        self._open = Step(self, dict(n_tokens))
        return self._open

    def rollback(self, seq: int, n: int) -> None:
        """Take back the newest ``n`` rows of a sequence: metadata only. Beyond the horizon:
        RollbackError (C5).
        """
        self._idle("roll back")
        state = self._existing(seq)
        whole("n", n, 0)
        largest = state.n - self._lowest(state)
        if n > largest:
            target = max(0, state.n - n)
            raise RollbackError(
                f"sequence {seq} has {state.n} rows and can take back {largest} of them, not {n}; "
                f"older exact rows are sealed. Call rewind({seq}, {target // GROUP * GROUP}) "
                "and process again from there",
                largest=largest,
                boundary=target // GROUP * GROUP,
            )
        self._truncate(seq, state, state.n - n)

    def rewind(self, seq: int, to: int) -> None:
        """Shorten a sequence to ``to`` rows, a multiple of 128: where a reprocess can start.

        Records before the boundary stay as they are. Raises RollbackError when a window has already
        dropped groups that the next query would see.
        """
        self._idle("rewind")
        state = self._existing(seq)
        if whole("to", to, 0) % GROUP or to > state.n:
            raise InputError("to", found=to, needed=f"a multiple of {GROUP}, at most {state.n}")
        for cls, pages in zip(self.classes, state.pages, strict=True):
            if not cls.reaches(pages, to):
                raise RollbackError(
                    f"sequence {seq}: a layer with window {cls.rules.window} has dropped rows that "
                    f"row {to} sees; remove the sequence and process it from the start",
                    largest=state.n - self._lowest(state),
                    boundary=0,
                )
        self._truncate(seq, state, to)

    def remove(self, seq: int) -> None:
        """Forget a whole sequence."""
        self._idle("remove a sequence")
        state = self._existing(seq)
        rest = {s: v for s, v in self._state.items() if s != seq}
        self._publish(rest, gone=[state])

    def fork(self, src: int, dst: int) -> None:
        """``dst`` becomes a copy of ``src``; an old ``dst`` is forgotten.
        Pages are shared until one side writes.
        """
        self._idle("fork a sequence")
        state = self._existing(src)
        whole("dst", dst, 0)
        if dst == src:
            return
        old = self._state.get(dst)
        if old is None and len(self._state) >= self.plan.limits.n_seq:
            raise CapacityError(f"all {self.plan.limits.n_seq} sequences are in use")
        self._retain(state)
        self._publish({**self._state, dst: state}, gone=[old] if old else [])

    def reorder(self, order: Mapping[int, int]) -> None:
        """Sequence ``i`` becomes what sequence ``order[i]`` was, for all at once (beam search);
        others stay.
        """
        self._idle("reorder sequences")
        sources = {dst: self._existing(src) for dst, src in order.items()}
        fresh = sources.keys() - self._state.keys()
        if len(self._state) + len(fresh) > self.plan.limits.n_seq:
            raise CapacityError(f"all {self.plan.limits.n_seq} sequences are in use")
        for state in sources.values():
            self._retain(state)
        old = [self._state[dst] for dst in sources if dst in self._state]
        self._publish({**self._state, **sources}, gone=old)

    def select(self, keep: Iterable[int]) -> None:
        """Forget every sequence that is not in ``keep``."""
        self._idle("select sequences")
        kept = {seq: self._existing(seq) for seq in keep}
        self._publish(kept, gone=[s for seq, s in self._state.items() if seq not in kept])

    # --- for the step
    # -------------------------------------------------------------------------------

    def confirm(self, layer: int, op: AttentionOp) -> Decision:
        """The entry for a final built operation; RouteMismatch when it is weaker than planned.
        Memoised.
        """
        found = self._decisions.get(op)
        if found is None:
            if len(self._decisions) > 4096:
                self._decisions.clear()
            plan = self.plan
            try:
                found = confirm(
                    plan.layers[layer].planned(op.n_q),
                    op,
                    self.device.table,
                    self.device.caps,
                    plan.policy,
                )
            except RouteMismatch as mismatch:
                raise RouteMismatch(mismatch.planned, mismatch.final, layer) from None
            self._decisions[op] = found
        return found

    def finish(self, new: Mapping[int, SeqState] | None) -> None:
        """End the open step; with ``new``, publish these sequences."""
        self._open = None
        if new:
            old = {seq: self._state[seq] for seq in new if seq in self._state}
            self._publish({**self._state, **new}, evolved=old)

    def invalidate(self, lost: Mapping[tuple[int, int], tuple[int, int]]) -> None:
        """Publish that writes into rings failed (T11): {(class, ring): rows first .. end of it}.

        Where a body holds the rows too nothing changes but which copy is read; a sequence whose
        ring is all there is, and whose next query would see a lost row, takes no further step.
        """
        if not lost:
            return
        changed = {}
        for seq, state in self._state.items():
            pages = list(state.pages)
            for i, p in enumerate(pages):
                if p.ring and (i, p.ring.ring) in lost:
                    rows, capacity = lost[i, p.ring.ring], self.classes[i].rules.ring_rows
                    pages[i] = replace(p, ring=p.ring.overwritten(state.n, *rows, capacity))
            changed[seq] = replace(state, pages=tuple(pages))
        self._state = MappingProxyType(changed)

    def _whole_rows(self, seq: int) -> None:
        state = self._state.get(seq)
        if state is None:
            return
        for cls, pages in zip(self.classes, state.pages, strict=True):
            rules, ring = cls.rules, pages.ring
            if rules.body is not Body.NONE or ring is None:
                continue
            if ring.start > oldest_key(rules.window, rules.window_kind, state.n):
                raise StateError(
                    f"sequence {seq}: a failed write lost rows of a window of {rules.window} "
                    "that exist nowhere else; remove the sequence and process it from the start"
                )

    def empty_state(self) -> SeqState:
        """A sequence with no rows."""
        return SeqState(0, tuple(SeqPages() for _ in self.classes))

    # --- inside
    # -------------------------------------------------------------------------------------

    def _publish(
        self,
        state: Mapping[int, SeqState],
        *,
        evolved: Mapping[int, SeqState] | None = None,
        gone: Iterable[SeqState] = (),
    ) -> None:
        """Replace the published state, then let go of pages.

        ``evolved``: sequences whose new state grew out of this old one, so that common pages stay
        held once. ``gone``: old states that nothing continues.
        """
        self._state = MappingProxyType(dict(state))
        for seq, before in (evolved or {}).items():
            for cls, old, new in zip(self.classes, before.pages, state[seq].pages, strict=True):
                cls.release(old, new)
        for before in gone:
            for cls, old in zip(self.classes, before.pages, strict=True):
                cls.release(old)

    def _retain(self, state: SeqState) -> None:
        for cls, pages in zip(self.classes, state.pages, strict=True):
            cls.retain(pages)

    def _truncate(self, seq: int, state: SeqState, n: int) -> None:
        pages = tuple(cls.truncate(p, n) for cls, p in zip(self.classes, state.pages, strict=True))
        self._publish({**self._state, seq: SeqState(n, pages)}, evolved={seq: state})

    def _lowest(self, state: SeqState) -> int:
        return max(cls.lowest(p, state.n) for cls, p in zip(self.classes, state.pages, strict=True))

    def _existing(self, seq: int) -> SeqState:
        state = self._state.get(seq)
        if state is None:
            known = ", ".join(map(str, sorted(self._state))) or "none"
            raise StepError(f"no sequence {seq!r}; existing: {known}")
        return state

    def _idle(self, what: str) -> None:
        if self._open is not None:
            raise StepError(f"cannot {what}: a step is open; commit or discard it first")

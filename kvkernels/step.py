"""One step: attention of every layer over published state and the new rows, then one commit."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvkernels.arguments import (
    Bias,
    Given,
    by_sequence,
    check_bias,
    check_rows,
    check_sink_logits,
)
from kvkernels.backend import Device, Rows
from kvkernels.calls import DECODE_ROWS, AttendCall, Batch, CommitCall, SeqView, TailCall
from kvkernels.dispatch import Decision
from kvkernels.errors import InputError, StepError
from kvkernels.operations import attend_op
from kvkernels.pages import Writes, view
from kvkernels.pools import Taking

if TYPE_CHECKING:
    from kvkernels.cache import Cache, SeqState


class Step:
    """Made by ``Cache.step``. Attend every layer once,
    then leave the ``with`` block (or call ``commit``).
    """

    def __init__(self, cache: Cache, n_tokens: dict[int, int]) -> None:
        self._cache = cache
        self.n_tokens = n_tokens
        self.n_rows = sum(n_tokens.values())
        self._closed = False
        self._rows: dict[int, tuple[Rows, ...]] = {}
        # Questions about values that a device answers when it gets there.
        self._later: list[Callable[[], None]] = []
        self._batches = [self._batch(i) for i in range(len(cache.classes))]

    @property
    def positions(self) -> list[int]:
        """Position of every row of the step, in array order: what RoPE needs."""
        return [self._cache.length(seq) + i for seq, n in self.n_tokens.items() for i in range(n)]

    # --- attention
    # ----------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        mask: Any = None,
        sink_logits: Any = None,
        out: Any = None,
        lse: Any = None,
    ) -> Any:
        """Attention of one layer over its cached rows and these new ones; the new rows become the
        layer's at commit.

        q [n_rows, n_head, D], k [n_rows, n_kv_head, D], v [n_rows, n_kv_head, D_v], float32 /
        float16 / bfloat16, un-rotated, RoPE already applied; rows of the sequences one after the
        other in the order of ``step({...})``. ``mask``: bool (True = visible) or additive float,
        broadcastable to [n_head, n_q, n_kv] with n_kv = rows before + n_q; for several sequences a
        mapping {sequence id: mask}. ``sink_logits`` [n_head] join the denominator (only, and
        always, when the layer was planned with them). Returns ``out``, float32 [n_rows, n_head,
        D_v]; ``lse`` float32 [n_rows, n_head] is filled when given. The arrays must not change
        before the commit.

        Raises InputError (shape, dtype, device), NonFiniteError, StepError, RouteMismatch; nothing
        is stored then. A GPU is not waited for: there a NonFiniteError comes with the commit, and
        still before anything is stored.
        """
        self._check_open()
        cache = self._cache
        if not isinstance(layer, int) or not 0 <= layer < len(cache.plan.layers):
            raise InputError("layer", found=repr(layer), needed=f"0..{len(cache.plan.layers) - 1}")
        if layer in self._rows:
            raise StepError(f"layer {layer} was attended already in this step")
        spec, device = cache.plan.layers[layer].spec, cache.device
        n, dim, stored = self.n_rows, spec.head_dim, cache.stored[layer]
        rows = check_rows(
            device,
            (
                Given("q", q, (n, spec.n_head, dim), stored[0]),
                Given("k", k, (n, spec.n_kv_head, dim), stored[1]),
                Given("v", v, (n, spec.n_kv_head, spec.head_dim_v), stored[2]),
            ),
            where=f" of layer {layer}",
            place=self._place_of,
            later=self._later,
        )
        sinks = check_sink_logits(spec, sink_logits)
        shape = (n, spec.n_head, spec.head_dim_v)
        result = device.empty(shape) if out is None else _given(device, "out", out, shape)
        logs = device.empty(shape[:2]) if lse is None else _given(device, "lse", lse, shape[:2])
        masks = by_sequence(mask, list(self.n_tokens))
        launches = [
            self._prepare(layer, batch, rows, check_bias(spec, batch.views, masks))
            for batch in self._batches[cache.class_of[layer]]
        ]
        # Everything was confirmed; only now does anything run.
        for batch, decision, bias in launches:
            call = AttendCall(
                layer=spec,
                buffers=cache.buffers[layer],
                batch=batch,
                q=rows[0].array,
                k=rows[1].array,
                v=rows[2].array,
                out=result,
                lse=logs,
                masks=bias.masks,
                sink_logits=sinks,
                window_chunk=cache.plan.window_chunk,
                activations=cache.plan.limits.activations,
            )
            device.run(str(decision.entry), decision.op, call)
        self._rows[layer] = rows
        return result

    def _prepare(
        self, layer: int, batch: Batch, rows: tuple[Rows, ...], bias: Bias
    ) -> tuple[Batch, Decision, Bias]:
        """Build the final operation and confirm it; layers that ask for the same share the answer
        within the step.
        """
        cache, views = self._cache, batch.views
        planned, buffers = cache.plan.layers[layer], cache.buffers[layer]
        facts = (rows[0].dtype, rows[1].dtype, bias.kind, bias.stride)
        key = (id(planned), buffers.k_records.nbytes, buffers.v_records.nbytes, *facts)
        if key not in batch.prepared:
            op = attend_op(
                planned.spec,
                cache.device.caps.id,
                max(v.n_q for v in views),
                max(v.n_past + v.n_q for v in views),
                planned.storage,
                n_seq=len(views),
                body=any(v.body[0] < v.body[1] for v in views),
                stage=any(v.tiles for v in views),
                tail=any(v.tail for v in views),
                q_dtype=rows[0].dtype,
                kv_dtype=rows[1].dtype,
                activations=cache.plan.limits.activations,
                bias=bias.kind,
                bias_stride=bias.stride,
                max_offset=max(buffers.k_records.nbytes, buffers.v_records.nbytes),
            )
            batch.prepared[key] = cache.confirm(layer, op)
        return batch, batch.prepared[key], bias

    def _batch(self, index: int) -> list[Batch]:
        """The sequences of this step seen in one page class, decodes and prefills apart.

        The split depends only on a sequence's own rows, so its result is the same alone or in
        company (B7).
        """
        cache, at = self._cache, 0
        small: list[SeqView] = []
        large: list[SeqView] = []
        for seq, rows in self.n_tokens.items():
            state = cache.state.get(seq) or cache.empty_state()
            seen = view(
                cache.classes[index],
                state.pages[index],
                seq=seq,
                q_start=at,
                n_q=rows,
                n_past=state.n,
            )
            (small if rows <= DECODE_ROWS else large).append(seen)
            at += rows
        return [Batch(tuple(views), self.n_rows) for views in (small, large) if views]

    def _place_of(self, row: int) -> str:
        seq, offset = self._sequence_of(row)
        return f"sequence {seq}, position {self._cache.length(seq) + offset}"

    def _sequence_of(self, row: int) -> tuple[int, int]:
        for seq, n in self.n_tokens.items():
            if row < n:
                return seq, row
            row -= n
        raise AssertionError("row outside the step")  # pragma: no cover

    # --- end
    # ----------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Store the new rows of all layers and publish them at once;
        every layer must have been attended.
        """
        self._check_open()
        cache = self._cache
        missing = [i for i in range(len(cache.plan.layers)) if i not in self._rows]
        if missing:
            self.discard()
            raise StepError(f"nothing was stored: layers {missing} were not attended in this step")
        taking, touched = Taking(), dict[tuple[int, int], tuple[int, int]]()
        try:
            for look in self._later:
                look()
            new, writes = self._place(taking)
            for layer, rows in self._rows.items():
                self._store(layer, rows, writes[cache.class_of[layer]])
            # Rings last: they alone overwrite what a published state shows (T10).
            for layer, rows in self._rows.items():
                index = cache.class_of[layer]
                if writes[index].tails:
                    touched |= self._ring_rows(index, writes[index])
                    self._store_tail(layer, rows, writes[index])
            cache.device.synchronize()
        except BaseException:
            taking.give_back()
            cache.invalidate(touched)
            self.discard()
            raise
        self._close()
        cache.finish(new)

    def _ring_rows(self, index: int, writes: Writes) -> dict[tuple[int, int], tuple[int, int]]:
        """{(class, ring): rows of the sequence that are written into it}."""
        found, rings, at = {}, {w.source: w.ring for w in writes.tails}, 0
        for seq, rows in self.n_tokens.items():
            n = self._cache.length(seq)
            # A write begins later in the step when its first rows leave the ring at once.
            ring = next(r for source, r in sorted(rings.items()) if source >= at)
            found[index, ring] = (n, n + rows)
            at += rows
        return found

    def _store(self, layer: int, rows: tuple[Rows, ...], writes: Writes) -> None:
        cache, planned = self._cache, self._cache.plan.layers[layer]
        if planned.commit is None:
            return
        q, k, v = rows
        call = CommitCall(
            layer=planned.spec,
            buffers=cache.buffers[layer],
            writes=tuple(writes.groups),
            k=k.array,
            v=v.array,
            q=q.array if cache.plan.stages_queries(layer) else None,
        )
        cache.device.run(str(planned.commit.entry), planned.commit.op, call)

    def _store_tail(self, layer: int, rows: tuple[Rows, ...], writes: Writes) -> None:
        cache, planned = self._cache, self._cache.plan.layers[layer]
        assert planned.tail is not None
        buffers = cache.buffers[layer]
        call = TailCall(planned.spec, buffers, tuple(writes.tails), rows[1].array, rows[2].array)
        cache.device.run(str(planned.tail.entry), planned.tail.op, call)

    def _place(self, taking: Taking) -> tuple[dict[int, SeqState], list[Writes]]:
        """New states and what every page class must write; takes pages, touches no bytes."""
        cache = self._cache
        writes = [Writes() for _ in cache.classes]
        new: dict[int, SeqState] = {}
        at = 0
        for seq, rows in self.n_tokens.items():
            old = cache.state.get(seq) or cache.empty_state()
            pages = tuple(
                cls.append(old.pages[i], old.n, rows, at, taking, writes[i])
                for i, cls in enumerate(cache.classes)
            )
            new[seq] = type(old)(old.n + rows, pages)
            at += rows
        return new, writes

    def discard(self) -> None:
        """Forget the step; the cache is what it was. Does nothing on a closed step."""
        if not self._closed:
            self._close()
            self._cache.finish(None)

    def _close(self) -> None:
        self._closed = True
        rows, self._rows = self._rows, {}
        rows.clear()
        self._later.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StepError("the step is closed; begin a new one with cache.step({...})")

    def __enter__(self) -> Step:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._closed:
            return
        if kind is None:
            self.commit()
        else:
            self.discard()


def _given(device: Device, name: str, array: Any, shape: tuple[int, ...]) -> Any:
    """An array of the caller's for results, on the device and as its kernels write it."""
    found = f"{type(array).__name__} {getattr(array, 'shape', '')} {getattr(array, 'dtype', '')}"
    needed = f"a writable C-contiguous float32 array {shape}"
    fits = tuple(getattr(array, "shape", ())) == shape
    if fits and str(getattr(array, "dtype", "")).endswith("float32"):
        rows = device.rows(name, array)
        writable = getattr(getattr(array, "flags", None), "writeable", True)
        if rows.array is array and rows.dtype == "f32" and writable:
            return array
    raise InputError(name, found=found, needed=needed)

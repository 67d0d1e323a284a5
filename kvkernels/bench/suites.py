"""The benches, by case id. Each checks its result before it times anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from kvkernels.backend import Device
from kvkernels.bench import contest, fill, footprint, overhead, storage, yardstick
from kvkernels.bench.against import AUTO_TOLERANCE, OWN, TOLERANCE, Checked, against
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.bench.workload import (
    Rows,
    attend64,
    decoded,
    filled,
    numpy_step,
    random_rows,
    store,
)
from kvkernels.cache import Cache
from kvkernels.cpu import reference
from kvkernels.dispatch import Policy
from kvkernels.op import GROUP, KVARN_BITS, LayerSpec
from kvkernels.records.layout import HeadLayout, Side

N_HEAD, N_KV_HEAD, HEAD_DIM = 32, 8, 128
COMMIT_TARGET_S = 0.040
_REAL_FILL = 8192  # longer caches are filled by copying records of one period
Run = Callable[[Device, Effort], Iterator[Result]]


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench; ``quick`` ones are what ``--quick`` runs."""

    id: str
    run: Run
    quick: bool = False


def _spec(k: int, v: int) -> LayerSpec:
    return LayerSpec(
        n_head=N_HEAD, n_kv_head=N_KV_HEAD, head_dim=HEAD_DIM, k=f"kvarn{k}", v=f"kvarn{v}",
        encoder="published",  # as in recorded runs
    )  # fmt: skip


def _attend_once(cache: Cache, rows: Rows, past: int) -> Callable[[], np.ndarray]:
    """Attention of row ``past`` over the cache, as an engine would call it, and nothing stored."""
    at = slice(past, past + 1)
    q, k, v = rows.q[at], rows.k[at], rows.v[at]

    def once() -> np.ndarray:
        step = cache.step({0: 1})
        out: np.ndarray = step.attend(0, q, k, v)
        step.discard()
        return out

    return once


def _decode(k_bits: int, v_bits: int, n_kv: int, *, compared: bool) -> Run:
    case = f"decode/k{k_bits}v{v_bits}-d{HEAD_DIM}-h{N_KV_HEAD}g{N_HEAD // N_KV_HEAD}-n{n_kv}"

    def run(device: Device, effort: Effort) -> Iterator[Result]:
        spec, past = _spec(k_bits, v_bits), n_kv - 1
        if n_kv > _REAL_FILL:
            made = fill.repeated(spec, device, fill.period(spec), past)
            cache, once, expected = made.cache, made.once(), made.expected()[0]
            rows = made.last_rows(n_kv)
        else:
            rows = random_rows(spec, n_kv)
            cache = filled(spec, device, rows, past)
            once = _attend_once(cache, rows, past)
            seen_k, seen_v = decoded(cache, rows)
            keys = np.concatenate([seen_k, rows.k[past:].astype(np.float64)])
            values = np.concatenate([seen_v, rows.v[past:].astype(np.float64)])
            expected = attend64(spec, rows.q[-1], keys, values)
        decision = cache.plan.explain(0, n_q=1, n_kv=n_kv)
        base = Result(
            case=case,
            device=device.caps.id,
            entry=decision.entry,
            route=str(decision.route),
            target="ratio >= 1 against every baseline",
        )
        exact = attend64(spec, rows.q[-1], rows.k.astype(float), rows.v.astype(float))
        calls = {OWN: Checked(once, expected, AUTO_TOLERANCE)}
        for name, dtype, limit in (("f32", np.float32, TOLERANCE), ("f16", np.float16, 3e-3)):
            call = numpy_step(spec, rows.q[-1], rows.k.astype(dtype), rows.v.astype(dtype))
            calls[f"numpy-{name}"] = Checked(call, exact, limit)
        if compared:
            plain = filled(spec, device, rows, past, activations="f32")
            again = _attend_once(plain, rows, past)
            calls["activations=f32"] = Checked(again, expected, TOLERANCE)
            entry = "cpu/attend_materialized"
            twin = _attend_once(filled(spec, device, rows, past, Policy(entry=entry)), rows, past)
            calls[entry] = Checked(twin, expected, TOLERANCE)
        yield from against(base, calls, effort)

    return run


def _commit(bits: int) -> Run:
    case = f"commit/k{bits}v{bits}-d{HEAD_DIM}-h{N_KV_HEAD}-group"

    def run(device: Device, effort: Effort) -> Iterator[Result]:
        spec = _spec(bits, bits)
        rows = random_rows(spec, 2 * GROUP)
        # Group 0 is the exact sink; group 1 is sealed, taken back, and sealed again.
        cache = filled(spec, device, rows, GROUP)
        second = Rows(rows.q[GROUP:], rows.k[GROUP:], rows.v[GROUP:])

        def once() -> None:
            store(cache, second, GROUP)
            cache.rewind(0, GROUP)

        store(cache, second, GROUP)
        wrong = _wrong_records(cache, second, bits)
        cache.rewind(0, GROUP)
        decision = cache.plan.layers[0].commit
        assert decision is not None
        base = Result(
            case=case,
            device=device.caps.id,
            entry=decision.entry,
            route=str(decision.route),
            unit="s",
            target=f"<= {COMMIT_TARGET_S * 1e3:g} ms (absolute: reported, not gated)",
            error=0.0,
        )
        if wrong:
            yield replace(base, outcome="wrong", error=None, note=f"bytes differ: {wrong}")
            return
        own = measure({"own": once}, effort)["own"]
        yield replace(
            base,
            median_s=own.median_s,
            iqr_s=own.iqr_s,
            min_s=own.min_s,
            value=own.median_s,
            outcome="ok" if own.median_s <= COMMIT_TARGET_S else "miss",
        )

    return run


def _wrong_records(cache: Cache, rows: Rows, bits: int) -> str:
    """Which sealed record of group 1 differs from the reference encoder's bytes; two heads."""
    buffers = cache.buffers[0]
    slot = cache.state[0].pages[cache.class_of[0]].table[1]
    for side, pool, exact in (
        (Side.K, buffers.k_records, rows.k),
        (Side.V, buffers.v_records, rows.v),
    ):
        nbytes = HeadLayout(side, bits, HEAD_DIM).nbytes
        records = np.asarray(pool).reshape(N_KV_HEAD, -1, nbytes)
        for h in (0, N_KV_HEAD - 1):
            if not np.array_equal(records[h, slot], reference.encode(exact[:GROUP, h], side, bits)):
                return f"{side} head {h}"
    return ""


def _yardstick(device: Device, effort: Effort) -> Iterator[Result]:
    """One thread against the same algorithm in C, the quicker of its builds."""
    alone, rows = contest.device(1), fill.period(contest.layer())
    made = fill.repeated(contest.layer(), alone, rows, 4095)
    base = Result(case="yardstick/k4v4-n4096-t1", device=alone.caps.id, baseline="c")
    base = replace(base, entry="cpu/attend_decode", route="native")
    builds = [b for b in yardstick.BUILDS if not isinstance(yardstick.library(b), str)]
    if not builds:
        yield replace(base, note=str(yardstick.library("c-avx2")))
        return
    records = yardstick.whole_groups(made.cache, 4096)
    q = np.ascontiguousarray(rows.q[4095 % fill.PERIOD])
    whole = fill.attend_heads(contest.layer(), q[None], records.heads())[0]
    in_c = yardstick.decode_call(builds[-1], records, q, 1)
    calls = {OWN: Checked(made.once(), made.expected()[0], AUTO_TOLERANCE)}
    calls["c"] = Checked(in_c, whole, AUTO_TOLERANCE, least=1 / 1.2)
    base = replace(
        base,
        target="ratio >= 0.83 (at most 1.2 times as long as C)",
        note=f"{builds[-1]}, int16 QK^T, whole groups from records",
    )
    yield from against(base, calls, effort)


def _benches() -> Iterator[Bench]:
    for bits in (4, *(b for b in KVARN_BITS.values() if b != 4)):
        for n_kv in (4096, 32768):
            run = _decode(bits, bits, n_kv, compared=n_kv == 4096)
            name = f"decode/k{bits}v{bits}/{n_kv}"
            yield Bench(name, run, quick=(bits, n_kv) == (4, 4096))
    yield Bench("yardstick/k4v4/4096", _yardstick, quick=True)
    for bits in KVARN_BITS.values():
        yield Bench(f"commit/k{bits}v{bits}", _commit(bits), quick=bits == 4)
    yield Bench("tail/k4v4/32768", storage.tail(32768))
    for kind in contest.STANDARD:
        yield Bench(f"standard/{kind}/32768", storage.standard(kind, 32768))
    yield Bench("plan/64-layers", storage.plan_time, quick=True)
    yield Bench("overhead/attend", overhead.run, quick=True)
    yield Bench("bytes/persistent", footprint.persistent, quick=True)
    yield Bench("bytes/transient", footprint.transient, quick=True)
    yield Bench("import/kvkernels", footprint.import_time, quick=True)


BENCHES: tuple[Bench, ...] = tuple(_benches())


def select(pattern: str | None, *, quick: bool) -> list[Bench]:
    """Benches whose id matches a glob (all without one); with ``quick``, only the quick ones."""
    chosen = [b for b in BENCHES if pattern is None or fnmatchcase(b.id, pattern)]
    return [b for b in chosen if b.quick] if quick else chosen

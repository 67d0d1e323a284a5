"""What one attend costs besides its kernel: building the operation, confirming it, bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvkernels.backend import Device
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.bench.workload import filled, random_rows
from kvkernels.op import LayerSpec
from kvkernels.operations import attend_op

TARGET_S = 50e-6
_PAST, _LAYERS = 300, 17


class _Recorder:
    """A device that remembers the last launch, and runs it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        """Remember, then run."""
        self.last = (entry, op, call)
        self._device.run(entry, op, call)


def run(device: Device, effort: Effort) -> Iterator[Result]:
    """Two views of the same cost, on a cache so small that the kernel is quick."""
    spec = LayerSpec(n_head=8, n_kv_head=2, head_dim=64, encoder="published")
    rows = random_rows(spec, _PAST + 1)
    cache = filled(spec, device, rows, _PAST, n_layers=_LAYERS)
    q, k, v = (getattr(rows, name)[_PAST:] for name in "qkv")
    recorder = _Recorder(device)
    cache.device = recorder
    step = cache.step({0: 1})
    first = np.array(step.attend(0, q, k, v))
    step.discard()
    cache.device = device
    entry, op, call = recorder.last

    def attend(n_layers: int = 1) -> None:
        with_step = cache.step({0: 1})
        for layer in range(n_layers):
            with_step.attend(layer, q, k, v)
        with_step.discard()

    def attend_all() -> None:
        attend(_LAYERS)

    def kernel() -> None:
        device.run(entry, op, call)

    def build_and_confirm() -> None:
        built = attend_op(spec, device.caps.id, 1, _PAST + 1, max_offset=op.max_offset)
        cache.confirm(0, built)

    kernel()
    base = Result(
        case="overhead/attend",
        device=device.caps.id,
        entry=entry,
        route=str(cache.plan.explain(0, n_q=1, n_kv=_PAST + 1).route),
        unit="s",
        target=f"<= {TARGET_S * 1e6:g} us (absolute: reported, not gated)",
    )
    if not np.array_equal(first, call.out):
        yield replace(base, outcome="wrong", note="the same launch gave other bits; not timed")
        return
    effort = replace(effort, cold=False)
    calls = {"attend": attend, "kernel": kernel, "build": build_and_confirm, "all": attend_all}
    samples = measure(calls, effort)
    build = samples["build"]
    rounds = list(
        zip(*(samples[name].seconds for name in ("attend", "kernel", "all")), strict=True)
    )
    yield _extra(
        replace(base, case="overhead/attend-minus-kernel"),
        [(every - one) / (_LAYERS - 1) - kernel_s for one, kernel_s, every in rounds],
        "each further layer of an open step: input checks for NaN, the decision, bookkeeping",
    )
    yield _extra(
        replace(base, case="overhead/step-attend-minus-kernel"),
        [one - kernel_s for one, kernel_s, _ in rounds],
        "the first layer with a new step: views, launch lists, the decision, discard besides",
    )
    yield replace(
        base,
        case="overhead/build-and-confirm",
        median_s=build.median_s,
        iqr_s=build.iqr_s,
        min_s=build.min_s,
        value=build.median_s,
        outcome="ok" if build.median_s <= TARGET_S else "miss",
        note="the operation and its memoised decision alone",
    )


def _extra(base: Result, seconds: list[float], note: str) -> Result:
    found = sorted(seconds)
    middle = found[len(found) // 2]
    return replace(
        base,
        median_s=middle,
        iqr_s=found[len(found) * 3 // 4] - found[len(found) // 4],
        min_s=found[0],
        value=middle,
        outcome="ok" if middle <= TARGET_S else "miss",
        note=note,
    )

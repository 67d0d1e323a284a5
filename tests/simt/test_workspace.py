"""Predicted bytes against observed ones, on steps that take the most (M2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvkernels as kvk
from kvkernels.dispatch import Policy
from kvkernels.simt.emulator.backend import EmulatorBackend
from kvkernels.simt.emulator.driver import EmulatorDriver

KVARN = {"k": "kvarn4", "v": "kvarn4"}
STANDARD = {"k": "q8_0", "v": "q4_0"}
ONE = [{0: 1}, {0: 512}, {0: 511}]
FIELDS = ("k_records", "v_records", "k_exact", "v_exact", "q_exact", "k_ring", "v_ring")


def spec(**changes: Any) -> kvk.LayerSpec:
    base: dict[str, Any] = {
        "n_head": 4, "n_kv_head": 2, "head_dim": 64, "encoder": "published", **KVARN,
    }  # fmt: skip
    return kvk.LayerSpec(**(base | changes))


def memory(
    layers: list[kvk.LayerSpec], steps: list[dict[int, int]], tail: str | None, **limits: Any
) -> tuple[Any, int, Any]:
    """(what is planned, bytes held by buffers, what the cache says) after some steps."""
    device = EmulatorBackend().open("simt:0")
    asked = kvk.Limits(**({"n_ctx": 1024, "n_ubatch": 512} | limits))
    planned = kvk.plan(layers, device, asked, Policy(allow_unqualified=True), tail=tail)
    cache = planned.allocate()
    rng = np.random.default_rng(0)
    for rows in steps:
        n = sum(rows.values())
        with cache.step(rows) as step:
            for i, layer in enumerate(layers):
                heads = (layer.n_head, layer.n_kv_head, layer.n_kv_head)
                shapes = [(n, h, layer.head_dim) for h in heads]
                step.attend(i, *(rng.standard_normal(s).astype(np.float32) for s in shapes))
    held = sum(
        array.nbytes
        for buffers in cache.buffers
        for name in FIELDS
        if (array := getattr(buffers, name)) is not None
    )
    return planned.memory, held, cache.memory()


@pytest.mark.parametrize(
    ("layers", "steps", "options"),
    [
        pytest.param([spec()], ONE, {}, id="prefill"),
        pytest.param([spec(sink_tokens=0)], ONE, {}, id="no-sinks"),
        pytest.param([spec(encoder="aware")], ONE, {}, id="aware"),
        pytest.param([spec(encoder="aware", head_dim=128)], ONE, {}, id="aware-128"),
        pytest.param([spec(**STANDARD)], ONE, {}, id="standard"),
        pytest.param([spec()], ONE, {"tail": "128"}, id="tail"),
        pytest.param([spec(**STANDARD)], ONE, {"tail": "100"}, id="standard-tail"),
        pytest.param([spec(window=200)], ONE, {}, id="window"),
        pytest.param([spec(), spec(**STANDARD), spec(encoder="aware")], ONE, {}, id="mixed"),
        pytest.param([spec()], [{0: 16}] * 64, {"n_ubatch": 16}, id="decode"),
        pytest.param([spec()], [{0: 16}] * 11, {"n_ubatch": 16, "n_ctx": 176}, id="never-sealed"),
        pytest.param([spec(**STANDARD)], [{0: 16}] * 63, {"n_ubatch": 16}, id="standard-decode"),
        pytest.param(
            [spec(**STANDARD)], [{0: 16}] * 63, {"n_ubatch": 16, "tail": "200"}, id="tail-decode"
        ),
        pytest.param(
            [spec(sink_tokens=0)],
            [{0: 1, 1: 127}, {0: 511, 1: 1}, {0: 500, 1: 12}],
            {"n_seq": 2, "n_ctx": 1100},
            id="two",
        ),
    ],
)
def test_M2_what_is_planned_is_what_is_held(
    driver: EmulatorDriver, layers: Any, steps: Any, options: dict[str, Any]
) -> None:
    limits = {name: value for name, value in options.items() if name != "tail"}
    planned, held, cache = memory(layers, steps, options.get("tail"), **limits)
    assert planned.kv_resident_bytes == held == cache.kv_resident_bytes
    found = cache.kv_transient_bytes
    assert found <= planned.kv_transient_bytes <= 1.1 * found

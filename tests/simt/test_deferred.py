"""Values are looked at on the device while the step goes on; what is wrong is said before anything
is stored (codec.md 8, C8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvkernels as kvk
from kvkernels.errors import NonFiniteError
from kvkernels.registry import open_device
from kvkernels.simt.emulator.driver import EmulatorDriver

SPEC = kvk.LayerSpec(n_head=2, n_kv_head=1, head_dim=64, sink_tokens=0, encoder="published")


def allocated() -> Any:
    limits = kvk.Limits(n_ctx=512, n_ubatch=64, n_seq=2)
    return kvk.plan([SPEC, SPEC], open_device("simt:0"), limits).allocate()


def rows(n: int) -> list[Any]:
    rng = np.random.default_rng(n)
    return [rng.standard_normal((n, h, 64), np.float32) for h in (2, 1, 1)]


def step(cache: Any, tokens: dict[int, int], *, wrong: Any = None, layer: int = 1) -> None:
    with cache.step(tokens) as now:
        for i in range(2):
            arrays = rows(now.n_rows)
            if wrong is not None and i == layer:
                which, place, value = wrong
                arrays[which][place] = value
            now.attend(i, *arrays)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(("which", "name"), [(0, "q"), (1, "k"), (2, "v")])
def test_C8_a_commit_says_which_value_it_is_and_stores_nothing(
    driver: EmulatorDriver, which: int, name: str, value: float
) -> None:
    if which == 0 and value == 1e30:
        value = np.nan  # queries of the published encoder are not stored: large ones are fine
    cache = allocated()
    step(cache, {0: 5, 7: 3})
    before = [array.tobytes() for array in (cache.buffers[1].k_exact, cache.buffers[1].v_exact)]
    wrong = (which, (6, 0, 9), value)
    with pytest.raises(
        NonFiniteError, match=f"{name} of layer 1, sequence 7, position 4, head 0, ch"
    ):
        step(cache, {0: 5, 7: 3}, wrong=wrong)
    assert (cache.length(0), cache.length(7)) == (5, 3)
    after = [array.tobytes() for array in (cache.buffers[1].k_exact, cache.buffers[1].v_exact)]
    assert after == before
    step(cache, {0: 5, 7: 3})
    assert (cache.length(0), cache.length(7)) == (10, 6)


def test_no_answer_is_waited_for_before_the_commit(
    driver: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, waits = allocated(), []
    real = EmulatorDriver.download

    def counted(self: EmulatorDriver, array: Any) -> Any:
        waits.append(array)
        return real(self, array)

    monkeypatch.setattr(EmulatorDriver, "download", counted)
    now = cache.step({0: 4})
    for layer in range(2):
        now.attend(layer, *rows(4))
    assert waits == []
    now.commit()
    assert len(waits) == 2


def test_a_discarded_step_asks_nothing(driver: EmulatorDriver) -> None:
    cache = allocated()
    now = cache.step({0: 4})
    q, k, v = rows(4)
    k[0, 0, 0] = np.nan
    now.attend(0, q, k, v)
    now.discard()
    assert cache.length(0) == 0

"""A cache's whole life on an OpenCL device beside one on the CPU: the same results, and the same
bytes where both encoders are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import kvkernels as kvk
from kvkernels.dispatch import Policy
from kvkernels.registry import open_device
from kvkernels.simt.device import SimtDevice

BASE: dict[str, Any] = {"n_head": 4, "n_kv_head": 2, "head_dim": 64}
LAYERS = [
    kvk.LayerSpec(k="kvarn4", v="kvarn4", encoder="published", **BASE),
    kvk.LayerSpec(k="q8_0", v="q4_0", **BASE),
]
#: what a sequence's slots hold; fields that nothing wrote are zeros on both sides
FIELDS = ("k_records", "v_records", "k_exact", "v_exact", "k_ring", "v_ring")


class Pair:
    """The same cache twice."""

    def __init__(self, device: SimtDevice, layers: list[kvk.LayerSpec], **options: Any) -> None:
        limits = kvk.Limits(n_ctx=700, n_ubatch=300, n_seq=2, rollback=8, activations="f32")
        policy = Policy(allow_unqualified=True)
        self.device, self.layers = device, layers
        self.here, self.there = (
            kvk.plan(layers, d, limits, policy, **options).allocate()
            for d in (open_device("cpu:0"), device)
        )
        self.rng = np.random.default_rng(1)

    def both(self, name: str, *args: Any) -> None:
        for cache in (self.here, self.there):
            getattr(cache, name)(*args)

    def step(self, **rows: int) -> None:
        """A step of ``s<sequence>=rows``; results are compared."""
        counts = {int(name[1:]): n for name, n in rows.items()}
        total = sum(counts.values())
        with self.here.step(counts) as here, self.there.step(counts) as there:
            for i, layer in enumerate(self.layers):
                given = [
                    self.rng.standard_normal((total, heads, 64)).astype(np.float32)
                    for heads in (layer.n_head, layer.n_kv_head, layer.n_kv_head)
                ]
                want = here.attend(i, *given)
                shape = (total, layer.n_head)
                out, lse = self.device.empty((*shape, 64)), self.device.empty(shape)
                moved = [self.device.upload(a) for a in given]
                assert there.attend(i, *moved, out=out, lse=lse) is out
                assert_allclose(self.device.download(out), want, rtol=0, atol=5e-5)
                assert np.isfinite(self.device.download(lse)).all()

    def check_bytes(self) -> None:
        for here, there in zip(self.here.buffers, self.there.buffers, strict=True):
            for name in FIELDS:
                mine = np.asarray(getattr(here, name)).view(np.uint8).reshape(-1)
                theirs = self.device.download(getattr(there, name)).reshape(-1)
                assert mine.tobytes() == theirs.view(np.uint8).tobytes(), name


@pytest.mark.parametrize("tail", [pytest.param(None, marks=pytest.mark.slow), "130"])
def test_the_same_life(device: SimtDevice, tail: str | None) -> None:
    pair = Pair(device, LAYERS, tail=tail)
    pair.step(s0=200)
    pair.step(s0=150)  # seals groups from blocks and from a transient tile
    pair.step(s0=1)
    pair.both("rollback", 0, 4)
    pair.step(s0=3)
    pair.both("fork", 0, 1)
    pair.step(s0=1, s1=2)  # copies what the two share
    pair.step(s0=40, s1=1)
    pair.both("remove", 0)
    pair.step(s1=5)
    pair.check_bytes()
    assert pair.there.memory().kv_transient_bytes > 0


def test_the_aware_encoder_with_staged_queries_and_with_a_moment(device: SimtDevice) -> None:
    layer = kvk.LayerSpec(k="kvarn3", v="kvarn5", encoder="aware", **BASE)
    q = np.random.default_rng(2).standard_normal((512, 2, 64))
    moment = np.einsum("tki,tkj->kij", q, q)
    pair = Pair(device, [layer, layer], query_moments=[None, moment])
    for rows in (200, 250, 3):
        pair.step(s0=rows)
    for here, there in zip(pair.here.buffers, pair.there.buffers, strict=True):
        for name in ("k_records", "v_records"):
            mine = np.asarray(getattr(here, name))
            assert mine.any()
            # Sums of queries run in another order: the rare code differs.
            assert np.mean(mine != pair.device.download(getattr(there, name))) < 1e-3

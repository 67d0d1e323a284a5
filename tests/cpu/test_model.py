"""The fast row model is the reference attention over the rows that semantics T3 and T6 name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_tools import spec

from kvkernels.cpu import reference
from kvkernels.cpu.reference_attend import attend
from kvkernels.records.layout import Side
from kvkernels.testing.inputs import rows
from kvkernels.testing.model import RowsModel


def row_by_row(model: RowsModel, part: Any, mask: Any, sink_logits: Any) -> Any:
    """One query at a time, every key looked up on its own."""
    s, (q, k, v) = model.spec, part
    sealed = {}
    for group in range(s.sink_tokens // 128, model.n // 128):
        both = []
        for side, stored, bits in zip(
            (Side.K, Side.V), model.record_bytes(group), (s.k_bits, s.v_bits), strict=True
        ):
            heads = [reference.decode(r, side, bits, s.head_dim) for r in stored]
            both.append(reference.rotate(np.stack(heads, 1).astype(float), np.float64))
        sealed[group] = both
    out = []
    for i in range(len(q)):
        position = model.n + i
        keys, values = [], []
        for j in range(model.n):
            group = j // 128
            newest = group in model.resident and j > position - min(128, s.window or 128)
            if group not in sealed or newest:
                for found, x in ((keys, model.k[j]), (values, model.v[j])):
                    half = reference.stage_rows(x).astype(float)
                    found.append(reference.rotate(half, np.float64))
            else:
                keys.append(sealed[group][0][j % 128])
                values.append(sealed[group][1][j % 128])
        out.append(
            attend(
                q[i : i + 1], np.array([*keys, *k.astype(float)]), np.array([*values, *v]),
                scale=s.scale, q_pos=np.array([position]), k_pos=np.arange(model.n + len(q)),
                softcap=s.softcap, alibi_max_bias=s.alibi, window=s.window,
                mask=None if mask is None else mask[:, i : i + 1], sink_logits=sink_logits,
            )[0]
        )  # fmt: skip
    return np.array(out)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 150},
        {"window": 60},
        {"sink_tokens": 128, "softcap": 20.0},
        {"n_head": 6, "alibi": 8.0, "sink_logits": True},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_model_is_the_reference(changes: dict[str, Any], masked: bool) -> None:
    layer = spec(**changes)
    data = rows(layer, 310, "model", gain=2.0)
    source = np.random.default_rng(1)
    model = RowsModel(layer)
    model.append(data.k[:200], data.v[:200])
    model.append(data.k[200:305], data.v[200:305])
    model.rollback(5)
    part = data.part(300, 305)
    assert model.n == 300
    mask = logits = None
    if masked:
        mask = np.where(source.random((layer.n_head, 5, 305)) < 0.5, 0.3, -np.inf)
        mask[:, 2] = -np.inf
    if layer.sink_logits:
        logits = source.normal(size=layer.n_head)
    expected = row_by_row(model, part, mask, logits)
    found = model.attend(*part, mask=mask, sink_logits=logits)
    assert np.allclose(found, expected, rtol=0, atol=1e-12)
    if masked:
        assert not found[2].any()

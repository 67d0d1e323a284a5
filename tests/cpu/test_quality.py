"""What the aware encoder is for: attention moves less at equal bits (codec.md 9)."""

from __future__ import annotations

import numpy as np
import pytest

from kvkernels.bench.demo import TEXTS, capture
from kvkernels.testing import quality

# aware / published on the shipped captures, with room for one code more or less here and there.
LIMITS = {2: 0.55, 3: 0.70, 4: 0.75, 6: 0.80}


@pytest.mark.slow
@pytest.mark.parametrize("bits", LIMITS)
@pytest.mark.parametrize("text", TEXTS)
def test_codec9_aware_moves_attention_less(text: str, bits: int) -> None:
    rows = capture(text).rows
    q, k, v = (x.swapaxes(0, 1)[None].astype(np.float32) for x in (rows.q, rows.k, rows.v))
    whole = k.shape[2] // 128 * 128
    q, k, v = q[:, :, :whole], k[:, :, :whole], v[:, :, :whole]
    errors = [
        quality.output_error(q, k, v, bits, encoder)
        for encoder in (quality.aware, quality.published)
    ]
    assert errors[0] <= LIMITS[bits] * errors[1], errors[0] / errors[1]


def test_output_error_is_zero_for_records_without_error() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 4, 256, 64)), rng.normal(size=(1, 2, 256, 64))
    assert quality.output_error(q, k, k, 2, quality.aware) == 0  # no group between the exact ones

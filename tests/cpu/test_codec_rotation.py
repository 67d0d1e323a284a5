"""What happens to every new row: the finite check and the rotation (codec.md 2, 8)."""

from __future__ import annotations

import numpy as np
import pytest

from kvkernels.cpu import reference
from kvkernels.cpu.kernels import codec
from kvkernels.errors import InputError
from kvkernels.records.layout import HEAD_DIMS


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codec2_rotation_bits_equal_the_reference(head_dim: int) -> None:
    rng = np.random.default_rng(8)
    x = (rng.normal(size=(37, head_dim)) * np.exp(rng.normal(0, 2, (37, 1)))).astype(np.float32)
    out = np.empty_like(x)
    codec.rotate_rows(x, out)
    want = reference.rotate(x, np.float32)
    assert np.array_equal(out.view(np.uint32), want.view(np.uint32))
    half = np.empty(x.shape, np.uint16)
    codec.rotate_rows_to_half(x, half)
    assert np.array_equal(half, reference.stage_rows(x).view(np.uint16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codec2_rotation_is_the_sylvester_matrix(head_dim: int) -> None:
    h = np.ones((1, 1))
    while h.shape[0] < head_dim:
        h = np.block([[h, h], [h, -h]])
    eye = np.eye(head_dim)
    got = reference.rotate(eye, np.float64)
    assert np.allclose(got, h / np.sqrt(head_dim), rtol=0, atol=1e-15)
    assert np.allclose(reference.rotate(got, np.float64), eye, atol=1e-14)  # its own inverse
    with pytest.raises(InputError, match="head_dim: found 96"):
        reference.rotate(np.zeros((1, 96)))


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 5000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_codec8_first_nonfinite_position(at: int, bad: float) -> None:
    x = np.full(5001, np.finfo(np.float32).max, np.float32)
    assert codec.first_nonfinite(x) == -1
    x[at:] = bad
    assert codec.first_nonfinite(x) == at
    assert codec.first_nonfinite(x[:at]) == -1

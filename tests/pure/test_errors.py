"""The exception types: what they carry, what they say, how they are caught."""

from __future__ import annotations

import pytest
from pure_tables import ANY, CPU, CUDA, device, make_op

from kvkernels import errors
from kvkernels.backend import BackendStatus
from kvkernels.dispatch import decide


def test_every_error_of_the_library_has_one_base() -> None:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(found) >= 10
    assert all(issubclass(e, errors.KvkError) for e in found)


def test_input_error_says_field_found_needed_and_is_a_value_error() -> None:
    error = errors.InputError("window", found=0, needed="a whole number >= 1", hint="Leave it out.")
    assert isinstance(error, ValueError)
    assert str(error) == "window: found 0; needed a whole number >= 1. Leave it out."
    assert (error.field, error.found, error.needed) == ("window", "0", "a whole number >= 1")
    assert issubclass(errors.RequestError, errors.InputError)


def test_F02_unsupported_op_names_every_operation_row_and_failed_fact() -> None:
    bad = [
        decide(make_op("cpu:0", head_dim_k=80, head_dim_v=80), CPU, device("cpu-avx2")),
        decide(make_op("cuda:0", attention="mla"), CUDA, device("cuda-gtx1070-sm61"), ANY),
    ]
    error = errors.UnsupportedOp(bad)
    assert error.decisions == tuple(bad)
    text = str(error)
    for part in (
        "d80/80",
        "cpu/attend_decode",
        "cuda/attend_portable",
        "cuda/attend_materialized",
        "[op.head_dim_k] needs head_dim_k in 64, 128, 256, 512; found 80",
        "[op.attention] needs attention = dense; found mla",
        "[device.compute_capability] needs compute_capability >= 80; found 61",
    ):
        assert part in text, part


def test_backend_unavailable_shows_its_status() -> None:
    error = errors.BackendUnavailable(
        BackendStatus("cuda", "unavailable", "CuPy is not installed", "Install cupy-cuda12x")
    )
    assert str(error) == "cuda: unavailable: CuPy is not installed. Install cupy-cuda12x"
    assert error.status.state == "unavailable"


def test_rollback_error_says_what_would_work() -> None:
    error = errors.RollbackError("too far", largest=12, boundary=128)
    assert (error.largest, error.boundary) == (12, 128)


@pytest.mark.parametrize(
    ("name", "text"), [("kvarn7", "did you mean 'kvarn"), ("zzzz", ""), ("", "")]
)
def test_did_you_mean_suggests_only_near_names(name: str, text: str) -> None:
    hint = errors.did_you_mean(name, ["kvarn6", "f16"])
    assert hint.startswith(text)
    assert bool(hint) is bool(text)

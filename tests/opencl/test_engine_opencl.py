"""Records, pyopencl arrays and refusals: the engine's functions on an OpenCL device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pyopencl.array
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import kvkernels as kvk
from kvkernels.dispatch import Policy
from kvkernels.errors import InputError, OutOfDeviceMemory
from kvkernels.simt.device import SimtDevice

KV, HEADS, DIM = 2, 4, 64
ANY = Policy(allow_unqualified=True)


def spec(encoder: str = "published") -> kvk.LayerSpec:
    return kvk.LayerSpec(
        n_head=HEADS, n_kv_head=KV, head_dim=DIM, k="kvarn5", v="kvarn3", encoder=encoder
    )


def rows(n: int, heads: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(n, heads, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def x() -> dict[str, Any]:
    return {"k": rows(256, KV, 1), "v": rows(256, KV, 2), "q": rows(256, HEADS, 3)}


def on(device: SimtDevice, x: dict[str, Any]) -> dict[str, Any]:
    return {name: device.upload(array) for name, array in x.items()}


@pytest.mark.parametrize("how", ["published", "rows", "moment"])
def test_encode_gives_the_bytes_of_the_cpu(device: SimtDevice, x: dict[str, Any], how: str) -> None:
    layer = spec("published" if how == "published" else "aware")
    there, more, here = on(device, x), {}, {}
    if how == "rows":
        more, here = {"q": there["q"]}, {"q": x["q"]}
    elif how == "moment":
        q = x["q"].reshape(-1, KV, HEADS // KV, DIM).astype(np.float64)
        more = here = {"query_moment": np.einsum("tkhi,tkhj->kij", q, q)}
    found = kvk.encode(there["k"], there["v"], layer, device=device, policy=ANY, **more)
    assert found.device is None
    expected = kvk.encode(x["k"], x["v"], layer, **here)
    if how == "published":
        assert_array_equal(found.k, expected.k)
        assert_array_equal(found.v, expected.v)
    else:  # sums of queries run in another order: the rare code differs
        assert np.mean(found.k != expected.k) < 1e-3
        assert np.mean(found.v != expected.v) < 1e-3


def test_decode_and_attend(device: SimtDevice, x: dict[str, Any]) -> None:
    records = kvk.encode(x["k"], x["v"], spec())
    for mine, theirs in zip(
        kvk.decode(records, device=device, policy=ANY), kvk.decode(records), strict=True
    ):
        assert isinstance(mine, np.ndarray)
        assert_array_equal(mine, theirs)
    q, k, v = rows(3, HEADS, 4), rows(3, KV, 5), rows(3, KV, 6)
    want, want_lse = kvk.attend(q, records, [1, 0], k=k, v=v, activations="f32")
    plan = kvk.AttendPlan(spec(), [[1, 0]], [3], device=device, policy=ANY)
    there = records.on(device)
    assert there.device == "opencl:0"
    assert there.on(device) is there
    out = cl.array.empty(device.driver.queue, (3, HEADS, DIM), np.float32)
    lse = cl.array.empty(device.driver.queue, (3, HEADS), np.float32)
    given = [device.upload(a) for a in (q, k, v)]
    result = plan.run(given[0], there, *given[1:], out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert_allclose(out.get(), want, atol=2e-5)
    assert_allclose(lse.get(), want_lse, atol=2e-5)
    half = [device.upload(a.astype(np.float16)) for a in (q, k, v)]
    again, _ = plan.run(half[0], there, *half[1:])
    assert_allclose(device.download(again), want, atol=5e-3)
    back = there.to_host(device)
    assert_array_equal(back.k, records.k)
    with pytest.raises(InputError, match="to_host"):
        there.to_layout("stream")


def test_records_are_never_copied_silently(device: SimtDevice, x: dict[str, Any]) -> None:
    records = kvk.encode(x["k"], x["v"], spec())
    plan = kvk.AttendPlan(spec(), [[0]], [1], current=False, device=device, policy=ANY)
    q = device.upload(rows(1, HEADS, 3))
    with pytest.raises(InputError, match=r"host memory.*opencl:0.*records\.on\(plan\.device\)"):
        plan.run(q, records)
    here = kvk.AttendPlan(spec(), [[0]], [1], current=False)
    with pytest.raises(InputError, match=r"records opencl:0.*records on cpu:0"):
        here.run(rows(1, HEADS, 3), records.on(device))


def test_arrays_that_are_not_this_device_s_are_refused_with_a_hint(device: SimtDevice) -> None:
    queue = device.driver.queue
    x = rows(128, KV, 1)
    good = device.upload(x)
    other = cl.array.to_device(cl.CommandQueue(cl.Context([queue.device])), x)
    late = cl.array.to_device(queue, np.concatenate([[0], x.reshape(-1)]).astype(np.float32))[1:]
    long = cl.array.to_device(queue, np.concatenate([x, x], axis=2))
    for bad, text in (
        (x, r"ndarray.*pyopencl\.array\.Array.*device\.upload"),
        (other, "another OpenCL context.*context of device.driver.queue"),
        (long[:, :, :DIM], "strided.*copy"),
        (cl.array.to_device(queue, x.astype(np.float64)), "dtype float64.*float32"),
        (late.reshape(x.shape), "begins 4 bytes into its buffer.*copy"),
    ):
        with pytest.raises(InputError, match=text):
            kvk.encode(bad, good, spec(), device=device, policy=ANY)


def test_no_room_is_said_with_both_numbers(device: SimtDevice) -> None:
    nbytes = device.driver.queue.device.max_mem_alloc_size + 1
    with pytest.raises(OutOfDeviceMemory, match=f"no room for {nbytes} bytes.*largest buffer"):
        device.driver.zeros(nbytes)

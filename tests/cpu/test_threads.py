"""The thread pool: same bits for any thread count, callers from several threads, fork, errors,
exit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

import kvkernels as kvk
from kvkernels.cpu.device import CpuDevice
from kvkernels.cpu.pool import ThreadPool, available_threads
from kvkernels.cpu.probe import probe_cpu
from kvkernels.errors import InputError

SPEC = kvk.LayerSpec(n_head=4, n_kv_head=2, head_dim=64)


def filled(device, n=400):
    cache = kvk.plan([SPEC], device, kvk.Limits(n_ctx=1024, n_ubatch=512)).allocate()
    rng = np.random.default_rng(5)
    q = rng.normal(size=(n, 4, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, n, 2, 64)).astype(np.float32)
    with cache.step({0: n}) as step:
        step.attend(0, q, k, v)
    return cache, (q[:1], k[:1], v[:1])


def decode(cache, rows):
    step = cache.step({0: 1})
    out = step.attend(0, *rows)
    step.discard()
    return out


def test_B7_any_thread_count_gives_the_same_bits():
    results = []
    for n_threads in (1, 2, 3, 5):
        cache, rows = filled(CpuDevice(probe_cpu(), n_threads))
        results.append(decode(cache, rows).tobytes())
    assert len(set(results)) == 1


def test_several_threads_may_call_one_device():
    device = CpuDevice(probe_cpu(), 2)
    caches = [filled(device) for _ in range(4)]
    want = decode(*caches[0]).tobytes()
    wrong = []

    def work(cache, rows):
        for _ in range(20):
            if decode(cache, rows).tobytes() != want:
                wrong.append(cache)

    threads = [threading.Thread(target=work, args=c) for c in caches]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_the_same():
    device = CpuDevice(probe_cpu(), 2)
    cache, rows = filled(device)
    want = decode(cache, rows).tobytes()  # the pool is running when the fork comes
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write, b"same" if decode(cache, rows).tobytes() == want else b"diff")
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"same"
    assert os.waitpid(child, 0)[1] == 0
    assert decode(cache, rows).tobytes() == want


def test_an_error_in_a_worker_reaches_the_caller_after_all_have_stopped():
    pool, done = ThreadPool(3), []

    def work(start, stop):
        if start > 0:
            raise RuntimeError(f"part {start}")
        done.append(stop)

    with pytest.raises(RuntimeError, match="part"):
        pool.ranges(work, 9)
    assert done == [3]


def test_ranges_cover_every_item_once():
    for n_threads in (1, 2, 7):
        for n_items in (0, 1, 5, 64):
            seen = []
            ThreadPool(n_threads).ranges(lambda a, b, seen=seen: seen.extend(range(a, b)), n_items)
            assert sorted(seen) == list(range(n_items))


def test_thread_count_comes_from_the_environment_or_the_affinity():
    code = "import kvkernels as kvk; print(kvk.open_device('cpu:0').pool.n_threads)"
    env = {**os.environ, "KVK_NUM_THREADS": "3"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout.strip() == "3", found.stderr
    env.pop("KVK_NUM_THREADS")
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + code
    if hasattr(os, "sched_setaffinity"):
        found = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )
        assert found.stdout.strip() == "1", found.stderr
    assert available_threads() >= 1
    assert kvk.open_device("cpu:0", n_threads=4).pool.n_threads == 4
    with pytest.raises(InputError, match="n_threads"):
        kvk.open_device("cpu:0", n_threads=0)


def test_the_interpreter_exits_with_a_running_pool():
    code = """
from kvkernels.cpu.pool import ThreadPool
pool = ThreadPool(4)
pool.ranges(lambda a, b: None, 8)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

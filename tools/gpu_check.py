"""Check a device that somebody has, in less than ten minutes, and record what was found.

    tools/gpu_check.py --device cuda:0        on a machine with the card
    tools/gpu_check.py --device simt:0 --dry  the same steps in small, on the emulator

Parity of the quick cases by every entry, stored bytes against the CPU's, one step repeated bit for
bit, attention's bandwidth from 4k to 1M tokens beside a plain copy, and compute-sanitizer where it
is installed. Writes OUT/gpu_check.json, and the device with its qualified entries as a file for
capabilities/devices. Exit status 0: everything passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvkernels
from kvkernels import LayerSpec, Limits, Policy, open_device, plan
from kvkernels.dispatch import decide
from kvkernels.errors import KvkError
from kvkernels.memory import LayerSizes
from kvkernels.op import OpKind
from kvkernels.testing.cases import Case, select
from kvkernels.testing.parity import Result, run_all

SCHEMA = "kvk.gpu-check/1"
ROOT = Path(__file__).resolve().parent.parent
ANY = Policy(allow_unqualified=True)
#: in the order in which they run; seconds that each may take of 600
STEPS = {"parity": 240, "stored": 30, "repeat": 30, "bandwidth": 150, "sanitizer": 130}
TOKENS = (4096, 32768, 131072, 1048576)
FEW = ("decode/k4v4/d64/h4x2/kv300/q1", "prefill/k4v4/d64/h4x2/kv330/q17",
       "standard/q8_0-q4_0/d64/h4x2/kv257/q1/length",
       "tail/k5v4/d64/h4x2/kv600/q1/tail256/sink128")  # fmt: skip
SANITIZERS = ("memcheck", "racecheck", "synccheck")
LAYER = LayerSpec(
    n_head=32, n_kv_head=8, head_dim=128, k="kvarn4", v="kvarn4", encoder="published", sink_tokens=0
)
_FILL_ROWS = 512


class Check:
    """One run: its device, what it found, what failed."""

    def __init__(self, device_id: str, *, dry: bool, pattern: str) -> None:
        self.device = open_device(device_id)
        self.dry, self.pattern = dry, pattern
        self.failures: list[str] = []
        self.found: dict[str, Any] = {}
        self.qualified: dict[str, str] = {}

    def run(self, name: str) -> None:
        """One step; an error of it is a failure, and the others still run."""
        started = time.monotonic()
        say(f"{name} ...")
        try:
            self.found[name] = getattr(self, name)(started + STEPS[name])
        except (KvkError, RuntimeError, OSError, ValueError) as error:
            self.fail(f"{name}: {type(error).__name__}: {error}")
        say(f"{name}: {time.monotonic() - started:.1f} s")

    def fail(self, text: str) -> None:
        """Note a failure."""
        self.failures.append(text)
        say(f"FAILED: {text}")

    # ------------------------------------------------------------------ parity

    def cases(self) -> tuple[Case, ...]:
        """The quick ones, or a few; those of ``--filter``."""
        few = tuple(case for case in select(self.pattern, quick=True))
        return tuple(case for case in few if case.id in FEW) or few[:4] if self.dry else few

    def parity(self, until: float) -> dict[str, Any]:
        """Every case by every entry that serves it."""
        runs: dict[str, int] = {}
        bad: set[str] = set()
        cases, done = self.cases(), 0
        for case in cases:
            if time.monotonic() > until:
                self.fail(f"parity: out of time after {done} of {len(cases)} cases")
                break
            for result in run_all(self.device, case):
                entries = set(result.served)
                if not entries and result.entry and not result.passed:
                    entries = {result.entry}  # it raised
                for entry in entries:
                    runs[entry] = runs.get(entry, 0) + 1
                if not result.passed:
                    self.fail(f"parity: {_failure(result)}")
                    bad |= entries
            done += 1
        self.qualified = {entry: "recorded" for entry in sorted(runs) if entry not in bad}
        return {"cases": done, "of": len(cases), "runs": runs, "failed": sorted(bad)}

    # ------------------------------------------------------------------ stored bytes, repetition

    def _filled(self, device: Any, layer: LayerSpec, n: int) -> Any:
        """A cache with n rows of which every 512 are the same, uploaded once."""
        rng = np.random.default_rng(7)
        shapes = [(_FILL_ROWS, heads, layer.head_dim) for heads in
                  (layer.n_head, layer.n_kv_head, layer.n_kv_head)]  # fmt: skip
        hosts = [rng.standard_normal(shape, np.float32) for shape in shapes]
        limits = Limits(n_ctx=n + 256, n_ubatch=_FILL_ROWS)
        cache = plan([layer], device, limits, ANY).allocate()
        whole = tuple(
            device.rows(name, device.upload(host)) for name, host in zip("qkv", hosts, strict=True)
        )
        for start in range(0, n, _FILL_ROWS):
            count = min(_FILL_ROWS, n - start)
            step = cache.step({0: count})
            rows = whole
            if count < _FILL_ROWS:
                rows = tuple(
                    device.rows(name, device.upload(np.ascontiguousarray(host[:count])))
                    for name, host in zip("qkv", hosts, strict=True)
                )
            # Attention of the rows that fill it is nobody's business here.
            step._rows = {0: rows}
            step.commit()
        return cache

    def stored(self, until: float) -> dict[str, Any]:
        """What is stored, byte for byte, against what the CPU's kernels store."""
        layer = dataclasses.replace(LAYER, n_head=4, n_kv_head=2)
        differ = {}
        for types in (("kvarn4", "kvarn4"), ("kvarn3", "kvarn5"), ("q8_0", "q4_0")):
            kept = dataclasses.replace(layer, k=types[0], v=types[1])
            here, there = (
                self._filled(device, kept, 700) for device in (self.device, open_device("cpu:0"))
            )
            for name in ("k_records", "v_records", "k_exact", "v_exact"):
                ours, theirs = getattr(here.buffers[0], name), getattr(there.buffers[0], name)
                a = np.asarray(self.device.download(ours)).view(np.uint8).reshape(-1)
                b = np.asarray(theirs).view(np.uint8).reshape(-1)
                differ["/".join((*types, name))] = int((a != b).sum()) if a.size == b.size else -1
        if any(differ.values()):
            self.fail(f"stored: bytes that differ from the CPU's: {differ}")
        return differ

    def _call(self, cache: Any) -> tuple[Callable[[], None], Any]:
        """A function that enqueues attention of one more row, and the array of its result."""
        layer, device = cache.plan.layers[0].spec, self.device
        rng = np.random.default_rng(3)
        rows = [
            device.upload(rng.standard_normal((1, heads, layer.head_dim), np.float32))
            for heads in (layer.n_head, layer.n_kv_head, layer.n_kv_head)
        ]
        seen: list[tuple[Any, ...]] = []

        class Spy:
            """The device, which writes down what it is asked to run."""

            def __getattr__(self, name: str) -> Any:
                return getattr(device, name)

            def run(self, *call: Any) -> None:
                seen.append(call)
                device.run(*call)

        cache.device = Spy()
        step = cache.step({0: 1})
        out = step.attend(0, *rows)
        step.discard()
        cache.device = device
        (call,) = seen
        return (lambda: device.run(*call)), out

    def repeat(self, until: float) -> dict[str, Any]:
        """One step again and again by every entry: its bits never change."""
        n, times, found = 700 if self.dry else 5000, 3 if self.dry else 50, {}
        cache = self._filled(self.device, LAYER, n)
        for entry in self._by_entry(cache):
            go, out = self._call(cache)
            hashes = set()
            for _ in range(times):
                go()
                hashes.add(hashlib.sha256(self.device.download(out).tobytes()).hexdigest())
            found[entry] = len(hashes)
            if len(hashes) != 1:
                self.fail(f"repeat: {entry}: {len(hashes)} different results of {times}")
        return {"tokens": n, "times": times, "different": found}

    def _by_entry(self, cache: Any) -> Iterator[str]:
        """Every entry that decodes it; while one is yielded, it is the one that the cache takes."""
        whole, layer = cache.plan, cache.plan.layers[0]
        small = dataclasses.replace(layer.attend[0].op, n_q=1)
        for row in self.device.table:
            policy = dataclasses.replace(ANY, entry=row.entry)
            decision = decide(small, self.device.table, self.device.caps, policy)
            if row.kind is OpKind.ATTEND and "prefill" not in row.entry and decision.ok:
                forced = dataclasses.replace(layer, attend=(decision,))
                cache.plan = dataclasses.replace(whole, policy=policy, layers=(forced,))
                cache._decisions = {}
                yield row.entry
        cache.plan = whole

    # ------------------------------------------------------------------ bandwidth

    def bandwidth(self, until: float) -> dict[str, Any]:
        """GB/s of stored bytes that attention of one row reads, and of a copy on the device."""
        copy = self._copy_speed()
        rows = []
        for n in (1024, 2048) if self.dry else TOKENS:
            if time.monotonic() > until - 30:
                self.fail(f"bandwidth: out of time before {n} tokens")
                break
            cache = self._filled(self.device, LAYER, n)
            for entry in self._by_entry(cache):
                go, _ = self._call(cache)
                seconds = self._seconds(go, 2 if self.dry else 20)
                sizes = LayerSizes.of(LAYER, cache.plan.layers[0].storage, keep_queries=False)
                nbytes = n // 128 * (sizes.k_slot + sizes.v_slot)
                speed = nbytes / seconds / 1e9
                rows.append({"entry": entry, "tokens": n, "seconds": seconds, "bytes": nbytes,
                             "gb_per_s": speed, "of_copy": speed / copy})  # fmt: skip
                share = f"{speed:.1f} GB/s, {speed / copy:.0%} of a copy"
                say(f"  {entry}, {n} tokens: {seconds * 1e6:.1f} us, {share}")
        return {"copy_gb_per_s": copy, "layer": "32 heads, 8 KV heads, head_dim 128, 4/4 bits",
                "decode": rows}  # fmt: skip

    def _seconds(self, go: Callable[[], None], count: int) -> float:
        """Median seconds of a call, over batches of calls."""
        go()
        self.device.synchronize()
        taken = []
        for _ in range(3 if self.dry else 7):
            started = time.perf_counter()
            for _ in range(count):
                go()
            self.device.synchronize()
            taken.append((time.perf_counter() - started) / count)
        return statistics.median(taken)

    def _copy_speed(self) -> float:
        """GB/s, read and written, of a copy from device memory to device memory."""
        nbytes = 1 << 24 if self.dry else 1 << 30
        driver = self.device.driver
        a, b = driver.zeros(nbytes), driver.zeros(nbytes)
        if driver.target == "cuda":
            copyto = driver.cupy.copyto
            return 2 * nbytes / self._seconds(lambda: copyto(b, a), 10) / 1e9
        if driver.target == "opencl":
            import pyopencl as cl

            enqueue = lambda: cl.enqueue_copy(driver.queue, b.base_data, a.base_data)  # noqa: E731
            return 2 * nbytes / self._seconds(enqueue, 5) / 1e9
        if driver.target == "hip":
            return 2 * nbytes / self._seconds(lambda: driver.copy(b, a), 10) / 1e9
        return 2 * nbytes / self._seconds(lambda: np.copyto(b, a), 5) / 1e9

    # ------------------------------------------------------------------ sanitizer

    def sanitizer(self, until: float) -> dict[str, Any]:
        """compute-sanitizer over a few cases; each tool a process of its own."""
        tool = shutil.which("compute-sanitizer")
        if self.device.caps.backend != "cuda" or tool is None:
            return {"skipped": "not a CUDA device" if tool else "no compute-sanitizer on PATH"}
        found = {}
        for name in SANITIZERS:
            command = [
                tool, "--tool", name, "--error-exitcode", "9", sys.executable, __file__,
                "--device", self.device.caps.id, "--dry", "--only", "parity",
            ]  # fmt: skip
            left = max(20.0, (until - time.monotonic()) / 2)
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=left, check=False
                )
            except subprocess.TimeoutExpired:
                found[name] = f"not finished in {left:.0f} s"
                continue
            found[name] = "clean" if done.returncode == 0 else done.stdout[-2000:]
            if done.returncode:
                self.fail(f"sanitizer: {name}: {done.stdout[-2000:]}")
        return found

    # ------------------------------------------------------------------ results

    def write(self, out: Path) -> None:
        """The report, and the device as a file of capabilities/devices."""
        caps = dataclasses.replace(self.device.caps, source="probe", qualified=self.qualified)
        out.mkdir(parents=True, exist_ok=True)
        report = {
            "schema": SCHEMA, "kvkernels": kvkernels.__version__, "dry": self.dry,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "device": caps.to_json(),
            "failures": self.failures, **self.found,
        }  # fmt: skip
        (out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if "parity" in self.found:
            path = out / f"{file_stem(caps.backend, caps.name, caps.facts)}.json"
            path.write_text(json.dumps(caps.to_json(), indent=2) + "\n", encoding="utf-8")
            say(f"{path}: for capabilities/devices; then run tools/regen.py")


def file_stem(backend: str, name: str, facts: Any) -> str:
    """``cuda-nvidia-h200-sm90``."""
    capability = facts.get("compute_capability")
    arch = f"sm{capability}" if capability else facts.get("gfx")
    words = re.sub(r"[^a-z0-9]+", "-", f"{backend} {name} {arch or ''}".lower())
    return words.strip("-")


def _failure(result: Result) -> str:
    error = f", rms {result.error.rms:.1e}" if result.error else ""
    return f"{result.case} by {result.entry}: {'; '.join(result.reasons)}{error}"


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", required=True, help="cuda:0, hip:0, opencl:0")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="small: proves the script, not a device")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, comma-separated")
    parser.add_argument("--filter", default="*", help="glob of case ids")
    args = parser.parse_args()
    check = Check(args.device, dry=args.dry, pattern=args.filter)
    say(f"{check.device.caps.id}: {check.device.caps.name} ({check.device.caps.driver})")
    for name in args.only.split(","):
        check.run(name)
    if args.only != "parity":
        check.write(args.out)
    say(f"{len(check.failures)} failures")
    return int(bool(check.failures))


if __name__ == "__main__":
    sys.exit(main())

"""Compilers of GPU code that need no GPU, and what a compiled kernel takes of one.

NVRTC by ctypes, hiprtc of an installed HIP runtime, hipcc. Each runs in a process of its own
(``compile_all``): NVRTC 12.4 changes the locale of its process, and a hiprtc that does not know a
target ends it.

As a script: ``toolchains.py KIND LIBRARY`` reads jobs and writes results, one JSON object a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

CUDA_OPTIONS = ("--std=c++17", "--fmad=false")
HIP_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")
#: relatives of other targets, on boards that nobody asked for
_BOARDS = (52, 53, 62, 107)
#: what a hiprtc of HIP 5 compiles without ending its process
HIPRTC_TARGETS = ("gfx906", "gfx90a", "gfx1030")
#: hipcc 5.2 compiles it with a constant that Debian's device library lacks
HIPCC_TARGETS = {"gfx1100": 11000}
_BITCODE = ("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode", "/opt/rocm/amdgcn/bitcode")


@dataclass(frozen=True)
class Toolchain:
    """``kind``: nvrtc, hiprtc or hipcc; ``name`` with version; ``targets`` it compiles for."""

    kind: str
    name: str
    library: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread; bytes of a thread's stack and of what was spilled
    there; bytes of shared memory of a block.
    """

    registers: int
    stack: int
    spill: int
    shared: int


class NvrtcFailed(RuntimeError):
    """NVRTC's words."""


class Nvrtc:
    """A libnvrtc by path."""

    def __init__(self, path: str) -> None:
        # Wheels of 13.x have no RUNPATH.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(path)
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def archs(self) -> list[int]:
        """Compute capabilities it compiles for."""
        count = ctypes.c_int()
        self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._lib.nvrtcGetSupportedArchs(found)
        return list(found)

    def cubin(self, source: str, target: str, *options: str) -> tuple[bytes, str]:
        """Machine code and the log. Raises NvrtcFailed."""
        lib, handle = self._lib, ctypes.c_void_p()
        given = [f"--gpu-architecture={target}", "--ptxas-options=-v", *CUDA_OPTIONS, *options]
        texts = (ctypes.c_char_p * len(given))(*(text.encode() for text in given))
        lib.nvrtcCreateProgram(ctypes.byref(handle), source.encode(), b"kvk.cu", 0, None, None)
        status = lib.nvrtcCompileProgram(handle, len(given), texts)
        log = self._text(handle, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
        code = b"" if status else self._text(handle, "CUBIN")
        lib.nvrtcDestroyProgram(ctypes.byref(handle))
        if status:
            raise NvrtcFailed(f"{lib.nvrtcGetErrorString(status).decode()}: {log}")
        return code, log

    def _text(self, handle: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._lib, f"nvrtcGet{what}Size")(handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._lib, f"nvrtcGet{what}")(handle, buffer)
        return buffer.raw


def cuda_resources(log: str) -> dict[str, Resources]:
    """By kernel, from what ``--ptxas-options=-v`` says."""
    found, name, stack, spill = {}, "", 0, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name, stack, spill = match[1], 0, 0
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spill = int(match[1]), int(match[2]) + int(match[3])
        elif name and (match := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = Resources(int(match[1]), stack, spill, int(shared[1]) if shared else 0)
    return found


def hip_resources(code: bytes) -> dict[str, Resources]:
    """By kernel, from the metadata of a code object (also inside a bundle).

    ``registers`` are vector registers; of a spilled one, 4 bytes are counted.
    """
    found = {}
    for metadata in _notes(code):
        for kernel in metadata.get("amdhsa.kernels", ()):
            # Scalar registers are spilled into lanes of vector ones, which cost no memory.
            spilled = kernel.get(".vgpr_spill_count", 0)
            found[kernel[".name"]] = Resources(
                kernel[".vgpr_count"], kernel[".private_segment_fixed_size"], 4 * spilled,
                kernel[".group_segment_fixed_size"],
            )  # fmt: skip
    return found


def _notes(code: bytes) -> Iterator[dict[str, Any]]:
    at = code.find(b"AMDGPU\0")
    while at >= 0:
        names, size, kind = struct.unpack_from("<III", code, at - 12) if at >= 12 else (0, 0, 0)
        if (names, kind) == (7, 32):  # NT_AMDGPU_METADATA
            yield _unpacked(code, at + 8)[0]
        at = code.find(b"AMDGPU\0", at + 7)
    del size


def _unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """One value of MessagePack at ``at``, and where it ends."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag < 0xC0:
        size = tag & (0x1F if tag >= 0xA0 else 0x0F)
        kind = "str" if tag >= 0xA0 else "array" if tag >= 0x90 else "map"
    elif tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    elif tag in (0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3):
        form = ">" + "BHIQbhiq"[tag - 0xCC]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    else:
        kind = {0xD9: "str", 0xDA: "str", 0xDB: "str", 0xDC: "array", 0xDD: "array"}.get(tag, "map")
        form = {0xD9: ">B", 0xDA: ">H", 0xDC: ">H", 0xDE: ">H"}.get(tag, ">I")
        (size,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
    if kind == "str":
        return data[at : at + size].decode("utf-8", "replace"), at + size
    items = []
    for _ in range(size * (2 if kind == "map" else 1)):
        item, at = _unpacked(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at


# ------------------------------------------------------------------ what is installed here


@cache
def toolchains() -> tuple[Toolchain, ...]:
    """Every compiler found: NVRTC of installed wheels, hiprtc, hipcc."""
    found = []
    for path in _nvrtc_libraries():
        told = _asked("nvrtc", path)
        if told is not None:
            archs = tuple(f"sm_{arch}" for arch in told["archs"] if arch not in _BOARDS)
            found.append(Toolchain("nvrtc", f"nvrtc {told['version']}", path, archs))
    for soname in ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"):
        told = _asked("hiprtc", soname)
        if told is not None:
            name = f"hiprtc {told['version']}"
            found.append(Toolchain("hiprtc", name, soname, HIPRTC_TARGETS))
            break
    hipcc, assembler = shutil.which("hipcc"), _llvm_as()
    if hipcc and assembler and any(Path(p).is_dir() for p in _BITCODE):
        told = _asked("hipcc", hipcc)
        if told is not None:
            found.append(Toolchain("hipcc", f"hipcc {told['version']}", hipcc, (*HIPCC_TARGETS,)))
    return tuple(found)


def _nvrtc_libraries() -> list[str]:
    places = [Path(place) / "nvidia" for place in sys.path if place]
    paths = [path for place in places for path in place.glob("*/lib/libnvrtc.so.[0-9]*")]
    return sorted({str(path.resolve()) for path in paths})


def _llvm_as() -> str | None:
    names = ("llvm-as-15", "llvm-as", "/usr/lib/llvm-15/bin/llvm-as")
    return next((found for name in names if (found := shutil.which(name))), None)


def _asked(kind: str, library: str) -> dict[str, Any] | None:
    done = _worker(kind, library, "")
    lines = done.stdout.splitlines()
    return json.loads(lines[0]) if done.returncode == 0 and lines else None


# ------------------------------------------------------------------ workers


def compile_all(
    chain: Toolchain, jobs: Sequence[tuple[str, str, str]], workers: int = 1
) -> dict[tuple[str, str], dict[str, Resources] | str]:
    """{(key, target): resources by kernel, or the compiler's words}; jobs: key, target, source."""
    shares = [jobs[i::workers] for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(lambda share: _compiled(chain, share), shares))
    return {key: value for answer in answers for key, value in answer.items()}


def _compiled(
    chain: Toolchain, jobs: Sequence[tuple[str, str, str]]
) -> dict[tuple[str, str], dict[str, Resources] | str]:
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    done = _worker(chain.kind, chain.library, lines)
    found: dict[tuple[str, str], dict[str, Resources] | str] = {}
    for line in done.stdout.splitlines()[1:]:
        key, target, kernels, error = json.loads(line)
        taken = {name: Resources(**values) for name, values in kernels.items()}
        found[key, target] = error or taken
    for key, target, _ in jobs:
        if (key, target) not in found:
            found[key, target] = f"the compiler ended its process: {done.stderr[-500:]}"
    return found


def _worker(kind: str, library: str, lines: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.run(
        [sys.executable, __file__, kind, library], input=lines, capture_output=True, check=False,
        encoding="utf-8", errors="replace", env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def _answer(value: Any) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _serve(kind: str, library: str) -> None:
    about, compile_one = {"nvrtc": _nvrtc, "hiprtc": _hiprtc, "hipcc": _hipcc}[kind](library)
    _answer(about)
    for line in sys.stdin.buffer:
        key, target, source = json.loads(line)
        kernels, error = {}, ""
        try:
            kernels = compile_one(source, target)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:4000]
        _answer([key, target, {name: asdict(taken) for name, taken in kernels.items()}, error])


def _nvrtc(library: str) -> tuple[dict[str, Any], Any]:
    nvrtc = Nvrtc(library)
    version = "{}.{}".format(*nvrtc.version())

    def compile_one(source: str, target: str) -> dict[str, Resources]:
        return cuda_resources(nvrtc.cubin(source, target)[1])

    return {"version": version, "archs": nvrtc.archs()}, compile_one


def _hiprtc(library: str) -> tuple[dict[str, Any], Any]:
    from kvkernels.hip.compiler import OPTIONS, Hiprtc

    assert OPTIONS == HIP_OPTIONS
    loaded = ctypes.CDLL(library)
    raw = ctypes.c_int()
    loaded.hipRuntimeGetVersion(ctypes.byref(raw))
    version = f"{raw.value // 10_000_000}.{raw.value // 100_000 % 100}"

    class Source:
        """A program whose text is given."""

        kernels = ()

        def __init__(self, text: str) -> None:
            self.source = lambda target: text

    def compile_one(source: str, target: str) -> dict[str, Resources]:
        given: Any = Source(source)
        return hip_resources(Hiprtc(loaded, target, version)._make(given))

    return {"version": version}, compile_one


def _hipcc(path: str) -> tuple[dict[str, Any], Any]:
    environ = os.environ | {"HIP_PLATFORM": "amd"}  # else nvcc on PATH makes it choose nvidia
    said = subprocess.run(
        [path, "--version"], capture_output=True, encoding="utf-8", env=environ, check=True
    )
    match = re.search(r"HIP version: (\d+\.\d+)", said.stdout)
    folder = tempfile.TemporaryDirectory(prefix="kvk-device-libs-")
    bitcode = next(Path(p) for p in _BITCODE if Path(p).is_dir())
    for file in bitcode.glob("*.bc"):
        (Path(folder.name) / file.name).symlink_to(file)
    for target, number in HIPCC_TARGETS.items():
        name = Path(folder.name) / f"oclc_isa_version_{target.removeprefix('gfx')}.bc"
        if not name.exists():
            text = (
                'target triple = "amdgcn-amd-amdhsa"\n@__oclc_ISA_version = linkonce_odr protected '
                f"local_unnamed_addr addrspace(4) constant i32 {number}, align 4\n"
            )
            assembler = _llvm_as()
            assert assembler is not None
            subprocess.run([assembler, "-o", str(name)], input=text.encode(), check=True)

    def compile_one(source: str, target: str) -> dict[str, Resources]:
        text, result = (Path(folder.name) / f"kvk.{end}" for end in ("hip", "hsaco"))
        text.write_text(source, encoding="utf-8")
        done = subprocess.run(
            [
                path, "--genco", f"--offload-arch={target}", *HIP_OPTIONS,
                f"--rocm-device-lib-path={folder.name}", str(text), "-o", str(result),
            ],
            capture_output=True, encoding="utf-8", errors="replace", env=environ, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        return hip_resources(result.read_bytes())

    return {"version": match[1] if match else "unknown"}, compile_one


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])

"""Load a bundle: IR text to machine code, and the call that Numba's own wrapper would make."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable
from functools import cache
from importlib import resources
from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from kvkernels import objects
from kvkernels.cpu.ahead.signatures import SIGNATURES
from kvkernels.cpu.kernels.stamp import source_stamp

FORMAT = 1

# What compiled code asks of Numba's runtime: memory for np.empty. Layout of the header: reference
# count, destructor, its argument, data, size.
_RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %a = zext i32 %align to i64
  %head = add i64 %a, 64
  %all = add i64 %size, %head
  %info = call ptr @malloc(i64 %all)
  %base = ptrtoint ptr %info to i64
  %after = add i64 %base, %head
  %mask = sub i64 0, %a
  %where = and i64 %after, %mask
  %data = inttoptr i64 %where to ptr
  store i64 1, ptr %info
  %f1 = getelementptr i64, ptr %info, i64 1
  store ptr null, ptr %f1
  %f2 = getelementptr i64, ptr %info, i64 2
  store ptr null, ptr %f2
  %f3 = getelementptr i64, ptr %info, i64 3
  store ptr %data, ptr %f3
  %f4 = getelementptr i64, ptr %info, i64 4
  store i64 %size, ptr %f4
  ret ptr %info
}
define void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}
define void @NRT_Free(ptr %memory) {
  call void @free(ptr %memory)
  ret void
}
"""


class Bundle:
    """The kernels of one instruction set. ``address`` compiles a kernel on its first use."""

    def __init__(self, data: bytes) -> None:
        self._zip = ZipFile(BytesIO(data))
        self.manifest = json.loads(self._zip.read("manifest.json"))
        # Bundles of two instruction sets have kernels of the same names and sources.
        self._stamp = hashlib.sha256(data).hexdigest()
        self._lock = threading.Lock()
        self._addresses: dict[str, int] = {}

    @property
    def usable(self) -> bool:
        """Whether it was made from the sources beside it."""
        made = (self.manifest["format"], self.manifest["sources"])
        return made == (FORMAT, source_stamp())

    def __contains__(self, name: str) -> bool:
        return name in self.manifest["kernels"]

    def address(self, name: str) -> int:
        """Address of a kernel's machine code."""
        with self._lock:
            if name not in self._addresses:
                self._addresses[name] = self._compile(name)
            return self._addresses[name]

    def _compile(self, name: str) -> int:
        symbol = self.manifest["kernels"][name]

        def text() -> str:
            return self._zip.read(f"{name}.ll").decode()

        return machine_code(text, f"{self._stamp} {name}", (symbol,), _RUNTIME)[0]


def machine_code(
    text: str | Callable[[], str], stamp: str, symbols: tuple[str, ...], extra: str = ""
) -> list[int]:
    """Addresses of ``symbols`` of a module of IR, compiled for this CPU or taken from disk.

    ``stamp`` stands for the text, which is read only when nothing is kept. Raises RuntimeError for
    IR that this LLVM cannot read.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=2, jit=True
    )
    version = ".".join(map(str, llvm.llvm_version_info))
    file = objects.file_name(stamp, cpu, features, machine.triple, version)
    code = objects.load(file)
    if code is None:
        module = llvm.parse_assembly(text if isinstance(text, str) else text())
        if extra:
            module.link_in(llvm.parse_assembly(extra))
        code = machine.emit_object(module)
        objects.store(file, code)
    # An engine of its own: finishing one changes the protection of its pages, and other threads may
    # be running code of earlier kernels at that moment.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return [int(engine.get_function_address(symbol)) for symbol in symbols]


# Addresses of compiled code are kept all over the place: it must outlive every cache.
_engines: list[Any] = []


@cache
def bundle(isa: str) -> Bundle | None:
    """The bundle for an instruction set, or None when Numba has to compile."""
    try:
        data = (resources.files("kvkernels.cpu.ahead") / f"{isa}.zip").read_bytes()
        found = Bundle(data)
    except (OSError, BadZipFile, KeyError, ValueError, RuntimeError):
        return None  # absent, or not for this llvmlite
    if not found.usable:
        return None
    return found


# kind -> how its bits travel in an int64
_FLOATS: dict[str, tuple[Any, Any]] = {
    "float": (np.float32, np.int32),
    "double": (np.float64, np.int64),
}


class AheadKernel:
    """Callable like the Numba function it was made from, and in two halves: ``pack`` arguments that
    do not change once, join the pieces and ``launch`` them.
    """

    def __init__(self, name: str, address: int) -> None:
        self.name = name
        self.address = address
        self._kinds = tuple(("*" in kind, _FLOATS.get(kind)) for kind in SIGNATURES[name])
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, *args: Any) -> int:
        slots = [0]
        self._pack(slots, self._kinds, args)
        packed = (ctypes.c_int64 * len(slots))(*slots)
        self._call(packed)
        return packed[0]

    def pack(self, first: int, *args: Any) -> NDArray[np.int64]:
        """The slots of arguments ``first``, ``first + 1``, ..; the caller keeps arrays alive."""
        slots: list[int] = []
        self._pack(slots, self._kinds[first : first + len(args)], args)
        return np.array(slots, np.int64)

    def launch(self, slots: NDArray[np.int64]) -> None:
        """Call with packed arguments; ``slots[0]`` takes the result."""
        self._call(slots.ctypes.data)

    @staticmethod
    def _pack(slots: list[int], kinds: Any, args: tuple[Any, ...]) -> None:
        for (is_array, is_float), value in zip(kinds, args, strict=True):
            if is_array:
                slots.append(_address_of(value))
                slots += value.shape
            elif is_float is not None:
                slots.append(int(is_float[0](value).view(is_float[1])))
            else:
                slots.append(int(value))


_NO_BYTES = ctypes.c_char * 0


def _address_of(array: Any) -> int:
    try:  # several times quicker than asking the array, but only for what may be written
        return ctypes.addressof(_NO_BYTES.from_buffer(array))
    except (TypeError, ValueError, BufferError):
        # Read-only, then; compiled code would walk through a strided array as if it were dense.
        assert array.flags.c_contiguous
        return int(array.ctypes.data)


def kernel(isa: str, name: str, compiled: Callable[[], Any]) -> Any:
    """The kernel from the bundle of ``isa``, or what ``compiled()`` gives: the Numba function."""
    found = bundle(isa)
    if found is None or name not in found:
        return compiled()
    try:
        return AheadKernel(name, found.address(name))
    except RuntimeError:  # IR that this LLVM cannot read
        return compiled()


def address(isa: str, name: str, compiled: Callable[[], int]) -> int:
    """Address of a micro-kernel, from the bundle or from ``compiled()``."""
    found = bundle(isa)
    if found is None or name not in found:
        return compiled()
    try:
        return found.address(name)
    except RuntimeError:
        return compiled()

"""Make ``kvkernels/cpu/ahead/<isa>.zip``: optimised LLVM IR of the decode kernels for each
instruction set.

    python tools/ahead.py           # all bundles
    python tools/ahead.py --check   # exit 1 when one is older than the kernel sources

Every bundle is made by a child process in which Numba compiles for a baseline CPU of that
instruction set, so that the IR fits every CPU that has it; nothing of that code runs here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZIP_LZMA, ZipFile, ZipInfo

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "kvkernels" / "cpu" / "ahead"
#: instruction set -> the CPU Numba compiles for
CPUS = {"avx512_vnni": "icelake-server", "avx2": "haswell"}


def wrapper(dispatcher, kinds):
    """A C function of one int64 pointer that unpacks the arguments and calls the Numba function."""
    from llvmlite import ir
    from numba import cfunc, types
    from numba.extending import intrinsic
    from numba.np.arrayobj import populate_array

    scalars = {
        "int": types.int64,
        "float": types.float32,
        "double": types.float64,
        "bool": types.boolean,
    }
    dtypes = {
        "i8": types.int64, "i4": types.int32, "f4": types.float32, "f8": types.float64,
        "u1": types.uint8, "u2": types.uint16,
    }  # fmt: skip
    arguments = tuple(
        types.Array(dtypes[k.split("*")[0]], int(k.split("*")[1]), "C") if "*" in k else scalars[k]
        for k in kinds
    )

    @intrinsic
    def unpack_and_call(typing, slots):
        function = types.Dispatcher(dispatcher)
        inner = function.get_call_type(typing, arguments, {})

        def codegen(context, builder, _signature, args):
            i64 = ir.IntType(64)
            position = 1

            def take():
                nonlocal position
                value = builder.load(builder.gep(args[0], [i64(position)]))
                position += 1
                return value

            values = []
            for kind in arguments:
                if not isinstance(kind, types.Array):
                    raw = take()
                    if kind == types.float32:
                        raw = builder.bitcast(builder.trunc(raw, ir.IntType(32)), ir.FloatType())
                    elif kind == types.float64:
                        raw = builder.bitcast(raw, ir.DoubleType())
                    elif kind == types.boolean:
                        raw = builder.icmp_signed("!=", raw, i64(0))
                    values.append(raw)
                    continue
                array = context.make_array(kind)(context, builder)
                data = builder.inttoptr(take(), array.data.type)
                shape = [take() for _ in range(kind.ndim)]
                size = i64(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
                strides = [size]
                for extent in reversed(shape[1:]):
                    strides.insert(0, builder.mul(strides[0], extent))
                populate_array(
                    array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None
                )
                values.append(array._getvalue())
            result = context.get_function(function, inner)(builder, values)
            if inner.return_type != types.none:
                wide = builder.zext if result.type.width < 64 else lambda x, _t: x
                builder.store(wide(result, i64), args[0])
            return context.get_dummy_value()

        return types.void(slots), codegen

    @cfunc(types.void(types.CPointer(types.int64)))
    def entry(slots):
        unpack_and_call(slots)

    return entry


#: what the IR may leave to the loader: our own runtime, and the C library
PROVIDED = {
    "NRT_MemInfo_alloc_aligned", "NRT_MemInfo_call_dtor", "NRT_Free", "logf", "log", "exp",
    "memset", "memcpy", "memmove",
}  # fmt: skip
#: how Numba's wrapper reports an exception; kernels raise none
ERROR_PATHS = {
    "numba_gil_ensure", "numba_gil_release", "numba_unpickle", "numba_do_raise",
    "numba_runtime_build_excinfo_struct", "PyUnicode_FromString", "PyErr_WriteUnraisable",
    "PyErr_Clear", "PyErr_SetString", "PyErr_SetNone", "PyBytes_FromStringAndSize", "Py_DecRef",
}  # fmt: skip
_DECLARE = re.compile(
    r"^declare (?P<result>.*?)@(?P<name>[\w.]+)\((?P<args>.*?)\)[^\n]*$", re.MULTILINE
)

_PATHS = re.compile(rf"/[\w./-]*site-packages|{re.escape(str(ROOT))}")


def self_contained(text: str) -> str:
    """IR whose other outside functions, all on error paths that kernels never take, are traps.

    They belong to Python and to Numba's runtime, which the loader must not need.
    """

    def trap(match: re.Match[str]) -> str:
        name = match["name"]
        if name.startswith("llvm.") or name in PROVIDED:
            return match[0]
        if name not in ERROR_PATHS:
            raise ValueError(f"{name} is neither provided by the loader nor an error path")
        head = f"define internal {match['result']}@{name}({match['args']})"
        return head + " {\n  call void @llvm.trap()\n  unreachable\n}"

    changed = _DECLARE.sub(trap, text)
    # Pickled error messages name source files; their length is part of the IR, so it stays.
    changed = _PATHS.sub(lambda match: "_" * len(match[0]), changed)
    return (
        changed if "declare void @llvm.trap" in text else changed + "\ndeclare void @llvm.trap()\n"
    )


def build(isa: str, path: Path) -> None:
    """Compile every kernel of a bundle and write it."""
    from importlib import import_module

    from kvkernels.cpu.ahead.runtime import FORMAT
    from kvkernels.cpu.ahead.signatures import SIGNATURES, dot_name, matrix_name
    from kvkernels.cpu.columns import ROW_BLOCKS
    from kvkernels.cpu.kernels.dot import dot_kernel
    from kvkernels.cpu.kernels.matrix import KINDS, matrix_kernel
    from kvkernels.cpu.kernels.stamp import source_stamp
    from kvkernels.records.layout import BITS

    compiled = {}
    for name, kinds in SIGNATURES.items():
        module, function = name.split(".")
        source = import_module(f"kvkernels.cpu.kernels.{module}")
        compiled[name] = wrapper(getattr(source, function), kinds)
    for rows in ROW_BLOCKS:
        for bits in BITS:
            for mode in ("i8", "i16"):
                compiled[dot_name(bits, rows, mode)] = dot_kernel(bits, rows, mode, isa)
        for kind in range(len(KINDS)):
            compiled[matrix_name(rows, kind)] = matrix_kernel(rows, kind)
    manifest = {
        "format": FORMAT,
        "sources": source_stamp(),
        "kernels": {name: entry.native_name for name, entry in compiled.items()},
    }
    with ZipFile(path, "w", ZIP_LZMA) as bundle:  # a third less than deflate
        texts = {
            f"{name}.ll": self_contained(entry.inspect_llvm()) for name, entry in compiled.items()
        }
        for name, text in {"manifest.json": json.dumps(manifest, indent=1), **texts}.items():
            # A fixed date, so that equal content is an equal file.
            bundle.writestr(ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text, ZIP_LZMA)


def stale() -> list[str]:
    """Bundles that were not made from the present kernel sources."""
    from kvkernels.cpu.ahead.runtime import bundle

    return [isa for isa in CPUS if bundle(isa) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--isa", choices=list(CPUS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.check:
        old = stale()
        sys.stdout.write(f"stale: {', '.join(old)}; run tools/ahead.py\n" if old else "fresh\n")
        return 1 if old else 0
    if options.isa:
        build(options.isa, TARGET / f"{options.isa}.zip")
        return 0
    for isa, cpu in CPUS.items():
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
            env |= {"NUMBA_CACHE_DIR": cache, "KVK_CPU_ISA": isa}
            subprocess.run([sys.executable, __file__, "--isa", isa], env=env, check=True)
        path = TARGET / f"{isa}.zip"
        sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What compiled kernels take of a GPU, per program and target, without a GPU.

    tools/gates.py             compile every program for every target found here and write
                               capabilities/resources.csv (with --targets or --programs: its rows)
    tools/gates.py --check     the same, but compare; exit 1 on a failure to compile, a spill up to
                               head_dim 256, more registers than the table and 8, or more than
                               32 KiB of shared memory

Compilers: see toolchains.py. Numbers belong to a compiler's version; a row of another version is
held to the fixed limits only.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from toolchains import Resources, Toolchain, compile_all, toolchains

from kvkernels import objects
from kvkernels.cuda.table import TURING
from kvkernels.op import LayerSpec
from kvkernels.simt import aware, commit, commit_rows, materialize, staging, unfit
from kvkernels.simt.attend import attend_program, merge_program, mma_program, rotate_program
from kvkernels.simt.program import Program
from kvkernels.storage import Body, Storage

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "capabilities" / "resources.csv"
COLUMNS = ("program", "kernel", "target", "compiler", "registers", "stack", "spill", "shared")
#: bytes of shared memory that every device has
SHARED = 32768
#: registers above the table that are noise of a compiler
SLACK = 8
#: head dims up to this one must not spill
NO_SPILL = 256
#: its clang 15 keeps functions within 128 registers there; that ROCm is too old for the card anyway
MAY_SPILL = (("gfx1100", "hipcc 5.2"),)
#: {(program, kernel): most bytes}: spills to be got rid of. A larger one, or one of another kernel,
#: fails; an entry that no target needs any more should go.
KNOWN_SPILLS: dict[tuple[str, str], int] = {
    # Clang 15 for AMD.
    ("aware/moments", "key_moment"): 1192,
    ("aware/moments", "value_moment"): 1188,
}
F32 = 0
#: of each toolchain, what programs of the second rank are compiled for; the first rank is for all
SAMPLE = ("sm_61", "sm_70", "sm_80", "sm_90", "sm_120", "gfx90a", "gfx1030")
#: what the main test run compiles
QUICK = ("sm_61", "sm_90", "gfx1030")
Row = tuple[str, ...]


def first_rank() -> dict[str, Program]:
    """4-bit attention of every shape, and one of everything else, by name."""
    found = {}
    for dim in (64, 128, 256, 512):
        for rows in (1, 4, 8, *((16,) if dim <= 128 else ())):
            found[f"attend/d{dim}/r{rows}/k4v4"] = _attend(dim, rows, "kvarn4", "kvarn4")
        for rows in (8, 16) if dim <= 128 else (8,):
            found[f"mma/d{dim}/r{rows}/k4v4"] = _mma(dim, rows, "kvarn4", "kvarn4")
    layer = _layer(128, "kvarn4", "kvarn4")
    found["rotate/d128"] = rotate_program(layer, F32)
    found["merge/d128/r8"] = merge_program(layer, 8)
    # What writes a cache.
    found["stage/d128"] = staging.program(128)
    found["seal"] = commit._SEAL
    found["aware/moments"], found["aware/axes"] = aware._MOMENTS, aware._AXES
    found["aware/feedback"] = aware._FEEDBACK
    found["rows"], found["tail"] = commit_rows._ROWS, commit_rows._TAIL
    found["check"], found["overflow/d128"] = unfit._CHECK, unfit._overflow(128)
    found["materialize/d128"] = materialize.program(128)
    return found


def second_rank() -> dict[str, Program]:
    """Other widths, standard types, rings, and the widest heads."""
    found = {}
    for dim in (64, 128, 256, 512):
        for k, v in ((2, 2), (8, 8), (3, 5), (6, 6)) if dim in (128, 256) else ():
            for rows in (4, 8):
                name = f"attend/d{dim}/r{rows}/k{k}v{v}"
                found[name] = _attend(dim, rows, f"kvarn{k}", f"kvarn{v}")
            found[f"mma/d{dim}/r8/k{k}v{v}"] = _mma(dim, 8, f"kvarn{k}", f"kvarn{v}")
        for name in ("q8_0", "q4_0"):
            found[f"attend/d{dim}/r4/{name}"] = _attend(dim, 4, name, name)
        storage = Storage(
            body=Body.RECORDS, k="kvarn4", v="kvarn4", tail_rows=256, reserve=128, tail_dtype="f16"
        )
        layer = _layer(dim, "kvarn4", "kvarn4")
        found[f"attend/d{dim}/r4/k4v4/ring-f16"] = attend_program(layer, storage, 4, F32, F32)
        if dim != 128:
            found[f"rotate/d{dim}"] = rotate_program(layer, F32)
            found[f"merge/d{dim}/r8"] = merge_program(layer, 8)
            found[f"stage/d{dim}"] = staging.program(dim)
            found[f"overflow/d{dim}"] = unfit._overflow(dim)
            found[f"materialize/d{dim}"] = materialize.program(dim)
    return found


def _layer(dim: int, k: str, v: str) -> LayerSpec:
    return LayerSpec(n_head=8, n_kv_head=2, head_dim=dim, k=k, v=v)


def _attend(dim: int, rows: int, k: str, v: str) -> Program:
    layer = _layer(dim, k, v)
    return attend_program(layer, Storage.plain(layer), rows, F32, F32)


def _mma(dim: int, rows: int, k: str, v: str) -> Program:
    layer = _layer(dim, k, v)
    return mma_program(layer, Storage.plain(layer), rows)


def compiles_for(name: str, target: str) -> bool:
    """Whether a program is for that target at all: tensor cores are NVIDIA's from Turing on."""
    kind, _, number = target.partition("_")
    return not name.startswith("mma/") or (kind == "sm" and int(number) >= TURING)


def head_dim(name: str) -> int:
    """Of a program by its name; 0 when it has none."""
    return next(
        (int(part[1:]) for part in name.split("/") if part[0] == "d" and part[1:].isdigit()), 0
    )


def measure(
    chains: Iterable[Toolchain], targets: str, pattern: str, workers: int
) -> tuple[list[Row], list[str]]:
    """Rows of the table, and what did not compile. Results are kept in KVK_CACHE_DIR."""
    rows, failures = [], []
    first, second = first_rank(), second_rank()
    for chain in chains:
        kind = "cuda" if chain.kind == "nvrtc" else "hip"
        jobs: list[tuple[str, str, str]] = []
        known: dict[tuple[str, str], dict[str, Resources] | str] = {}
        for name, program in (first | second).items():
            for target in chain.targets:
                wanted = any(fnmatchcase(target, one) for one in targets.split(","))
                if not wanted or not fnmatchcase(name, pattern):
                    continue
                if not compiles_for(name, target) or (name in second and target not in SAMPLE):
                    continue
                kept = objects.load(_kept(program, kind, target, chain))
                if kept is None:
                    jobs.append((name, target, program.source(kind)))
                else:
                    loaded = json.loads(kept)
                    known[name, target] = {n: Resources(**taken) for n, taken in loaded.items()}
        fresh = compile_all(chain, jobs, workers)
        for (name, target), value in fresh.items():
            if not isinstance(value, str):
                text = json.dumps({n: asdict(taken) for n, taken in value.items()})
                program = (first | second)[name]
                objects.store(_kept(program, kind, target, chain), text.encode())
        for (name, target), value in (known | fresh).items():
            if isinstance(value, str):
                failures.append(f"{name} for {target} with {chain.name}: {value.strip()[:2000]}")
                continue
            rows += [
                (name, kernel, target, chain.name, *(str(x) for x in asdict(taken).values()))
                for kernel, taken in value.items()
            ]
    return sorted(rows, key=_order), failures


def _kept(program: Program, kind: str, target: str, chain: Toolchain) -> str:
    return objects.file_name("gates/2", program.digest(kind), target, chain.name)


def _order(row: Row) -> tuple[object, ...]:
    numbers = tuple(int(part) if part.isdigit() else -1 for part in row[2].split("_"))
    return (row[0].partition("/")[0], head_dim(row[0]), row[0], row[1], row[3], numbers, row[2])


def read_table(path: Path = TABLE) -> dict[Row, Row]:
    """Rows by (program, kernel, target, compiler)."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {tuple(row[:4]): tuple(row) for row in list(csv.reader(file))[1:]}


def write_table(rows: Iterable[Row], path: Path = TABLE) -> None:
    """All rows, in a fixed order."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(rows, key=_order))


def problems(rows: Iterable[Row], table: Mapping[Row, Row]) -> list[str]:
    """What the gate does not let pass, one line each."""
    found = []
    for row in rows:
        name, kernel, target, compiler = row[:4]
        registers, _, spill, shared = (int(x) for x in row[4:])
        what = f"{name} ({kernel}) for {target} with {compiler}"
        may = head_dim(name) > NO_SPILL or (target, compiler) in MAY_SPILL
        if spill > KNOWN_SPILLS.get((name, kernel), 0) and not may:
            found.append(f"{what} spills {spill} bytes")
        if shared > SHARED:
            found.append(f"{what} takes {shared} bytes of shared memory, more than {SHARED}")
        before = table.get(row[:4])
        if before is not None and registers > int(before[4]) + SLACK:
            found.append(f"{what} takes {registers} registers, the table has {before[4]}")
    return found


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--targets", default="*", help="globs, comma-separated: sm_90,gfx*")
    parser.add_argument("--programs", default="*", help="glob: attend/d128/*")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    args = parser.parse_args()
    chains = toolchains()
    sys.stdout.write(f"compilers: {', '.join(chain.name for chain in chains) or 'none'}\n")
    rows, failures = measure(chains, args.targets, args.programs, args.jobs)
    table = read_table()
    found = failures + problems(rows, table)
    for line in found:
        sys.stdout.write(f"FAILED: {line}\n")
    sys.stdout.write(f"{len(rows)} kernels, {len(found)} problems\n")
    if not args.check and rows:
        whole = args.targets == "*" and args.programs == "*"
        kept = {} if whole else table
        write_table((kept | {row[:4]: row for row in rows}).values())
        return 0
    return int(bool(found) or not rows)


if __name__ == "__main__":
    sys.exit(main())

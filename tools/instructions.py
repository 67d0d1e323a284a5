"""Instructions of attention per record, and what share of a card's memory bandwidth their issue
leaves. A static estimate from disassembly: nothing is measured; caches, latency and occupancy are
left out.

    tools/instructions.py [--dim 128] [--rows 4] [--bits 4]

Counted is one pass of the loop over sealed groups: instructions of dot_codes (attend.inc) times the
passes of its loops, everything else of the loop once, without biases (softcap,
ALiBi, masks); tensor cores (attend_mma.inc) with 8 rows. Needs nvdisasm (pip install
nvidia-cuda-nvdisasm) for NVIDIA, llvm-objdump and hiprtc for AMD.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gates import _attend, _mma
from toolchains import Nvrtc, toolchains

from kvkernels.hip import compiler as hip_compiler
from kvkernels.records.layout import HeadLayout, Side
from kvkernels.simt.program import Program, part


@dataclass(frozen=True)
class Card:
    """``slots``: instructions of a warp or wave that all its units together issue per second."""

    name: str
    target: str
    lanes: int
    slots: float
    bandwidth: float


# Units x schedulers x clock. CDNA: a SIMD takes a wave of 64 in four cycles. MI300X is gfx942, not
# known to hiprtc 5: counted is the code of gfx90a.
CARDS = (
    Card("H200", "sm_90", 32, 132 * 4 * 1.83e9, 4.8e12),
    Card("RTX 4090", "sm_89", 32, 128 * 4 * 2.52e9, 1.008e12),
    Card("MI300X (code of gfx90a)", "gfx90a", 64, 304 * 4 * 2.1e9 / 4, 5.3e12),
)
THREADS = 128
_OWN = {"records.inc": 1.0, "codes.inc": 1.0, "softmax.inc": 0.5}


#: of a source: the line that begins the loop over sealed groups, and the first one after it
LOOPS = {
    "attend.inc": ("if (source == FROM_BODY)", "    } else"),
    "attend_mma.inc": ("NO_UNROLL for (i32 index", "    }"),
}


def body_lines(file: str) -> range:
    """Lines of a source that are the loop over sealed groups."""
    lines, (begin, end) = part(file).splitlines(), LOOPS[file]
    first = next(i for i, line in enumerate(lines) if begin in line)
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith(end))
    return range(first + 1, last + 2)


def bias_lines() -> range:
    """Lines of softmax.inc that plain attention jumps over."""
    lines = part("softmax.inc").splitlines()
    first = next(i for i, line in enumerate(lines) if "f32 biased(" in line)
    last = next(i for i, line in enumerate(lines) if i > first and line == "}")
    return range(first + 1, last + 2)


def count_sass(text: str, file: str, passes: int) -> float:
    """Instructions of a warp in one pass, from ``nvdisasm -gi``."""
    body, skipped, chains, fresh, total = body_lines(file), bias_lines(), [], True, 0.0
    place = re.compile(rf'\b{re.escape(file)}", line (\d+)')
    for line in text.splitlines():
        if "//## File" in line:
            chains = ([] if fresh else chains) + [line]
            fresh = False
        elif re.match(r"\s+/\*[0-9a-f]+\*/\s+\S", line):
            fresh = True
            bias = [n for chain in chains for n in re.findall(r'softmax\.inc", line (\d+)', chain)]
            if any(int(n) in skipped for n in bias):
                continue
            if any(int(n) in body for chain in chains for n in place.findall(chain)):
                total += passes if any("codes.inc" in chain for chain in chains) else 1
    return total


def count_isa(text: str, passes: int) -> float:
    """Instructions of a wave in one pass, from ``llvm-objdump -d -l``. It names the innermost line
    only: what both loops inline counts half.
    """
    file, total, skipped = "", 0.0, bias_lines()
    for line in text.splitlines():
        if match := re.match(r";.*?(\w+\.inc):(\d+)", line):
            file = match[1] if match[1] != "softmax.inc" or int(match[2]) not in skipped else ""
        elif re.match(r"\s+[sv]_\w+|\s+(ds|global|flat|buffer|scratch)_\w+", line):
            total += _OWN.get(file, 0.0) * (passes if file == "codes.inc" else 1)
    return total


def disassembled(program: Program, card: Card) -> str | None:
    """The code for a card with source lines; None when a tool is missing."""
    if card.target.startswith("sm_"):
        chain = next(
            (c for c in toolchains() if c.kind == "nvrtc" and card.target in c.targets), None
        )
        tool = _nvdisasm()
        if chain is None or tool is None:
            return None
        code = Nvrtc(chain.library).cubin(program.source("cuda"), card.target, "-lineinfo")[0]
        return _tool([tool, "-gi", "-c"], code)
    chain = next((c for c in toolchains() if c.kind == "hiprtc"), None)
    tool = shutil.which("llvm-objdump-15") or shutil.which("/usr/lib/llvm-15/bin/llvm-objdump")
    if chain is None or tool is None:
        return None
    hiprtc = hip_compiler.Hiprtc(ctypes.CDLL(chain.library), card.target, chain.name)
    hiprtc.options = (*hiprtc.options, "-gline-tables-only")
    return _tool([tool, "-d", "-l"], hiprtc._make(program))


def _nvdisasm() -> str | None:
    places = [Path(place) / "nvidia" for place in sys.path if place]
    found = [str(path) for place in places for path in place.glob("*/bin/nvdisasm")]
    return shutil.which("nvdisasm") or next(iter(found), None)


def _tool(command: list[str], code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(code)
        file.flush()
        done = subprocess.run(
            [*command, file.name],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
        )
    return done.stdout


def main() -> int:
    """Prints a line per card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (("dim", 128), ("rows", 4), ("bits", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    kind = f"kvarn{args.bits}"
    program = _attend(args.dim, args.rows, kind, kind)
    nbytes = sum(HeadLayout(side, args.bits, args.dim).nbytes for side in Side)
    # dot_codes takes 32 reductions: channels of K, tokens of V.
    passes = min(args.dim, 128) // 32
    sys.stdout.write(
        f"attend, head_dim {args.dim}, {args.rows} rows, {args.bits}/{args.bits} bits; records of "
        f"one group and KV head: {nbytes} bytes. Static estimate, nothing was measured.\n"
    )
    for card in CARDS:
        programs = {"attend.inc": program}
        if card.target.startswith("sm_"):
            programs["attend_mma.inc"] = _mma(args.dim, 8, kind, kind)
        for file, one in programs.items():
            text = disassembled(one, card)
            if text is None:
                sys.stdout.write(f"{card.name}: no disassembler or compiler here\n")
                continue
            # Loops over tensor-core steps are unrolled.
            turns = passes if file == "attend.inc" else 1
            sass = card.lanes == 32
            single = count_sass(text, file, turns) if sass else count_isa(text, turns)
            per_record = single * THREADS / card.lanes
            bound = card.slots / per_record * nbytes
            sys.stdout.write(
                f"{card.name}, {file}: {per_record:.0f} instructions of {card.lanes} lanes per "
                f"record; issue allows {bound / 1e12:.2f} TB/s, {bound / card.bandwidth:.0%} of "
                f"{card.bandwidth / 1e12:.2f} TB/s\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

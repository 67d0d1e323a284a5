"""A run against peers as Markdown, and as a picture."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvkernels.bench.contest import OWN
from kvkernels.bench.report import shown
from kvkernels.bench.tournament import Line, floors
from kvkernels.errors import InputError

_PACKAGES = ("numpy", "numba", "torch", "transformers", "optimum-quanto", "hqq")
#: row, label, colour, dashes of the picture; one colour per family
_CURVES = (
    (OWN, "kvkernels 4 bit", "#c1121f", "-"),
    ("kvk-k2v2", "kvkernels 2 bit", "#e07a7f", "-"),
    ("kvk-k8v8", "kvkernels 8 bit", "#7a0c13", "-"),
    ("kvk-k4v4-tail1024", "kvkernels 4 bit, tail 1024", "#c1121f", ":"),
    ("kvk-q8_0", "kvkernels q8_0", "#c026d3", "-"),
    ("kvk-q4_0", "kvkernels q4_0", "#e879f9", "-"),
    ("c-avx512-vnni-i16", "same in C, AVX-512 VNNI", "#f4a261", "--"),
    ("c-avx2-i16", "same in C, AVX2", "#e9c46a", "--"),
    ("torch-bf16-folded", "torch SDPA bf16, folded", "#1d4ed8", "-"),
    ("torch-f32-folded", "torch SDPA f32, folded", "#60a5fa", "-"),
    ("torch-bf16-gqa", "torch SDPA bf16, enable_gqa", "#93c5fd", "-"),
    ("numpy-f32", "NumPy f32", "#6b7280", "-"),
    ("numpy-f16", "NumPy f16", "#a3a3a3", "-"),
    ("hf-dynamic-f32", "transformers DynamicCache f32", "#15803d", "-"),
    ("hf-quanto-4bit", "transformers quanto 4 bit", "#4ade80", "-"),
    ("hf-hqq-4bit", "transformers HQQ 4 bit", "#a3e635", "-"),
    ("ggml-f16", "ggml flash attention f16", "#6d28d9", "-"),
    ("ggml-q8_0", "ggml flash attention q8_0", "#a78bfa", "-"),
    ("ggml-q4_0", "ggml flash attention q4_0", "#ddd6fe", "-"),
    ("read-f16", "plain read of the F16 cache", "#000000", ":"),
    ("read-records", "plain read of our records", "#000000", "-."),
)


def cpu_name() -> str:
    """The processor as it names itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [x.partition(":")[2].strip() for x in text.splitlines() if x.startswith("model name")]
    return f"{names[0]} ({len(names)} CPUs)" if names else platform.machine()


def versions() -> str:
    """What was compared, with versions."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def markdown(lines: list[Line], about: Iterable[str]) -> str:
    """The tables of a run: every case, and the required ratios."""
    out = ["# kvk bench --peers", "", *(f"* {x}" for x in about), ""]
    for case in dict.fromkeys(x["case"] for x in lines):
        rows = [x for x in lines if x["case"] == case]
        load = rows[0]["load"]
        out += [f"## {case.removeprefix('peers/')}", ""]
        out += [
            "| row | median | min | IQR | row / ours | of minima | error | note |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
        ]
        out += [_row(x) for x in rows]
        spin = f"{load['before']['spin']:.2f} / {load['after']['spin']:.2f}"
        loads = f"{load['before']['load1']:.2f} / {load['after']['load1']:.2f}"
        out += ["", f"Load before / after {loads}, spin {spin} (1 is a quiet machine).", ""]
    out += ["## Required", "", "| case | what | found | by best rounds | outcome |"]
    out += ["|---|---|---:|---:|---|"]
    for x in floors(lines):
        note = f" ({x['note']})" if x["note"] else ""
        where = x["case"].removeprefix("floor/")
        found, best = _number(x["value"]), _number(x["by_minima"])
        out.append(f"| {where} | {x['target']} | {found} | {best} | {x['outcome']}{note} |")
    return "\n".join(out) + "\n"


def _row(x: Line) -> str:
    own = x["baseline"] == x["entry"] or x["baseline_min_s"] is None
    least, spread = x["baseline_min_s"], x["baseline_iqr_s"]
    if own and least is None:
        least, spread = x["min_s"], x["iqr_s"]
    error = "-" if x["baseline_error"] is None else f"{x['baseline_error']:.1e}"
    cells = [x["baseline"] or "-", shown(x["value"]), shown(least), shown(spread)]
    cells += [_number(x["ratio"]), _number(x["ratio_of_minima"]), error, x["note"]]
    return "| " + " | ".join(cells) + " |"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


def plot(lines: list[Line], target: Path, about: str) -> None:
    """Time of a decode step against tokens, both axes logarithmic, a panel per thread count."""
    try:
        matplotlib: Any = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = import_module("matplotlib.pyplot")
    except ImportError:
        raise InputError(
            "--plot", found="no matplotlib", needed="matplotlib", hint="pip install matplotlib"
        ) from None
    points: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for x in lines:
        if x["case"].startswith("peers/decode-") and x["baseline_min_s"]:
            n, t = (int(p) for p in x["case"].partition("-n")[2].split("-t"))
            points.setdefault(t, {}).setdefault(x["baseline"], []).append(
                (n, x["baseline_min_s"] * 1e3)
            )
    count = max(1, len(points))
    figure, axes = pyplot.subplots(
        1, count, figsize=(4 + 5.2 * count, 6.4), sharey=True, squeeze=False
    )
    handles: dict[str, Any] = {}
    for axis, (threads, rows) in zip(axes[0], sorted(points.items()), strict=False):
        for name, label, colour, dashes in _CURVES:
            xs = sorted(rows.get(name, []))
            if xs:
                wide = 2.6 if name == OWN else 1.5
                marker = None if name.startswith("read") else "o"
                style = {"color": colour, "linestyle": dashes, "linewidth": wide}
                (handles[label],) = axis.plot(*zip(*xs, strict=True), marker=marker, ms=4, **style)
        ticks = sorted({n for xs in rows.values() for n, _ in xs})
        axis.set(xscale="log", yscale="log", xlabel="tokens in the cache")
        axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
        axis.minorticks_off()
        axis.set_title(f"{threads} thread{'s' if threads > 1 else ''}")
        axis.grid(True, which="major", alpha=0.3)
    state = "warm" if any("decode-warm" in x["case"] for x in lines) else "cold"
    axes[0][0].set_ylabel(f"one decode step, ms (best round, caches {state})")
    steps = [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]
    low, high = axes[0][0].get_ylim()
    shown_steps = [s for s in steps if low <= s <= high]
    axes[0][0].set_yticks(shown_steps, [f"{s:g}" for s in shown_steps])
    figure.suptitle(f"Attention of one token, 8 KV heads x 128, GQA 4\n{about}", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - 3.1 / (4 + 5.2 * count), 0.98))
    figure.legend(handles.values(), handles, loc="center right", fontsize=9, frameon=False)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)

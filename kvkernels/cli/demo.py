"""``kvk demo``: what compression costs and saves, on real keys and values."""

from __future__ import annotations

import time

import click
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvkernels.bench.demo import PAIRS, TEXTS, TILED_ROWS, Capture, Line, capture, run, warm
from kvkernels.bench.report import shown
from kvkernels.cli.output import emit, stderr, stdout, table
from kvkernels.registry import open_device

_COLUMNS = (
    *("K/V", "entry", "records", "vs F16", "bits", "K error", "V error", "output error"),
    *("step", "F16 step", "ratio", f"ratio at {TILED_ROWS}*"),
)


@click.command()
@click.option("--device", default="cpu:0", show_default=True, help="The device to use.")
@click.option("--quick", is_flag=True, help="Leave out the repeated longer context.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines, schema kvk.demo/1.")
def demo(device: str, quick: bool, as_json: bool) -> None:
    """Compress real K/V at every width and attend straight from the records.

    The keys, values and queries inside the package come from a small model reading prose and code;
    every number is against float64 attention over the uncompressed rows.
    """
    start = time.perf_counter()
    opened = open_device(device)
    texts = [capture(name) for name in TEXTS]
    found: dict[str, list[Line]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task("compiling kernels (first run only)", total=1)
        compiled = warm(opened, texts[0])
        progress.update(task, total=1 + len(PAIRS) * len(texts), completed=1)
        for text in texts:
            found[text.name] = []
            tiled = not quick and text is texts[0]

            def tick(what: str) -> None:
                progress.update(task, description=what)

            for line in run(opened, text, tiled=tiled, tick=tick):
                found[text.name].append(line)
                progress.advance(task)
                if as_json:
                    emit(line.to_json())
    if not as_json:
        for text in texts:
            _show(text, found[text.name])
        _explain(quick)
    taken = time.perf_counter() - start
    stderr().print(f"{taken:.1f} s on {opened.caps.id}, {compiled:.1f} s until the first answer")


def _show(text: Capture, lines: list[Line]) -> None:
    console = stdout()
    first = lines[0]
    console.print(
        f"\n[bold]{text.name}[/bold]: layer {text.layer}, {text.rows.q.shape[1]} heads, "
        f"{text.rows.k.shape[1]} KV heads, {text.rows.k.shape[2]} channels, {text.n} tokens; "
        f"published encoder; prefill by {first.prefill_entry} ({first.prefill_route})"
    )
    made = table(*_COLUMNS, left=2)
    for x in lines:
        made.add_row(
            f"{x.k.removeprefix('kvarn')}/{x.v.removeprefix('kvarn')}",
            f"{x.entry} ({x.route})",
            f"{x.record_bytes / 1024:.0f} KiB",
            f"{x.f16_bytes / x.record_bytes:.2f}x",
            f"{x.bits_per_element:.2f}",
            *(f"{e:.2%}" for e in (x.k_error, x.v_error, x.output_error)),
            *(shown(x.step_s), shown(x.f16_step_s), f"{x.speedup:.2f}"),
            "-" if x.tiled_speedup is None else f"{x.tiled_speedup:.2f}",
        )
    console.print(made)


def _explain(quick: bool) -> None:
    lines = [
        "records: bytes of the groups kept as records only; vs F16: how many times smaller",
        "errors: relative RMS; output error against float64 attention on the uncompressed rows",
        "step: one decode step of one layer; ratio: NumPy F16 step / ours, above 1 is quicker",
        "A context this short is not where compression pays: the gain here is a compiled kernel",
        "against NumPy, which widens F16 slowly. Compression shows in bytes and over long rows.",
    ]
    if not quick:
        lines.append(f"* time only, over {TILED_ROWS} rows: the captured rows repeated")
    stdout().print("\n" + "\n".join(map(escape, lines)))

"""``kvk bench``: times against baselines, each checked against the reference first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from rich.markup import escape
from rich.progress import Progress

from kvkernels.bench import libggml, pages, tournament
from kvkernels.bench.contest import Plan
from kvkernels.bench.measure import QUICK, Effort, Load, machine_load
from kvkernels.bench.report import Guards, Result, compare, read_lines, shown
from kvkernels.bench.suites import BENCHES, Bench, select
from kvkernels.bench.tournament import read
from kvkernels.cli import FAILED
from kvkernels.cli.output import emit, stderr, stdout, table
from kvkernels.cpu.pool import available_threads
from kvkernels.errors import InputError
from kvkernels.registry import open_device
from kvkernels.settings import settings

_GUARDS = Path("bench/guards.toml")
_RETRIES = 2
_BUSY = 1.3
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("--device", default="cpu:0", show_default=True, help="The device to time.")
@click.option("--filter", "pattern", metavar="GLOB", help="Only benches of this id.")
@click.option("--list", "list_only", is_flag=True, help="Print the ids and stop.")
@click.option("--quick", is_flag=True, help="The short list with few rounds.")
@click.option("--cold", is_flag=True, help="Empty the processor's caches before every call.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines, schema kvk.bench/1.")
@click.option("--compare", "pair", nargs=2, type=_FILE, metavar="A B", help="Two --json runs.")
@click.option("--guard", is_flag=True, help="Exit 1 when a ratio falls below its guard.")
@click.option(
    "--guards",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_GUARDS,
    show_default=True,
    help="The file of least ratios.",
)
@click.option("--peers", is_flag=True, help="Everything installed here, in one interleaved run.")
@click.option("--threads", default="", metavar="N,N", help="With --peers: thread counts.")
@click.option("--n-kv", default="", metavar="N,N", help="With --peers: tokens in the cache.")
@click.option("--warm", is_flag=True, help="With --peers: leave the processor's caches alone.")
@click.option("--ggml", metavar="PATH", help="With --peers: the folder of a libggml you built.")
@click.option("--markdown", type=_OUT, metavar="FILE", help="With --peers: tables as Markdown.")
@click.option("--plot", type=_OUT, metavar="FILE", help="With --peers: a picture (matplotlib).")
@click.option("--from", "earlier", type=_FILE, help="With --peers: an earlier --json run.")
def bench(
    device: str,
    pattern: str | None,
    list_only: bool,
    quick: bool,
    cold: bool,
    as_json: bool,
    pair: tuple[Path, Path] | None,
    guard: bool,
    guards: Path,
    peers: bool,
    threads: str,
    n_kv: str,
    warm: bool,
    ggml: str | None,
    markdown: Path | None,
    plot: Path | None,
    earlier: Path | None,
) -> None:
    """Time the kernels against baselines on this machine.

    Every bench compares its result with a float64 or NumPy reference before it is timed. Exit
    status 1 when a result is wrong, a guard is broken, or nothing ran.
    """
    context = click.get_current_context()
    if pair:
        _compare(*pair, as_json)
        return
    if peers:
        place = "" if earlier else _ggml_folder(ggml or settings().ggml)
        sizes = _numbers(n_kv) or ((4096,) if quick else (4096, 32768))
        plans = [
            Plan(t, sizes, quick, not warm, ggml=place)
            for t in _numbers(threads) or sorted({1, available_threads()})
        ]
        lines = read(earlier.read_text(encoding="utf-8")) if earlier else _peers(plans)
        _show_peers(lines, as_json, markdown, plot)
        return
    chosen = select(pattern, quick=quick)
    if list_only:
        for item in chosen:
            click.echo(item.id)
        return
    if not chosen:
        ids = ", ".join(b.id for b in BENCHES)
        stderr().print(f"nothing matches {escape(repr(pattern))}; there is: {ids}")
        context.exit(FAILED)
    limits = Guards.read(guards) if guard else Guards()
    base = QUICK if quick else Effort()
    effort = Effort(base.rounds, base.least_s, base.warmup, cold)
    # With a guard a line may still be measured again, so it is printed at the end.
    at_once = as_json and not guard
    timed = _run(chosen, device, effort, at_once=at_once)
    broken = limits.broken(x.result for x in timed)
    for _ in range(_RETRIES):
        if not broken:
            break
        names = {name.partition(" vs ")[0] for name, _, _ in broken}
        again = list({x.bench.id: x.bench for x in timed if x.result.case in names}.values())
        stderr().print(f"guards broken: {len(broken)}; timing those again")
        timed = [x for x in timed if x.bench not in again] + _run(again, device, effort)
        broken = limits.broken(x.result for x in timed)
    results = [x.result for x in timed]
    if as_json:
        for x in [] if at_once else timed:
            x.emit()
    else:
        _show(results, timed[0].before, timed[-1].after)
    for name, least, found in broken:
        stderr().print(f"guard broken: {escape(name)}: ratio {found:.3f}, least {least:.3f}")
    unmatched = limits.unmatched(results) if pattern is None and not quick else []
    for name in unmatched:
        stderr().print(f"guard without a measurement: {escape(name)}")
    if broken or unmatched or any(r.outcome == "wrong" for r in results):
        context.exit(FAILED)


@dataclass(frozen=True, slots=True)
class Line:
    """A result, the bench it came from, and the load of the machine around it."""

    bench: Bench
    result: Result
    before: Load
    after: Load

    def emit(self) -> None:
        """Print it as one JSON line."""
        emit(self.result.to_json(self.before, self.after))


def _run(
    chosen: list[Bench], device_id: str, effort: Effort, *, at_once: bool = False
) -> list[Line]:
    if device_id.partition(":")[0] != "cpu":
        raise InputError(
            "--device", found=device_id, needed="cpu:0: its baselines are NumPy's",
            hint="tools/gpu_check.py of the repository measures a card",
        )  # fmt: skip
    device = open_device(device_id)
    lines: list[Line] = []
    with Progress(console=stderr(), transient=True) as progress:
        task = progress.add_task("bench", total=len(chosen))
        for item in chosen:
            progress.update(task, description=item.id)
            before = machine_load()
            results = list(item.run(device, effort))
            after = machine_load()
            fresh = [Line(item, r, before, after) for r in results]
            lines += fresh
            for line in fresh if at_once else []:
                line.emit()
            progress.advance(task)
    if not lines:
        raise InputError("bench", found="no result", needed="at least one")
    return lines


def _numbers(text: str) -> tuple[int, ...]:
    parts = [x.strip() for x in text.split(",") if x.strip()]
    if not all(x.isdecimal() and int(x) > 0 for x in parts):
        raise InputError("bench --peers", found=repr(text), needed="whole numbers, as in 1,2")
    return tuple(int(x) for x in parts)


def _ggml_folder(text: str | None) -> str:
    """Where a libggml is, told before anything is measured when there is none."""
    if not text:
        return ""
    path = Path(text).expanduser().resolve()
    libggml.files(path)
    return str(path)


def _peers(plans: list[Plan]) -> list[tournament.Line]:
    lines = []
    for plan in plans:
        if any(n < 1024 or n % 128 for n in plan.n_kv):
            raise InputError("--n-kv", found=plan.n_kv, needed="multiples of 128, at least 1024")
        stderr().print(f"{plan.threads} thread(s): {', '.join(map(str, plan.n_kv))} tokens")
        lines += tournament.measured(plan)
    return lines


def _show_peers(
    lines: list[tournament.Line], as_json: bool, markdown: Path | None, plot: Path | None
) -> None:
    about = [pages.cpu_name(), pages.versions()]
    text = pages.markdown(lines, about)
    for target, kind in ((markdown, "markdown"), (plot, "plot")):
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            if kind == "plot":
                pages.plot(lines, target, about[0])
            else:
                target.write_text(text, encoding="utf-8")
    if as_json:
        for line in [*lines, *tournament.floors(lines)]:
            emit(line)
    else:
        click.echo(text)
    if tournament.wrong(lines):
        click.get_current_context().exit(FAILED)


def _show(results: list[Result], first: Load, last: Load) -> None:
    console = stdout()
    made = table(
        *("case", "entry", "baseline", "median", "iqr", "baseline's", "ratio", "of minima"),
        *("error", "outcome"),
        left=3,
    )
    for r in results:
        other = shown(r.value) if r.unit == "s (baseline)" else "-"
        if r.unit == "bytes":
            other = f"{r.value:,.0f} B"
        ratio = "-" if r.ratio is None else f"{r.ratio:.2f}"
        best = "-" if r.ratio_of_minima is None else f"{r.ratio_of_minima:.2f}"
        error = "-" if r.error is None else f"{r.error:.1e}"
        made.add_row(
            *(r.case, r.entry or "-", r.baseline or "-", shown(r.median_s), shown(r.iqr_s)),
            *(other, ratio, best, error, r.outcome),
        )
    console.print(made)
    targets = table("case", "target", "note")
    for case, text in {r.case: r.target for r in results if r.target}.items():
        notes = dict.fromkeys(r.note for r in results if r.case == case and r.note)
        targets.add_row(case, escape(text), escape("; ".join(notes)))
    console.print()
    console.print(targets)
    console.print(
        f"\nratio: baseline / own, above 1 is quicker (bytes: smaller; transient: growth)."
        f"\nload before {first.load1:.2f} after {last.load1:.2f}; "
        f"spin {first.spin:.2f} / {last.spin:.2f} (1 is a quiet machine)"
    )
    if max(first.spin, last.spin) > _BUSY:
        stderr().print("the machine is busy: trust ratios more than times, and measure again")


def _compare(a: Path, b: Path, as_json: bool) -> None:
    lines = compare(read_lines(a), read_lines(b))
    if as_json:
        for line in lines:
            emit(line)
    else:
        made = table("case", "before", "after", "after/before", "verdict", left=1)
        for line in lines:
            times = shown(line["before_s"]), shown(line["after_s"])
            made.add_row(line["case"], *times, f"{line['ratio']:.3f}", line["verdict"])
        stdout().print(made)
    if not lines:
        stderr().print("the two runs have no timed case in common")
        click.get_current_context().exit(FAILED)

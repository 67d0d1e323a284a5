"""``kvk parity``: every case by every entry that serves it, against the float64 model."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable

import click
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from kvkernels.capabilities import DeviceCaps
from kvkernels.cli.output import emit, stderr, stdout, table
from kvkernels.errors import did_you_mean
from kvkernels.qualification import note
from kvkernels.registry import open_device
from kvkernels.testing.cases import cases, select
from kvkernels.testing.parity import REFUSED, Result, run_all


@click.command()
@click.option("--device", "device_id", default="cpu:0", show_default=True, help="Device to check.")
@click.option("--filter", "pattern", default="*", show_default=True, help="Glob of case ids.")
@click.option("--quick", is_flag=True, help="Only the quick subset, under a minute.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line (kvk.parity/1).")
def parity(device_id: str, pattern: str, quick: bool, as_json: bool) -> None:
    """Compare every entry with the float64 reference.

    Each case is run by the entry that is decided for it and by every other entry that can serve
    it, twice; results that differ from the reference or from their repetition fail, and so do
    unexpected refusals. A run without --filter qualifies the entries that passed for this device,
    driver and library. Exit status: 0 all passed, 1 a failure or nothing ran.
    """
    chosen = select(pattern, quick=quick)
    if not chosen:
        near = did_you_mean(pattern, (case.id for case in cases()))
        click.echo(f"nothing ran: no case matches {pattern!r}. {near}".rstrip(), err=True)
        sys.exit(1)
    device = open_device(device_id)
    results: list[Result] = []
    columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.id)
            for result in run_all(device, case):
                results.append(result)
                if as_json:
                    emit(result.to_json())
                if not result.passed:
                    progress.console.print(_failure(result), style="red", markup=False)
            progress.advance(task)
    failed = sum(not result.passed for result in results)
    if not as_json:
        _report(results)
    click.echo(
        f"{device_id}: {len(chosen)} cases, {len(results)} runs, {failed} failed", err=as_json
    )
    if pattern == "*":
        _note(device.caps, results, as_json)
    sys.exit(1 if failed else 0)


def _note(caps: DeviceCaps, results: Iterable[Result], as_json: bool) -> None:
    """Entries that took part in this run become qualified here, or lose it."""
    took_part = {entry for result in results for entry in result.served}
    failed = {e for r in results if not r.passed for e in (r.served or (str(r.entry),))}
    path = note(caps, took_part - failed, failed)
    where = f"noted in {path}" if path else "not noted: there is no KVK_CACHE_DIR to write to"
    names = ", ".join(sorted(took_part - failed)) or "none"
    click.echo(f"qualified on this machine: {names} ({where})", err=as_json)


def _failure(result: Result) -> str:
    what = f"{result.entry} ({result.activations})" if result.entry else result.route
    text = f"{result.outcome}: {result.case} by {what}: {'; '.join(result.reasons)}"
    if result.error is not None:
        text += f" (rms {result.error.rms:.2e}, worst {result.error.worst:.2e})"
    return text


def _report(results: Iterable[Result]) -> None:
    """One line per entry and kind of activations: runs, largest errors and where they were."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.outcome == REFUSED:
            groups["(refused)", ""].append(result)
        else:
            groups[result.entry or "(none)", result.activations].append(result)
    shown = table(
        "entry", "route", "activations", "runs", "passed", "largest rms", "largest error", "case",
        right="runs passed",
    )  # fmt: skip
    for (entry, activations), runs in sorted(groups.items()):
        passed = sum(run.passed for run in runs)
        routes = ", ".join(sorted({run.route for run in runs}))
        errors = [(run.error.rms, run.error.worst, run.case) for run in runs if run.error]
        rms, _, case = max(errors, default=(0.0, 0.0, ""))
        worst = max((found[1] for found in errors), default=0.0)
        numbers = (f"{rms:.1e}", f"{worst:.1e}") if errors else ("", "")
        shown.add_row(entry, routes, activations, str(len(runs)), str(passed), *numbers, case)
    stdout().print(shown)

"""``kvk probe``: what this machine has, what can run on it, and why the rest cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from kvkernels import __version__
from kvkernels.capabilities import DeviceCaps
from kvkernels.cli import FAILED
from kvkernels.cli.child import probe_backend
from kvkernels.cli.entries import matrix, matrix_line
from kvkernels.cli.output import emit, stderr, stdout, table
from kvkernels.errors import BackendUnavailable, InputError, did_you_mean
from kvkernels.registry import BackendStatus, names
from kvkernels.settings import settings

SCHEMA = "kvk.probe/1"
_WORD = {True: "yes", False: "no", None: "unknown"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help=f"One JSON object, schema {SCHEMA}.")
@click.option("--matrix", "as_matrix", is_flag=True, help="CSV: one line per device and entry.")
@click.option("--device", help="Only this device, for example cpu:0.")
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="ENTRY@DEVICE",
    help="Exit 1, with the reasons, when the entry is not available. Can be repeated.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the device as a file that `kvk explain --device-file` takes.",
)
def probe(
    as_json: bool,
    as_matrix: bool,
    device: str | None,
    required: tuple[str, ...],
    record: Path | None,
) -> None:
    """Say what this machine has, what can run on it, and why the rest cannot.

    Every backend is probed in a process of its own, with a time limit (KVK_PROBE_TIMEOUT).
    """
    if as_json and as_matrix:
        raise click.UsageError("--json and --matrix exclude each other")
    wanted = [_split(text) for text in required]
    found = probe_all(device)
    if as_json:
        emit({"schema": SCHEMA, "version": __version__, "backends": found})
    elif as_matrix:
        click.echo(matrix(_matrix_lines(found)), nl=False)
    else:
        _show(found)
    if record is not None:
        _record(found, record)
    failed = [line for entry, on in wanted for line in _missing(found, entry, on)]
    for line in failed:
        stderr().print(escape(line))
    if failed or not any(status["state"] == "ok" for status in found):
        click.get_current_context().exit(FAILED)


def probe_all(device: str | None = None) -> list[dict[str, Any]]:
    """Status of every backend as JSON-ready dicts, each probed in a child; with ``device``, that
    device only. Raises BackendUnavailable when there is no such device.
    """
    limit = settings().probe_timeout
    known = names()
    if device is not None:
        name = device.partition(":")[0]
        if name not in known:
            text = f"no backend of this name; registered: {', '.join(known)}"
            near = did_you_mean(name, known)
            raise BackendUnavailable(BackendStatus(name, "unavailable", text, near))
        known = (name,)
    found = [status for name in known for status in probe_backend(name, limit)]
    if device is not None:
        for status in found:
            all_ids = [d["id"] for d in status["devices"]]
            status["devices"] = [d for d in status["devices"] if d["id"] == device]
            if status["state"] == "ok" and not status["devices"]:
                text = f"no device {device!r}; found: {', '.join(all_ids)}"
                raise BackendUnavailable(BackendStatus(status["name"], "unavailable", text))
    return found


def device_caps(data: dict[str, Any]) -> DeviceCaps:
    """The DeviceCaps in one device of a probe report."""
    return DeviceCaps.from_json({k: v for k, v in data.items() if k not in ("entries", "used")})


def _split(text: str) -> tuple[str, str]:
    entry, _, on = text.partition("@")
    if not entry or not on:
        raise InputError(
            "--require", found=repr(text), needed="ENTRY@DEVICE, as cpu/attend_decode@cpu:0"
        )
    return entry, on


def _devices(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [device for status in found for device in status["devices"]]


def _matrix_lines(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [
        matrix_line(device["id"], device["name"], entry)
        for device in _devices(found)
        for entry in device["entries"]
    ]


def _missing(found: list[dict[str, Any]], entry: str, on: str) -> list[str]:
    """Why ``entry`` is not available on ``on``; empty when it is."""
    device = next((d for d in _devices(found) if d["id"] == on), None)
    if device is None:
        lines = [f"{entry}@{on}: no such device"]
        lines += [
            f"  {s['name']}: {s['state']}: {s['detail']}"
            for s in found
            if s["name"] == on.partition(":")[0]
        ]
        return lines
    line = next((e for e in device["entries"] if e["entry"] == entry), None)
    if line is None:
        near = did_you_mean(entry, [e["entry"] for e in device["entries"]])
        return [f"{entry}@{on}: no such entry; {near}".removesuffix("; ")]
    if line["available"]:
        return []
    reasons = [f"  [{r['id']}] needs {r['needs']}; found {r['found']}" for r in line["reasons"]]
    return [f"{entry}@{on}: not available", *reasons]


def _record(found: list[dict[str, Any]], path: Path) -> None:
    devices = _devices(found)
    if len(devices) != 1:
        ids = ", ".join(d["id"] for d in devices) or "none"
        raise InputError("--record", found=f"devices {ids}", needed="one; name it with --device")
    data = device_caps(devices[0]).to_json() | {"source": "recorded"}
    try:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError("--record", found=str(error), needed="a file to write") from None
    stderr().print(f"recorded {devices[0]['id']} in {escape(str(path))}")


def _show(found: list[dict[str, Any]]) -> None:
    console = stdout()
    backends = table("backend", "state", "devices", "detail")
    for status in found:
        ids = ", ".join(d["id"] for d in status["devices"]) or "-"
        detail = ". ".join(text for text in (status["detail"], status["hint"]) if text)
        backends.add_row(status["name"], status["state"], ids, escape(detail))
    console.print(backends)
    for device in _devices(found):
        _show_device(device)


def _show_device(device: dict[str, Any]) -> None:
    console = stdout()
    console.print(f"\n[bold]{device['id']}[/bold]  {escape(device['name'])}")
    facts = {"driver": device["driver"]} | device["facts"]
    console.print("  " + escape("  ".join(f"{k}={v}" for k, v in facts.items() if v != "")))
    features = table("  feature", "advertised", "enabled", "used", "note")
    for name, item in device["features"].items():
        used = "yes" if name in device["used"] else "no"
        words = _WORD[item["advertised"]], _WORD[item["enabled"]]
        features.add_row(f"  {name}", *words, used, escape(item["note"]))
    if device["features"]:
        console.print(features)
    entries = table("  entry", "route", "available", "qualified", "numerics, or why not")
    for entry in device["entries"]:
        why = "; ".join(
            f"[{r['id']}] needs {r['needs']}; found {r['found']}" for r in entry["reasons"]
        )
        word = "yes" if entry["available"] else "no"
        row = (f"  {entry['entry']}", entry["route"], word, entry["qualified"])
        entries.add_row(*row, escape(why or entry["numerics"]))
    console.print(entries)

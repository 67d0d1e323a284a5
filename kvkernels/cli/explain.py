"""``kvk explain``: which entry serves an operation on a device, and why no other does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.cli import REFUSED
from kvkernels.cli.output import emit
from kvkernels.cli.probe import device_caps, probe_all
from kvkernels.dispatch import Policy, decide
from kvkernels.errors import BackendUnavailable, InputError
from kvkernels.op import TAIL_DTYPES, AttentionOp, LayerSpec, OpKind
from kvkernels.operations import attend_op
from kvkernels.registry import BackendStatus, backends, names
from kvkernels.request import ResolvedTail, TailRequest
from kvkernels.storages import resolve_tails, storage_of
from kvkernels.values import check_keys

_COUNTS = ("n_q", "n_kv")
_DEFAULTS = {"n_head": 32, "n_kv_head": 8, "head_dim": 128, "n_q": 1, "n_kv": 4096}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--case", "case_id", metavar="ID", help="An operation of the shared case list.")
@click.option("--layer", type=_FILE, help="JSON: LayerSpec fields, n_q and n_kv.")
@click.option("--head-dim", type=int, help="Channels per head (128).")
@click.option("--k", help="K type (kvarn4).")
@click.option("--v", help="V type (kvarn4).")
@click.option("--n-head", type=int, help="Query heads (32).")
@click.option("--n-kv-head", type=int, help="KV heads (8).")
@click.option("--n-q", type=int, help="New rows (1).")
@click.option("--n-kv", type=int, help="Visible rows, new ones included (4096).")
@click.option("--window", type=int, help="Attention window in tokens (none).")
@click.option("--tail", help="Newest rows kept exact: N, auto, ... (KVarN's own 128 or none).")
@click.option("--tail-dtype", type=click.Choice(TAIL_DTYPES), help="What they are (automatic).")
@click.option("--kind", type=click.Choice([k.value for k in OpKind]), default="attend")
@click.option("--device", help="A device of this machine (cpu:0).")
@click.option("--device-file", type=_FILE, help="A recorded device; no hardware is touched.")
@click.option("--entry", help="Accept only this entry.")
@click.option("--allow-unqualified", is_flag=True, help="Accept entries without a parity record.")
@click.option("--no-materialize", is_flag=True, help="Accept native entries only.")
@click.option("--json", "as_json", is_flag=True, help="The decision, schema kvk.decision/1.")
def explain(
    case_id: str | None,
    layer: Path | None,
    kind: str,
    device: str | None,
    device_file: Path | None,
    entry: str | None,
    allow_unqualified: bool,
    no_materialize: bool,
    as_json: bool,
    tail: str | None,
    tail_dtype: str | None,
    **direct: Any,
) -> None:
    """Say which entry serves an operation, with every row that was considered.

    Exit status 3 when it is refused.
    """
    given = {key: value for key, value in direct.items() if value is not None}
    if sum((case_id is not None, layer is not None, bool(given))) > 1:
        raise click.UsageError("give one of --case, --layer, or the layer's options")
    if device is not None and device_file is not None:
        raise click.UsageError("--device and --device-file exclude each other")
    table, caps = _from_file(device_file) if device_file else _from_probe(device or "cpu:0")
    resolved = None
    if case_id is not None:
        op = _case_op(case_id, caps.id)
    else:
        request = TailRequest.parse(tail or "", tail_dtype) if tail or tail_dtype else None
        given = _read_layer(layer) if layer else given
        op, resolved = _layer_op(given, table, caps, OpKind(kind), request)
    policy = Policy(
        allow_materialize=not no_materialize, allow_unqualified=allow_unqualified, entry=entry
    )
    decision = decide(op, table, caps, policy)
    if as_json:
        emit(decision.to_json() | ({"tail": resolved.to_json()} if resolved else {}))
    else:
        click.echo(decision.explain())
        if resolved:
            click.echo(resolved.explain())
    if not decision.ok:
        click.get_current_context().exit(REFUSED)


def _from_probe(device: str) -> tuple[tuple[Capability, ...], DeviceCaps]:
    for status in probe_all(device):
        if status["state"] == "ok":
            caps = device_caps(status["devices"][0])
            return backends(caps.backend)[caps.backend].table, caps
        broken = BackendStatus(status["name"], status["state"], status["detail"], status["hint"])
    raise BackendUnavailable(broken)


def _from_file(path: Path) -> tuple[tuple[Capability, ...], DeviceCaps]:
    caps = DeviceCaps.from_json(_text(path))
    loaded = backends(caps.backend)
    if caps.backend not in loaded:
        text = f"{path} describes {caps.id} ({caps.name}), but no backend of this name is installed"
        hint = f"registered: {', '.join(names())}"
        raise BackendUnavailable(BackendStatus(caps.backend, "unavailable", text, hint))
    return loaded[caps.backend].table, caps


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), found=str(error), needed="a readable text file") from None


def _read_layer(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_text(path))
    except ValueError as error:
        raise InputError(
            str(path), found=f"text that is not JSON ({error})", needed="JSON"
        ) from None
    if not isinstance(data, dict):
        raise InputError(str(path), found=type(data).__name__, needed="a JSON object")
    known = {f.name for f in fields(LayerSpec)} | set(_COUNTS)
    check_keys(data, str(path), {"n_head", "n_kv_head", "head_dim"}, known)
    return data


def _layer_op(
    given: dict[str, Any],
    table: Sequence[Capability],
    caps: DeviceCaps,
    kind: OpKind,
    request: TailRequest | None,
) -> tuple[AttentionOp, ResolvedTail]:
    values = _DEFAULTS | given
    counts = {name: values.pop(name) for name in _COUNTS}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(name, found=repr(count), needed="a whole number >= 1")
    if counts["n_kv"] < counts["n_q"]:
        raise InputError("n_kv", found=counts["n_kv"], needed=f"at least n_q = {counts['n_q']}")
    spec = LayerSpec(**values)
    (tail,) = resolve_tails([spec], table, caps, counts["n_kv"], 1, request)
    storage = storage_of(spec, tail)
    return attend_op(spec, caps.id, counts["n_q"], counts["n_kv"], storage, kind=kind), tail


def _case_op(case_id: str, device: str) -> AttentionOp:
    from kvkernels.testing.cases import by_id

    return by_id(case_id).op(device)

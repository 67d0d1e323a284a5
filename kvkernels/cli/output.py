"""Where output goes: data to stdout, talk to stderr."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table


def stdout() -> Console:
    """A console for data. Made anew, so that a test that replaces the stream is respected."""
    # Off a terminal rich assumes 80 columns and would cut names that scripts look for.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def stderr() -> Console:
    """A console for progress and remarks."""
    return Console(stderr=True, highlight=False)


def emit(data: Any) -> None:
    """One JSON value on one line of stdout."""
    click.echo(json.dumps(data, sort_keys=False, allow_nan=False))


def table(*columns: str, left: int = 99, right: str = "") -> Table:
    """A plain table. Set to the right are all columns after the first ``left``, and those named in
    ``right`` (space separated).
    """
    numbers = {*columns[left:], *right.split()}
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made

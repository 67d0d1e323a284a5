"""The command ``kvk``. Data goes to stdout, talk to stderr.

Exit status: 0 fine, 1 a check failed or nothing ran, 2 usage, 3 refused. Subcommands are imported
when they are used, so that ``kvk --help`` loads neither NumPy nor Numba.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from kvkernels import __version__
from kvkernels.errors import (
    BackendUnavailable,
    InputError,
    KvkError,
    RouteMismatch,
    UnsupportedOp,
    did_you_mean,
)

FAILED, USAGE, REFUSED = 1, 2, 3
_REFUSALS = (UnsupportedOp, RouteMismatch, BackendUnavailable)
# name -> (module, one line of help); each module has a command of the same name.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bench": ("kvkernels.cli.bench", "Time the kernels against baselines on this machine."),
        "demo": ("kvkernels.cli.demo", "Compress real K/V at every width and attend from it."),
        "explain": ("kvkernels.cli.explain", "Say which entry serves an operation, and why."),
        "parity": ("kvkernels.cli.parity", "Compare every entry with the float64 reference."),
        "probe": ("kvkernels.cli.probe", "Say what this machine has and what can run on it."),
    }
)


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is used, and ends a KvkError with a status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every subcommand by name."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand; None when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As usual, with the nearest name in the message for an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = did_you_mean(args[0], COMMANDS)
            ctx.fail(f"no command {args[0]!r}; {near or 'see kvk --help'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of ``--help``, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; no KvkError leaves as a traceback."""
        try:
            return super().invoke(ctx)
        except KvkError as error:
            click.echo(f"{type(error).__name__}: {error}", err=True)
            ctx.exit(exit_status(error))


def exit_status(error: KvkError) -> int:
    """What a KvkError ends the program with."""
    if isinstance(error, _REFUSALS):
        return REFUSED
    return USAGE if isinstance(error, InputError) else FAILED


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvk", message="%(prog)s %(version)s")
def main() -> None:
    """Attention straight from compressed KV-cache records.

    Exit status: 0 fine, 1 a check failed or nothing ran, 2 usage, 3 refused.
    """

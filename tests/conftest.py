"""Shared hooks: how many tests of each group ran, and which groups must have run in CI.

A group is a folder of ``tests``, or those of ``cpu`` with ``yardstick`` in their name, which need a
C compiler. Skips and deselections do not count, so coverage cannot vanish while everything stays
green.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
YARDSTICK = "yardstick"
REQUIRED_IN_CI = ("pure", "cpu", "cli", "simt", "cuda", "hip", "opencl", "packaging", YARDSTICK)
X86 = ("x86_64", "AMD64")  # the yardstick has no other intrinsics
_ran: Counter[str] = Counter()


def group_of(nodeid: str) -> str:
    """The folder of ``tests`` that a test lies in."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else "other"


def groups_of(nodeid: str) -> list[str]:
    """Every group that a test counts for."""
    folder = group_of(nodeid)
    named = folder == "cpu" and YARDSTICK in nodeid.partition("::")[2]
    return [folder, YARDSTICK] if named else [folder]


def missing_groups(ran: Counter[str], args: list[str], markers: str) -> list[str]:
    """Groups that should have run and did not; only for a whole main run in CI."""
    whole = all(Path(a).resolve() in (ROOT, ROOT.parent) for a in args)
    if os.environ.get("CI") != "true" or not whole or markers not in ("", "not slow"):
        return []
    there = [x for x in REQUIRED_IN_CI if x != YARDSTICK or platform.machine() in X86]
    return [name for name in there if not ran[name]]


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and not report.skipped:
        _ran.update(groups_of(report.nodeid))


def _missing(config: pytest.Config) -> list[str]:
    if config.option.collectonly or config.option.keyword:
        return []
    return missing_groups(_ran, config.args, config.option.markexpr or "")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and _missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    groups = ", ".join(f"{name} {n}" for name, n in sorted(_ran.items())) or "none"
    terminalreporter.write_line(f"tests that ran, by group: {groups}")
    for name in _missing(config):
        terminalreporter.write_line(
            f"ERROR: the group {name!r} must run in CI and did not", red=True
        )

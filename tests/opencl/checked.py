"""Run under oclgrind: parity cases, or one with a planted race. ``python checked.py FAULT CASE...``
with FAULT ``none`` or ``<source>:<line>`` of a barrier to leave out.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "simt"))

from mutants import source, without_line

from kvkernels.opencl.device import OpenclDriver
from kvkernels.registry import open_device
from kvkernels.testing import parity
from kvkernels.testing.cases import by_id


def uploaded(driver: OpenclDriver, nbytes: int) -> Any:
    """Zeros that oclgrind knows of: it does not see that a fill initialises."""
    return driver.upload(np.zeros(nbytes, np.uint8))


def main(fault: str, *case_ids: str) -> None:
    OpenclDriver.zeros = uploaded  # type: ignore[method-assign]
    device = open_device("opencl:0")
    with ExitStack() as stack:
        if fault != "none":
            name, _, line = fault.partition(":")
            stack.enter_context(source(name, without_line(name, int(line))))
        for case_id in case_ids:
            result = parity.run_case(device, by_id(case_id))
            assert result.passed or fault != "none", result
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

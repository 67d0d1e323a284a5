"""Which rows cannot be stored: the emulator answers as the CPU does."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from simt_tools import KINDS, rows

from kvkernels.errors import InputError
from kvkernels.registry import open_device
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.unfit import first_unfit
from kvkernels.storage import Stored
from kvkernels.testing.poison import Guards

CPU = open_device("cpu:0")
FORMS = (Stored.NO, Stored.PLAIN, Stored.ROTATED, Stored.PLAIN | Stored.ROTATED)


def both(driver: EmulatorDriver, arrays: list[Any], stored: Any) -> Any:
    found = first_unfit(driver, arrays, stored)
    wide = [np.asarray(a).astype(np.float32) for a in arrays]
    assert found == CPU.first_unfit(wide, stored)
    return found


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_one_value_somewhere(driver: EmulatorDriver, dim: int, kind: str) -> None:
    rng, guards = np.random.default_rng(dim), Guards()
    arrays = [rows(guards, (70, h, dim), kind, seed=h) for h in (3, 3, 2)]
    assert both(driver, arrays, [Stored.PLAIN | Stored.ROTATED] * 3) is None
    values = (np.nan, np.inf, -np.inf, 65504.0, 65519.0, 65520.0, -65536.0, 6.6e6, 3e4)
    for value, forms in product(values, (FORMS[1:], FORMS[:3])):
        copies = [a.copy() for a in arrays]
        for _ in range(2):
            at = rng.integers(3), rng.integers(70), rng.integers(2), rng.integers(dim)
            with np.errstate(over="ignore"):
                copies[at[0]][at[1:]] = value
        both(driver, copies, forms)
    assert not guards.broken()


def test_rows_that_overflow_only_when_rotated(driver: EmulatorDriver) -> None:
    """The largest channel of such a row is named, the first of equal ones."""
    x = np.zeros((40, 2, 128), np.float32)
    x[7, 1] = 6e3
    x[9, 0, 5] = 6e4
    assert both(driver, [x, x], [Stored.PLAIN, Stored.ROTATED]) == (1, (7, 1, 0))
    x[7, 1, 4] = -6.5e3
    assert both(driver, [x], [Stored.ROTATED]) == (0, (7, 1, 4))
    x[30, 0, 3] = np.nan  # comes first, wherever it is
    assert both(driver, [x], [Stored.ROTATED]) == (0, (30, 0, 3))


def test_any_channel_count_when_nothing_is_rotated(driver: EmulatorDriver) -> None:
    x = np.ones((3, 5, 80), np.float32)
    x[2, 3, 79] = 7e4
    assert both(driver, [x, x[:, :1].copy()], [Stored.NO, Stored.PLAIN]) is None
    assert both(driver, [x[:, :1].copy(), x], [Stored.NO, Stored.PLAIN]) == (1, (2, 3, 79))


def test_one_launch_when_all_is_well(driver: EmulatorDriver) -> None:
    x = np.ones((3, 5, 64), np.float32)
    assert first_unfit(driver, [x, x, x], [Stored.ROTATED] * 3) is None
    assert driver.launches == 1


def test_other_dtypes_are_refused(driver: EmulatorDriver) -> None:
    with pytest.raises(InputError, match="float64"):
        first_unfit(driver, [np.ones((1, 1, 64))], [Stored.NO])

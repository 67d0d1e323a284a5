"""The one list of parity cases: what is asked of every device, by id.

``fnmatch`` globs select them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType

from kvkernels.errors import InputError, did_you_mean
from kvkernels.testing.case import ANY as ANY
from kvkernels.testing.case import NATIVE as NATIVE
from kvkernels.testing.case import REFUSE as REFUSE
from kvkernels.testing.case import Case as Case
from kvkernels.testing.case_families import FAMILIES
from kvkernels.testing.case_tails import FAMILIES as TAIL_FAMILIES


@cache
def cases() -> tuple[Case, ...]:
    """Every case, in a fixed order."""
    found = tuple(case for family in (*FAMILIES, *TAIL_FAMILIES) for case in family())
    assert len({case.id for case in found}) == len(found), "case ids must be unique"
    return found


def select(pattern: str = "*", *, quick: bool = False) -> tuple[Case, ...]:
    """Cases whose id matches the glob, of the quick subset when asked."""
    return tuple(
        case for case in cases() if (case.quick or not quick) and fnmatchcase(case.id, pattern)
    )


@cache
def _by_id() -> Mapping[str, Case]:
    return MappingProxyType({case.id: case for case in cases()})


def by_id(case_id: str) -> Case:
    """The case of that id. Raises InputError with the nearest id."""
    found = _by_id().get(case_id)
    if found is None:
        hint = did_you_mean(case_id, _by_id())
        raise InputError("case", found=repr(case_id), needed="the id of a case", hint=hint)
    return found

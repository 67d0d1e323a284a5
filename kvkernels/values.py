"""Checks of plain values that callers pass: numbers, names, JSON objects."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvkernels.errors import InputError, RequestError, did_you_mean


def whole(field: str, value: object, least: int = 1) -> int:
    """``value`` as a Python int of at least ``least``; NumPy integers are accepted, bool is not.

    Raises InputError naming ``field``.
    """
    needed = f"a whole number >= {least}"
    if isinstance(value, bool):
        raise InputError(field, found=value, needed=needed)
    try:
        number = operator.index(cast(Any, value))
    except TypeError:
        raise InputError(field, found=repr(value), needed=needed) from None
    if number < least:
        raise InputError(field, found=number, needed=needed)
    return number


def finite(field: str, value: object, least: float = -math.inf) -> float:
    """``value`` as a finite float of at least ``least``. Raises InputError naming ``field``."""
    needed = "a finite number" if least == -math.inf else f"a finite number >= {least:g}"
    try:
        number = float(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        raise InputError(field, found=repr(value), needed=needed) from None
    if not math.isfinite(number) or number < least:
        raise InputError(field, found=value, needed=needed)
    return number


def name_of(field: str, value: object, valid: Iterable[str]) -> str:
    """``value`` when it is one of ``valid``. Raises RequestError with the nearest one."""
    names = tuple(valid)
    if not isinstance(value, str) or value not in names:
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        raise RequestError(field, found=repr(value), needed=f"one of {', '.join(names)}", hint=hint)
    return value


def flag(field: str, value: object) -> bool:
    """``value`` when it is True or False. Raises InputError naming ``field``."""
    if not isinstance(value, bool):
        raise InputError(field, found=repr(value), needed="True or False")
    return value


def json_object(data: object, what: str, schema: str) -> dict[str, Any]:
    """``data`` (a mapping or JSON text) as a dict without its ``schema`` key, which must match."""
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except ValueError as error:
            raise InputError(
                what, found=f"text that is not JSON ({error})", needed="JSON"
            ) from None
    if not isinstance(data, Mapping):
        raise InputError(what, found=type(data).__name__, needed="a JSON object")
    if data.get("schema") != schema:
        found = data.get("schema")
        raise InputError(f"{what}.schema", found=repr(found), needed=repr(schema))
    return {str(key): value for key, value in data.items() if key != "schema"}


def check_keys(data: Mapping[str, Any], what: str, needed: set[str], known: set[str]) -> None:
    """InputError listing every missing or every unknown key of ``data``."""
    if missing := sorted(needed - data.keys()):
        raise InputError(
            what, found=f"no {', '.join(missing)}", needed=f"the keys {sorted(needed)}"
        )
    if unknown := sorted(data.keys() - known):
        hint = did_you_mean(unknown[0], known)
        raise InputError(
            what, found=f"unknown keys {', '.join(unknown)}", needed="only known keys", hint=hint
        )

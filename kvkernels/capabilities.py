"""What a device has, and what an entry needs: the one table everything else derives from.

Unknown is no: a missing fact or feature never meets a requirement. A requirement is built by one of
the constructors below, so that reason text is written in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kvkernels.errors import InputError, did_you_mean
from kvkernels.op import AttentionOp, OpKind
from kvkernels.values import check_keys, json_object

DEVICE_SCHEMA = "kvk.device/1"
UNKNOWN = "unknown"
QUALIFICATIONS = ("recorded", "local", "none")
Fact = bool | int | float | str | tuple["Fact", ...] | None


class Route(StrEnum):
    """How an operation is answered, best first."""

    NATIVE = "native"
    MATERIALIZE = "materialize"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Feature:
    """A device feature: what the driver says, and whether *our* logical device has it on.

    None is "not known". Only ``enabled is True`` counts.
    """

    advertised: bool | None = None
    enabled: bool | None = None
    note: str = ""

    def __str__(self) -> str:
        word = {True: "yes", False: "no", None: UNKNOWN}
        text = f"advertised {word[self.advertised]}, enabled {word[self.enabled]}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCaps:
    """Everything a decision may know about one device, as plain values.

    ``facts`` are numbers, strings, flags or tuples (sizes in bytes; versions as one integer, for
    example 12040 for 12.4, so that they compare). ``qualified`` says per entry where its parity
    ran: ``recorded`` (in the repository), ``local`` (on this machine), else ``none``.
    ``source`` tells a probe from a hand-written file. Raises InputError on a wrong shape.
    """

    id: str
    backend: str
    name: str
    driver: str = ""
    source: str = "probe"
    # Mappings are compared but not hashed: ids are enough to spread a hash table.
    facts: Mapping[str, Fact] = field(default_factory=dict, hash=False)
    features: Mapping[str, Feature] = field(default_factory=dict, hash=False)
    qualified: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("id", "backend", "name", "driver", "source"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"device.{name}", found=repr(getattr(self, name)), needed="text")
        if self.id.partition(":")[0] != self.backend or not self.id.partition(":")[2]:
            raise InputError("device.id", found=repr(self.id), needed=f"'{self.backend}:<index>'")
        for name in ("facts", "features", "qualified"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise InputError(f"device.{name}", found=type(value).__name__, needed="an object")
            object.__setattr__(self, name, MappingProxyType(dict(value)))
        for key, fact in self.facts.items():
            _check_fact(f"device.facts.{key}", fact)
        for key, item in self.features.items():
            if not isinstance(item, Feature):
                raise InputError(f"device.features.{key}", found=repr(item), needed="a Feature")
        for entry, level in self.qualified.items():
            if level not in QUALIFICATIONS:
                raise InputError(
                    f"device.qualified.{entry}",
                    found=repr(level),
                    needed=f"one of {', '.join(QUALIFICATIONS)}",
                )

    def qualification(self, entry: str) -> str:
        """Where parity of ``entry`` ran on this device; ``none`` when nothing says so."""
        return self.qualified.get(entry, "none")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with every field and the schema id."""
        data: dict[str, Any] = {"schema": DEVICE_SCHEMA}
        data |= {f.name: getattr(self, f.name) for f in fields(self)}
        data["facts"] = {key: _plain(fact) for key, fact in self.facts.items()}
        data["qualified"] = dict(self.qualified)
        data["features"] = {
            key: {"advertised": f.advertised, "enabled": f.enabled, "note": f.note}
            for key, f in self.features.items()
        }
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> DeviceCaps:
        """The inverse of ``to_json``; InputError lists missing or unknown keys and wrong types."""
        values = json_object(data, "device", DEVICE_SCHEMA)
        known = {f.name for f in fields(cls)}
        check_keys(values, "device", {"id", "backend", "name"}, known)
        for name in ("facts", "features"):
            if not isinstance(values.get(name, {}), Mapping):
                raise InputError(f"device.{name}", found=repr(values[name]), needed="an object")
        values["facts"] = {k: _tupled(v) for k, v in values.get("facts", {}).items()}
        values["features"] = {
            key: _feature_from_json(f"device.features.{key}", item)
            for key, item in values.get("features", {}).items()
        }
        return cls(**values)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled, and probes cross a process boundary.
        return (DeviceCaps.from_json, (self.to_json(),))


def _check_fact(name: str, fact: object) -> None:
    if isinstance(fact, tuple):
        for item in fact:
            _check_fact(name, item)
    elif fact is not None and not isinstance(fact, bool | int | float | str):
        raise InputError(name, found=repr(fact), needed="a number, text, flag or list of these")


def _plain(fact: Fact) -> object:
    return [_plain(item) for item in fact] if isinstance(fact, tuple) else fact


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


def _feature_from_json(name: str, item: object) -> Feature:
    if not isinstance(item, Mapping):
        raise InputError(name, found=repr(item), needed="an object")
    check_keys(item, name, {"advertised", "enabled"}, {"advertised", "enabled", "note"})
    for key in ("advertised", "enabled"):
        # 1 and "yes" are not True: whoever wrote them may have meant something else.
        if not (item[key] is None or isinstance(item[key], bool)):
            raise InputError(f"{name}.{key}", found=repr(item[key]), needed="true, false or null")
    if not isinstance(item.get("note", ""), str):
        raise InputError(f"{name}.note", found=repr(item["note"]), needed="text")
    return Feature(item["advertised"], item["enabled"], item.get("note", ""))


@dataclass(frozen=True, slots=True)
class Reason:
    """One unmet requirement: stable id, what it needs, what was found, and what to do (or '')."""

    id: str
    needs: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"[{self.id}] needs {self.needs}; found {self.found}"
        return f"{text} ({self.hint})" if self.hint else text

    def to_json(self) -> dict[str, str]:
        """A JSON-ready dict."""
        return {"id": self.id, "needs": self.needs, "found": self.found, "hint": self.hint}


Check = Callable[[AttentionOp, DeviceCaps], str | None]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A named condition. ``check`` returns what was found when it is not met, None when it is.

    ``fact``: the device fact that an operation is compared with, or ''. Such a need is as much
    about the device as one whose id begins with ``device.``.
    """

    id: str
    needs: str
    check: Check = field(repr=False)
    hint: str = ""
    fact: str = ""

    @property
    def of_device(self) -> bool:
        """True when it asks something of the device, alone or together with the operation."""
        return bool(self.fact) or self.id.startswith("device.")

    def unmet(self, op: AttentionOp, caps: DeviceCaps) -> Reason | None:
        """The reason when not met, else None. Never raises: a check that fails is not met."""
        try:
            found = self.check(op, caps)
        except Exception as error:
            found = f"{UNKNOWN}: the check raised {type(error).__name__}: {error}"
        return None if found is None else Reason(self.id, self.needs, found, self.hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One row: this entry serves ``kind`` by ``route`` when every requirement is met.

    ``entry`` is ``<backend>/<kind>_<variant>``; ``numerics`` says in words what accuracy to expect.
    """

    entry: str
    kind: OpKind
    route: Route
    requires: tuple[Requirement, ...]
    numerics: str = ""

    def __post_init__(self) -> None:
        backend, _, variant = self.entry.partition("/")
        if not backend or not variant:
            raise InputError("entry", found=repr(self.entry), needed="'<backend>/<kind>_<variant>'")
        if self.route not in (Route.NATIVE, Route.MATERIALIZE):
            raise InputError(
                f"{self.entry} route", found=self.route, needed="a route that computes"
            )

    def unmet(self, op: AttentionOp, caps: DeviceCaps) -> tuple[Reason, ...]:
        """Every unmet requirement, in table order; empty when this row can serve ``op``."""
        return tuple(r for need in self.requires if (r := need.unmet(op, caps)) is not None)


# Constructors. A misspelt attribute is an error when the table is built, not when it is asked.

_OP_ATTRS = frozenset(f.name for f in fields(AttentionOp)) | {"gqa", "k_bits", "v_bits", "is_kvarn"}


def _attr(name: str) -> str:
    if name not in _OP_ATTRS:
        hint = did_you_mean(name, _OP_ATTRS)
        raise InputError(
            "requirement", found=repr(name), needed="a field of AttentionOp", hint=hint
        )
    return name


def _number(value: object) -> int | float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)


def feature(name: str, *, hint: str = "") -> Requirement:
    """A device feature that is enabled, not merely advertised."""

    def check(_: AttentionOp, caps: DeviceCaps) -> str | None:
        have = caps.features.get(name, Feature())
        return None if have.enabled is True else str(have)

    return Requirement(f"device.{name}", f"{name} enabled on the device", check, hint)


def _fact(name: str, needs: str, ok: Callable[[Any], bool], hint: str, number: bool) -> Requirement:
    def check(_: AttentionOp, caps: DeviceCaps) -> str | None:
        have = caps.facts.get(name)
        if have is None:
            return UNKNOWN
        if number and _number(have) is None:
            return f"{have!r}, not a number"
        return None if ok(have) else str(have)

    return Requirement(f"device.{name}", needs, check, hint)


def fact_at_least(name: str, limit: float, *, hint: str = "") -> Requirement:
    """A known device number of at least ``limit``."""
    return _fact(name, f"{name} >= {limit}", lambda have: bool(have >= limit), hint, True)


def fact_at_most(name: str, limit: float, *, hint: str = "") -> Requirement:
    """A known device number of at most ``limit``."""
    return _fact(name, f"{name} <= {limit}", lambda have: bool(have <= limit), hint, True)


def fact_one_of(name: str, allowed: Iterable[Fact], *, hint: str = "") -> Requirement:
    """A known device fact that is one of ``allowed``."""
    valid = tuple(allowed)
    return _fact(name, f"{name} in {_listed(valid)}", lambda have: have in valid, hint, False)


def one_of(attr: str, allowed: Iterable[object], *, hint: str = "") -> Requirement:
    """An operation field that is one of ``allowed``."""
    valid = tuple(allowed)

    def check(op: AttentionOp, _: DeviceCaps) -> str | None:
        have = getattr(op, attr)
        return None if have in valid else str(have)

    return Requirement(f"op.{_attr(attr)}", f"{attr} in {_listed(valid)}", check, hint)


def _op_number(attr: str, needs: str, ok: Callable[[Any], bool], hint: str) -> Requirement:
    def check(op: AttentionOp, _: DeviceCaps) -> str | None:
        have = _number(getattr(op, attr))
        return None if have is not None and ok(have) else str(getattr(op, attr))

    return Requirement(f"op.{_attr(attr)}", needs, check, hint)


def at_least(attr: str, limit: float, *, hint: str = "") -> Requirement:
    """An operation number of at least ``limit``; a field that is None does not meet it."""
    return _op_number(attr, f"{attr} >= {limit}", lambda have: bool(have >= limit), hint)


def at_most(attr: str, limit: float, *, hint: str = "") -> Requirement:
    """An operation number of at most ``limit``; a field that is None does not meet it."""
    return _op_number(attr, f"{attr} <= {limit}", lambda have: bool(have <= limit), hint)


def multiple_of(attr: str, step: int, *, hint: str = "") -> Requirement:
    """An operation number that ``step`` divides (0 included)."""
    if step < 1:
        raise InputError("requirement", found=f"a step of {step}", needed="a step >= 1")
    return _op_number(attr, f"{attr} a multiple of {step}", lambda n: bool(n % step == 0), hint)


def equal(attr: str, value: object, *, hint: str = "") -> Requirement:
    """An operation field that equals ``value``."""

    def check(op: AttentionOp, _: DeviceCaps) -> str | None:
        have = getattr(op, attr)
        return None if have == value else str(have)

    return Requirement(f"op.{_attr(attr)}", f"{attr} = {value}", check, hint)


def same(attr_a: str, attr_b: str, *, hint: str = "") -> Requirement:
    """Two operation fields that are equal."""
    a, b = _attr(attr_a), _attr(attr_b)

    def check(op: AttentionOp, _: DeviceCaps) -> str | None:
        have_a, have_b = getattr(op, a), getattr(op, b)
        return None if have_a == have_b else f"{a}={have_a}, {b}={have_b}"

    return Requirement(f"op.{a}_{b}", f"{a} equal to {b}", check, hint)


def within(attr: str, fact: str, *, hint: str = "") -> Requirement:
    """An operation number of at most the device fact ``fact`` (limits come from the device)."""
    name = _attr(attr)
    return fits(name, fact, lambda op: _number(getattr(op, name)), hint=hint)


def fits(
    name: str, fact: str, amount: Callable[[AttentionOp], Any], *, hint: str = ""
) -> Requirement:
    """``amount`` of an operation, called ``op.<name>`` in reasons, of at most the device fact
    ``fact``. An amount of None does not fit.
    """

    def check(op: AttentionOp, caps: DeviceCaps) -> str | None:
        have, limit = _number(amount(op)), _number(caps.facts.get(fact))
        if limit is None:
            return f"{UNKNOWN} {fact}, {name}={have}"
        return None if have is not None and have <= limit else f"{have} > {limit}"

    return Requirement(f"op.{name}", f"{name} <= {fact} of the device", check, hint, fact)


def when(condition: Requirement, then: Requirement) -> Requirement:
    """``then``, but only where ``condition`` is met, or cannot be told (unknown is no)."""

    def check(op: AttentionOp, caps: DeviceCaps) -> str | None:
        reason = condition.unmet(op, caps)
        applies = reason is None or reason.found.startswith(UNKNOWN)
        return then.check(op, caps) if applies else None

    needs = f"{then.needs} when {condition.needs}"
    return Requirement(then.id, needs, check, then.hint, then.fact)

"""What every source has to keep to so that OpenCL C 1.2 and the mutation tests take it."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest
from mutants import BARRIER

SOURCES = {
    f.name: f.read_text(encoding="utf-8")
    for f in (files("kvkernels.simt") / "sources").iterdir()
    if f.name.endswith(".inc")
}
#: names of types, functions and extensions that the dialects do not share
FOREIGN = r"\b(half|printf|nullptr|template|auto|double|float|unsigned|long)\b"


def code(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _waiting() -> set[str]:
    """Functions that meet a barrier, directly or in what they call."""
    parts = re.split(r"\bDEVICE\b", "\n".join(code(text) for text in SOURCES.values()))[1:]
    bodies = {}
    for body in parts:
        name = re.search(r"(\w+)\(", body)
        assert name
        bodies[name[1]] = re.split(r"\bKERNEL", body)[0]
    found: set[str] = {name for name, body in bodies.items() if BARRIER in body}
    while True:
        calls = re.compile(r"\b(" + "|".join(found) + r")\(")
        more = {name for name, body in bodies.items() if calls.search(body)} | found
        if more == found:
            return found
        found = more


WAITING = _waiting()


@pytest.mark.parametrize("name", SOURCES)
def test_only_words_of_the_dialect(name: Any) -> None:
    assert not re.findall(FOREIGN, code(SOURCES[name]))


@pytest.mark.parametrize("name", SOURCES)
def test_one_barrier_a_line(name: Any) -> None:
    lines = [line.strip() for line in SOURCES[name].splitlines() if BARRIER in line]
    assert set(lines) <= {BARRIER}


@pytest.mark.parametrize("name", SOURCES)
def test_F34_no_thread_of_a_kernel_leaves_before_a_barrier(name: Any) -> None:
    """Kernels with barriers, their own or of what they call, end at their end."""
    parts = re.split(r"\bKERNEL(?:_MIN)?\(", code(SOURCES[name]))[1:]
    kernels = [part.partition("\n}")[0] for part in parts]
    waits = re.compile(r"\b(BARRIER|" + "|".join(WAITING) + r")\(")
    for body in kernels:
        assert not (waits.search(body) and re.search(r"\breturn\b", body)), body[:80]


@pytest.mark.parametrize("name", SOURCES)
def test_no_function_returns_a_struct(name: Any) -> None:
    """Some OpenCL implementations fail on it (oclgrind, for one)."""
    structs = re.findall(r"\}\s*(\w+);", "".join(SOURCES.values()))
    assert "Shape" in structs
    found = re.findall(rf"DEVICE\s+({'|'.join(structs)})\s+\w+\(", SOURCES[name])
    assert not found

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


@pytest.mark.parametrize("name", SOURCES)
def test_only_words_of_the_dialect(name: Any) -> None:
    assert not re.findall(FOREIGN, code(SOURCES[name]))


@pytest.mark.parametrize("name", SOURCES)
def test_one_barrier_a_line(name: Any) -> None:
    lines = [line.strip() for line in SOURCES[name].splitlines() if BARRIER in line]
    assert set(lines) <= {BARRIER}

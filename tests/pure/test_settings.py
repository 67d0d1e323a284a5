"""Environment variables: defaults, limits, messages, and that there is one list of them."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from kvkernels.errors import InputError
from kvkernels.settings import DOCS, Settings, settings

PACKAGE = Path(__file__).parents[2] / "kvkernels"


def test_defaults() -> None:
    kept = os.path.join(os.path.expanduser("~"), ".cache", "kvkernels")
    expected = Settings(num_threads=None, window_chunk=65536, probe_timeout=20.0, cache_dir=kept)
    assert settings({}) == expected
    assert settings({doc.name: " " for doc in DOCS}) == expected


def test_values_are_read() -> None:
    env = {"KVK_NUM_THREADS": "3", "KVK_WINDOW_CHUNK": " 4096 ", "KVK_PROBE_TIMEOUT": "0.5"}
    env["KVK_CACHE_DIR"] = "off"
    assert settings(env) == Settings(num_threads=3, window_chunk=4096, probe_timeout=0.5)


@pytest.mark.parametrize("text", ["", "0", "-1", "-65536"])
def test_W1_window_chunk_missing_zero_and_negative_mean_the_default(text: str) -> None:
    assert settings({"KVK_WINDOW_CHUNK": text}).window_chunk == 65536


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVK_WINDOW_CHUNK", "many"),
        ("KVK_WINDOW_CHUNK", "1.5"),
        ("KVK_NUM_THREADS", "0"),
        ("KVK_NUM_THREADS", "-2"),
        ("KVK_NUM_THREADS", "two"),
        ("KVK_PROBE_TIMEOUT", "0"),
        ("KVK_PROBE_TIMEOUT", "nan"),
        ("KVK_PROBE_TIMEOUT", "inf"),
        ("KVK_PROBE_TIMEOUT", "soon"),
    ],
)
def test_W1_text_that_is_no_such_number_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        settings({name: text})
    assert caught.value.field == name
    assert text in str(caught.value)


@pytest.mark.parametrize(("text", "on"), [("", False), ("0", False), ("1", True), ("no", True)])
def test_T5_allow_generic_is_on_for_anything_but_empty_and_0(text: str, on: bool) -> None:
    assert settings({"KVK_TAIL_ALLOW_GENERIC": text}).tail_allow_generic is on


def test_the_environment_is_read_when_asked_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVK_WINDOW_CHUNK", "77")
    assert settings().window_chunk == 77
    monkeypatch.setenv("KVK_WINDOW_CHUNK", "78")
    assert settings().window_chunk == 78


def test_every_variable_is_documented_and_there_are_at_most_8() -> None:
    assert len(DOCS) == len({doc.name for doc in DOCS}) == len(Settings.__dataclass_fields__)
    assert len(DOCS) <= 8
    for doc in DOCS:
        assert doc.name.startswith("KVK_")
        assert doc.meaning
        assert doc.default
        key = doc.name.removeprefix("KVK_").lower()
        assert key in Settings.__dataclass_fields__


def names_in(source: str) -> list[str]:
    """Text constants of ``source`` that are exactly the name of a variable of ours."""
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [t for t in texts if isinstance(t, str) and re.fullmatch(r"KVK_[A-Z_]+", t)]


def test_no_other_module_reads_a_variable() -> None:
    assert names_in("import os\nos.environ['KVK_X']") == ["KVK_X"]
    for path in PACKAGE.rglob("*.py"):
        if path.name != "settings.py":
            assert names_in(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"KVK_CACHE_DIR": "/a/b"}, "/a/b"),
        ({"KVK_CACHE_DIR": "off"}, None),
        ({"KVK_CACHE_DIR": " OFF "}, None),
        ({"XDG_CACHE_HOME": "/x"}, os.path.join("/x", "kvkernels")),
        ({"XDG_CACHE_HOME": "relative"}, None),
        ({}, os.path.join(os.path.expanduser("~"), ".cache", "kvkernels")),
    ],
)
def test_the_folder_of_machine_code(env: dict[str, str], folder: str | None) -> None:
    assert settings(env).cache_dir == folder

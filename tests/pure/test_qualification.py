"""Notes of what passed parity on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvkernels import qualification
from kvkernels.capabilities import DeviceCaps
from kvkernels.qualification import note, with_local

CARD = DeviceCaps(
    id="cuda:0", backend="cuda", name="card", driver="580", facts={"compute_capability": 90}
)


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVK_CACHE_DIR", str(tmp_path / "kept"))


def levels(caps: DeviceCaps = CARD) -> dict[str, str]:
    return dict(with_local(caps).qualified)


def test_nothing_is_qualified_before_parity_ran() -> None:
    assert with_local(CARD) is CARD


def test_what_passed_is_local_and_runs_add_up() -> None:
    assert note(CARD, ["cuda/attend_mma"], []) is not None
    note(CARD, ["cuda/commit"], [])
    assert levels() == {"cuda/attend_mma": "local", "cuda/commit": "local"}


def test_what_fails_later_is_not_qualified_any_more() -> None:
    note(CARD, ["cuda/attend_mma", "cuda/commit"], [])
    note(CARD, ["cuda/commit"], ["cuda/attend_mma"])
    assert levels() == {"cuda/commit": "local"}


@pytest.mark.parametrize(
    "change",
    [
        {"driver": "590"},
        {"name": "another card"},
        {"id": "cuda:1"},
        {"facts": {"compute_capability": 80}},
    ],
)
def test_it_counts_for_the_same_device_and_driver_only(change: dict[str, object]) -> None:
    note(CARD, ["cuda/commit"], [])
    assert levels(dataclasses.replace(CARD, **change)) == {}  # type: ignore[arg-type]


def test_it_counts_for_the_same_library_only(monkeypatch: pytest.MonkeyPatch) -> None:
    note(CARD, ["cuda/commit"], [])
    monkeypatch.setattr(qualification, "_library", lambda: "another")
    assert levels() == {}


def test_devices_without_notes_do_not_wait_for_a_digest_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note(CARD, ["cuda/commit"], [])
    monkeypatch.setattr(qualification, "_library", lambda: pytest.fail("was asked for"))
    cpu = DeviceCaps(id="cpu:0", backend="cpu", name="processor")
    assert with_local(cpu) is cpu
    with pytest.raises(pytest.fail.Exception):
        with_local(CARD)


def test_a_recorded_level_is_not_lowered() -> None:
    recorded = dataclasses.replace(CARD, qualified={"cuda/commit": "recorded", "cuda/x": "none"})
    note(recorded, ["cuda/commit", "cuda/x"], [])
    assert levels(recorded) == {"cuda/commit": "recorded", "cuda/x": "local"}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", json.dumps({"schema": "kvk.qualified/9", "entries": ["cuda/commit"]}),
     json.dumps({"schema": qualification.SCHEMA, "entries": "cuda/commit"}),
     json.dumps({"schema": qualification.SCHEMA, "entries": [7, "hip/commit"]})],
)  # fmt: skip
def test_a_damaged_or_foreign_note_counts_as_none(text: str) -> None:
    path = note(CARD, ["cuda/commit"], [])
    assert path is not None
    path.write_text(text, encoding="utf-8")
    assert levels() == {}


def test_without_a_cache_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVK_CACHE_DIR", "off")
    assert note(CARD, ["cuda/commit"], []) is None
    assert levels() == {}


def test_a_directory_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVK_CACHE_DIR", str(tmp_path / "file"))
    assert note(CARD, ["cuda/commit"], []) is None

"""ggml peers: against a library that only pretends, and the real one that KVK_GGML names."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvkernels.bench import fill, ggml, libggml, peers, yardstick
from kvkernels.bench.workload import F32, F64, relative_error
from kvkernels.cli import main
from kvkernels.errors import InputError
from kvkernels.op import LayerSpec
from kvkernels.settings import settings

SPEC = LayerSpec(n_head=8, n_kv_head=2, head_dim=64, k="kvarn4", v="kvarn4", encoder="published")
SOURCE = Path(__file__).with_name("fake_ggml.c")
NAMES = ["ggml-f16", "ggml-q8_0", "ggml-q4_0"]
REAL = settings().ggml or ""

Fake = Callable[..., Path]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Compiles the library that pretends, with what it should get wrong; returns its folder."""

    def made(*defines: str, names: tuple[str, ...] = ("libggml-base.so", "libggml-cpu.so")) -> Path:
        command = yardstick.compiler()
        if command is None:
            pytest.skip("no C compiler")
        flags = ["-shared", "-fPIC", *(f"-D{x}" for x in defines)]
        for name in names:
            target = tmp_path / name
            # Its own name inside: the loader takes two files of one name for the same library.
            line = [
                command,
                *flags,
                f"-Wl,-soname,{target.name}",
                str(SOURCE),
                "-o",
                str(target),
                "-lm",
            ]
            subprocess.run(line, check=True)
        return tmp_path

    return made


def task(n: int = 600, threads: int = 1, spec: LayerSpec = SPEC) -> peers.Task:
    rows = fill.period(spec)
    q = np.ascontiguousarray(rows.q[3].reshape(spec.n_kv_head, spec.gqa, spec.head_dim))
    return peers.Task(spec, q, fill.tokens(rows.k, n), fill.tokens(rows.v, n), threads)


def exact(made: peers.Task, q: F32, keys: F32, values: F32) -> F64:
    """Float64 attention of ``q`` [n_q, n_head, D]."""
    pairs = [(k.astype(float), v.astype(float)) for k, v in zip(keys, values, strict=True)]
    return fill.attend_heads(made.spec, q, pairs)


def test_rows_compute_attention_with_the_threads_asked_for(fake: Fake) -> None:
    made, folder = task(threads=2), fake()
    expected = exact(made, made.q.reshape(1, 8, 64), made.keys, made.values)
    found = list(ggml.rows(made, str(folder)))
    assert [row.name for row in found] == NAMES
    for row in found:
        assert row.call is not None, row.note
        assert relative_error(row.call(), expected) < 1e-5
        assert row.note.startswith("ggml fake-1, ")
    assert ctypes.CDLL(str(folder / "libggml-base.so")).fake_threads() == 2


def test_many_queries_come_back_row_by_row(fake: Fake) -> None:
    made = task(130)
    q = fill.period(SPEC).q[:5]
    folded = q.reshape(5, 2, 4, 64).transpose(1, 0, 2, 3).reshape(2, 20, 64)
    expected = exact(made, q, made.keys, made.values)
    for row in ggml.rows(made, str(fake()), folded):
        assert row.call is not None, row.note
        assert row.call().shape == (5, 8, 64)
        assert relative_error(row.call(), expected) < 1e-5


def test_a_pool_of_threads_is_paused_after_every_call(fake: Fake) -> None:
    folder = fake("POOL")
    row = next(ggml.rows(task(64, threads=3), str(folder)))
    assert row.call is not None, row.note
    pauses = ctypes.CDLL(str(folder / "libggml-base.so")).fake_pauses
    before = pauses()
    row.call()
    assert pauses() == before + 3


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("WITHOUT_QUANTIZE", "no ggml_quantize_chunk"),
        ("NO_BACKEND", "ggml_backend_cpu_init: found NULL"),
        ("BAD_STATUS", "status -1"),
        ("SHORT_ROWS", "ggml_quantize_chunk: found "),
        ("ABORTS", "SIGABRT: fake.c:1: GGML_ASSERT(k->ne[1] == 0) failed"),
    ],
)
def test_what_fails_is_a_row_with_a_note(fake: Fake, broken: str, said: str) -> None:
    found = list(ggml.rows(task(64), str(fake(broken))))
    assert [(row.name, row.call) for row in found] == [(name, None) for name in NAMES]
    assert all(said in row.note for row in found), [row.note for row in found]


def test_a_type_of_another_number_is_no_peer(fake: Fake) -> None:
    found = list(ggml.rows(task(64), str(fake("RENAMED"))))
    assert [row.call is None for row in found] == [False, False, True]
    assert "type 2 of libggml: found q9_9; needed q4_0" in found[2].note


def test_one_library_of_earlier_times_and_the_best_of_several_variants(
    fake: Fake, tmp_path: Path
) -> None:
    folder = fake(names=("libggml.so",))
    assert libggml.files(folder) == libggml.files(folder / "libggml.so") == (folder / "libggml.so",)
    assert next(ggml.rows(task(64), str(folder))).call is not None
    fake(names=("libggml-base.so", "libggml-base.so.0"))
    fake("SCORE=0", names=("libggml-cpu-new.so",))
    libggml.library.cache_clear()
    with pytest.raises(InputError, match="none for this CPU"):
        libggml.library(str(folder))
    fake("SCORE=3", names=("libggml-cpu-old.so",))
    names = [x.name for x in libggml.files(folder)]
    assert names == ["libggml-base.so", "libggml-cpu-new.so", "libggml-cpu-old.so"]
    assert next(ggml.rows(task(64), str(folder))).call is not None


def test_a_build_with_its_backends_in_another_folder(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "bin").mkdir()
    fake(names=("src/libggml-base.so", "bin/libggml-cpu.so", "src/libggml.so"))
    names = [x.relative_to(tmp_path).as_posix() for x in libggml.files(tmp_path)]
    assert names == ["src/libggml-base.so", "bin/libggml-cpu.so"]
    assert next(ggml.rows(task(64), str(tmp_path))).call is not None
    with pytest.raises(InputError, match="none in"):
        libggml.files(tmp_path / "src")


def test_without_a_path_the_rows_say_how_to_give_one() -> None:
    found = list(ggml.rows(task(64), ""))
    assert [row.name for row in found] == NAMES
    assert all(row.call is None and "--ggml PATH or KVK_GGML=PATH" in row.note for row in found)


def test_a_file_that_is_no_library_is_a_row_with_a_note(tmp_path: Path) -> None:
    for name in ("libggml-base.so", "libggml-cpu.so"):
        (tmp_path / name).write_text("not a library")
    notes = {row.note for row in ggml.rows(task(64), str(tmp_path))}
    assert len(notes) == 1
    assert "libggml-base.so" in notes.pop()


@pytest.mark.parametrize("by_option", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_wrong_path_ends_the_command_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, by_option: bool
) -> None:
    path = tmp_path / "build"
    if there:
        path.mkdir()
        (path / "libggml-base.a").touch()
    monkeypatch.setenv("KVK_GGML", str(tmp_path / "unused") if by_option else str(path))
    args = ["bench", "--peers", *(["--ggml", str(path)] if by_option else [])]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 2
    assert f"{'none in' if there else 'no file or folder'} {path}" in done.stderr.replace("\n", "")
    assert "BUILD_SHARED_LIBS" in done.stderr


def as_f16(x: F32) -> F32:
    return x.astype(np.float16).astype(np.float32)


def as_q8_0(x: F32) -> F32:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(blocks / step) * as_f16(step)).reshape(x.shape)


def as_q4_0(x: F32) -> F32:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).argmax(-1, keepdims=True)
    step = np.take_along_axis(blocks, largest, -1) / np.float32(-8)
    codes = np.minimum(15, np.floor(blocks / step + np.float32(8.5))) - 8
    return (codes * as_f16(step)).reshape(x.shape)


@pytest.mark.skipif(not REAL, reason="KVK_GGML names no libggml")
@pytest.mark.parametrize("threads", [1, 2])
def test_the_real_library_attends_to_the_rows_it_quantised(threads: int) -> None:
    spec = LayerSpec(n_head=8, n_kv_head=2, head_dim=128, k="kvarn4", v="kvarn4")
    made = task(1024, threads, spec)
    q = made.q.reshape(1, 8, 128)
    true = exact(made, q, made.keys, made.values)
    rounded = {  # what it does to queries and to the cache, and what its sums add to that
        "ggml-f16": (as_f16, as_f16, 2e-2),
        "ggml-q8_0": (as_q8_0, as_q8_0, 1e-4),
        "ggml-q4_0": (as_q8_0, as_q4_0, 1e-4),
    }
    for row in ggml.rows(made, REAL):
        assert row.call is not None, row.note
        found = row.call()
        assert relative_error(found, true) <= row.limit
        queries, cache, limit = rounded[row.name]
        same = exact(made, queries(q), cache(made.keys), cache(made.values))
        assert relative_error(found, same) < limit, row.name

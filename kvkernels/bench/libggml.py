"""A libggml that the user built: which files it is, and its functions."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvkernels.errors import InputError

_NEEDED = "shared libraries libggml-base and libggml-cpu"
_BUILD = "Build ggml with cmake -DBUILD_SHARED_LIBS=ON and give the folder of its libraries"
_PLACES = ("", "bin", "src", "lib", "lib64", "build/bin", "build/src")


class InitParams(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# name -> type of the result, types of the arguments
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_type_name": (c_char_p, c_int),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, *[c_int64] * 4),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, *[c_int64] * 3, c_void_p),
    "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, *[c_float] * 3),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
}
#: the functions of a pool of threads, optional
POOL: dict[str, tuple[Any, ...]] = {
    "ggml_threadpool_params_init": (None, c_void_p, c_int),
    "ggml_threadpool_new": (c_void_p, c_void_p),
    "ggml_threadpool_pause": (None, c_void_p),
    "ggml_threadpool_free": (None, c_void_p),
    "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
}
_OPTIONAL = POOL | {"ggml_version": (c_char_p,)}


def files(path: Path) -> tuple[Path, ...]:
    """What to load, in this order: libggml-base and every libggml-cpu, or a libggml of the time
    when there was no other. ``path`` is a folder of libraries, of a build, or one of the files.
    """
    named = path.is_file() and path.name.startswith("libggml")
    found: dict[str, Path] = {}
    # All places together: a build with loadable backends has these in bin and the base in src.
    for folder in [path.parent] if named else [path / place for place in _PLACES]:
        shared = [x for x in folder.glob("libggml*") if {".so", ".dylib"} & {*x.suffixes}]
        # The shortest of several names of a library is the one without a version.
        for file in sorted((x for x in shared if x.is_file()), key=lambda x: len(x.name)):
            found.setdefault(file.name.partition(".")[0], file)
    cpus = [found[stem] for stem in sorted(found) if stem.startswith("libggml-cpu")]
    if "libggml-base" in found and cpus:
        return (found["libggml-base"], *cpus)
    if "libggml" in found and "libggml-base" not in found:
        return (found["libggml"],)
    what = f"none in {path}" if path.exists() else f"no file or folder {path}"
    raise InputError("libggml", found=what, needed=_NEEDED, hint=_BUILD)


def _loaded(path: Path) -> Any:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise InputError(path.name, found=str(error), needed="a library that loads") from None


def _score(handle: Any) -> int:
    """How well a variant fits this CPU, as it says itself; 0 is not at all."""
    ask = getattr(handle, "ggml_backend_score", None)
    return int(ask()) if ask else 1


@cache
def library(path: str) -> Any:
    """Its functions by name; None for an optional one that it lacks. InputError says what to do."""
    first, *variants = files(Path(path))
    handles = [_loaded(first)]
    if variants:
        handles.append(max((_loaded(x) for x in variants), key=_score))
        if not _score(handles[-1]):
            raise InputError("libggml-cpu", found="none for this CPU", needed="one", hint=_BUILD)
    made, lacking = SimpleNamespace(), []
    for name, (result, *arguments) in (_FUNCTIONS | _OPTIONAL).items():
        function = next((f for h in handles if (f := getattr(h, name, None))), None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
        elif name in _FUNCTIONS:
            lacking.append(name)
        setattr(made, name, function)
    if lacking:
        hint = "Versions of 2025 and later have them all"
        raise InputError("libggml", found=f"no {', '.join(lacking)}", needed="these", hint=hint)
    return made

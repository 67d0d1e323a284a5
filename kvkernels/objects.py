"""Machine code kept on disk, so that a new process does not generate it again.

A file holds the SHA-256 of the code and the code. What cannot be read, is damaged or could have
been written by another user counts as absent; what cannot be written is not kept.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvkernels.settings import settings

_DIGEST = hashlib.sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def file_name(*parts: str) -> str:
    """A name that stands for all of ``parts``: source, kernel, machine, compiler."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".o"


def load(name: str) -> bytes | None:
    """The code stored under ``name``, or None."""
    folder = settings().cache_dir
    if folder is None:
        return None
    try:
        with open(Path(folder) / name, "rb") as file:
            if not _ours(os.fstat(file.fileno())):
                return None
            data = file.read()
    except OSError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def store(name: str, code: bytes) -> None:
    """Keep ``code`` under ``name``; a reader sees all of it or nothing."""
    folder = settings().cache_dir
    if folder is None:
        return
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(part, Path(folder) / name)
        except OSError:
            os.unlink(part)
            raise


def _ours(info: os.stat_result) -> bool:
    """This runs as code: nobody else may have written it."""
    if not hasattr(os, "getuid"):
        return True
    return info.st_uid == os.getuid() and not info.st_mode & _OTHERS_WRITE

"""Identity of the kernel sources; needs no Numba."""

import hashlib
from functools import cache
from pathlib import Path


@cache
def source_stamp():
    """SHA-256 over every kernel source file: the identity of the compiled code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

"""Line counts per module. Exit 1 when one is over the limit.

Counted are lines that are neither blank nor only a comment. Docstrings count: they are read too.
"""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 300
ROOT = Path(__file__).resolve().parent.parent


def count(text: str) -> int:
    """Lines of ``text`` that are neither blank nor only a comment."""
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


def sizes(package: Path) -> dict[str, int]:
    """Counted lines of every Python module under ``package``, by path relative to its parent."""
    return {
        path.relative_to(package.parent).as_posix(): count(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def main(package: Path = ROOT / "kvkernels") -> int:
    """Print a line per module and the total; return the exit status."""
    found = sizes(package)
    for name, lines in sorted(found.items(), key=lambda item: -item[1]):
        mark = f"  over {LIMIT}" if lines > LIMIT else ""
        sys.stdout.write(f"{lines:6} {name}{mark}\n")
    sys.stdout.write(f"{sum(found.values()):6} total, {len(found)} modules, limit {LIMIT}\n")
    return int(any(lines > LIMIT for lines in found.values()))


if __name__ == "__main__":
    sys.exit(main(*(Path(arg).resolve() for arg in sys.argv[1:2])))

"""Import layers (architecture, section 2): a module may use its own layer and those below.

A new top-level module or package must be given a layer here before it may exist.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvkernels"
LAYERS = (
    "op capabilities errors settings values",
    "dispatch records quants tail request calls storage requirements objects",
    "backend registry qualification",
    "planner planlog storages operations cache step arguments pages pools state memory split engine"
    " merging drafts metrics",
    "cpu simt cuda hip opencl vulkan",
    "testing bench cli integrations prompts __main__",
)
LAYER = {name: level for level, line in enumerate(LAYERS) for name in line.split()}
STDLIB_ONLY_BELOW = 2  # the first two layers
# What a module of these layers may import besides.
ALSO = {"records": {"numpy"}, "quants": {"numpy", "ml_dtypes"}}
# These may name anything, but not where it is loaded at import: only inside a function, or for the
# type checker.
LAZY = {"registry", "__init__"}


def nodes(node: ast.AST, when: str = "import") -> Iterator[tuple[ast.AST, str]]:
    """Every node under ``node``, and when it runs: at ``import``, on a ``call``, or ``never``."""
    for child in ast.iter_child_nodes(node):
        then = when
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            then = "call" if when == "import" else when
        typing_only = isinstance(node, ast.If) and child in node.body
        if typing_only and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            then = "never"
        yield child, then
        yield from nodes(child, then)


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int, str]]:
    """(dotted target, line, when it runs) of every import, also ``import_module("literal")``."""
    for node, when in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, when
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parent = parts[: len(parts) - node.level + 1]
                base = ".".join([*parent, *base.split(".")]).strip(".")
            if base == "kvkernels":  # ``from kvkernels import op`` names a module, not an attribute
                for alias in node.names:
                    yield f"kvkernels.{alias.name}", node.lineno, when
            else:
                yield base, node.lineno, when
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), node.lineno, when


def violations(root: Path) -> list[str]:
    """Every import of the package at ``root`` that breaks the layering, one line each."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        own = relative.parts[0].removesuffix(".py")
        if own not in LAYER and own not in LAZY:
            found.append(f"{relative}: {own!r} has no layer; add it to LAYERS")
            continue
        level = LAYER.get(own, -1)  # the root __init__ is below everything: only lazy imports
        tree = ast.parse(path.read_text(encoding="utf-8"))
        package = ".".join(("kvkernels", *relative.parts[:-1]))
        for target, line, when in imports(tree, package):
            head, _, rest = target.partition(".")
            name = rest.partition(".")[0]
            where = f"{relative}:{line}"
            if head != "kvkernels":
                allowed = head in sys.stdlib_module_names or head in ALSO.get(own, ())
                if level < STDLIB_ONLY_BELOW and not allowed and when != "never":
                    found.append(f"{where}: layer {level} imports {head}")
            elif name in LAYER and LAYER[name] > level and (when == "import" or own not in LAZY):
                found.append(f"{where}: {own} (layer {level}) imports {name} (layer {LAYER[name]})")
    return found


def test_the_package_keeps_its_layers() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("op.py", "import json\nfrom kvkernels.errors import InputError\n", False),
        ("op.py", "from kvkernels.dispatch import decide\n", True),
        ("op.py", "import numpy\n", True),
        ("dispatch.py", "def f():\n    import numpy\n", True),
        ("records/layout.py", "import numpy as np\nfrom .packing import pack\n", False),
        ("records/layout.py", "import ml_dtypes\n", True),
        ("quants/codec.py", "import ml_dtypes\nimport numpy as np\n", False),
        ("quants/codec.py", "import numba\n", True),
        ("records/layout.py", "from ..planner import plan\n", True),
        ("records/layout.py", "from .. import planner\n", True),
        ("dispatch.py", "from kvkernels import registry\n", True),
        ("dispatch.py", "def f():\n    from kvkernels.registry import names\n", True),
        ("plan.py", "import kvkernels.cpu.backend\n", True),
        ("plan.py", "import importlib\nimportlib.import_module('kvkernels.cpu.backend')\n", True),
        ("registry.py", "def f():\n    import kvkernels.cpu.backend\n", False),
        ("registry.py", "import kvkernels.cpu.backend\n", True),
        ("__init__.py", "def __getattr__(n):\n    from kvkernels.planner import plan\n", False),
        ("__init__.py", "from kvkernels.planner import plan\n", True),
        ("__init__.py", "import numpy\n", True),
        ("__init__.py", "if TYPE_CHECKING:\n    from kvkernels.planner import plan\n", False),
        ("op.py", "if TYPE_CHECKING:\n    from kvkernels.planner import plan\n", True),
        ("op.py", "if typing.TYPE_CHECKING:\n    import numpy\n", False),
        ("op.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy\n", True),
        ("op.py", "if X:\n    import numpy\n", True),
        ("cpu/table.py", "import numba\nfrom kvkernels.plan import Plan\n", False),
        ("cpu/table.py", "from kvkernels.bench import measure\n", True),
        ("surprise.py", "", True),
    ],
)
def test_the_check_finds_a_wrong_import(
    tmp_path: Path, file: str, source: str, wrong: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert bool(violations(tmp_path)) is wrong, violations(tmp_path)

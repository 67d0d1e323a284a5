"""kvkernels: attention straight from compressed KV-cache records.

Public names load on first use; importing the package loads the standard library only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvkernels.cache import Cache as Cache
    from kvkernels.dispatch import Decision as Decision
    from kvkernels.dispatch import Policy as Policy
    from kvkernels.engine import AttendPlan as AttendPlan
    from kvkernels.engine import attend as attend
    from kvkernels.engine import decode as decode
    from kvkernels.engine import encode as encode
    from kvkernels.merging import merge_states as merge_states
    from kvkernels.op import AttentionOp as AttentionOp
    from kvkernels.op import LayerSpec as LayerSpec
    from kvkernels.planner import Limits as Limits
    from kvkernels.planner import Plan as Plan
    from kvkernels.planner import plan as plan
    from kvkernels.records.sealed import Records as Records
    from kvkernels.registry import open_device as open_device

_PUBLIC = {
    "AttendPlan": "engine",
    "Records": "records.sealed",
    "attend": "engine",
    "decode": "engine",
    "encode": "engine",
    "merge_states": "merging",
    "AttentionOp": "op",
    "Cache": "cache",
    "Decision": "dispatch",
    "LayerSpec": "op",
    "Limits": "planner",
    "Plan": "planner",
    "Policy": "dispatch",
    "open_device": "registry",
    "plan": "planner",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    # Cached, so that the next access is a plain attribute.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

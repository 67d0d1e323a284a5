"""What is asked for: a layer (``LayerSpec``) and one final built operation (``AttentionOp``).

Plain frozen values, no device object and no array, so that a decision about them needs no hardware.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kvkernels.errors import InputError, RequestError
from kvkernels.values import check_keys, finite, flag, json_object, name_of, whole

GROUP = 128  # tokens sealed together; also the unit of ``sink_tokens``
KVARN_BITS: Mapping[str, int] = MappingProxyType({f"kvarn{b}": b for b in (2, 3, 4, 5, 6, 8)})
# Known by name, so that a refusal says "this row does not take it" and not "unknown type".
STANDARD_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
CACHE_TYPES = (*KVARN_BITS, *STANDARD_TYPES)
ATTENTION_KINDS = ("dense", "mla")
ENCODERS = ("published", "aware")
QUERY_SOURCES = ("none", "rows", "moment")  # what the aware encoder weighs K's errors with
BIAS_KINDS = ("none", "bool", "additive")
#: which keys a window of W shows the query at i: sliding i - W < j, chunked i // W * W <= j,
#: symmetric |i - j| <= W // 2 (B4); causal layers hide j > i besides
WINDOW_KINDS = ("sliding", "chunked", "symmetric")
TAIL_DTYPES = ("f16", "bf16")
OP_SCHEMA = "kvk.op/1"


def oldest_key(window: int | None, kind: str, position: int) -> int:
    """The oldest key that the query at ``position`` may see (B4)."""
    if window is None:
        return 0
    if kind == "chunked":
        return position // window * window
    return max(0, position - (window // 2 if kind == "symmetric" else window - 1))


def first_without(window: int, kind: str, key: int) -> int:
    """The smallest position whose query sees no key below ``key``."""
    if kind == "chunked":
        return -(-key // window) * window
    return key + (window // 2 if kind == "symmetric" else window - 1) if key else 0


class OpKind(StrEnum):
    """What a kernel can be asked to do with a cache; TAIL writes rows into rings."""

    ATTEND = "attend"
    COMMIT = "commit"
    TAIL = "tail"
    MATERIALIZE = "materialize"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One attention layer as the model defines it, and how its K and V are stored.

    ``window`` is in tokens and counts the query itself (``window_kind`` as in WINDOW_KINDS);
    ``sink_tokens`` is in tokens. ``None`` for ``head_dim_v``, ``sink_tokens`` or ``scale`` stands
    for a default and reads back as the number. ``tail``: newest rows kept exact besides the body,
    in ``tail_dtype`` (f16, bf16; None: chosen when planned); ``kvk.plan(tail=..)`` asks for all
    layers at once. ``encoder`` matters to KVarN only: ``aware`` (codes chosen for the queries of
    the rows: less error in attention, and queries staged beside K and V) or ``published`` (bytes as
    other engines write them, no queries). A shape no kernel takes (head_dim 80) can be built: the
    capability tables refuse it, with the list of what they take. Raises InputError on a wrong
    number, RequestError on a wrong name.
    """

    n_head: int
    n_kv_head: int
    head_dim: int
    # Typed as what they hold after __post_init__, so that no reader has to test for None.
    head_dim_v: int = None  # type: ignore[assignment]
    k: str = "kvarn4"
    v: str = "kvarn4"
    window: int | None = None
    sink_tokens: int = None  # type: ignore[assignment]
    scale: float = None  # type: ignore[assignment]
    softcap: float = 0.0
    alibi: float = 0.0
    sink_logits: bool = False
    attention: str = "dense"
    encoder: str = "aware"
    window_kind: str = "sliding"
    causal: bool = True
    tail: int = 0
    tail_dtype: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("n_head", "n_kv_head", "head_dim"):
            put(name, whole(name, getattr(self, name)))
        if self.n_head % self.n_kv_head:  # rule A4
            raise InputError(
                "n_head",
                found=f"n_head={self.n_head} with n_kv_head={self.n_kv_head}",
                needed="n_head a whole multiple of n_kv_head",
            )
        dim_v: object = self.head_dim_v
        put("head_dim_v", self.head_dim if dim_v is None else whole("head_dim_v", dim_v))
        for name, valid in (
            ("k", CACHE_TYPES),
            ("v", CACHE_TYPES),
            ("attention", ATTENTION_KINDS),
            ("encoder", ENCODERS),
            ("window_kind", WINDOW_KINDS),
        ):
            name_of(name, getattr(self, name), valid)
        if (self.k in KVARN_BITS) != (self.v in KVARN_BITS):  # rule A1
            raise RequestError(
                "k, v",
                found=f"k={self.k!r} with v={self.v!r}",
                needed="both sides KVarN or both sides standard",
            )
        if self.window is not None:
            put("window", whole("window", self.window))
        elif self.window_kind != "sliding":
            raise InputError(
                "window", found=f"none with window_kind={self.window_kind!r}", needed="a window"
            )
        put("tail", whole("tail", self.tail, 0))
        if self.tail_dtype is not None:
            name_of("tail_dtype", self.tail_dtype, TAIL_DTYPES)
        put("causal", flag("causal", self.causal))
        if not self.is_kvarn:  # nothing is sealed, so nothing weighs errors either
            put("encoder", "published")
        self._resolve_sink(put)
        scale: object = self.scale
        put("scale", self.head_dim**-0.5 if scale is None else finite("scale", scale))
        put("softcap", finite("softcap", self.softcap, 0.0))
        put("alibi", finite("alibi", self.alibi, 0.0))
        put("sink_logits", flag("sink_logits", self.sink_logits))

    def _resolve_sink(self, put: Any) -> None:
        raw: object = self.sink_tokens
        if raw is None:
            put("sink_tokens", GROUP if self.window is None and self.is_kvarn else 0)
            return
        tokens = whole("sink_tokens", raw, least=0)
        if tokens and not self.is_kvarn:
            raise InputError(
                "sink_tokens",
                found=f"{tokens} with k={self.k!r}",
                needed="0: only KVarN layers keep sinks apart",
                hint="A tail keeps the newest rows exact",
            )
        if self.window is not None and tokens:  # rule C2: windowed layers have no sink
            raise InputError(
                "sink_tokens", found=f"{tokens} with window={self.window}", needed="0 with a window"
            )
        if tokens % GROUP:
            raise InputError("sink_tokens", found=tokens, needed=f"a multiple of {GROUP} (or 0)")
        put("sink_tokens", tokens)

    @property
    def gqa(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_kv_head

    @property
    def k_bits(self) -> int | None:
        """Code width of a KVarN K side in bits; None for a standard type."""
        return KVARN_BITS.get(self.k)

    @property
    def v_bits(self) -> int | None:
        """Code width of a KVarN V side in bits; None for a standard type."""
        return KVARN_BITS.get(self.v)

    @property
    def is_kvarn(self) -> bool:
        """True when both sides are KVarN records (rule A1: never just one)."""
        return self.k in KVARN_BITS


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOp:
    """The final built operation. If a kernel can see it, it is a field.

    ``n_q`` is the largest query count over the sequences, ``n_kv`` the largest row count; ``body``,
    ``stage``, ``tail`` and ``current`` say which row sources are present, ``sink_rows`` how many
    exact sink rows, ``tail_rows`` how many newest rows a query takes from the tail (0: the layer
    has none) and ``tail_dtype`` what they are; ``bodyless``: the tail is all there is (T9).
    ``bias_stride`` is in elements; ``alignment``, ``max_offset`` (the largest byte offset any
    kernel argument reaches) and ``scratch_bytes`` are in bytes. Built once per step and layer, so
    construction checks only what would make a field meaningless; tables check the rest.
    """

    kind: OpKind = OpKind.ATTEND
    device: str
    n_q: int
    n_kv: int
    n_seq: int = 1
    n_head: int
    n_kv_head: int
    head_dim_k: int
    head_dim_v: int
    k_type: str
    v_type: str
    layout: str = "line"
    attention: str = "dense"
    causal: bool = True
    window: int | None = None
    window_kind: str = "sliding"
    body: bool
    stage: bool
    tail: bool = False
    current: bool
    sink_rows: int = 0
    tail_rows: int = 0
    tail_dtype: str = "none"
    bodyless: bool = False
    q_dtype: str = "f32"
    kv_dtype: str = "f32"
    softcap: float = 0.0
    alibi: float = 0.0
    sink_logits: bool = False
    bias: str = "none"
    bias_stride: int = 0
    encoder: str = "published"
    queries: str = "none"
    activations: str = "auto"
    alignment: int = 64
    max_offset: int = 0
    scratch_bytes: int = 0

    def __post_init__(self) -> None:
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise InputError(
                "n_head",
                found=f"n_head={self.n_head} with n_kv_head={self.n_kv_head}",
                needed="n_head a whole multiple of n_kv_head >= 1",
            )

    @property
    def gqa(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_kv_head

    @property
    def k_bits(self) -> int | None:
        """Code width of a KVarN K side in bits; None for a standard type."""
        return KVARN_BITS.get(self.k_type)

    @property
    def v_bits(self) -> int | None:
        """Code width of a KVarN V side in bits; None for a standard type."""
        return KVARN_BITS.get(self.v_type)

    @property
    def is_kvarn(self) -> bool:
        """True when the body is KVarN records."""
        return self.k_type in KVARN_BITS

    @classmethod
    def for_layer(cls, spec: LayerSpec, device: str, **facts: Any) -> AttentionOp:
        """The operation of ``spec`` on ``device``; ``facts`` are the per-step fields.

        ``n_q``, ``n_kv``, ``body``, ``stage`` and ``current`` have no default and must be given.
        """
        from_spec: dict[str, Any] = {
            "n_head": spec.n_head,
            "n_kv_head": spec.n_kv_head,
            "head_dim_k": spec.head_dim,
            "head_dim_v": spec.head_dim_v,
            "k_type": spec.k,
            "v_type": spec.v,
            "attention": spec.attention,
            "window": spec.window,
            "window_kind": spec.window_kind,
            "causal": spec.causal,
            "softcap": spec.softcap,
            "alibi": spec.alibi,
            "sink_logits": spec.sink_logits,
            "encoder": spec.encoder,
        }
        return cls(device=device, **(from_spec | facts))

    def __str__(self) -> str:
        rows = [n for n in ("body", "stage", "tail", "current") if getattr(self, n)]
        rows += [f"sink{self.sink_rows}"] if self.sink_rows else []
        extra = [f"{f.name}={getattr(self, f.name)}" for f in _EXTRA if _differs(self, f)]
        window = "full" if self.window is None else f"window{self.window}"
        return " ".join(
            [
                f"{self.kind} {self.device} q{self.n_q} kv{self.n_kv} s{self.n_seq}",
                f"h{self.n_head}/{self.n_kv_head} d{self.head_dim_k}/{self.head_dim_v}",
                f"{self.k_type}/{self.v_type} {self.q_dtype}/{self.kv_dtype} {window}",
                f"rows={'+'.join(rows) or 'none'}",
                *extra,
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with every field and the schema id."""
        return {"schema": OP_SCHEMA} | {
            f.name: str(v) if isinstance(v := getattr(self, f.name), OpKind) else v
            for f in fields(self)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> AttentionOp:
        """The inverse of ``to_json``. Raises InputError for a wrong shape, key, type or schema."""
        return _op_from_json(data)


# Shown by __str__ only when they differ from the default: the line stays short, nothing is hidden.
_SHOWN = "kind device n_q n_kv n_seq n_head n_kv_head head_dim_k head_dim_v k_type v_type q_dtype "
_SHOWN += "kv_dtype window body stage tail current sink_rows"
_EXTRA = tuple(f for f in fields(AttentionOp) if f.name not in _SHOWN.split())
_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"int": (int,), "bool": (bool,), "str": (str,), "float": (int, float), "OpKind": (str,)}
    | {"int | None": (int, type(None))}
)


def _differs(op: AttentionOp, field: Any) -> bool:
    return bool(getattr(op, field.name) != field.default)


def _op_from_json(data: Mapping[str, Any] | str) -> AttentionOp:
    values = json_object(data, "op", OP_SCHEMA)
    known = {f.name: f for f in fields(AttentionOp)}
    check_keys(values, "op", {n for n, f in known.items() if f.default is MISSING}, set(known))
    for name, value in values.items():
        kinds = _TYPES[str(known[name].type)]
        # bool is an int for isinstance, but a flag where a count belongs is a broken file.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"op.{name}", found=repr(value), needed=str(known[name].type))
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"op.{name}", found=value, needed="a finite number")
    if "kind" in values:
        values["kind"] = OpKind(name_of("op.kind", values["kind"], [k.value for k in OpKind]))
    return AttentionOp(**values)

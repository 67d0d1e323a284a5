"""Argument kinds of the kernels that are shipped as IR: what a caller packs and a wrapper unpacks.

"int", "float" (float32), "double", "bool", or an array as ``<dtype>*<dimensions>``, C-contiguous. A
call is one int64 array: slot 0 takes the result, then every argument: its value, or an array's
address and shape.
"""

SIGNATURES: dict[str, tuple[str, ...]] = {
    # What a layer passes in every launch, what a step passes for all layers, what each call has.
    "attend.run_items": (
        "int", "int",
        "i8*1", "i8*1", "i8*1", "f4*1", "i8*1", "float", "float", "f4*1", "u1*1", "u2*1", "u1*1",
        "u2*1", "u2*1", "u2*1", "u2*1", "u2*1",
        "i8*2", "i8*2", "i8*2", "i4*1",
        "i8*2", "i8*1", "f4*1", "f4*1", "f4*1", "int", "f4*1", "f4*2", "f4*2", "f4*2", "f4*1",
        "bool", "f4*1", "f4*1",
    ),
    "merge.merge": (
        "i8*1", "i8*2", "i8*2", "f4*2", "f4*2", "f4*2", "f4*1", "bool", "f4*1", "f4*1",
    ),
    "rotate.largest_bits": ("f4*1", "f4*1", "f4*1"),
    "rotate.rotate_rows": ("f4*2", "f4*2"),
    "rotate.rotate_rows_to_half": ("f4*2", "u2*2"),
    "seal.seal_head": ("u2*1", "bool", "int", "f4*1", "f8*1", "u1*1", "u1*1"),
    "aware.seal_keys": (
        "u2*1", "f8*2", "bool", "int", "f4*1", "f8*1", "f8*1", "i8*1", "u1*1", "u1*1",
    ),
    "aware.seal_value": (
        "u2*1", "f8*2", "bool", "int", "f4*1", "f8*1", "f8*1", "i8*1", "u1*1", "u1*1",
    ),
    "metric.widen_keys": ("u2*1", "f8*1"),
    "metric.add_moments": ("u2*1", "f8*1", "double", "f8*1", "f8*1", "f8*1", "f8*1"),
    "lines.decode_head": ("u1*1", "bool", "int", "int", "f4*2"),
    "standard_rows.write_rows": (
        "f4*3", "int", "bool", "u1*1", "u2*1", "f4*1", "int", "int", "i8*2", "int", "int", "u1*1",
    ),
    "prefill.softmax_block": (
        "f4*1", "int", "i8*1", "int", "int", "int", "int", "int", "bool", "int", "float", "f4*1",
        "f4*1", "int", "int", "f4*1", "f4*1", "f4*1",
    ),
}  # fmt: skip


def dot_name(bits: int, rows: int, mode: str) -> str:
    """Name of a code micro-kernel in a bundle."""
    return f"dot_{bits}_{rows}_{mode}"


def matrix_name(rows: int, kind: int) -> str:
    """Name of a matrix micro-kernel in a bundle."""
    return f"matrix_{rows}_{kind}"

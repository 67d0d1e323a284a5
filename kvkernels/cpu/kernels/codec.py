"""The codec's Numba kernels under one name.

Arrays are C-contiguous; fp16 travels as ``uint16`` bits; ``bits`` is one of 2, 3, 4, 5, 6, 8 and
``D`` one of 64, 128, 256, 512: callers check, kernels do not.
"""

from kvkernels.cpu.kernels.lines import decode_groups, decode_head
from kvkernels.cpu.kernels.rotate import (
    first_nonfinite,
    largest_bits,
    rotate_rows,
    rotate_rows_to_half,
)
from kvkernels.cpu.kernels.seal import seal_head

__all__ = [
    "decode_groups",
    "decode_head",
    "first_nonfinite",
    "largest_bits",
    "rotate_rows",
    "rotate_rows_to_half",
    "seal_head",
]

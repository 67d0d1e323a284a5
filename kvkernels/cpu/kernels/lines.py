"""Numba kernels for the code bytes of the line layout and for decoding it (codec.md 5, 5b).

A block is 32 reductions x 16 outputs: lines of sixteen 32-bit words, one word per output, one byte
per reduction, and inside the byte one field per plane. A decoded value is ``(code * scale + zero)
* other`` with each operation rounded on its own, bit for bit ``reference.decode_tile``. A fused
multiply-add would give the same bits: an 8-bit code times an 11-bit significand is exact in fp32.
"""

import numpy as np

from kvkernels.cpu.kernels.half import half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.wide import either, field, load_codes, store_words, whole

_GROUP = 128
_NONE = np.int64(0)


@exact_inner
def _planes(bits):
    """(main, extra) widths of a line block; extra is 0 for one plane set (codec.md 5b)."""
    if bits == 3:
        return 2, 1
    if bits == 5:
        return 4, 1
    if bits == 6:
        return 4, 2
    return bits, 0


@exact_inner
def pack_lines(codes, n_red, n_out, bits, out, at):
    """codes uint8 [RED * OUT] -> code bytes of the record, uint8 ``out[at:]``."""
    main, extra = _planes(bits)
    for first in range(0, n_out, 16):
        for red in range(0, n_red, 32):
            shift, width = _NONE, main
            for _ in range(2 if extra else 1):  # the main fields, then what is left of the codes
                mask = (1 << width) - 1
                for step in range(width):
                    line = whole(_NONE)
                    for k in range(32 // width):  # one byte per reduction, fields side by side
                        plane = k // 4
                        row = red + 4 * (plane * width + step) + k % 4
                        code = load_codes(codes, row * n_out + first)
                        left = 8 * (k % 4) + plane * width
                        line = either(line, field(code, shift, mask, left))
                    store_words(out, at, line)
                    at += 64
                shift, width = main, extra


@exact_inner
def _unpack_block(words, main, extra, axes, red, out, rows, values):
    """Decode one line block into fp32 ``values [32, 16]`` ([reduction, output])."""
    mask, extra_mask = np.uint32((1 << main) - 1), np.uint32((1 << extra) - 1)
    high = words[16 * main :]
    left = np.uint32(main)
    other = np.empty(16, np.float32)
    for o in range(16):
        other[o] = half_to_float(axes[2 * rows + out + o])
    for quad in range(8):
        line = words[16 * (quad % main) : 16 * (quad % main) + 16]
        at = np.uint32((quad // main) * main)
        for i in range(4):
            right = at + np.uint32(8 * i)
            r = 4 * quad + i
            scale = half_to_float(axes[red + r])
            zero = half_to_float(axes[rows + red + r])
            value = values[r]
            if extra:
                top = high[16 * (quad % extra) : 16 * (quad % extra) + 16]
                down = np.uint32((quad // extra) * extra + 8 * i)
                for o in range(16):
                    code = (line[o] >> right) & mask
                    code |= ((top[o] >> down) & extra_mask) << left
                    value[o] = (np.float32(np.int32(code)) * scale + zero) * other[o]
            else:
                for o in range(16):
                    code = (line[o] >> right) & mask
                    value[o] = (np.float32(np.int32(code)) * scale + zero) * other[o]


@exact_kernel
def decode_head(record, is_value, bits, d, out):
    """Line records uint8 ``record [nbytes]`` -> fp32 ``out [128, d]``, rotated domain."""
    width = min(d, 128)
    rows, cols = (_GROUP, width) if is_value else (width, _GROUP)
    code_bytes = rows * cols * bits // 8
    nbytes = code_bytes + 4 * rows + 2 * cols
    main, extra = _planes(bits)
    block = 16 * bits
    values = np.empty((32, 16), np.float32)
    for s in range(d // width):
        words = record[s * nbytes : s * nbytes + code_bytes].view(np.uint32)
        axes = record[s * nbytes + code_bytes : (s + 1) * nbytes].view(np.uint16)
        at = 0
        for o in range(0, cols, 16):
            for r in range(0, rows, 32):
                _unpack_block(words[at : at + block], main, extra, axes, r, o, rows, values)
                at += block
                if is_value:
                    for i in range(32):
                        dest = out[r + i, s * width + o : s * width + o + 16]
                        source = values[i]
                        for j in range(16):
                            dest[j] = source[j]
                else:
                    for j in range(16):
                        dest = out[o + j, s * width + r : s * width + r + 32]
                        for i in range(32):
                            dest[i] = values[i, j]


@exact_kernel
def decode_groups(records, is_value, bits, d, out):
    """Line records uint8 ``records [n, nbytes]`` -> fp32 ``out [n, 128, d]``, rotated domain."""
    for i in range(records.shape[0]):
        decode_head(records[i], is_value, bits, d, out[i])

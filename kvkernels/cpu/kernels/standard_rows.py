"""Rows in and out of tiles of standard cache types: what ``kvkernels.quants`` does to GGML's bytes,
bit for bit, done in place.

``spans`` is int64 [n, 4]: (block of the pool, first token in its tile, tokens, first row of the
float32 side). A tile may be written in any order and by parts; other tokens' codes stay as they
are. Two threads must not write the same tile.
"""

import numpy as np
from numba import int64

from kvkernels.cpu.kernels.half import bf16_to_float, float_to_bf16, float_to_half, half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.simd import (
    hmax,
    load,
    splat,
    vabs,
    vmax,
    vmin,
    zero_unless_positive,
)
from kvkernels.cpu.kernels.standard import BF16, BLOCK, FLOAT32, Q8_0, bits_of, has_minimum
from kvkernels.cpu.kernels.tiles import GROUP
from kvkernels.cpu.kernels.wide import (
    either,
    field,
    half_away,
    load_codes,
    load_words,
    product,
    store_whole,
    store_words,
)

_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
#: above every finite quotient, below infinity
_LIMIT = np.float32(2.0**20)
_128, _NONE = np.float32(128.0), np.int64(0)


@exact_inner
def _first(x, at, size):
    """The first value of that magnitude in a block."""
    for i in range(at, at + BLOCK):
        if abs(x[i]) == size:
            return x[i]
    return _ZERO


@exact_inner
def _encode(x, at, kind, bits, codes):
    """Codes of the 32 values from ``at`` on; returns (scale, minimum)."""
    a, c = load(x, at), load(x, at + 16)
    high, low = hmax(vmax(a, c)), -hmax(vmax(splat(_ZERO) - a, splat(_ZERO) - c))
    steps, shift, start = np.float32((1 << bits) - 1), _HALF, _ZERO
    if has_minimum(kind):
        # Of -0.0 and +0.0 the first one counts.
        start = _first(x, at, _ZERO) if low == _ZERO else low
        scale = abs(high - start) / steps
    elif kind == Q8_0:
        scale = abs(max(high, -low)) / np.float32(127.0)
    else:
        # The value of largest magnitude, the first of equals, gets code 0; zeros count as +0.0.
        peak = high if high > -low else low
        if high == -low:
            peak = _first(x, at, high) if high != _ZERO else _ZERO
        middle = np.float32(1 << (bits - 1))
        scale, shift = peak / -middle, middle + _HALF
    inverse = _ONE / scale if scale != _ZERO else _ZERO
    for i in range(0, BLOCK, 16):
        value = product(load(x, at + i) - splat(start), splat(inverse))
        if kind != Q8_0:
            value = value + splat(shift)
        # Infinities and NaN, of a scale without an inverse, are 0.
        size = zero_unless_positive(vabs(value), splat(_LIMIT) - vabs(value))
        if kind == Q8_0:
            size = half_away(size)
            value = zero_unless_positive(size + size, value) + (splat(_128) - size)
        else:
            value = vmin(size, splat(steps))
        store_whole(codes, i, value)
    return scale, start


@exact_inner
def _put_key(codes, bits, tile, at, token):
    """32 codes of a token into the line tile of a block: its bytes hold nothing else."""
    at += token // 16 * 64 * bits + token % 16 * 4
    if bits == 8:
        for c in range(BLOCK):
            tile[at + c // 4 * 64 + c % 4] = codes[c]
        return
    for c in range(16):
        high = codes[c + 16] << np.uint8(4)
        tile[at + c // 4 * 64 + c % 4] = (codes[c] & np.uint8(15)) | (high & np.uint8(0xF0))
    if bits == 5:
        for i in range(4):
            tops = np.uint8(0)
            for quad in range(8):
                tops |= (codes[4 * quad + i] >> np.uint8(4)) << np.uint8(quad)
            tile[at + 256 + i] = tops


@exact_inner
def _merge(tile, at, codes, down, mask, left):
    """Bits ``down ..`` of 16 codes into a line, from bit ``left`` of its words on."""
    kept = field(load_words(tile, at), _NONE, ~(mask << left), _NONE)
    store_words(tile, at, either(kept, field(codes, down, mask, left)))


@exact_inner
def _put_value(codes, bits, tile, at, token):
    """32 codes of a token into the line tile of a block, beside those of other tokens."""
    main, quad, byte = 8 if bits == 8 else 4, token % 32 // 4, 8 * (token % 4)
    for out in range(2):
        part, line = load_codes(codes, 16 * out), at + (4 * out + token // 32) * 64 * bits
        left = byte + quad // main * main
        _merge(tile, line + quad % main * 64, part, _NONE, (1 << main) - 1, left)
        if bits == 5:
            _merge(tile, line + 256, part, int64(4), int64(1), byte + quad)


@exact_inner
def _field(bits, is_value, token, c):
    """(byte in the line tile of a block, bit of the low code bits in it, byte and bit of the fifth
    code bit) of a token and a channel of the block.
    """
    out, red = (c, token) if is_value else (token, c)
    depth, main = 4 if is_value else 1, 8 if bits == 8 else 4
    quad = red % 32 // 4
    byte = (out // 16 * depth + red // 32) * 64 * bits + out % 16 * 4 + red % 4
    return byte + quad % main * 64, quad // main * 4, byte + 256, quad


@exact_inner
def _element(is_value, dim, token, d):
    """Index of an element in a float tile."""
    return token * ((dim + 63) // 64 * 64) + d if is_value else d * GROUP + token


@exact_inner
def _write_floats(row, kind, is_value, floats, halves, at, token):
    """A row into a float tile at byte ``at``; V rows are filled up with zeros."""
    dim = row.shape[0]
    for d in range((dim + 63) // 64 * 64 if is_value else dim):
        value = row[d] if d < dim else _ZERO
        i = _element(is_value, dim, token, d)
        if kind == FLOAT32:
            floats[at // 4 + i] = value
        else:
            halves[at // 2 + i] = float_to_bf16(value) if kind == BF16 else float_to_half(value)


@exact_kernel
def write_rows(
    x, kind, is_value, pool, halves, floats, blocks, tile_bytes, spans, first_head, last_head, codes
):  # fmt: skip
    """Encode rows of heads ``first_head .. last_head`` of x float32 [rows, heads, D].

    pool: uint8 [heads, blocks, tile_bytes], flat; halves, floats: its uint16 and float32 views;
    kind: of ``columns.STANDARD``; codes: room for 32 bytes. x is finite.
    """
    dim, bits = x.shape[2], bits_of(kind)
    piece, n_blocks = GROUP * BLOCK // 8 * bits, dim // BLOCK
    for h in range(first_head, last_head):
        for s in range(spans.shape[0]):
            at = (h * blocks + spans[s, 0]) * tile_bytes
            for i in range(spans[s, 2]):
                token, row = spans[s, 1] + i, x[spans[s, 3] + i, h]
                if bits == 0:
                    _write_floats(row, kind, is_value, floats, halves, at, token)
                for b in range(n_blocks if bits > 0 else 0):
                    scale, low = _encode(row, b * BLOCK, kind, bits, codes)
                    axis = (at + n_blocks * piece) // 2 + b * GROUP + token
                    halves[axis] = float_to_half(scale)
                    if has_minimum(kind):
                        halves[axis + n_blocks * GROUP] = float_to_half(low)
                    if is_value:
                        _put_value(codes, bits, pool, at + b * piece, token)
                    else:
                        _put_key(codes, bits, pool, at + b * piece, token)


@exact_kernel
def read_rows(pool, halves, floats, kind, is_value, head_at, tile_bytes, spans, out):
    """Decode rows of one head, whose first tile is at byte ``head_at``, into float32 [rows, D]."""
    dim, bits = out.shape[1], bits_of(kind)
    piece, n_blocks = GROUP * BLOCK // 8 * bits, dim // BLOCK
    middle, mask = 1 << (bits - 1) if bits > 0 else 0, 255 if bits == 8 else 15
    for s in range(spans.shape[0]):
        at = head_at + spans[s, 0] * tile_bytes
        for i in range(spans[s, 2]):
            token, row = spans[s, 1] + i, out[spans[s, 3] + i]
            for d in range(dim):
                if bits == 0:
                    e = _element(is_value, dim, token, d)
                    if kind == FLOAT32:
                        row[d] = floats[at // 4 + e]
                    else:
                        half = halves[at // 2 + e]
                        row[d] = bf16_to_float(half) if kind == BF16 else half_to_float(half)
                    continue
                b = d // BLOCK
                main, bit, extra, top = _field(bits, is_value, token, d % BLOCK)
                code = (int64(pool[at + b * piece + main]) >> bit) & mask
                if bits == 5:
                    code |= ((int64(pool[at + b * piece + extra]) >> top) & 1) << 4
                axis = (at + n_blocks * piece) // 2 + b * GROUP + token
                scale = half_to_float(halves[axis])
                if has_minimum(kind):
                    low = half_to_float(halves[axis + n_blocks * GROUP])
                    row[d] = np.float32(code) * scale + low
                else:
                    row[d] = np.float32(code - middle) * scale

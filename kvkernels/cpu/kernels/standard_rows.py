"""Rows in and out of tiles of standard cache types: what ``kvkernels.quants`` does to GGML's bytes,
bit for bit, done in place.

``spans`` is int64 [n, 4]: (block of the pool, first token in its tile, tokens, first row of the
float32 side). A tile may be written in any order and by parts; other tokens' codes stay as they
are. Two threads must not write the same tile.
"""

import numpy as np

from kvkernels.cpu.kernels.half import float_to_half, half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.standard import BF16, BLOCK, Q8_0, bits_of, has_minimum
from kvkernels.cpu.kernels.tiles import GROUP

_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
_SIGN = np.uint32(0x80000000)


@exact_inner
def _to_bf16(bits):
    """float32 bits -> bf16 bits, nearest even; NaN stays NaN."""
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@exact_inner
def _inverse(scale):
    return _ONE / scale if scale != _ZERO else _ZERO


@exact_inner
def _whole(value, top):
    """Towards zero, at most ``top``; infinities and NaN, of a scale without an inverse, are 0."""
    return np.uint8(min(value, top)) if abs(value) < np.float32(np.inf) else np.uint8(0)


@exact_inner
def _signed(x, codes):
    """q8_0: 32 values -> codes + 128; returns the scale."""
    largest = _ZERO
    for i in range(BLOCK):
        largest = max(largest, abs(x[i]))
    scale = largest / np.float32(127.0)
    inverse = _inverse(scale)
    for i in range(BLOCK):
        value = x[i] * inverse
        size = abs(value)
        if not size < np.float32(1024.0):  # infinite or NaN
            size = _ZERO
        # Halves away from zero, without adding 0.5: the float32 below 0.5 would round up to 1.
        whole = np.int32(size)
        whole += np.int32(size - np.float32(whole) >= _HALF)
        codes[i] = np.uint8(128 - whole if value < _ZERO else 128 + whole)
    return scale


@exact_inner
def _from_peak(x, bits, codes):
    """q5_0, q4_0: the value of largest magnitude, the first of equals, gets code 0."""
    peak, largest = _ZERO, _ZERO
    for i in range(BLOCK):
        if abs(x[i]) > largest:
            peak, largest = x[i], abs(x[i])
    offset = np.float32(1 << (bits - 1))
    scale = peak / -offset
    inverse, shift, top = _inverse(scale), offset + _HALF, np.float32((1 << bits) - 1)
    for i in range(BLOCK):
        codes[i] = _whole(x[i] * inverse + shift, top)
    return scale


@exact_inner
def _from_minimum(x, bits, codes):
    """q5_1, q4_1: (scale, minimum)."""
    low, high = x[0], x[0]
    for i in range(1, BLOCK):  # of -0.0 and +0.0 the first one counts
        if x[i] < low:
            low = x[i]
        if x[i] > high:
            high = x[i]
    top = np.float32((1 << bits) - 1)
    scale = (high - low) / top
    inverse = _inverse(scale)
    for i in range(BLOCK):
        codes[i] = _whole((x[i] - low) * inverse + _HALF, top)
    return scale, low


@exact_inner
def _put_key(codes, bits, tile, at, token):
    """32 codes of a token into a line tile of 128 outputs: its bytes hold nothing else."""
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
def _put_value(codes, bits, tile, at, token):
    """32 codes of a token into a line tile of 128 reductions, beside those of other tokens."""
    line, quad = at + token // 32 * 64 * bits + token % 4, token % 32 // 4
    for c in range(BLOCK):
        # blocks of 16 outputs, each with 128 / 32 blocks of reductions
        byte = line + c // 16 * 4 * 64 * bits + c % 16 * 4
        if bits == 8:
            tile[byte + quad * 64] = codes[c]
            continue
        main, down = byte + quad % 4 * 64, np.uint8(quad // 4 * 4)
        kept = tile[main] & ~(np.uint8(15) << down)
        tile[main] = kept | ((codes[c] & np.uint8(15)) << down)
        if bits == 5:
            kept = tile[byte + 256] & ~(np.uint8(1) << np.uint8(quad))
            tile[byte + 256] = kept | ((codes[c] >> np.uint8(4)) << np.uint8(quad))


@exact_inner
def _code_at(bits, is_value, tile, at, token, c):
    """The code of a token and channel of one block, whose line tile begins at ``at``."""
    out, red = (c, token) if is_value else (token, c)
    depth = 4 if is_value else 1  # blocks of 32 reductions
    quad = red % 32 // 4
    byte = at + (out // 16 * depth + red // 32) * 64 * bits + out % 16 * 4 + red % 4
    if bits == 8:
        return np.int32(tile[byte + quad * 64])
    code = (np.int32(tile[byte + quad % 4 * 64]) >> (quad // 4 * 4)) & 15
    if bits == 5:
        code |= ((np.int32(tile[byte + 256]) >> quad) & 1) << 4
    return code


@exact_inner
def _element_at(is_value, dim, token, d):
    """Element of a float tile."""
    return token * ((dim + 63) // 64 * 64) + d if is_value else d * GROUP + token


@exact_inner
def _write_floats(row, kind, is_value, floats, halves, at, token):
    """A row into a float tile at byte ``at``; V rows are filled up with zeros."""
    dim = row.shape[0]
    bits = row.view(np.uint32)
    padded = (dim + 63) // 64 * 64 if is_value else dim
    for d in range(padded):
        i = _element_at(is_value, dim, token, d)
        inside = d < dim
        if kind == 0:
            floats[at // 4 + i] = row[d] if inside else _ZERO
        elif kind == BF16:
            halves[at // 2 + i] = _to_bf16(bits[d]) if inside else np.uint16(0)
        else:
            halves[at // 2 + i] = float_to_half(row[d]) if inside else np.uint16(0)


@exact_kernel
def write_rows(x, kind, is_value, pool, blocks, tile_bytes, spans, first_head, last_head):
    """Encode rows of heads ``first_head .. last_head`` of x float32 [rows, heads, D].

    pool: uint8 [heads, blocks, tile_bytes], flat; kind: of ``columns.STANDARD``. x is finite.
    """
    dim = x.shape[2]
    floats, halves = pool.view(np.float32), pool.view(np.uint16)
    bits, codes = bits_of(kind), np.empty(BLOCK, np.uint8)
    piece, n_blocks = GROUP * BLOCK // 8 * bits, dim // BLOCK
    for h in range(first_head, last_head):
        for s in range(spans.shape[0]):
            at = (h * blocks + spans[s, 0]) * tile_bytes
            for i in range(spans[s, 2]):
                token, row = spans[s, 1] + i, x[spans[s, 3] + i, h]
                if kind < Q8_0:
                    _write_floats(row, kind, is_value, floats, halves, at, token)
                    continue
                for b in range(n_blocks):
                    part = row[b * BLOCK : (b + 1) * BLOCK]
                    axis = (at + n_blocks * piece) // 2 + b * GROUP + token
                    if kind == Q8_0:
                        scale = _signed(part, codes)
                    elif has_minimum(kind):
                        scale, low = _from_minimum(part, bits, codes)
                        halves[axis + n_blocks * GROUP] = float_to_half(low)
                    else:
                        scale = _from_peak(part, bits, codes)
                    halves[axis] = float_to_half(scale)
                    if is_value:
                        _put_value(codes, bits, pool, at + b * piece, token)
                    else:
                        _put_key(codes, bits, pool, at + b * piece, token)


@exact_kernel
def read_rows(pool, kind, is_value, head_at, tile_bytes, spans, out):
    """Decode rows of one head, whose first tile is at byte ``head_at``, into float32 [rows, D]."""
    dim = out.shape[1]
    floats, halves = pool.view(np.float32), pool.view(np.uint16)
    bits = bits_of(kind)
    piece, n_blocks = GROUP * BLOCK // 8 * bits, dim // BLOCK
    offset = np.int32(1 << (bits - 1)) if bits > 0 and not has_minimum(kind) else np.int32(0)
    for s in range(spans.shape[0]):
        at = head_at + spans[s, 0] * tile_bytes
        for i in range(spans[s, 2]):
            token, row = spans[s, 1] + i, out[spans[s, 3] + i]
            for d in range(dim):
                e = _element_at(is_value, dim, token, d)
                if kind == 0:
                    row[d] = floats[at // 4 + e]
                elif kind == BF16:
                    row.view(np.uint32)[d] = np.uint32(halves[at // 2 + e]) << np.uint32(16)
                elif kind < Q8_0:
                    row[d] = half_to_float(halves[at // 2 + e])
                else:
                    b = d // BLOCK
                    axis = (at + n_blocks * piece) // 2 + b * GROUP + token
                    code = _code_at(bits, is_value, pool, at + b * piece, token, d % BLOCK)
                    value = np.float32(code - offset) * half_to_float(halves[axis])
                    if has_minimum(kind):
                        value += half_to_float(halves[axis + n_blocks * GROUP])
                    row[d] = value

"""Integer dot products of four bytes, per instruction set: the one place that names CPU
instructions.

``codes`` are 16 lanes of four unsigned bytes (an ``I32V``), an activation is one scalar of four
signed bytes. Sums are exact integers on every instruction set, so kernels give the same bits
whichever is used.
"""

from llvmlite import ir

from kvkernels.cpu.kernels.simd import I32, I32V, LANES, call_llvm, const_vector, splat_value

I8, I16 = ir.IntType(8), ir.IntType(16)
_BYTES64 = ir.VectorType(I8, 64)


def _zero():
    return const_vector(I32V, [0] * LANES)


def _part(builder, value, index, parts):
    """Piece ``index`` of a vector cut into ``parts``."""
    size = value.type.count // parts
    lanes = ir.Constant(ir.VectorType(I32, size), [index * size + i for i in range(size)])
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)


def _joined(builder, pieces):
    """Concatenate equal vectors, pairwise."""
    while len(pieces) > 1:
        size = pieces[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, 2 * size), list(range(2 * size)))
        pieces = [
            builder.shuffle_vector(a, b, lanes)
            for a, b in zip(pieces[::2], pieces[1::2], strict=True)
        ]
    return pieces[0]


class Generic:
    """Plain multiplications: any CPU."""

    wide_codes = True  # takes 8-bit codes as they are

    def zero(self):
        """Start of a running sum."""
        return _zero()

    def adds(self, bits):
        """How many ``add`` of codes of that width fit before ``finish``."""
        return 1 << 20

    def add(self, builder, total, codes, act):
        """total + sum over four bytes of code * activation."""
        mask = const_vector(I32V, [255] * LANES)
        for i in range(4):
            shift = const_vector(I32V, [8 * i] * LANES)
            code = builder.and_(builder.lshr(codes, shift), mask)
            byte = builder.trunc(builder.lshr(act, I32(8 * i)), I8)
            value = splat_value(builder, builder.sext(byte, I32), I32V)
            total = builder.add(total, builder.mul(code, value))
        return total

    def finish(self, builder, total):
        """The running sum as 16 int32 lanes."""
        return total


class _Pieces(Generic):
    """Instructions on a part of the 16 lanes: ``dot`` works on one of ``parts`` pieces."""

    parts = 1

    def add(self, builder, total, codes, act):
        value = splat_value(builder, act, I32V)
        done = [
            self.dot(
                builder,
                _part(builder, total, i, self.parts),
                _part(builder, codes, i, self.parts),
                _part(builder, value, i, self.parts),
            )
            for i in range(self.parts)
        ]
        return _joined(builder, done)

    def dot(self, builder, total, codes, value):
        raise AssertionError("an instruction set defines dot")  # pragma: no cover


class Avx512Vnni(Generic):
    """``vpdpbusd zmm``."""

    def add(self, builder, total, codes, act):
        value = splat_value(builder, act, I32V)
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", I32V, [total, codes, value])


class AvxVnni(_Pieces):
    """``vpdpbusd ymm``."""

    parts = 2

    def dot(self, builder, total, codes, value):
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, [total, codes, value])


class NeonDot(_Pieces):
    """``sdot``: signed bytes, so an 8-bit code has to come in two halves."""

    parts = 4
    wide_codes = False

    def dot(self, builder, total, codes, value):
        kind = ir.VectorType(I8, 16)
        args = [total, builder.bitcast(codes, kind), builder.bitcast(value, kind)]
        return call_llvm(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, args)


class Avx2(Generic):
    """``vpmaddubsw``: sums of pairs in 16 bits, widened before they can overflow."""

    wide_codes = False
    _words = ir.VectorType(I16, 32)

    def zero(self):
        return ir.Constant(self._words, [0] * 32)

    def adds(self, bits):
        # |pair| <= 2 * 128 * (2**bits - 1) must stay below 2**15.
        return max(1, 32767 // (256 * ((1 << bits) - 1)))

    def add(self, builder, total, codes, act):
        value = splat_value(builder, act, I32V)
        half = ir.VectorType(I8, 32)
        pairs = []
        for i in range(2):
            args = [builder.bitcast(_part(builder, x, i, 2), half) for x in (codes, value)]
            words = ir.VectorType(I16, 16)
            pairs.append(call_llvm(builder, "llvm.x86.avx2.pmadd.ub.sw", words, args))
        return builder.add(total, _joined(builder, pairs))

    def finish(self, builder, total):
        words, wide = ir.VectorType(I16, 16), ir.VectorType(I32, 8)
        ones = ir.Constant(words, [1] * 16)
        return _joined(
            builder,
            [
                call_llvm(
                    builder, "llvm.x86.avx2.pmadd.wd", wide, [_part(builder, total, i, 2), ones]
                )
                for i in range(2)
            ],
        )


#: name -> emitter, fastest first; ``kvkernels.cpu.features`` decides which one a CPU can run
EMITTERS = {
    "avx512_vnni": Avx512Vnni(),
    "avx_vnni": AvxVnni(),
    "avx2": Avx2(),
    "neon_dot": NeonDot(),
    "generic": Generic(),
}

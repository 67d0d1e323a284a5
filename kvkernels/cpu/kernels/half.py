"""fp16 and bf16 for Numba, which cannot index such arrays: kernels take ``uint16`` views and
convert here.

Both directions of fp16 are single LLVM casts (``vcvtph2ps`` / ``vcvtps2ph`` with
round-to-nearest-even on x86).
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_HALF = ir.HalfType()
_SHORT, _WORD = ir.IntType(16), ir.IntType(32)


@intrinsic
def half_to_float(_, bits):
    """``uint16`` fp16 bits -> ``float32``, exact."""
    if bits != types.uint16:
        return None

    def codegen(_context, builder, _signature, args):
        return builder.fpext(builder.bitcast(args[0], _HALF), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(_, value):
    """``float32`` -> ``uint16`` fp16 bits, round to nearest even; overflow gives infinity."""
    if value != types.float32:
        return None

    def codegen(_context, builder, _signature, args):
        return builder.bitcast(builder.fptrunc(args[0], _HALF), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def bf16_to_float(_, bits):
    """``uint16`` bf16 bits -> ``float32``, exact."""
    if bits != types.uint16:
        return None

    def codegen(_context, builder, _signature, args):
        wide = builder.zext(args[0], _WORD)
        return builder.bitcast(builder.shl(wide, _WORD(16)), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_bf16(_, value):
    """``float32`` -> ``uint16`` bf16 bits, round to nearest even; every NaN gives the same one."""
    if value != types.float32:
        return None

    def codegen(_context, builder, _signature, args):
        bits = builder.bitcast(args[0], _WORD)
        odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
        rounded = builder.add(builder.add(bits, odd), _WORD(0x7FFF))
        short = builder.trunc(builder.lshr(rounded, _WORD(16)), _SHORT)
        return builder.select(builder.fcmp_unordered("uno", *args, *args), _SHORT(0x7FC0), short)

    return types.uint16(types.float32), codegen

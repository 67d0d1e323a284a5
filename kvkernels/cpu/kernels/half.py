"""fp16 for Numba, which cannot index float16 arrays: kernels take ``uint16`` views and convert
here.

Both directions are single LLVM casts (``vcvtph2ps`` / ``vcvtps2ph`` with round-to-nearest-even on
x86).
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_HALF = ir.HalfType()


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

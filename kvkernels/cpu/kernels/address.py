"""Calling a micro-kernel through its address."""

from llvmlite import ir

_I64 = ir.IntType(64)


def call_address(context, builder, sig, args, kinds):
    """Emit ``function(pointers.., int64s..)`` for intrinsic arguments (address, array, offset, ..,
    int64s ..).

    ``kinds``: element type of each pointer parameter; a pointer is the array's data plus its offset
    in elements.
    """

    def pointer(position, kind):
        array = context.make_array(sig.args[position])(context, builder, args[position])
        at = builder.gep(array.data, [args[position + 1]])
        return builder.bitcast(at, kind.as_pointer())

    rest = args[1 + 2 * len(kinds) :]
    parameters = [k.as_pointer() for k in kinds] + [_I64] * len(rest)
    function = ir.FunctionType(ir.VoidType(), parameters).as_pointer()
    pointers = [pointer(1 + 2 * i, kind) for i, kind in enumerate(kinds)]
    builder.call(builder.inttoptr(args[0], function), [*pointers, *rest])

"""Instructions that numba has no name for: prefetch, 64 x 64 -> 128 bit product, crc32c."""

import platform

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_CRC32 = platform.machine() in ("x86_64", "AMD64") and bool(
    binding.get_host_cpu_features().get("sse4.2", False)
)
_I32, _I64, _I128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_BYTE_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def _prefetch(typingctx, array, index):
    """Ask for the cache line of array[index]; no access, so any index is harmless."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, value=args[0])
        place = builder.bitcast(builder.gep(view.data, [args[1]]), _BYTE_POINTER)
        function_type = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [place, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def _mulhi(typingctx, a, b):
    """Upper 64 bits of the product of two uint64."""

    def codegen(context, builder, signature, args):
        wide = [builder.zext(x, _I128) for x in args]
        return builder.trunc(builder.lshr(builder.mul(*wide), _I128(64)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def _crc32_u64(typingctx, crc, word):
    """One step of crc32c over eight bytes, by the processor."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(_I64, [_I64, _I64])
        function = cgutils.get_or_insert_function(
            builder.module, function_type, "llvm.x86.sse42.crc32.64.64"
        )
        return builder.call(function, args)

    return types.uint64(types.uint64, types.uint64), codegen


if config.DISABLE_JIT:

    def prefetch(array, index):
        """Nothing: there is no cache to warm in plain Python."""

    def mulhi(a, b):
        """Upper 64 bits of the product of two uint64."""
        return np.uint64((int(a) * int(b)) >> 64)

else:

    @njit(inline="always")
    def prefetch(array, index):
        """Ask for the cache line of array[index]."""
        _prefetch(array, index)

    @njit(inline="always")
    def mulhi(a, b):
        """Upper 64 bits of the product of two uint64."""
        return _mulhi(a, b)


crc32_u64 = _crc32_u64

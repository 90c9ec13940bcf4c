"""Machine instructions that numba lacks, each with a plain Python path for runs without the JIT."""

import ctypes
import platform

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.core.config import DISABLE_JIT
from numba.extending import intrinsic

_BITS = 0xFFFF_FFFF_FFFF_FFFF
_BYTE, _INT32, _INT64, _INT128 = (ir.IntType(bits) for bits in (8, 32, 64, 128))


def _or_python(python):
    """Decorator of a typing function: an intrinsic, or `python` itself if the JIT is off."""

    def choose(typing):
        return python if DISABLE_JIT else intrinsic(typing)

    return choose


def has_crc32() -> bool:
    """Whether this CPU has an instruction for crc32c (SSE4.2)."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and bool(get_host_cpu_features().get("sse4.2"))


def _of_two(python, build):
    """An instruction of two numbers; uint64, uint64 -> uint64."""

    @_or_python(lambda a, b: np.uint64(python(int(a), int(b)) & _BITS))
    def instruction(_context, a, b):
        def codegen(_context, builder, _signature, args):
            return build(builder, *args)

        return types.uint64(types.uint64, types.uint64), codegen

    return instruction


def _high_half(builder, a, b):
    wide = builder.mul(builder.zext(a, _INT128), builder.zext(b, _INT128))
    return builder.trunc(builder.lshr(wide, ir.Constant(_INT128, 64)), _INT64)


# sums, differences and products of which the low 64 bits count; the high 64 bits of a product
wrap_add = _of_two(lambda a, b: a + b, lambda builder, a, b: builder.add(a, b))
wrap_sub = _of_two(lambda a, b: a - b, lambda builder, a, b: builder.sub(a, b))
wrap_mul = _of_two(lambda a, b: a * b, lambda builder, a, b: builder.mul(a, b))
mulhi = _of_two(lambda a, b: a * b >> 64, _high_half)


@_or_python(lambda word: np.int64(int(word).bit_count()))
def popcount(_context, word):
    """Bits that are 1; uint64 -> int64."""

    def codegen(_context, builder, _signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


def _place(context, builder, signature, args, array, at):
    """Pointer to an element of an argument, an array, that is given by its number."""
    view = context.make_array(signature.args[array])(context, builder, args[array])
    return builder.gep(view.data, [at])


def _ask(context, builder, signature, args, at):
    """Prefetch element `at` of the first argument, an array."""
    place = _place(context, builder, signature, args, 0, at)
    address = builder.bitcast(place, _BYTE.as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT32, _INT32, _INT32]),
        "llvm.prefetch.p0",
    )
    read, keep, data = (ir.Constant(_INT32, value) for value in (0, 3, 1))
    builder.call(function, [address, read, keep, data])
    return context.get_dummy_value()


@_or_python(lambda array, index: None)
def prefetch(_context, array, index):
    """Ask for the cache line of array[index], to be read soon; any index is harmless.

    array   any dtype, C-contiguous, one-dimensional
    index   any integer
    """

    def codegen(context, builder, signature, args):
        at = context.cast(builder, args[1], signature.args[1], types.intp)
        return _ask(context, builder, signature, args, at)

    if isinstance(array, types.Array) and isinstance(index, types.Integer):
        return types.void(array, index), codegen
    return None


def _element(builder, signature, args):
    """The element of the first argument, an array, in which the second argument, a bit, lies."""
    width = signature.args[0].dtype.bitwidth
    return builder.ashr(args[1], ir.Constant(_INT64, width.bit_length() - 1))


@_or_python(lambda data, bit: None)
def prefetch_bit(_context, data, bit):
    """Ask for the cache line in which a bit of an array lies; integers (any,), int64."""

    def codegen(context, builder, signature, args):
        return _ask(context, builder, signature, args, _element(builder, signature, args))

    return types.void(data, types.int64), codegen


def _bits_from(data, bit):
    size = 8 * data.itemsize
    if size == 8:
        word = int.from_bytes(data[int(bit) >> 3 : (int(bit) >> 3) + 8].tobytes(), "little")
        return np.uint64(word >> (int(bit) & 7))
    return np.uint64(data[int(bit) // size])


@_or_python(_bits_from)
def load_bits(_context, data, bit):
    """The number that begins at a bit of a stream, with what lies above it; not checked.

    data   uint8 (any,): the number begins anywhere, the 8 bytes from its first one on are there;
           uint32 or uint64 (any,): each number is an element
    bit    int64

    -> uint64
    """

    def codegen(context, builder, signature, args):
        at = _element(builder, signature, args)
        address = _place(context, builder, signature, args, 0, at)
        if (width := signature.args[0].dtype.bitwidth) > 8:
            number = builder.load(address)
            return number if width == 64 else builder.zext(number, _INT64)
        address = builder.bitcast(address, _INT64.as_pointer())
        shift = builder.and_(args[1], ir.Constant(_INT64, 7))
        return builder.lshr(builder.load(address, align=1), shift)

    return types.uint64(data, types.int64), codegen


def _copy_slice(source, start, target, at, num_bytes):
    target[int(at) : int(at + num_bytes)] = source[int(start) : int(start + num_bytes)]


@_or_python(_copy_slice)
def copy_bytes(_context, source, start, target, at, num_bytes):
    """target[at : at + num_bytes] = source[start : start + num_bytes], not overlapping.

    source, target         uint8 (any,)   C-contiguous; the range is not checked
    start, at, num_bytes   int64
    """

    def codegen(context, builder, signature, args):
        of = _place(context, builder, signature, args, 0, args[1])
        to = _place(context, builder, signature, args, 2, args[3])
        cgutils.raw_memcpy(builder, to, of, args[4], 1)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), codegen


VECTOR = 32  # bytes that `stream_vector` writes


def _vector_slice(source, start, target, at):
    target[int(at) : int(at) + VECTOR] = source[int(start) : int(start) + VECTOR]


@_or_python(_vector_slice)
def stream_vector(_context, source, start, target, at):
    """target[at : at + VECTOR] = source[start : start + VECTOR], past the caches.

    source, target   uint8 (any,)   C-contiguous; the range is not checked
    start, at        int64          what it writes must begin at a multiple of VECTOR in memory

    Others see it after the next `fence`.
    """

    def codegen(context, builder, signature, args):
        vector = ir.VectorType(_INT64, VECTOR // 8).as_pointer()
        of = _place(context, builder, signature, args, 0, args[1])
        to = _place(context, builder, signature, args, 2, args[3])
        piece = builder.load(builder.bitcast(of, vector), align=1)
        stored = builder.store(piece, builder.bitcast(to, vector), align=VECTOR)
        once = builder.module.add_metadata([ir.Constant(_INT32, 1)])
        stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), codegen


@_or_python(lambda: None)
def fence(_context):
    """All that was written so far is seen by others before what is written afterwards."""

    def codegen(context, builder, _signature, _args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


LANES = 16  # that `add_lanes` adds at once


def _add_slice(target, at, source):
    target[int(at) : int(at) + LANES] += source[:LANES]


@_or_python(_add_slice)
def add_lanes(_context, target, at, source):
    """target[at : at + LANES] += source[:LANES], one vector; the ranges are not checked.

    target, source   float32 or float64 (any,)   C-contiguous, of one dtype
    at               int64
    """

    def codegen(context, builder, signature, args):
        dtype = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(dtype)
        vector = ir.VectorType(dtype, LANES).as_pointer()
        to = _place(context, builder, signature, args, 0, args[1])
        of = context.make_array(signature.args[2])(context, builder, args[2]).data
        place = builder.bitcast(to, vector)
        total = builder.fadd(
            builder.load(place, align=size), builder.load(builder.bitcast(of, vector), align=size)
        )
        builder.store(total, place, align=size)
        return context.get_dummy_value()

    return types.void(target, types.int64, source), codegen


def _crc32_word(crc, word):
    crc = int(crc) ^ int(word)
    for _ in range(64):
        crc = (crc >> 1) ^ (0x82F6_3B78 if crc & 1 else 0)
    return np.uint64(crc)


@_or_python(_crc32_word)
def crc32_word(_context, crc, word):
    """crc32c continued by eight bytes, by the instruction; only if `has_crc32()`.

    crc, word   uint64   the crc in the low half, not inverted; bytes in little-endian order
    """

    def codegen(_context, builder, _signature, args):
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INT64, [_INT64, _INT64]), "llvm.x86.sse42.crc32.64.64"
        )
        return builder.call(function, args)

    return types.uint64(types.uint64, types.uint64), codegen


# System calls are called as functions of libc by name, which the linker of the compiled code
# resolves: no address gets into a kernel that is kept on disk.


def _preadv(fd, iovecs, low, high, offset):
    call = ctypes.CDLL(None).preadv
    call.restype = ctypes.c_int64
    address = ctypes.c_void_p(iovecs.ctypes.data + 16 * int(low))
    return call(int(fd), address, int(high - low), ctypes.c_int64(int(offset)))


@_or_python(_preadv)
def preadv(_context, fd, iovecs, low, high, offset):
    """libc's `preadv` from byte `offset` on into buffers [low, high); bytes read, or -1; int64.

    fd, low, high, offset   int64
    iovecs                  uint64 (2 * buffers,)   address and bytes of each
    """

    def codegen(context, builder, signature, args):
        at = builder.mul(args[2], ir.Constant(_INT64, 2))
        first = _place(context, builder, signature, args, 1, at)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(_INT64, [_INT32, _BYTE.as_pointer(), _INT32, _INT64]),
            "preadv",
        )
        count = builder.trunc(builder.sub(args[3], args[2]), _INT32)
        buffers = builder.bitcast(first, _BYTE.as_pointer())
        return builder.call(function, [builder.trunc(args[0], _INT32), buffers, count, args[4]])

    return types.int64(types.int64, iovecs, types.int64, types.int64, types.int64), codegen


_SYS_ENTER, _GET_EVENTS = 426, 1


def _enter_ring(fd, count):
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_int64
    return call(_SYS_ENTER, int(fd), int(count), 1, _GET_EVENTS, None, ctypes.c_size_t(0))


@_or_python(_enter_ring)
def enter_ring(_context, fd, count):
    """io_uring_enter: hand over `count` entries, and wait for one completion.

    Returns how many were taken, or -1, int64; int64, int64 -> int64.
    """

    def codegen(_context, builder, _signature, args):
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INT64, [_INT64], var_arg=True), "syscall"
        )
        number, one, events, none = (
            ir.Constant(_INT64, value) for value in (_SYS_ENTER, 1, _GET_EVENTS, 0)
        )
        return builder.call(function, [number, args[0], args[1], one, events, none, none])

    return types.int64(types.int64, types.int64), codegen


@_or_python(lambda words, index: words[int(index)])
def load_shared(_context, words, index):
    """words[index], before anything that is read after it; uint32 (any,), int64 -> uint32."""

    def codegen(context, builder, signature, args):
        place = _place(context, builder, signature, args, 0, args[1])
        return builder.load_atomic(place, "acquire", 4)

    return types.uint32(words, types.int64), codegen


def _store_item(words, index, value):
    words[int(index)] = value


@_or_python(_store_item)
def store_shared(_context, words, index, value):
    """words[index] = value, after all that was written before; uint32 (any,), int64, uint32."""

    def codegen(context, builder, signature, args):
        place = _place(context, builder, signature, args, 0, args[1])
        builder.store_atomic(args[2], place, "release", 4)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.uint32), codegen

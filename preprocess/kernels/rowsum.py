"""Sums of rows in registers, by vector instructions that numba does not generate from loops."""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_TILES = 64, 32, 16, 8, 4, 2, 1  # columns summed at once: the widest that fit
_AHEAD_LINES = 32  # cache lines being prefetched, for all edges together
_LINE_ITEMS = 16  # float32 in a cache line
NO_ROW = -1  # as `own`: no row is added first
MORE = -2  # as `own`: no row is added first, but the output's current value
_BYTE, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 32, 64))


class RowTable(NamedTuple):
    """The table of rows that are added up."""

    rows: NDArray[np.float32]  # (any,) rows of `width` numbers
    width: int
    first: int  # the source whose row is row 0


class RowSources(NamedTuple):
    """The sources of edges, whose rows are added up."""

    data: NDArray[np.uint8]  # with a stream of bits: for each source, its difference to `base`
    bits: int
    base: np.uint64
    start: np.int64  # bit at which the source of edge 0 begins
    weights: NDArray[np.float32] | None  # None: each edge weighs 1
    limit: np.int64  # rows are prefetched for edges below this one


def _int64(value):
    return ir.Constant(_INT64, value)


class _Emitter:
    """Emits the instructions of one call; `given` holds its arguments by name."""

    def __init__(self, builder, given):
        """`given`: addresses of arrays, integers as int64, `times` as float32."""
        self._builder, self._given = builder, given
        self._fetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT32, _INT32, _INT32]),
            "llvm.prefetch.p0",
        )

    def all_columns(self):
        """Sum all columns: the widest tile as often as it fits, the others at most once each."""
        builder, width, start = self._builder, self._given["width"], _int64(0)
        for tile in _TILES:
            stop = builder.and_(width, _int64(-tile))
            with cgutils.for_range_slice(builder, start, stop, _int64(tile)) as (column, _):
                self._sum(tile, column)
            start = stop

    def _sum(self, tile, column):
        builder, given = self._builder, self._given
        vector = ir.VectorType(ir.FloatType(), tile)
        total = cgutils.alloca_once(builder, vector)
        builder.store(ir.Constant(vector, [0.0] * tile), total)
        with builder.if_then(builder.icmp_signed(">=", given["own"], _int64(0))):
            builder.store(self._load(self._row(given["own"], column), vector), total)
        one = _int64(1)
        with cgutils.for_range_slice(builder, given["low"], given["high"], one) as (edge, count):
            self._ask_ahead(edge, column, tile)
            row = self._load(self._row(self._source(edge), column), vector)
            if given["weights"] is not None:
                at = builder.add(given["weight_at"], count)
                weight = builder.load(builder.gep(given["weights"], [at]))
                row = builder.fmul(row, self._splat(weight, tile))
            builder.store(builder.fadd(builder.load(total), row), total)
        place = builder.gep(given["out"], [builder.add(given["at"], column)])
        with builder.if_then(builder.icmp_signed("==", given["own"], _int64(MORE))):
            builder.store(builder.fadd(builder.load(total), self._load(place, vector)), total)
        result = builder.fmul(builder.load(total), self._splat(given["times"], tile))
        builder.store(result, builder.bitcast(place, vector.as_pointer()), align=4)

    def _ask_ahead(self, edge, column, tile):
        """Prefetch the row of a later edge, if there is one."""
        builder, limit = self._builder, self._given["limit"]
        ahead = _AHEAD_LINES // max(1, tile // _LINE_ITEMS)
        later = builder.add(edge, _int64(ahead))
        later = builder.select(builder.icmp_signed("<", later, limit), later, edge)
        row = self._row(self._source(later), column)
        for item in range(0, tile, _LINE_ITEMS):
            line = builder.bitcast(builder.gep(row, [_int64(item)]), _BYTE.as_pointer())
            read, keep, data = (ir.Constant(_INT32, value) for value in (0, 3, 1))
            builder.call(self._fetch, [line, read, keep, data])

    def _source(self, edge):
        """Number of the row of an edge."""
        builder = self._builder
        given, bits = self._given, self._given["bits"]
        bit = builder.add(given["start"], builder.mul(edge, bits))
        place = builder.gep(given["data"], [builder.lshr(bit, _int64(3))])
        word = builder.load(builder.bitcast(place, _INT64.as_pointer()), align=1)
        word = builder.lshr(word, builder.and_(bit, _int64(7)))
        mask = builder.lshr(_int64(-1), builder.sub(_int64(64), bits))
        return builder.add(builder.and_(word, mask), builder.sub(given["base"], given["first"]))

    def _row(self, number, column):
        start = self._builder.add(self._builder.mul(number, self._given["width"]), column)
        return self._builder.gep(self._given["rows"], [start])

    def _load(self, place, vector):
        return self._builder.load(self._builder.bitcast(place, vector.as_pointer()), align=4)

    def _splat(self, number, tile):
        vector = ir.VectorType(ir.FloatType(), tile)
        first = ir.Constant(_INT32, 0)
        one = self._builder.insert_element(ir.Constant(vector, ir.Undefined), number, first)
        mask = ir.Constant(ir.VectorType(_INT32, tile), [0] * tile)
        return self._builder.shuffle_vector(one, one, mask)


@intrinsic
def sum_rows(_context, table, edges, low, high, weight_at, out, at, own, times):
    """out[at : at + width] = times * (own row + rows of edges [+ the value in `out`, if MORE]).

    table       RowTable
    edges       RowSources   edges [low, high) are used; edge `low` has the weight at `weight_at`
    own         int          number of a row that is added first, NO_ROW, or MORE
    times       float32

    Rows are added one by one, so the sum of a column does not depend on the other columns.
    """
    whole = low, high, weight_at, at, own
    assert all(isinstance(kind, types.Integer) for kind in whole)
    assert times == types.float32
    names = "low", "high", "weight_at", "at", "own", "times"

    def codegen(context, builder, signature, args):
        def array(kind, value):
            return context.make_array(kind)(context, builder, value).data

        def fields(number):
            kind, value = signature.args[number], args[number]
            for i, (name, of) in enumerate(zip(kind.fields, kind.types, strict=True)):
                field = builder.extract_value(value, i)
                if isinstance(of, types.Array):
                    given[name] = array(of, field)
                elif isinstance(of, types.Integer):
                    given[name] = context.cast(builder, field, of, types.int64)
                else:
                    given[name] = None

        given = dict(zip(names, (*args[2:5], *args[6:]), strict=True))
        given["out"] = array(signature.args[5], args[5])
        fields(0)
        fields(1)
        _Emitter(builder, given).all_columns()
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(table, edges, i64, i64, i64, out, i64, i64, types.float32), codegen

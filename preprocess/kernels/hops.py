"""Rows of neighbors added up, column by column of graph blocks as they are on disk."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.config import DISABLE_JIT
from numba.extending import intrinsic

from blockstore.format import (
    BLOCK_HEADER,
    EDGES_START_OFFSET,
    LAST_DEGREE_OFFSET,
    NUM_CARRIED_OFFSET,
    NUM_EDGES_OFFSET,
    NUM_NODES_OFFSET,
)
from blockstore.kernels.intrinsics import prefetch

LINE_ITEMS = 16  # float32 in a cache line
CHUNK_EDGES = 128  # summed in registers, then added to the sum: errors grow with chunks, not edges
_AHEAD_LINES = 32  # that are on their way from memory, of all edges together

_FIRST_NODE = 2  # where things are in a block, in words of 32 bits
_LAST_DEGREE = LAST_DEGREE_OFFSET // 4
_NUM_NODES = NUM_NODES_OFFSET // 4
_NUM_EDGES = NUM_EDGES_OFFSET // 4
_NUM_CARRIED = NUM_CARRIED_OFFSET // 4
_EDGES_START = EDGES_START_OFFSET // 4
_OFFSETS = BLOCK_HEADER.size // 4
_BYTE, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 32, 64))


def _make_sum(tile, weighted):
    """An intrinsic: out[at : at + tile] = times * (own row + rows of edges + what is there).

    rows        float32 (any,)            rows of `width` numbers; `column`: the first that counts
    sources     uint32 or uint64 (any,)   of each edge; [low, high) count, rows of those up to
                                          `limit` are asked for ahead; `first` is row 0
    weights     float32 (any,)            edge `low` has that at `weight_at`
    own         int                       a row that is added first; negative: none
    fresh       int                       not 0: what is there does not count

    Rows are summed in registers, one by one.
    """

    def python(
        rows, width, column, sources, low, high, limit, first, weights, weight_at, out, at, own,
        fresh, times,
    ):  # fmt: skip
        assert high <= limit
        place = int(own) * int(width) + int(column)
        total = rows[place : place + tile].copy() if own >= 0 else np.zeros(tile, np.float32)
        for e in range(int(low), int(high)):
            start = (int(sources[e]) - int(first)) * int(width) + int(column)
            row = rows[start : start + tile]
            total += row * weights[int(weight_at) + e - int(low)] if weighted else row
        if not fresh:
            total += out[int(at) : int(at) + tile]
        out[int(at) : int(at) + tile] = total * times

    if DISABLE_JIT:
        return python

    @intrinsic
    def summed(
        _context, rows, width, column, sources, low, high, limit, first, weights, weight_at, out,
        at, own, fresh, times,
    ):  # fmt: skip
        whole = (width, column, low, high, limit, first, weight_at, at, own, fresh)
        assert all(isinstance(kind, types.Integer) for kind in whole)
        assert times == types.float32

        def codegen(context, builder, signature, args):
            data = {
                i: context.make_array(signature.args[i])(context, builder, args[i]).data
                for i in (0, 3, 8, 10)
            }
            width, column, low, high, limit, first = (args[i] for i in (1, 2, 4, 5, 6, 7))
            vector = ir.VectorType(ir.FloatType(), tile)
            zero = ir.Constant(vector, [0.0] * tile)
            nothing = ir.Constant(_INT64, 0)
            ahead = _AHEAD_LINES // max(1, tile // LINE_ITEMS)
            fetch = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT32, _INT32, _INT32]),
                "llvm.prefetch.p0",
            )

            def splat(number):
                one = builder.insert_element(
                    ir.Constant(vector, ir.Undefined), number, ir.Constant(_INT32, 0)
                )
                mask = ir.Constant(ir.VectorType(_INT32, tile), [0] * tile)
                return builder.shuffle_vector(one, one, mask)

            def row_at(node):
                start = builder.add(builder.mul(node, width), column)
                return builder.gep(data[0], [start])

            def address(edge):
                source = builder.load(builder.gep(data[3], [edge]))
                source = builder.zext(source, _INT64) if source.type.width < 64 else source
                return row_at(builder.sub(source, first))

            def load(place):
                return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)

            def either(condition, then):
                """A vector: what `then` gives, or zeros."""
                before = builder.block
                with builder.if_then(condition):
                    given, inside = then(), builder.block
                chosen = builder.phi(vector)
                chosen.add_incoming(zero, before)
                chosen.add_incoming(given, inside)
                return chosen

            begun = either(
                builder.icmp_signed(">=", args[12], nothing), lambda: load(row_at(args[12]))
            )
            before = builder.block
            loop = builder.append_basic_block("edges")
            after = builder.append_basic_block("over")
            builder.cbranch(builder.icmp_signed("<", low, high), loop, after)
            builder.position_at_end(loop)
            edge = builder.phi(_INT64)
            total = builder.phi(vector)
            edge.add_incoming(low, before)
            total.add_incoming(begun, before)
            later = builder.add(edge, ir.Constant(_INT64, ahead))
            later = builder.select(builder.icmp_signed("<", later, limit), later, edge)
            near = builder.bitcast(address(later), _BYTE.as_pointer())
            for line in range(0, 4 * tile, 64):
                there = builder.gep(near, [ir.Constant(_INT64, line)])
                builder.call(fetch, [there, *(ir.Constant(_INT32, value) for value in (0, 3, 1))])
            row = load(address(edge))
            if weighted:
                index = builder.add(args[9], builder.sub(edge, low))
                row = builder.fmul(row, splat(builder.load(builder.gep(data[8], [index]))))
            added = builder.fadd(total, row)
            following = builder.add(edge, ir.Constant(_INT64, 1))
            edge.add_incoming(following, loop)
            total.add_incoming(added, loop)
            builder.cbranch(builder.icmp_signed("<", following, high), loop, after)
            builder.position_at_end(after)
            result = builder.phi(vector)
            result.add_incoming(begun, before)
            result.add_incoming(added, loop)
            place = builder.gep(data[10], [args[11]])
            held = either(builder.icmp_signed("==", args[13], nothing), lambda: load(place))
            result = builder.fmul(builder.fadd(result, held), splat(args[14]))
            builder.store(result, builder.bitcast(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        kinds = (
            rows, i64, i64, sources, i64, i64, i64, i64, weights, i64, out, i64, i64, i64,
            types.float32,
        )  # fmt: skip
        return types.void(*kinds), codegen

    return summed


_sum64, _weighted64 = _make_sum(64, False), _make_sum(64, True)
_sum32, _weighted32 = _make_sum(32, False), _make_sum(32, True)
_sum16, _weighted16 = _make_sum(16, False), _make_sum(16, True)
_sum8, _weighted8 = _make_sum(8, False), _make_sum(8, True)
_sum4, _weighted4 = _make_sum(4, False), _make_sum(4, True)
_sum2, _weighted2 = _make_sum(2, False), _make_sum(2, True)
_sum1, _weighted1 = _make_sum(1, False), _make_sum(1, True)


@njit(nogil=True, cache=True)
def _sum_chunk(x, width, ids, low, high, limit, first, weights, beside, out, at, own, new, times):
    """One chunk of edges; `beside`: an edge's place in weights less that in ids, -1: none."""
    c, w = np.int64(0), beside + low
    while c < width:
        left, to = width - c, at + c
        if left >= 64:
            if beside >= 0:
                _weighted64(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum64(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 64
        elif left >= 32:
            if beside >= 0:
                _weighted32(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum32(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 32
        elif left >= 16:
            if beside >= 0:
                _weighted16(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum16(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 16
        elif left >= 8:
            if beside >= 0:
                _weighted8(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum8(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 8
        elif left >= 4:
            if beside >= 0:
                _weighted4(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum4(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 4
        elif left >= 2:
            if beside >= 0:
                _weighted2(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum2(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 2
        else:
            if beside >= 0:
                _weighted1(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            else:
                _sum1(
                    x, width, c, ids, low, high, limit, first, weights, w, out, to, own, new, times
                )
            c += 1


@njit(nogil=True, cache=True)
def _sum_edges(x, width, ids, low, high, limit, first, weights, beside, out, at, own, times):
    """out[at : at + width] = times * (row `own`, where there is one, and the rows of all edges)."""
    begin, new, one = low, np.int64(1), np.float32(1)
    while high - begin > CHUNK_EDGES:
        stop = begin + CHUNK_EDGES
        _sum_chunk(
            x, width, ids, begin, stop, limit, first, weights, beside, out, at, own, new, one
        )
        begin, new, own = stop, np.int64(0), np.int64(-1)
    _sum_chunk(x, width, ids, begin, high, limit, first, weights, beside, out, at, own, new, times)


@njit(nogil=True, cache=True)
def _add_share(node, width, share, x, out):
    for c in range(node * width, (node + 1) * width):
        out[c] += share * x[c]


@njit(nogil=True, cache=True)
def _wide(words, word):
    """A field of 64 bits."""
    return np.int64(words[word]) | np.int64(words[word + 1]) << np.int64(32)


@njit(nogil=True, cache=True)
def multiply_blocks(
    words,
    ids,
    weights,
    block_bytes,
    first,
    rows,
    width,
    factor,
    scale,
    share,
    x,
    loops,
    weights_place,
    out,
    carry_slots,
    carry,
    part,
    parts,
):
    """out[v] = scale * factor[v] * (sum of the rows of v's sources [+ rows[v]]) + share * x[v].

    words, ids, weights   uint32, id_dtype, float32   whole graph blocks, one behind the other; all
                                                      three are the same bytes, already checked
    first                 int64                       store id of node 0 of the rows
    rows, x, out          float32 (nodes * width,)    `rows` and `out` differ
    factor                float32 (nodes,)
    scale, share          float32                     where `share` is 0, `x` is not looked at
    loops                 bool                        a node is its own source too
    weights_place         int64                       bytes of an edge id, which weights follow;
                                                      -1: each edge weighs 1
    carry_slots           int64 (blocks,)             where the sum of carried edges goes, or -1
    carry                 float32 (slots * width,)    out: these sums

    part, parts           int64                       of the columns of each block: part i of n

    A column whose edges go on in later blocks is not finished: its row is the sum of those here.
    """
    id_bytes = ids.itemsize
    for block in range(carry_slots.size):
        word, base = block * (block_bytes // 4), block * (block_bytes // id_bytes)
        node = _wide(words, word + _FIRST_NODE) - first
        last_degree = _wide(words, word + _LAST_DEGREE)
        count, edges = np.int64(words[word + _NUM_NODES]), np.int64(words[word + _NUM_EDGES])
        start = np.int64(words[word + _EDGES_START])
        limit, beside = base + start + edges, np.int64(-1)
        if weights_place >= 0:
            over = (start + edges) * id_bytes
            if weights_place > 0:
                over = (over + 7) // 8 * 8 + edges * weights_place
            beside = word + (over + 7) // 8 * 2 - base - start
        if part == 0 and carry_slots[block] >= 0:
            at, low = carry_slots[block] * width, base + start
            high = low + np.int64(words[word + _NUM_CARRIED])
            _sum_edges(
                rows, width, ids, low, high, limit, first, weights, beside, carry, at, np.int64(-1),
                np.float32(1),
            )  # fmt: skip
        begin, end = count * part // parts, count * (part + 1) // parts
        high = base + np.int64(words[word + _OFFSETS + begin])
        for i in range(begin, end):
            low, high = high, base + np.int64(words[word + _OFFSETS + i + 1])
            own = node + i if loops else np.int64(-1)
            whole = i < count - 1 or last_degree == high - low
            times = scale * factor[node + i] if whole else np.float32(1)
            _sum_edges(
                rows, width, ids, low, high, limit, first, weights, beside, out, (node + i) * width,
                own, times,
            )  # fmt: skip
            if whole and share != 0:
                _add_share(node + i, width, share, x, out)


@njit(nogil=True, cache=True)
def finish_carried(nodes, carry, width, factor, scale, share, x, out):
    """Sums of carried edges to those of their columns, in order, which are finished then.

    nodes   int64 (slots,)   ascending: the column of each slot of `carry`

    Others as `multiply_blocks` takes them.
    """
    for slot in range(nodes.size):
        node, at = nodes[slot], nodes[slot] * width
        for c in range(width):
            out[at + c] += carry[slot * width + c]
        if slot + 1 == nodes.size or nodes[slot + 1] != node:
            times = scale * factor[node]
            for c in range(at, at + width):
                out[c] *= times
            if share != 0:
                _add_share(node, width, share, x, out)


@njit(nogil=True, cache=True)
def add_edges(nodes, sources, weights, into, out):
    """into[target] += weight and out[source] += weight, edge by edge.

    nodes     int64 (columns + 1,)   place of each column's first edge, then the end; its own place
                                     in `into`
    sources   int64 (edges,)         places in `out`
    weights   float32 (edges,)       or (0,): each weighs 1
    into      float64 (columns,)
    out       float64 (nodes,)
    """
    for column in range(nodes.size - 1):
        for e in range(nodes[column], nodes[column + 1]):
            weight = np.float64(weights[e]) if weights.size else 1.0
            into[column] += weight
            out[sources[e]] += weight


@njit(nogil=True, cache=True)
def scale_rows(rows, width, scale, low, high):
    """Rows [low, high) of `rows` times their number in `scale`, in place."""
    for node in range(low, high):
        times = scale[node]
        for c in range(node * width, (node + 1) * width):
            rows[c] *= times


@njit(nogil=True, cache=True)
def take_rows(rows, width, scale, places, out):
    """out[i] = rows[places[i]] without the scale that is in them, its first columns.

    rows     float32 (nodes * width,)
    scale    float32 (nodes,)              or (0,): there is none
    places   uint32 or uint64 (count,)
    out      float32 (count, columns)      columns <= width
    """
    ahead = 8
    for i in range(places.size):
        if i + ahead < places.size:
            near = np.int64(places[i + ahead]) * width
            for item in range(near, near + width, LINE_ITEMS):
                prefetch(rows, item)
        place = np.int64(places[i])
        for c in range(out.shape[1]):
            value = rows[place * width + c]
            out[i, c] = value / scale[place] if scale.size else value

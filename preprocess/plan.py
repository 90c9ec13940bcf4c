"""How the memory and the disk of an ingest are shared out, decided before it starts.  Pure."""

from dataclasses import dataclass
from pathlib import Path

from blockstore.errors import BudgetTooSmall
from blockstore.format import PAGE_BYTES, RowArray, align
from blockstore.units import format_bytes, format_mem
from preprocess.contents import (
    SPLITS,
    Contents,
    RelationContents,
    Rows,
    TypeContents,
    as_path,
    list_contents,
    split_sizes,
)
from preprocess.influence_plan import influence_bytes, influence_node_bytes, influence_steps
from preprocess.options import IngestOptions
from preprocess.partition import PartitionOptions, most_visited, visited_fits
from preprocess.result import IngestPlan, MemoryLine, StagePlan
from preprocess.reverse import with_reverses
from preprocess.source import Source, SourceRows
from preprocess.stages.rows import dense_bytes
from preprocess.steps import Step, graph_bytes, row_disk_bytes, scatter_bytes

CHECK, COUNT = "check labels and splits", "count edges"  # names of stages
COLUMNS_STAGE, ORDER = "columns by source id", "order nodes"
PARTITION_STAGE = "partition nodes"

# bytes a node, of tables that are in memory at the same time
BFS_NODE_BYTES = 21  # degree, root, place, order, level: 4 each, and one start for 64 columns
RENAMED_NODE_BYTES = 16  # place, order, count and count by place: 4 each
SOURCE_NODE_BYTES = 6  # count 4, owner of a split 1
_FIXED_BYTES = 4 << 20  # Zarr metadata, small buffers
_INTERPRETER_BYTES = 96 << 20  # Python, numpy and compiled kernels: a quarter of --mem at most
_LEAST_SHARE = 4 << 20
_LEAST_ROWS = 8  # of the widest row array, that a share must hold
_MOST_BUFFER = 8 << 20
_PACKER_BLOCKS = 6  # degrees 2, the sections of edges 1, the block 1, room
_CRC_BYTES = 16  # a page: kept while the array is written, then copied into its side array
_EDGE_BYTES = 16  # an edge of a source that does not say


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is left of --mem after tables with an entry a node, the packer and small things."""

    buffer: int  # bytes of each of two buffers of an array being written
    share: int  # bytes for chunks, buckets and dense rows, one stage at a time


def plan(source: Source, options: IngestOptions) -> IngestPlan:
    """What an ingest will take.  Raises BadInput, BudgetTooSmall."""
    options.check()
    return plan_of(list_contents(with_reverses(source, options), options), options)


def plan_of(contents: Contents, options: IngestOptions) -> IngestPlan:
    """The same, once it is known what the store will hold."""
    memory = plan_memory(contents, options)
    steps = plan_steps(contents, options, memory)
    return IngestPlan(
        num_nodes={t.name: t.num_nodes for t in contents.types},
        num_edges={
            f"{r.source.src}-{r.source.name}-{r.source.dst}": r.most_edges
            for r in contents.relations
        },
        store_bytes=store_bytes(contents, options),
        temporary_bytes=temporary_bytes(steps),
        mem_bytes=options.mem_bytes,
        memory=_memory_lines(contents, options, memory),
        stages=tuple(StagePlan(s.name, s.read, s.written) for s in steps),
    )


def plan_memory(contents: Contents, options: IngestOptions) -> MemoryPlan:
    """Share out --mem.  Raises BudgetTooSmall with the least that would do."""
    least = _least_bytes(contents, options, max(_LEAST_SHARE, _LEAST_ROWS * _widest(contents)))
    if options.mem_bytes < least:
        raise too_little_memory(
            options.mem_bytes, least,
            f"{contents.num_nodes:,} nodes of {node_bytes(options)} bytes each, blocks of "
            f"{format_bytes(options.block_bytes)} and buffers",
        )  # fmt: skip
    spare = (
        options.mem_bytes - _taken_first(contents, options) - interpreter_bytes(options.mem_bytes)
    )
    buffer = _buffer_bytes(contents, options, spare)
    return MemoryPlan(buffer, spare - 2 * buffer)


def check_longest(
    contents: Contents, options: IngestOptions, memory: MemoryPlan, column_bytes: int
) -> None:
    """Raises BudgetTooSmall: the longest column takes `column_bytes` to sort, which is too much.

    Buckets have three quarters of what is given to sorting, which is three quarters of the share
    where edge arrays follow.
    """
    need = 16 * (column_bytes // 9 + 1)
    if need > memory.share:
        raise too_little_memory(
            options.mem_bytes, _least_bytes(contents, options, need),
            f"sorting the in-edges of one node, {format_bytes(column_bytes)}",
        )  # fmt: skip


def too_little_memory(found: int, least: int, why: str) -> BudgetTooSmall:
    """The error that says the least that would do."""
    return BudgetTooSmall(
        f"--mem {format_bytes(found)}: expected at least --mem {format_mem(least)} for {why}",
        least,
    )


def node_bytes(options: IngestOptions) -> int:
    """Of tables, for each node: the documented number."""
    least = influence_node_bytes(options)
    if options.partition is not None:
        least = max(least, options.partition.node_bytes)
    if options.order in ("bfs", "degree"):
        return max(BFS_NODE_BYTES, least)
    return max(RENAMED_NODE_BYTES if options.renames else SOURCE_NODE_BYTES, least)


def _memory_lines(
    contents: Contents, options: IngestOptions, memory: MemoryPlan
) -> tuple[MemoryLine, ...]:
    each = node_bytes(options)
    return (
        MemoryLine(f"tables, {each} bytes a node", each * contents.num_nodes),
        MemoryLine("blocks being packed", _PACKER_BLOCKS * options.block_bytes),
        MemoryLine("checksums of the array being written", _crc_bytes(contents, options)),
        MemoryLine("two buffers of the array being written", 2 * memory.buffer),
        MemoryLine("edges and rows of the stage that runs", memory.share),
        MemoryLine("Python and libraries", interpreter_bytes(options.mem_bytes)),
        MemoryLine("small things", _FIXED_BYTES),
    )


def _crc_bytes(contents: Contents, options: IngestOptions) -> int:
    """Of the largest array."""
    rows = [row_disk_bytes(a, options.block_bytes) for a in contents.row_arrays()]
    graphs = [graph_bytes(r, options) for r in contents.relations]
    return _CRC_BYTES * (max([*rows, *graphs], default=0) // PAGE_BYTES)


def _taken_first(contents: Contents, options: IngestOptions) -> int:
    """Tables with an entry a node, the blocks of the packer, and what is always there."""
    nodes = node_bytes(options) * contents.num_nodes
    blocks = _PACKER_BLOCKS * options.block_bytes
    return nodes + blocks + _crc_bytes(contents, options) + _FIXED_BYTES


def _least_bytes(contents: Contents, options: IngestOptions, share: int) -> int:
    """The least --mem that leaves so much to share."""
    slot = align(_widest(contents), options.block_bytes)
    buffers = max(2 * slot, min(2 * _MOST_BUFFER, share // 7 + 2))  # two of a 16th of what is left
    least = _taken_first(contents, options) + share + buffers
    return with_interpreter(least)


def interpreter_bytes(mem_bytes: int) -> int:
    """What is left to Python and libraries: in little memory they are beside it."""
    return min(_INTERPRETER_BYTES, mem_bytes // 4)


def with_interpreter(least: int) -> int:
    """The least --mem that leaves so many bytes beside Python and libraries."""
    return min(-(-least * 4 // 3), least + _INTERPRETER_BYTES)


def _buffer_bytes(contents: Contents, options: IngestOptions, spare: int) -> int:
    return max(align(_widest(contents), options.block_bytes), min(_MOST_BUFFER, spare // 16))


def _widest(contents: Contents) -> int:
    """Bytes of the widest row, in the source or in the store."""
    stored = [a.row_bytes for a in contents.row_arrays()]
    return max([1, *stored, *(r.source.row_bytes for r in contents.rows())])


def plan_steps(contents: Contents, options: IngestOptions, memory: MemoryPlan) -> list[Step]:
    """The stages of an ingest in order, and what they move."""
    steps = [_check_step(contents, options), _count_step(contents)]
    steps += _order_steps(contents, options, memory.share)
    for r in contents.relations:
        steps += _relation_steps(contents, r, options, memory.share)
    for t in contents.types:
        ids = row_disk_bytes(t.original_id, options.block_bytes)
        steps.append(Step(ids_stage(t), 0, 2 * ids))
        rank = 4 if options.renames else 0
        for rows in (*t.features, *([t.label] if t.label else [])):
            steps += _rows_steps(rows, memory.share, rank, rows.array.num_rows)
        steps += [_split_step(s, options) for s in t.splits]
        steps += [
            Step(a.path, 0, row_disk_bytes(a, options.block_bytes))
            for a in seeded_splits(t, t.num_nodes, options)
        ]
        if options.in_partitions:
            steps.append(Step(partition_path(t), 0, 0))
    return steps + influence_steps(contents, options, memory.share, node_bytes(options))


def seeded_splits(t: TypeContents, labelled: int, options: IngestOptions) -> list[RowArray]:
    """The splits that are made for a type: where there are labels, and no splits."""
    if not (options.split and t.label and not t.splits):
        return []
    return [
        RowArray(f"nodes/{as_path(t.name)}/splits/{name}", "int64", stop - first)
        for name, (first, stop) in zip(SPLITS, split_sizes(options.split, labelled), strict=True)
    ]


def partition_path(node_type: TypeContents) -> str:
    """Of the side array of partitions."""
    return f"nodes/{as_path(node_type.name)}/partition_offsets"


def ids_stage(node_type: TypeContents) -> str:
    """Name of the stage that writes the ids of a type."""
    return f"ids of {node_type.name}"


def sort_stage(relation: RelationContents) -> str:
    """Of the one that sorts a relation whose blocks hold more than edges."""
    return f"{relation.path}: sort"


def inline_stage(relation: RelationContents, rows: SourceRows) -> str:
    """Of the one that brings an edge array into the order of the blocks."""
    return f"{relation.path}: {rows.name}"


def scale_stage(array: RowArray) -> str:
    """Of the one that finds the scale of an int8 array."""
    return f"{array.path}: scale"


def temporary_bytes(steps: list[Step]) -> int:
    """At most at any time; files of buckets stay, to be used again: `stages.buckets`."""
    held = most = spare = 0
    for step in steps:
        spare = max(spare, step.passing)
        most = max(most, held + step.made + spare)
        held += step.made - step.spent
    return most


def store_bytes(contents: Contents, options: IngestOptions) -> int:
    """Of a store, at most."""
    arrays = contents.row_arrays()
    for t in contents.types:
        arrays += seeded_splits(t, t.num_nodes, options)
    rows = sum(row_disk_bytes(a, options.block_bytes) for a in arrays)
    graphs = sum(graph_bytes(r, options) for r in contents.relations)
    return rows + graphs + influence_bytes(contents, options)


def columns_fit(contents: Contents, share: int) -> bool:
    """Whether the columns that give the order can stay in memory, beside other things."""
    total = sum(r.most_edges for r in contents.relations)
    return column_item_bytes(contents) * total <= share // 3


def column_item_bytes(contents: Contents) -> int:
    """Of an edge in columns in memory: with its id where these become the graph itself."""
    if len(contents.relations) != 1:
        return 4
    return 4 + contents.relations[0].widths.key_bytes - 8


def needs_columns(options: IngestOptions) -> bool:
    """Whether the order of nodes, or their partition, is found in sorted columns."""
    if options.partition is not None or options.order == "bfs":
        return True
    return options.order == "degree" and options.drop_equal


def reads_columns(contents: Contents) -> bool:
    """Whether columns on disk that gave the order become the graph: else the source does."""
    return len(contents.relations) == 1 and not contents.relations[0].widths.edge


def place_dtype(relation: RelationContents) -> str:
    """Of the places of edges in the order of the blocks."""
    return "uint32" if relation.most_edges < 2**32 - 1 else "uint64"


def looks_at_label(label: Rows, options: IngestOptions) -> bool:
    """Whether labels are read before they are written: for their dtype, or to split them."""
    return label.source.dtype.kind == "f" or bool(options.split)


def _source_bytes(relation: RelationContents) -> int:
    """What one read of a relation's edges brings."""
    path = Path(relation.source.where)
    size = path.stat().st_size if path.is_file() else 0
    return size or _EDGE_BYTES * relation.source.num_edges


def _rows_bytes(rows: SourceRows) -> int:
    return rows.num_rows * rows.row_bytes


def _check_step(contents: Contents, options: IngestOptions) -> Step:
    read = 0
    for t in contents.types:
        read += sum(_rows_bytes(s.source) for s in t.splits)
        if t.label and looks_at_label(t.label, options):
            read += _rows_bytes(t.label.source)
    read += sum(_rows_bytes(s.source) for r in contents.relations for s in r.splits)
    return Step(CHECK, read, 0)


def _count_step(contents: Contents) -> Step:
    counts = sum(4 * r.dst.num_nodes for r in contents.relations)
    return Step(COUNT, sum(map(_source_bytes, contents.relations)), counts, made=counts)


def _order_steps(contents: Contents, options: IngestOptions, share: int) -> list[Step]:
    if not options.renames:
        return []
    rank = 4 * contents.num_nodes
    if not needs_columns(options):
        return [Step(ORDER, 0, rank, made=rank)]
    total = sum(r.most_edges for r in contents.relations)
    read, held = sum(map(_source_bytes, contents.relations)), 0
    steps = []
    if columns_fit(contents, share):
        held = column_item_bytes(contents) * total
        passing = _sort_bytes(total, 4 + column_item_bytes(contents), share - held)
        steps.append(Step(ORDER, read + passing, passing + rank, rank, passing=passing))
    else:
        columns, passing = 4 * total + rank, _sort_bytes(total, 8, share)
        spent = 0 if reads_columns(contents) else columns
        steps = [
            Step(COLUMNS_STAGE, read + passing, columns + passing, columns, passing=passing),
            Step(ORDER, columns, rank, rank, spent),
        ]
    if options.partition is not None:
        steps[-1:] = _partition_steps(contents, options, options.partition, steps[-1], share, held)
    return steps


def _partition_steps(
    contents: Contents,
    options: IngestOptions,
    settings: PartitionOptions,
    order: Step,
    share: int,
    held: int,
) -> list[Step]:
    """Nodes are partitioned, then ordered.

    order  as if they were only ordered
    held   bytes of columns in memory; 0: they are on disk
    """
    made = 4 * contents.num_nodes
    total = sum(r.most_edges for r in contents.relations)
    columns = 0 if held else order.read
    sorting = visited = 0
    if settings.is_streamed:
        share -= held
        total = most_visited(settings, total, options.undirected)
        visited = 0 if visited_fits(total, share, held > 0) else 4 * total
        sorting = _sort_bytes(total, 8, share)
    labels = 2 * sum(_rows_bytes(t.label.source) for t in contents.types if t.label)
    read = order.read + labels + sorting + (settings.passes + 1) * visited + columns
    written = order.written - 4 * contents.num_nodes + sorting + visited + made
    return [
        Step(PARTITION_STAGE, read, written, made, passing=max(order.passing, sorting + visited)),
        Step(ORDER, columns + made, order.made, order.made, order.spent + made),
    ]


def _sort_bytes(num_edges: int, key_bytes: int, share: int) -> int:
    """Temporary bytes of sorting edges."""
    return num_edges * key_bytes if num_edges * key_bytes > share // 2 else 0


def _relation_steps(
    contents: Contents, relation: RelationContents, options: IngestOptions, share: int
) -> list[Step]:
    edges, widths, path = relation.most_edges, relation.widths, relation.path
    counts = spent = 4 * relation.dst.num_nodes
    read, passing = _source_bytes(relation), _sort_bytes(edges, widths.key_bytes, share)
    if needs_columns(options) and columns_fit(contents, share) and len(contents.relations) == 1:
        read = passing = 0
    elif needs_columns(options) and reads_columns(contents):
        read = 4 * edges + 4 * contents.num_nodes
        spent += read
    place = int(place_dtype(relation).removeprefix("uint")) // 8
    places = passed = 0
    if relation.has_rows:
        places = edges * place
        passed = edges * (4 + place)
    moved, passing = read + counts + passing + passed, passing + passed
    graph, steps = graph_bytes(relation, options), []
    if relation.inline:
        held = edges * widths.column_bytes + counts
        made, written = held + places, held + places + passing
        steps.append(Step(sort_stage(relation), moved, written, made, spent, passing))
        for rows in relation.inline:
            each = 4 if rows is relation.weight else 8
            name, passing = inline_stage(relation, rows), _scatter_bytes(edges, each, place, share)
            read, written = _rows_bytes(rows) + places + passing, edges * each + passing
            steps.append(Step(name, read, written, edges * each, passing=passing))
            held += edges * each
        steps.append(Step(path, held, graph, spent=held))
    else:
        steps.append(Step(path, moved, graph + passing + places, places, spent, passing))
    for f in relation.features:
        steps += _rows_steps(f, share, place, edges)
    steps[-1] = steps[-1]._replace(spent=steps[-1].spent + places)
    return [*steps, *(_split_step(s, options) for s in relation.splits)]


def _scatter_bytes(num_rows: int, row_bytes: int, place: int, share: int) -> int:
    """Temporary bytes of rows that are put into another order, by `stages.rows`."""
    return scatter_bytes(num_rows, row_bytes, place, 2 * dense_bytes(share))


def _rows_steps(rows: Rows, share: int, place: int, num_rows: int) -> list[Step]:
    """`place`: bytes of the new place of a row; 0: rows stay where they are."""
    array = rows.array
    passing = _scatter_bytes(num_rows, array.row_bytes, place, share) if place else 0
    read = _rows_bytes(rows.source)
    scale = [Step(scale_stage(array), read, 0)] if array.scale_path else []
    written = num_rows * array.row_bytes * 1025 // 1024
    return [*scale, Step(array.path, read + passing, written + passing, passing=passing)]


def _split_step(rows: Rows, options: IngestOptions) -> Step:
    written = row_disk_bytes(rows.array, options.block_bytes)
    return Step(rows.array.path, _rows_bytes(rows.source), written)

"""Stores whose checksums are right and whose content is not: what opening and reading refuse."""

import shutil
import struct

import numpy as np
import pytest

from blockstore.errors import CorruptBlock, StoreError
from blockstore.format import BLOCK_HEADER, FINGERPRINT_KEY, BlockHeader, edges_start_bytes
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader, Parts, make_transit
from blockstore.store import open_store, read_rows, scan_blocks
from tests.graphs import make_csc
from tests.stores import write_store
from tools.fuzz.mutations import StoreDraft
from tools.fuzz.trial import lay_out

NODES, BLOCKS = 400, "edges/node___to___node/blocks"
HALO = "edges/node___to___node/halo/blocks"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Partitions, hubs, halos, weights, edge ids, a column of several blocks."""
    path = tmp_path_factory.mktemp("base") / "store"
    degrees = np.random.default_rng(1).integers(0, 12, NODES)
    degrees[123] = 1500
    graph = make_csc(degrees, 2)
    write_store(
        path, graph, np.arange(0, NODES, 2), weights=graph.weights, offsets=(0, 150, 300, NODES),
        hubs=(5, 123), halos=((200, 301), (2, 350), (7,)),
    )  # fmt: skip
    return StoreDraft.load(path)


@pytest.fixture
def draft(base):
    return base.copy()


def written(draft, folder):
    """The store of a draft."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    lay_out(folder / "store", draft.sign())
    return folder / "store"


def read_graph(path):
    """Open a store, and read its graph blocks: what only they tell is found then."""
    store = open_store(path)
    relation = store.manifest.relations[0]
    for columns in (relation, relation.halo):
        for _ in scan_blocks(store.graph(columns)):
            pass


def at(manifest, place):
    """(container, key) of a value of a manifest."""
    *outer, key = [int(p) if p.isdigit() else p for p in place.split("/")]
    for name in outer:
        manifest = manifest[name]
    return manifest, key


def test_a_draft_that_is_signed_again_is_the_store(draft, tmp_path):
    path = written(draft, tmp_path)
    store = open_store(path)
    assert store.manifest.fingerprint == draft.document["attributes"][FINGERPRINT_KEY]
    for relation in store.manifest.relations:
        assert sum(len(b) for _, b in scan_blocks(store.graph(relation))) == relation.num_blocks
    (tmp_path / "link").symlink_to(path)  # a link to a store is one
    assert open_store(tmp_path / "link").manifest == store.manifest


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("block_bytes", 0), ("block_bytes", 4097), ("block_bytes", -4096), ("block_bytes", 2**40),
        ("id_dtype", "int8"), ("id_dtype", "uint64"), ("id_dtype", "x"),
        ("types/0/first", 1), ("types/0/num_nodes", 0), ("types/0/num_nodes", -1),
        ("types/0/num_nodes", NODES + 1), ("types/0/num_nodes", 2**62),
        ("types/0/name", "other"), ("types/0/name", "a\0b"), ("types/0/num_partitions", 4),
        ("types/0/num_partitions", 0), ("types/0/num_partitions", 2**60),
        ("types/0/partition_offsets_path", ""), ("types/0/partition_offsets_path", "../x"),
        ("types/0/original_id/path", "/etc/passwd"), ("types/0/original_id/path", "../store/x"),
        ("types/0/original_id/path", "a\0b"), ("types/0/original_id/path", "."),
        ("types/0/original_id/path", "nodes//x"), ("types/0/original_id/dtype", "uint8"),
        ("types/0/original_id/num_rows", 2**60), ("types/0/original_id/row_shape", [2]),
        ("types/0/original_id/rows_per_block", -1024),
        ("types/0/store_id/path", "nodes/node/original_id"),
        ("types/0/features/x/row_shape", [0]), ("types/0/features/x/row_shape", [-2]),
        ("types/0/features/x/row_shape", [2**31, 2**31]), ("types/0/features/x/dtype", "object"),
        ("types/0/features/x/num_rows", NODES - 1), ("types/0/features/x/rows_per_block", 2**50),
        ("types/0/features/x/scale_path", "nodes/node/hubs"), ("types/0/features/x/row_shape", [1]),
        ("types/0/splits/train/dtype", "float64"), ("types/0/splits/train/num_rows", 2**40),
        ("types/0/halo/features", {}), ("types/0/halo/offsets_path", "/x"),
        ("types/0/halo/nodes/num_rows", 3), ("types/0/halo/features/x/row_shape", [4]),
        ("types/0/hubs/num_rows", 2**33), ("types/0/halo", None),
        ("relations/0/src", "nobody"), ("relations/0/num_blocks", 0),
        ("relations/0/num_blocks", -1), ("relations/0/num_blocks", 2**61),
        ("relations/0/num_edges", 2**63 - 1), ("relations/0/num_edges", 1),
        ("relations/0/edge_id_dtype", "float32"), ("relations/0/edge_id_dtype", "uint64"),
        ("relations/0/has_times", True), ("relations/0/first_edge_path", ""),
        ("relations/0/first_node_path", "edges/node___to___node/first_edge"),
        ("relations/0/num_source_edges", -1), ("relations/0/halo", None),
        ("relations/0/halo/num_blocks", 999), ("relations/0/halo/path", BLOCKS),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_is_refused(draft, tmp_path, place, value):
    inside, key = at(draft.manifest, place)
    inside[key] = value
    path = written(draft, tmp_path)
    with pytest.raises(CorruptBlock) as found:
        read_graph(path)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


def test_types_and_relations_of_one_name_are_refused(draft, tmp_path):
    draft.manifest["relations"].append(draft.manifest["relations"][0])
    with pytest.raises(CorruptBlock, match="names that differ"):
        open_store(written(draft, tmp_path))


@pytest.mark.parametrize(
    ("side", "entry", "value"),
    [
        ("edges/node___to___node/first_node", 0, 1),
        ("edges/node___to___node/first_node", -1, 500),
        ("edges/node___to___node/first_node", 1, 2**63),
        ("edges/node___to___node/first_edge", 0, 5), ("edges/node___to___node/first_edge", -1, 9),
        ("edges/node___to___node/first_edge", 1, 2**64 - 1),
        ("nodes/node/partition_offsets", 1, 2**40), ("nodes/node/partition_offsets", 0, 3),
        ("nodes/node/partition_offsets", -1, 401), ("nodes/node/halo/offsets", 1, 99),
        ("nodes/node/halo/offsets", -1, 2**33), ("edges/node___to___node/halo/first_node", -1, 8),
        ("edges/node___to___node/halo/first_edge", 1, 2**62),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_are_refused_when_a_store_is_opened(
    draft, tmp_path, side, entry, value
):
    draft.sides[side][entry] = value
    path = written(draft, tmp_path)
    with pytest.raises(CorruptBlock, match=r"ascending|would have") as found:
        open_store(path)
    assert side.removesuffix("first_node").removesuffix("first_edge") in str(found.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nodes/node/original_id", NODES), ("nodes/node/store_id", 2**32 - 1),
        ("nodes/node/hubs", NODES), ("nodes/node/halo/nodes", 2**31),
        ("nodes/node/splits/train", NODES), ("nodes/node/splits/train", -1),
        ("nodes/node/splits/train", 2**62),
    ],
)  # fmt: skip
def test_ids_out_of_range_are_refused_when_they_are_read(draft, tmp_path, path, value):
    values = draft.blocks[path].values()
    values[1] = np.int64(value).astype(values.dtype)
    store = open_store(written(draft, tmp_path))
    array = next(a for a in store.manifest.row_arrays() if a.path == path)
    with pytest.raises(CorruptBlock, match=r"row 1 is \["):
        read_rows(store, array)


@pytest.mark.parametrize("name", ["c/0/0", ""])
def test_links_out_of_a_store_are_refused(draft, tmp_path, name):
    path = written(draft, tmp_path)
    inner = path / BLOCKS / name
    shutil.move(inner, tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptBlock, match=r"leads to .*elsewhere.*, expected a file inside"):
        read_graph(path)


def put_source(block, edge, source):
    """Another source of an edge of a graph block."""
    header = BlockHeader.unpack(block[:64].tobytes(), "")
    bits, at = header.source_bits, 8 * edges_start_bytes(header.num_nodes)
    at += edge * bits
    held = int.from_bytes(block[at // 8 :][:8].tobytes(), "little")
    held &= ~((1 << bits) - 1 << at % 8)
    held |= source - header.source_base << at % 8
    block[at // 8 :][:8] = np.frombuffer(held.to_bytes(8, "little"), np.uint8)


def hostile(draft, tmp_path, halo=False):
    """A store of which one block has a source that is no node; its file, that block."""
    path = HALO if halo else BLOCKS
    size = draft.blocks[path].geometry.slot_bytes
    number = draft.blocks[path].geometry.num_blocks // 2
    raw = np.frombuffer(draft.blocks[path].data, np.uint8)[number * size :]
    header = BlockHeader.unpack(raw[:64].tobytes(), "")
    put_source(raw, header.num_edges - 1, NODES)
    store = open_store(written(draft, tmp_path))
    relation = store.manifest.relations[0]
    assert relation.halo is not None
    return store.graph(relation.halo if halo else relation), number


MESSAGE = r"block \d+, edge \d+: source 400, expected 0 to 399"


@pytest.mark.parametrize("halo", [False, True])
def test_every_way_to_read_a_block_checks_it(draft, tmp_path, halo):
    file, bad = hostile(draft, tmp_path, halo)
    size, count = file.geometry.slot_bytes, file.geometry.num_blocks
    pages = size // 4096
    data = aligned_buffer(count * size)
    transit = make_transit([aligned_buffer(count * size)])
    all_blocks = np.arange(count)
    whole = np.array([[0, 0, count * pages]])
    one = np.array([[0, bad * pages, pages]])
    with pytest.raises(CorruptBlock, match=MESSAGE):
        list(scan_blocks(file))
    with BlockReader([file], data, size, threads=2) as reader:
        with pytest.raises(CorruptBlock, match=MESSAGE):
            reader.read(0, all_blocks, all_blocks)
        with pytest.raises(CorruptBlock, match=MESSAGE):
            reader.fetch(0, whole, np.zeros(1, np.int64)).wait()
        with pytest.raises(CorruptBlock, match=MESSAGE):
            reader.stream(0, whole, transit, lambda low, high, d: None).wait()
        parts = Parts(np.ones(1, np.int64), lambda i, head: [(0, pages)])
        with pytest.raises(CorruptBlock, match=MESSAGE):
            reader.stream(0, one, transit, lambda low, high, d: None, parts).wait()
        good = np.delete(all_blocks, bad)
        reader.read(0, good, good)


@pytest.mark.parametrize("edge", [0, 3000, 4305, 4306, 4307, 6499])
def test_a_part_of_a_block_is_checked_as_far_as_it_is_read(tmp_path, edge):
    """Blocks of several pages: the head, then pages of edges.

    Sources of 7 bits begin at byte 328, in the head: one of them lies on the first two pages.
    """
    path = tmp_path / "base"
    write_store(
        path, make_csc(np.full(65, 100), 1), np.arange(64), block_bytes=16384, edge_ids=False
    )
    draft = StoreDraft.load(path)
    raw = np.frombuffer(draft.blocks[BLOCKS].data, np.uint8)
    put_source(raw, edge, 127)
    low, high = 8 * 328 + 7 * edge, 8 * 328 + 7 * edge + 6
    own = low // 8 // 4096, high // 8 // 4096 + 1  # pages
    file = open_store(written(draft, tmp_path)).graph(open_store(path).manifest.relations[0])
    transit = make_transit([aligned_buffer(16384)])
    run, heads, seen = np.array([[0, 0, 4]]), np.ones(1, np.int64), []
    with BlockReader([file], aligned_buffer(16384), 16384, threads=1) as reader:

        def read(pages):
            parts = Parts(heads, lambda i, head: [pages])
            reader.stream(0, run, transit, lambda low, high, d: seen.append(low), parts).wait()

        for pages in ((0, 1), (1, 2), (0, 2), (1, 4), (0, 4)):
            seen.clear()
            if pages[0] <= own[0] and own[1] <= pages[1]:
                with pytest.raises(CorruptBlock, match=f"edge {edge}: source 127, expected 0 to"):
                    read(pages)
                assert seen == []
            else:
                read(pages)
                assert seen == [0]


@pytest.mark.parametrize(
    ("form", "at", "value"),
    [("<I", 36, v) for v in (0, 8, 10, 56, 57, 64, 99, 2**32 - 1)]
    + [("<Q", 40, v) for v in (1, 399, 2**32, 2**63, 2**64 - 1)],
)
def test_sources_of_another_width_or_base_are_refused(draft, tmp_path, form, at, value):
    struct.pack_into(form, draft.blocks[BLOCKS].data, at, value)
    store = open_store(written(draft, tmp_path))
    file = store.graph(store.manifest.relations[0])
    expected = "expected flags .*sources of 9 bits from 0 on; ingest again"
    with pytest.raises(CorruptBlock, match=expected):
        list(scan_blocks(file))
    size = file.geometry.slot_bytes
    with (
        BlockReader([file], aligned_buffer(size), size, threads=1) as reader,
        pytest.raises(CorruptBlock, match=expected),
    ):
        reader.read(0, np.zeros(1, np.int64), np.zeros(1, np.int64))


@pytest.mark.parametrize("word", [0, 1, 2, 4, 6, 7, 8, 9, 10, 16])
def test_a_header_that_differs_from_the_object_index_is_refused(draft, tmp_path, word):
    np.frombuffer(draft.blocks[BLOCKS].data, np.uint32)[word] += 1
    store = open_store(written(draft, tmp_path))
    with pytest.raises(StoreError, match=r"block 0: (.*expected|block format|magic|flag)") as found:
        list(scan_blocks(store.graph(store.manifest.relations[0])))
    assert "\n" not in str(found.value)


def test_a_multi_block_column_that_ends_where_no_block_is_is_refused(draft, tmp_path):
    """Its last degree is beyond what the following blocks have."""
    blocks = draft.blocks[BLOCKS]
    for number in range(blocks.geometry.num_blocks):
        start = number * blocks.geometry.slot_bytes
        header = BLOCK_HEADER.unpack_from(blocks.data, start)
        if header[4] > header[6]:  # last_degree, num_edges
            np.frombuffer(blocks.data, np.uint64, 1, start + 16)[0] = 10**6
            break
    else:
        pytest.fail("no column of several blocks")
    store = open_store(written(draft, tmp_path))
    with pytest.raises(CorruptBlock, match="a last column of 1000000 edges, which the blocks lack"):
        list(scan_blocks(store.graph(store.manifest.relations[0])))

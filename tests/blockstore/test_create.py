"""Metadata of arrays is that of zarr-python, to the byte, and zarr-python reads what is written."""

from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from blockstore.create import ZarrTree
from blockstore.errors import StoreExists
from blockstore.format import ITEM_BYTES, RowArray, graph_geometry, row_geometry
from blockstore.store import numpy_dtype


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def by_zarr(folder: Path) -> zarr.Group:
    return zarr.open_group(LocalStore(folder), mode="a", zarr_format=3)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(), (7,), (3, 2)])
def test_row_arrays(tmp_path, dtype, shape):
    array = RowArray("nodes/n/features/x", dtype, 5000, shape)
    geometry = row_geometry(array, 4096)
    found = ZarrTree(tmp_path / "ours").rows(array, geometry)
    rows = geometry.rows_per_block
    by_zarr(tmp_path / "zarr").create_array(
        array.path, shape=(5000, *shape), dtype=numpy_dtype(dtype), chunks=(rows, *shape),
        shards=(rows * geometry.blocks_per_shard, *shape), compressors=None, fill_value=0,
        attributes={"dtype": "bfloat16"} if dtype == "bfloat16" else {},
    )  # fmt: skip
    made = files(tmp_path / "ours")
    assert made == files(tmp_path / "zarr")
    assert found == {name: raw for name, raw in made.items() if name != "zarr.json"}


def test_graph_blocks(tmp_path):
    geometry = graph_geometry(3000, 4096)
    ZarrTree(tmp_path / "ours").graph("edges/r/blocks", geometry)
    size = geometry.slot_bytes
    by_zarr(tmp_path / "zarr").create_array(
        "edges/r/blocks", shape=(geometry.num_blocks, size), dtype="uint8", chunks=(1, size),
        shards=(geometry.blocks_per_shard, size), compressors=None, fill_value=0,
    )  # fmt: skip
    assert files(tmp_path / "ours") == files(tmp_path / "zarr")


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64", "int64", "float32"])
@pytest.mark.parametrize("values", [[], [0, 0], [1, 2, 3]])
def test_side_arrays(tmp_path, dtype, values):
    values = np.array(values, dtype)
    ZarrTree(tmp_path / "ours").side("a/b", values)
    array = by_zarr(tmp_path / "zarr").create_array(
        "a/b", shape=values.shape, dtype=values.dtype, chunks=(max(1, values.size),),
        compressors=[Crc32cCodec()], fill_value=0, config={"write_empty_chunks": True},
    )  # fmt: skip
    if values.size:
        array[:] = values
    assert files(tmp_path / "ours") == files(tmp_path / "zarr")
    assert by_zarr(tmp_path / "ours")["a/b"][:].tolist() == values.tolist()


def test_groups_keep_what_others_wrote_there(tmp_path):
    ZarrTree(tmp_path)
    by_zarr(tmp_path).create_group("a").attrs["license"] = "CC0"
    before = (tmp_path / "a" / "zarr.json").read_bytes()
    found = ZarrTree(tmp_path).side("a/b", np.arange(3))
    assert found["a/zarr.json"] == before == (tmp_path / "a" / "zarr.json").read_bytes()


def test_an_array_is_written_once(tmp_path):
    tree = ZarrTree(tmp_path)
    tree.side("a", np.arange(3))
    with pytest.raises(StoreExists, match=r"a/zarr\.json: exists already"):
        tree.side("a", np.arange(4))

"""Row arrays as they lie on disk: nothing but their rows, and zeros behind them."""

import numpy as np
import pytest
import zarr

from blockstore.create import dimension_names
from blockstore.format import RowArray, row_geometry, shard_path
from blockstore.store import open_store, read_rows
from blockstore.writer import StoreWriter
from tests.graphs import make_csc
from tests.stores import write_store


@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 1300])
@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_behind_the_last_row_there_are_zeros(tmp_path, num_rows, piece):
    """A buffer is used for several blocks: nothing of an earlier one stays behind the last row."""
    array = RowArray("rows", "uint8", num_rows, (16,))
    geometry = row_geometry(array, 4096)
    rows = np.full((num_rows, 16), 0xAB, np.uint8)
    folder = tmp_path / "work"
    with StoreWriter(folder, block_bytes=4096, buffer_bytes=4096) as w:
        with w.rows(array) as out:
            for first in range(0, num_rows, piece):
                out.append(rows[first : first + piece])
        raw = (folder / shard_path("rows", 0, 2)).read_bytes()[: geometry.num_blocks * 4096]
    assert raw.count(0xAB) == num_rows * 16
    assert not any(raw[num_rows * 16 :])


def test_equal_content_gives_an_equal_fingerprint(tmp_path):
    graph = make_csc([3] * 700, 1)
    prints = {write_store(tmp_path / name, graph, [1, 2]).fingerprint for name in "ab"}
    assert len(prints) == 1
    store = open_store(tmp_path / "a")
    assert read_rows(store, store.manifest.types[0].splits["train"]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nodes/user/label", ["node", "label_1"]),
        ("nodes/user/features/x", ["node", "features.x_1"]),
        ("nodes/user/features/x.scale", ["features.x.scale_0", "features.x.scale_1"]),
        ("nodes/user/splits/train", ["splits.train_0", "splits.train_1"]),
        ("nodes/user/halo/label", ["halo.label_0", "halo.label_1"]),
        ("nodes/user/hops/train/0", ["hops.train.0_0", "hops.train.0_1"]),
        ("edges/a___b___c/features/kind", ["edge", "features.kind_1"]),
        ("edges/a___b___c/blocks", ["blocks_0", "blocks_1"]),
        ("edges/a___b___c/halo/blocks", ["halo.blocks_0", "halo.blocks_1"]),
    ],
)
def test_names_of_dimensions(path, expected):
    assert dimension_names(path, 2) == expected


def test_every_array_names_its_dimensions_and_a_name_is_one_size(tmp_path):
    write_store(tmp_path / "s", make_csc([3] * 700, 1), [1, 2])
    found = dict(zarr.open_group(tmp_path / "s", mode="r").members(max_depth=None))
    arrays = {path: a for path, a in found.items() if isinstance(a, zarr.Array)}
    assert len(arrays) > 8
    sizes = {}
    for path, array in arrays.items():
        for name, size in zip(array.metadata.dimension_names, array.shape, strict=True):
            owner = "/".join(path.split("/")[:2])
            assert sizes.setdefault((owner, name), size) == size

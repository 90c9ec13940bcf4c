"""prefetch over real daemons: batches of several types, and hop-wise ones."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.errors import NotAStore  # noqa: E402
from clients.device import stage  # noqa: E402
from clients.device.calibration import MODES  # noqa: E402
from clients.device.devices import BY_HOST, Device, Mark  # noqa: E402
from clients.torch import HeteroDataset, HopDataset, prefetch  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.clients.test_prefetch import nothing_is_left  # noqa: E402, F401
from tests.daemons import daemon  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.hopstores import make_hops, write_hop_store  # noqa: E402


def content(batch):
    """All of a batch, as bytes."""
    found = []

    def note(t):
        found.append((t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes()))
        return t

    batch.map(note)
    return batch.epoch, batch.step, found


@pytest.fixture(scope="module")
def several_types(tmp_path_factory):
    """Authors and papers, both with features."""
    relations = [("paper", "cites", "paper"), ("author", "writes", "paper")]
    graph = random_hetero(
        np.random.default_rng(1), {"author": 60, "paper": 200}, relations, 6,
        {"author": 5, "paper": 3}, "paper",
    )  # fmt: skip
    store = tmp_path_factory.mktemp("types") / "store"
    write_hetero_store(store, graph)
    with daemon(store, "16M") as endpoint:
        yield endpoint


@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_batches_of_several_types(several_types, monkeypatch, mode):
    monkeypatch.setattr(stage, "PRESAMPLED", 4)
    options = {"num_neighbors": [4, 3], "batch_size": 5, "input_type": "paper"}
    plain = HeteroDataset(several_types, **options)
    expected = [[content(b) for b in plain] for _ in range(2)]
    plain.close()
    with prefetch(HeteroDataset(several_types, **options), "cpu", mode=mode) as ahead:
        assert [[content(b) for b in ahead] for _ in range(2)] == expected
        if mode == "cached":
            assert ahead.choice().cached_rows > 0


@pytest.fixture(scope="module")
def hops(tmp_path_factory):
    """Chunks that begin and end inside pages."""
    store = tmp_path_factory.mktemp("hops") / "store"
    write_hop_store(store, {"train": make_hops(5000, 25, {"sym": 2}, 1)})
    with daemon(store, "16M") as endpoint:
        yield endpoint


@pytest.mark.parametrize("options", [{}, {"method": "rr"}])
@pytest.mark.parametrize("mode", ["auto", "staging"])
def test_hops(hops, options, mode):
    plain = HopDataset(hops, batch_size=700, **options)
    with prefetch(HopDataset(hops, batch_size=700, **options), "cpu", mode=mode) as ahead:
        for _ in range(2):
            assert [content(b) for b in ahead] == [content(b) for b in plain]
    plain.close()


def test_chunks_that_lie_in_the_arena_are_lent_until_they_are_copied(hops):
    plain, data = (HopDataset(hops, batch_size=700, views=v) for v in (False, True))
    made = stage.DeviceStaging(Device(), direct=False, borrows=True)
    data.lay_out_in(made)
    steps, found = data.ahead(), []
    for expected in plain:
        made.begin()
        found.append((made.move(next(steps).batch).batch, expected))
    assert all(content(a) == content(b) for a, b in found)
    made.close()
    data.close()
    plain.close()


class Patient(Device):
    """Counts how often it is waited for."""

    waits = 0

    def mark(self) -> Mark:
        mark = super().mark()

        def wait() -> None:
            self.waits += 1

        mark.wait = wait
        return mark


@pytest.mark.parametrize("views", [False, True])
def test_a_piece_of_the_arena_is_not_given_back_before_it_is_copied(hops, views):
    data, device = HopDataset(hops, batch_size=700, views=views), Patient()
    made = stage.DeviceStaging(device, direct=False, borrows=views)
    data.lay_out_in(made)
    steps = data.ahead()
    for number in range(3):
        made.begin()  # the reader gives back what it had lent, after this
        assert device.waits == (number if views else max(0, number - 1))
        made.move(next(steps).batch)
    made.close()
    data.close()


def test_what_cannot_be_is_refused(hops):
    with pytest.raises(Refused, match="views=True, read ahead"):
        prefetch(HopDataset(hops, views=True), "cpu")
    with pytest.raises(Refused, match="mode 'direct': the host brings the rows of this"):
        prefetch(HopDataset(hops), "cpu", mode="direct")


@pytest.fixture(scope="module")
def filed(tmp_path_factory):
    """A daemon, and the store that this process can read as well."""
    folder = tmp_path_factory.mktemp("filed")
    write_hop_store(folder / "store", {"train": make_hops(3000, 6, {"sym": 2}, 4, "bfloat16")})
    with daemon(folder / "store", "16M") as endpoint:
        yield endpoint, folder / "store"


@pytest.mark.parametrize("options", [{}, {"chunk": 64, "redeal": 1}, {"labels": False}])
def test_chunks_read_past_the_daemon_are_the_same(filed, options):
    endpoint, store = filed
    plain = HopDataset(endpoint, batch_size=700, **options)
    expected = [[content(b) for b in plain] for _ in range(2)]
    plain.close()
    here = HopDataset(endpoint, batch_size=700, files=store, **options)
    assert [[content(b) for b in here] for _ in range(2)] == expected
    here.set_epoch(0)
    with prefetch(here, "cpu", mode="staging") as ahead:
        assert [[content(b) for b in ahead] for _ in range(2)] == expected
        assert ahead.files_by == BY_HOST


def test_a_device_that_reads_files_brings_the_same(filed):
    endpoint, store = filed
    plain, data = (HopDataset(endpoint, batch_size=700, files=f) for f in (None, store))
    made = stage.DeviceStaging(Device(files_by="itself"), direct=False)
    data.lay_out_in(made)
    steps = data.ahead()
    for expected in plain:
        made.begin()
        assert content(made.move(next(steps).batch).batch) == content(expected)
    assert made.files_by == "itself"
    data.close()
    plain.close()


def test_files_of_another_store_are_refused(filed, hops, tmp_path):
    with pytest.raises(Refused, match=r"fingerprint .*, expected .*, that of the store"):
        len(HopDataset(hops, files=filed[1]))
    with pytest.raises(NotAStore, match="expected a store"):
        len(HopDataset(hops, files=tmp_path))
    with pytest.raises(Refused, match="files: expected method='cr'"):
        HopDataset(hops, files=filed[1], method="rr")

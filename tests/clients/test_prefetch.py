"""prefetch against a made-up daemon: the same batches, by every way, and nothing left behind."""

import gc
import threading
from itertools import islice

import pytest

torch = pytest.importorskip("torch")

from clients.device import stage  # noqa: E402
from clients.device.calibration import MODES, TRIALS, WARM  # noqa: E402
from clients.device.devices import Device  # noqa: E402
from clients.records import TensorRecord  # noqa: E402
from clients.torch import NeighborDataset, prefetch  # noqa: E402
from loaderd.api.errors import BatchFailed, Refused  # noqa: E402
from loaderd.api.protocol import Release  # noqa: E402
from tests.clients.fake import fake_daemon  # noqa: E402


def dataset(daemon, **options):
    return NeighborDataset(daemon.endpoint, num_neighbors=[4, 3], batch_size=8, **options)


def content(batch: TensorRecord):
    """All of a batch, as plain values."""
    found = []
    batch.map(lambda t: found.append((t.dtype, t.shape, t.view(-1).tolist())) or t)
    return batch.epoch, batch.step, batch.num_sampled_nodes, found


def readers():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert not readers()


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("options", [{}, {"groups": 3}, {"window": 1}, {"window": 4, "lent": 1}])
def test_batches_are_those_of_the_dataset(tmp_path, monkeypatch, mode, options):
    monkeypatch.setattr(stage, "PRESAMPLED", 3)
    with fake_daemon(tmp_path, num_steps=9, **options) as daemon:
        plain = dataset(daemon)
        with prefetch(dataset(daemon), "cpu", mode=mode) as ahead:
            for _ in range(3):
                assert [content(b) for b in ahead] == [content(b) for b in plain]
        plain.close()


def test_each_batch_keeps_what_it_has(tmp_path, monkeypatch):
    """No later batch is laid out over one that is still in use."""
    with fake_daemon(tmp_path, num_steps=9) as daemon:
        for mode in MODES:
            with prefetch(dataset(daemon), "cpu", depth=3, mode=mode) as ahead:
                kept = list(ahead)
            assert [content(b) for b in kept] == [content(b) for b in dataset(daemon)]


def test_all_ways_are_measured_and_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PRESAMPLED", 3)
    monkeypatch.setattr(stage, "LEARNING", 5)
    device = Device()
    with fake_daemon(tmp_path, num_steps=40) as daemon:
        data = dataset(daemon)
        made = stage.DeviceStaging(device, cache_bytes=4000)
        data.lay_out_in(made)
        steps = data.ahead()
        needed = 0
        while made.choice() is None:
            made.begin()
            made.move(next(steps).batch)
            needed += 1
        assert 3 * (WARM + TRIALS) < needed <= 3 * (WARM + TRIALS) + 5
        choice = made.choice()
        made.close()
        data.close()
    assert set(choice.ns_per_row) == set(MODES)
    assert choice.mode == min(choice.ns_per_row, key=choice.ns_per_row.get)


def test_a_device_that_cannot_read_the_arena_gets_copies(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("clients.device.devices.Device.lend", lambda *_: "no such memory")
    with fake_daemon(tmp_path, num_steps=30) as daemon:
        for mode in ("auto", "direct", "cached"):
            made = stage.DeviceStaging(Device(), mode)
            data = dataset(daemon)
            data.lay_out_in(made)
            steps = data.ahead()
            for expected in islice(dataset(daemon), 20):
                made.begin()
                assert content(made.move(next(steps).batch).batch) == content(expected)
            assert made.choice().mode == "staging"
            assert made.choice().reason == "no such memory"
            data.close()
    assert "no such memory" in caplog.text


class Busy(Device):
    """Has read a batch when it is asked for the fourth time; nobody may sleep until then."""

    def mark(self):
        mark, answers = super().mark(), iter([False] * 3)
        mark.passed = lambda: next(answers, True)
        mark.wait = lambda: next(answers, None) is None or pytest.fail("it was waited for")
        return mark


def test_a_device_that_still_reads_is_asked_again_while_the_daemon_has_nothing(tmp_path):
    with fake_daemon(tmp_path, num_steps=9, window=4, lent=1) as daemon:
        made, data, plain = stage.DeviceStaging(Busy(), "direct"), dataset(daemon), dataset(daemon)
        data.lay_out_in(made)
        steps = data.ahead()
        for expected in plain:
            made.begin()
            assert content(made.move(next(steps).batch).batch) == content(expected)
        data.close()
        plain.close()


def test_a_state_counts_what_was_handed_out(tmp_path):
    with fake_daemon(tmp_path, num_steps=12) as daemon:
        ahead = prefetch(dataset(daemon), "cpu", depth=4)
        first = list(islice(ahead, 5))
        state = ahead.state_dict()
        assert (state["epoch"], state["step"]) == (0, 4)
        ahead.close()
        with prefetch(dataset(daemon), "cpu", depth=4) as later:
            later.load_state_dict(state)
            rest = list(later)
            assert [b.step for b in first + rest] == list(range(12))
            assert later.state_dict()["epoch"] == 1
            assert [b.epoch for b in islice(later, 2)] == [1, 1]


def test_a_state_before_the_first_batch_is_the_start(tmp_path):
    with fake_daemon(tmp_path) as daemon, prefetch(dataset(daemon), "cpu") as ahead:
        iterator = iter(ahead)
        daemon.wait_for(Release, 2)
        assert ahead.state_dict()["step"] == -1
        assert [b.step for b in iterator] == [0, 1, 2, 3, 4]


def test_it_reads_no_further_ahead_than_asked(tmp_path):
    with fake_daemon(tmp_path, num_steps=12) as daemon:
        ahead = prefetch(dataset(daemon), "cpu", depth=3)
        iterator = iter(ahead)
        next(iterator)
        daemon.wait_for(Release, 4)
        ahead.close()
        daemon.stop()  # all that was released has come
        assert {m.step for m in daemon.received(Release)} == {0, 1, 2, 3}


def test_a_trainer_that_is_busy_keeps_no_batch_of_the_daemons(tmp_path):
    """Others may share it: what the device has read is released without a further batch."""
    with fake_daemon(tmp_path) as daemon:
        ahead = prefetch(dataset(daemon), "cpu", depth=1, mode="direct")
        iterator = iter(ahead)
        next(iterator)
        daemon.wait_for(Release, 2)  # the trainer has one, and the other waits for it
        assert [batch.step for batch in iterator] == [1, 2, 3, 4]
        daemon.wait_for(Release, 5)
        ahead.close()


def test_epochs_go_on_as_those_of_the_dataset(tmp_path):
    with fake_daemon(tmp_path) as daemon, prefetch(dataset(daemon), "cpu") as ahead:
        assert len(ahead) == 5
        assert [b.epoch for b in islice(ahead, 2)] == [0, 0]
        assert [(b.epoch, b.step) for b in ahead] == [(1, s) for s in range(5)]
        ahead.set_epoch(7)
        assert [(b.epoch, b.step) for b in islice(ahead, 2)] == [(7, 0), (7, 1)]
        older = iter(ahead)
        next(older)
        assert next(iter(ahead)).epoch == 9
        with pytest.raises(RuntimeError, match="newer iterator"):
            next(older)


def test_an_iterator_that_is_let_go_of_ends_its_thread(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        ahead = prefetch(dataset(daemon), "cpu", depth=1)
        iterator = iter(ahead)
        assert len(readers()) == 1
        del iterator
        gc.collect()
        assert not readers()
        for batch in ahead:
            assert batch.step == 0
            break
        assert not readers()
        assert ahead.state_dict()["step"] == 0
        ahead.close()


def test_an_error_comes_in_its_place(tmp_path):
    with fake_daemon(tmp_path, fail_at=3) as daemon, prefetch(dataset(daemon), "cpu") as ahead:
        iterator = iter(ahead)
        assert [next(iterator).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(BatchFailed):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        assert not readers()


def test_closing_ends_a_wait_for_the_daemon(tmp_path):
    """The daemon serves no step: it waits for steps to be released that never are."""
    with fake_daemon(tmp_path, die_at=2) as daemon:
        ahead = prefetch(dataset(daemon, reconnect_s=600), "cpu")
        iterator = iter(ahead)
        assert next(iterator).step == 0  # its release is the daemon's end; step 1 may be lost
        daemon.wait_gone()
        ahead.close()  # while it looks for a new daemon
        assert not readers()
        with pytest.raises(RuntimeError, match="newer iterator"):
            next(iterator)


def test_a_dataset_can_be_used_alone_afterwards(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        data = dataset(daemon)
        with prefetch(data, "cpu", mode="staging") as ahead:
            before = [content(b) for b in ahead]
        data.set_epoch(0)
        assert [content(b) for b in data] == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 0}, "depth 0: expected at least 1"),
        ({"mode": "fast"}, "mode 'fast': expected one of 'auto', 'staging'"),
        ({"device": "meta"}, "device 'meta': expected 'cpu' or 'cuda'"),
    ],
)
def test_nonsense_is_refused(tmp_path, options, said):
    with fake_daemon(tmp_path) as daemon, pytest.raises(ValueError, match=said):
        prefetch(dataset(daemon), **({"device": "cpu"} | options))


def test_only_our_datasets_are_taken():
    with pytest.raises(Refused, match=r"dataset: str, expected one of ours.*\.dataset"):
        prefetch("ipc:///somewhere", "cpu")


def test_no_gpu_is_said(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with fake_daemon(tmp_path) as daemon, pytest.raises(ValueError, match="no CUDA device"):
        prefetch(dataset(daemon))
    assert issubclass(Refused, ValueError)

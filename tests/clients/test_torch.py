"""NeighborDataset against a made-up daemon: tensors, epochs, states, workers, what is refused."""

import gc
import multiprocessing
import pickle
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from clients.connection.position import StateMismatch  # noqa: E402
from clients.torch import NeighborDataset, seed_ids  # noqa: E402
from loaderd.api.errors import BatchFailed, NoDaemon, Refused, SessionLost  # noqa: E402
from loaderd.api.protocol import Attach, Detach, Release, Start  # noqa: E402
from tests.clients.fake import fake_daemon, make_batch, node_rows  # noqa: E402
from tests.ranks import PRELOADED  # noqa: E402


@pytest.fixture
def daemon(tmp_path):
    with fake_daemon(tmp_path) as running:
        yield running


def dataset(daemon, **options):
    return NeighborDataset(daemon.endpoint, num_neighbors=[4, 3], batch_size=8, **options)


def places(batches):
    return [(batch.epoch, batch.step) for batch in batches]


def epoch(number, first=0, stride=1):
    return [(number, step) for step in range(first, 5, stride)]


def test_batches_are_tensors_of_their_own(daemon):
    for batch in dataset(daemon):
        made = make_batch(0, batch.step, 8)
        assert torch.equal(batch.n_id, torch.from_numpy(made.n_id.astype(np.int64)))
        assert torch.equal(batch.x, torch.from_numpy(node_rows()["x"])[batch.n_id])
        assert torch.equal(batch.y, torch.from_numpy(node_rows()["y"].astype(np.int64))[batch.n_id])
        assert batch.batch_size == 8 == batch.num_sampled_nodes[0]
        assert sum(batch.num_sampled_nodes) == batch.num_nodes == batch.x.size(0)
        assert sum(batch.num_sampled_edges) == batch.edge_index.size(1)
        assert batch.e_id is None
        batch.x += 1  # writable
        batch.edge_index += 1


def test_bfloat16_comes_as_such(daemon):
    batch = next(iter(dataset(daemon)))
    half = batch.features["half"]
    assert half.dtype == torch.bfloat16
    exact = (batch.n_id[:, None] + torch.arange(3)).float()
    stored = (exact.view(torch.int32) >> 16 << 16).view(torch.float32)  # cut off, not rounded
    assert torch.equal(half.float(), stored)


def test_batches_move_between_devices(daemon):
    batch = next(iter(dataset(daemon, return_e_id=True))).to("meta")
    tensors = (batch.x, batch.y, batch.edge_index, batch.n_id, batch.input_id)
    assert all(t.device.type == "meta" for t in (*tensors, *batch.features.values()))
    assert batch.batch_size == 8


def test_each_iteration_is_the_next_epoch(daemon):
    data = dataset(daemon)
    assert places(data) == epoch(0)
    assert places(islice(data, 2)) == epoch(1)[:2]
    assert places(data) == epoch(2)
    data.set_epoch(1)
    assert places(data) == epoch(1)
    assert places(data) == epoch(2)


def test_set_epoch_starts_an_epoch_again(daemon):
    data = dataset(daemon)
    for _ in range(2):
        data.set_epoch(7)
        assert places(islice(data, 3)) == epoch(7)[:3]


def test_length_is_in_batches(daemon):
    assert len(dataset(daemon)) == 5


def test_an_older_iterator_is_told(daemon):
    data = dataset(daemon)
    first = iter(data)
    next(first)
    assert places(data) == epoch(1)
    with pytest.raises(RuntimeError, match="newer iterator"):
        next(first)


def test_a_state_goes_on_after_the_last_batch_consumed(daemon):
    data = dataset(daemon)
    data.set_epoch(3)
    before = places(islice(data, 2))
    other = dataset(daemon)
    other.load_state_dict(pickle.loads(pickle.dumps(data.state_dict())))
    assert before + places(other) == epoch(3)
    assert places(other) == epoch(4)


def test_set_epoch_after_a_load_keeps_the_step(daemon):
    state = dataset(daemon).state_dict() | {"epoch": 3, "step": 1}
    data = dataset(daemon)
    data.load_state_dict(state)
    data.set_epoch(3)
    assert places(data) == epoch(3, 2)
    data.load_state_dict(state)
    data.set_epoch(4)
    assert places(data) == epoch(4)


def test_a_state_at_the_end_is_the_next_start(daemon):
    data = dataset(daemon)
    list(data)
    state = data.state_dict()
    assert (state["epoch"], state["step"]) == (1, -1)
    data.load_state_dict(state)
    assert places(data) == epoch(1)


def test_a_state_of_a_given_batch(daemon):
    data = dataset(daemon)
    batches = list(data)
    assert data.state_dict(batches[2])["step"] == 2


def test_a_state_of_other_parameters_is_an_error(daemon):
    state = dataset(daemon, seed=1).state_dict()
    late = dataset(daemon, seed=2)
    late.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(StateMismatch, match=r"seed 1 \(now 2\)"):
            iter(late)
    connected = dataset(daemon, shuffle=False, seed=1)
    len(connected)
    with pytest.raises(StateMismatch, match=r"shuffle True \(now False\)"):
        connected.load_state_dict(state)


@pytest.mark.parametrize(
    ("context", "persistent"),
    [
        ("fork", False), ("fork", True), ("forkserver", True),
        pytest.param("spawn", True, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_workers_keep_the_order(daemon, context, persistent):
    """A fork server's processes are sent the dataset, as spawned ones are, but have torch."""
    if context == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
    data = dataset(daemon)
    assert len(data) == 5  # the parent holds a session that the workers must not use
    loader = DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context=context,
        persistent_workers=persistent,
    )  # fmt: skip
    for number in (0, 1):
        if not persistent:
            data.set_epoch(number)
        assert places(loader) == epoch(number)
    assert {m.stride for m in daemon.received(Start)} == {2}


@pytest.mark.parametrize("consumed", [1, 3])  # 3: one step is left for two workers
def test_workers_go_on_from_a_state(daemon, consumed):
    data = dataset(daemon)
    data.load_state_dict(data.state_dict() | {"step": consumed})
    loader = DataLoader(data, batch_size=None, num_workers=2)
    assert places(loader) == epoch(0, consumed + 1)


def test_two_datasets_share_a_process(daemon):
    train, valid = dataset(daemon), dataset(daemon, split="valid")
    both = [places(pair) for pair in zip(train, valid, strict=True)]
    assert both == [[p, p] for p in epoch(0)]
    assert [m.split for m in daemon.received(Attach)] == ["train", "valid"]


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([3, 1, 1], [3, 1, 1]),
        (np.array([5, 2], np.uint16), [5, 2]),
        (torch.tensor([4, 9], dtype=torch.int32), [4, 9]),
        (torch.tensor([False, True, True]), [1, 2]),
        (np.array([True, False]), [0]),
    ],
)
def test_input_nodes_are_ids_or_a_mask(daemon, given, ids):
    len(dataset(daemon, input_nodes=given))
    daemon.stop()
    np.testing.assert_array_equal(daemon.ids, [ids])
    assert daemon.received(Attach)[0].split == ""


def test_input_nodes_may_name_a_split(daemon):
    len(dataset(daemon, input_nodes="all"))
    assert daemon.received(Attach)[0].split == "all"


@pytest.mark.parametrize("nodes", [np.zeros((2, 2), int), np.zeros(3), torch.rand(2)])
def test_other_input_nodes_are_refused(nodes):
    with pytest.raises(Refused, match="expected 1-d ids or a bool mask"):
        seed_ids(nodes)


def test_nothing_is_connected_before_it_must_be(tmp_path):
    (tmp_path / "gone.sock.door").touch()  # of a daemon that was killed
    data = NeighborDataset(f"ipc://{tmp_path}/gone.sock")
    data.set_epoch(3)
    assert repr(data).endswith("/gone.sock', num_neighbors=(15, 10, 5), batch_size=1000)")
    pickle.dumps(data)
    with pytest.raises(NoDaemon, match="no daemon listens there"):
        iter(data)


def test_a_dataset_pickles_as_parameters_and_position(daemon):
    data = dataset(daemon, input_nodes=[1, 2])
    len(data)
    data.set_epoch(4)
    assert places(pickle.loads(pickle.dumps(data))) == epoch(4)


def test_a_dropped_dataset_detaches(daemon):
    data = dataset(daemon)
    next(iter(data))
    del data
    gc.collect()
    daemon.stop()
    assert len(daemon.received(Detach)) == 1
    assert daemon.hang_ups == 1


def test_a_closed_dataset_connects_again(daemon):
    data = dataset(daemon)
    assert places(data) == epoch(0)
    data.close()
    data.close()
    assert places(data) == epoch(1)


def test_several_relations_are_refused(tmp_path):
    refused = pytest.raises(Refused, match="the store has 3 relations")
    with fake_daemon(tmp_path, num_relations=3) as daemon, refused:
        iter(dataset(daemon))
    assert daemon.hang_ups == 1


def test_a_failed_batch_ends_the_epoch_and_not_the_session(tmp_path):
    with fake_daemon(tmp_path, fail_at=2) as daemon:
        data = dataset(daemon)
        with pytest.raises(BatchFailed, match="crc32c"):
            list(data)
        data.set_epoch(1)
        assert places(islice(data, 2)) == epoch(1)[:2]
        data.close()


def test_a_daemon_that_died_is_found_again(tmp_path):
    with fake_daemon(tmp_path, die_at=3) as daemon:
        data = dataset(daemon, reconnect_s=0)
        with pytest.raises(SessionLost):
            list(data)
    for name in ("fake", "fake.door"):
        (tmp_path / name).unlink(missing_ok=True)
    with fake_daemon(tmp_path) as daemon:
        data.set_epoch(0)
        assert places(data) == epoch(0)
        data.close()


@pytest.mark.parametrize("window", [1, 2])
def test_a_reconnect_asks_for_the_steps_that_were_not_consumed_and_releases_each(tmp_path, window):
    """Steps that nobody takes would hold a slot of the window until the run ends."""
    # with a window of 2, step 2 may or may not arrive before the daemon has gone
    taken = 4 - window
    with fake_daemon(tmp_path, die_at=3, window=window) as first:
        data = dataset(first, reconnect_s=60.0)
        steps = iter(data)
        assert [next(steps).step for _ in range(taken)] == list(range(taken))
    for name in ("fake", "fake.door"):
        (tmp_path / name).unlink(missing_ok=True)
    with fake_daemon(tmp_path, window=window) as second:
        assert [batch.step for batch in steps] == list(range(taken, 5))
        data.close()
        second.stop()
        (start,) = second.received(Start)
        assert (start.epoch, start.stride) == (0, 1)
        assert taken <= start.step <= 3  # the first daemon goes away instead of step 3
        released = [message.step for message in second.received(Release)]
        assert released == list(range(start.step, 5))

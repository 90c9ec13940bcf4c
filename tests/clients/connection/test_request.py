"""What a script asks for wrongly: it hears so at once, and no daemon is asked."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from blockstore.errors import NotAStore  # noqa: E402
from clients.connection.position import Position, StateMismatch, dump_state, parse_state  # noqa: E402
from clients.connection.session import Session  # noqa: E402
from clients.link import LinkDataset  # noqa: E402
from clients.torch import NeighborDataset  # noqa: E402
from loaderd.api.errors import BadMessage, DaemonError, Refused  # noqa: E402
from loaderd.api.protocol import Attach  # noqa: E402
from tests.clients.connection.test_position import RESOLVED  # noqa: E402
from tests.clients.fake import fake_daemon  # noqa: E402

NOWHERE = "ipc:///nowhere/at.all"  # fields are looked at before the endpoint is
PAPERS = ("paper", "cites", "paper")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"batch_size": "1000"}, "batch_size: found '1000': Expected `int`, got `str`"),
        ({"batch_size": 1.5}, "batch_size: found 1.5"),
        ({"batch_size": None}, "batch_size: found None"),
        ({"batch_size": True}, "batch_size: found True"),
        ({"seed": 2**64}, "seed: found 18446744073709551616"),
        ({"plan": 3}, "plan: found 3: Expected `str`, got `int`"),
        ({"split": None}, "split: found None"),
        ({"split": ["train"]}, "split: found .'train'."),
        ({"store": {1}}, "store: found {1}"),
        ({"shuffle": "no"}, "shuffle: found 'no': Expected `bool`"),
        ({"input_type": 5}, "input_type: found 5"),
        ({"num_neighbors": "15"}, "num_neighbors: found '15', expected an integer for each hop"),
        ({"num_neighbors": 15}, "num_neighbors: found 15, expected"),
        ({"num_neighbors": None}, "num_neighbors: found None, expected"),
        ({"num_neighbors": [1.5]}, r"num_neighbors: found \[1.5\], expected"),
        ({"num_neighbors": ["15"]}, r"num_neighbors: found \['15'\], expected"),
        ({"num_neighbors": {"cites": [3]}}, "relation: found 'cites', expected .source type"),
        ({"num_neighbors": {PAPERS: 3}}, "num_neighbors: found 3, expected"),
        ({"input_nodes": []}, "input_nodes: found none"),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_is_given(asked, said):
    with pytest.raises(Refused, match=said):
        NeighborDataset(NOWHERE, **asked)


@pytest.fixture
def gone(tmp_path):
    """The endpoint of a daemon that was killed."""
    (tmp_path / "daemon.sock.door").touch()
    return f"ipc://{tmp_path}/daemon.sock"


def test_what_is_no_endpoint_says_what_to_do(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "file").touch()
    for endpoint, words in (
        (str(tmp_path / "store"), "no zarr.json, expected a store made by `blockstore ingest`"),
        (
            str(tmp_path / "file"),
            "expected ipc:///path/of/the/socket, tcp://HOST:PORT?keys=FILE or the path of a store",
        ),
        (str(tmp_path / "none"), "expected ipc:///path/of/the/socket, tcp://"),
        ("tcp://host", "expected tcp://HOST:PORT"),
        (f"ipc://{tmp_path}/none", "no daemon listens there; start one with: loaderd serve STORE"),
    ):
        with pytest.raises((DaemonError, NotAStore)) as raised:
            NeighborDataset(endpoint)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)


def test_endpoints_are_texts():
    with pytest.raises(Refused, match="endpoint: found 5, expected ipc:///"):
        NeighborDataset(5)


def test_a_path_that_no_socket_can_have(tmp_path):
    with pytest.raises(Refused, match=r"its path has .* bytes, a socket's can have"):
        next(iter(NeighborDataset(f"ipc:///tmp/{'a' * 200}")))


def test_relations_of_seed_edges_are_triples():
    with pytest.raises(Refused, match="relation: found 'cites', expected"):
        LinkDataset(NOWHERE, relation="cites")


def test_integers_of_numpy_are_integers(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        asked = {"batch_size": np.int64(4), "seed": np.uint32(3), "num_neighbors": np.array([4, 3])}
        with_plain = NeighborDataset(daemon.endpoint, batch_size=4, seed=3, num_neighbors=[4, 3])
        with_numpy = NeighborDataset(daemon.endpoint, **asked)
        assert with_numpy.attached().resolved == with_plain.attached().resolved
        with_numpy.close()
        with_plain.close()


@pytest.mark.parametrize("epoch", [-1, "a", None, 1.0, 2**63])
def test_epochs_count_from_nothing(epoch, gone):
    data = NeighborDataset(gone)
    with pytest.raises(Refused, match=r"epoch: found .*, expected an integer from 0"):
        data.set_epoch(epoch)


def test_batches_are_not_batched_again(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        data = NeighborDataset(daemon.endpoint, num_neighbors=(4, 3))
        for options in ({}, {"batch_size": 32}):
            with pytest.raises(Refused, match=r"expected DataLoader.dataset, batch_size=None"):
                next(iter(DataLoader(data, **options)))
        (batch,) = next(iter(DataLoader(data, batch_size=1, collate_fn=tuple)))
        assert batch.batch_size
        data.close()


def test_what_the_daemon_cannot_read_is_an_error_and_no_wait(tmp_path):
    """An answer that names no request, since the daemon could not read which."""
    with fake_daemon(tmp_path) as daemon, pytest.raises(BadMessage, match="Expected `int`"):
        Session(daemon.endpoint, Attach(token=0, request=0, batch_size="many"))


@pytest.mark.parametrize("spoil", [{"epoch": -1}, {"step": -2}, {"worker": 1}, {"stride": 0}])
def test_places_that_cannot_be_are_no_state(spoil):
    with pytest.raises(StateMismatch, match="expected what a dataset's state_dict"):
        parse_state(dump_state(RESOLVED, Position()) | spoil)


def test_options_of_the_loader_replaced(gone):
    """Those that ask for what is done anyway are taken, others are named."""
    pyg = pytest.importorskip("clients.pyg")
    pyg.NeighborLoader(gone, [4], disjoint=False, subgraph_type="directional", num_workers=2)
    pyg.NeighborLoader(gone, [4], filter_per_worker=True, is_sorted=True, collate_fn=None)
    pyg.NeighborLoader(gone, [4], input_nodes=[1], input_time=[5], time_attr="t", disjoint=True)
    for options, words in (
        ({"disjoint": True}, "expected False: .*; give times of the seeds"),
        ({"subgraph_type": "induced", "plan": "minibatch"}, "expected no plan.*; leave one of"),
        ({"directed": False, "plan": "hyperbatch"}, "expected no plan.*; leave one of"),
        ({"neighbor_sampler": 1}, "expected None: neighbors are drawn in the daemon; give sampler"),
        ({"transform_sampler_output": len}, "expected None: .*; give transform, of the batch"),
        ({"custom_cls": dict}, "expected None: .*; give transform"),
        ({"batch_sampler": [1]}, "expected none: .*; give ids in any order, and batch_size"),
        ({"collate_fn": len}, "expected none: .*; give transform"),
        ({"no_such": 1}, "expected no such option; leave it out"),
    ):
        with pytest.raises(
            TypeError, match=f"NeighborLoader: found {next(iter(options))}.*{words}"
        ):
            pyg.NeighborLoader(gone, [4], **options)
    with pytest.raises(TypeError, match=r"'induced', expected 'directional' or 'bidirectional'"):
        pyg.LinkNeighborLoader(gone, [4], subgraph_type="induced")
    with pytest.raises(TypeError, match=r"drop_last=True: found plan 'macrobatch'.*; leave drop"):
        pyg.NeighborLoader(gone, [4], drop_last=True, plan="macrobatch")

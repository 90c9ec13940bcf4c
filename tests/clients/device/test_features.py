"""Feature blocks read whole, past any daemon."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.device import features  # noqa: E402
from clients.device.devices import BY_HOST  # noqa: E402
from clients.device.features import load_features  # noqa: E402
from loaderd.errors import Refused  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two types; rows of papers take several blocks, with a gap behind each."""
    relations = [("author", "writes", "paper")]
    graph = random_hetero(
        np.random.default_rng(2), {"author": 40, "paper": 3000}, relations, 3,
        {"author": 5, "paper": 7}, "paper",
    )  # fmt: skip
    store = tmp_path_factory.mktemp("features") / "store"
    write_hetero_store(store, graph)
    return graph, store


@pytest.mark.parametrize("name", ["author", "paper"])
@pytest.mark.parametrize("at_once", [1, features.AT_ONCE])
def test_rows_are_those_of_the_source(stored, monkeypatch, name, at_once):
    monkeypatch.setattr(features, "AT_ONCE", at_once)
    graph, store = stored
    found = load_features(store, "x", "cpu", name)
    ids = load_features(store, "original_id", "cpu", name).rows
    assert (found.first, found.read_by) == (0, BY_HOST)
    np.testing.assert_array_equal(found.rows.numpy(), graph.x(name)[ids.numpy()])


def test_some_blocks_are_some_of_the_rows(stored):
    _, store = stored
    whole = load_features(store, "x", "cpu", "paper").rows
    for blocks in (range(1, 3), range(1), range(2, 2)):
        found = load_features(store, "x", "cpu", "paper", blocks)
        assert torch.equal(found.rows, whole[found.first : found.first + len(found.rows)])
    assert load_features(store, "x", "cpu", "paper", range(1, 2)).first > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"node_type": "venue"}, "node_type 'venue': expected one of author, paper"),
        ({}, "node_type '': expected one of author, paper"),
        ({"node_type": "paper", "name": "z"}, "array 'z', expected one of x, original_id"),
        ({"node_type": "paper", "blocks": range(900, 901)}, r"blocks range\(900, 901\): expected"),
    ],
)
def test_what_is_not_there_is_said(stored, options, said):
    with pytest.raises(Refused, match=said):
        load_features(stored[1], device="cpu", **options)

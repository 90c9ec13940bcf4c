"""A small graph behind a daemon, and the seeds that ranks of a job train on there."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from blockstore.owners import write_owners
from blockstore.store import open_store
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.generate import GraphRecipe, generate
from preprocess.sources.plain import PlainSource
from tests.daemons import daemon
from tests.preprocess.quiet import QUIET

NODES = 600


@contextmanager
def serve_graph(
    folder: Path, owner_maps: Iterable[tuple[str, int, int]] = (), train: float = 0.3
) -> Iterator[str]:
    """Endpoint.  Of each owner map: name, owners, and how many of them own something.

    train   share of the nodes that are seeds
    """
    generate(folder / "graph", GraphRecipe(NODES, 6, 8, 4, train, 0.1, 0.1, seed=2), QUIET)
    ingest(PlainSource(folder / "graph"), folder / "store", IngestOptions(), QUIET)
    store, rng = open_store(folder / "store"), np.random.default_rng(1)
    for name, owners, used in owner_maps:
        write_owners(store, name, rng.integers(0, used, NODES), owners, {})
    with daemon(folder / "store", "48M", 2) as endpoint:
        yield endpoint


def job_settings(endpoint: str, **options) -> dict:
    return {
        "endpoint": endpoint, "epochs": 2, "num_neighbors": [4, 3], "batch_size": 50, "hidden": 8,
        "learning_rate": 0.01, "seed": 5, **options,
    }  # fmt: skip


def seeds_of(found: list) -> dict[tuple[int, int], list[int]]:
    """Seeds that all ranks together trained on, by epoch and step."""
    seeds: dict[tuple[int, int], list[int]] = {}
    for batches, _ in found:
        for epoch, step, ids in batches:
            seeds.setdefault((epoch, step), []).extend(ids)
    return {at: sorted(ids) for at, ids in seeds.items()}


def whole_run(found: list) -> tuple[dict[tuple[int, int], list[int]], list[float]]:
    """Seeds by step, and the weights, of what one process trained."""
    return seeds_of(found), found[0][1]


def check_run(found: list, expected: tuple) -> None:
    """Each rank's (batches, weights) of a whole run against those of one process."""
    for _, weights in found:
        np.testing.assert_allclose(weights, expected[1], rtol=1e-4, atol=1e-4)
    assert seeds_of(found) == expected[0]

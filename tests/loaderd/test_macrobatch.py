"""Macro-batches end to end against plain Python: members, draws, order, passes, memory."""

import shutil
from collections import Counter
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from blockstore.store import open_store
from clients.torch import NeighborDataset
from loaderd.api.errors import BatchFailed, Refused
from loaderd.memory.ledger import served_rows
from loaderd.monitoring.trace import READ_MACRO, SERVE_MACRO, STAGE
from loaderd.plans.macrobatch import share_steps
from loaderd.server.transport import ask_status, parse_either
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from preprocess.sources.plain import PlainSource
from tests.daemons import daemon, until
from tests.differences import At, same_batch
from tests.graphs import HALOS, OFFSETS, Csc, spread_csc
from tests.preprocess.quiet import QUIET
from tests.reference import Labor, make_key, permute, sample_batch
from tests.stores import write_store
from tools.replay import read_trace

SEED, BATCH = 3, 8
HUBS = (200, 17, 33)
SEEDS = [*range(0, 400, 3), 5, 5, 17]
PARTITIONS = 3
_PARTITIONS, _SEEDS = 1 << 62, 3 << 61


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> tuple[Csc, np.ndarray, Path]:
    """Columns from none to several blocks of 4 KiB, weights with zeros, and their store."""
    graph, weights = spread_csc(np.random.default_rng(1))
    store = tmp_path_factory.mktemp("macro") / "store"
    write_store(
        store, graph, SEEDS, weights=weights, offsets=OFFSETS, hubs=HUBS, halos=HALOS
    )  # fmt: skip
    return graph, weights, store


@pytest.fixture(scope="module", params=["16M", "3M"])
def endpoint(request, graph):
    """A daemon with room for two macro-batches, or hardly for one."""
    with daemon(graph[2], request.param, 2) as endpoint:
        yield endpoint


def deal(epoch: int, size: int, shuffle: bool = True) -> list[list[int]]:
    """Partitions of each macro-batch."""
    count = len(OFFSETS) - 1
    key = make_key(SEED, epoch, _PARTITIONS, 0, 0)
    order = [permute(i, count, key) for i in range(count)] if shuffle else list(range(count))
    return [sorted(order[i : i + size]) for i in range(0, count, size)]


def members_of(partitions: list[int], hubs: bool, halos: bool) -> set[int]:
    """Nodes of a macro-batch."""
    found = set(HUBS) if hubs else set()
    for p in partitions:
        found |= set(range(OFFSETS[p], OFFSETS[p + 1]))
        found |= set(HALOS[p]) if halos else set()
    return found


def steps_of(partitions: list[list[int]], total: int) -> list[int]:
    """Steps of each macro-batch: none larger than a batch, the largest get what is left."""
    sizes = [len(seeds_in(p)) for p in partitions]
    steps = [-(-n // BATCH) for n in sizes]
    while sum(steps) < total:
        ratio = [n / s if s and s < n else -1 for n, s in zip(sizes, steps, strict=True)]
        steps[ratio.index(max(ratio))] += 1
    return steps


def seeds_in(partitions: list[int]) -> list[int]:
    """Places of the seeds in these partitions, partition by partition."""
    return [
        i for p in partitions for i, seed in enumerate(SEEDS) if OFFSETS[p] <= seed < OFFSETS[p + 1]
    ]


def expected_epoch(graph, epoch: int, options: dict, passes: int = 1):
    """(seeds' places, sampled batch by the reference, original edge ids) of every step."""
    csc, weights, _ = graph
    macros = deal(epoch, PARTITIONS, options.get("shuffle", True))
    with_seeds = min(len(macros), sum(bool(seeds_in([p])) for p in range(len(OFFSETS) - 1)))
    total = -(-len(SEEDS) // BATCH) + with_seeds - 1
    step = 0
    for m, (partitions, count) in enumerate(zip(macros, steps_of(macros, total), strict=True)):
        members = members_of(partitions, options.get("hubs", True), options.get("halos", True))
        kept = [
            [e for e in range(csc.indptr[v], csc.indptr[v + 1]) if csc.indices[e] in members]
            for v in range(OFFSETS[-1])
        ]
        indptr = np.cumsum([0, *map(len, kept)])
        edges = np.array([e for column in kept for e in column], np.int64)
        places = seeds_in(partitions)
        for cycle in range(passes):
            key = make_key(SEED, epoch, _SEEDS, m, cycle)
            order = range(len(places))
            if options.get("shuffle", True):
                order = [permute(i, len(places), key) for i in order]
            for i in range(count):
                own = order[len(places) * i // count : len(places) * (i + 1) // count]
                index = [places[j] for j in own]
                batch = sample_batch(
                    indptr, csc.indices[edges], [SEEDS[j] for j in index],
                    options["num_neighbors"], SEED, epoch, step,
                    options.get("frontier", "new"), options.get("replace", False),
                    weights[edges] if options.get("weighted") else None,
                    labor=Labor.of(options),
                )  # fmt: skip
                yield index, batch, edges
                step += 1


def flat(hops: list[list[int]]) -> list[int]:
    """All hops, one after the other."""
    return [item for hop in hops for item in hop]


CASES = {
    "plain": {"num_neighbors": (4, 3, 2), "hubs": False, "halos": False},
    "hubs": {"num_neighbors": (4, 3, 2), "halos": False},
    "halos": {"num_neighbors": (4, 3, 2), "hubs": False},
    "both": {"num_neighbors": (4, 3, 2)},
    "in order": {"num_neighbors": (4, 3), "shuffle": False},
    "layer": {"num_neighbors": (4, 3, 2), "frontier": "layer"},
    "all": {"num_neighbors": (-1, 2)},
    "wide": {"num_neighbors": (10, 200)},
    "replace": {"num_neighbors": (5, 4), "replace": True},
    "weighted": {"num_neighbors": (4, 3, 2), "weighted": True},
    "labor": {"num_neighbors": (4, 3, 2), "sampler": "labor", "batch_dependency": 3},
    "labor, wide": {"num_neighbors": (10, 200), "sampler": "labor", "layer_dependency": True},
    "three passes": {"num_neighbors": (3, 2), "reuse": 3},
}


@pytest.fixture(scope="module")
def references(graph):
    """`expected_epoch` of a case, made once for all budgets and stores."""

    @cache
    def found(case: str) -> list:
        return list(expected_epoch(graph, 2, CASES[case], CASES[case].get("reuse", 1)))

    return found


@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_references(references, endpoint, case):
    expect_references(references, endpoint, case)


def test_batches_from_blocks_that_partitions_share_are_the_same(graph, references, tmp_path):
    """Blocks of eight pages, of which partitions read their own."""
    csc, weights, _ = graph
    write_store(
        tmp_path / "store", csc, SEEDS, 8 * 4096, weights, offsets=OFFSETS, hubs=HUBS, halos=HALOS
    )
    with daemon(tmp_path / "store", "16M", 2) as endpoint:
        for case in ("both", "weighted"):
            expect_references(references, endpoint, case)


def expect_references(references, endpoint: str, case: str) -> None:
    """An epoch is what the reference makes of it."""
    data = NeighborDataset(
        endpoint, batch_size=BATCH, seed=SEED, plan="macrobatch", return_e_id=True,
        macro_partitions=PARTITIONS, **CASES[case],
    )  # fmt: skip
    data.set_epoch(2)
    batches = list(data)
    assert len(batches) == len(data)
    data.close()
    found = references(case)
    assert len(batches) == len(found)
    for batch, (index, expected, edges) in zip(batches, found, strict=True):
        at = At(2, batch.step)
        at.same("input_id", batch.input_id, index)
        assert batch.batch_size <= BATCH
        same_batch(at, batch, expected, edges)


@pytest.mark.parametrize("reuse", [1, 2])
def test_every_seed_comes_as_often_as_asked_and_epochs_are_equally_long(endpoint, reuse):
    data = NeighborDataset(
        endpoint,
        "train",
        (2,),
        BATCH,
        seed=SEED,
        plan="macrobatch",
        macro_partitions=2,
        reuse=reuse,
    )
    for _ in range(3):
        batches = list(data)
        assert len(batches) == len(data)
        counts = Counter(i for b in batches for i in b.input_id.tolist())
        assert counts == dict.fromkeys(range(len(SEEDS)), reuse)
    data.close()


def test_a_run_left_anywhere_goes_on_as_if_it_had_not_been(endpoint):
    options = {"macro_partitions": 2, "num_neighbors": (3, 2)}
    data = NeighborDataset(endpoint, batch_size=BATCH, plan="macrobatch", **options)
    whole = [b.n_id.tolist() for b in data]
    for left in (1, len(whole) // 2, len(whole) - 1):
        data.set_epoch(0)
        it = iter(data)
        for _ in range(left):
            next(it)
        state = data.state_dict()
        again = NeighborDataset(endpoint, batch_size=BATCH, plan="macrobatch", **options)
        again.load_state_dict(state)
        assert [b.n_id.tolist() for b in again] == whole[left:]
        again.close()
    data.close()


def test_ranks_share_each_step(endpoint):
    options = {"macro_partitions": 4, "num_neighbors": (2,), "batch_size": 16}
    whole = NeighborDataset(endpoint, plan="macrobatch", **options)
    parts = [
        NeighborDataset(endpoint, plan="macrobatch", rank=rank, world_size=2, **options)
        for rank in range(2)
    ]
    assert len(parts[0]) == len(parts[1])
    seeds = [[b.input_id.tolist() for b in part] for part in parts]
    assert all(len(a) and len(b) and abs(len(a) - len(b)) <= 1 for a, b in zip(*seeds, strict=True))
    assert sorted(i for part in seeds for batch in part for i in batch) == list(range(len(SEEDS)))
    assert len(whole) == len(parts[0])
    for data in (whole, *parts):
        data.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"macro_partitions": 8}, "expected 1 to the store's 7"),
        ({"reuse": 5}, "reuse is 5, expected 1 to 4"),
        ({"batch_size": 40, "world_size": 30}, "too few for"),
    ],
)
def test_what_cannot_be_is_refused(endpoint, options, words):
    with pytest.raises(Refused, match=words):
        len(NeighborDataset(endpoint, plan="macrobatch", **options))


def test_a_store_without_partitions_is_refused_with_what_to_do(graph, tmp_path):
    write_store(tmp_path / "store", graph[0], range(40))
    with daemon(tmp_path / "store", "16M", 1) as endpoint, pytest.raises(Refused) as caught:
        len(NeighborDataset(endpoint, plan="macrobatch"))
    assert "blockstore repartition" in str(caught.value)


def test_more_partitions_than_nodes_of_which_nothing_is_known(tmp_path):
    """No labels, no splits, partitions without nodes: every node is a seed once an epoch."""
    (tmp_path / "graph").mkdir()
    np.save(
        tmp_path / "graph" / "edge_index.npy", np.array([[0, 1, 2, 3, 4, 0], [1, 2, 0, 4, 3, 3]])
    )
    options = IngestOptions(partition=PartitionOptions(9), influence=InfluenceOptions(halo=0.5))
    ingest(PlainSource(tmp_path / "graph"), tmp_path / "store", options, QUIET)
    with daemon(tmp_path / "store", "64M", 1) as endpoint:
        with pytest.raises(Refused, match="split 'train' is not in the store: it has all"):
            len(NeighborDataset(endpoint, plan="macrobatch"))
        data = NeighborDataset(endpoint, "all", (2,), 2, plan="macrobatch")
        for _ in range(2):
            assert sorted(i for b in data for i in b.input_id.tolist()) == [0, 1, 2, 3, 4]
        data.close()


def test_too_little_memory_names_what_would_do(graph):
    options = {"plan": "macrobatch", "num_neighbors": (3,), "batch_size": BATCH}
    with daemon(graph[2], "400K", 1) as endpoint:
        with pytest.raises(Refused) as caught:
            len(NeighborDataset(endpoint, macro_partitions=7, **options))
        assert "or ask for fewer macro_partitions" in str(caught.value)
        with pytest.raises(Refused, match="or ask for a store of more partitions"):
            len(NeighborDataset(endpoint, macro_partitions=1, **options))
    enough = str(caught.value).split("--mem ")[1].split(",")[0]
    with daemon(graph[2], enough.replace(" ", "").replace("iB", ""), 1) as endpoint:
        data = NeighborDataset(endpoint, macro_partitions=7, **options)
        assert len(list(data)) == len(data)
        data.close()


def test_steps_are_shared_out_by_size():
    shared = share_steps(np.array([100, 0, 5, 41]), 20, 10, 1)
    assert shared.tolist() == [13, 0, 1, 6]
    assert share_steps(np.array([2, 2]), 4, 8, 1).tolist() == [2, 2]


def test_passes_end_when_the_next_macro_batch_is_there(endpoint):
    """Which passes are left out depends on timing; none is cut short, and the first never is."""
    options = {"num_neighbors": (2,), "batch_size": BATCH, "seed": SEED, "macro_partitions": 2}
    data = NeighborDataset(endpoint, plan="macrobatch", reuse="while-waiting", **options)
    whole = NeighborDataset(endpoint, plan="macrobatch", reuse=4, **options)
    steps = {b.step: b.input_id.tolist() for b in whole}
    assert len(data) == len(whole) == len(steps)
    whole.close()
    for _ in range(2):
        data.set_epoch(0)
        batches = list(data)
        assert all(steps[b.step] == b.input_id.tolist() for b in batches)
        found = [b.step for b in batches]
        assert found == sorted(set(found))
        counts = Counter(i for b in batches for i in b.input_id.tolist())
        assert set(counts) == set(range(len(SEEDS)))
        assert max(counts.values()) <= 4
    state = data.state_dict()
    data.load_state_dict(state)
    assert list(data)
    data.close()


def spans(trace: Path, number: int) -> list[tuple[int, int]]:
    """Begin and end of each stage of a kind."""
    stages = [r for r in read_trace(trace) if r.kind == STAGE and r.number == number]
    return [(int(r.ids[0]), int(r.ids[1])) for r in stages]


def test_the_next_is_read_while_one_is_served(graph, tmp_path):
    trace = tmp_path / "trace"
    with daemon(graph[2], "16M", 2, "--trace", str(trace)) as endpoint:
        data = NeighborDataset(
            endpoint, plan="macrobatch", num_neighbors=(2,), batch_size=2, seed=SEED,
            macro_partitions=2,
        )  # fmt: skip
        steps = steps_of(macros := deal(0, 2), len(data))
        place = [(m, i) for m in range(len(macros)) for i in range(steps[m])]
        ask = partial(ask_status, parse_either(endpoint))
        for batch in data:  # the trainer works on it for as long as it takes to ...
            m, i = place[batch.step]
            if i == 2:  # all batches of the one before are gone
                until(lambda: ask().counters["macro_loaded"] > m + 1, "the next is read")  # noqa: B023
            elif i == steps[m] - 1 and m + 1 < len(macros):
                until(lambda: ask().sessions[0].in_flight > 1, "a batch of the next is here")
        data.close()
    read, served = spans(trace, READ_MACRO), spans(trace, SERVE_MACRO)
    assert len(served) >= 2  # the others were there to the end
    inside = [r for r in read for s in served if s[0] < r[0] and r[1] < s[1]]
    assert len(inside) >= len(served) - 1


def test_an_error_names_the_block_and_hurts_nobody_else(graph, tmp_path):
    broken = tmp_path / "store"
    shutil.copytree(graph[2], broken)
    opened = open_store(broken)
    shard = Path(opened.rows(served_rows(opened.manifest)[0].array).shards[0])
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    options = {"plan": "macrobatch", "num_neighbors": (2,), "batch_size": BATCH, "seed": SEED}
    with daemon(broken, "16M", 2) as endpoint:
        data = NeighborDataset(endpoint, **options)
        with pytest.raises(BatchFailed, match=shard.name):
            list(data)
        data.close()
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
        again = NeighborDataset(endpoint, **options)
        assert len(list(again)) == len(again)
        again.close()


def test_only_one_rank_may_reuse_while_waiting(endpoint):
    data = NeighborDataset(endpoint, plan="macrobatch", reuse="while-waiting", world_size=2)
    with pytest.raises(Refused, match="expected one rank"):
        len(data)

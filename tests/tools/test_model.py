"""The model of epochs: against simulations of small graphs, the engine, and a daemon's counters."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from blockstore.format import RowArray
from blockstore.store import open_store
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import EngineSettings
from loaderd.plans.hyperbatch import region_pages
from tests.graphs import Csc
from tests.stores import write_store
from tools.model.__main__ import main
from tools.model.check import Workload, compare, possible_plans, row
from tools.model.graph import Described, Graph, grouped, macro_graph, read_graph
from tools.model.occupancy import mix, occupy
from tools.model.paper import GRAPHS, paper_tables
from tools.model.pipeline import BusyTime, GroupStage, hyper_stages, macro_stages, pipeline_s
from tools.model.predict import Job, Network, predict
from tools.model.rates import KernelRates, load_rates, solve_rates
from tools.model.traffic import chunk_reads, rows_still_there

RATES = KernelRates(
    run_s=30e-6, page_s=4e-6, run_cpu_s=3e-6, page_cpu_s=0.7e-6, batch_s=0.9e-3, column_s=90e-9,
    edge_s=10e-9, node_s=50e-9, note_s=20e-9, bring_s=90e-9, client_batch_s=0.2e-3,
    client_edge_s=1e-9, client_node_s=5e-9, byte_s=0.2e-9, filter_s=1.2e-9,
)  # fmt: skip


def random_graph(nodes: int, seed: int) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Neighbors of each node of a graph with few large and many small degrees, and its edges."""
    draw = np.random.default_rng(seed)
    weight = draw.pareto(1.5, nodes) + 0.2
    ends = draw.choice(nodes, (2, 3 * nodes), p=weight / weight.sum())
    ends = ends[:, ends[0] != ends[1]]
    both = np.unique(np.concatenate([ends, ends[::-1]], axis=1), axis=1)
    return np.split(both[1], np.searchsorted(both[0], np.arange(1, nodes))), both


def sample(
    neighbors: list[NDArray[np.int64]],
    seeds: NDArray[np.int64],
    fanouts: tuple[int, ...],
    draw: np.random.Generator,
) -> tuple[set[int], int]:
    """The nodes of a batch, and how many edges were drawn; a hop expands what is new."""
    found, frontier, edges = set(seeds.tolist()), list(seeds), 0
    for fanout in fanouts:
        new: dict[int, None] = {}
        for node in frontier:
            own = neighbors[node]
            taken = own if own.size <= fanout else draw.choice(own, fanout, replace=False)
            edges += taken.size
            new |= dict.fromkeys(int(v) for v in taken if int(v) not in found)
        frontier = list(new)
        found |= set(frontier)
    return found, edges


@pytest.fixture(scope="module")
def simulated() -> tuple[Graph, list[set[int]], float, NDArray[np.int64]]:
    """A graph, batches of one epoch, and the mean of their edges."""
    draw, nodes, batch = np.random.default_rng(3), 6000, 40
    neighbors, _ = random_graph(nodes, 5)
    degrees = np.array([own.size for own in neighbors])
    seeds = draw.permutation(np.flatnonzero(degrees))[: 16 * batch]
    taken = [sample(neighbors, own, (5, 4), draw) for own in np.split(seeds, 16)]
    edges = float(np.mean([count for _, count in taken]))
    return grouped(degrees, degrees, seeds, 500, True), [own for own, _ in taken], edges, degrees


def test_batches_are_as_in_a_simulation(
    simulated: tuple[Graph, list[set[int]], float, NDArray[np.int64]],
) -> None:
    graph, batches, edges, _ = simulated
    occupancy = occupy(graph, (5, 4), 40)
    assert graph.num_seeds == pytest.approx(640)
    assert sum(occupancy.edges) == pytest.approx(edges, rel=0.05)
    assert sum(occupancy.nodes) == pytest.approx(np.mean([len(b) for b in batches]), rel=0.06)
    for count in (1, 4, 16):
        union = set[int]().union(*batches[:count])
        found = float(graph.sizes @ occupancy.wanted(count))
        assert found == pytest.approx(len(union), rel=0.08), count


def test_rows_lie_in_the_regions_of_a_simulation(
    simulated: tuple[Graph, list[set[int]], float, NDArray[np.int64]],
) -> None:
    graph, batches, _, _ = simulated
    wanted = graph.nodes @ occupy(graph, (5, 4), 40).wanted(16)
    union = np.fromiter(set[int]().union(*batches), np.int64)
    counted = np.bincount(union // 500, minlength=12)
    assert np.abs(wanted - counted).sum() < 0.1 * counted.sum()


def test_all_neighbors_of_all_nodes_are_all_nodes_that_have_edges() -> None:
    degrees = np.repeat([0, 3, 5], 100)
    graph = grouped(degrees, degrees, np.flatnonzero(degrees), 64, True)
    occupancy = occupy(graph, (-1, -1), 200)
    assert sum(occupancy.nodes) == pytest.approx(200)
    assert occupancy.edges[0] == pytest.approx(degrees.sum())


def test_no_two_nodes_have_two_edges() -> None:
    """A hub that has an edge to every other node has one, whatever the degrees of these."""
    degrees = np.array([59, *[2] * 29, *[1] * 30])
    graph = grouped(degrees, degrees, np.arange(60), 64, True)
    ends = mix(graph)
    hub, leaf = int(graph.into.argmax()), int(graph.into.argmin())
    assert ends.sum(1) == pytest.approx(1)
    assert ends[leaf, hub] > 0.9  # without the condition: 59 of 147
    into = graph.sizes * graph.out @ ends
    assert into == pytest.approx(graph.sizes * graph.into, rel=0.01)


def read_pages(wanted: NDArray[np.bool_], width: int, gap: int) -> int:
    """Pages that runs over wanted rows read, one after the other."""
    rows = np.flatnonzero(wanted)
    pages = np.unique(np.concatenate([rows * width // 4096, (rows * width + width - 1) // 4096]))
    between = np.diff(pages) - 1
    return int(pages.size + between[between <= gap].sum())


@pytest.mark.parametrize(
    ("width", "share", "gap", "within"),
    [(512, 0.01, 16, 0.03), (512, 0.002, 8, 0.03), (8, 1e-4, 0, 0.05), (1536, 0.05, 2, 0.1)],
)
def test_pages_are_as_in_a_simulation(width: int, share: float, gap: int, within: float) -> None:
    """Rows that lie in two pages make neighbors of wanted pages likely, which is left out."""
    draw, rows = np.random.default_rng(1), 1 << 20
    counted = read_pages(draw.random(rows) < share, width, gap)
    pages, calls = region_pages(np.array([float(rows)]), width, np.array([share]), gap)
    assert pages[0] == pytest.approx(counted, rel=within)
    assert 0 < calls[0] <= pages[0]


@pytest.mark.parametrize("known", [0, 1, 3])
def test_rows_are_still_there_as_in_a_simulation(known: int) -> None:
    """Of rows that no known group wants those leave first that were used longest ago."""
    draw, rows, entries, groups = np.random.default_rng(2), 20_000, 5000, 40
    share = draw.beta(0.4, 2.0, rows) * 0.9
    uses = draw.random((groups + known + 1, rows)) < share
    last, there, found, wanted = np.full(rows, -1), np.zeros(rows, np.bool_), 0, 0
    for now in range(groups):
        if now >= 10:
            found, wanted = found + int((there & uses[now]).sum()), wanted + int(uses[now].sum())
        last[uses[now]] = now
        kept = np.flatnonzero(there | uses[now])
        coming = uses[now + 1 : now + 1 + known].any(0)[kept]
        order = np.lexsort((-last[kept], ~coming, ~uses[now][kept]))
        there[:] = False
        there[kept[order[:entries]]] = True
    expected = rows_still_there(share, np.ones(rows), entries, known)
    assert found / wanted == pytest.approx(share @ expected / share.sum(), abs=0.03)


def test_chunks_are_read_once_if_they_have_room() -> None:
    held, passing = (chunk_reads(10_000, (512, 8), 1000, room) for room in (1e8, 1e6))
    assert (held.first.bytes, held.epoch.bytes) == (5_200_000, 0)
    # a thousand rows of 8 bytes begin and end inside pages; of 512 they are whole pages
    assert 5_200_000 < passing.epoch.bytes < 5_200_000 + 10 * 2 * 4096


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30,000 nodes of 256 bytes in 8 partitions, those of large degree first; 7.7 MB of rows."""
    path = tmp_path_factory.mktemp("model") / "store"
    neighbors, _ = random_graph(30_000, 7)
    degrees = np.array([own.size for own in neighbors])
    order = np.argsort(-degrees, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    columns = [place[neighbors[node]] for node in order]
    indptr = np.concatenate([[0], np.cumsum(degrees[order])])
    train = np.random.default_rng(1).choice(25_000, 6000, replace=False)
    write_store(
        path, Csc(indptr, np.concatenate(columns), np.arange(indptr[-1])), train, 1 << 14,
        edge_ids=False, offsets=np.linspace(0, 30_000, 9).astype(int).tolist(),
        hubs=range(100), width=64,
    )  # fmt: skip
    return path


def test_a_store_has_the_degrees_that_were_ingested(small_store: Path) -> None:
    store = open_store(small_store)
    graph, relation = read_graph(store, "train"), store.manifest.relations[0]
    assert graph.num_edges == pytest.approx(relation.num_edges)
    assert graph.sizes @ graph.out == pytest.approx(relation.num_edges)
    assert graph.nodes.sum() == 30_000
    assert graph.num_seeds == pytest.approx(6000)


@pytest.mark.parametrize(
    ("mem", "plan", "within"),
    [
        pytest.param("24M", "minibatch", 0.2, marks=pytest.mark.long),
        ("24M", "macrobatch", 0.2),
        ("8M", "hyperbatch", 0.2),
        ("7M", "minibatch", 0.4),  # predicted 1.33 times what is counted
    ],
)
def test_bytes_are_those_that_a_daemon_counts(
    small_store: Path, mem: str, plan: str, within: float
) -> None:
    assert plan in possible_plans(small_store)
    found = compare(Workload(small_store, mem, plan, (5, 4), 100, 58), None, RATES, 2)
    assert found.predicted_bytes == pytest.approx(found.counted_bytes, rel=within)
    assert row(found)[:3] == ["store", mem, plan]


def test_blocks_that_stay_are_the_hottest_wherever_they_stand() -> None:
    """Every batch wants every block: those of which the first one wanted most rows stay."""
    described = Described("small", 200_000, 15.0, 1.5, 40_000, 128, "float32")
    request = Attach(token=0, request=0, plan="minibatch", num_neighbors=(10, 5))
    hot = described.graph
    cold = hot._replace(nodes=np.roll(hot.nodes, len(hot.nodes) // 2, axis=0))
    first, last = (
        predict(described.manifest, g, EngineSettings(90 << 20, workers=2), request, RATES, Job())
        for g in (hot, cold)
    )
    assert first.epoch.bytes > 0
    assert last.epoch.bytes == pytest.approx(first.epoch.bytes, rel=0.02)


def test_more_machines_share_an_epoch_and_ask_for_rows() -> None:
    described = Described("small", 200_000, 15.0, 1.5, 40_000, 128, "float32")
    request = Attach(token=0, request=0, plan="hyperbatch", num_neighbors=(10, 5))
    settings = EngineSettings(90 << 20, workers=2)

    one, four = (
        predict(described.manifest, described.graph, settings, request, RATES, Job(machines=m))
        for m in (1, 4)
    )
    assert one.network_bytes == 0 < four.network_bytes
    assert four.epoch.bytes < one.epoch.bytes / 3
    cold = predict(
        described.manifest, described.graph, settings, request, RATES,
        Job(bucket=Network(1e7, 0.03)),
    )  # fmt: skip
    assert cold.epoch == one.epoch
    assert cold.seconds > one.seconds
    assert cold.bucket.bytes <= one.bytes


def test_periods_are_those_of_a_loop_over_groups() -> None:
    draw, groups, cores = np.random.default_rng(4), 7, 2
    stages = [GroupStage(*draw.random((3, groups))) for _ in range(3)]
    expected = 0.0
    for period in range(groups + 2):
        active = [(s, period - i) for i, s in enumerate(stages) if 0 <= period - i < groups]
        alone = max(float(s.alone[g]) for s, g in active)
        cpu = sum(float(s.cpu[g]) for s, g in active) / cores
        expected += max(alone, cpu, sum(float(s.disk[g]) for s, g in active))
    assert pipeline_s(stages, cores) == pytest.approx(expected)


def test_an_epoch_takes_its_slowest_stage_and_what_fills_it() -> None:
    """Four equal hyperbatches on many cores: the client is slowest, and waits for the first one."""
    work = BusyTime(sample=4.0, note=1.0, bring=1.0, client=8.0, disk=2.0)
    stages = hyper_stages(work, [10] * 4, hops=3, workers=2)
    filled = 4 / 4 / 2 + (1 + 2) / 4  # sampled by two workers, then brought in
    assert pipeline_s(stages, 64) == pytest.approx(8 + filled)
    assert pipeline_s(stages, 1) > 8 + filled  # 14 s of processor time on one core
    # what is read of macro-batches is read while another is served, over the end of an epoch too
    assert pipeline_s(macro_stages(work, 4, 2), 64) == pytest.approx(8)


def test_passes_over_a_graph_that_is_not_in_memory_take_the_disk_from_rows() -> None:
    work = BusyTime(disk=10.0, graph_disk=6.0)
    assert pipeline_s(hyper_stages(work, [5, 5], hops=2, workers=2), 2) == pytest.approx(10)


def test_rates_that_are_solved_for_are_none_below_zero() -> None:
    counts = [(10.0, 3.0, 1.0), (5.0, 9.0, 2.0), (1.0, 1.0, 8.0)]
    seconds = [float(np.dot(c, (2.0, 0.5, 1.0))) for c in counts]
    assert solve_rates(counts, seconds) == pytest.approx([2.0, 0.5, 1.0])
    noisy = solve_rates([(10.0, 9.0), (10.0, 3.0)], [9.0, 10.0])
    assert noisy[1] == 0 < noisy[0]


def test_inside_partitions_edges_leave_as_many_as_enter() -> None:
    described = Described("parts", 200_000, 15.0, 1.5, 40_000, 16, "float32")
    (node,) = described.manifest.types
    hubs = RowArray("hubs", "uint32", 2000)
    node = structs.replace(node, num_partitions=32, hubs=hubs)
    manifest = structs.replace(described.manifest, types=(node,))
    whole = described.graph._replace(inside=0.3)
    part = macro_graph(whole, manifest, 4)
    assert part.sizes @ part.into == pytest.approx(part.sizes @ part.out)
    assert part.num_seeds == pytest.approx(whole.num_seeds / 8)
    assert part.sizes.sum() == pytest.approx(2000 + (200_000 - 2000) / 8)
    everything = macro_graph(whole, manifest, 32)
    assert everything.num_edges == pytest.approx(whole.num_edges)


def test_a_described_graph_has_its_moments() -> None:
    for described in GRAPHS:
        graph = described.graph
        assert graph.sizes.sum() == pytest.approx(described.num_nodes)
        assert graph.num_edges == pytest.approx(described.num_nodes * described.mean_degree)
        assert graph.num_seeds == pytest.approx(described.num_seeds)


@pytest.mark.long
def test_paper_tables_name_every_graph() -> None:
    (_, sizes), (_, rows) = paper_tables(RATES)
    assert [line[0] for line in sizes[1:]] == [described.name for described in GRAPHS]
    assert len(rows) == 1 + 3 * len(GRAPHS)
    assert all(len(line) == len(rows[0]) for line in rows)


def test_rates_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(msgspec.json.encode(RATES))
    assert load_rates(path) == RATES
    path.write_text("{}")
    with pytest.raises(ValueError, match="run_s"):
        load_rates(path)


def test_rates_that_are_missing_are_one_line_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none.json: found no such file, .*calibrate FOLDER"):
        main(["paper", "--rates", str(tmp_path / "none.json")])


@pytest.mark.parametrize("words", [["predict", "store", "--mem", "1X"], ["check", "store:1G,1X"]])
def test_a_size_that_is_none_is_named_before_rates_that_are_missing(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="1X"):
        main([*words, "--rates", "none.json"])

"""Comparisons of accuracy on tiny graphs: the ways of each case, and differences in pairs."""

import json
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.later import Later  # noqa: E402
from tools.bench.setup import make_graph  # noqa: E402
from tools.command import read_lines, table  # noqa: E402
from tools.compare import pairs  # noqa: E402

geometric = Later("torch_geometric")
cases, tasks = Later("tools.compare.cases"), Later("tools.compare.tasks")


def line(way, seed, accuracy):
    return {"way": way, "against": "theirs", "seed": seed, "accuracy": accuracy, "steps": 3}


LINES = [
    line(way, seed, 50.0 + seed + gain)
    for way, gains in (("theirs", (0.0, 0.0, 0.0)), ("ours", (1.0, 2.0, 3.0)))
    for seed, gain in enumerate(gains)
]


@pytest.fixture(scope="module")
def graph(folder):
    """1000 nodes in four classes, with splits."""
    return make_graph(folder, 1000, 8, 8, 4)


def main(words: list[str]) -> str:
    """What `python -m tools.compare` prints."""
    return str(Later("tools.compare.__main__").main(words))


def has_sampler() -> bool:
    """Whether PyG's loaders have what they need."""
    return bool(geometric.typing.WITH_PYG_LIB or geometric.typing.WITH_TORCH_SPARSE)


class WholeGraph:
    """A loader in PyG's place without a sampler: all nodes are in each batch, seeds first."""

    def __init__(self, data, num_neighbors, batch_size, input_nodes, shuffle, transform):
        self.data, self.seeds, self.size = data, input_nodes, batch_size

    def __iter__(self):
        for seeds in self.seeds[torch.randperm(self.seeds.numel())].split(self.size):
            rest = torch.ones(self.data.num_nodes, dtype=torch.bool)
            rest[seeds] = False
            n_id = torch.cat([seeds, rest.nonzero()[:, 0]])
            place = torch.empty_like(n_id)
            place[n_id] = torch.arange(n_id.numel())
            yield geometric.data.Data(
                self.data.x[n_id], place[self.data.edge_index], y=self.data.y[n_id],
                batch_size=seeds.numel(),
            )  # fmt: skip


def test_differences_are_paired_by_seed():
    rows = pairs.summarize(LINES).splitlines()
    assert rows[2] == "| theirs | 51.00 |  |  |  |  | 3 |"
    assert rows[3] == "| ours | 53.00 | theirs | +2.00 | ± 2.48 | 3 | 3 |"  # 4.303 / 3 ** 0.5
    assert pairs.summarize([LINES[0], LINES[3]]).splitlines()[3] == (
        "| ours | 51.00 | theirs | +1.00 |  | 1 | 3 |"
    )
    assert pairs.interval([0.0, 0.1, 0.2]) == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)


def test_what_is_there_is_not_run_again(tmp_path):
    out = tmp_path / "lines"

    def runs(done):
        return (line for line in LINES if (line["way"], line["seed"]) not in done)

    first = pairs.finish(out, lambda done: list(runs(done))[:4])
    assert pairs.finish(out, runs) != first
    assert read_lines(out) == LINES


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_are_done_each_once(jobs):
    found = pairs.run_each(divmod, [(7, 2), (9, 4), (12, 5)], jobs)
    assert sorted(found) == [(2, 1), (2, 2), (3, 1)]


def test_noise_is_added_to_the_features_alone(small_graph, tmp_path):
    noisy = tasks.changed_source(tasks.CompareOptions(small_graph, noise=2.0), tmp_path)
    clean, spoilt = (np.load(f / "node_feat.npy") for f in (small_graph, noisy))
    assert (spoilt - clean).std() == pytest.approx(2 * clean.std(), rel=0.05)
    assert (noisy / "edge_index.npy").resolve() == small_graph / "edge_index.npy"


def test_features_are_narrowed_to_what_they_have_most_of(small_graph, tmp_path):
    x = np.load(small_graph / "node_feat.npy")
    (made := tmp_path / "sparse").mkdir()
    indptr = np.arange(x.shape[0] + 1) * x.shape[1]
    columns = np.tile(np.arange(x.shape[1]), x.shape[0])
    for name, array in (("data", x.ravel()), ("indices", columns), ("indptr", indptr)):
        np.save(made / f"node_feat_{name}.npy", array)
    (made / "node_feat_csr.json").write_text(json.dumps({"shape": x.shape}))
    for number, folder in enumerate((small_graph, made)):
        (work := tmp_path / str(number)).mkdir()
        source = tasks.changed_source(tasks.CompareOptions(folder, width=6), work)
        found = np.load(source / "node_feat.npy")
        assert found.shape == (x.shape[0], 6)
        # of all matrices of this rank it is closest to the features
        values = np.linalg.svd(x, compute_uv=False)
        shares = np.sort((found.astype(np.float64) ** 2).sum(axis=0))[::-1]
        np.testing.assert_allclose(shares / shares[0], values[:6] ** 2 / values[0] ** 2, rtol=1e-3)
    (work := tmp_path / "noisy").mkdir()
    noisy = tasks.changed_source(tasks.CompareOptions(made, noise=2.0), work)
    added = np.load(noisy / "node_feat.npy") - x
    assert added.std() == pytest.approx(2 * x.std(), rel=0.05)


def test_accuracy_of_a_daemon_and_of_a_loader_in_memory(graph, tmp_path, monkeypatch, capsys):
    # by its name it would be imported with warnings of PyG as errors
    monkeypatch.setitem(cases.pyg_nodes.__globals__, "NeighborLoader", WholeGraph)
    out = tmp_path / "lines"
    words = ["--seeds", "2", "--epochs", "5", "--hidden", "16", "--num-neighbors", "5", "5"]
    words += ["--batch-size", "20", "--mem", "32M"]
    printed = main(["accuracy", str(graph), *words, "--learning-rate", "0.01", "--out", str(out)])
    found = read_lines(out)
    runs = [(x["way"], x["seed"]) for x in found]
    assert runs == [("PyG", 0), ("daemon", 0), ("PyG", 1), ("daemon", 1)]
    assert all(40 < x["accuracy"] <= 100 for x in found)  # of 4 classes
    assert {x["steps"] for x in found} == {5}
    assert capsys.readouterr().out == printed + "\n"


def lines_of(case, folder, tmp_path, *words):
    """The lines of a small comparison, all that are not given otherwise by `words`."""
    usual = ["--epochs", "5", "--num-neighbors", "3", "2", "--hidden", "8", "--seeds", "1"]
    usual += ["--jobs", "1", "--batch-size", "20", "--learning-rate", "0.03", "--dropout", "0"]
    out = tmp_path / "lines"
    main([case, str(folder), *usual, "--mem", "32M", *words, "--out", str(out)])
    return read_lines(out)


def test_every_kind_of_large_batches(graph, tmp_path):
    ways = ["minibatch", "shared", "partitions (PBS) 1/8", "macro-batches 1/16, halo 1"]
    lines = lines_of("large", graph, tmp_path, "--partitions", "16", "--ways", *ways)
    found = {x["way"]: x for x in lines}
    assert len(found) == 6
    assert all(40 < x["accuracy"] <= 100 for x in found.values())  # of four classes
    assert found["minibatch"]["steps"] == found["shared (LBS)"]["steps"]


def test_every_way_of_macro_batches(graph, tmp_path):
    names = ["in memory", "random 1/8", "GAP + hubs + halo 0.3 1/16"]
    found = lines_of("macro", graph, tmp_path, "--partitions", "16", "--ways", *names)
    assert [x["way"] for x in found] == names
    assert all(40 < x["accuracy"] <= 100 for x in found)  # of four classes
    assert found[0]["steps"] < found[1]["steps"]


@pytest.mark.long
def test_runs_of_the_command_may_be_in_processes_of_their_own(graph, tmp_path):
    out = tmp_path / "lines"
    words = ["--ways", "in memory", "--seeds", "2", "--jobs", "2", "--steps", "4", "--hidden", "8"]
    words += ["--num-neighbors", "3", "2", "--batch-size", "20", "--mem", "32M", "--out", str(out)]
    command = [sys.executable, "-m", "tools.compare", "macro", str(graph), *words]
    subprocess.run([*command, "--partitions", "16"], check=True, timeout=200)
    assert sorted(line["seed"] for line in read_lines(out)) == [0, 1]


def test_home_placement_and_data_parallelism(graph, tmp_path):
    parallel, home = lines_of("home", graph, tmp_path, "--batch-size", "40")
    assert (parallel["way"], home["way"]) == ("data parallel", "home")
    assert parallel["steps"] == home["steps"] > 1
    assert home["accuracy"] == pytest.approx(parallel["accuracy"], abs=1)  # the same gradients
    assert 40 < home["accuracy"] <= 100  # of four classes


def test_models_on_hops(graph, tmp_path):
    words = ["--hops", "1", "--epochs", "8", "--batch-size", "10", "--models", "sign"]
    found = lines_of("hops", graph, tmp_path, *words, "--chunks", "5", "--learning-rate", "0.01")
    assert [x["way"] for x in found] == ["sign, rows", "sign, chunks of 5"]
    assert all(40 < x["accuracy"] <= 100 for x in found)


def test_links(tmp_path):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 40, 600)
    edges = np.stack([source, 40 + (source // 4 * 4 + rng.integers(0, 4, 600))])  # ten groups
    lists = np.array_split(rng.permutation(600), [500])
    np.save(tmp_path / "edge_index.npy", edges)
    for name, chosen in zip(("train", "test"), lists, strict=True):
        np.save(tmp_path / f"{name}_edge.npy", chosen)
    ways = ["PyG", "daemon"] if has_sampler() else ["daemon"]
    words = ["--steps", "40", "--batch-size", "64", "--num-neighbors", "4", "3", "--replace"]
    found = lines_of("links", tmp_path, tmp_path, *words, "--dropout", "0.5", "--ways", *ways)
    assert [x["way"] for x in found] == ways
    assert all(70 < x["accuracy"] <= 100 for x in found)  # half of them are random pairs
    assert {x["steps"] for x in found} == {8}


def test_drop_in_over_several_types(tmp_path):
    folder, rng = tmp_path / "graph", np.random.default_rng(0)
    folder.mkdir()
    labels = rng.integers(0, 3, 90)
    schema = {"node_types": {"paper": 90, "venue": 5}, "relations": ["paper|in|venue"]}
    (folder / "schema.json").write_text(json.dumps(schema))
    np.save(folder / "edge__paper__in__venue.npy", np.stack([np.arange(90), labels]))
    np.save(folder / "feat__paper.npy", np.eye(3, dtype="f4")[labels])
    np.save(folder / "label__paper.npy", labels)
    for name, ids in (("train", np.arange(60)), ("test", np.arange(60, 90))):
        np.save(folder / f"split__paper__{name}.npy", ids)
    ways = ["PyG", "daemon"] if has_sampler() else ["daemon"]
    words = ["--undirected", "--learning-rate", "0.05", "--num-neighbors", "3", "3"]
    found = lines_of("drop-in", folder, tmp_path, *words, "--dropout", "0.5", "--ways", *ways)
    assert [x["way"] for x in found] == ways
    assert min(x["accuracy"] for x in found) > 60  # of 3 classes


def test_a_folder_that_a_case_cannot_use_is_said_in_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["links", str(tmp_path), "--out", str(tmp_path / "lines")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path}/edge_index.npy: found no such file"
    )


def test_every_case_has_a_baseline():
    for case in cases.CASES.values():
        ways = case.ways(tasks.CompareOptions("folder", **case.defaults))
        assert {way.against for way in ways} <= {way.name for way in ways}


def test_a_table_has_a_head():
    assert table([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"

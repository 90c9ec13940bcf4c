"""The options of the `blockstore` command, in groups: each a frozen record, and a panel of --help.

A command takes records; `blockstore.flags.grouped` makes an option of each of their fields.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from blockstore.flags import Panels as Panels
from blockstore.flags import flag
from blockstore.flags import grouped as grouped
from blockstore.units import parse_bytes
from preprocess.errors import BadInput
from preprocess.ingest.options import (
    FeatureDtype,
    HopRows,
    HopsRequest,
    Ids,
    Keep,
    NodeOrder,
    OperatorKind,
)
from preprocess.partition.influence import HubScore, InfluenceOptions, parse_hubs
from preprocess.partition.owners import OwnerOptions
from preprocess.partition.partition import PartitionOptions
from preprocess.sources.layouts import LAYOUTS

_MEM, _FRESH = "memory to use, such as 512M or 2G", "start from scratch, whatever a run has left"
Mem = Annotated[str, Option(help=_MEM, metavar="SIZE")]
ObjectWait = Annotated[
    float, Option("--object-wait", help="seconds that an object is tried", min=0)
]
Json = Annotated[bool, Option("--json", help="for scripts")]


def size(text: str) -> int:
    """A size as people write it.  Raises BadInput."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadInput(str(error)) from error


class OperatorChoice(StrEnum):
    """`OperatorKind`: typer takes no list of literals."""

    sym = "sym"
    row = "row"
    ppr = "ppr"
    heat = "heat"


@dataclass(frozen=True)
class SourceFlags:
    """Source."""

    layout: str = flag("", f"of the source, if it is not recognised: {', '.join(LAYOUTS)}")
    undirected: bool | None = flag(
        None,
        "add the reverse of each edge, drop duplicates; else as the source says",
        "--undirected/--directed",
        show_default=False,
    )
    duplicates: Keep = flag("keep", "equal edges")
    self_loops: Keep = flag("keep", "edges from a node to itself")
    allow_nan: bool = flag(False, "take NaN features as they are")
    split: str = flag("", "if there are no splits: shares of train, valid and test")
    leave_out: list[str] | None = flag(
        None, "a split, of nodes or edges; several may be given", show_default=False
    )

    def shares(self) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in self.split.split(",")) if self.split else ()
        except ValueError as error:
            raise BadInput(
                f"--split {self.split!r}: expected shares such as 0.6,0.2,0.2"
            ) from error


@dataclass(frozen=True)
class StoreFlags:
    """Store."""

    dtype: FeatureDtype = flag("float32", "of features in the store")
    block_size: str = flag("1M", "unit of disk I/O: 4K to 16M", metavar="SIZE")
    edge_ids: bool = flag(False, "keep the id of each edge")
    ids: Ids = flag("auto", "width of node ids")
    order: NodeOrder = flag("bfs", "of nodes in the store")
    seed: int = flag(0, "of the random order and of seeded splits")


@dataclass(frozen=True)
class IngestPartitions(PartitionOptions):
    num_partitions: int = flag(
        0, "partition the nodes, for macro-batches; 0: do not", "--partitions"
    )


@dataclass(frozen=True)
class CopyFlags:
    panel: ClassVar = PartitionOptions.panel
    hubs: str = flag("", "of partitions: share of nodes, or bytes such as 64M; 0.01 if not given")
    hub_score: HubScore = flag("walk", "walk: from training nodes, backwards")
    halo: float = flag(0.0, "outside nodes stored with a partition, as a share of its nodes")

    def influence(self) -> InfluenceOptions:
        return InfluenceOptions(*parse_hubs(self.hubs), self.hub_score, self.halo)


@dataclass(frozen=True)
class HopFlags:
    """Propagated features."""

    operator: list[OperatorChoice] | None = flag(
        None, "of hops: sym if not given; several may be", show_default=False
    )
    node_type: str = flag("", "of hops: whose features, if it is not clear", "--type")
    feature: str = flag("", "of hops: which of several features")
    relation: str = flag("", "of hops: which of several, its name or src-name-dst")
    rows: HopRows = flag("labelled", "of hops: those of splits that have labels, or of all nodes")
    hop_alpha: float = flag(0.1, "of ppr: probability to go back")
    t: float = flag(3.0, "of heat: time")
    weighted: bool = flag(False, "hops by weights of edges", "--weighted")

    def request(self, hops: int, self_loops: bool, seed: int) -> HopsRequest:
        """Without what only the command `hops` asks for."""
        found = self.operator or [OperatorChoice.sym]
        operators: tuple[OperatorKind, ...] = tuple(operator.value for operator in found)
        return HopsRequest(
            operators, hops, self_loops, self.node_type, self.feature, self.relation, self.rows,
            seed=seed, alpha=self.hop_alpha, t=self.t, weighted=self.weighted,
        )  # fmt: skip


@dataclass(frozen=True)
class AddedHopFlags(HopFlags):
    """Propagated features."""

    hop_alpha: float = flag(0.1, "of ppr: probability to go back", "--alpha")
    hops: int = flag(2, "how often each is applied")
    self_loops: bool = flag(True, "each node is its own neighbor too")
    split: list[str] | None = flag(None, "only this; several may be given", show_default=False)
    dtype: FeatureDtype | None = flag(None, "of hops; else as the features")
    seed: int = flag(0, "of the order of rows")

    def asked(self) -> HopsRequest:
        found = self.request(self.hops, self.self_loops, self.seed)
        return replace(found, splits=tuple(self.split or ()), dtype=self.dtype)


@dataclass(frozen=True)
class IngestHopFlags(HopFlags):
    """Propagated features."""

    hops: int = flag(0, "propagate features right away, as the command hops does; 0: do not")
    hop_loops: bool = flag(True, "of hops: a node is its own neighbor")

    def asked(self, seed: int) -> HopsRequest | None:
        if self.operator and not self.hops:
            raise BadInput.at("--operator", "no --hops", "how often to apply it", "say --hops 2")
        return self.request(self.hops, self.hop_loops, seed) if self.hops else None


@dataclass(frozen=True)
class OwnerFlags(OwnerOptions):
    remove: str = flag("", "the map of this name")


@dataclass(frozen=True)
class IngestResources:
    """Resources."""

    mem: str = flag("2G", _MEM, metavar="SIZE")
    fresh: bool = flag(False, _FRESH, "--fresh")


@dataclass(frozen=True)
class IngestWork(IngestResources):
    """Resources."""

    ray: str = flag(
        "", "tasks on a Ray that is there (auto, ray://HOST:PORT) or on local:N workers"
    )
    work: Path | None = flag(None, "where a store is made that goes to a URL, until it is there")


@dataclass(frozen=True)
class PackFlags:
    """Epochs."""

    epochs: int = flag(1, "how many, from epoch 0 on; a session with cycle=P has them again", min=1)
    hot: str = flag("256M", "rows that stay in memory when the pack is served")
    group: str = flag("", "rows that a group of batches reads together; else half of --hot")


@dataclass(frozen=True)
class PackedSampling:
    """Sampling, as the sessions that are to be served ask for it."""

    num_neighbors: str = flag("15,10,5", "of each hop, seeds outward")
    fanout: list[str] | None = flag(
        None, "of one relation: src__name__dst=15,10,5; several may be", show_default=False
    )
    batch_size: int = flag(1000, "seeds of a batch, of all ranks together", min=1)
    seed: int = flag(0, "of the draws")
    split: str = flag("train", "whose nodes are the seeds, or all")
    seed_type: str = flag("", "node type of the seeds, of several")
    world_size: int = flag(1, "ranks of the job", min=1)
    shuffle: bool = flag(True, "seeds in another order each epoch")
    replace: bool = flag(False, "draw with replacement", "--replace")
    weighted: bool = flag(False, "draw by the weights of edges", "--weighted")
    frontier: str = flag("new", "what a hop expands: new nodes, or the layer of all found so far")
    return_e_id: bool = flag(False, "with ids of edges", "--return-e-id")
    sampler: str = flag("neighbor", "how neighbors are drawn: neighbor or labor")
    layer_dependency: bool = flag(False, "of labor", "--layer-dependency")
    batch_dependency: int = flag(1, "of labor", min=1)


@dataclass(frozen=True)
class PackShow:
    """Output."""

    dry_run: bool = flag(False, "say what it would take, and do nothing", "--dry-run")
    json: bool = flag(False, "for scripts: an event a line, see docs/preprocessing.md", "--json")


@dataclass(frozen=True)
class ShowFlags(PackShow):
    """Output."""

    summary: bool = flag(True, "look at the graph when it is there")

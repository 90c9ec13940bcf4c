"""The options of the `blockstore` command, in groups: each a frozen record, and a panel of --help.

Commands take records as parameters; `blockstore.flags.grouped` turns each of their fields into an
option.  Most records are also the parameters of the functions that do the work.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typer import Option

from blockstore.flags import Panels as Panels
from blockstore.flags import flag
from blockstore.flags import grouped as grouped
from preprocess.errors import BadInput
from preprocess.ingest.options import HopsRequest, SourceSettings, read_size, size_flag
from preprocess.partition.owners import OwnerOptions
from preprocess.partition.partition import HubScore, InfluenceOptions, PartitionOptions, parse_hubs
from preprocess.sources.layouts import LAYOUTS

_MEM, _FRESH = "memory to use, such as 512M or 2G", "start from scratch, whatever a run has left"
Mem = Annotated[str, Option(help=_MEM, metavar="SIZE")]
ObjectWait = Annotated[
    float, Option("--object-wait", help="seconds that an object is tried", min=0)
]
Json = Annotated[bool, Option("--json", help="for scripts")]


@dataclass(frozen=True)
class SourceFlags(SourceSettings):
    """Source."""

    layout: str = flag("", f"of the source, if it is not recognised: {', '.join(LAYOUTS)}")
    undirected: bool | None = flag(
        None,
        "add the reverse of each edge, drop duplicates; else as the source says",
        "--undirected/--directed",
        show_default=False,
    )

    def options(self) -> dict[str, Any]:
        """The options of an ingest with the same names."""
        return {each.name: getattr(self, each.name) for each in fields(SourceSettings)}


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
class IngestHops(HopsRequest):
    """Propagation as a part of an ingest, whose own options leave some names taken."""

    hops: int = flag(0, "propagate features right away, as the command hops does; 0: do not")
    hop_alpha: float = flag(0.1, "of ppr: probability to go back")
    hop_loops: bool = flag(True, "of hops: a node is its own neighbor")
    splits: tuple[str, ...] = ()
    dtype: None = None
    seed: int = 0

    def asked(self, seed: int) -> HopsRequest | None:
        """The request for hops with this seed; None if there are no hops."""
        if self.operators and not self.hops:
            raise BadInput.at("--operator", "no --hops", "how often to apply it", "say --hops 2")
        return replace(self, seed=seed) if self.hops else None


@dataclass(frozen=True)
class OwnerFlags(OwnerOptions):
    remove: str = flag("", "the map of this name")


@dataclass(frozen=True)
class IngestResources:
    """Resources."""

    mem_bytes: int = size_flag("2G", _MEM, "--mem")
    fresh: bool = flag(False, _FRESH, "--fresh")


@dataclass(frozen=True)
class IngestWork(IngestResources):
    """Resources."""

    ray: str = flag(
        "", "tasks on a Ray that is there (auto, ray://HOST:PORT) or on local:N workers"
    )
    work: Path | None = flag(None, "where a store is made that goes to a URL, until it is there")
    stripe: list[Path] | None = flag(
        None, "folder that blocks are dealt over, one on each disk; several may be",
        show_default=False,
    )  # fmt: skip


@dataclass(frozen=True)
class PackFlags:
    """Epochs."""

    epochs: int = flag(1, "how many, from epoch 0 on; a session with cycle=P has them again", min=1)
    hot_bytes: int = size_flag("256M", "rows that stay in memory when the pack is served", "--hot")
    group_bytes: int = flag(
        "", "rows that a group of batches reads together; else half of --hot", "--group",
        typed=str, read=lambda text: read_size(text) if text else 0, metavar="SIZE",
    )  # fmt: skip


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

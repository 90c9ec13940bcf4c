"""Options of ingest and of feature propagation: frozen records, also filled by the command."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from blockstore.flags import flag, several
from blockstore.format import DEFAULT_BLOCK_BYTES, PAGE_BYTES, SHARD_BYTES
from blockstore.units import format_mem, parse_bytes
from preprocess.errors import BadInput
from preprocess.partition.partition import NO_WISHES, InfluenceOptions, PartitionOptions

FeatureDtype = Literal["float32", "float16", "bfloat16", "int8"]
NodeOrder = Literal["bfs", "degree", "random", "source"]
HopRows = Literal["labelled", "all"]
Keep = Literal["keep", "drop"]  # of duplicates and self-loops
Ids = Literal["auto", "uint32", "uint64"]
# breadth-first order needs a flag bit
_MAX_NODES = {"bfs": 2**31 - 1, "degree": 2**31 - 1, "random": 2**32 - 1}


class OperatorKind(StrEnum):
    """Operators of propagation; an enum, because typer does not support lists of literals."""

    sym = "sym"
    row = "row"
    ppr = "ppr"
    heat = "heat"


def read_size(text: str) -> int:
    """Parse a size such as "2G".  Raises BadInput."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadInput(str(error)) from error


def size_flag(default: str, text: str, *names: str) -> Any:
    """An option in bytes, given as a size such as "2G"."""
    return flag(default, text, *names, typed=str, read=read_size, metavar="SIZE")


def _read_shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise BadInput(f"--split {text!r}: expected shares such as 0.6,0.2,0.2") from error


@dataclass(frozen=True)
class HopsRequest:
    """Options of feature propagation, with names that are looked up in the store."""

    panel: ClassVar = "Propagated features"
    operators: tuple[str, ...] = several(  # default: sym
        "of hops: sym if not given; several may be", "--operator", of=OperatorKind
    )
    hops: int = flag(2, "how often each is applied")
    # empty: the only one that has features and a relation with itself
    node_type: str = flag("", "of hops: whose features, if it is not clear", "--type")
    feature: str = flag("", "of hops: which of several features")  # empty: its only one, or "x"
    # empty: the only one of the type with itself
    relation: str = flag("", "of hops: which of several, its name or src-name-dst")
    rows: HopRows = flag("labelled", "of hops: those of splits that have labels, or of all nodes")
    hop_alpha: float = flag(0.1, "of ppr: probability to go back", "--alpha")
    t: float = flag(3.0, "of heat: time")
    weighted: bool = flag(False, "hops by weights of edges", "--weighted")
    hop_loops: bool = flag(
        True, "each node is its own neighbor too", "--self-loops/--no-self-loops"
    )
    splits: tuple[str, ...] = several("only this; several may be given", "--split")
    dtype: FeatureDtype | None = flag(None, "of hops; else as the features")
    seed: int = flag(0, "of the order of rows")


@dataclass(frozen=True)
class SourceSettings:
    """Source."""

    duplicates: Keep = flag("keep", "equal edges")
    self_loops: Keep = flag("keep", "edges from a node to itself")
    allow_nan: bool = flag(False, "take NaN features as they are")
    split: tuple[float, ...] = flag(
        "", "if there are no splits: shares of train, valid and test", typed=str, read=_read_shares
    )
    leave_out: tuple[str, ...] = several("a split, of nodes or edges; several may be given")


@dataclass(frozen=True)
class StoreSettings:
    """Store."""

    dtype: FeatureDtype = flag("float32", "of features in the store")
    block_bytes: int = size_flag(
        format_mem(DEFAULT_BLOCK_BYTES), "unit of disk I/O: 4K to 16M", "--block-size"
    )
    edge_ids: bool = flag(False, "keep the id of each edge")
    ids: Ids = flag("auto", "width of node ids")
    order: NodeOrder = flag("degree", "of nodes in the store")
    seed: int = flag(0, "of the random order and of seeded splits")


@dataclass(frozen=True)
class IngestOptions(StoreSettings, SourceSettings):
    """All options of an ingest.  Only `mem_bytes` has no effect on the store's bytes."""

    mem_bytes: int = 2 << 30
    undirected: bool = False
    partition: PartitionOptions | None = None  # how to partition the nodes; None: not at all
    influence: InfluenceOptions = NO_WISHES  # hubs and halos
    hops: HopsRequest | None = None  # features to propagate after the last array

    @property
    def renames(self) -> bool:
        """Whether nodes are numbered differently than in the source."""
        return self.order != "source" or self.partition is not None

    @property
    def is_breadth_first(self) -> bool:
        """Whether the graph is visited breadth-first to find the order of nodes."""
        return self.order in ("bfs", "degree")

    @property
    def drop_equal(self) -> bool:
        """Whether only the edge with the smallest id is kept of equal ones."""
        return self.undirected or self.duplicates == "drop"

    @property
    def needs_columns(self) -> bool:
        """Whether sorted columns are needed to find the order of nodes or their partition."""
        return self.partition is not None or self.is_breadth_first

    def check(self) -> None:
        """Raises BadInput if no graph can be stored with these options."""
        if self.block_bytes % PAGE_BYTES or not PAGE_BYTES <= self.block_bytes <= SHARD_BYTES:
            raise BadInput.at(
                "--block-size", self.block_bytes,
                f"a multiple of {PAGE_BYTES}, at most {SHARD_BYTES}", "1M is a good choice",
            )  # fmt: skip
        if self.partition is not None:
            self.partition.check()
        self.influence.check(self.partition is not None)
        shares = self.split
        if shares and (len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-9):
            raise BadInput.at(
                "--split", ",".join(f"{s:g}" for s in shares),
                "three shares, of train, valid and test, of at most 1 together",
                "0.6,0.2,0.2 is usual",
            )  # fmt: skip

    def node_dtype(self, num_nodes: int) -> str:
        """Dtype of node ids.  Raises BadInput: more nodes than the options allow."""
        wide = num_nodes >= 2**32 - 1
        if wide and self.ids == "uint32":
            raise BadInput.at("--ids", "uint32", f"uint64 for {num_nodes:,} nodes", "leave it out")
        if num_nodes >= _MAX_NODES.get(self.order, 2**32 - 1 if self.partition else 2**64):
            raise BadInput.at(
                "--order", self.order, f"source for {num_nodes:,} nodes, which need more bits",
                "change it",
            )  # fmt: skip
        return "uint64" if wide or self.ids == "uint64" else "uint32"

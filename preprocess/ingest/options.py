"""What an ingest is asked to do, and propagation: frozen records, read once by the command."""

from dataclasses import dataclass
from typing import Literal

from blockstore.format import DEFAULT_BLOCK_BYTES, PAGE_BYTES, SHARD_BYTES
from preprocess.errors import BadInput
from preprocess.partition.influence import NO_WISHES, InfluenceOptions
from preprocess.partition.partition import PartitionOptions

FeatureDtype = Literal["float32", "float16", "bfloat16", "int8"]
NodeOrder = Literal["bfs", "degree", "random", "source"]
OperatorKind = Literal["sym", "row", "ppr", "heat"]
HopRows = Literal["labelled", "all"]
Keep = Literal["keep", "drop"]  # of duplicates and self-loops
Ids = Literal["auto", "uint32", "uint64"]
_MOST_NODES = {"bfs": 2**31 - 1, "degree": 2**32 - 1, "random": 2**32 - 1}  # bfs takes a bit


@dataclass(frozen=True, slots=True)
class HopsRequest:
    """What is asked for, by name."""

    operators: tuple[str, ...] = ("sym",)
    hops: int = 2
    self_loops: bool = True
    node_type: str = ""  # empty: the only one that has features and a relation with itself
    feature: str = ""  # empty: its only one, or "x"
    relation: str = ""  # its name, or "src-name-dst"; empty: the only one of the type with itself
    rows: HopRows = "labelled"
    splits: tuple[str, ...] = ()  # of labelled rows; empty: all
    dtype: FeatureDtype | None = None  # None: that of the features
    seed: int = 0  # of the order of rows
    alpha: float = 0.1  # of ppr: probability to go back
    t: float = 3.0  # of heat: time
    weighted: bool = False  # by the weights of edges; else each weighs 1


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Semantic ones decide the store's bytes; `mem_bytes` never does."""

    mem_bytes: int = 2 << 30
    block_bytes: int = DEFAULT_BLOCK_BYTES
    dtype: FeatureDtype = "float32"
    undirected: bool = False
    edge_ids: bool = False
    order: NodeOrder = "bfs"
    duplicates: Keep = "keep"
    self_loops: Keep = "keep"
    ids: Ids = "auto"
    allow_nan: bool = False
    seed: int = 0  # of the random order and of seeded splits
    split: tuple[float, ...] = ()  # shares of train, valid, test where the source has no splits
    leave_out: tuple[str, ...] = ()  # splits of the source, by name
    partitioned: bool = False  # a partition of the nodes is given
    partition: PartitionOptions | None = None  # one is to be found
    influence: InfluenceOptions = NO_WISHES  # hubs and halos
    hops: HopsRequest | None = None  # features propagated, right behind the last array

    @property
    def in_partitions(self) -> bool:
        """Whether nodes stand partition by partition."""
        return self.partitioned or self.partition is not None

    @property
    def renames(self) -> bool:
        """Whether nodes get other numbers than they have in the source."""
        return self.order != "source" or self.in_partitions

    @property
    def drop_equal(self) -> bool:
        """Whether of equal edges only the one of the smallest id is kept."""
        return self.undirected or self.duplicates == "drop"

    def check(self) -> None:
        """Raises BadInput: what no graph can be stored with."""
        if self.block_bytes % PAGE_BYTES or not PAGE_BYTES <= self.block_bytes <= SHARD_BYTES:
            raise BadInput.at(
                "--block-size", self.block_bytes,
                f"a multiple of {PAGE_BYTES}, at most {SHARD_BYTES}", "1M is a good choice",
            )  # fmt: skip
        if self.partition is not None:
            self.partition.check()
        self.influence.check(self.in_partitions)
        shares = self.split
        if shares and (len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-9):
            raise BadInput.at(
                "--split", ",".join(f"{s:g}" for s in shares),
                "three shares, of train, valid and test, of at most 1 together",
                "0.6,0.2,0.2 is usual",
            )  # fmt: skip

    def node_dtype(self, num_nodes: int) -> str:
        """Width of node ids.  Raises BadInput: more nodes than the options allow."""
        wide = num_nodes >= 2**32 - 1
        if wide and self.ids == "uint32":
            raise BadInput.at("--ids", "uint32", f"uint64 for {num_nodes:,} nodes", "leave it out")
        if num_nodes >= _MOST_NODES.get(self.order, 2**32 - 1 if self.in_partitions else 2**64):
            raise BadInput.at(
                "--order", self.order, f"source for {num_nodes:,} nodes, which need more bits",
                "change it",
            )  # fmt: skip
        return "uint64" if wide or self.ids == "uint64" else "uint32"

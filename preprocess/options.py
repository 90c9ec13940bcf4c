"""What an ingest is asked to do: one frozen record, read once by the command."""

from dataclasses import dataclass
from typing import Literal

from blockstore.format import DEFAULT_BLOCK_BYTES, PAGE_BYTES, SHARD_BYTES
from preprocess.errors import BadInput

FeatureDtype = Literal["float32", "float16", "bfloat16", "int8"]
NodeOrder = Literal["bfs", "degree", "random", "source"]
_MOST_BFS_NODES = 2**31 - 1  # a bit of the tables is taken


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Semantic ones decide the store's bytes; `mem_bytes` never does."""

    mem_bytes: int = 2 << 30
    block_bytes: int = DEFAULT_BLOCK_BYTES
    dtype: FeatureDtype = "float32"
    undirected: bool = False
    edge_ids: bool = False
    order: NodeOrder = "bfs"
    duplicates: Literal["keep", "drop"] = "keep"
    self_loops: Literal["keep", "drop"] = "keep"
    ids: Literal["auto", "uint32", "uint64"] = "auto"
    allow_nan: bool = False
    seed: int = 0  # of the random order and of seeded splits
    split: tuple[float, ...] = ()  # shares of train, valid, test where the source has no splits

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

    def node_dtype(self, num_nodes: int) -> str:
        """Width of node ids.  Raises BadInput: more nodes than the options allow."""
        wide = num_nodes >= 2**32 - 1
        if wide and self.ids == "uint32":
            raise BadInput.at("--ids", "uint32", f"uint64 for {num_nodes:,} nodes", "leave it out")
        if self.order == "bfs" and num_nodes >= _MOST_BFS_NODES:
            raise BadInput.at(
                "--order", "bfs", f"source for {num_nodes:,} nodes, 2^31 and more", "change it"
            )
        return "uint64" if wide or self.ids == "uint64" else "uint32"

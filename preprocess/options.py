"""What an ingest is asked to do: one frozen record, read once by the command."""

from dataclasses import dataclass
from typing import Literal

from blockstore.format import DEFAULT_BLOCK_BYTES

FeatureDtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Semantic ones decide the store's bytes; `mem_bytes` never does."""

    mem_bytes: int = 2 << 30
    block_bytes: int = DEFAULT_BLOCK_BYTES
    dtype: FeatureDtype = "float32"
    undirected: bool = False
    edge_ids: bool = False
    order: Literal["bfs", "source"] = "bfs"
    duplicates: Literal["keep", "drop"] = "keep"
    self_loops: Literal["keep", "drop"] = "keep"
    ids: Literal["auto", "uint32", "uint64"] = "auto"
    allow_nan: bool = False

    @property
    def drop_equal(self) -> bool:
        """Whether of equal edges only the first is kept."""
        return self.undirected or self.duplicates == "drop"

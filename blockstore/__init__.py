"""The store: format, block reads and writes, arena, and the kernels that know a block's bytes."""

from blockstore.launch import serve

__all__ = ["serve"]
__version__ = "0.1.0"

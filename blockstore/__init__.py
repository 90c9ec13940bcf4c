"""The store: its format, block reads and writes, the arena, and the kernels that know a block's bytes."""

"""The random numbers of `blockstore.kernels.random`, computed by torch on any device."""

from torch import Tensor


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value ^ 1 << 63) - (1 << 63)


SIGN = -(1 << 63)  # x ^ SIGN orders int64 as the unsigned numbers of the same bits
_GOLDEN, _M1, _M2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """`mix` for int64; masks, as torch's right shift extends the sign."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _M1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _M2
    return x ^ (x >> 31 & (1 << 33) - 1)


def node_key(key: int, nodes: Tensor) -> Tensor:
    """Key of each node's draws, int64: the bits of the uint64."""
    return _mix((nodes * _GOLDEN + _M1) ^ _signed(key))


def draw_hash(node_keys: Tensor, draws: Tensor) -> Tensor:
    """Hash of a draw under each node's key, int64: the bits of the uint64."""
    return _mix(node_keys + draws * _GOLDEN)

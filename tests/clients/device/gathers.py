"""Cases of a gather, what a plain loop makes of them, and the kernel in Triton's interpreter."""

import sys
from typing import NamedTuple

import numpy as np
import torch

NO_ROW = -2


class Case(NamedTuple):
    """Arguments of a gather."""

    arena: np.ndarray  # uint8
    addresses: torch.Tensor  # int64 (rows,)
    slots: torch.Tensor | None  # int64 (rows,)
    cache: torch.Tensor | None  # uint8 (cached, width)
    width: int


def case(seed: int, rows: int, width: int, cached: bool, slots: int = 64) -> Case:
    """Random rows of an arena, at multiples of their width, some of them absent."""
    rng = np.random.default_rng(seed)
    arena = rng.integers(0, 256, slots * max(width, 64), dtype=np.uint8)
    addresses = rng.integers(0, arena.size // width, rows) * width
    addresses[rng.random(rows) < 0.2] = NO_ROW
    if not cached:
        return Case(arena, torch.from_numpy(addresses), None, None, width)
    held = rng.integers(0, 256, (9, width), dtype=np.uint8)
    places = np.where(rng.random(rows) < 0.4, rng.integers(0, 9, rows), -1)
    return Case(
        arena, torch.from_numpy(addresses), torch.from_numpy(places), torch.from_numpy(held), width
    )


def expected(given: Case) -> np.ndarray:
    """uint8 (rows, width)."""
    out = np.zeros((given.addresses.numel(), given.width), np.uint8)
    for i, address in enumerate(given.addresses.tolist()):
        slot = -1 if given.slots is None else int(given.slots[i])
        if slot >= 0 and given.cache is not None:
            out[i] = given.cache[slot].numpy()
        elif address >= 0:
            out[i] = given.arena[address : address + given.width]
    return out


def main() -> None:
    """Every width of a word, rows of less and more than a tile."""
    from clients.device.kernels import gather_on_device

    shapes = [(1, 1), (50, 3), (50, 6), (1500, 4), (33, 100), (20, 512), (9, 3072), (0, 8)]
    for number, (rows, width) in enumerate([*shapes, (40, 1100), (9000, 256)]):
        for cached in (False, True):
            given = case(number, rows, width, cached)
            out = torch.full((rows, width), 77, dtype=torch.uint8)
            arena = torch.from_numpy(given.arena)
            gather_on_device(arena, given.addresses, out, given.slots, given.cache)
            np.testing.assert_array_equal(out.numpy(), expected(given), f"{rows} x {width}")


def compile_all() -> None:
    """To machine code of an H100, for every word, with a cache and without."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from clients.device.kernels import _gather

    for word, kind in ((8, "i64"), (4, "i32"), (2, "i16"), (1, "u8")):
        for cached in (False, True):
            types = dict.fromkeys(("arena", "cache", "out"), f"*{kind}")
            types |= {"addresses": "*i64", "slots": "*i64", "num_rows": "i32"}
            fixed = {"ROW_WORDS": 60, "WORD_BYTES": word, "CACHED": cached, "COLUMNS": 64}
            order = {name: types.get(name, "constexpr") for name in _gather.arg_names}
            source = ASTSource(fn=_gather, signature=order, constexprs=fixed)
            built = compile_kernel(source, target=GPUTarget("cuda", 90, 32))
            assert built.asm["cubin"]


if __name__ == "__main__":
    compile_all() if "compile" in sys.argv else main()

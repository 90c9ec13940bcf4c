"""What only a GPU can show: memory that is registered, the kernel, streams and marks."""

import mmap
import os
import warnings

import numpy as np
import pytest
import torch

from clients.device.devices import CudaDevice, open_device
from clients.device.driver import CannotRegister, registered
from tests.clients.device.gathers import case, expected

GPU = torch.device("cuda", 0)


def sealed(values: np.ndarray) -> np.ndarray:
    """The same bytes in a memory file, mapped for reading only, as a client has the arena."""
    fd = os.memfd_create("arena")
    try:
        os.truncate(fd, max(values.nbytes, mmap.PAGESIZE))
        with mmap.mmap(fd, values.nbytes) as writable:
            writable[:] = values.tobytes()
        mapped = mmap.mmap(fd, values.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, np.uint8)


def is_pinned(memory: np.ndarray) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not writable
        return torch.from_numpy(memory).is_pinned()


def test_memory_that_is_mapped_read_only_is_registered_once_for_all_who_read_it():
    memory = sealed(np.arange(1 << 20, dtype=np.uint32).view(np.uint8))
    for _ in range(2):  # given back, it can be had again
        first, second = registered(memory, GPU), registered(memory, GPU)
        assert first is second
        del first
        assert is_pinned(memory)
        del second
        assert not is_pinned(memory)


def test_what_cannot_be_registered_is_said_and_harms_nothing():
    memory = sealed(np.zeros(1 << 16, np.uint8))
    held = registered(memory, GPU)
    with pytest.raises(CannotRegister, match="cuMemHostRegister of 61440 bytes"):
        registered(memory[4096:], GPU)
    assert int(torch.ones(1000, device=GPU).sum()) == 1000  # no error is left behind
    assert held.memory is memory


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 1), (50, 3), (77, 6), (1500, 4), (3000, 512), (9, 3072), (40, 1100), (90_000, 64)],
)
def test_the_kernel_gathers_as_a_loop_would(rows, width, cached):
    given = case(rows * width, rows, width, cached, slots=4096)
    device = CudaDevice(GPU)
    assert device.lend(sealed(given.arena)) == ""
    on = [t if t is None else t.to(GPU) for t in (given.addresses, given.slots, given.cache)]
    torch.cuda.synchronize()
    with device.order():
        out = torch.full((rows, width), 77, dtype=torch.uint8, device=GPU)
    device.gather(on[0], out, on[1], on[2])
    device.mark().wait()
    np.testing.assert_array_equal(out.cpu().numpy(), expected(given))
    device.close()


def test_copies_come_in_order_and_marks_say_when():
    device = open_device(GPU)
    source = device.host(1 << 24)
    source.fill_(7)
    before = device.mark()
    target = device.copy(source)
    after = device.mark()
    device.adopt([target], after)
    assert int(target.sum(dtype=torch.int64)) == 7 << 24
    after.wait()
    assert after.since(before) > 0
    device.close()

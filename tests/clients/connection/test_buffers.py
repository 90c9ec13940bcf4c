"""Buffers come back when the last view dies, not before, and never too many are kept."""

import os

import numpy as np
import pytest

from clients.connection.buffers import SMALL_BYTES, BufferPool

BIG = (1 << 20,)


def address(array):
    return array.__array_interface__["data"][0]


def test_arrays_are_as_asked_for():
    array = BufferPool().empty((1000, 70), "float64")
    assert array.shape == (1000, 70)
    assert array.dtype == np.float64
    assert array.flags.writeable
    assert array.flags.c_contiguous
    array[:] = 1.0


def test_memory_is_reused_after_the_last_view_died():
    pool = BufferPool()
    array = pool.empty(BIG, np.float32)
    row, where = array[5:6], address(array)
    del array
    other = pool.empty(BIG, np.float32)
    assert address(other) != where
    del row
    assert address(pool.empty(BIG, np.float32)) == where
    assert pool.num_mapped == 2


def test_a_torch_tensor_keeps_its_buffer():
    torch = pytest.importorskip("torch")
    pool = BufferPool()
    tensor = torch.from_numpy(pool.empty(BIG, np.float32)).view(1024, 1024)[3]
    assert pool.unused_bytes() == 0
    del tensor
    assert pool.unused_bytes() > 0


def test_small_arrays_have_no_buffer():
    pool = BufferPool()
    pool.empty((SMALL_BYTES // 4 - 1,), np.float32)
    assert pool.num_mapped == 0


def test_sizes_that_vary_a_little_reuse_one_buffer():
    pool = BufferPool()
    for count in (1_000_000, 1_050_000, 900_000, 1_010_000):
        pool.empty((count,), np.float32)
    assert pool.num_mapped == 1


def test_a_far_larger_buffer_is_not_taken():
    pool = BufferPool()
    pool.empty((64 << 20,), np.uint8)
    pool.empty((1 << 20,), np.uint8)
    assert pool.num_mapped == 2


def test_unused_buffers_are_bounded():
    pool = BufferPool(keep_bytes=8 << 20)
    held = [pool.empty((4 << 20,), np.uint8) for _ in range(4)]
    held.clear()
    assert 0 < pool.unused_bytes() <= 8 << 20


def test_buffers_of_no_use_any_more_make_room():
    pool = BufferPool(keep_bytes=64 << 20)
    for size in (40 << 20, 5 << 20, 44 << 20):
        pool.empty((size,), np.uint8)
    assert pool.unused_bytes() <= 64 << 20
    where = address(pool.empty((44 << 20,), np.uint8))
    assert address(pool.empty((44 << 20,), np.uint8)) == where


def test_a_pool_may_die_before_its_arrays():
    array = BufferPool().empty(BIG, np.float32)
    array[:] = 2.0
    assert array.sum() == 2 * BIG[0]


def test_a_forked_child_gives_nothing_back():
    pool = BufferPool()
    array = pool.empty(BIG, np.float32)
    child = os.fork()
    if child == 0:
        del array
        os._exit(int(pool.unused_bytes() != 0))
    assert os.waitpid(child, 0)[1] == 0
    del array
    assert pool.unused_bytes() > 0


def test_memory_that_came_back_is_handed_out_once():
    pool = BufferPool()
    shape = (SMALL_BYTES,)
    first = pool.empty(shape, "uint8")
    del first
    arrays = [pool.empty(shape, "uint8") for _ in range(3)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array[:9].tolist()) for array in arrays] == [{0}, {1}, {2}]

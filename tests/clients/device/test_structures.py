"""Structures that are widened by a device are those that the host widens."""

import numpy as np
import pytest
import torch

from clients.connection.buffers import BufferPool
from clients.device.devices import Device
from clients.device.stage import DeviceStaging
from clients.records import TensorRecord
from tests.clients.device.structures import ids, in_pieces, structures


class Moved(TensorRecord):
    """A record of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def map(self, function):
        return Moved(function(self.tensor))


def through(staging: DeviceStaging, array: np.ndarray) -> np.ndarray:
    return staging.move(Moved(torch.from_numpy(array))).batch.tensor.numpy()


@pytest.fixture(params=["host", "device", "host brings them"])
def widened(request):
    """Calls a method of a memory; what it laid out is handed on, by way of the device if one."""
    rng = np.random.default_rng(5)
    if request.param == "host":
        yield rng, lambda method, *values: getattr(BufferPool(), method)(*values)
        return
    staging = DeviceStaging(Device(), direct=request.param == "device")

    def by_device(method, *values):
        staging.begin()
        return through(staging, getattr(staging, method)(*values))

    yield rng, by_device
    staging.close()


def test_edges_are_those_of_a_loop(widened):
    rng, make = widened
    for given in structures(rng):
        found = make("edge_index", *given.sent(rng))
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found.reshape(2, -1), given.expected())


def test_ids_keep_their_values(widened):
    rng, make = widened
    for given in ids(rng):
        found = make("widened", in_pieces(given, rng))
        assert found.dtype == np.int64
        assert found.tolist() == given.tolist()


def test_a_structure_is_copied_to_a_device_as_it_was_sent():
    """In those bytes, not the eight of each number of the batch."""
    rng = np.random.default_rng(6)
    copied = []

    class Counting(Device):
        def copy(self, source):
            copied.append(source.nbytes)
            return super().copy(source)

    given = max(structures(rng), key=lambda one: one.src.nbytes)
    staging = DeviceStaging(Counting())
    through(staging, staging.edge_index(*given.sent(rng)))
    assert sum(copied) == given.src.nbytes + sum(counts.nbytes for counts in given.counts)
    staging.close()

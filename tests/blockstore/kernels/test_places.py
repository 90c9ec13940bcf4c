"""Addresses of packed rows, against plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.rows import NO_ROW, PlacedRows, address_places


def address(place: int, rows: PlacedRows) -> int:
    """Where one row is."""
    for (first, stop), slots in ((rows.hot, rows.hot_slots), (rows.cold, rows.cold_slots)):
        if first <= place < stop:
            block, row = divmod(place - first, rows.rows_per_block)
            return int(slots[block]) * rows.slot_bytes + row * rows.row_bytes
    return int(NO_ROW)


@given(st.data())
def test_addresses_follow_from_places(data):
    per, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 64))
    before, hot, between, cold = data.draw(st.tuples(*[st.integers(0, 40)] * 4))
    starts = [before, before + hot, before + hot + between, before + hot + between + cold]
    numbers = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(1000)
    hot_slots, cold_slots = numbers[: -(-hot // per)], numbers[500 : 500 + -(-cold // per)]
    rows = PlacedRows(
        (starts[0], starts[1]), (starts[2], starts[3]), hot_slots, cold_slots, per, width,
        per * width + data.draw(st.integers(0, 64)),
    )  # fmt: skip
    places = np.arange(starts[3] + 3, dtype=np.uint32)
    places = np.append(places, np.uint32(2**32 - 1))
    out = np.empty(places.size, np.uint64)
    address_places(places, rows, out)
    assert out.tolist() == [address(int(place), rows) for place in places]

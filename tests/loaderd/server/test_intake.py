"""The numbers of one request, piece by piece."""

from typing import Any

import numpy as np
import pytest

from loaderd.api.errors import BadMessage
from loaderd.api.protocol import Attach, Ids
from loaderd.memory.slots import RequestArea
from loaderd.server.intake import PIECE, Intake

NOBODY: Any = None
REQUEST = Attach(token=0, request=1)


def piece(first: int, numbers: np.ndarray) -> Ids:
    return Ids(request=1, first=first, numbers=numbers.astype("<i8").tobytes())


def test_pieces_come_in_the_order_in_which_they_were_asked_for():
    numbers = np.arange(PIECE + 3)
    area = RequestArea(np.zeros(numbers.size, np.int64), range(0), 4096, NOBODY)
    intake = Intake(NOBODY, REQUEST, area)
    asked = [(w.first, w.count) for w in intake.wanted()]
    assert asked == [(0, PIECE), (PIECE, 3)]
    for first, count in asked:
        intake.take(piece(first, numbers[first : first + count]))
    assert (area.numbers == numbers).all()


def test_a_piece_that_was_not_asked_for_ends_the_request_and_later_ones_are_dropped():
    area = RequestArea(np.zeros(5, np.int64), range(0), 4096, NOBODY)
    intake = Intake(NOBODY, REQUEST, area)
    intake.wanted()
    with pytest.raises(BadMessage, match="0 bytes of numbers from 7 on, expected 40 from 0 on"):
        intake.take(piece(7, np.zeros(0)))
    intake.take(piece(0, np.ones(5)))
    intake.take(piece(9, np.ones(5)))
    assert not area.numbers.any()

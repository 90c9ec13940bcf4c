"""What a failure against the reference says."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.differences import At, same_batch
from tests.reference import SampledBatch

EXPECTED = SampledBatch([7, 9, 4], [1, 2], [[1, 2]], [[0, 0]], [[30, 31]])


def batch(**other: Any) -> SimpleNamespace:
    x = np.array([[0, 14], [0, 18], [0, 8]])
    return SimpleNamespace(**{
        "epoch": 2, "step": 5, "n_id": np.array([7, 9, 4]), "num_sampled_nodes": (1, 2), "x": x,
        "edge_index": np.array([[1, 2], [0, 0]]), "e_id": np.array([30, 31]), **other,
    })  # fmt: skip


def test_an_equal_batch_says_nothing():
    same_batch(At(2, 5), batch(), EXPECTED)
    same_batch(
        At(2, 5), batch(e_id=np.array([3, 1])), EXPECTED, dict(zip([30, 31], [3, 1], strict=True))
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"n_id": np.array([7, 8, 4])}, "epoch 2, step 5, n_id[1], node 9: found 8, expected 9"),
        ({"n_id": np.array([7, 9])},
         "epoch 2, step 5, n_id[2], node 4: found nothing, expected 4 (of 2, expected 3)"),
        ({"n_id": np.array([7, 9, 4, 1])},
         "epoch 2, step 5, n_id[3]: found 1, expected nothing (of 4, expected 3)"),
        ({"edge_index": np.array([[1, 1], [0, 0]])},
         "epoch 2, step 5, edge_index[0][1], node 7: found 1, expected 2"),
        ({"e_id": np.array([30, 32])}, "epoch 2, step 5, e_id[1], node 7: found 32, expected 31"),
        ({"x": np.array([[0, 14], [0, 18], [0, 9]])},
         "epoch 2, step 5, x[:, 1][2], node 4: found 9, expected 8.0"),
        ({"step": 4}, "epoch 2, step 5, epoch and step[1]: found 4, expected 5"),
        ({"num_sampled_nodes": (1, 1)},
         "epoch 2, step 5, num_sampled_nodes[1]: found 1, expected 2"),
    ],
)  # fmt: skip
def test_the_first_difference_is_told_in_one_line(other, said):
    with pytest.raises(AssertionError) as error:
        same_batch(At(2, 5), batch(**other), EXPECTED)
    assert str(error.value) == said


def test_what_is_no_list_is_told_whole():
    with pytest.raises(AssertionError, match=r"^epoch 0, step 1, form: found 'a', expected 'b'$"):
        At(0, 1).same("form", "a", "b")

"""Which expert each row is for, of rows that come grouped by expert."""

import pytest

from expertd.common.grouped import experts_of_rows
from expertd.errors import BadShapeError
from expertd.v1 import expert_service_pb2 as pb


def experts(ids, counts, each, rows):
    message = pb.GroupedRows(expert_ids=ids, row_counts=counts, rows_per_expert=each)
    return experts_of_rows(message, rows).tolist()


def test_contiguous_rows():
    assert experts([4, 9, 4], [2, 0, 1], 0, 3) == [4, 4, 4]
    assert experts([], [], 0, 0) == []


def test_an_array_of_experts():
    assert experts([4, 9, 7], [2, 0, 3], 3, 9) == [4, 4, -1, -1, -1, -1, 7, 7, 7]
    assert experts([], [], 5, 0) == []
    assert experts([2**32 - 1], [1], 1, 1) == [2**32 - 1]


@pytest.mark.parametrize(
    ("ids", "counts", "each", "rows", "says"),
    [
        ([1], [1, 1], 0, 2, "1 expert_ids and 2 row_counts"),
        ([1], [1, 1], 2, 2, "1 expert_ids and 2 row_counts"),
        ([1, 2], [1, 1], 0, 3, "got 2 rows, want the 3"),
        ([1, 2], [1, 1], 2, 3, "2 rows for each of 2 experts, want the 3 rows"),
        ([1, 2], [3, 1], 2, 4, "got 3 rows of an expert, want at most rows_per_expert, 2"),
        ([1, 2], [2**32 - 1] * 2, 2**32 - 1, 4, "4294967295 rows for each"),
        ([1], [2**32 - 1], 0, 4, "got 4294967295 rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_made(ids, counts, each, rows, says):
    with pytest.raises(BadShapeError, match=says):
        experts(ids, counts, each, rows)

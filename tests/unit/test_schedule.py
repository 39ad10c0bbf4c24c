"""Schedules of documents over groups of ranks: complete, within capacities, even, and the same everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scale

from thdattn.packing import schedule


def test_worked_by_hand():
    # 6 first, to group 0; 5 and 4 to group 1, whose 15 + 10 pairs exceed 21; 2 then to group 0, and 1 to group 0 again.
    assert schedule([5, 2, 6, 4, 1], 2, 10) == [[[1, 2, 4]], [[0, 3]]]
    # A micro-batch has room for 6 rows, so each group has two; 1 goes to group 0, whose 24 pairs are fewer than 25.
    assert schedule([5, 2, 6, 4, 1], 2, 6) == [[[2], [1, 4]], [[0], [3]]]
    assert schedule([], 3, 4) == [[[]], [[]], [[]]]
    assert schedule([1, 1], 1, 8, micro_batches=2) == [[[0], [1]]] and schedule([1], 1, 8, 2) == [[[0], []]]
    # 4 and 3 rows, each in an empty micro-batch, would leave no room for 5 in one of 7; together they do.
    assert schedule([4, 3, 5], 1, 7, work=[9, 8, 7], micro_batches=2) == [[[0, 1], [2]]]


@pytest.mark.parametrize("seed", range(30))
def test_every_document_is_dealt_once_within_the_capacity(seed):
    rng = np.random.default_rng(seed)
    tokens, groups, multiple = int(rng.integers(32, 400)), int(rng.integers(1, 6)), int(rng.choice([1, 4, 16]))
    lengths = rng.integers(0, tokens // multiple * multiple + 1, int(rng.integers(0, 80)))
    dealt = schedule(lengths, groups, tokens, multiple=multiple)
    assert len(dealt) == groups and len({len(group) for group in dealt}) == 1
    batches = [batch for group in dealt for batch in group]
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert all(batch == sorted(batch) for batch in batches)
    assert all((-(-lengths[batch] // multiple) * multiple).sum() <= tokens for batch in batches)
    assert dealt == schedule(lengths.tolist(), groups, tokens, len(dealt[0]), multiple=multiple), "the same again"


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_groups_have_even_work_on_real_documents(groups):
    for seed in range(3):
        lengths, by_first_fit, scheduled = scale.global_batch(groups, 16, seed)
        assert scale.busiest(lengths, by_first_fit) > scale.busiest(lengths, scheduled) <= 1.02


def test_work_that_is_passed_decides():
    lengths, work = [4, 4, 4, 4], [9, 1, 1, 7]
    dealt = schedule(lengths, 2, 16, work=work)
    assert dealt == [[[0]], [[1, 2, 3]]]


def test_as_few_micro_batches_as_documents_need():
    assert [len(group) for group in schedule([3] * 8, 2, 6)] == [2, 2]
    assert [len(group) for group in schedule([4] * 8, 2, 6)] == [4, 4]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (([7, 9], 2, 8), ValueError, r"lengths\[1\] takes 9 rows, wanted at most tokens = 8; split the document"),
    (([7, 7, 7], 1, 8, 2), ValueError, "micro_batches is 2, wanted enough of 8 rows for 1 groups to hold .* 21 rows"),
    (([7], 0, 8), ValueError, "groups is 0, wanted"),
    (([7], 1, 0), ValueError, "tokens is 0, wanted"),
    (([7], 1, 8, 0), ValueError, "micro_batches is 0, wanted"),
    (([7], 1.5, 8), TypeError, "groups"),
    (([7.5], 1, 8), TypeError, "lengths"),
    (([7], 1, 8, None, [1, 2]), ValueError, r"work has shape \(2,\) .*, wanted \(1,\) finite numbers >= 0"),
    (([7], 1, 8, None, [-1.0]), ValueError, "work has shape"),
    (([7], 1, 8, None, [float("nan")]), ValueError, "work has shape"),
    (([7], 1, 8, None, ["a"]), TypeError, "work is"),
])
def test_errors_name_the_argument_and_the_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        schedule(*arguments)

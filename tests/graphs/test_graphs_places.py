"""Arguments of a captured graph: which it reads where they are, and which it copies to a place of its own; on a fake
CuPy.
"""

from __future__ import annotations

import fake_cupy
import numpy as np
import pytest
from fake_cupy import add


def test_arguments_are_copied_unless_a_graph_returned_them(active):
    graphs, seen = active(), []
    first = graphs.captured(lambda x: add(x, 1), "first")
    second = graphs.captured(lambda x: (seen.append(x), add(x, 1))[1], "second")
    given = fake_cupy.array([1.0])
    for _ in range(2):
        middle = first(given)
        assert second(middle).tolist() == [3]
    assert seen[-1] is middle and next(first.arrays()) is not given
    # Another array is copied into that place, and the argument itself stays as it is.
    other = fake_cupy.array([5.0])
    assert second(other).tolist() == [6] and middle.tolist() == [5] and other.tolist() == [5]
    assert second(first(given)).tolist() == [3]


def test_a_result_goes_back_into_its_own_function(active):
    captured = active().captured(lambda x: add(x, 1), "step")
    x = fake_cupy.array([0.0])
    for i in range(6):
        x = captured(x)
        assert x.tolist() == [i + 1]


def test_arguments_that_lie_in_each_others_place_change_places(active):
    graphs = active()
    one, two = (graphs.captured(lambda x: add(x, 0), name) for name in ("one", "two"))
    both = graphs.captured(lambda x, y: (add(x, 0), add(y, 0)), "both")
    for _ in range(2):
        x, y = one(fake_cupy.array([1.0])), two(fake_cupy.array([2.0]))
        both(x, y)
    assert [z.tolist() for z in both(y, x)] == [[2], [1]]


def test_arguments_that_were_one_at_the_capture_must_stay_one(active):
    """They have one place, which holds one array."""
    graphs = active()
    one, two = (graphs.captured(lambda x: add(x, 0), name) for name in ("one", "two"))
    both = graphs.captured(lambda x, parts: add(x, parts["y"]), "both")
    for _ in range(3):
        x = one(fake_cupy.array([1.0]))
        assert both(x, {"y": x}).tolist() == [2]
    other = two(fake_cupy.array([5.0]))
    assert both(other, {"y": other}).tolist() == [10]
    for wrong in ((other, {"y": x}), (x, {"y": other}), (other, {"y": fake_cupy.array([5.0])})):
        with pytest.raises(ValueError, match=r"both: argument 0 and argument 1\['y'\] have one place in the captured "
                                             r"graph, wanted one array, as at the capture; pass copies there"):
            both(*wrong)


def test_a_part_of_another_argument_must_stay_one(active):
    graphs = active()
    first = graphs.captured(lambda x: add(x, 0), "first")
    both = graphs.captured(lambda x, y: (add(x, 0), add(y, 0)), "both")
    for _ in range(3):
        x = first(fake_cupy.array([1, 2, 3]))
        assert [z.tolist() for z in both(x, x[:2])] == [[1, 2, 3], [1, 2]]
    with pytest.raises(ValueError, match="both: argument 0 and argument 1 have one place in the captured graph"):
        both(fake_cupy.array([7, 8, 9]), x[:2])


def test_columns_side_by_side_are_no_parts_of_each_other(active):
    graphs = active()

    def columns(x):
        made = add(x, 0)
        return made[:, :1], made[:, 1:]

    halves = graphs.captured(columns, "halves")
    both = graphs.captured(lambda x, y: (add(x, 0), add(y, 0)), "both")
    for _ in range(3):
        assert [z.tolist() for z in both(*halves(fake_cupy.array([[1, 2], [3, 4]])))] == [[[1], [3]], [[2], [4]]]
    found = both(fake_cupy.array([[5], [6]]), fake_cupy.array([[7], [8]]))
    assert [z.tolist() for z in found] == [[[5], [6]], [[7], [8]]]


@pytest.mark.parametrize("part", [slice(1, None), slice(None, None, -1)], ids=str)
def test_an_argument_that_is_part_of_anothers_place_is_read_before_that_is_written(active, part):
    graphs = active()
    first = graphs.captured(lambda x: add(x, 0), "first")
    both = graphs.captured(lambda x, y: (add(x, 0), add(y, 0)), "both")
    given = fake_cupy.array([1, 2, 3])
    for _ in range(2):
        x = first(given)
        both(x, x[part])
    x = first(given)
    found, wanted = both(fake_cupy.array([7, 8, 9]), x[part]), np.array([1, 2, 3])[part]
    assert [z.tolist() for z in found] == [[7, 8, 9], wanted.tolist()]


def test_a_transposed_view_of_a_result_is_not_in_its_place(active):
    graphs = active()
    first, second = graphs.captured(lambda x: add(x, 0), "first"), graphs.captured(lambda x: add(x, 0), "second")
    given = fake_cupy.array([[1, 2], [3, 4]])
    for _ in range(2):
        second(first(given))
    assert second(first(given).T).tolist() == [[1, 3], [2, 4]]

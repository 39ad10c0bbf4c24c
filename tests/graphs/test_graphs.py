"""Capture, replay, arguments and the end of graphs, on a fake CuPy; test_gpu_graphs.py has what they do on a GPU."""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import fake_cupy
import numpy as np
import pytest
from fake_cupy import LOCAL, add

import thdattn
from thdattn.graphs import CudaGraphConfig, CudaGraphModule, Graphs, capture


def logged(what):
    return [entry for entry in fake_cupy.log if entry[0] == what]


# --- calls ----------------------------------------------------------------------------------------------------


def test_a_function_is_called_eagerly_then_captured_then_replayed(active):
    graphs, calls = active(warmup_steps=2), []

    def function(x, y):
        calls.append(graphs.is_capturing())
        return add(x, y)

    captured = graphs.captured(function, "sum")
    results = []
    for i in range(5):
        results.append(captured(fake_cupy.array([i, i]), y=fake_cupy.array([1, 2])))
        assert results[-1].tolist() == [i + 1, i + 2]
        assert len(logged("replay")) == max(0, i - 1)
    assert calls == [False, False, True]
    assert results[2] is results[3] is results[4] and results[0] is not results[1]
    assert captured.eager(fake_cupy.array([7]), fake_cupy.array([1])).tolist() == [8]
    assert calls == [False, False, True, False]
    assert all(stream is fake_cupy.current[0] for _, stream in logged("replay")) and fake_cupy.allocator == [None]


CAPTURED = {  # configuration -> parts that are graphs
    "local": ({}, {"attn", "mlp", "mamba", "layer"}),
    "local, mlp": ({"modules": ("mlp",)}, {"mlp"}),
    "local, attn and mamba": ({"modules": ("mamba", "attn")}, {"attn", "mamba"}),
    "full_iteration": ({"impl": "full_iteration"}, set()),
    "none": ({"impl": "none"}, set()),
}


@pytest.mark.parametrize(("config", "parts"), CAPTURED.values(), ids=CAPTURED)
def test_parts_are_captured_as_the_configuration_says_and_else_run_eagerly(active, comm, config, parts):
    graphs = active(**config)
    inactive = Graphs(comm, graphs.config, "reference")  # of which captures says the same
    for part in ("attn", "mlp", "mamba", "layer"):
        assert graphs.captures(part) is inactive.captures(part) is (part in parts)
        fake_cupy.log.clear()
        calls = []
        function = graphs.captured(lambda x, calls=calls: (calls.append("f"), add(x, 1))[1], part, part)
        pair = graphs.pair(lambda x, calls=calls: (calls.append("f"), (add(x, 1), x))[1],
                           lambda dx, x, calls=calls: (calls.append("b"), add(dx, x))[1], part, part)
        for i in range(4):
            x = fake_cupy.array([i])
            assert [y.tolist() for y in (function(x), pair.backward(*pair.forward(x)))] == [[i + 1], [2 * i + 1]]
        captured = part in parts
        assert len(logged("replay")) == captured * 3 * 3 and len(calls) == (3 * 2 if captured else 3 * 4)
        assert graphs.captures(CudaGraphModule.attn) is ("attn" in parts)


def test_what_is_no_part_is_captured_by_every_impl_and_refused_as_a_part(active):
    graphs = active(impl="full_iteration", inference_scope="none")
    step = graphs.captured(lambda x: add(x, 1), "step")
    for i in range(3):
        assert step(fake_cupy.array([i])).tolist() == [i + 1]
    assert len(logged("replay")) == 2
    for part in ("moe", "step", CudaGraphModule.moe):
        with pytest.raises(ValueError, match=f"part is '{part}', wanted 'attn', 'mlp', 'mamba' or 'layer'; pass one"):
            graphs.captures(part)
        with pytest.raises(ValueError, match="part is"):
            graphs.pair(add, add, "layer", part)
    with pytest.raises(TypeError, match="part is 1, a int; wanted 'attn'"):
        graphs.captures(1)


def test_what_a_graph_does_beside_its_results_every_replay_does_again(active):
    total = fake_cupy.array([0.0])
    captured = active().captured(lambda x: fake_cupy.launch(lambda: np.add(total, x, out=total)), "accumulate")
    for i in range(5):
        captured(fake_cupy.array([i]))
    assert total.tolist() == [0 + 1 + 2 + 3 + 4]


@dataclass(frozen=True)
class Kept:
    x: Any
    made_with: dict[str, Any]


@dataclass
class Changing:
    parts: list[Any] = field(default_factory=list)


class Named(NamedTuple):
    x: Any
    n: int


def test_structures_keep_their_kinds_and_frozen_ones_of_graphs_stay_what_they_are(active):
    graphs, seen = active(), []
    pair = graphs.pair(lambda x: (add(x, 1), Kept(add(x, 2), {"scale": 3})),
                       lambda dout, kept: (seen.append(kept), add(dout, kept.x))[1], "layer")
    for i in range(4):
        out, kept = pair.forward(fake_cupy.array([i]))
        assert (out.tolist(), pair.backward(fake_cupy.array([10.0]), kept).tolist()) == ([i + 1], [i + 12])
    assert seen[-1] is kept
    given = {"a": [fake_cupy.array([1.0]), (2, Named(fake_cupy.array([3.0]), 4))], "b": Changing([5])}
    several = graphs.captured(lambda tree: (seen.append(tree), add(tree["a"][0], tree["a"][1][1].x))[1], "tree")
    for _ in range(3):
        assert several(given).tolist() == [4]
    tree = seen[-1]
    assert isinstance(tree["a"][1][1], Named) and tree["a"][1][1].n == 4 and tree["b"].parts == [5]
    given["b"].parts[0] = 6  # the graph's own list is another one
    with pytest.raises(ValueError, match=r"tree: argument 0\['b'\]\.parts\[0\] is 6, wanted 5"):
        several(given)


@pytest.mark.parametrize("frozen", [False, True])
def test_fields_that_a_dataclass_makes_by_itself_are_arguments_too(active, frozen):
    @dataclass(frozen=frozen)
    class Made:
        x: Any
        twice: Any = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "twice", fake_cupy.array([2 * i for i in self.x.tolist()]))

    captured = active().captured(lambda made: add(made.x, made.twice), "sum")
    for i in range(4):
        assert captured(Made(fake_cupy.array([i]))).tolist() == [3 * i]
    changed = Made(fake_cupy.array([1]))
    changed.twice[...] = 5
    assert captured(changed).tolist() == [6]


def other_device(x):
    x.device_id = 1
    return x


WRONG_CALLS = {
    "shape": (lambda x: x((fake_cupy.array([1]),)), ValueError, r"f: batches\[0\]\[0\] has shape \(1,\), want"),
    "dtype": (lambda x: x((fake_cupy.array([1, 2], np.int32),)), ValueError, "has dtype int32, wanted float32 .*eager"),
    "device": (lambda x: x((other_device(fake_cupy.array([1, 2])),)), ValueError, "has device 1, wanted 0"),
    "host": (lambda x: x((np.zeros(2, np.float32),)), TypeError, r"is a ndarray of shape \(2,\), wanted a CuPy array"),
    "no array": (lambda x: x((None,)), TypeError, r"\[0\]\[0\] is None, a NoneType, wanted a CuPy array"),
    "value": (lambda x: x(scale=3), ValueError, "f: scale is 3, wanted 2 as in the captured graph"),
    "type": (lambda x: x(scale=2.0), ValueError, "f: scale is 2.0, wanted 2"),
    "array for value": (lambda x: x(scale=fake_cupy.array([2])), ValueError, r"scale is a ndarray of shape \(1,\), w"),
    "object": (lambda x: x(plan=object.__new__(type("Plan", (), {"__repr__": lambda self: "<Plan>"}))), ValueError,
               "f: plan is <Plan>, wanted None"),
    "micro-batches": (lambda x: x(count=3), TypeError, r"f: found batches\[2\] only in the call, wanted the arguments"),
    "fewer": (lambda x: x(count=1), TypeError, r"found batches\[1\] only in the captured graph"),
    "structure": (lambda x: x((fake_cupy.array([1, 2]), 1)), TypeError, r"found batches\[0\]\[1\] only in the call"),
    "leaf": (lambda x: x(1), ValueError, r"f: batches\[0\] is 1, wanted \(a ndarray of shape \(2,\),\)"),
    "keyword": (lambda x: x(more=1), TypeError, "f: found more only in the call"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_calls_that_differ_from_the_capture_are_refused_by_name(active, name):
    call, kind, message = WRONG_CALLS[name]
    captured = active().captured(lambda batches, scale, plan, **_: add(batches[0][0], scale), "f")

    def x(first=None, count=2, scale=2, plan=None, **more):
        batches = [(fake_cupy.array([1, 2]),) if first is None else first for _ in range(count)]
        return captured(batches=batches, scale=scale, plan=plan, **more)

    for _ in range(2):
        assert x().tolist() == [3, 4]
    replays = len(logged("replay"))
    with pytest.raises(kind, match=message):
        call(x)
    assert len(logged("replay")) == replays
    assert x().tolist() == [3, 4]


def test_another_object_that_looks_the_same_is_said_to_be_another_one(active):
    class Model:
        def __repr__(self):
            return "<Model>"

    captured = active().captured(lambda model: None, "f")
    model = Model()
    for _ in range(3):
        captured(model)
    with pytest.raises(ValueError, match="argument 0 is another <Model>, wanted <Model>"):
        captured(Model())


def test_arrays_of_other_libraries_are_refused_at_the_capture(active):
    captured = active().captured(lambda x: None, "f")
    captured(np.zeros(2))
    with pytest.raises(TypeError, match=r"f: argument 0 is a ndarray of shape \(2,\), wanted a CuPy array"):
        captured(np.zeros(2))
    assert not fake_cupy.current[0].is_capturing() and fake_cupy.allocator == [None]


def test_a_replay_on_another_stream_waits_before_anything_is_copied(active, comm):
    graphs, (one, two) = active(), (fake_cupy.Stream(), fake_cupy.Stream())
    functions = [Graphs(comm, graphs.config).captured(lambda x: add(x, 1), name) for name in ("f", "of other graphs")]
    one.use()
    for function in functions * 2:
        function(fake_cupy.array([1.0]))
    before = one
    for stream, function in ((one, 0), (two, 0), (two, 1), (one, 1), (one, 0), (two, 1)):
        stream.use()
        fake_cupy.log.clear()
        functions[function](fake_cupy.array([1.0]))
        waits = [] if stream is before else [("wait", stream, before)]
        assert fake_cupy.log == [*waits, ("copy", stream), ("replay", stream)]
        before = stream


def test_a_captured_function_in_a_capture_becomes_part_of_it(active):
    graphs = active()
    inner = graphs.captured(lambda x: add(x, 1), "inner")
    outer = graphs.captured(lambda x: inner(inner(x)), "outer")
    for i in range(4):
        assert outer(fake_cupy.array([i])).tolist() == [i + 2]
    assert len(logged("replay")) == 3 + 1, "of the outer one, and of the inner one in the second of the eager calls"


def test_a_capture_that_fails_says_why_and_leaves_everything_usable(active):
    graphs = active()
    stream, mode = fake_cupy.current[0], "right"

    def function(x):
        if mode == "waits":
            fake_cupy.current[0].synchronize()
        if mode == "raises":
            raise KeyError("mine")
        return add(x, 1)

    captured, other = graphs.captured(function, "f"), graphs.captured(lambda x: add(x, 1), "g")
    captured(fake_cupy.array([1]))
    for mode, kind in (("waits", fake_cupy.CUDARuntimeError), ("raises", KeyError)):
        with pytest.raises(kind) as error:
            captured(fake_cupy.array([1]))
        # What was refused, not that the capture was invalid because of it.
        assert error.value.args == ("mine",) if mode == "raises" else error.value.status == 900
        assert fake_cupy.current[0] is stream and fake_cupy.allocator == [None] and not graphs._stream.is_capturing()
    mode = "right"
    for _ in range(3):
        assert captured(fake_cupy.array([1])).tolist() == other(fake_cupy.array([1])).tolist() == [2]


def test_a_stream_that_was_put_to_use_stays_so_after_a_capture(active):
    captured = active().captured(lambda x: add(x, 1), "f")
    mine = fake_cupy.Stream()
    mine.use()
    for _ in range(3):
        captured(fake_cupy.array([1]))
        assert fake_cupy.current[0] is mine


def test_the_capture_is_behind_what_the_callers_stream_has_to_do(active):
    graphs = active(warmup_steps=1)
    captured = graphs.captured(lambda x: add(x, 1), "f")
    captured(fake_cupy.array([1]))
    captured(fake_cupy.array([1]))
    assert logged("wait") == [("wait", graphs._stream, fake_cupy.current[0])]


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("single", "pools"), [(True, 1), (False, 3)])
def test_graphs_share_a_pool_or_have_one_each_until_they_are_closed(active, single, pools):
    graphs = active(single_pool=single)
    kept = [graphs.captured(lambda x: add(x, 1), str(i)) for i in range(3)]
    for _ in range(3):
        for captured in kept:
            captured(fake_cupy.array([1]))
    alive = list(map(weakref.ref, graphs._pools))
    gc.collect()
    assert len(alive) == pools and all(pool() for pool in alive) and not logged("free")
    graphs.close()
    first_freed = fake_cupy.log.index(logged("free")[0])
    assert len(logged("free")) == pools and fake_cupy.log[:first_freed].count(("graph destroyed",)) == 3
    fake_cupy.log.clear()
    gc.collect()
    assert not any(pool() for pool in alive)


def test_a_pool_lives_as_long_as_something_in_it_is_used(active):
    graphs = active()
    captured = graphs.captured(lambda x: add(x, 1), "f")
    for _ in range(2):
        captured(fake_cupy.array([1]))
    pool = weakref.ref(graphs._pools[0])
    pool().used = 512
    graphs.close()
    gc.collect()
    assert pool() is not None
    pool().used = 0
    active().close()
    fake_cupy.log.clear()
    gc.collect()
    assert pool() is None


def test_want_of_memory_takes_it_from_the_default_pool_and_never_from_graphs(active, monkeypatch):
    monkeypatch.setattr(fake_cupy.Memory, "left", 100)
    assert capture._allocate(100).size == 100
    with pytest.raises(MemoryError, match="a CUDA graph needs 101 bytes more than the GPU has"):
        capture._allocate(101)
    assert logged("free") == [("free", fake_cupy.default_pool)]
    monkeypatch.setattr(fake_cupy.MemoryPool, "free_all_blocks", lambda pool: setattr(fake_cupy.Memory, "left", 101))
    assert capture._allocate(101).size == 101

    class Broken(fake_cupy.Memory):
        def __init__(self, size):
            raise fake_cupy.CUDARuntimeError(700)

    sys.modules["cupy"].cuda.Memory = Broken
    with pytest.raises(fake_cupy.CUDARuntimeError):
        capture._allocate(1)


# --- the end -----------------------------------------------------------------------------------------------------


def test_a_comm_closes_its_graphs_first(active):
    comm = thdattn.comm.init("single")
    order = []
    comm._close = lambda: order.append(("comm", len(logged("graph destroyed"))))
    graphs = Graphs(comm, CudaGraphConfig(**LOCAL))
    captured = graphs.captured(lambda x: add(x, 1), "f")
    for _ in range(2):
        captured(fake_cupy.array([1]))
    comm.close()
    assert order == [("comm", 1)] and not graphs.active
    graphs.close()
    comm.close()
    assert order == [("comm", 1)]


def test_graphs_are_destroyed_in_spite_of_whoever_holds_what_captured_them(active):
    graphs = active()
    captured, pair = graphs.captured(lambda x: add(x, 1), "f"), graphs.pair(lambda x: (add(x, 1), x), add, "g")
    with graphs:
        for _ in range(2):
            captured(fake_cupy.array([1]))
            pair.backward(*pair.forward(fake_cupy.array([1])))
    assert len(logged("graph destroyed")) == 3
    replays = len(logged("replay"))
    assert captured(fake_cupy.array([3])).tolist() == [4], "eagerly"
    assert len(logged("replay")) == replays and not graphs.active


def test_closed_graphs_are_forgotten_by_comm_and_interpreter(comm, monkeypatch):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    first, second = Graphs(comm, CudaGraphConfig()), Graphs(comm, CudaGraphConfig())
    assert registered == comm._before_close == [first.close, second.close]
    first.close()
    assert registered == comm._before_close == [second.close]
    comm.close()
    assert registered == comm._before_close == []
    with pytest.raises(RuntimeError, match="closed"):
        Graphs(comm, CudaGraphConfig())


def test_a_dropped_graph_is_captured_anew(active):
    captured = active().captured(lambda x: add(x, 1), "f")
    for i in range(2):
        first = captured(fake_cupy.array([i]))
    captured.drop()
    assert len(logged("graph destroyed")) == 1 and not list(captured.arrays())
    assert captured(fake_cupy.array([5])).tolist() == [6] and first.tolist() == [2]


def test_simulated_ranks_and_mpi_are_never_captured():
    from thdattn.comm import local, mpi
    from thdattn.comm.nccl.comm import NcclComm

    assert thdattn.comm.SingleComm.capturable and NcclComm.capturable
    assert not (local.LocalComm.capturable or mpi.MpiComm.capturable)


def test_no_graphs_without_an_impl_or_without_ranks_that_can_be_captured(active):
    assert active().active and not active(impl="none").active
    assert thdattn.comm.run_local(2, lambda comm: Graphs(comm, CudaGraphConfig(**LOCAL)).active) == [False] * 2


def test_the_reference_engine_is_never_captured(comm):
    assert not Graphs(comm, CudaGraphConfig(**LOCAL), "reference").active
    with pytest.raises(ValueError, match="engine is 'gpu'"):
        Graphs(comm, CudaGraphConfig(**LOCAL), "gpu")


# --- places of arguments -----------------------------------------------------------------------------------------


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

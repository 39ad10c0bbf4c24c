"""Agreement between ranks: messages name the field and the ranks; with check=True every call is agreed on first."""

from __future__ import annotations

import numpy as np
import pytest
from launch import RANKS, run_ranks, run_torchrun

import thdattn
from thdattn.comm.checked import wants_check

PROGRAM = RANKS / "checked_ranks.py"


def errors_of(cp_size, program, **options):
    """The message that each rank raises."""

    def message(comm):
        with pytest.raises(ValueError) as raised:
            program(comm)
        return str(raised.value)

    return thdattn.comm.run_local(cp_size, message, timeout=20, **options)


def only(messages):
    assert len(set(messages)) == 1
    return messages[0]


# --- what differs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ([{"heads": 4}, {"heads": 4}, {"heads": 2}], "heads is 4 (ranks 0, 1), 2 (rank 2)"),
        ([{"window": (-1, 0)}, {"window": (8, 0)}, {"window": (-1, 0)}],
         "window is (-1, 0) (ranks 0, 2), (8, 0) (rank 1)"),
        ([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 1, "b": "x"}],
         "a is 1 (ranks 0, 2), 2 (rank 1); b is 'x' (ranks 0, 2), 'y' (rank 1)"),
        ([{"x": np.array([0, 3, 9])}, {"x": np.array([0, 3, 9])}, {"x": np.array([0, 4, 9])}],
         "x[1] is 3 (ranks 0, 1), 4 (rank 2)"),
        ([{"x": np.array([0, 3])}, {"x": np.array([0, 3, 9])}, {"x": np.array([0, 3])}],
         "the length of x is 2 (ranks 0, 2), 3 (rank 1)"),
        ([{"x": np.array([0, 3], np.int32)}] * 2 + [{"y": 1}],
         "x is array([0, 3], dtype=int32) (ranks 0, 1), None (rank 2); y is None (ranks 0, 1), 1 (rank 2)"),
    ],
)
def test_a_difference_is_named_by_field_value_and_ranks(values, difference):
    message = only(errors_of(3, lambda comm: comm.agree("the plan", values[comm.rank], remedy="mend it")))
    assert message == f"the plan is not the same on all ranks: {difference}; mend it"


def test_a_plan_that_differs_says_in_what():
    lengths = [[40, 24], [40, 32]]

    def program(comm):
        batch = thdattn.PackedBatch.from_lengths(lengths[comm.rank], 4)
        attention = thdattn.CPAttention(comm, 2, 16, softmax_scale=0.5 if comm.rank else 0.25, engine="reference")
        attention.plan(batch)

    message = only(errors_of(2, program))
    assert "softmax_scale is 0.25 (rank 0), 0.5 (rank 1)" in message
    assert "cu_seqlens[2] is 64 (rank 0), 72 (rank 1)" in message
    assert message.endswith("pass every rank the same batch and sharding, and make CPAttention with the same arguments")


@pytest.mark.parametrize("option", [
    {"deterministic": True}, {"causal": False}, {"window": (8, 0)}, {"softcap": 5.0}, {"dtype": "float16"},
    {"keep_keys": False}, {"head_groups": 1}, {"num_kv_heads": 1}, {"sinks": True},
], ids=lambda option: next(iter(option)))
def test_every_option_of_an_attention_is_agreed_on(option):
    def program(comm):
        options = option if comm.rank else {}
        batch = thdattn.PackedBatch.from_lengths([16], 4)
        thdattn.CPAttention(comm, 2, 16, engine="reference", **options).plan(batch)

    assert f"{next(iter(option))} is " in only(errors_of(2, program))


def test_ranks_that_ask_different_questions_learn_of_each_others():
    message = only(errors_of(3, lambda comm: comm.agree("heads" if comm.rank else "the plan", 1)))
    assert message.startswith("ranks make different calls: rank 0: the plan; rank 1: heads; rank 2: heads; wanted")


# --- check=True ------------------------------------------------------------------------------------------------


def attention_of(comm, **options):
    return thdattn.CPAttention(comm, 2, 16, dtype="float64", engine="reference", **options)


def arrays(plan):
    rng = np.random.default_rng(plan.cp_rank)
    return [rng.standard_normal((plan.local_rows, 2, 16)) for _ in range(3)]


def two_plans(comm, call):
    """Every rank makes both plans; then rank 1 uses the other one, of as many rows."""
    attention = attention_of(comm)
    plans = [attention.plan(thdattn.PackedBatch.from_lengths(lengths, 4)) for lengths in ([48, 16], [16, 48])]
    if call == "forward":
        attention.forward(*arrays(plans[comm.rank]), plans[comm.rank])
    elif call == "gather":
        attention.gather(*arrays(plans[comm.rank])[1:], plans[comm.rank])
    else:
        saved = [attention.forward(*arrays(plan), plan)[1] for plan in plans]
        attention.backward(arrays(plans[0])[0], saved[comm.rank])


@pytest.mark.parametrize("call", ["forward", "gather", "backward"])
def test_another_plan_of_as_many_rows_is_noticed(call):
    message = only(errors_of(2, lambda comm: two_plans(comm, call), check=True))
    assert message.startswith(f"attention {call} is not the same on all ranks: cu_seqlens[1] is 48 (rank 0), 16 (")


def test_without_check_another_plan_of_as_many_rows_is_not_noticed():
    thdattn.comm.run_local(2, lambda comm: two_plans(comm, "forward"), timeout=20)


def test_what_one_rank_refuses_all_ranks_refuse():
    def program(comm):
        attention = attention_of(comm)
        plan = attention.plan(thdattn.PackedBatch.from_lengths([16], 4))
        q, k, v = arrays(plan)
        attention.forward(q if comm.rank == 0 else q[1:], k, v, plan)

    assert only(errors_of(2, program, check=True)).startswith("rank 1: q has shape (7, 2, 16), wanted (8, 2, 16)")


COLLECTIVES = {
    "all_gather": lambda comm, x: comm.all_gather(x, np.empty((2 * len(x), *x.shape[1:]), x.dtype)),
    "all_reduce": lambda comm, x: comm.all_reduce(x, "sum"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, np.empty((len(x) // 2, *x.shape[1:]), x.dtype)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("other", [np.zeros((4, 3)), np.zeros((2, 6), np.float32)], ids=["shape", "dtype"])
def test_collectives_of_other_arrays_are_noticed(name, other):
    x = [np.zeros((2, 6)), other]
    message = only(errors_of(2, lambda comm: COLLECTIVES[name](comm, x[comm.rank].copy()), check=True))
    assert message.startswith(f"{name} is not the same on all ranks: ")
    assert "'float64 (2, 6)' (rank 0)" in message


def test_another_operation_is_noticed():
    def program(comm):
        COLLECTIVES["all_reduce" if comm.rank else "all_gather"](comm, np.zeros((2, 2)))

    message = only(errors_of(2, program, check=True))
    assert message.startswith("ranks make different calls: rank 0: all_gather; rank 1: all_reduce")


def test_slices_that_the_other_rank_does_not_send_are_noticed():
    def program(comm):
        x = np.zeros((4, 2))
        sends = [(x[: 2 + comm.rank], 1 - comm.rank)]
        comm.exchange(sends, [(np.zeros((2, 2)), 1 - comm.rank)])

    message = only(errors_of(2, program, check=True))
    assert message == "rank 0: rank 1 sends slices of [48] bytes to it, but it receives [32]; make both from one plan"


def test_groups_agree_too():
    def program(comm):
        group = comm.split(0)
        assert group.checks
        COLLECTIVES["all_reduce"](group, np.zeros(2 + comm.rank))

    assert "all_reduce is not the same" in only(errors_of(2, program, check=True))


def test_a_program_that_is_right_is_the_same_with_check():
    def program(comm):
        results = []
        for method, sharding in (("all_gather", "dual_chunk"), ("all_gather", "balanced"), ("a2a", "contiguous"),
                                 ("p2p", "dual_chunk")):
            attention = attention_of(comm, cp_comm_type=method)
            plan = attention.plan(thdattn.PackedBatch.from_lengths([48, 16, 8], 4), sharding)
            out, saved = attention.forward(*arrays(plan), plan, return_max_logit=True)
            results += [out, saved.max_logit, *attention.backward(arrays(plan)[0], saved)]
        return results

    plain, checked = (thdattn.comm.run_local(2, program, timeout=20, check=check) for check in (False, True))
    for ours, theirs in zip(plain, checked, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_static_pack_is_loaded_with_one_batch():
    graphs = thdattn.graphs

    def program(comm):
        eager = graphs.Graphs(comm, graphs.CudaGraphConfig(max_packed_seqs=4))
        pack = graphs.StaticPack(eager, [attention_of(comm)], 64)
        pack.load([thdattn.PackedBatch.from_lengths([48, 16] if comm.rank else [16, 48], 4)])

    message = only(errors_of(2, program, check=True))
    assert "batches[0].cu_seqlens[1] is 16 (rank 0), 48 (rank 1)" in message


def test_the_environment_asks_for_checks(monkeypatch):
    assert not wants_check(False) and wants_check(True)
    for text, wanted in {"1": True, "0": False, "": False}.items():
        monkeypatch.setenv("THDATTN_CHECK", text)
        assert wants_check(False) is wanted
    with pytest.raises(TypeError, match=r"check is 'yes', a str; wanted True or False"):
        thdattn.comm.init(check="yes")


@pytest.mark.parametrize(("start", "backend"), [
    (run_ranks, "mpi"), pytest.param(run_torchrun, "torch", marks=pytest.mark.exhaustive)])
def test_processes_agree(start, backend):
    """One rank of MPI decides that they do."""
    run = start(2, PROGRAM, backend)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("cu_seqlens[1] is 48 (rank 0), 16 (rank 1)") == 2
    assert run.stdout.count("all_reduce is not the same on all ranks: array is 'float64 (2,)' (rank 0)") == 2
    assert run.stdout.count("done") == 2


# --- streams of simulated ranks --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_simulated_ranks_may_have_streams_of_their_own(cupy):
    """Each rank's stream works long before it has written what the others read."""
    def program(comm):
        with cupy.cuda.Stream(non_blocking=True):
            results = []
            for number in range(20):
                slow = cupy.random.default_rng(comm.rank).standard_normal((1500, 1500))
                for _ in range(3 * (comm.rank + number) % 4):
                    slow = slow @ slow / 1500
                x = cupy.full((64, 3), cupy.nan)
                x[...] = slow[0, 0] * 0 + comm.rank + number
                gathered, total, other = cupy.full((128, 3), cupy.nan), x.copy(), cupy.full((64, 3), cupy.nan)
                comm.all_gather(x, gathered)
                comm.all_reduce(total, "sum")
                comm.exchange([(x, 1 - comm.rank)], [(other, 1 - comm.rank)])()
                x[...] = cupy.nan  # free as soon as the calls have returned
                results.append([array.copy() for array in (gathered, total, other)])
            return [[cupy.asnumpy(array) for array in arrays] for arrays in results]

    for rank, results in enumerate(thdattn.comm.run_local(2, program)):
        for number, (gathered, total, other) in enumerate(results):
            assert (gathered == np.repeat([[number], [number + 1]], 64, axis=0)).all()
            assert (total == 2 * number + 1).all()
            assert (other == number + 1 - rank).all()

"""Benchmark of context parallelism without a GPU: packs, and comms by which two ranks play many."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_nccl
import launch
import numpy as np
import pytest
import rank_of
import record
import tables
from cp_methods import BESIDE, EXCHANGE, METHODS
from fake_exchange import Gathered, meet, take
from fake_gpus import Machine, installed
from fake_mpi import World
from rank_of import as_rank_of
from workloads import cp_cases

import thdattn
from thdattn.comm import run_local


@pytest.fixture
def bench_cp():
    pytest.importorskip("cupy")
    return importlib.import_module("bench_cp")


# --- packs -------------------------------------------------------------------------------------------------------


def test_packs_are_those_that_others_were_measured_with():
    cases = cp_cases(2)
    assert cases["bucket32k"].lengths == (24_576, 28_672, 30_720, 32_768)
    assert cases.pop("1x16384-full-h512").total_tokens == 16_384  # for sockets
    assert {(case.heads, case.kv_heads) for case in cases.values()} == {(32, 8), (64, 8), (16, 16)}
    assert cases["bucket32k-mha16"].lengths == cases["bucket32k"].lengths and cases["64x1024"].kv_heads == 16
    lengths = cases["lognormal128k"].lengths
    assert len(lengths) == 117 and sum(lengths) >= 131_072 > sum(lengths[:-1])
    assert min(lengths) >= 16 and max(lengths) <= 32_768
    assert all(case.causal and case.head_dim == 128 for case in cases.values())


@pytest.mark.parametrize("cp_size", [2, 8])
@pytest.mark.parametrize("thousands", [8, 16, 32])
def test_real_documents_fill_the_rows_of_every_rank(cp_size, thousands):
    tokens = sum(cp_cases(cp_size)[f"documents{thousands}k"].lengths)
    assert 768 * thousands * cp_size < tokens <= 1_024 * thousands * cp_size


def test_short_packs_are_of_the_same_tokens_and_errors_are_of_long_sequences_too(bench_cp):
    from cp_ways import Ranks

    assert {cp_cases(2)[name].total_tokens for name in ("1x8192", "4x2048", "8x1024")} == {8_192}

    def fn(real):
        def names(ranks, cases):
            return [case.name for case, _ in bench_cp.work(ranks, cases, [], [])]

        here, played = Ranks.of(real, 2), Ranks(real, 8, real, None)
        return [names(here, ["8x1024"]), names(here, ["bucket32k"]), names(played, ["bucket32k"])]

    wanted = [["4x1024", "8x1024"], ["4x1024", "bucket32k", "bucket32k-h8"], ["bucket32k"]]
    assert run_local(2, fn) == [wanted] * 2
    assert bench_cp.LONG_ERROR_CASE.lengths == cp_cases(2)["bucket32k"].lengths


# --- comms that stand in for others ------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "size"), [(1, 8), (3, 8), (2, 1), (2, 8)])
def test_other_than_two_ranks_with_peer_memory_cannot_play(ranks, size):
    def fn(real):
        with pytest.raises(ValueError, match=f"{ranks} real ranks without .* ranks of {size}, wanted 2 with it"):
            as_rank_of(real, size)

    run_local(ranks, fn)


class Peers:
    """Comm of two GPUs as far as peer memory needs it."""

    overlaps = reads_peers = True

    def __init__(self, comm):
        self.rank, self.size, self._world, self.actions = comm.rank, comm.size, World(comm), []
        self.before_close = self.actions.append


@pytest.fixture
def machine():
    pytest.importorskip("cupy")
    with installed(Machine(2)) as machine:
        yield machine


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_peer_memory_of_two_brings_as_many_rows_as_that_of_many(machine, size, at_once, num_groups):
    def values(rank, turn):
        rng = np.random.default_rng(10 * turn + rank)
        return [rng.standard_normal((40, 4, width), np.float32) for width in (256, 128)]  # more than STAGGER together

    def fn(comm):
        machine.become(comm.rank)
        real = Peers(comm)
        played = as_rank_of(real, size)
        assert (played.rank, played.size) == (comm.rank, size)
        for turn in range(5):
            sends = [machine.asarray(x) for x in values(comm.rank, turn)]
            heads = 4 // num_groups
            groups = [[machine.asarray(np.zeros((size * 40, heads, x.shape[2]), x.dtype)) for x in sends]
                      for _ in range(num_groups)]  # fmt: skip
            found = []
            arrivals = played._beside.gather_heads(sends, groups, at_once)
            for (parts, wait, done, kernel), outs in zip(arrivals, groups, strict=True):
                wait()
                if kernel is not None:
                    cargo = Gathered(np.arange(size * 40), 40, outs, parts, sends, kernel.to)
                    meet(machine.stream, cargo, kernel.flags)
                found.append([np.concatenate(ranks).reshape(size, 40, heads, -1) for ranks in parts])
                if kernel is not None:
                    take(machine.stream, kernel.flags)
                done()
            for number, ranks in enumerate(np.concatenate(x, axis=2) for x in zip(*found, strict=True)):
                assert np.isfinite(np.delete(ranks, comm.rank, 0)).all()
                if size > 2 and num_groups == 1 and at_once:
                    continue  # what is written for one that is played overwrites some of it
                wanted = values(1 - comm.rank, turn)[number]
                assert ranks[1 - comm.rank].tobytes() == wanted.tobytes()
                later = rank_of.STAGGER // wanted[0].nbytes * 2  # rows of rank 2 lie so much behind those of 1
                if size > 2 and number == 0 and later < 40:
                    assert ranks[2][: 40 - later].tobytes() == wanted[later:].tobytes()
            comm.barrier()
        for close in real.actions:
            close()

    run_local(2, fn)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_of_two_ranks_add_as_much_as_those_of_many(machine, size, at_once):
    def fn(comm):
        machine.become(comm.rank)
        real = Peers(comm)
        memory = as_rank_of(real, size)._beside
        for turn in range(5):
            shapes = (16, 2, 8), (16, 2, 4)
            results = [machine.asarray(np.full(shape, np.nan, np.float32)) for shape in shapes]
            for homes, shape in zip(memory.owner_partials(shapes, shapes, at_once)["of"], shapes, strict=True):
                for home in homes[:size]:
                    machine.array(shape, np.float32, int(home))[...] = 1 + comm.rank + 10 * turn
            rows = np.arange(16, dtype=np.int32)
            rows[3] = -1
            memory.reduce_partials(rows, results, at_once)()
            assert all(np.isfinite(x).all() for x in results)
            if size == 2:
                wanted = np.full(16, 3 + 20 * turn)
                wanted[3] = 0
                assert all((x == wanted[:, None, None]).all() for x in results)
        if not at_once:  # what was pulled, of all ranks but this one
            share = [16 * 2 * 4 * width for width in (8, 4)]
            said = memory.sum_bytes([[size * x for x in share]] * 2)["pulled sums"]
            assert memory.held_bytes()["pulled sums"] == said == (size - 1) * sum(share)
        for close in real.actions:
            close()

    run_local(2, fn)


# --- the program -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_keys", ["yes", "no"])
@pytest.mark.parametrize("num_cliques", [0, 2], ids=["peer", "nccl"])
def test_the_exchange_alone_brings_all_keys_and_sums_beside_attention(bench_cp, monkeypatch, num_cliques, keep_keys):
    import cp_ways
    from peer_programs import HEADS, WIDTH, Plan, Program, machine_of

    with machine_of(2, 0) as machine:
        monkeypatch.setattr(cp_ways, "cupy", SimpleNamespace(
            empty=machine.empty, empty_like=lambda x: machine.empty(x.shape, x.dtype)))
        cliques, exchanges = [fake_nccl.Clique(2) for _ in range(num_cliques)], []
        for rank in range(2):
            program = Program(machine, rank, cliques)
            inputs = [program.engine.empty((5, HEADS, WIDTH), np.float32) for _ in range(4)]
            for x in inputs:
                machine.stream.launch(np.copyto, x, np.full(x.shape, rank + 1, np.float32))
            exchange = cp_ways.Exchange(SimpleNamespace(
                plan=Plan(program.engine, rank, 2, 5), attention=SimpleNamespace(comm=program.comm), inputs=inputs,
                choices=lambda: {"keep_keys": keep_keys}))  # fmt: skip
            alone = SimpleNamespace(forward=lambda: None, backward=lambda: None)
            for way in (exchange, beside := cp_ways.Beside(alone, exchange)):
                bench_cp.both(way)
            beside._wait()
            exchanges.append(exchange)
        machine.run()
    for rank, exchange in enumerate(exchanges):
        other = slice(5, None) if rank == 0 else slice(5)  # own rows may be read where they are
        assert all((x[other] == 2 - rank).all() for x in exchange._gathered)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats: found 0, wanted >= 1"),
        (["--as-rank-of", "1"], "--as-rank-of is 1, wanted >= 2"),
        (["--as-rank-of", "8", "--peer"], "leave it or --as-rank-of out"),
        (["--as-rank-of", "8", "--exchange"], "leave it or --as-rank-of out"),
        (["--methods", "a2a", "--peer"], "compared with all_gather, which --methods lacks"),
        (["--head-groups", "2", "3"], "--head-groups has 3, wanted divisors of 8 and 16 kv heads"),
        (["--head-groups", "0"], "--head-groups has 0, wanted divisors of 8 and 16 kv heads"),
    ],
)
def test_wrong_arguments_are_named(bench_cp, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_cp.py", *arguments])
    with pytest.raises(SystemExit):
        bench_cp.parse_arguments()
    assert message in capsys.readouterr().err


def test_speeds_are_per_rank_and_host_times_have_none(bench_cp):
    case = cp_cases(4)["1x8192"]
    costs = {"ours": bench_cp.Costs(1.5, bench_cp.Both(forward=3, backward=4), {"both": 1.25})}
    found = bench_cp.columns(case, 4, ("ours", "both", "called"), [2.0, 1.0, 4.0], costs)
    pairs = 8_192 * 8_193 // 2  # 7 products of 2 operations per pair, head and channel
    assert float(found["tflops"]) == pytest.approx(pairs * 32 * 128 * 14 / 4 / 2e-3 / 1e12, abs=0.01)
    assert (found["ms"], found["memory_gib"], found["received_bytes"]) == ("2.00000", "1.50", "7")
    assert found["predicted_ms"] == "1.2500"
    assert bench_cp.columns(case, 4, ("ours", "forward", "called"), [2.0], costs)["received_bytes"] == "3"
    host = bench_cp.columns(case, 4, ("ours", "both", "host"), [2.0], costs)
    assert host["tflops"] == "" and not {"memory_gib", "received_bytes"} & set(host)


def test_the_peers_two_steps_see_the_keys_up_to_their_chunks_end():
    # 7 and 3 tokens padded to 8 and 4, so chunks of 2 and 1 rows: rank 0 has the first and the last of each.
    pytest.importorskip("cupy")
    import cp_peer

    batch = thdattn.PackedBatch.from_lengths([7, 3], 4)
    wanted = {
        0: [([0, 4, 6], [2, 1], [2, 1]), ([2, 5, 6], [1, 0], [7, 3])],
        1: [([0, 4, 6], [2, 1], [4, 2]), ([2, 5, 6], [2, 1], [6, 3])],
    }
    for rank, (first, second) in wanted.items():
        for step, (begins, queries, keys) in zip(cp_peer.steps(batch, 2, rank), (first, second), strict=True):
            assert [x.tolist() for x in step] == [begins, queries, [0, 8, 12], keys]
            assert all(x.dtype == np.int32 for x in step)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("arguments", [[], ["--as-rank-of", "8"]])
def test_two_gpus_are_measured_with_every_way_and_errors_of_real_ranks(cupy, tmp_path, arguments, transport):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs")
    path = tmp_path / "cp.csv"
    program = Path(tables.__file__).with_name("bench_cp.py")
    command = ["--cases", "8x1024", "--repeats", "1", "--out", str(path), "--transport", transport, *arguments]
    command += ["--head-groups", "1", "4", "--methods", "all", *["--exchange"] * (not arguments)]
    run = launch.run_ranks(2, program, *command, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "Error" not in run.stderr
    ((ranks, times),) = tables.runs(record.load(path)).items()
    assert ranks == (8 if arguments else 2, 2, transport)
    for way in ("ours", "ours, 1 group", "ours, 4 groups"):
        for timing in ("called", "graph"):
            assert np.isfinite(times.value("tflops", "8x1024", way, "both", timing))
    assert times.text("head_groups", "8x1024", "ours, 4 groups", "both", "called") == "4"
    methods = [method.way for name, method in METHODS.items() if not method.two_levels]
    assert tables.methods(times) == methods
    for way in methods:
        assert np.isfinite(tables.speed(times, "8x1024", way))
        assert np.isfinite(times.value("received_bytes", "8x1024", way, "both", "called"))
        if not arguments:  # of bfloat16 results: half a unit of the last place, and what products add
            assert 0 < times.value("rms", "4x1024", way, "dk", record.ERRORS) < 1e-2
    for way in () if arguments else (EXCHANGE, BESIDE):
        assert 0 < times.value("ms", "8x1024", way, "both", "called") < 100

"""python -m thdattn advise: bytes against what ranks get, times worked by hand, and what is recommended."""

from __future__ import annotations

import re
import textwrap
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from launch import run_ranks

import thdattn
from thdattn.__main__ import main
from thdattn.cli import advise, options
from thdattn.costs import model
from thdattn.costs.measure import measured
from thdattn.costs.model import BESIDE, H200, Both, Rates, Shape, Way, compared, cost, recommended
from thdattn.methods import group_cast

LENGTHS = (90, 7, 0, 61, 33, 1, 25, 130)


def batch_for(way, cp_size, lengths=LENGTHS):
    return thdattn.PackedBatch.from_lengths(lengths, way.multiple(cp_size))


# ------------------------------------------------------------------------------------------------ bytes


def counted(way, cp_size, shape, batch):
    """Return (forward, backward) bytes that the busiest of the simulated ranks receives."""

    def program(comm):
        parts = (comm.split(comm.rank // way.inner), comm.split(comm.rank % way.inner)) if way.inner > 1 else (comm,)
        attn = thdattn.CPAttention(
            parts if way.inner > 1 else comm, shape.num_heads, shape.head_dim, shape.num_kv_heads, engine="reference",
            cp_comm_type=way.cp_comm_type, causal=shape.causal, window=shape.window)
        plan = attn.plan(batch, way.sharding)
        q, k = (np.ones((plan.local_rows, heads, shape.head_dim), attn.dtype)
                for heads in (shape.num_heads, shape.num_kv_heads))
        before = [sum(part.received_bytes for part in parts)]
        out, saved = attn.forward(q, k, k, plan)
        before.append(sum(part.received_bytes for part in parts))
        attn.backward(out, saved)
        before.append(sum(part.received_bytes for part in parts))
        return np.diff(before)

    return tuple(np.max(thdattn.comm.run_local(cp_size, program), axis=0).tolist())


SHAPE = Shape(8, 4, head_dim=8, engine="reference")
SHAPES = {"grouped": SHAPE, "one per rank": replace(SHAPE, num_heads=4), "window": replace(SHAPE, window=(9, 0)),
          "one for all": replace(SHAPE, num_heads=4, num_kv_heads=1)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", [*model.ways(4), Way("a2a", "dual_chunk"), Way("p2p", "contiguous")], ids=str)
def test_bytes_are_those_that_the_busiest_rank_receives(way, shape):
    batch = batch_for(way, 4)
    if way.inner > shape.num_kv_heads:
        with pytest.raises(ValueError, match="send keys of shared heads twice"):
            cost(batch, 4, shape, way)
        return
    found = cost(batch, 4, shape, way).received
    assert (found.forward, found.backward) == counted(way, 4, shape, batch)
    assert min(found) > 0


# ------------------------------------------------------------------------------------------------ work


def test_work_over_the_mean_is_that_of_the_busiest_rank():
    batch = thdattn.PackedBatch.from_lengths([256])
    found = cost(batch, 2, Shape(2, 2), Way("all_gather", "balanced"))
    assert found.work == pytest.approx(1, abs=0.01)
    found = cost(batch, 2, Shape(2, 2), Way("all_gather", "contiguous"))
    assert found.work == pytest.approx(2 * (257 - 64.5) / 257, abs=0.01)  # the second half sees 3 of 4 pairs
    assert found.tiles == 2 * 2


# ------------------------------------------------------------------------------------------------ time

TILE_FLOPS = 4 * 128 * 128 * 128
PER_SECOND = Rates(TILE_FLOPS, 2.5 * TILE_FLOPS, link=1, between=1, memory=inf, latency=0)  # a tile, a byte


def test_time_of_needed_rows_worked_by_hand():
    # Two documents of 256: each lies on one rank, nothing travels; 3 tiles of 4, and 3 for each tile of queries.
    batch = thdattn.PackedBatch.from_lengths([256, 256])
    found = cost(batch, 2, Shape(1, 1), Way("all_gather", "balanced"), PER_SECOND)
    assert found.received == (0, 0)
    assert found.seconds == found.compute == Both(3, pytest.approx(3 + 2 * 3))


def test_needed_rows_travel_beside_tiles_that_need_none(monkeypatch):
    # Chunks of a tile; rank 0 has 0 and 3, rank 1 has 1 and 2: 5 tiles each. Of queries, those of chunk 0 wait for no
    # key, and rank 1 has none like that; of keys, 3 tiles of either rank are its own.
    batch, width = thdattn.PackedBatch.from_lengths([512]), 2 * 128
    monkeypatch.setattr(group_cast, "WORTH_OVERLAPPING", 1)
    work, way = 5 + 3 * 2, Way("all_gather", "balanced")
    for link in (256 * width * 4, 64 * width):  # sums take 1 s, beside 3 / 5 of the work, or 16 s
        seconds = cost(batch, 2, Shape(1, 1), way, PER_SECOND._replace(link=link)).seconds
        keys, sums = 256 * width * 2 / link, 256 * width * 4 / link
        assert seconds == (5 + keys, pytest.approx(work * 2 / 5 + max(work * 3 / 5, sums)))
    apart = cost(batch, 2, Shape(1, 1, per_node=1), way, PER_SECOND._replace(between=256 * width)).seconds
    assert apart == (5 + 2, pytest.approx(work * 2 / 5 + max(work * 3 / 5, 4)))
    monkeypatch.undo()
    little = cost(batch, 2, Shape(1, 1), way, PER_SECOND._replace(link=256 * width)).seconds
    assert little == (5 + 2, pytest.approx(work + 4))


def test_time_of_a_ring_worked_by_hand():
    # Rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2, each a tile. Own slices are 3 tiles (and 3 for each tile of
    # queries); of rank 1's, rank 0 sees 2 tiles, and rank 1 sees 2 of rank 0's. A hop of keys is 256 rows of 512 bytes.
    batch, hop = thdattn.PackedBatch.from_lengths([512]), 256 * 512
    slow = PER_SECOND._replace(link=hop, between=hop / 10)
    seconds = cost(batch, 2, Shape(1, 1), Way("p2p", "dual_chunk"), slow).seconds
    assert seconds == (3 + 2, pytest.approx(1 + (2 + 6) + (3 + 6)))
    # Between machines hops take longer than steps.
    seconds = cost(batch, 2, Shape(1, 1, per_node=1), Way("p2p", "dual_chunk"), slow).seconds
    assert seconds == (10 + 2, pytest.approx(10 + (2 + 6) + 20))


def test_time_of_an_all_gather_hides_all_but_one_group_of_heads():
    batch, width = thdattn.PackedBatch.from_lengths([65_536]), 8 * 2 * 128 * 2
    way, shape, rates = Way("all_gather", "dual_chunk"), Shape(8, 8), Rates(latency=0, memory=inf)
    found = cost(batch, 2, shape, way, rates)
    gathered = 32_768 * width / rates.link
    assert found.received.forward == 32_768 * width == 2**27  # three groups, the first of one head
    # Beside the second half of the heads, which is the last group, nothing is on its way.
    assert found.seconds.forward == pytest.approx((BESIDE + 1) / 2 * found.compute.forward + gathered / 8)
    apart = cost(batch, 2, Shape(8, 8, per_node=1), way, rates).seconds.forward  # NCCL, 8 equal groups
    work, travel = found.compute.forward / 8, 32_768 * width / rates.between / 8
    assert apart == pytest.approx(travel + 7 * max(BESIDE * work, travel) + work)


def test_every_piece_of_an_exchange_of_heads_takes_time():
    batch = thdattn.PackedBatch.from_lengths([1024] * 8)
    way, shape, rates = Way("a2a", "contiguous"), Shape(32, 8), Rates(inf, inf, inf, inf, memory=inf, latency=1)
    # On each of 4 ranks: the kernel, both exchanges, and for 3 others q, k, v, out and lse; dout, dq, dk and dv.
    # Between machines, in two groups: the first comes, and the last goes, beside nothing.
    coming, going = (1 + 3 * 3, 1 + 3 * 1), (1 + 3 * 2, 1 + 3 * 3)
    apart = tuple(2 * before + 2 * after for before, after in zip(coming, going, strict=True))
    assert cost(batch, 4, replace(shape, per_node=2), way, rates).seconds == apart
    # On one machine the exchanges, which nothing hides, are a kernel each.
    assert cost(batch, 4, shape, way, rates).seconds == (1 + 2, 1 + 2)


def test_memory_is_read_and_written_once_to_put_keys_in_order_and_once_a_step_to_merge():
    batch, rates = thdattn.PackedBatch.from_lengths([4096]), Rates(inf, inf, inf, inf, memory=1, latency=0)
    gather, ring = (cost(batch, 4, Shape(2, 1), Way(name, "dual_chunk"), rates).seconds
                    for name in ("all_gather", "p2p"))
    keys = 4096 * 2 * 128 * 2
    assert gather == (2 * keys, 2 * keys + 2 * keys)  # gathered again, and float32 sums read once
    assert ring == (4 * 2 * 1024 * 2 * 128 * 4,) * 2


def test_memory_is_what_the_neediest_rank_says():
    way, shape = Way("all_gather", "balanced"), Shape(4, 2, head_dim=8, engine="reference")
    batch = batch_for(way, 3, (50, 60, 70))

    def program(comm):
        attn = thdattn.CPAttention(comm, 4, 8, 2, engine="reference")
        return attn.memory(batch, "balanced").wanted()

    needs = thdattn.comm.run_local(3, program)
    assert max(needs) > needs[0]
    assert cost(batch, 3, shape, way).memory == max(needs)


# ------------------------------------------------------------------------------------------------ recommendation


def documents(rows, seed=0):
    """Draw lengths of a pack as documents have them: many short ones, some long."""
    lengths = np.clip(np.exp(np.random.default_rng(seed).normal(6.5, 1.4, rows // 64)), 16, rows // 16).astype(int)
    return lengths[np.cumsum(lengths) <= rows].tolist()


@pytest.mark.parametrize(("lengths", "heads", "kinds"), [
    (documents(65_536), (32, 8), {("all_gather", "balanced")}),
    ([1024] * 64, (32, 8), {("all_gather", "balanced")}),
    ([65_536], (16, 16), {("a2a", "contiguous"), ("all_gather", "dual_chunk")}),
    ([65_536], (32, 1), {("all_gather", "dual_chunk"), ("all_gather", "balanced")}),
    (documents(65_536), (32, 1), {("all_gather", "balanced")}),
], ids=["documents", "equal documents", "long, MHA", "long, MQA", "documents, MQA"])
def test_recommendation_for_eight_ranks_of_a_machine(lengths, heads, kinds):
    found, _ = compared(lengths, 8, Shape(*heads))
    assert recommended(found).way[:2] in kinds


def test_recommendation_for_many_machines_exchanges_heads_inside_them():
    found, _ = compared([60_000, 50_000, 40_000, 30_000], 64, Shape(64, 8, per_node=8))
    assert recommended(found).way[:2] == ("a2a+all_gather", "balanced") and recommended(found).way.inner <= 8


def test_costs_are_sorted_and_every_way_is_there_or_refused():
    found, refusals = compared([4096] * 4, 8, Shape(28, 4))
    assert {one.way for one in found} | set(refusals) == set(model.ways(8))
    assert [one.seconds.total for one in found] == sorted(one.seconds.total for one in found)
    assert "works for 1, 2, 4, 28 ranks" in refusals[Way("a2a", "contiguous")]
    assert len(refusals) == 1


def test_two_levels_are_not_recommended_for_less_than_predictions_tell_apart():
    def of(inner, seconds):
        return model.Cost(Way("a", "b", inner), Both(0, 0), 1, 1, 1, Both(0, 0), Both(seconds, 0))

    assert recommended([of(4, 1.0), of(2, 1.01), of(1, 1.02)]).way.inner == 1
    assert recommended([of(4, 1.0), of(2, 1.01), of(1, 1.04)]).way.inner == 4


# ------------------------------------------------------------------------------------------------ command


def run(capsys, *words):
    """Run the command and return (exit status, standard output, standard error)."""
    status = main(["advise", *map(str, words)])
    return status, *capsys.readouterr()


def table(text):
    """Return the columns of every row of the table, by method."""
    rows = re.findall(r"^((?:all_gather|a2a|p2p)\S*(?: \(\d neighbours\))?, \w+) +(.*)$", text, re.MULTILINE)
    return {way: columns.replace(",", "").split() for way, columns in rows}


QUESTION = "--lengths", "16384", "--ranks", 4, "--heads", 4


def test_command_prints_every_way_and_code_that_takes_the_best(capsys):
    status, text, errors = run(capsys, "--lengths", "8x512,300", "--ranks", 4, "--heads", 8, "--kv-heads", 2)
    assert (status, errors) == (0, "")
    assert text.startswith("pack    9 documents, 4,396 tokens, the longest 512\n")
    rows = table(text)
    assert len(rows) == 7 and next(iter(rows)) == "all_gather, balanced"
    totals = [float(columns[-2]) for columns in rows.values()]
    assert totals == sorted(totals)
    code = text.split("\nrecommended: all_gather, balanced\n")[1]
    names = {"thdattn": thdattn, "comm": thdattn.comm.init("single"), "lengths": [512] * 8 + [300]}
    exec(textwrap.dedent(code), names)
    assert names["attn"].num_kv_heads == 2 and names["plan"].sharding.strategy == "balanced"


def test_code_of_two_levels_and_a_mask_runs():
    way, shape = Way("a2a+all_gather", "dual_chunk", 2), Shape(4, 2, 16, causal=False, window=(9, 9))

    def program(comm):
        names = {"thdattn": thdattn, "comm": comm, "lengths": LENGTHS}
        exec(textwrap.dedent(advise.advice(way, 4, shape)), names)
        return names["plan"].window, names["plan"].sharding.inner, names["attn"].cp_comm_type

    assert thdattn.comm.run_local(4, program) == [((9, 9), 2, "a2a+all_gather")] * 4


def test_rates_that_are_passed_are_used_and_said(capsys):
    _, usual, _ = run(capsys, *QUESTION)
    _, text, _ = run(capsys, *QUESTION, "--compute", "73,65", "--link", 1, "--latency", 500)
    assert "73 TFLOP/s forward (passed), 65 TFLOP/s backward (passed), 1 GB/s between GPUs (passed)" in text
    assert "500 us of latency (passed)" in text and "45 GB/s between machines (H200)" in text
    assert "(passed)" not in usual
    slow, fast = (float(table(x)["all_gather, dual_chunk"][-1]) for x in (text, usual))
    assert slow > 9 * fast


def test_a_way_that_cannot_work_is_listed_with_the_reason(capsys):
    status, text, _ = run(capsys, "--lengths", "2048", "--ranks", 8, "--heads", 28, "--kv-heads", 4)
    assert status == 0 and "a2a, contiguous" not in table(text)
    reasons = " ".join(text.split("\nnot possible:\n")[1].split())
    assert reasons.startswith("a2a, contiguous num_heads is 28 and num_kv_heads 4, wanted heads that can be spread")


def test_documents_of_a_folder_make_one_pack_and_only_those_that_do_not_fit_are_split(tmp_path, capsys):
    words = ("--data", tmp_path, "--tokens", 1024, "--ranks", 2, "--heads", 2)
    (tmp_path / "one").write_bytes(bytes(300))
    assert run(capsys, *words)[1].startswith("pack    1 document, 300 tokens, the longest 300\n")
    (tmp_path / "long").write_bytes(bytes(5000))
    first, again = (run(capsys, *words, "--seed", 1) for _ in range(2))
    assert first == again and first[0] == 0
    tokens, longest = re.match(r"pack .* documents?, ([\d,]+) tokens, the longest ([\d,]+)", first[1]).groups()
    assert int(longest.replace(",", "")) <= int(tokens.replace(",", "")) <= 1024


@pytest.mark.parametrize(("words", "message"), [
    (("--lengths", "12,x"), "--lengths has 'x', wanted lengths with commas between"),
    (("--lengths", "0,3x0"), "--lengths is '0,3x0', wanted at least one token"),
    (("--lengths", "8", "--ranks", 1), "--ranks is 1, wanted >= 2"),
    (("--lengths", "8", "--ranks", 100_000), "--ranks is 100000, wanted <= 1024"),
    (("--lengths", "8", "--heads", 6, "--kv-heads", 4), "num_heads is 6, not a multiple of num_kv_heads = 4"),
    (("--lengths", "8", "--gpus-per-node", 3), "--gpus-per-node is 3, wanted a divisor of --ranks, 8"),
    (("--lengths", "8", "--window", -2), "window is (-2, -1), wanted numbers >= -1"),
    (("--lengths", "8", "--compute", "730"), "--compute is '730', wanted two numbers with a comma between"),
    (("--lengths", "8", "--compute", "730,0"), "--compute has 0.0, wanted a finite number above 0"),
    (("--lengths", "8", "--link", "nan"), "--link has nan, wanted a finite number above 0"),
    (("--data", "{tmp}"), "--tokens is missing, wanted the rows of a pack of --data"),
    (("--data", "{tmp}/nowhere", "--tokens", 64), "--data is {tmp}/nowhere, wanted a folder that exists"),
])
def test_error_is_one_line_and_status_2(words, message, tmp_path, capsys):
    status, _, errors = run(capsys, *(str(word).format(tmp=tmp_path) for word in words))
    assert status == 2
    assert errors.startswith(f"python -m thdattn advise: error: {message.format(tmp=tmp_path)}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("command", "words"), [
    ("advise", ("--lengths", "8", "--heads", "8")), ("pack-stats", ("--lengths", "8", "--tokens", "64")),
])
@pytest.mark.parametrize(("file", "message"), [
    ("no/a.png", "--plot is {tmp}/no/a.png, wanted a file in a folder that exists; make {tmp}/no first"),
    ("a.gif", "--plot is {tmp}/a.gif, wanted a name that ends in one of .png, .pdf, .svg"),
    ("a.png", "--plot needs Matplotlib; install it with: pip install"),
])
def test_picture_that_cannot_be_drawn_is_refused_before_anything_is_computed(
    command, words, file, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert main([command, *words, "--plot", str(tmp_path / file)]) == 2
    text, errors = capsys.readouterr()
    assert text == "" and message.format(tmp=tmp_path) in errors


@pytest.mark.parametrize("command", [("advise", "--ranks", "2"), ("pack-stats", "--tokens", "1024")],
                         ids=["advise", "pack-stats"])
def test_both_commands_take_lengths_inline_and_from_a_file(command, tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text("tokens\n300\n# twice\n64\n64\n0\n")
    for words in ("300,2x64,0", str(tmp_path / "lengths.csv")):
        assert main([*command, "--lengths", words]) == 0
    inline, from_file = capsys.readouterr().out.split("pack  " if command[0] == "advise" else "3 documents")[1:]
    assert inline == from_file


def test_rates_of_this_machine_are_measured(capsys):
    status, text, _ = run(capsys, "--lengths", "64,32", "--heads", 2, "--head-dim", 64, "--ranks", 2, "--measure")
    assert status == 0 and "TFLOP/s forward (measured)" in text and "GB/s between GPUs (H200)" in text


def test_ranks_measure_what_travels_between_them_and_one_prints():
    words = ("advise", "--lengths", "64,32", "--heads", "2", "--head-dim", "64", "--ranks", "2", "--measure")
    ran = run_ranks(2, Path("-m"), "thdattn", *words)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("recommended:") == 1 and "GB/s between GPUs (measured)" in ran.stdout


# ------------------------------------------------------------------------------------------------ picture


def test_picture_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, text, errors = run(capsys, "--lengths", "60x64,900", "--ranks", 4, "--plot", tmp_path / "owners.png")
    assert (status, errors) == (0, "") and "\nrecommended: " in text
    assert text.endswith(f"wrote {tmp_path / 'owners.png'}\n")
    assert (tmp_path / "owners.png").read_bytes().startswith(b"\x89PNG")


def test_a_thousand_ranks_are_compared_in_seconds(capsys):
    begin = time.process_time()
    assert main(["advise", "--ranks", "1024", "--gpus-per-node", "8", "--kv-heads", "8", "--lengths",
                 "160000,60000,12x30000,100x2000,200x700"]) == 0
    assert time.process_time() - begin < 10
    assert "recommended: a2a+all_gather (8 neighbours), balanced" in capsys.readouterr().out


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_kernels_are_timed_and_the_rest_is_that_of_h200():
    rates = measured(thdattn.comm.init("single"), [2048, 0, 1000], Shape(8, 2))
    assert rates.forward > 1e12 and rates.backward > 1e12  # a CPU does not reach it
    assert rates._replace(forward=H200.forward, backward=H200.backward) == H200


@pytest.mark.gpu
def test_the_command_measures_on_the_gpu(capsys):
    status, text, errors = run(capsys, "--lengths", "4x1000", "--heads", 8, "--kv-heads", 2, "--ranks", 4, "--measure")
    assert (status, errors) == (0, "") and "TFLOP/s backward (measured)" in text and len(table(text)) == 7


@pytest.mark.gpu
def test_memory_counts_what_kernels_of_the_gpu_take():
    batch, way = thdattn.PackedBatch.from_lengths([3000, 500]), Way("all_gather", "balanced")
    gpu, host = (cost(batch, 4, Shape(8, 2, engine=engine), way).memory for engine in ("cuda", "reference"))
    assert gpu > host

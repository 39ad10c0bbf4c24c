"""python -m thdattn pack-stats: documents per pack, and what maxima of them would mean; the packing that it shares."""

from __future__ import annotations

import re
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thdattn.__main__ import main
from thdattn.capacity import LayoutSizes, Mask
from thdattn.cli import pack_capacities, pack_stats
from thdattn.packing import PackedBatch, first_fit
from thdattn.plan.layout_tables import excess
from thdattn.sharding import Sharding


def packs(sizes, capacity, look_ahead=64):
    return list(first_fit(sizes, int, capacity, look_ahead))


def run(capsys, *words):
    """Run the command and return (exit status, standard output, standard error)."""
    status = main(["pack-stats", *map(str, words)])
    return status, *capsys.readouterr()


@pytest.fixture
def lengths(tmp_path):
    """A file of 1,000 lengths from 10 to 499."""
    path = tmp_path / "lengths.csv"
    numbers = np.random.default_rng(0).integers(10, 500, 1_000)
    path.write_text("length\n# of documents\n" + "\n".join(map(str, numbers)) + "\n\n0\n")
    return path


# ------------------------------------------------------------------------------------------------ first_fit


def test_first_fit_worked_by_hand():
    # 7 does not fit behind 6 and waits for the next pack; 4 does. 9 waits while 2 fills the second pack.
    assert packs([6, 7, 4, 9, 2, 1], 10) == [[6, 4], [7, 2, 1], [9]]


def test_pack_is_closed_when_too_many_items_wait():
    assert packs([6, 7, 8, 4], 10, look_ahead=2) == [[6], [7], [8], [4]]
    assert packs([6, 7, 8, 4], 10, look_ahead=3) == [[6, 4], [7], [8]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 32), max_size=80), st.integers(1, 8))
def test_first_fit_holds_every_item_once_and_fills_no_pack_beyond_its_rows(sizes, look_ahead):
    items = list(zip(sizes, range(len(sizes)), strict=True))
    made = list(first_fit(items, itemgetter(0), 32, look_ahead))
    assert sorted(item for pack in made for item in pack) == sorted(items)
    assert all(0 < sum(size for size, _ in pack) <= 32 for pack in made)


@pytest.mark.parametrize(("sizes", "capacity", "look_ahead", "message"), [
    ([3, 11], 10, 64, "an item takes 11 rows, wanted at most 10, the rows of a pack; split it"),
    ([3, 7], 0, 64, "capacity is 0, wanted >= 1"), ([3, 7], 10, 0, "look_ahead is 0, wanted >= 1"),
])
def test_items_that_fit_no_pack_are_refused_rather_than_dropped(sizes, capacity, look_ahead, message):
    with pytest.raises(ValueError, match=message):
        packs(sizes, capacity, look_ahead)


# ------------------------------------------------------------------------------------------------ capacities


def test_capacities_of_balanced_rows_are_percentiles_that_count_what_exceeds_them():
    needed = np.array([[rows, 100 + rows, 50 - rows, 2 * rows] for rows in range(10)])
    found = pack_capacities.candidates(needed)
    assert [(one.name, one.capacity, one.num_eager) for one in found] == [
        ("P50", (4, 104, 46, 8), 5), ("P90", (8, 108, 42, 16), 1), ("P95", (9, 109, 41, 18), 0),
        ("P99", (9, 109, 41, 18), 0), ("max", (9, 109, 41, 18), 0)]


def test_a_capacity_holds_the_packs_that_are_not_counted_as_eager():
    packs = [[1000], [500, 500], [300, 200, 500], [900, 100], [10] * 100]
    found = pack_capacities.candidates(pack_capacities.needed_capacities(packs, 1000, 2))
    for _, capacity, num_eager in found:
        sizes = LayoutSizes(500, 1000, {Mask((-1, 0), pack_capacities.TILES): capacity})
        shardings = [Sharding(PackedBatch.from_lengths(pack), 2, "balanced") for pack in packs]
        assert sum(bool(excess(sharding, sizes)) for sharding in shardings) == num_eager
    assert found[-1].num_eager == 0 < found[0].num_eager


def test_capacities_are_printed_for_as_many_ranks_as_asked(capsys, lengths):
    status, said, _ = run(capsys, "--lengths", lengths, "--tokens", 4096, "--ranks", 4)
    assert status == 0 and "balanced rows over 4 ranks" in said and re.search(r"^max +\d+ .* MiB +0$", said, re.M)
    status, said, _ = run(capsys, "--lengths", lengths, "--tokens", 4096)
    assert status == 0 and "balanced rows" not in said
    status, _, error = run(capsys, "--lengths", lengths, "--tokens", 4096, "--ranks", 1)
    assert status != 0 and "--ranks is 1, wanted >= 2" in error


# ------------------------------------------------------------------------------------------------ numbers


def test_documents_per_pack_counts_pieces_of_split_documents():
    # 40 is split in 16, 16 and 8, which is padded to 12; only 4 of the other documents' rows fit behind it.
    counts, passes = pack_stats.documents_per_pack(np.array([40, 1]), 16, 4, 16, seed=0)
    assert passes >= 300 and len(counts) == 3 * passes >= 1_000
    assert sorted(counts[:3]) == [1, 1, 2]


def test_candidates_worked_by_hand():
    counts = np.array([3] * 50 + [6] * 40 + [9] * 9 + [20])
    found = {candidate.slots: candidate for candidate in pack_stats.candidates(counts)}
    assert {slots: candidate.replay for slots, candidate in found.items()} == {
        3: 50, 4: 50, 6: 90, 8: 90, 9: 99, 16: 99, 20: 100, 32: 100
    }
    assert {slots: candidate.why for slots, candidate in found.items() if candidate.why} == {
        3: "P50", 6: "P90", 9: "P95 P99", 20: "max"
    }
    assert found[4].empty == 1 and found[6].empty == pytest.approx(50 * 3 / 90)
    assert found[32].lengths_bytes == 2 * 33 * 4
    assert [found[slots].search for slots in (3, 4, 6, 8, 9, 16, 20, 32)] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert found[32].cost == 4 * 6 * 5 / 16_384


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=24, max_size=60), st.integers(1, 4), st.integers(1, 6))
@example([1, 2, 3, 4], 2, 2)  # packs of one step
def test_a_round_falls_back_if_one_pack_does_and_a_step_if_one_round_does(counts, groups, accumulate):
    for candidate in pack_stats.candidates(np.array(counts), groups, accumulate):
        rounds, steps = 0, 0
        for step in range(len(counts) // (groups * accumulate)):
            eager = [any(counts[(step * accumulate + number) * groups + group] > candidate.slots
                         for group in range(groups)) for number in range(accumulate)]
            rounds, steps = rounds + sum(eager), steps + any(eager)
        assert (candidate.rounds, candidate.steps) == (rounds, steps)


# ------------------------------------------------------------------------------------------------ command


def test_command_prints_percentiles_candidates_and_a_recommendation(lengths, capsys):
    status, text, errors = run(capsys, "--lengths", lengths, "--tokens", 2048)
    assert (status, errors) == (0, "")
    assert text.startswith("1,000 documents, ")
    assert re.search(r"\n[\d,]+ packs of 2,048 rows, from \d+ passes, each in another order\n", text)
    heading = re.search(r"\n +P50 +P90 +P95 +P99 +max\n", text)
    counts = re.search(r"\ndocuments per pack +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)\n", text)
    assert heading and [*map(int, counts.groups())] == sorted(map(int, counts.groups()))
    rows = re.findall(r"\n +(\d+) (?: P50| P90| P95| P99| max)* +([\d.]+) % +(\d+) .* B +\d+ +[\d.]+ %", text)
    slots, shares, eager = ([*map(float, column)] for column in zip(*rows, strict=True))
    assert slots == sorted(slots) and shares == sorted(shares) and eager == sorted(eager, reverse=True)
    assert set(map(int, counts.groups())) <= set(slots)
    assert shares[-1] == 100 and eager[-1] == 0
    assert f"recommended: --cuda-graph-max-packed-seqs {slots[-1]:.0f}" in text
    assert "It is computed, not measured." in text


def test_command_prints_how_many_rounds_and_steps_fall_back(lengths, capsys):
    words = "--lengths", lengths, "--tokens", 2048, "--accumulate", 4, "--groups", 2
    for steps in (("--steps", 10), ("--steps", 1000), ()):
        status, text, errors = run(capsys, *words, *steps)
        assert (status, errors) == (0, "")
        num_packs = int(re.search(r"\n([\d,]+) packs of 2,048 rows, from", text)[1].replace(",", ""))
        said = re.search(r"\n([\d,]+) training steps of 4 rounds; a round has a pack for each of 2 groups", text)
        num_steps = int(said[1].replace(",", ""))
        assert num_steps == (steps[1] if steps else num_packs // 8)
        assert num_packs == 8 * num_steps or not steps
        rows = re.findall(r"\n +(\d+) +([\d,]+) +[\d.]+ % +([\d,]+) +[\d.]+ %(?=\n)", text)
        rounds, fell = ([int(row[column].replace(",", "")) for row in rows] for column in (1, 2))
        assert rounds[-1] == fell[-1] == 0 and fell[0] == num_steps and 0 < rounds[0] <= 4 * num_steps
        assert all(rounds[i] >= fell[i] for i in range(len(rows))) and rounds == sorted(rounds, reverse=True)


def test_folder_is_read_with_its_subfolders_but_for_empty_and_hidden_files(tmp_path, capsys):
    for name, size in {"a": 100, "deep/er/b": 50, "empty": 0, ".hidden": 70, ".git/c": 80}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    status, text, _ = run(capsys, "--data", tmp_path, "--tokens", 64, "--multiple", 1)
    assert status == 0
    assert text.startswith("2 documents, 150 tokens; 1 longer than 64 are split, and each piece counts\n")


@pytest.mark.parametrize(("words", "message"), [
    (("--data", "{tmp}/nowhere", "--tokens", 64), "--data is {tmp}/nowhere, wanted a folder that exists; pass one"),
    (("--data", "{tmp}/empty", "--tokens", 64), "--data is {tmp}/empty, which holds no file that is not empty or"),
    (("--lengths", "no.csv", "--tokens", 64), "--lengths has 'no.csv', wanted lengths with"),
    (("--lengths", "{tmp}/none", "--tokens", 64), "--lengths is {tmp}/none, which holds no length above 0, wanted one"),
    (("--lengths", "{tmp}/bins", "--tokens", 64), "line 2 of --lengths {tmp}/bins is '1,10,0.22', wanted one integer"),
    (("--lengths", "{tmp}/wrong", "--tokens", 64), "line 1 of --lengths {tmp}/wrong is '-3', wanted one integer from"),
    (("--lengths", "{tmp}/huge", "--tokens", 64), "line 1 of --lengths {tmp}/huge is '1000000000000', wanted one"),
    (("--data", "{tmp}", "--tokens", 8), "--tokens is 8, wanted at least --multiple, 16; pass --tokens 16"),
    *((("--data", "{tmp}", "--tokens", 64, option, -1), f"{option} is -1, wanted >= ")
      for option in ("--tokens", "--multiple", "--longest", "--seed", "--groups", "--accumulate")),
    (("--data", "{tmp}", "--tokens", 64, "--steps", "0"), "--steps is '0', wanted a number of at least 1, or all"),
    (("--data", "{tmp}", "--tokens", 64, "--steps", "few"), "--steps is 'few', wanted a number of at least 1, or all"),
    (("--data", "{tmp}", "--tokens", 64, "--groups", 10**6), "--groups times --accumulate is 1000000, wanted at most "),
])
def test_error_is_one_line_and_status_2(words, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    texts = {"none": "length\n0\n", "bins": "min_len,max_len\n1,10,0.22\n", "wrong": "-3\n", "huge": f"{10**12}\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    status, _, errors = run(capsys, *(str(word).format(tmp=tmp_path) for word in words))
    assert status == 2
    assert errors.startswith(f"python -m thdattn pack-stats: error: {message.format(tmp=tmp_path)}")
    assert errors.count("\n") == 1

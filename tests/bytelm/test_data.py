"""Documents of the byte language model, who trains on them, and packing that loses and repeats nothing."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from contextlib import closing

import data
import numpy as np
import pytest
from data import EOD, NOT_COUNTED, Document, Packing, Piece, Position

SIZES = (1, 2, 15, 16, 17, 33, 40, 100, 300)


@pytest.fixture
def folder(tmp_path):
    """Write documents of SIZES bytes; no two bytes of one document, and no two documents, look alike."""
    rng = np.random.default_rng(0)
    for i, size in enumerate(SIZES):
        path = tmp_path / f"{i % 3}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.integers(0, 256, size, np.uint8).tobytes())
    return tmp_path


def epoch(documents, packing, seed=0, number=0):
    batches = data.micro_batches(documents, packing, seed, Position(number, 0))
    return list(itertools.takewhile(lambda batch: batch.after.epoch == number, batches))


def same(one, other):
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.targets, other.targets)


# --- documents -------------------------------------------------------------------------------------------------


def test_documents_are_the_readable_files_below_a_folder_but_for_empty_and_hidden_ones(folder):
    (folder / "empty").touch()
    (folder / ".hidden").write_text("secret")
    (folder / "gone").symlink_to(folder / "nowhere")
    if os.geteuid():  # root may read everything
        (folder / "unreadable").write_text("secret")
        (folder / "unreadable").chmod(0)
    hidden = folder / ".git"
    hidden.mkdir()
    for name in "ab":
        (hidden / name).write_text("secret")
    found = data.find_documents(folder)
    assert [document.name for document in found] == sorted(f"{i % 3}/{i}.txt" for i in range(len(SIZES)))
    assert Counter(document.end for document in found) == Counter(SIZES)
    assert len(data.find_documents(hidden)) == 2, "a folder in a hidden one is read if it is asked for"


def test_documents_of_the_standard_library_are_real_sources():
    found = data.find_documents()
    names = {document.name for document in found}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not [name for name in names if "site-packages" in name or "/tests/" in name or name.startswith("test/")]
    assert sum(document.end for document in found) > 4e6


def test_a_single_file_is_cut_in_two(tmp_path):
    (tmp_path / "all").write_bytes(bytes(range(200)))
    one, other = data.find_documents(tmp_path)
    assert (one.begin, one.end, other.begin, other.end) == (0, 190, 190, 200)
    assert one.tokens(0, 1000).tolist() == [EOD, *range(190), EOD]
    assert other.tokens(0, 1000).tolist() == [EOD, *range(190, 200), EOD]
    training, validation = data.split([one, other])
    assert len(training) == len(validation) == 1


def test_tokens_are_eod_bytes_eod_in_whatever_parts_they_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"xyz" + bytes([0, 255, 10]))
    document = Document("a", tmp_path / "a", 3, 6)
    whole = [EOD, 0, 255, 10, EOD]
    for begin, end in itertools.combinations(range(6), 2):
        tokens = document.tokens(begin, end)
        assert tokens.tolist() == whole[begin:end] and tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "missing", "wanted a folder that exists"),
        (lambda path: path, "holds 0 readable files"),
        (lambda path: (path / "one").write_text("x") and path, "holds 1 readable files"),
        (lambda path: (path / "file").write_text("x") and path / "file", "wanted a folder that exists"),
    ],
)
def test_a_folder_without_documents_is_named(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        data.find_documents(make(tmp_path))


def test_split_is_disjoint_complete_and_does_not_depend_on_other_files(folder):
    documents = data.find_documents()
    training, validation = data.split(documents)
    assert sorted(d.name for d in training + validation) == [d.name for d in documents]
    assert len(validation) == round(0.05 * len(documents))
    assert data.split(documents[::-1]) == (training, validation)
    fewer = [document for document in documents if document not in training[::2]]
    kept_back = data.split(fewer)[1]
    assert kept_back == validation[: len(kept_back)]


def test_fingerprint_tells_other_names_and_sizes(folder):
    documents = data.find_documents(folder)
    before = data.fingerprint(documents)
    assert before == data.fingerprint(data.find_documents(folder))
    (folder / "0" / "0.txt").write_text("longer")
    assert before != data.fingerprint(data.find_documents(folder))


# --- packing ---------------------------------------------------------------------------------------------------


def test_names_may_be_bytes_of_any_encoding(folder):
    known = data.find_documents(folder)
    for name in (b"\xe9t\xe9.txt", b"\xe8t\xe8.txt"):  # Latin-1
        (folder / os.fsdecode(name)).write_text("summer")
    found = data.find_documents(folder)
    assert len(found) == len(known) + 2
    assert sorted(map(repr, itertools.chain(*data.split(found)))) == sorted(map(repr, found))
    assert len({data.fingerprint([document]) for document in found}) == len(found)


def test_first_fit_worked_by_hand(tmp_path):
    # 9, 5, 3, 8 targets, 12 rows: 9 + 3 fit together, then 5, which waited, and 8 is too long beside it.
    lengths = zip("abcd", (9, 5, 3, 8), strict=True)
    pieces = [Piece(Document(name, tmp_path, 0, length - 1), 0, length) for name, length in lengths]
    packed = [[piece.document.name for piece in chosen] for chosen in data.pack(pieces, Packing(12, 1, 12))]
    assert packed == [["a", "c"], ["b"], ["d"]]
    # In multiples of 4 they take 12, 8, 4, 8.
    packed = [[piece.document.name for piece in chosen] for chosen in data.pack(pieces, Packing(12, 4, 12))]
    assert packed == [["a"], ["b", "c"], ["d"]]


def test_a_document_longer_than_the_budget_is_split_worked_by_hand(tmp_path):
    (tmp_path / "a").write_bytes(b"abcdefg")
    document = Document("a", tmp_path / "a", 0, 7)
    first, second = sorted(epoch([document], Packing(5, 1, 5)), key=lambda batch: -batch.num_targets)
    a, b, c, d, e, f, g = b"abcdefg"
    assert first.tokens.tolist() == [EOD, a, b, c, d]
    assert first.targets.tolist() == [a, b, c, d, e]
    assert second.tokens[:3].tolist() == [e, f, g]
    assert second.targets.tolist() == [f, g, EOD, NOT_COUNTED, NOT_COUNTED]
    assert (first.num_targets, first.num_bytes, second.num_targets, second.num_bytes) == (5, 5, 3, 2)


@pytest.mark.parametrize("rows", [17, 64, 100, 1000])
@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("longest", [1, 16, 1000])
def test_every_byte_and_every_end_is_a_target_exactly_once(folder, rows, multiple, longest):
    documents = data.find_documents(folder)
    batches = epoch(documents, Packing(rows, multiple, min(longest, rows // multiple * multiple)))
    wanted = Counter(byte for document in documents for byte in document.path.read_bytes())
    wanted[EOD] = len(documents)
    counted = Counter(target for batch in batches for target in batch.targets.tolist())
    del counted[NOT_COUNTED]
    assert counted == wanted
    assert sum(batch.num_targets for batch in batches) == wanted.total()
    assert sum(batch.num_bytes for batch in batches) == sum(SIZES)


@pytest.mark.parametrize("packing", [Packing.of(17, 1, "dual_chunk"), Packing.of(64, 2, "dual_chunk"),
                                     Packing.of(64, 2, "dual_chunk", 20), Packing.of(1000, 1, "contiguous")])
def test_pieces_put_together_are_the_documents(folder, packing):
    documents = data.find_documents(folder)
    packed = [piece for chosen in data.pack(data.pieces_of(documents, packing.longest), packing) for piece in chosen]
    for document in documents:
        pieces = sorted((piece for piece in packed if piece.document == document), key=lambda piece: piece.begin)
        assert [0, *(piece.end for piece in pieces)] == [*(piece.begin for piece in pieces), document.num_targets]
        assert max(piece.end - piece.begin for piece in pieces) == min(document.num_targets, packing.longest)


def test_documents_stay_whole_if_they_fit_and_1_2_4_and_8_ranks_make_the_same_batches():
    for longest, wanted in (None, 96), (20, 20), (200, 96):
        assert Packing.of(100, 1, "dual_chunk", longest).longest == wanted
    assert Packing.of(100, 1, "contiguous").longest == 100
    assert len({Packing.of(4096, cp_size, "dual_chunk") for cp_size in (1, 2, 4, 8)}) == 1
    assert Packing.of(4096, 3, "dual_chunk").multiple == 48
    assert Packing.of(4096, 3, "contiguous").multiple == 1


@pytest.mark.parametrize(("tokens", "cp_size", "wanted"), [(15, 1, 16), (47, 3, 48)])
def test_a_budget_too_small_is_an_error_with_a_remedy(tokens, cp_size, wanted):
    with pytest.raises(ValueError, match=f"tokens is {tokens}, wanted at least {wanted}.*pass --tokens {wanted}"):
        Packing.of(tokens, cp_size, "dual_chunk")
    with pytest.raises(ValueError, match="longest is 0, wanted at least 1"):
        Packing.of(100, cp_size, "dual_chunk", 0)


# --- order -----------------------------------------------------------------------------------------------------


def test_order_depends_on_seed_and_epoch_alone(folder):
    documents, packing = data.find_documents(folder), Packing(64, 1, 64)
    once, again = epoch(documents, packing), epoch(documents, packing)
    assert all(same(one, other) for one, other in zip(once, again, strict=True))
    for seed, number in ((1, 0), (0, 1)):
        other = epoch(documents, packing, seed, number)
        assert not all(same(one, two) for one, two in zip(once, other, strict=False))


def test_going_on_at_a_position_is_as_if_never_interrupted(folder):
    documents, packing = data.find_documents(folder), Packing(64, 16, 64)
    run = list(itertools.islice(data.micro_batches(documents, packing, 3, Position(0, 0)), 30))
    assert run[-1].after.epoch >= 2
    for i in range(29):
        resumed = next(data.micro_batches(documents, packing, 3, run[i].after))
        assert same(resumed, run[i + 1]) and resumed.after == run[i + 1].after


def test_groups_get_even_work_and_steps_keep_their_documents(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(150):
        (tmp_path / f"{i}.txt").write_bytes(bytes(int(np.exp(rng.normal(3.5, 1)))))
    documents, packing = data.find_documents(tmp_path), Packing(512, 1, 400)

    def squares(lengths):
        return lengths.astype(float) ** 2

    def pieces_of(batches):
        return sorted((piece.document.name, piece.begin) for batch in batches for piece in batch.pieces)

    def busiest(step):
        work = [sum(float(piece.end - piece.begin) ** 2 for batch in step[group::2] for piece in batch.pieces)
                for group in (0, 1)]
        return max(work) / np.mean(work)

    before = list(itertools.islice(data.micro_batches(documents, packing, 0, Position(0, 0)), 40))
    after = list(data.evened(iter(before), packing, squares, groups=2, accumulate=4))
    assert [batch.after for batch in after] == [batch.after for batch in before]
    assert all(batch.batch.total_rows == 512 and len(batch.pieces) for batch in after)
    evened = 0
    for one, other in zip(data.grouped(iter(before), 8), data.grouped(iter(after), 8), strict=True):
        assert pieces_of(one) == pieces_of(other)
        evened += one != other
        assert one == other or busiest(other) <= 1.05
    assert evened >= 4
    assert max(busiest(step) for step in data.grouped(iter(before), 8)) > 1.1


def test_an_incomplete_step_keeps_its_micro_batches(folder):
    documents, packing = data.find_documents(folder), Packing(64, 16, 64)
    before = epoch(documents, packing)[:3]
    assert list(data.evened(iter(before), packing, np.asarray, 2, 2)) == before


def test_validation_is_on_a_fixed_sample_of_about_so_many_bytes(folder):
    documents, packing = data.find_documents(folder), Packing(64, 16, 32)
    for limit in (1, 100, 300):
        batches = data.validation_batches(documents, packing, limit)
        assert limit <= sum(batch.num_targets for batch in batches) <= limit + packing.longest
        again = data.validation_batches(documents, packing, limit)
        assert all(same(one, other) for one, other in zip(batches, again, strict=True))
    everything = data.validation_batches(documents, packing, 10_000)
    assert sum(batch.num_bytes for batch in everything) == sum(SIZES)


# --- the thread ------------------------------------------------------------------------------------------------


def test_prepared_items_come_in_order_and_end_with_their_thread():
    assert list(data.grouped(data.prepared(iter(range(5))), 2)) == [[0, 1], [2, 3], [4]]
    assert not data_threads()
    with closing(data.prepared(itertools.count())) as coming:
        assert next(coming) == 0
        assert data_threads()
    assert not data_threads(), "the caller stops early"


def test_next_item_is_prepared_while_the_caller_works():
    made = [threading.Event() for _ in range(3)]

    def items():
        for event in made:
            event.set()
            yield threading.current_thread().name

    with closing(data.prepared(items())) as coming:
        assert next(coming).startswith("data")
        assert made[1].wait(10), "the second was not made while the first was worked on"
        assert not made[2].is_set(), "one ahead is enough"


def test_error_of_the_thread_is_raised_in_the_loop(folder):
    documents = data.find_documents(folder)
    batches = data.micro_batches(documents, Packing(64, 16, 64), 0, Position(0, 0))
    batches = data.prepared(data.steps(batches, 1, slice(None)))
    next(batches)
    for document in documents:
        document.path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"ends at byte 0, wanted .* leave the documents alone"):
        list(itertools.islice(batches, 100))
    assert not data_threads()


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_a_piece_is_what_it_says(folder):
    document = data.find_documents(folder)[-1]
    batch = data.MicroBatch.of([Piece(document, 2, 9)], Packing(16, 4, 16), Position(5, 6))
    content = document.path.read_bytes()
    assert bytes(batch.tokens[:7].tolist()) == content[1:8]
    assert bytes(batch.targets[:7].tolist()) == content[2:9]
    assert batch.after == (5, 6) and batch.batch.cu_seqlens_padded.tolist() == [0, 8]

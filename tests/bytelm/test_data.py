"""Documents and dialogues, who trains on them, and packing that loses and repeats nothing."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from contextlib import closing

import data
import numpy as np
import pytest
from data import EOD, NOT_COUNTED, Document, MicroBatch, Packing, Piece, Position
from texts import DIALOGUES, write_dialogues

SIZES = (1, 2, 15, 16, 17, 33, 40, 100, 300)


@pytest.fixture
def folder(tmp_path):
    """Write documents of SIZES bytes; no two bytes of one document, and no two documents, look alike."""
    rng = np.random.default_rng(0)
    for i, size in enumerate(SIZES):
        path = tmp_path / "files" / f"{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.integers(0, 256, size, np.uint8).tobytes())
    return tmp_path / "files"


def epoch(documents, packing, seed=0, number=0):
    batches = data.micro_batches(documents, packing, seed, Position(number, 0))
    return list(itertools.takewhile(lambda batch: batch.after.epoch == number, batches))


def same(one, other):
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.targets, other.targets)


# --- documents -------------------------------------------------------------------------------------------------


def test_documents_are_the_readable_files_below_a_folder_but_for_empty_and_hidden_ones(folder):
    hidden = folder / ".git"
    hidden.mkdir()
    for secret in (folder / ".hidden", hidden / "a", hidden / "b"):
        secret.write_text("secret")
    (folder / "empty").touch()
    (folder / "gone").symlink_to(folder / "nowhere")
    if os.geteuid():  # root may read everything
        (folder / "unreadable").write_text("secret")
        (folder / "unreadable").chmod(0)
    found = {document.name: document.end for document in data.find_documents(folder)}
    assert [*found.items()] == sorted((f"{i % 3}/{i}.txt", size) for i, size in enumerate(SIZES))
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
    assert one.tokens(0, 1000).tolist() == [EOD, *range(190), EOD]
    assert other.tokens(0, 1000).tolist() == [EOD, *range(190, 200), EOD]
    assert other.tokens(2, 5).tolist() == [191, 192, 193]
    training, validation = data.split([one, other])
    assert len(training) == len(validation) == 1


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


@pytest.mark.parametrize(("line", "why"), [
    ('["a", "b"]', "it is no object"), ('{"prompt": "a"}', "its keys are 'prompt'"), ("{}", "its keys are none"),
    ('{"prompt": "a", "answer": 3}', "its texts are no strings"), ("prompt", "Expecting value"),
    ('{"prompt": "a", "answer": "\\ud800"}', "surrogates not allowed"), (b"\xff\xff\xff", "can't decode"),
])
def test_a_line_that_is_no_dialogue_is_named(tmp_path, line, why):
    folder = write_dialogues(tmp_path / "texts", DIALOGUES)
    (folder / "b.jsonl").write_bytes(b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=rf'b\.jsonl, line 2, is .*, wanted \{{"prompt": .*{why}.*; mend it, or leave'):
        data.find_dialogues(folder)


def test_a_folder_without_dialogues_and_one_that_changes_are_named(tmp_path):
    folder = write_dialogues(tmp_path / "texts", DIALOGUES)
    first, *_ = data.find_dialogues(folder)
    for text in ("changed", "?"):  # cut where a line ended, and a whole line
        write_dialogues(folder, [(text, "since")] * 20)
        with pytest.raises(ValueError, match=r"a\.jsonl:1 is .*, wanted a prompt of 4 bytes and an answer of 1 as"):
            first.tokens(0, 5)
    (folder / "a.jsonl").rename(folder / "a.txt")
    with pytest.raises(ValueError, match=r"whose \.jsonl files hold 0 lines, wanted two or more with --mask-prompt"):
        data.find_dialogues(folder)


def test_split_is_disjoint_complete_and_does_not_depend_on_other_files():
    documents = data.find_documents()
    training, validation = data.split(documents)
    assert sorted(d.name for d in training + validation) == [d.name for d in documents]
    assert len(validation) == round(0.05 * len(documents))
    assert data.split(documents[::-1]) == (training, validation)
    fewer = [document for document in documents if document not in training[::2]]
    kept_back = data.split(fewer)[1]
    assert kept_back == validation[: len(kept_back)]


def test_fingerprint_tells_names_of_any_encoding_sizes_and_where_prompts_end(folder, tmp_path):
    for name in (b"\xe9t\xe9.txt", b"\xe8t\xe8.txt"):  # Latin-1
        (folder / os.fsdecode(name)).write_text("summer")
    found = data.find_documents(folder)
    assert len(found) == len(SIZES) + 2
    assert sorted(map(repr, itertools.chain(*data.split(found)))) == sorted(map(repr, found))
    before = data.fingerprint(found)
    assert before == data.fingerprint(data.find_documents(folder))
    (folder / "0" / "0.txt").write_text("longer")
    texts = [[("same bytes"[:cut], "same bytes"[cut:]), ("", "a")] for cut in range(4)]
    others = [data.find_dialogues(write_dialogues(tmp_path / f"{n}", each)) for n, each in enumerate(texts)]
    others += [[document] for document in found] + [data.find_documents(folder)]
    assert len({before, *map(data.fingerprint, others)}) == 1 + len(others)


# --- packing ---------------------------------------------------------------------------------------------------


def test_first_fit_worked_by_hand(tmp_path):
    # 9, 5, 3, 8 targets, 12 rows: 9 + 3 fit together, then 5, which waited, and 8 is too long beside it.
    lengths = zip("abcd", (9, 5, 3, 8), strict=True)
    pieces = [Piece(Document(name, tmp_path, 0, length - 1), 0, length) for name, length in lengths]
    packed = [[piece.document.name for piece in chosen] for chosen in data.pack(pieces, Packing(12, 1, 12))]
    assert packed == [["a", "c"], ["b"], ["d"]]
    # In multiples of 4 they take 12, 8, 4, 8.
    packed = [[piece.document.name for piece in chosen] for chosen in data.pack(pieces, Packing(12, 4, 12))]
    assert packed == [["a"], ["b", "c"], ["d"]]


@pytest.fixture(params=["files", "dialogues"])
def texts(request, folder, tmp_path):
    """Return documents, and by name their bytes and the length of the prompt."""
    if request.param == "files":
        documents = data.find_documents(folder)
        return documents, {document.name: (document.path.read_bytes(), 0) for document in documents}
    documents = data.find_dialogues(write_dialogues(tmp_path / "texts", DIALOGUES))
    return documents, {f"a.jsonl:{number}": ((prompt + answer).encode(), len(prompt.encode()))
                       for number, (prompt, answer) in enumerate(DIALOGUES, 1)}


@pytest.mark.parametrize("packing", [
    Packing(17, 1, 17), Packing(100, 4, 1), Packing.of(64, 2, "dual_chunk", 20), Packing.of(1000, 1, "contiguous"),
], ids=str)
def test_an_epoch_has_every_target_once_and_splits_only_what_is_too_long(texts, packing):
    """The inputs are EOD and the bytes. The targets are the bytes but for a prompt, and EOD."""
    documents, wanted = texts
    found = defaultdict(list)
    for batch in epoch(documents, packing):
        counted = batch.targets[batch.targets != NOT_COUNTED]
        assert batch.batch.total_rows == packing.rows and not (batch.batch.cu_seqlens_padded % packing.multiple).any()
        assert (batch.num_targets, batch.num_bytes) == (len(counted), (counted != EOD).sum())
        for piece, *rows in zip(batch.pieces, *map(batch.batch.unpack, (batch.tokens, batch.targets)), strict=True):
            found[piece.document.name].append((piece.begin, *rows))
    assert found.keys() == wanted.keys()
    for name, pieces in found.items():
        _, tokens, targets = zip(*sorted(pieces, key=lambda piece: piece[0]), strict=True)
        text, prompt = wanted[name]
        assert np.concatenate(tokens).tolist() == [EOD, *text]
        assert np.concatenate(targets).tolist() == [NOT_COUNTED] * prompt + [*text[prompt:], EOD]
        assert len(pieces) == -(-(len(text) + 1) // packing.longest)


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
    """An incomplete step keeps its micro-batches."""
    rng = np.random.default_rng(0)
    for i in range(150):
        (tmp_path / f"{i}.txt").write_bytes(bytes(int(np.exp(rng.normal(3.5, 1)))))
    documents, packing = data.find_documents(tmp_path), Packing(512, 1, 400)

    def pieces_of(batches):
        return sorted((piece.document.name, piece.begin) for batch in batches for piece in batch.pieces)

    def busiest(step):
        work = [sum((piece.end - piece.begin) ** 2 for batch in step[group::2] for piece in batch.pieces)
                for group in (0, 1)]
        return max(work) / np.mean(work)

    before = list(itertools.islice(data.micro_batches(documents, packing, 0, Position(0, 0)), 43))
    after = list(data.balance_groups(iter(before), packing, lambda lengths: lengths**2.0, groups=2, accumulate=4))
    assert [batch.after for batch in after] == [batch.after for batch in before]
    assert all(batch.batch.total_rows == 512 and len(batch.pieces) for batch in after)
    steps = list(zip(data.chunks(iter(before), 8), data.chunks(iter(after), 8), strict=True))
    assert all(pieces_of(one) == pieces_of(other) for one, other in steps)
    evened = [(busiest(one), busiest(other)) for one, other in steps if one != other]
    assert len(evened) >= 4 and max(other for _, other in evened) <= 1.05 and max(one for one, _ in evened) > 1.1
    assert steps[-1][0] == steps[-1][1]


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


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_prepared_items_come_in_order_and_end_with_their_thread():
    assert list(data.chunks(data.prefetch(iter(range(5))), 2)) == [[0, 1], [2, 3], [4]]
    assert not data_threads()


def test_next_item_is_prepared_while_the_caller_works():
    made = [threading.Event() for _ in range(3)]

    def items():
        for event in made:
            event.set()
            yield threading.current_thread().name

    with closing(data.prefetch(items())) as coming:
        assert next(coming).startswith("data")
        assert made[1].wait(60), "the second was not made while the first was worked on"
        assert data_threads() and not made[2].is_set(), "one ahead is enough"
    assert not data_threads(), "the caller stops early"


def test_error_of_the_thread_is_raised_in_the_loop(folder):
    documents = data.find_documents(folder)
    batches = data.micro_batches(documents, Packing(64, 16, 64), 0, Position(0, 0))
    batches = data.prefetch(data.steps(batches, 1, slice(None)))
    next(batches)
    for document in documents:
        document.path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"ends at byte 0, wanted .* leave the documents alone"):
        list(itertools.islice(batches, 100))
    assert not data_threads()


def test_a_rank_prepares_the_micro_batches_of_its_group_alone_until_the_run_ends(tmp_path):
    """Micro-batches of others are never read, so their documents may be missing."""
    piece, ready = Piece(Document("gone", tmp_path / "gone", 0, 8), 0, 9), []
    batches = [MicroBatch.of([piece], Packing(16, 16, 16), Position(0, number)) for number in range(8)]
    steps = data.steps(iter(batches), 4, slice(1, None, 2), ready.append, lambda: len(ready) == 3)
    assert list(steps) == [batches[:4], batches[4:]]
    assert [batch.after.batch for batch in ready] == [1, 3, 5]
    with pytest.raises(FileNotFoundError):
        list(data.steps(iter(batches), 4, slice(1, None, 2)))

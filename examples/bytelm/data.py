"""Documents, their packing into micro-batches, and the thread that prepares the next one.

A document of n bytes has n + 1 targets: its bytes and the end-of-document token, EOD. Targets in the prompt of a
Dialogue do not count. Packing needs only lengths, so a run can resume in the middle of an epoch without reading earlier
documents.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from sizes import EOD

import thdattn
from thdattn.packing import first_fit, schedule

T = TypeVar("T")

NOT_COUNTED = -1  # target of a padding row, and of a prompt
VALIDATION_SHARE = 0.05  # part of the documents
NO_DOCUMENTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Document:
    """Bytes [begin, end) of a file; the name is the path below the folder, the same on every machine."""

    name: str
    path: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the text."""
        return self.end - self.begin

    @property
    def first_counted(self) -> int:
        """Index of the first target that counts."""
        return 0

    @property
    def num_targets(self) -> int:
        """Targets: the bytes and EOD."""
        return self.num_bytes + 1

    def tokens(self, begin: int, end: int) -> NDArray[np.int32]:
        """Read tokens [begin, end) of the sequence EOD, bytes, EOD from the file.

        Raises:
            ValueError: the file has changed since the program started.
        """
        last = self.num_targets
        first_byte, end_byte = max(begin - 1, 0), min(end, last) - 1
        content = self._content(first_byte, max(end_byte, first_byte))
        tokens = np.frombuffer(content, np.uint8).astype(np.int32)
        return np.pad(tokens, (int(begin == 0), int(end > last)), constant_values=EOD)

    def _content(self, begin: int, end: int) -> bytes:
        """Read bytes [begin, end) of the text."""
        with self.path.open("rb") as file:
            file.seek(self.begin + begin)
            content = file.read(end - begin)
        if len(content) < end - begin:
            raise ValueError(
                f"{self.path} ends at byte {self.begin + begin + len(content)}, wanted {self.end} bytes as when "
                f"the program started; leave the documents alone while it runs, or start it again"
            )
        return content


@dataclass(frozen=True)
class Dialogue(Document):
    """Line of a JSON Lines file, {"prompt": ..., "answer": ...}: the text is both, and targets of the answer count.

    The model reads the prompt, and is not trained to write it. The EOD of the answer counts. Texts are encoded as
    UTF-8.

    prompt_bytes, answer_bytes: their lengths.
    """

    prompt_bytes: int
    answer_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.prompt_bytes + self.answer_bytes

    @property
    def first_counted(self) -> int:
        return self.prompt_bytes

    def _content(self, begin: int, end: int) -> bytes:
        line = super()._content(0, self.end - self.begin)
        try:
            prompt, answer = _prompt_and_answer(line)
            same = (len(prompt), len(answer)) == (self.prompt_bytes, self.answer_bytes)
        except ValueError:
            same = False
        if not same:
            raise ValueError(
                f"{self.name} is {line[:40]!r}, wanted a prompt of {self.prompt_bytes} bytes and an answer of "
                f"{self.answer_bytes} as when the program started; leave the documents alone while it runs, or start "
                f"it again"
            )
        return (prompt + answer)[begin:end]


def _prompt_and_answer(line: bytes) -> tuple[bytes, bytes]:
    """Read a line of JSON; ValueError says what it is instead."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    if found.keys() != {"prompt", "answer"}:
        raise ValueError(f"its keys are {', '.join(map(repr, found)) or 'none'}")
    if not all(isinstance(text, str) for text in found.values()):
        raise ValueError("its texts are no strings")
    return found["prompt"].encode(), found["answer"].encode()


class Piece(NamedTuple):
    """Targets [begin, end) of a document: the whole document unless it is too long."""

    document: Document
    begin: int
    end: int

    @property
    def num_counted(self) -> int:
        """Targets that count, EOD included."""
        return max(0, self.end - max(self.begin, self.document.first_counted))

    @property
    def num_counted_bytes(self) -> int:
        """Targets that count, without EOD."""
        return self.num_counted - (self.end == self.document.num_targets)


class Position(NamedTuple):
    """Position in the data: the micro-batch of this number in this epoch comes next."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class MicroBatch:
    """Documents of one forward and backward, of all ranks that share it.

    Lengths are known at once. Documents are read on first use of tokens or targets: every rank needs the lengths of all
    micro-batches, and the tokens of some.

    pieces: of documents, one per sequence.
    batch: their lengths.
    after: the position after this micro-batch.
    """

    pieces: Sequence[Piece]
    batch: thdattn.PackedBatch
    after: Position

    @classmethod
    def of(cls, pieces: Sequence[Piece], packing: Packing, after: Position) -> MicroBatch:
        """Return the micro-batch of these pieces."""
        fitted = thdattn.PackedBatch.from_lengths([piece.end - piece.begin for piece in pieces], packing.multiple)
        batch = thdattn.PackedBatch(fitted.cu_seqlens, fitted.cu_seqlens_padded, total_rows=packing.rows)
        return cls(pieces, batch, after)

    def read(self) -> MicroBatch:
        """Read the documents now.

        Raises:
            ValueError: a file is shorter than it was.
        """
        _ = self._rows
        return self

    @cached_property
    def _rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        texts = [piece.document.tokens(piece.begin, piece.end + 1) for piece in self.pieces]
        targets = [text[1:].copy() for text in texts]
        for piece, target in zip(self.pieces, targets, strict=True):
            target[: len(target) - piece.num_counted] = NOT_COUNTED
        return self.batch.pack([text[:-1] for text in texts]), self.batch.pack(targets, fill=NOT_COUNTED)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens (total_rows,) in sequence order."""
        return self._rows[0]

    @property
    def targets(self) -> NDArray[np.int32]:
        """Targets (total_rows,) in sequence order; NOT_COUNTED on padding and for targets of a prompt."""
        return self._rows[1]

    @property
    def num_targets(self) -> int:
        """Targets that count, EOD included."""
        return sum(piece.num_counted for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Targets that count, without EOD."""
        return sum(piece.num_counted_bytes for piece in self.pieces)

    def local(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (tokens, targets) of a rank with these Sharding.rows; fillers (-1) and rows beyond do not count."""
        rows = np.where(rows < len(self.tokens), rows, -1)
        return np.append(self.tokens, np.int32(0))[rows], np.append(self.targets, np.int32(NOT_COUNTED))[rows]


@dataclass(frozen=True)
class Packing:
    """Sizes by which documents become micro-batches.

    rows: of every micro-batch, so that buffers have one size.
    multiple: every piece is padded to a multiple of this.
    longest: most targets of a piece; longer documents are split.
    """

    rows: int
    multiple: int
    longest: int

    @classmethod
    def of(cls, tokens: int, cp_size: int, sharding: str, longest: int | None = None) -> Packing:
        """Return the packing for a budget of tokens per micro-batch; without `longest`, pieces are as long as the
        budget allows.

        dual_chunk needs multiples of 2 * cp_size. 16 is one for 1, 2, 4 and 8 ranks, which therefore make the same
        batches and train the same model.

        Raises:
            ValueError: a budget or a length that is too small.
        """
        multiple = math.lcm(16, 2 * cp_size) if sharding == "dual_chunk" else 1
        if tokens < max(multiple, 2):
            raise ValueError(
                f"tokens is {tokens}, wanted at least {max(multiple, 2)} per micro-batch for {cp_size} ranks with "
                f"sharding {sharding!r}; pass --tokens {max(multiple, 2)} or more"
            )
        if longest is not None and longest < 1:
            raise ValueError(f"longest is {longest}, wanted at least 1; pass --longest 1 or more, or leave it out")
        room = tokens // multiple * multiple
        return cls(tokens, multiple, min(room, longest or room))

    def padded(self, length: int) -> int:
        """Return the rows of a piece with so many targets."""
        return -(-length // self.multiple) * self.multiple


def find_documents(folder: Path | None = None) -> list[Document]:
    """Return all documents, sorted by name: the source files of Python's standard library, or all files of a folder.

    For a folder these are its readable regular files and those of its subfolders, except empty and hidden ones. A
    single file is cut in two, one for training and one for validation.

    Raises:
        ValueError: the folder does not exist, or holds no document.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    documents = [Document(name, path, 0, path.stat().st_size)
                 for name, path in (_files(root, "*") if folder else _files(root, "*.py", of_python=True))]
    if len(documents) == 1 and documents[0].end > 1:
        (whole,) = documents
        cut = max(1, round((1 - VALIDATION_SHARE) * whole.end))
        documents = [replace(whole, name=f"{whole.name}:0", end=cut), replace(whole, name=f"{whole.name}:1", begin=cut)]
    if len(documents) < 2:
        raise ValueError(
            f"--data is {root}, which holds {len(documents)} readable files that are not empty or hidden, wanted one "
            f"of 2 bytes or more; pass a folder with files to train on"
        )
    return documents


def _files(root: Path, pattern: str, of_python: bool = False) -> list[tuple[str, Path]]:
    """Return (name, path) of a folder's readable files, sorted, without empty and hidden ones or Python's own tests."""
    if not root.is_dir():
        raise ValueError(f"--data is {root}, wanted a folder that exists; pass one with files to train on")
    files = []
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        unwanted = bool(NO_DOCUMENTS.intersection(parts)) if of_python else hidden
        if not unwanted and path.is_file() and os.access(path, os.R_OK) and path.stat().st_size:
            files.append(("/".join(parts), path))
    return sorted(files)


def find_dialogues(folder: Path) -> list[Dialogue]:
    """Return every line of the .jsonl files of a folder, sorted by file name and line; blank lines are skipped.

    Raises:
        ValueError: the folder does not exist, a line is no dialogue, or there are fewer than two.
    """
    dialogues = []
    for name, path in _files(folder, "*.jsonl"):
        with path.open("rb") as file:
            end = 0
            for number, line in enumerate(file, 1):
                begin, end = end, end + len(line)
                if line.strip():
                    dialogues.append(_dialogue(f"{name}:{number}", path, begin, line))
    if len(dialogues) < 2:
        raise ValueError(f"--data is {folder}, whose .jsonl files hold {len(dialogues)} lines, wanted two or more with "
                         f"--mask-prompt; pass a folder with prompts and answers, or leave --mask-prompt out")
    return dialogues


def _dialogue(name: str, path: Path, begin: int, line: bytes) -> Dialogue:
    try:
        prompt, answer = _prompt_and_answer(line)
    except ValueError as error:
        raise ValueError(f'{path}, line {name.rpartition(":")[2]}, is {line[:40]!r}, wanted {{"prompt": "...", '
                         f'"answer": "..."}} ({error}); mend it, or leave --mask-prompt out') from error
    return Dialogue(name, path, begin, begin + len(line), len(prompt), len(answer))


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents into (training, validation) by the hashes of their names, so that other files do not move them.
    """
    by_hash = sorted(documents, key=lambda document: _hash(document.name))
    held_back = max(1, round(VALIDATION_SHARE * len(documents)))
    training = sorted(by_hash[held_back:], key=lambda document: document.name)
    return training, by_hash[:held_back]


def fingerprint(documents: Iterable[Document]) -> int:
    """Return a number that depends on the names and sizes of documents and prompts."""
    known = "\n".join(f"{document.name} {document.begin} {document.end}" + f" {document.first_counted}" * (
        document.first_counted > 0) for document in documents)
    return int.from_bytes(_hash(known)[:7], "little")


def _hash(names: str) -> bytes:
    """Hash names of files, which are bytes of any encoding as Python decodes them."""
    return hashlib.sha256(names.encode(errors="surrogateescape")).digest()


def pieces_of(documents: Iterable[Document], longest: int) -> Iterator[Piece]:
    """Yield pieces that contain every target exactly once; longer documents are split."""
    for document in documents:
        for begin in range(0, document.num_targets, longest):
            yield Piece(document, begin, min(begin + longest, document.num_targets))


def pack(pieces: Iterable[Piece], packing: Packing) -> Iterator[list[Piece]]:
    """Yield the pieces of every micro-batch: first fit among those that wait, then among those to come."""
    room = packing.rows // packing.multiple * packing.multiple
    return first_fit(pieces, lambda piece: packing.padded(piece.end - piece.begin), room)


def validation_batches(documents: Iterable[Document], packing: Packing, num_bytes: int) -> list[MicroBatch]:
    """Return fixed random pieces of the documents with about num_bytes targets that count, or all of them."""
    pieces = list(pieces_of(documents, packing.longest))
    order = np.random.default_rng(0).permutation(len(pieces))
    ends = np.cumsum([pieces[i].num_counted for i in order])
    chosen = [pieces[i] for i in order[: np.searchsorted(ends, num_bytes) + 1]]
    return [MicroBatch.of(batch, packing, Position(0, 0)).read() for batch in pack(chosen, packing)]


def micro_batches(
    documents: Sequence[Document], packing: Packing, seed: int, position: Position
) -> Iterator[MicroBatch]:
    """Yield micro-batches without end from a position on, every epoch in an order of its own."""
    epoch, first = position
    pieces = list(pieces_of(documents, packing.longest))
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(pieces))
        packed = pack((pieces[i] for i in order), packing)
        for number, chosen in enumerate(islice(packed, first, None), first):
            yield MicroBatch.of(chosen, packing, Position(epoch, number + 1))
        epoch, first = epoch + 1, 0


def balance_groups(
    batches: Iterator[MicroBatch], packing: Packing, work: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    groups: int, accumulate: int,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of the same documents in every step, dealt such that all groups have equal work.

    A step keeps its micro-batches where its documents would leave one empty, or would not fit.

    Args:
        work: returns the time of documents of some lengths, in any unit.
        groups: groups of ranks, which take turns.
        accumulate: micro-batches of a group per step.
    """
    for step in chunks(batches, groups * accumulate):
        pieces = [piece for batch in step for piece in batch.pieces]
        lengths = np.array([piece.end - piece.begin for piece in pieces], np.int64)
        try:
            dealt = schedule(lengths, groups, packing.rows, accumulate, work(lengths), packing.multiple)
        except ValueError:
            dealt = []
        chosen = [each for turn in zip(*dealt, strict=True) for each in turn]
        if len(step) < groups * accumulate or not chosen or not all(chosen):
            yield from step
            continue
        for batch, indices in zip(step, chosen, strict=True):
            yield MicroBatch.of([pieces[index] for index in indices], packing, batch.after)


def chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last may be shorter."""
    while group := list(islice(items, size)):
        yield group


def steps(
    batches: Iterator[MicroBatch], size: int, mine: slice, prepare: Callable[[MicroBatch], object] = MicroBatch.read,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[list[MicroBatch]]:
    """Yield the `size` micro-batches of every step; those of this rank's group, `mine`, are prepared, or only read.

    Once stopped() is True, they come unprepared, as the run ends without them.
    """
    for step in chunks(batches, size):
        for batch in step[mine]:
            if not stopped():
                prepare(batch)
        yield step


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield the items; a thread makes the next one while the caller works.

    The caller gets an error of the thread. Close the iterator (contextlib.closing) to end the thread.
    """
    end = object()
    with ThreadPoolExecutor(1, "data") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item  # type: ignore[misc]  # cannot be `end`

"""Agreement: all ranks answer a question alike, or all raise and learn which field differs on which rank.

Every question is a ballot of one form, so ranks also notice that they ask different questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import as_int

Fields = Mapping[str, Any]  # name: number, text, tuple of these, or NumPy array
GatherValues = Callable[[Any], Sequence[Any]]

_NUMBER = ""  # the name of the only field of a plain number


class Ballot(NamedTuple):
    """Vote of one rank in an agreement.

    question: the name of what ranks agree on.
    refusal: why this rank cannot go on; "": it can.
    """

    question: str
    digest: bytes
    refusal: str


def settle(gather_values: GatherValues, question: str, answer: int | Fields, refusal: str, remedy: str) -> None:
    """Return if every rank asks this question, gives the same answer and refuses nothing; else raise on every rank.

    Ranks exchange digests. Only where these differ they exchange the answers, for the message.

    Raises:
        TypeError: answer is neither an integer nor a mapping.
        ValueError: on every rank, with all refusals; or with the questions, or the fields, that differ.
    """
    fields = answer if isinstance(answer, Mapping) else {_NUMBER: _as_number(answer)}
    ballots = [_as_ballot(each) for each in gather_values(Ballot(question, _digest(fields), refusal))]
    questions = [ballot.question for ballot in ballots]
    if len(set(questions)) > 1:
        calls = "; ".join(f"rank {rank}: {question}" for rank, question in enumerate(questions))
        raise ValueError(f"ranks make different calls: {calls}; wanted the same calls in the same order on every rank; "
                         f"look for what one of them leaves out")
    if any(ballot.refusal for ballot in ballots):
        raise ValueError("; ".join(f"rank {rank}: {each.refusal}" for rank, each in enumerate(ballots) if each.refusal))
    if len({ballot.digest for ballot in ballots}) > 1:
        raise ValueError(f"{question} is not the same on all ranks: {_differences(gather_values(fields))}; {remedy}")


def _differences(answers: Sequence[Fields]) -> str:
    """Name the fields that differ, with what each rank has."""
    first = answers[0]
    names = dict.fromkeys(name for answer in answers for name in answer)
    differing = [name for name in names
                 if len({_digest({name: answer.get(name)}) for answer in answers}) > 1]
    return "; ".join(_difference(name, [answer.get(name) for answer in answers]) if name != _NUMBER else
                     f"rank 0 has {first[name]}, but " + ", ".join(
                         f"rank {rank} has {answer[name]}" for rank, answer in enumerate(answers)
                         if answer[name] != first[name]) for name in differing)


def _difference(name: str, values: Sequence[Any]) -> str:
    """Word one field: its values, or for arrays the length or the first entry that differs."""
    if all(isinstance(value, np.ndarray) and value.ndim == 1 for value in values):
        shortest = min(len(value) for value in values)
        same = np.all([value[:shortest] == values[0][:shortest] for value in values], axis=0)
        at = int(np.argmin(same)) if not same.all() else -1
        name, values = ((f"{name}[{at}]", [value[at].item() for value in values]) if at >= 0 else
                        (f"the length of {name}", [len(value) for value in values]))
    return f"{name} is {_by_value(values)}"


def _by_value(values: Sequence[Any]) -> str:
    """List every value once, with the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(str(rank))
    return ", ".join(f"{value} (rank{'s' * (len(of) > 1)} {', '.join(of)})" for value, of in ranks.items())


def _as_ballot(value: Any) -> Ballot:
    """Return a rank's value as a ballot; a rank in another kind of call sends something else."""
    return value if isinstance(value, Ballot) else Ballot("another call", b"", "")


def _as_number(value: Any) -> int:
    return int(value) if isinstance(value, (bool, np.bool_)) else as_int("value", value)


def _digest(fields: Fields) -> bytes:
    digest = hashlib.sha256()
    for name, value in fields.items():
        digest.update(f"{name}={value.dtype}{value.shape}".encode() + value.tobytes() if isinstance(value, np.ndarray)
                      else f"{name}={value!r}".encode())
        digest.update(b"\0")
    return digest.digest()

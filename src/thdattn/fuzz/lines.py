"""Cases and rounds as one line of words, name=value, which a soak prints and --case reads."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import groupby
from typing import Any, ClassVar, TypeVar

WANTED = {"bool": "yes or no", "tuple": "whole numbers with commas between", "int": "a whole number",
          "float": "a number", "str": "text"}
Self = TypeVar("Self", bound="Line")


class Line:
    """Dataclass that is written as one line. Every field has a default, and its type is that of the default.

    names_all: True if `words` names all fields; else those that differ from the defaults.
    """

    names_all: ClassVar[bool] = False

    def words(self) -> str:
        """Return the line, which `from_words` reads."""
        found = [(each, getattr(self, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        return " ".join(f"{each.name}={_text(x)}" for each, x in found if self.names_all or x != each.default)

    @classmethod
    def from_words(cls: type[Self], line: str) -> Self:
        """Read a line.

        Raises:
            ValueError: a word is no name=value of a field.
        """
        defaults = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for word in line.split():
            name, _, text = word.partition("=")
            if name not in defaults:
                raise ValueError(f"--case has the word {word!r}, wanted name=value with a name of "
                                 f"{', '.join(defaults)}; pass a line that fuzz printed")
            values[name] = _value(name, text, type(defaults[name]))
        return cls(**values)


def _text(value: Any) -> str:
    """Write a value as `_value` reads it; lengths that repeat as 3x40."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    runs = [(number, len(list(same))) for number, same in groupby(value)]
    return ",".join(f"{count}x{number}" if count > 2 else ",".join([str(number)] * count) for number, count in runs)


def _value(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"yes": True, "no": False}[text]
        return _numbers(text) if kind is tuple else kind(text)
    except (KeyError, ValueError):
        wanted = WANTED[kind.__name__]
        raise ValueError(f"--case has {name}={text}, wanted {wanted}; pass a line that fuzz printed") from None


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(?:(\d{1,6})x)?(-?\d{1,9})", part)
        if found is None:
            raise ValueError(part)
        numbers += int(found[1] or 1) * [int(found[2])]
    return tuple(numbers)

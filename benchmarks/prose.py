"""Sentences, tables and links of the pages that say what was measured, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def prose(text: str) -> str:
    """Lines as long as the page's."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def linked(path: Path) -> str:
    """A file of results, as benchmarks/README.md links to it."""
    return f"{path.parent.name}/{path.name}"

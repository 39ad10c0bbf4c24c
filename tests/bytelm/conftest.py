"""Fixtures of the language model's tests, which import the example's modules by name, as its programs do."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

WORDS = ["return", "the", "sum", "of", "all", "rows", "and", "keep", "what", "a", "rank", "sends", "next"]


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """Write a folder of 30 small documents of lines that repeat, the same with every Python."""
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for i in range(30):
        lines = [" ".join(rng.choice(WORDS, 6)) for _ in range(2 + 2 * i)]
        (folder / f"{i}.py").write_text("\n".join(lines)[: 40 + 50 * i])
    return folder


@pytest.fixture(scope="session")
def dialogues(tmp_path_factory):
    """Write a folder of prompts and answers of many lengths."""
    from texts import write_dialogues

    texts = [("p" * prompt, "a" * answer) for prompt, answer in np.random.default_rng(0).integers(1, 120, (200, 2))]
    return write_dialogues(tmp_path_factory.mktemp("texts"), texts)


@pytest.fixture(scope="session")
def batches(documents, dialogues):
    """Pack micro-batches, once: (name, engine) -> more of more tokens for a GPU than for NumPy.

    The name is that of a sharding with its lengths, of which contiguous takes lengths of every kind, or "prompts".
    """
    import data
    import runs

    @cache
    def packed(name, engine="reference"):
        sizes = (200, 512) if engine == "cuda" else (12, 256)
        if name == "prompts":
            return runs.batches(dialogues, *sizes, find=data.find_dialogues)
        return runs.batches(documents, *sizes, sharding=name)

    return packed


@pytest.fixture(scope="session")
def eager(batches):
    """Run a layout without graphs, once: (layout, accumulate, micro-batches) -> the Run of every rank."""
    import runs

    def ran(layout, accumulate=4, name=None, num_batches=12, engine="reference"):
        training = batches(name or layout.rule, engine)[:num_batches]
        return runs.outcome(layout, training, accumulate, engine)

    return cache(ran)

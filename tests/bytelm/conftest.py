"""Fixtures of the language model's tests, which import the example's modules by name, as its programs do."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "bytelm"), str(EXAMPLES)]


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """Write a folder of 30 small documents."""
    import data

    folder = tmp_path_factory.mktemp("documents")
    for i, document in enumerate(data.find_documents()[:30]):
        (folder / f"{i}.py").write_bytes(document.path.read_bytes()[: 40 + 50 * i])
    return folder


@pytest.fixture(scope="session")
def batches(documents):
    """Pack 12 micro-batches by the lengths that each sharding needs; contiguous takes lengths of every kind."""
    import runs

    return {sharding: runs.batches(documents, 12, sharding=sharding) for sharding in ("dual_chunk", "contiguous")}


@pytest.fixture(scope="session")
def eager(batches):
    """Run a layout without graphs, once: (layout, accumulate) -> the Run of every rank."""
    import runs

    return cache(lambda layout, accumulate=4: runs.outcome(layout, batches[layout.rule], accumulate))

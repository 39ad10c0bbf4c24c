"""The example's modules are imported by name, as its programs do: its folders go on the path, here alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "bytelm"), str(EXAMPLES)]


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A folder of 30 small documents."""
    import data

    folder = tmp_path_factory.mktemp("documents")
    for i, document in enumerate(data.find_documents()[:30]):
        (folder / f"{i}.py").write_bytes(document.path.read_bytes()[: 40 + 50 * i])
    return folder

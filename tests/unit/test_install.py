"""Remedies are commands that work: in a clone, and wherever else pip installed the package from."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
from launch import SOURCE

from thdattn import install

ROOT = SOURCE.parent


def test_a_clone_is_installed_with_the_extra_from_any_directory(monkeypatch):
    monkeypatch.setattr(install, "FOLDER", SOURCE / "thdattn")
    assert install.remedy("cuda13") == f'pip install -e "{ROOT}[cuda13]"'


ORIGINS = {
    "a-folder": ({"url": "file:///home/me/clone", "dir_info": {}}, "thdattn[mpich] @ file:///home/me/clone"),
    "git": ({"url": "https://host/thdattn.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "thdattn[mpich] @ git+https://host/thdattn.git@abc"),
    "an-index": (None, "thdattn[mpich]"),
}  # fmt: skip


@pytest.mark.parametrize(("kept", "wanted"), ORIGINS.values(), ids=ORIGINS)
def test_elsewhere_it_comes_from_where_the_package_came_from(kept, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "FOLDER", tmp_path / "site-packages" / "thdattn")
    distribution = SimpleNamespace(read_text=lambda name: kept and json.dumps(kept))
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    assert install.remedy("mpich") == f'pip install "{wanted}"'


def test_a_copy_that_pip_knows_nothing_of_has_a_remedy_too(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(install, "FOLDER", tmp_path / "thdattn")
    monkeypatch.setattr(metadata, "distribution", missing)
    assert install.remedy("mpi") == 'pip install "thdattn[mpi]"'

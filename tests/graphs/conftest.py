"""Graphs of one rank, on a fake CuPy."""

import fake_cupy
import pytest

import thdattn


@pytest.fixture
def comm():
    with thdattn.comm.init("single") as comm:
        yield comm


@pytest.fixture
def active(monkeypatch, comm):
    """Make active graphs of a configuration."""
    return fake_cupy.graphs(monkeypatch, comm)

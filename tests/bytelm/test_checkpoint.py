"""Checkpoints come back bit for bit, and a crash while one is written costs nothing."""

from __future__ import annotations

import checkpoint
import numpy as np
import pytest
from checkpoint import NAME, Checkpoint
from data import Position
from sizes import SIZES


def made(step=3):
    rng = np.random.default_rng(step)
    weights, mean, square = rng.standard_normal((3, 50)).astype(np.float32)
    weights[:3] = np.nan, -0.0, np.float32(1e-45)
    settings = {"seed": 1, "tokens": 64, "lr": 0.1, "data": None}
    optimizer = {"mean": mean, "square": square, "step": np.array(step)}
    return Checkpoint(SIZES["tiny-hybrid"], step, Position(2, 7), settings, weights, optimizer)


def assert_same(one, other):
    for name in ("config", "step", "position", "settings"):
        assert getattr(one, name) == getattr(other, name)
    for x, y in ((one.weights, other.weights), *((x, other.optimizer[name]) for name, x in one.optimizer.items())):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    assert one.optimizer.keys() == other.optimizer.keys()


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path / "new" / "folder", made())
    assert_same(checkpoint.load(tmp_path / "new" / "folder"), made())


@pytest.mark.parametrize("broken", ["numpy.savez", "os.fsync", "pathlib.Path.replace"])
def test_a_crash_while_writing_leaves_the_older_one_which_the_newer_replaces(tmp_path, monkeypatch, broken):
    checkpoint.save(tmp_path, made(1))

    def fail(*args, **kwargs):
        if broken == "numpy.savez":
            args[0].write(b"half of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save(tmp_path, made(2))
    assert_same(checkpoint.load(tmp_path), made(1))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    checkpoint.save(tmp_path, made(2))
    assert_same(checkpoint.load(tmp_path), made(2))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("spoil", ["truncate", "other", "empty", "version", "encrypted"])
def test_a_missing_checkpoint_and_a_file_that_is_none_are_named(tmp_path, spoil):
    with pytest.raises(ValueError, match=f"{NAME} does not exist, wanted a checkpoint; train with --checkpoint"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, made())
    path = tmp_path / NAME
    if spoil == "truncate":
        path.write_bytes(path.read_bytes()[:-100])
    elif spoil == "other":
        np.savez(path, weights=np.zeros(3))
    elif spoil == "empty":
        path.write_bytes(b"")
    else:  # a byte of the zip's directory: which version of zip can read the first file, and how it is packed
        content = bytearray(path.read_bytes())
        content[content.index(b"PK\x01\x02") + {"version": 6, "encrypted": 8}[spoil]] = 0xFF
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read .*wanted a checkpoint"):
        checkpoint.load(tmp_path)

"""Disk cache of kernels: what it refuses to read, where it is, and that failures leave nothing behind. No NVRTC."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch import SOURCE

from thdattn.jit import cache as kernel_cache

NAME, CONTENT = "a.cubin", b"lowered\0" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def nothing_was_said_before():
    kernel_cache._warn.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("THDATTN_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def filled(cache):
    kernel_cache.write(NAME, CONTENT)
    assert kernel_cache.read(NAME) == CONTENT
    return cache


def give_away(path, monkeypatch):
    """Make path belong to another user: by chown if the tests run as root, else by changing who asks."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def test_what_was_written_is_read_and_nobody_else_can_change_it(filled):
    assert [path.name for path in filled.iterdir()] == [NAME]
    assert stat.S_IMODE(filled.stat().st_mode) == 0o700
    assert stat.S_IMODE((filled / NAME).stat().st_mode) == 0o600
    assert kernel_cache.read("b.cubin") is None


@pytest.mark.parametrize("damage", [
    lambda whole: b"", lambda whole: whole[:20], lambda whole: whole[:-1], lambda whole: whole[:500] + whole[501:],
    lambda whole: CONTENT, lambda whole: b"\xff" * 64,
], ids=["empty", "half-a-digest", "truncated", "a-byte-lost", "no-digest", "not-ours"])
def test_damaged_file_is_no_kernel_and_is_deleted(damage, filled, caplog):
    path = filled / NAME
    path.write_bytes(damage(path.read_bytes()))
    assert kernel_cache.read(NAME) is None
    assert not path.exists()
    assert "a.cubin of the kernel cache is deleted: it is damaged" in caplog.text


def test_kernel_under_the_name_of_another_is_no_kernel(filled):
    (filled / NAME).rename(filled / "b.cubin")
    assert kernel_cache.read("b.cubin") is None


@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_file_that_others_may_write_to_is_deleted(bits, filled, caplog):
    (filled / NAME).chmod(0o600 | bits)
    assert kernel_cache.read(NAME) is None
    assert not (filled / NAME).exists()
    assert f"its mode {0o600 | bits:04o} lets others write to it" in caplog.text


@pytest.mark.parametrize("bits", [0o020, 0o002, 0o1077])
def test_folder_that_others_may_write_to_is_neither_read_nor_written(bits, filled, caplog):
    filled.chmod(0o700 | bits)
    assert kernel_cache.read(NAME) is None
    kernel_cache.write("b.cubin", CONTENT)
    assert [path.name for path in filled.iterdir()] == [NAME]
    (record,) = caplog.records  # one for reading and writing, not one a kernel
    why = f"its mode {0o700 | bits:04o} lets others write to it: chmod go-w"
    assert f"{filled} cannot be used ({why})" in record.getMessage() and "THDATTN_CACHE_DIR" in record.getMessage()
    filled.chmod(0o700)
    assert kernel_cache.read(NAME) == CONTENT, "the remedy is one"


@pytest.mark.parametrize("shared", [0o755, 0o750])
def test_folder_that_others_may_read_is_used(shared, filled):
    filled.chmod(shared)
    assert kernel_cache.read(NAME) == CONTENT


def test_folder_of_somebody_else_is_neither_read_nor_written(filled, monkeypatch, caplog):
    give_away(filled, monkeypatch)
    assert kernel_cache.read(NAME) is None
    kernel_cache.write("b.cubin", CONTENT)
    assert [path.name for path in filled.iterdir()] == [NAME]
    assert "not to you" in caplog.text


def test_folder_of_root_is_read_by_everybody(filled, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a folder of root")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert kernel_cache.read(NAME) == CONTENT


def test_own_link_is_followed_and_that_of_somebody_else_is_not(filled, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(filled)
    monkeypatch.setenv("THDATTN_CACHE_DIR", str(link))
    assert kernel_cache.read(NAME) == CONTENT
    give_away(link, monkeypatch)
    assert kernel_cache.read(NAME) is None


FULL_DISK = """
import logging, resource, sys
from thdattn.jit import cache as kernel_cache
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
kernel_cache.write("a.cubin", bytes(5000))
"""


def test_disk_that_is_full_is_a_warning_and_leaves_no_file(cache):
    run = subprocess.run([sys.executable, "-c", FULL_DISK], env={**os.environ, "PYTHONPATH": str(SOURCE)},
                         capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert f"the kernel cache {cache} cannot be used (File too large)" in run.stderr
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_failure_at_any_step_leaves_no_file(failing, error, cache, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(os, failing, fail)
    if isinstance(error, OSError):
        kernel_cache.write(NAME, CONTENT)
    else:
        with pytest.raises(KeyboardInterrupt):
            kernel_cache.write(NAME, CONTENT)
    assert list(cache.iterdir()) == []


def test_file_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    steps = []
    for step in ("fsync", "replace"):
        call = getattr(os, step)
        monkeypatch.setattr(os, step, lambda *a, step=step, call=call, **o: (steps.append(step), call(*a, **o))[1])
    kernel_cache.write(NAME, CONTENT)
    assert steps == ["fsync", "replace"]


def blocked_by_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


@pytest.mark.parametrize("place", [lambda _: Path("/proc/thdattn"), blocked_by_a_file], ids=["read-only", "a-file"])
def test_cache_that_cannot_be_written_is_one_warning(place, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("THDATTN_CACHE_DIR", str(place(tmp_path)))
    with caplog.at_level(logging.WARNING, "thdattn"):
        for name in ("a.cubin", "b.cubin"):
            kernel_cache.write(name, CONTENT)
    (record,) = caplog.records
    assert "cannot be used" in record.getMessage() and "THDATTN_CACHE_DIR" in record.getMessage()


def test_cache_is_in_the_users_cache_directory_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv("THDATTN_CACHE_DIR", "/a/b")
    assert kernel_cache.cache_dir() == Path("/a/b")
    monkeypatch.delenv("THDATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert kernel_cache.cache_dir() == Path("/c/thdattn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/d")
    assert kernel_cache.cache_dir() == Path("/d/.cache/thdattn")
    monkeypatch.setenv("THDATTN_CACHE_DIR", "~/kernels")
    assert kernel_cache.cache_dir() == Path("/d/kernels")


def test_user_without_a_home_has_a_private_cache_among_the_temporary_files(tmp_path, monkeypatch):
    def unknown(uid):
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("THDATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = tmp_path / f"thdattn-{os.geteuid()}"
    assert kernel_cache.cache_dir() == directory
    kernel_cache.write(NAME, CONTENT)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert kernel_cache.read(NAME) == CONTENT

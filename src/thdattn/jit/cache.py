"""Disk cache of compiled kernels, which verifies what it reads.

A kernel is code that runs with the rights of the process. So the cache has the trust rule of ssh. The folder, a
symbolic link in its place, and the files must belong to the user or to root. Neither group nor others may write to
them. A folder that breaks this rule is not used, and a warning says why and what to do.

The members of a group can therefore read a common cache, but not fill it. Root fills it
(THDATTN_CACHE_DIR=/opt/kernels) and opens it for reading (chmod -R a+rX). A kernel that is missing there is compiled in
every process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("thdattn")

DIGEST_BYTES = hashlib.sha256().digest_size


def cache_dir() -> Path:
    """Return the folder of the cache: $THDATTN_CACHE_DIR, else thdattn/ in the user's cache directory.

    A user may have no home: no $HOME and no passwd entry, as in a container under a foreign uid. He gets a directory of
    his own among the temporary ones.
    """
    chosen = os.environ.get("THDATTN_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen))
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if caches.startswith("~"):  # expanduser knows of no home
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"thdattn-{os.geteuid()}"
    return Path(caches) / "thdattn"


def read(name: str) -> bytes | None:
    """Return the content that `write` stored under this name, or None.

    A file is deleted if it is damaged, or if somebody else made it or may write to it.
    """
    try:
        with folder() as descriptor:
            return _verified(name, descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(cache_dir(), error.strerror or str(error))
        return None


def write(name: str, content: bytes) -> None:
    """Store content under a file name, or warn.

    Many ranks may write at once. Each writes a file of its own and renames it, so no reader sees half a file, not even
    after a crash of the machine.
    """
    temporary = f".{name}.{secrets.token_hex(8)}"
    try:
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder() as descriptor:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=descriptor), "wb") as file:
                    file.write(_digest(name, content) + content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=descriptor)
                raise
    except OSError as error:
        _warn(cache_dir(), error.strerror or str(error))


@contextlib.contextmanager
def folder() -> Iterator[int]:
    """Open the cache's folder and check it. Files are opened through the descriptor, so nobody can replace the folder.

    Raises:
        FileNotFoundError: the folder does not exist yet.
        PermissionError: others own it or may write to it.
    """
    path = cache_dir()
    link = os.lstat(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        why = _foreign(os.fstat(descriptor))
        if stat.S_ISLNK(link.st_mode):  # everybody has all rights on a link: only its owner matters
            why = _foreign(link, may_write=0) or why
        if why:
            raise PermissionError(why)
        yield descriptor
    finally:
        os.close(descriptor)


def _foreign(found: os.stat_result, may_write: int = stat.S_IWGRP | stat.S_IWOTH) -> str:
    """Say who but the user and root can put code there; empty if nobody."""
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to uid {found.st_uid}, not to you (uid {os.geteuid()}) or root"
    if found.st_mode & may_write:
        return f"its mode {stat.S_IMODE(found.st_mode):04o} lets others write to it: chmod go-w"
    return ""


def _verified(name: str, descriptor: int) -> bytes | None:
    with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=descriptor), "rb") as file:
        why = _foreign(os.fstat(file.fileno()))
        digest, content = file.read(DIGEST_BYTES), file.read()
    if not why and digest == _digest(name, content):
        return content
    log.warning("%s of the kernel cache is deleted: %s", name, why or "it is damaged")
    os.unlink(name, dir_fd=descriptor)
    return None


def _digest(name: str, content: bytes) -> bytes:
    """Digest name and content: a file of another kernel is as wrong as half of the right one."""
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


@functools.cache  # once, not for every kernel
def _warn(path: Path, why: str) -> None:
    log.warning("the kernel cache %s cannot be used (%s), so every process compiles its kernels again; remedy that, or "
                "set THDATTN_CACHE_DIR to a directory of your own", path, why)

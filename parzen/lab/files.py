"""Writing files that are whole or not there."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
from pathlib import Path
from typing import IO, Any

from parzen.lab.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside ``path`` and renames, so that nobody ever reads half a file.

    Raises:
        UserError: no permission, a full disk, a folder that cannot be made.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(data)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        advice = "free some space or choose" if error.errno in FULL else "choose"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice} another place") from error


def lock(file: IO[Any], wait: bool) -> bool:
    """Whether this process now holds ``file`` alone, until it is closed (where the system has such locks)."""
    if importlib.util.find_spec("fcntl"):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


def write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Writes to an unbuffered file, in which nothing is left to fail when it is closed."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]

"""Writing files that are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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

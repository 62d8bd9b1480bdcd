"""Mistakes that the person at the keyboard can put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """One line that says what is wrong and what to do; the command line prints it and exits with 2."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write ``path`` (full disk, no permission) into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from error

"""SIGTERM, with which Slurm, Docker and ``kill`` ask a process to end: a run saves where it is, then ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM came. No ``Exception``: nothing that keeps a sweep going must keep it going now."""


class _Asked:
    """Whether SIGTERM came, and how many blocks hold it back."""

    come = False
    holding = 0


def _note(number: int, frame: FrameType | None) -> None:
    _Asked.come = True
    if not _Asked.holding:
        raise Terminated


@contextmanager
def listening() -> Iterator[None]:
    """SIGTERM raises ``Terminated`` in here, where a process can have handlers: in its main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _note)
    try:
        yield
    finally:
        _Asked.come = False
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held() -> Iterator[None]:
    """SIGTERM is noted only, for ``asked`` to tell, and raises ``Terminated`` at the end of the block."""
    _Asked.holding += 1
    try:
        yield
    finally:
        _Asked.holding -= 1
    if _Asked.come:
        raise Terminated


def asked() -> bool:
    """Whether the process was asked to end."""
    return _Asked.come

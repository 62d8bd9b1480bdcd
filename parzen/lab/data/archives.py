"""7z archives, split ones too, read a bounded piece at a time and never trusted."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from parzen.lab.errors import UserError
from parzen.lab.files import write_all

MIB = 1 << 20
MAGIC = b"7z\xbc\xaf\x27\x1c"
ENCODED_HEADER = b"\x17"
MOST_MEMBERS = 10_000
MOST_UNPACKED = 32 << 30
# Copy, LZMA, LZMA2, BZip2, Delta, BCJ: py7zr takes their output a bounded piece at a time. Of the others it
# expands a whole block at once, whatever the size.
METHODS = {b"\x00", b"\x03\x01\x01", b"\x21", b"\x04\x02\x02", b"\x03", b"\x03\x03\x01\x03"}


def volumes(path: Path) -> list[Path]:
    """The files that make up an archive: ``path`` alone, or ``x.7z.001``, ``x.7z.002``, …

    Raises:
        UserError: ``path`` is a later volume.
    """
    numbered = re.fullmatch(r"(.+\.7z)\.(\d{3,})", path.name)
    if not numbered:
        return [path]
    stem, digits = numbered[1], len(numbered[2])
    if int(numbered[2]) != 1:
        raise UserError(f"{path} is a later part of a split archive; give {stem}.{1:0{digits}}")
    parts = (path.with_name(f"{stem}.{number:0{digits}}") for number in itertools.count(1))
    return list(itertools.takewhile(Path.exists, parts)) or [path]


class Volumes(io.RawIOBase):
    """Files one after another, as one."""

    def __init__(self, paths: list[Path]) -> None:
        self.position = 0
        with contextlib.ExitStack() as opened:
            self.files = [opened.enter_context(open(path, "rb")) for path in paths]
            self.opened = opened.pop_all()
        sizes = [os.fstat(file.fileno()).st_size for file in self.files]
        self.starts = [0, *itertools.accumulate(sizes)]

    def close(self) -> None:
        """Closes all of them."""
        if not self.closed:
            self.opened.close()
        super().close()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of one file."""
        self.position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.starts[-1]}[whence]
        )
        return self.position

    def readinto(self, buffer: Any) -> int:
        """As of one file; stops at the end of a volume."""
        for start, end, file in zip(self.starts, self.starts[1:], self.files, strict=False):
            if start <= self.position < end:
                file.seek(self.position - start)
                count = file.readinto(buffer)
                self.position += count
                return count
        return 0


def members(path: Path) -> list[str]:
    """The files in an archive, sorted.

    Raises:
        UserError: damaged, encrypted, or with names, links, sizes or methods that no story archive has.
    """
    with _opened(path) as archive:
        return _checked(archive, path)


def open_member(path: Path, name: str) -> io.BufferedReader:
    """A file in an archive, unpacked as it is read; reading raises ``UserError`` if it is damaged."""
    return io.BufferedReader(_Member(path, name), MIB)


def unpack(path: Path, to: Path) -> None:
    """Writes the files in an archive into the folder ``to``, each of them whole or not at all.

    Raises:
        UserError: see ``members``; nothing is then written outside of ``to``, and nothing half.
    """
    with _opened(path) as archive:
        names, root = _checked(archive, path), _nowhere()

        class Sink:
            def __init__(self, filename: str) -> None:
                self.path = to / Path(filename).relative_to(root)
                self.beside = self.path.with_name(f".{self.path.name}.part")
                with _writing(self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self.file = open(self.beside, "wb", buffering=0)
                opened.callback(self.beside.unlink, missing_ok=True)
                opened.callback(self.file.close)

            def write(self, data: bytes) -> int:
                with _writing(self.path):
                    write_all(self.file, data)
                return len(data)

            def seek(self, offset: int, whence: int = 0) -> int:
                return 0

            def close(self) -> None:
                # py7zr calls this after it has compared the checksum, and only if it was right.
                with _writing(self.path):
                    self.file.close()
                    os.replace(self.beside, self.path)

        with contextlib.ExitStack() as opened:
            _extract(archive, names, Sink)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; make room and run it again"
        ) from error


def need_py7zr(name: str) -> None:
    # Before 1.1.3 there is no limit to what is unpacked, and no word that a file was whole.
    try:
        enough = tuple(map(int, re.findall(r"\d+", version("py7zr"))[:3])) >= (1, 1, 3)
    except PackageNotFoundError:
        enough = False
    if not enough:
        raise UserError(f"{name} is a 7z archive; to read it, run: pip install -U 'parzen[7z]'")


def _nowhere() -> Path:
    """py7zr makes absolute names of the members; nothing is read or written there."""
    return Path(tempfile.gettempdir()).resolve()


def _extract(archive: Any, names: list[str], sink: Any) -> None:
    factory = type("Factory", (), {"create": lambda self, filename: sink(filename)})()
    archive.extract(_nowhere(), names, factory=factory)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    need_py7zr(str(path))
    import py7zr

    try:
        with (
            io.BufferedReader(Volumes(volumes(path)), MIB) as content,
            py7zr.SevenZipFile(_bounded(content, path), max_extract_size=MOST_UNPACKED) as archive,
        ):
            yield archive
    except (UserError, BrokenPipeError):
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    # A damaged archive can fail anywhere in py7zr, with any exception.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{path} is damaged, or a part of it is missing ({reason}); download it again"
        ) from error


def _bounded(content: IO[bytes], path: Path) -> IO[bytes]:
    """Refuses a packed header that py7zr would expand without bound, before py7zr sees it."""
    from py7zr.archiveinfo import HeaderStreamsInfo

    content.seek(12)
    (offset,) = struct.unpack("<Q", content.read(8))
    content.seek(32 + offset)
    if content.read(1) == ENCODED_HEADER:
        _check_methods(HeaderStreamsInfo.retrieve(io.BytesIO(content.read(MIB))), path)
    content.seek(0)
    return content


def _check_methods(streams: Any, path: Path) -> None:
    coders = [coder for folder in streams.unpackinfo.folders for coder in folder.coders] if streams else []
    if {coder["method"] for coder in coders} - METHODS:
        raise UserError(
            f"{path} is encrypted or packed with another method than LZMA2; pack it anew with that"
        )


def _checked(archive: Any, path: Path) -> list[str]:
    """The names of the files, if all that the archive declares is harmless."""
    entries = archive.files
    sizes = sum(entry.uncompressed for entry in entries)
    names = [entry.filename for entry in entries if not entry.is_directory]
    if len(entries) > MOST_MEMBERS or sizes > MOST_UNPACKED:
        raise UserError(f"{path} holds {len(entries):,} files of {sizes:,} bytes: too many to be stories")
    _check_methods(archive.header.main_streams, path)
    for entry in entries:
        linked = entry.is_symlink or entry.is_junction or entry.is_socket
        if linked or not _stays_inside(entry.filename):
            raise UserError(
                f"{path} is unsafe: {entry.filename!r} leads out of its folder or is no plain file"
            )
    if len({name.casefold() for name in names}) < len(names):
        raise UserError(f"{path} is unsafe: two files in it have the same name")
    return sorted(names)


def _stays_inside(name: str) -> bool:
    """Whether ``name`` is a path below its folder on every system: no root, drive, ``..`` or stream."""
    return not re.search(r"[\\:\0-\x1f]", name) and not {"", ".", ".."} & set(name.split("/"))


class _Member(io.RawIOBase):
    """The reading end of a pipe into which a thread unpacks."""

    def __init__(self, path: Path, name: str) -> None:
        reading, self.writing = os.pipe()
        self.pipe = open(reading, "rb", buffering=0)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._unpack, args=(path, name), daemon=True)
        self.thread.start()

    def _unpack(self, path: Path, name: str) -> None:
        try:
            with open(self.writing, "wb", buffering=0) as pipe, _opened(path) as archive:
                _checked(archive, path)
                _extract(archive, [name], lambda _: _Pipe(pipe))
        except BrokenPipeError:
            pass  # the reader has seen enough
        except BaseException as error:
            self.failure = error

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; the end is the end only if nothing failed."""
        count = self.pipe.readinto(buffer)
        if not count:
            self.thread.join()
            if self.failure:
                raise self.failure
        return count or 0

    def close(self) -> None:
        """Stops the thread."""
        if not self.closed:
            self.pipe.close()
            self.thread.join()
        super().close()


@dataclass
class _Pipe:
    pipe: io.FileIO

    def write(self, data: bytes) -> int:
        write_all(self.pipe, data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0

    def close(self) -> None:
        pass

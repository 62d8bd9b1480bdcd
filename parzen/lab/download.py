"""``parzen data``: published stories, fetched with resume, verified, unpacked; 7z archives read safely."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import io
import itertools
import math
import os
import re
import socket
import ssl
import struct
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import urlsplit

import parzen
from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole

MIB = 1 << 20
# Seconds without a byte, and before each further try after one that brought nothing.
TIMEOUT = 60
WAITS = (1, 2, 4, 8, 16)
# No published file is as large: a stream without end stops here.
LARGEST = 8 << 30

# ---- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A file as its authors published it.

    Attributes:
        size: in bytes, None where it is not known (the checksum then covers it).
        checksum: ``sha256:…``, or ``git:…`` for the object name that git gives to the content.
    """

    url: str
    checksum: str
    size: int | None = None

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Dataset:
    """Files to fetch; ``unpacked``: what the archive among them holds, for which it is removed in the end."""

    files: tuple[Published, ...]
    notice: str
    unpacked: tuple[str, ...] = ()


_BABI = (
    "https://github.com/facebookresearch/MemoryMosaics/raw/1fff63bf1c754f87a4c1f370e02f30a259b6e825/"
    "BabiStories/data/babistories-dataset.7z."
)
_TINY = (
    "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/"
)
DATASETS = {
    "babistories": Dataset(
        (
            Published(_BABI + "001", "git:ce46de124da5392bd170370a405d645b4ff93603"),
            Published(_BABI + "002", "git:cecd7247593412cf351780365aca9dd07096e501"),
            Published(_BABI + "003", "git:e4ca7ce0d9656c666dfb2475e00c14653ce0c94a"),
            Published(_BABI + "004", "git:fbe941304c7e1dac1d9da5af88577a5e398d0d10"),
            Published(_BABI + "005", "git:cfdbcb3cf27778c374dddebb7ab55b4d98f2b65e"),
        ),
        "BabiStories (Zhang et al., Memory Mosaics, 2024), Apache-2.0",
        ("traindataset.txt", "valdataset.txt"),
    ),
    "tinystories": Dataset(
        (
            Published(
                _TINY + "TinyStoriesV2-GPT4-train.txt",
                "sha256:6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
                2_227_753_162,
            ),
            Published(
                _TINY + "TinyStoriesV2-GPT4-valid.txt",
                "sha256:6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
                22_502_601,
            ),
        ),
        "TinyStories, version 2 (Eldan and Li, 2023), CDLA-Sharing-1.0",
    ),
}


def main(name: str, to: Path) -> int:
    """Brings data set ``name`` into the folder ``to``; run again, it goes on where it stopped.

    Raises:
        UserError: no connection, another file than the published one, a full disk, a folder not writable.
    """
    dataset = DATASETS[name]
    if dataset.unpacked:
        _need_py7zr(name)
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {to}: {error.strerror or error}; choose another") from error
    wanted = dataset.unpacked or [file.name for file in dataset.files]
    # Members of an archive get their names only when they are whole.
    if not (dataset.unpacked and all((to / member).is_file() for member in wanted)):
        for file in dataset.files:
            download(file, to / file.name)
    if dataset.unpacked and not all((to / member).is_file() for member in wanted):
        print(f"unpacking {dataset.files[0].name}", flush=True)
        unpack(to / dataset.files[0].name, to)
        if missing := [member for member in wanted if not (to / member).is_file()]:
            raise UserError(f"{dataset.files[0].name} holds no {missing[0]}: the archive has changed")
        for file in dataset.files:
            (to / file.name).unlink()
    print(f"{to}: {', '.join(wanted)}\n{dataset.notice}")
    return 0


# ---- fetching ------------------------------------------------------------------------------------


def download(file: Published, path: Path) -> None:
    """Fetches ``file`` to ``path``, which is there only when whole and verified.

    What has arrived so far is in ``.NAME.part`` beside it, and is gone on from.

    Raises:
        UserError: see ``main``.
    """
    if path.exists():
        if _wrong(path, file):
            raise UserError(f"{path} is there but is not the published file; move it away")
        print(f"{path.name}: already there")
        return
    part = path.with_name(f".{path.name}.part")
    # What the server calls this version of the file, so that two versions are never joined.
    note = part.with_suffix(".version")
    try:
        with open(part, "ab") as out:
            if not lock(out, wait=False):
                raise UserError(f"another process is fetching {path.name} into {path.parent}; let it finish")
            complete = out.tell() == file.size if file.size else out.tell() and not _wrong(part, file)
            if not complete:
                _fetch(file, out, note)
        if wrong := _wrong(part, file):
            part.unlink()
            raise UserError(f"{file.url}: {wrong}; the file was removed: run the command again")
        os.replace(part, path)
        note.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write in {path.parent}: {error.strerror or error}") from error


def _fetch(file: Published, out: IO[bytes], note: Path) -> None:
    host, tries, began = urlsplit(file.url).hostname, 0, out.tell()
    with _Meter(file.name) as meter:
        while True:
            before = out.tell()
            try:
                if _attempt(file, out, note, meter):
                    return
                problem = "the connection was dropped"
            except urllib.error.HTTPError as error:
                error.close()
                problem = f"the server answers {error.code} {error.reason}"
                if error.code == 416:
                    _empty(out)
                elif error.code not in (408, 425, 429) and error.code < 500:
                    raise UserError(
                        f"{file.url}: {problem}; the file may have moved: look for a newer parzen"
                    ) from error
            except (OSError, http.client.HTTPException) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                problem = str(getattr(reason, "strerror", None) or reason or type(reason).__name__)
                offline = isinstance(reason, socket.gaierror | ConnectionRefusedError)
                if isinstance(reason, ssl.SSLCertVerificationError) or (offline and out.tell() == began):
                    raise UserError(
                        f"cannot reach {host}: {problem}; check the connection, then run the command again"
                    ) from error
            tries = 0 if out.tell() > before else tries + 1
            if tries > len(WAITS):
                raise UserError(
                    f"{host}: {problem}, {tries} times in a row; {out.tell() / MIB:,.0f} MiB of {file.name} "
                    "are kept: run the command again to go on"
                )
            time.sleep(WAITS[max(0, tries - 1)])


def _attempt(file: Published, out: IO[bytes], note: Path, meter: _Meter) -> bool:
    """Appends what one request brings; True when the file is complete."""
    headers = {"User-Agent": f"parzen/{parzen.__version__}"}
    edition = note.read_text() if note.exists() else ""
    if edition and out.tell():
        headers |= {"Range": f"bytes={out.tell()}-", "If-Range": edition}
    with urllib.request.urlopen(urllib.request.Request(file.url, headers=headers), timeout=TIMEOUT) as answer:
        resumed = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers["Content-Range"] or "")
        if answer.status == 206 and resumed and int(resumed[1]) == out.tell():
            total = int(resumed[2])
        else:
            _empty(out)
            if answer.status != 200:
                return False
            total = int(answer.headers["Content-Length"] or 0)
            etag = answer.headers["ETag"] or "W/"
            edition = answer.headers["Last-Modified"] or "" if etag.startswith("W/") else etag
            write_whole(note, edition.encode())
        if file.size and total and total != file.size:
            raise UserError(
                f"{file.url}: the server offers {total:,} bytes, the published file has {file.size:,}; "
                "is a login page or a proxy in between?"
            )
        meter.start(out.tell(), file.size or total)
        while block := answer.read(MIB // 16):
            try:
                out.write(block)
                out.flush()
            except OSError as error:
                raise UserError(
                    f"cannot write {out.name}: {error.strerror or error}; what has arrived is kept: "
                    "make room and run the command again to go on"
                ) from error
            if out.tell() > (file.size or LARGEST):
                _empty(out)
                raise UserError(f"{file.url}: the server sends more than the published file holds")
            meter.at(out.tell())
    return out.tell() == (file.size or total) or not (file.size or total)


def _empty(out: IO[bytes]) -> None:
    out.seek(0)
    out.truncate()


def _wrong(path: Path, file: Published) -> str:
    """What differs from the published file, or nothing."""
    size = path.stat().st_size
    if file.size not in (None, size):
        return f"{size:,} bytes instead of {file.size:,}"
    kind, _, expected = file.checksum.partition(":")
    digest = hashlib.sha1(b"blob %d\0" % size) if kind == "git" else hashlib.sha256()
    with open(path, "rb") as content:
        while block := content.read(MIB):
            digest.update(block)
    found = digest.hexdigest()
    return "" if found == expected else f"its checksum is {kind}:{found} instead of {file.checksum}"


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


class _Meter:
    """Progress in MiB; a line every ten seconds in a log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.display: console.Progress | None = None

    def __enter__(self) -> _Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.display:
            self.display.__exit__(kind, error, trace)

    def start(self, done: int, total: int) -> None:
        """A connection stands: ``done`` bytes of ``total`` are here, steps count the others."""
        if self.display is None:
            self.shown, self.total = done // MIB, total
            self.display = console.progress(1, max(1, math.ceil(total / MIB) - self.shown))
            self.display.__enter__()
            self.display.part(self.name)
            self.marked = time.monotonic()

    def at(self, done: int) -> None:
        """``done`` bytes are here."""
        assert self.display is not None
        status = f"{done / MIB:,.0f} of {self.total / MIB:,.0f} MiB"
        while self.shown < done // MIB:
            self.shown += 1
            self.display.step(status)
        if time.monotonic() - self.marked > 10:
            self.marked = time.monotonic()
            self.display.mark(status)


# ---- 7z archives ---------------------------------------------------------------------------------

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


def _need_py7zr(name: str) -> None:
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
    _need_py7zr(str(path))
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

"""``parzen data``: published stories, fetched with resume, verified and unpacked."""

from __future__ import annotations

import hashlib
import http.client
import math
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

import parzen
from parzen.lab import console
from parzen.lab.data.archives import need_py7zr, unpack
from parzen.lab.errors import UserError
from parzen.lab.files import lock, write_whole

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
        need_py7zr(name)
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

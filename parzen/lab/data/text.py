"""Stories from files of any kind, from archives or from the built-in generator, read as a stream."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from parzen.lab.data import archives
from parzen.lab.data import tales as generator
from parzen.lab.data.tales import tales
from parzen.lab.errors import UserError

END = "<|endoftext|>"

Say: TypeAlias = Callable[[str], None]


def silent(line: str) -> None:
    """Says nothing."""


MIB = 1 << 20
# No line, and no story, is longer.
LONGEST_LINE = 16 * MIB
# What the demo reads of a text (after decompression).
MOST_TEXT = 8 * MIB


class Text(Protocol):
    """Stories that can be read again and again; ``name`` says in words where they are from."""

    name: str

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides what they are."""

    @property
    def share(self) -> float:
        """How far the latest reading is, from 0 to 1."""

    def __iter__(self) -> Iterator[str]: ...


class Item(NamedTuple):
    """A file, or a member of an archive."""

    path: Path
    member: str = ""

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.member or self.path.name


class Files:
    """The stories in files, in order; reading stops (and ``say`` is told) after ``most`` bytes of text.

    Understood, by content: JSON lines (one JSON string a line, or objects with ``text`` or ``story``);
    plain text with ``<|endoftext|>`` or else blank lines between stories; either as .xz or .gz.

    Reading raises UserError: missing, unreadable, empty, binary, not UTF-8, a bad JSON line, or damaged
    compression.
    """

    def __init__(self, name: str, items: list[Item], most: int | None = None, say: Say = silent) -> None:
        self.name, self.items, self.most, self.say = name, items, most, say
        # Bytes of the files that have been read, and the file that is being read.
        self.before = 0
        self.raw: io.BufferedReader | None = None

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file that is read, by name (all volumes of a split archive)."""
        paths = [
            volume
            for path in dict.fromkeys(item.path for item in self.items)
            for volume in archives.volumes(path)
        ]
        return {path.name: _file_hash(path) for path in paths}

    @cached_property
    def digest(self) -> str:
        """Content counts; of the names, only whether they say JSON."""
        order = [(_named_json(item), item.member) for item in self.items]
        return content_hash("files 1", self.most, order, [*self.hashes.values()])

    @property
    def share(self) -> float:
        """By bytes on disk."""
        known = self.raw is not None and not self.raw.closed and self.raw.seekable()
        position = self.raw.tell() if self.raw and known else 0
        return (self.before + position) / max(1, self.size)

    @cached_property
    def size(self) -> int:
        """In bytes on disk."""
        return sum(item.path.stat().st_size for item in self.items)

    def __iter__(self) -> Iterator[str]:
        left = float("inf") if self.most is None else self.most
        told, self.before = 0, 0
        for item in self.items:
            lines = _Lines(item, self, left)
            for story in _stories(lines, item):
                # A lone surrogate (from a JSON escape) is no text: it has no UTF-8 form.
                if not story.isascii():
                    story = story.encode("utf-8", "replace").decode()
                if story := story.replace(END, " ").strip():
                    told += 1
                    yield story
            left -= lines.seen
            if lines.stopped:
                self.say(f"{self.name}: only the first {(self.most or 0) / MIB:.3g} MiB are used")
                self.say = silent
                break
            self.before += item.path.stat().st_size
        if not told:
            raise UserError(
                f"{self.items[0].path} is empty; give a file with stories, or none for the built-in ones"
            )


class Generated:
    """The built-in stories from ``seed`` on, ``most`` bytes of them."""

    def __init__(self, seed: int, most: int) -> None:
        self.seed, self.most, self.told = seed, most, 0
        self.name = f"built-in stories, seed {seed}"

    @cached_property
    def digest(self) -> str:
        """Of the generator itself: another version of it, or of Python's random choices, is another text."""
        return content_hash(
            "generated 1", self.seed, self.most, _file_hash(Path(generator.__file__)), sys.version_info[:2]
        )

    @property
    def share(self) -> float:
        """By bytes of text."""
        return self.told / max(1, self.most)

    def __iter__(self) -> Iterator[str]:
        self.told = 0
        for tale in tales(self.seed):
            if self.told >= self.most:
                return
            self.told += len(tale)
            yield tale


def generated_stories(seed: int, most: int = MOST_TEXT) -> list[str]:
    """Built-in stories from ``seed`` on, ``most`` bytes of them."""
    return list(Generated(seed, most))


class Split:
    """The first 94 % of the stories in ``text``, or (``held_out``) the others."""

    def __init__(self, text: Text, held_out: bool) -> None:
        self.text, self.name, self.held_out = text, text.name, held_out
        self.digest = content_hash("part 1", text.digest, held_out)

    @property
    def share(self) -> float:
        """Of all."""
        return self.text.share

    @cached_property
    def kept(self) -> int:
        """How many stories are in the first part."""
        count = sum(1 for _ in self.text)
        if count < 2:
            raise UserError(
                f"{self.name} holds one story only: give more, or validation stories with --valid"
            )
        return min(count - 1, round(0.94 * count))

    def __iter__(self) -> Iterator[str]:
        return itertools.islice(self.text, *((self.kept, None) if self.held_out else (self.kept,)))


def open_text(path: Path, most: int | None = None, say: Say = silent, held_out: bool = False) -> Files:
    """The stories in a file, a 7z archive (``x.7z`` or ``x.7z.001``, …) or a folder of such, by name.

    Of several files, those with ``val``, ``valid`` or ``validation`` in their names (valdataset.txt) are
    validation stories: they alone are read if ``held_out``, and never otherwise.

    Raises:
        UserError: missing, unreadable, or no file with stories in it.
    """
    items = _items(path)
    if len(items) > 1:
        of_validation = [item for item in items if VALIDATION.search(item.name.lower())]
        others = [item for item in items if item not in of_validation]
        items = (of_validation or others) if held_out else (others or of_validation)
    return Files(path.name, items, most, say)


VALIDATION = re.compile(r"(?<![a-z])val(id|idation)?(set|data|dataset)?(?![a-z])")
READABLE = re.compile(r"\.(txt|json|jsonl)(\.xz|\.gz)?$|\.7z(\.0*1)?$", re.IGNORECASE)


def _items(path: Path) -> list[Item]:
    with _readable(path):
        if path.is_dir():
            paths = sorted(
                p for p in path.iterdir() if READABLE.search(p.name) and p.name[0] != "." and p.is_file()
            )
            if not paths:
                raise UserError(
                    f"{path} holds no stories: no .txt, .json or .jsonl (or .xz, .gz, .7z of these)"
                )
            return [item for inner in paths for item in _items(inner)]
        if path.exists() and not path.is_file():
            raise UserError(f"{path} can be read once only; save it as a file first")
        first, *_ = archives.volumes(path)
        with open(first, "rb") as file:
            if file.read(6) != archives.MAGIC:
                return [Item(path)]
    members = [Item(path, name) for name in archives.members(path) if READABLE.search(name)]
    if not members:
        raise UserError(f"{path} holds no stories: no .txt, .json or .jsonl")
    return members


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, MemoryError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); compress or download it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check --data and --valid") from error


class _Lines:
    """Numbered lines, "\\n" at their ends, decompressed as they are read.

    Attributes:
        seen: bytes of text so far.
        stopped: whether there was more than ``most``.
    """

    def __init__(self, item: Item, files: Files, most: float) -> None:
        self.item, self.files, self.most = item, files, most
        self.seen, self.stopped = 0, False

    def __iter__(self) -> Iterator[tuple[int, str]]:
        path = self.item.path
        with _readable(path), self._opened() as raw, _decompressed(raw) as stream:
            self.files.raw = raw
            for number in itertools.count(1):
                line = stream.readline(LONGEST_LINE + 1)
                if not line:
                    return
                if self.seen >= self.most:
                    self.stopped = True
                    return
                self.seen += len(line)
                yield number, _decode(path, number, line)

    def _opened(self) -> io.BufferedReader:
        path, member = self.item
        return archives.open_member(path, member) if member else open(path, "rb")


def _stories(lines: Iterable[tuple[int, str]], item: Item) -> Iterator[str]:
    stream = iter(lines)
    head = list(itertools.islice(itertools.dropwhile(lambda line: not line[1].strip(), stream), 1))
    if not head:
        return
    if _named_json(item) or _is_json_line(head[0][1]):
        for number, line in itertools.chain(head, stream):
            if line.strip():
                yield _json_story(item.path, number, line)
        return
    # Where stories end, their first MiB shows.
    size = len(head[0][1])
    for numbered in stream:
        head.append(numbered)
        size += len(numbered[1])
        if size >= MIB:
            break
    marked = any(END in line for _, line in head)
    story: list[str] = []
    size = 0
    for number, text in itertools.chain(head, stream):
        *ended, rest = text.split(END) if marked else (["", ""] if not text.strip() else [text])
        for piece in ended:
            yield "".join(story) + piece
            story, size = [], 0
        story.append(rest)
        size += len(rest)
        if size > LONGEST_LINE:
            raise UserError(
                f"{item.path}, line {number}: a story longer than {LONGEST_LINE // MIB} MiB; put {END} or a "
                "blank line between stories"
            )
    yield "".join(story)


def _decompressed(raw: io.BufferedReader) -> io.BufferedIOBase:
    magic = raw.peek(6)[:6]
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.open(raw)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(raw)
    return raw


def _decode(path: Path, number: int, line: bytes) -> str:
    if len(line) > LONGEST_LINE:
        raise UserError(f"{path}, line {number}: longer than {LONGEST_LINE // MIB} MiB; one story a line")
    if b"\0" in line:
        raise UserError(f"{path} is binary; give plain text or JSON lines (or .xz/.gz of these)")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8; convert it to UTF-8 "
            "text (or .xz/.gz of it)"
        ) from error
    return text.replace("\r\n", "\n")


def _named_json(item: Item) -> bool:
    return bool({".json", ".jsonl"} & set(Path(item.name).suffixes))


def _is_json_line(line: str) -> bool:
    try:
        return isinstance(json.loads(line), str | dict)
    except (ValueError, RecursionError):
        return False


def _json_story(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}, line {number}: not JSON ({error}); expected one JSON string a line"
        ) from error
    if isinstance(value, dict):
        value = value.get("text", value.get("story"))
    if not isinstance(value, str):
        raise UserError(f'{path}, line {number}: expected a JSON string, or an object with "text" or "story"')
    return value


def _file_hash(path: Path) -> str:
    with _readable(path), open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(MIB):
            digest.update(block)
        return digest.hexdigest()


def content_hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

"""Stories as a language-modelling task: text, tokeniser, token streams, batches and windows.

A stream is the stories one after another, each followed by ``<|endoftext|>``:

    Once upon a time … the end.<|endoftext|>One day, Tim …<|endoftext|>

Text of any size is read as a stream, tokenised once into a file in the cache, and mapped from there.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from errno import ENOSPC
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from parzen.lab import download
from parzen.lab.console import duration
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.tasks import tales as generator
from parzen.lab.tasks.ngrams import Bigram
from parzen.lab.tasks.tales import tales

END = "<|endoftext|>"
IGNORED = -100

Say: TypeAlias = Callable[[str], None]


def silent(line: str) -> None:
    """Says nothing."""


MIB = 1 << 20
# No line, and no story, is longer.
LONGEST_LINE = 16 * MIB
# What the demo reads of a text (after decompression).
MOST_TEXT = 8 * MIB

# ---- reading -------------------------------------------------------------------------------------


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
            for volume in download.volumes(path)
        ]
        return {path.name: _file_hash(path) for path in paths}

    @cached_property
    def digest(self) -> str:
        """Content counts; of the names, only whether they say JSON."""
        order = [(_named_json(item), item.member) for item in self.items]
        return _hash("files 1", self.most, order, [*self.hashes.values()])

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
        return _hash(
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


class Part:
    """The first 94 % of the stories in ``text``, or (``held_out``) the others."""

    def __init__(self, text: Text, held_out: bool) -> None:
        self.text, self.name, self.held_out = text, text.name, held_out
        self.digest = _hash("part 1", text.digest, held_out)

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
        first, *_ = download.volumes(path)
        with open(first, "rb") as file:
            if file.read(6) != download.MAGIC:
                return [Item(path)]
    members = [Item(path, name) for name in download.members(path) if READABLE.search(name)]
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
        return download.open_member(path, member) if member else open(path, "rb")


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


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---- tokenisers ----------------------------------------------------------------------------------

# A tokeniser is trained on no more bytes of text than this, spread evenly over all of it.
SAMPLE = 64 * MIB


def sample(stories: Iterable[str], most: int = SAMPLE) -> list[str]:
    """Every n-th story, n the smallest power of two with which they fit into ``most`` bytes."""
    chosen: list[str] = []
    size, stride = 0, 1
    for number, story in enumerate(stories):
        if number % stride:
            continue
        chosen.append(story)
        size += len(story)
        while size > most and len(chosen) > 1:
            chosen = chosen[::2]
            stride *= 2
            size = sum(map(len, chosen))
    return chosen


def train_tokenizer(stories: Iterable[str], vocab: int = 2048) -> Tokenizer:
    """A byte-level BPE of a ``sample``; ``<|endoftext|>`` is token 0. The same stories, the same tokens."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _byte_level(models.BPE())
    tokenizer.train_from_iterator(sample(stories), trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokeniser in a folder with ``vocab.json`` and ``merges.txt`` (GPT-2's), or in a ``tokenizer.json``.

    Raises:
        UserError: missing or damaged files, or no ``<|endoftext|>`` in the vocabulary.
    """
    try:
        if path.is_dir():
            tokenizer = _byte_level(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
        else:
            tokenizer = Tokenizer.from_file(str(path))
    # The library raises nothing more specific.
    except Exception as error:
        raise UserError(
            f"cannot read a tokeniser from {path} ({error}); give a folder with vocab.json and merges.txt, "
            "or a tokenizer.json"
        ) from error
    if tokenizer.token_to_id(END) is None:
        raise UserError(f"the tokeniser in {path} has no {END}; stories cannot be told apart with it")
    tokenizer.add_special_tokens([END])
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cache_dir() -> Path | None:
    """``$XDG_CACHE_HOME/parzen`` or ``$HOME/.cache/parzen``; None without a usable home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    return Path(base) / "parzen" if os.path.isabs(base) else None


def _trained(text: Text, vocab: int, say: Say) -> Tokenizer:
    """``train_tokenizer``, remembered in the cache where that is possible."""
    folder = cache_dir()
    cached = folder and folder / f"bpe-{_hash('bpe 1', text.digest, vocab, SAMPLE)[:32]}.json"
    if cached:
        # Whatever is wrong with a cached file, training again puts it right.
        with suppress(Exception):
            return Tokenizer.from_file(str(cached))
    say(f"{text.name}: training a tokeniser of {vocab:,} tokens")
    tokenizer = train_tokenizer(text, vocab)
    if cached:
        with suppress(UserError):
            write_whole(cached, tokenizer.to_str().encode())
    return tokenizer


# ---- token streams -------------------------------------------------------------------------------

# How much text is tokenised at once, and the seconds between two notes of how far that is.
BATCH = 2 * MIB
NOTE = 10.0


def encode(tokenizer: Tokenizer, stories: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    """The stream in pieces, with the stories in each; uint16 where that is enough, else uint32."""
    end, dtype = tokenizer.token_to_id(END), _dtype(tokenizer)
    for batch in _batches(stories):
        encoded = [(*e.ids, end) for e in tokenizer.encode_batch_fast(batch)]
        yield np.fromiter(itertools.chain.from_iterable(encoded), dtype), len(batch)


def _batches(stories: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for story in stories:
        batch.append(story)
        size += len(story)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


def _encode_rest(text: Text, tokenizer: Tokenizer, note: _Note, say: Say) -> Iterator[np.ndarray]:
    """The pieces after the stories that ``note`` counts, and counts on; a line every ten seconds."""
    began = said = share = 0.0
    tokens = note.tokens
    for piece, count in encode(tokenizer, itertools.islice(text, note.stories, None)):
        note.stories += count
        yield piece
        tokens += len(piece)
        now = time.monotonic()
        if not began:
            began, said, share = now, now, text.share
        elif now - said > 10:
            done = text.share - share
            left = f", {duration((now - began) * (1 - text.share) / done)} left" if done > 0 else ""
            say(f"{text.name}: {tokens / 1e6:,.0f} M tokens{left}")
            said = now


def token_stream(
    text: Text, tokenizer: Tokenizer, lead: bool = False, say: Say = silent
) -> tuple[np.ndarray, int]:
    """The stream of ``text`` (after an ``<|endoftext|>``, if ``lead``), and its number of stories.

    It is mapped from a file in the cache, made the first time. If that was interrupted, the next call goes
    on where it stopped; other processes wait for the one that makes it. Without a cache that can be written,
    the stream is held in memory.

    Raises:
        UserError: a full disk, or what reading ``text`` raises.
    """
    folder, dtype = cache_dir(), _dtype(tokenizer)
    first = np.full(int(lead), tokenizer.token_to_id(END), dtype)
    if folder:
        tokens = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        data = folder / f"tokens-{_hash('tokens 1', text.digest, tokens, lead)[:32]}.bin"
        note = _Note.read(data, dtype)
        if not note.done and (file := _writable(data, say)):
            with file:
                download.lock(file, wait=True)
                # Another process may have been at it meanwhile.
                note = _Note.read(data, dtype)
                if not note.done:
                    _write_stream(file, data, note, first, _encode_rest(text, tokenizer, note, say))
        if note.done:
            return np.memmap(data, dtype, "r", shape=(note.tokens,)), note.stories
    note = _Note(0, 0, False)
    pieces = [first, *_encode_rest(text, tokenizer, note, say)]
    return np.concatenate(pieces), note.stories


@dataclass
class _Note:
    """How much of a stream is in its file, kept beside it as JSON; only with ``done`` is the stream used."""

    tokens: int
    stories: int
    done: bool

    @classmethod
    def read(cls, data: Path, dtype: type[np.unsignedinteger[Any]]) -> _Note:
        """What is noted, if the file agrees with it."""
        with suppress(OSError, ValueError, TypeError):
            note = cls(**json.loads(data.with_suffix(".json").read_bytes()))
            size = note.tokens * np.dtype(dtype).itemsize
            if data.stat().st_size == size or (data.stat().st_size > size and not note.done):
                return note
        return cls(0, 0, False)


def _writable(data: Path, say: Say) -> io.FileIO | None:
    try:
        data.parent.mkdir(parents=True, exist_ok=True)
        return open(data, "ab", buffering=0)
    except OSError as error:
        if error.errno == ENOSPC:
            raise _full(data, error) from error
        say(f"cannot write in {data.parent} ({error.strerror}): the tokens are held in memory")
        return None


def _full(data: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {data}: {error.strerror or error}; make room, or set XDG_CACHE_HOME to a folder "
        "on another disk, and run it again to go on"
    )


def _write_stream(
    file: io.FileIO, data: Path, note: _Note, first: np.ndarray, pieces: Iterator[np.ndarray]
) -> None:
    """Appends to what ``note`` says is there, noting now and then how far it is."""
    noted = time.monotonic()
    try:
        file.truncate(note.tokens * first.itemsize)
        for piece in itertools.chain([] if note.tokens else [first], pieces):
            download.write_all(file, piece.data)
            note.tokens += len(piece)
            if time.monotonic() - noted >= NOTE:
                _keep(file, data, note)
                noted = time.monotonic()
        note.done = True
        _keep(file, data, note)
    except OSError as error:
        raise _full(data, error) from error


def _keep(file: io.FileIO, data: Path, note: _Note) -> None:
    os.fsync(file.fileno())
    write_whole(data.with_suffix(".json"), json.dumps(asdict(note)).encode())


# ---- the task ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoriesConfig:
    """Which tokens a run sees, by content: equal for equal texts and tokenisers, wherever the files are.

    Attributes:
        train, valid: digests of the texts.
        tokenizer: SHA-256 of the tokeniser as JSON.
        vocab: how many different tokens there are.
        context: tokens in a crop or window.
    """

    train: str = ""
    valid: str = ""
    tokenizer: str = ""
    vocab: int = 2048
    context: int = 256


class Batches:
    """Endless random crops of a stream: inputs and targets, (batch, context) each.

    The batch of a step depends on ``seed`` and the step alone, so that a run goes on with the very same
    batches from any step.

    Attributes:
        step: the step of the next batch; a resumed run sets it.
    """

    def __init__(self, stream: np.ndarray, batch: int, context: int, seed: int) -> None:
        self.stream, self.batch, self.context, self.seed, self.step = stream, batch, context, seed, 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.step += 1
        return self.at(self.step - 1)

    def at(self, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """The batch of a step, or one of the ``parts`` that together are it (micro-batches, processes)."""
        starts = np.random.default_rng((self.seed, step)).integers(
            0, len(self.stream) - self.context, size=(self.batch, 1)
        )
        mine = starts[self.batch * part // parts : self.batch * (part + 1) // parts]
        crop = torch.from_numpy(self.stream[mine + np.arange(self.context + 1)].astype(np.int64))
        return crop[:, :-1], crop[:, 1:]


@dataclass(frozen=True)
class Stories:
    """Training and validation streams with their tokeniser.

    Attributes:
        train: unsigned integers, (N,). Random crops are drawn from it.
        valid: the same, (M + 1,): ``<|endoftext|>``, then the validation stream, so that every token of it
            is a target once.
        source: where the text is from, in words.
        config: the same by content.
        hashes: SHA-256 of the files read, by name.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    source: str
    config: StoriesConfig = StoriesConfig()
    hashes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def baselines(self) -> dict[str, float]:
        """The validation loss of the unigram and of the bigram, in nats per token."""
        losses = Bigram(self.train, self.vocab).losses(self.valid)
        return dict(zip(("unigram", "bigram"), losses, strict=True))

    @property
    def vocab(self) -> int:
        """How many different tokens there are."""
        return self.tokenizer.get_vocab_size()

    def batches(self, batch: int, context: int, seed: int) -> Batches:
        """Endless random crops of the training stream."""
        return Batches(self.train, batch, context, seed)

    def windows(self, context: int) -> tuple[Tensor, Tensor]:
        """The whole validation set as inputs and targets (windows, context); padding is ``IGNORED``."""
        stream = torch.from_numpy(self.valid.astype(np.int64))
        missing = -(len(stream) - 1) % context
        inputs = torch.nn.functional.pad(stream[:-1], (0, missing))
        targets = torch.nn.functional.pad(stream[1:], (0, missing), value=IGNORED)
        return inputs.view(-1, context), targets.view(-1, context)


def load_stories(
    data: Path | None = None,
    valid: Path | None = None,
    *,
    vocab: int = 2048,
    tokenizer: Path | None = None,
    context: int = 128,
    seed: int = 0,
    most: int | None = MOST_TEXT,
    say: Say = silent,
) -> Stories:
    """Opens or generates stories, splits them, trains or reads the tokeniser, makes or finds the streams.

    Args:
        data: what ``open_text`` understands, or None for the built-in generator.
        valid: validation stories; None takes those that names in ``data`` call so, or else holds out the
            last 6 % of the stories.
        vocab: of the tokeniser trained on the training part.
        tokenizer: what ``read_tokenizer`` understands, instead of training one.
        context: training needs at least ``context`` + 1 tokens.
        most: bytes of text to read (of each text) or to generate; None: all.
        say: told what is being done.

    Raises:
        UserError: files that cannot be used, too little text, or a full disk.
    """
    held_out: Text
    if data is None:
        train: Text = Generated(seed, MOST_TEXT if most is None else most)
        source, hashes = train.name, {}
    else:
        train = open_text(data, most, say)
        source, hashes = data.name, dict(train.hashes)
        if valid is None:
            named = open_text(data, most, say, held_out=True)
            valid = data if named.items != train.items else None
    if valid is not None:
        held_out = open_text(valid, most, say, held_out=True)
        hashes |= held_out.hashes
    else:
        whole = train
        train, held_out = Part(whole, held_out=False), Part(whole, held_out=True)
    tokens = read_tokenizer(tokenizer) if tokenizer else _trained(train, vocab, say)
    stream, told = token_stream(train, tokens, say=say)
    if len(stream) <= context:
        raise UserError(f"{source} holds {len(stream)} tokens to train on; at least {context + 1} are needed")
    checked, told_out = token_stream(held_out, tokens, lead=True, say=say)
    say(
        f"{source}: {told:,} stories to train on, {told_out:,} to validate; {len(stream):,} and "
        f"{len(checked) - 1:,} tokens"
    )
    digest = hashlib.sha256(tokens.to_str().encode()).hexdigest()
    config = StoriesConfig(train.digest, held_out.digest, digest, tokens.get_vocab_size(), context)
    return Stories(tokens, stream, checked, source, config, hashes)

"""Tokenisers, and token streams: text is tokenised once into a file in the cache, and mapped from there."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parzen.lab.console import duration
from parzen.lab.data.text import END, MIB, Say, Text, content_hash, silent
from parzen.lab.errors import UserError
from parzen.lab.files import lock, write_all, write_whole

# A tokeniser is trained on no more bytes of text than this, spread evenly over all of it.
if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

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
    import tokenizers

    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _byte_level(tokenizers.models.BPE())
    tokenizer.train_from_iterator(sample(stories), trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokeniser in a folder with ``vocab.json`` and ``merges.txt`` (GPT-2's), or in a ``tokenizer.json``.

    Raises:
        UserError: missing or damaged files, or no ``<|endoftext|>`` in the vocabulary.
    """
    import tokenizers

    try:
        if path.is_dir():
            tokenizer = _byte_level(
                tokenizers.models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
            )
        else:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
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
    import tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def cache_dir() -> Path | None:
    """``$XDG_CACHE_HOME/parzen`` or ``$HOME/.cache/parzen``; None without a usable home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    return Path(base) / "parzen" if os.path.isabs(base) else None


def trained_tokenizer(text: Text, vocab: int, say: Say) -> Tokenizer:
    """``train_tokenizer``, remembered in the cache where that is possible."""
    import tokenizers

    folder = cache_dir()
    cached = folder and folder / f"bpe-{content_hash('bpe 1', text.digest, vocab, SAMPLE)[:32]}.json"
    if cached:
        # Whatever is wrong with a cached file, training again puts it right.
        with suppress(Exception):
            return tokenizers.Tokenizer.from_file(str(cached))
    say(f"{text.name}: training a tokeniser of {vocab:,} tokens")
    tokenizer = train_tokenizer(text, vocab)
    if cached:
        with suppress(UserError):
            write_whole(cached, tokenizer.to_str().encode())
    return tokenizer


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
        data = folder / f"tokens-{content_hash('tokens 1', text.digest, tokens, lead)[:32]}.bin"
        note = _Note.read(data, dtype)
        if not note.done and (file := _writable(data, say)):
            with file:
                lock(file, wait=True)
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
            write_all(file, piece.data)
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

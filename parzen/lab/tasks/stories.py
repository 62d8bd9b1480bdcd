"""Stories as a language-modelling task: text, tokeniser, token streams, batches and windows.

A stream is the stories one after another, each followed by ``<|endoftext|>``:

    Once upon a time … the end.<|endoftext|>One day, Tim …<|endoftext|>
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
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.tasks.tales import tales

END = "<|endoftext|>"
IGNORED = -100

Say: TypeAlias = Callable[[str], None]


def silent(line: str) -> None:
    """Says nothing."""


MIB = 1 << 20
LONGEST_LINE = 16 * MIB
# Read no more than this many bytes of text (after decompression).
MOST_TEXT = 8 * MIB

# ---- reading -------------------------------------------------------------------------------------


def read_stories(path: Path, most: int = MOST_TEXT, say: Say = silent) -> list[str]:
    """The stories in a file, in order; reading stops (and ``say`` is told) after ``most`` bytes of text.

    Understood, by content: JSON lines (one JSON string a line, or objects with ``text`` or ``story``);
    plain text with ``<|endoftext|>`` or else blank lines between stories; either as .xz or .gz.

    Raises:
        UserError: missing, unreadable, empty, binary, not UTF-8, a bad JSON line, or damaged compression.
    """
    lines = _lines(path, most, say)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    empty = UserError(f"{path} is empty; give a file with stories, or none for the built-in ones")
    if first is None:
        raise empty
    rest = itertools.chain([first], lines)
    if _is_json_line(first[1]) or {".json", ".jsonl"} & set(path.suffixes):
        stories = [_json_story(path, number, line) for number, line in rest if line.strip()]
    else:
        text = "".join(line for _, line in rest)
        stories = text.split(END) if END in text else re.split(r"\n\s*\n", text)
    # A lone surrogate (from a JSON escape) is no text: it has no UTF-8 form.
    cleaned = (s.replace(END, " ").strip().encode("utf-8", "replace").decode() for s in stories)
    stories = [s for s in cleaned if s]
    if not stories:
        raise empty
    return stories


def _lines(path: Path, most: int, say: Say) -> Iterator[tuple[int, str]]:
    """Numbered lines, "\\n" at their ends, decompressed as they are read."""
    try:
        with open(path, "rb") as raw:
            with _decompressed(raw) as stream:
                seen = 0
                for number in itertools.count(1):
                    line = stream.readline(LONGEST_LINE + 1)
                    if not line:
                        return
                    if seen >= most:
                        say(f"{path.name}: only the first {most / MIB:.3g} MiB are used")
                        return
                    seen += len(line)
                    yield number, _decode(path, number, line)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, MemoryError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); compress or download it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check --data and --valid") from error


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


def generated_stories(seed: int, most: int = MOST_TEXT) -> list[str]:
    """Built-in stories from ``seed`` on, ``most`` bytes of them."""
    stories: list[str] = []
    size = 0
    for tale in tales(seed):
        if size >= most:
            break
        stories.append(tale)
        size += len(tale)
    return stories


# ---- tokens --------------------------------------------------------------------------------------


def cache_dir() -> Path | None:
    """``$XDG_CACHE_HOME/parzen`` or ``$HOME/.cache/parzen``; None without a usable home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    return Path(base) / "parzen" if os.path.isabs(base) else None


def train_tokenizer(stories: list[str], vocab: int = 2048) -> Tokenizer:
    """A byte-level BPE of ``stories``; ``<|endoftext|>`` is token 0. The same stories, the same tokens.

    Cached by content hash where ``cache_dir`` is writable, so a second run does not train again.
    """
    digest = hashlib.sha256(f"byte-level BPE 1, {vocab}\n".encode())
    for story in stories:
        digest.update(story.encode() + b"\0")
    folder = cache_dir()
    cached = folder and folder / f"bpe-{digest.hexdigest()[:32]}.json"
    if cached:
        # Whatever is wrong with a cached file, training again puts it right.
        with suppress(Exception):
            return Tokenizer.from_file(str(cached))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    if cached:
        with suppress(UserError):
            write_whole(cached, tokenizer.to_str().encode())
    return tokenizer


def encode(tokenizer: Tokenizer, stories: list[str]) -> np.ndarray:
    """The stories as one stream of uint16, ``<|endoftext|>`` after each."""
    end = tokenizer.token_to_id(END)
    stream = [np.asarray([*e.ids, end], np.uint16) for e in tokenizer.encode_batch(stories)]
    return np.concatenate(stream)


# ---- the task ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stories:
    """Training and validation streams with their tokeniser.

    Attributes:
        train: uint16, (N,). Random crops are drawn from it.
        valid: uint16, (M + 1,): ``<|endoftext|>``, then the validation stream, so that every token of it
            is a target once.
        source: where the text is from, in words.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    source: str

    @property
    def vocab(self) -> int:
        """How many different tokens there are."""
        return self.tokenizer.get_vocab_size()

    def batches(self, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless random crops: inputs and targets, (batch, context) each; the same for the same seed."""
        random = np.random.default_rng(seed)
        offsets = np.arange(context + 1)
        while True:
            starts = random.integers(0, len(self.train) - context, size=(batch, 1))
            crop = torch.from_numpy(self.train[starts + offsets].astype(np.int64))
            yield crop[:, :-1], crop[:, 1:]

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
    context: int = 128,
    seed: int = 0,
    most: int = MOST_TEXT,
    say: Say = silent,
) -> Stories:
    """Reads or generates stories, splits them, trains the tokeniser on the training part, encodes.

    Args:
        data: a file that ``read_stories`` understands, or None for the built-in generator.
        valid: validation stories; None holds out the last 6 % of the stories.
        context: training needs at least ``context`` + 1 tokens.
        most: bytes of text to read (of each file) or to generate.
        say: told what is being done.

    Raises:
        UserError: a file that cannot be used, or too little text.
    """
    if data is None:
        source = f"built-in stories, seed {seed}"
        stories = generated_stories(seed, most)
    else:
        source = data.name
        stories = read_stories(data, most, say)
    if valid is not None:
        held_out = read_stories(valid, most, say)
    else:
        kept = min(len(stories) - 1, round(0.94 * len(stories)))
        if kept < 1:
            raise UserError(f"{source} holds one story only: give more, or validation stories with --valid")
        stories, held_out = stories[:kept], stories[kept:]
    say(f"{source}: {len(stories):,} stories to train on, {len(held_out):,} to validate; tokenising")
    tokenizer = train_tokenizer(stories, vocab)
    train = encode(tokenizer, stories)
    if len(train) <= context:
        raise UserError(f"{source} holds {len(train)} tokens to train on; at least {context + 1} are needed")
    start = np.asarray([tokenizer.token_to_id(END)], np.uint16)
    return Stories(tokenizer, train, np.concatenate([start, encode(tokenizer, held_out)]), source)

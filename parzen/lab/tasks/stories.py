"""Stories as a language-modelling task: text, tokeniser, token streams, batches and windows.

A stream is the stories one after another, each followed by ``<|endoftext|>``:

    Once upon a time … the end.<|endoftext|>One day, Tim …<|endoftext|>

Text of any size is read as a stream, tokenised once into a file in the cache, and mapped from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.lab.data.text import MOST_TEXT, Generated, Say, Split, Text, open_text, silent
from parzen.lab.data.tokens import read_tokenizer, token_stream, trained_tokenizer
from parzen.lab.errors import UserError
from parzen.lab.tasks.ngrams import Bigram
from parzen.lab.tasks.task import IGNORED, device_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Windows: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StoriesConfig:
    """Which tokens a run sees, by content: equal for equal texts and tokenisers, wherever the files are.

    Attributes:
        train, valid: digests of the texts.
        tokenizer: SHA-256 of the tokeniser as JSON.
        vocab: how many different tokens there are.
        context: tokens in a crop or window.
    """

    kind: ClassVar[str] = "stories"

    train: str = ""
    valid: str = ""
    tokenizer: str = ""
    vocab: int = 2048
    context: int = 256

    @property
    def sequence_length(self) -> int:
        return self.context


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
        train, held_out = Split(whole, held_out=False), Split(whole, held_out=True)
    tokens = read_tokenizer(tokenizer) if tokenizer else trained_tokenizer(train, vocab, say)
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


class Language:
    """Random crops to train on; the loss on fixed windows of the validation stream.

    Args:
        stories: the two streams.
        context: T.
        windows: what to evaluate on (inputs and targets, (N, T)); default the whole validation stream.
    """

    def __init__(self, stories: Stories, context: int, windows: Windows | None = None) -> None:
        self.stories, self.context, self.vocab = stories, context, stories.vocab
        self.windows = stories.windows(context) if windows is None else windows

    def batch(self, seed: int, step: int, size: int) -> Windows:
        """Inputs and targets (size, T) of one step."""
        return self.stories.batches(size, self.context, seed).at(step)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss, in nats per token."""
        return {"loss": loss(model, self.windows)}


@torch.no_grad()
def loss_by_position(model: nn.Module, windows: Windows, batch: int = 64) -> tuple[Tensor, Tensor]:
    """(sum of nats, number of targets) at each position of the windows, (T,) in float64."""
    model.eval()
    length = windows[0].shape[1]
    total, counted = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for inputs, targets in zip(*(x.split(batch) for x in windows), strict=True):
        logits = model(inputs.to(device_of(model))).transpose(1, 2)
        nats = F.cross_entropy(logits, targets.to(logits.device), ignore_index=IGNORED, reduction="none")
        total += nats.sum(0, dtype=torch.float64).cpu()
        counted += (targets != IGNORED).sum(0)
    return total, counted


def loss(model: nn.Module, windows: Windows, batch: int = 64) -> float:
    """Nats per token over all targets of ``windows`` (inputs and targets, (N, T))."""
    total, counted = loss_by_position(model, windows, batch)
    return float(total.sum() / counted.sum())

"""RegBench: learn a regular language in context, from a few strings of a random automaton.

An instance is 10 to 19 strings of one automaton, joined by ``|``; another instance, another automaton. A
model reads it and says after each token what comes next (· is not asked):

    tokens   b a r | b d o r a r | b a …
    labels   a r · b d o r a r · b a …

Each string is a walk from the initial state, every edge out of a state equally likely, so what can come next,
and how likely it is, is known exactly at every position: accuracy and distance are measured against that.

Source: Akyürek et al., *In-Context Language Learning: Architectures and Algorithms* (2401.12973), section 3
and the public data generator, whose bounds are the defaults. Differs: automata that are equal as minimal
automata are never used twice, and data depend on the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from parzen.lab.tasks.sequence import Batch
from parzen.lab.tasks.task import IGNORED, device_of

LETTERS = "abcdefghijklmnopqr"
PAD, BAR = 0, len(LETTERS) + 1
VOCAB = len(LETTERS) + 2
TEXT = f".{LETTERS}|"


@dataclass(frozen=True)
class Bounds:
    """What instances are drawn from: each a smallest and a largest value, both possible.

    Attributes:
        states: of the automaton before it is minimised.
        letters: how many of the 18 letters it uses at most.
        edges: out of each state, with distinct letters to distinct other states.
        strings: in an instance.
        string_length: letters of a string.
    """

    states: tuple[int, int] = (4, 12)
    letters: tuple[int, int] = (4, 18)
    edges: tuple[int, int] = (1, 3)
    strings: tuple[int, int] = (10, 19)
    string_length: tuple[int, int] = (1, 49)

    def __post_init__(self) -> None:
        for name in ("states", "letters", "edges", "strings", "string_length"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"expected {name} as (smallest, largest), 1 or more, got ({low}, {high})")
        if self.letters[1] > len(LETTERS):
            raise ValueError(f"expected at most {len(LETTERS)} letters, got {self.letters[1]}")
        most = min(self.letters[0], self.states[0] - 1)
        if self.edges[1] > most:
            raise ValueError(
                f"expected at most {most} edges out of a state (letters and other states to go to, at the "
                f"smallest), got {self.edges[1]}; give more letters or states, or fewer edges"
            )
        if self.strings[0] * self.string_length[0] < 2:
            raise ValueError(
                "expected 2 letters or more in an instance, got 1 string of 1 letter at the smallest; give "
                "more strings or longer ones"
            )


@dataclass(frozen=True)
class RegBenchConfig(Bounds):
    """The data of a run: see ``load_regbench``.

    Attributes:
        examples, validation, test: instances of each split.
        data_seed: what they are drawn from; the seed of a run is another.
    """

    kind: ClassVar[str] = "regbench"

    examples: int = 1000
    validation: int = 500
    test: int = 1000
    data_seed: int = 0

    @property
    def sequence_length(self) -> int:
        return round(mean(self.strings) * (mean(self.string_length) + 1))


# ---- automata ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Automaton:
    """A minimal automaton all of whose states accept, in canonical form: equal exactly if the languages are.

    States are numbered as a breadth-first search from the initial state 0 meets them, letters in order.

    Attributes:
        edges: for each state a row of (token, next state), in the order of the tokens.
    """

    edges: tuple[tuple[tuple[int, int], ...], ...]

    def states(self, tokens: Sequence[int] | np.ndarray) -> list[int] | None:
        """The state after each token, initial at ``|``; None if some token is not allowed."""
        state, found = 0, []
        for token in tokens:
            state = 0 if token == BAR else dict(self.edges[state]).get(int(token), -1)
            if state < 0:
                return None
            found.append(state)
        return found

    def next_letters(self) -> np.ndarray:
        """How likely each token is to follow, by state: float32, (states, 20)."""
        chances = np.zeros((len(self.edges), VOCAB), np.float32)
        for row, edges in zip(chances, self.edges, strict=True):
            row[[token for token, _ in edges]] = 1 / len(edges)
        return chances


def minimal(edges: Sequence[dict[int, int]]) -> Automaton:
    """The canonical automaton of the language that ``edges`` (state → token → state) read from state 0.

    Moore's refinement: states fall apart while their tokens, or the classes these lead to, differ.
    """
    group, count = [0] * len(edges), 1
    while True:
        seen: dict[tuple[tuple[int, int], ...], int] = {}
        behaviour = [tuple(sorted((token, group[to]) for token, to in out.items())) for out in edges]
        refined = [seen.setdefault(row, len(seen)) for row in behaviour]
        if len(seen) == count:
            break
        group, count = refined, len(seen)
    # The refinement has come to rest: states of a group have the same row of (token, group).
    rows = dict(zip(group, behaviour, strict=True))
    number, queue = {group[0]: 0}, [group[0]]
    for current in queue:
        for _, to in rows[current]:
            if to not in number:
                number[to] = len(queue)
                queue.append(to)
    return Automaton(tuple(tuple((token, number[to]) for token, to in rows[g]) for g in queue))


class _Draws:
    """Integers from a stream of Philox words, which numpy keeps for ever, unlike its distributions."""

    def __init__(self, seed: int, candidate: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(candidate,)))
        self._words: Iterator[int] = iter(())

    def below(self, bound: int) -> int:
        """Uniform in 0 … bound − 1, but for bound/2³²."""
        word = next(self._words, None)
        if word is None:
            self._words = iter((self._bits.random_raw(512) >> np.uint64(32)).tolist())
            word = next(self._words)
        return word * bound >> 32

    def between(self, bounds: tuple[int, int]) -> int:
        """Uniform, both ends possible."""
        return bounds[0] + self.below(bounds[1] - bounds[0] + 1)

    def some(self, pool: Sequence[int], count: int) -> list[int]:
        """``count`` distinct members of the pool, in random order."""
        rest = [*pool]
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def automaton(self, bounds: Bounds) -> Automaton:
        """Random edges, then minimised."""
        states = range(self.between(bounds.states))
        alphabet = self.some(range(1, BAR), self.between(bounds.letters))
        edges = []
        for state in states:
            count = self.between(bounds.edges)
            others = [other for other in states if other != state]
            edges.append(dict(zip(self.some(alphabet, count), self.some(others, count), strict=True)))
        return minimal(edges)

    def strings(self, automaton: Automaton, bounds: Bounds) -> tuple[list[int], list[int]]:
        """Strings joined by ``|``, and the state after each token."""
        tokens: list[int] = []
        states: list[int] = []
        for _ in range(self.between(bounds.strings)):
            tokens.append(BAR)
            states.append(0)
            for _ in range(self.between(bounds.string_length)):
                out = automaton.edges[states[-1]]
                token, state = out[self.below(len(out))]
                tokens.append(token)
                states.append(state)
        return tokens[1:], states[1:]


# ---- instances and splits ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Instance:
    """Strings of one automaton.

    Attributes:
        tokens: uint8, (T + 1,): a … r are 1 … 18, ``|`` is 19. A model reads all but the last.
        states: uint8, (T + 1,): the automaton's state after each token.
    """

    automaton: Automaton
    tokens: np.ndarray
    states: np.ndarray

    def __str__(self) -> str:
        return "".join(TEXT[token] for token in self.tokens)

    def __len__(self) -> int:
        """How many tokens a model reads."""
        return len(self.tokens) - 1

    def truth(self) -> np.ndarray:
        """How likely each token is to come next, after each token read: float32, (T, 20)."""
        return self.automaton.next_letters()[self.states[:-1]]


class RegBench(NamedTuple):
    """Instances of different automata."""

    train: list[Instance]
    validation: list[Instance]
    test: list[Instance]


def load_regbench(
    examples: int, *, seed: int = 0, validation: int = 500, test: int = 1000, bounds: Bounds | None = None
) -> RegBench:
    """Instances to train on, to choose by and to judge by, no two of the same language.

    Candidate i is drawn from its own stream, (seed, i), and left out if its language has been seen. Tests
    come first, then validation, then training: for one seed they are the same for every number of examples,
    and a larger training set holds the smaller.

    Args:
        examples: instances to train on, each of its own automaton.
        seed: 0 or more.
        validation: instances to choose a model by.
        test: instances to judge it by.
        bounds: what to draw from; default, the public data.

    Raises:
        ValueError: a negative number, or fewer languages within the bounds than asked for.
    """
    bounds = bounds or Bounds()
    if seed < 0 or min(examples, validation, test) < 0:
        raise ValueError(
            "expected a seed and sizes of 0 or more, got "
            f"seed {seed}, {examples} examples, {validation} validation, {test} test"
        )
    wanted = test + validation + examples
    most = 1000 + 20 * wanted
    seen: dict[Automaton, None] = {}
    found: list[Instance] = []
    for candidate in range(most):
        if len(found) == wanted:
            break
        draws = _Draws(seed, candidate)
        automaton = draws.automaton(bounds)
        if automaton in seen:
            continue
        seen[automaton] = None
        tokens, states = draws.strings(automaton, bounds)
        found.append(Instance(automaton, np.asarray(tokens, np.uint8), np.asarray(states, np.uint8)))
    if len(found) < wanted:
        raise ValueError(
            f"expected {wanted} different languages, found {len(found)} among {most} automata; ask for fewer "
            f"instances, or widen the bounds ({bounds})"
        )
    return RegBench(found[test + validation :], found[test : test + validation], found[:test])


def batch_of(instances: Sequence[Instance], device: str = "cpu") -> Batch:
    """Inputs, labels (``IGNORED`` at the padding and where a ``|`` follows) and lengths.

    Raises:
        ValueError: no instances.
    """
    lengths = _lengths(instances)
    tokens = np.full((len(instances), lengths.max()), PAD, np.int64)
    labels = np.full_like(tokens, IGNORED)
    for row, instance in enumerate(instances):
        tokens[row, : len(instance)] = instance.tokens[:-1]
        labels[row, : len(instance)] = instance.tokens[1:]
    labels[labels == BAR] = IGNORED
    return Batch(*(torch.from_numpy(x).to(device) for x in (tokens, labels, lengths)))


def truth_of(instances: Sequence[Instance], device: str = "cpu") -> Tensor:
    """What comes next, exactly: float32, (B, T, 20), each row a distribution, 0 at the padding.

    Raises:
        ValueError: no instances.
    """
    truth = np.zeros((len(instances), _lengths(instances).max(), VOCAB), np.float32)
    for row, instance in zip(truth, instances, strict=True):
        row[: len(instance)] = instance.truth()
    return torch.from_numpy(truth).to(device)


def _lengths(instances: Sequence[Instance]) -> np.ndarray:
    if not instances:
        raise ValueError("expected one or more instances, got none")
    return np.asarray([len(instance) for instance in instances], np.int64)


def bucketed(
    lengths: Sequence[int] | np.ndarray, size: int, seed: int, *, pool: int = 16
) -> Iterator[np.ndarray]:
    """One epoch: the indices of each batch of ``size``, every index once, lengths alike in a batch.

    Indices are shuffled, ``pool`` batches of them at a time are sorted by length and cut, and the batches are
    shuffled. The last batch may be smaller. Another seed for each epoch makes other batches.

    Raises:
        ValueError: a size or a pool below 1, or a negative seed.
    """
    if size < 1 or pool < 1 or seed < 0:
        raise ValueError(f"expected size and pool of 1 or more and seed of 0 or more, got {size, pool, seed}")
    lengths = np.asarray(lengths)
    words = np.random.Philox(np.random.SeedSequence(seed)).random_raw(2 * len(lengths))
    order = np.argsort(words[: len(lengths)], kind="stable")
    batches = []
    for start in range(0, len(order), size * pool):
        some = order[start : start + size * pool]
        some = some[np.argsort(lengths[some], kind="stable")]
        batches += [some[i : i + size] for i in range(0, len(some), size)]
    for which in np.argsort(words[len(lengths) : len(lengths) + len(batches)], kind="stable"):
        yield batches[which]


# ---- predictors ----------------------------------------------------------------------------------


@torch.no_grad()
def ngram(tokens: Tensor, order: int) -> Tensor:
    """What an n-gram with back-off, counted in context, says comes next after each token: (B, T, 20).

    With c(u, v) how often letter v has followed context u so far, within its string:

        p₁(v) = c(v) / Σ_w c(w)
        pₙ(v | u) = c(u, v) / Σ_w c(u, w)     if anything has followed the last n − 1 tokens u
                  = pₙ₋₁(v | u)               if not, u shortened by its oldest token

    A context may reach before the string, where there is one same mark. On the default data, accuracy and
    distance are .48/.63, .83/.29, .94/.20 for orders 1, 2, 3.

    Args:
        tokens: (B, T), as ``batch_of`` gives them. What is said at the padding has no meaning.
        order: 1 … 4.

    Raises:
        ValueError: another order.

    Source: the in-context n-gram baseline of 2401.12973, section 5. Differs: its public code hands what is
    left by 1 − Σ_v c(u, v) / c(u), where c(u) counts the present and ends of strings too, to letters that
    have not followed u; that scores the same in accuracy, but .33 and .26 in distance for orders 2 and 3.
    """
    if not 1 <= order <= 4:
        raise ValueError(f"expected an order in 1 … 4, got {order}")
    B, T = tokens.shape
    said = torch.zeros(B, T, VOCAB, device=tokens.device)
    every = torch.arange(B, device=tokens.device)
    # Contexts of n − 1 tokens are numbers to base 19; digit 0 is what lies before the string.
    sizes = [BAR ** (n - 1) for n in range(1, order + 1)]
    counts = [torch.zeros(B, size, VOCAB, device=tokens.device) for size in sizes]
    context = torch.zeros(B, dtype=torch.long, device=tokens.device)
    for t in range(T):
        token = tokens[:, t]
        is_letter = (token != PAD) & (token != BAR)
        for size, count in zip(sizes, counts, strict=True):
            count[every, context % size, token] += is_letter
        context = torch.where(is_letter, context * BAR + token, 0) % sizes[-1]
        for size, count in zip(sizes, counts, strict=True):
            seen = count[every, context % size]
            total = seen.sum(1, keepdim=True)
            said[:, t] = torch.where(total > 0, seen / total, said[:, t])
    return said


# ---- scores --------------------------------------------------------------------------------------


@dataclass
class Scores:
    """Accuracy, distance and loss, added up over batches.

    Every token that is read counts, the last one of a string too: what is said there is measured against
    what the automaton could go on with, though a ``|`` follows. After a ``|`` the state is the initial one.

        accuracy_all    share of positions whose likeliest token is one that the automaton allows
        accuracy_last   the same at the last position of each instance
        tvd             ½ · mean over positions of Σ_v |p_model(v) − p_automaton(v)|
        loss            nats, mean over labels (none where a ``|`` follows)

    Source: Akyürek et al. (2401.12973), section 3; the paper's public evaluation.
    """

    # By position: how many, right, distance; how many labels, loss.
    _sums: np.ndarray = field(default_factory=lambda: np.zeros((5, 0)))
    _last: np.ndarray = field(default_factory=lambda: np.zeros(2))

    @torch.no_grad()
    def add(self, probabilities: Tensor, truth: Tensor, labels: Tensor, lengths: Tensor) -> None:
        """Adds a batch.

        Args:
            probabilities: (B, T, 20), each row a distribution.
            truth: (B, T, 20), from ``truth_of``.
            labels: (B, T), from ``batch_of``.
            lengths: (B,), from ``batch_of``.

        Raises:
            ValueError: shapes that do not fit, or rows that are no distributions.
        """
        B, T = labels.shape
        if probabilities.shape != truth.shape or truth.shape != (B, T, VOCAB) or lengths.shape != (B,):
            raise ValueError(
                f"expected probabilities and truth ({B}, {T}, {VOCAB}) and lengths ({B},), got "
                f"{tuple(probabilities.shape)}, {tuple(truth.shape)} and {tuple(lengths.shape)}"
            )
        p, truth = probabilities.double(), truth.double()
        inside = torch.arange(T, device=lengths.device) < lengths[:, None]
        if ((p.sum(2) - 1).abs() * inside > 0.02).any() or (p < 0).any():
            raise ValueError("expected probabilities that sum to 1, got others; softmax the logits first")
        right = truth.gather(2, p.argmax(2, keepdim=True)).squeeze(2) > 0
        distance = (p - truth).abs().sum(2) / 2
        asked = labels != IGNORED
        chance = p.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
        columns = (inside, right & inside, distance * inside, asked, -torch.where(asked, chance, 1).log())
        new = torch.stack([column.double().sum(0) for column in columns]).cpu().numpy()
        if (more := T - self._sums.shape[1]) > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, more)))
        self._sums[:, :T] += new
        self._last += (B, int(right.gather(1, lengths[:, None] - 1).sum()))

    @property
    def accuracy_all(self) -> float:
        """Share of positions with an allowed letter on top."""
        return float(self._sums[1].sum() / self._sums[0].sum())

    @property
    def accuracy_last(self) -> float:
        """Share of instances with an allowed letter on top at the last position."""
        return float(self._last[1] / self._last[0])

    @property
    def tvd(self) -> float:
        """Mean total variation distance."""
        return float(self._sums[2].sum() / self._sums[0].sum())

    @property
    def loss(self) -> float:
        """Nats per label."""
        return float(self._sums[4].sum() / self._sums[3].sum())

    def by_position(self) -> dict[str, np.ndarray]:
        """``count``, ``accuracy``, ``tvd``, ``loss`` after 1, 2, … tokens; a loss without labels is nan."""
        count, right, distance, labels, loss = self._sums
        with np.errstate(invalid="ignore"):
            return {
                "count": count,
                "accuracy": right / count,
                "tvd": distance / count,
                "loss": loss / labels,
            }


@torch.no_grad()
def score(model: nn.Module, instances: Sequence[Instance], batch: int = 32) -> Scores:
    """How a model that gives logits (B, T, 20) does on ``instances``."""
    model.eval()
    scores = Scores()
    # Alike in length, so that little is padding.
    ordered = sorted(instances, key=len)
    for start in range(0, len(ordered), batch):
        some = ordered[start : start + batch]
        device = str(device_of(model))
        tokens, labels, lengths = batch_of(some, device)
        scores.add(model(tokens).softmax(2), truth_of(some, device), labels, lengths)
    return scores


class InContext:
    """RegBench as the training loop sees it: epochs of bucketed batches, scored on the validation split."""

    vocab = VOCAB

    def __init__(self, data: RegBench) -> None:
        self.data = data
        self._lengths = [len(instance) for instance in data.train]
        self._epoch: tuple[tuple[int, int, int], list[np.ndarray]] | None = None

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels (size or fewer, T) of one step."""
        epoch, index = divmod(step, -(-len(self._lengths) // size))
        key = (seed, epoch, size)
        if self._epoch is None or self._epoch[0] != key:
            self._epoch = key, list(bucketed(self._lengths, size, (seed << 32) + epoch))
        some = [self.data.train[i] for i in self._epoch[1][index]]
        return batch_of(some)[:2]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss, accuracies and distance on the validation instances."""
        return summary(score(model, self.data.validation))


def summary(scores: Scores) -> dict[str, float]:
    """The four numbers."""
    return {name: getattr(scores, name) for name in ("loss", "accuracy_all", "accuracy_last", "tvd")}

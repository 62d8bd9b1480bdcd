"""Multi-query multi-token associative recall (MQMTAR): find the values of some keys among many pairs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from parzen.lab.tasks.sequence import Samples, SequenceTask, below, random_words

SPACE, GIVES, ASKS = 0, 1, 2
FIRST = 3
# No sample has this index: its stream draws the lists of keys and values.
LISTS = 2**64 - 1


@dataclass(frozen=True)
class MQMTAR(SequenceTask):
    """The values of the keys that are asked for, in the order of asking.

    Two pairs and two queries, for L = 16 (0 space, 1 between key and value, 2 before a query or an answer):

        source  0 17 40 1 99 8 0 0  25 31 1 60 7 0 0 0  2 25 31  2 17 40
        target                                          2 60  7  2 99  8

    A source of length L holds P = ⌊density·L / unit⌋ pairs, where unit = key + 1 + value + one space, each in
    a slot of ⌊L/P⌋ tokens, then the queries. The free spaces of a slot fall before or after the pair at
    random: as many before as a hypergeometric draw gives, about half of them.

    Keys and values of a sample are drawn without replacement from two lists, queries from the sample's pairs
    with replacement. The lists are drawn anew for each seed and split, as in the public data, so most of the
    keys in tests were never seen in training.

    Args:
        alphabet: how many tokens keys and values are made of; ids 3, 4, …
        keys: how many keys, and how many values, the lists hold.
        key_length: tokens of a key.
        value_length: tokens of a value.
        density: the share of a source that pairs would fill.
        fewest_pairs: no fewer pairs than this; with density 0, exactly this many.
        queries: how many keys are asked for.

    Raises:
        ValueError: parameters that leave no task.

    Source: Vasylenko et al. (2506.16640), section 5 and its public generator. Differs: more pairs than keys
    are an error here; fewer pairs than queries are not.
    """

    name = "mqmtar"

    alphabet: int = 256
    keys: int = 10_000
    key_length: int = 2
    value_length: int = 2
    density: float = 0.8
    fewest_pairs: int = 1
    queries: int = 4

    def __post_init__(self) -> None:
        for field in ("alphabet", "keys", "key_length", "value_length", "fewest_pairs", "queries"):
            if getattr(self, field) < 1:
                raise ValueError(f"expected {field} of 1 or more, got {getattr(self, field)}")
        if not 0 <= self.density <= 1:
            raise ValueError(f"expected a density in 0 … 1, got {self.density}")
        most = self.alphabet ** min(self.key_length, self.value_length)
        if self.keys > most:
            raise ValueError(
                f"expected at most {most} keys (all that {self.alphabet} tokens can spell), got {self.keys}; "
                "ask for fewer, or give a larger alphabet"
            )
        if self.fewest_pairs > self.keys:
            raise ValueError(
                f"expected at least {self.fewest_pairs} keys, one for each pair, got {self.keys}"
            )

    @property
    def symbols(self) -> int:
        """The alphabet and the three separators."""
        return FIRST + self.alphabet

    @property
    def unit(self) -> int:
        """Tokens of a pair with its separator and one space."""
        return self.key_length + self.value_length + 2

    def pairs(self, length: int | np.ndarray) -> np.ndarray:
        """How many pairs a source of this length holds."""
        by_density = np.floor_divide(self.density * np.asarray(length), self.unit).astype(np.int64)
        return np.maximum(by_density, self.fewest_pairs)

    def check(self, length: int) -> None:
        """Room for the pairs, and keys enough for them."""
        pairs = int(self.pairs(length))
        if length < pairs * self.unit:
            raise ValueError(
                f"expected a length of {pairs * self.unit} or more, room for {pairs} pair(s) of {self.unit} "
                f"tokens, got {length}"
            )
        if pairs > self.keys:
            raise ValueError(
                f"expected at most {self.keys} pairs, one a key, got {pairs} for length {length}; give more "
                "keys, a lower density or a shorter length"
            )

    def _words(self, length: int) -> int:
        return self.queries + 3 * int(self.pairs(length))

    def _draw(self, words: np.ndarray, lengths: np.ndarray, seed: int, split: str) -> Samples:
        pairs = self.pairs(lengths)
        slots = lengths // pairs
        asked = below(words[:, : self.queries], pairs[:, None])
        # Words go to pairs in turn, so that a sample does not depend on how many pairs its neighbours have.
        key_words, value_words, spread = np.moveaxis(
            words[:, self.queries :].reshape(len(words), -1, 3), 2, 0
        )
        most = pairs.max()
        key_list, value_list = _lists(
            self.alphabet, self.keys, self.key_length, self.value_length, seed, split
        )
        keys = key_list[_distinct(key_words[:, :most], self.keys)]
        values = value_list[_distinct(value_words[:, :most], self.keys)]

        between = np.full((*keys.shape[:2], 1), GIVES)
        items = np.concatenate([keys, between, values], axis=2)
        row, pair = np.nonzero(np.arange(most) < pairs[:, None])
        before = np.empty(len(row), np.int64)
        for slot in np.unique(slots):
            chosen = slots[row] == slot
            table = _spaces_before(int(slot), self.unit)
            bits = spread[row[chosen], pair[chosen]] >> np.uint64(32)
            before[chosen] = np.searchsorted(table, bits, side="right")
        start = pair * slots[row] + before

        source_lengths = pairs * slots + self.queries * (1 + self.key_length)
        source = np.full((len(words), source_lengths.max()), SPACE)
        source[row[:, None], start[:, None] + np.arange(self.unit - 1)] = items[row, pair]
        every = np.arange(len(words))[:, None]
        asks = np.full((len(words), self.queries, 1), ASKS)
        questions = np.concatenate([asks, keys[every, asked]], axis=2).reshape(len(words), -1)
        source[every, (pairs * slots)[:, None] + np.arange(questions.shape[1])] = questions
        target = np.concatenate([asks, values[every, asked]], axis=2).reshape(len(words), -1)
        return Samples(source, source_lengths, target, np.full(len(words), target.shape[1]))

    def solve(self, source: np.ndarray) -> np.ndarray:
        """Looks every key up."""
        return np.concatenate([[ASKS, *source[at : at + self.value_length]] for at in self._answers(source)])

    def origins(self, source: np.ndarray) -> np.ndarray:
        """The tokens of the values that are asked for; the separators come from nowhere."""
        answers = self._answers(source)
        found = np.zeros((len(answers), 1 + self.value_length, len(source)), bool)
        for rows, at in zip(found, answers, strict=True):
            value = np.arange(self.value_length)
            rows[1 + value, at + value] = True
        return found.reshape(-1, len(source))

    def _answers(self, source: np.ndarray) -> list[int]:
        """Where the value of each key that is asked for begins."""
        known = {
            tuple(source[at - self.key_length : at]): int(at) + 1 for at in np.flatnonzero(source == GIVES)
        }
        asked = np.flatnonzero(source == ASKS)
        return [known[tuple(source[at + 1 : at + 1 + self.key_length])] for at in asked]


def _distinct(words: np.ndarray, bound: int) -> np.ndarray:
    """Uniform integers in 0 … bound − 1, all different in a row, (B, N): a Fisher–Yates shuffle's start."""
    steps = np.arange(words.shape[1])
    found = np.empty(words.shape, np.int64)
    for row, swaps in zip(found, (steps + below(words, bound - steps)).tolist(), strict=True):
        # Only what a swap has moved is written down: the cost does not grow with the bound.
        moved: dict[int, int] = {}
        for step, other in enumerate(swaps):
            row[step] = moved.get(other, other)
            moved[other] = moved.get(step, step)
    return found


@functools.lru_cache(maxsize=16)
def _lists(
    alphabet: int, count: int, key_length: int, value_length: int, seed: int, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """The keys (count, key length) and the values (count, value length) of a split."""
    words = random_words(seed, split, [LISTS], 2 * count).reshape(2, 1, count)
    lists = []
    for own, length in zip(words, (key_length, value_length), strict=True):
        codes = _distinct(own, alphabet**length)[0]
        digits = codes[:, None] // alphabet ** np.arange(length) % alphabet
        lists.append(FIRST + digits)
    return lists[0], lists[1]


@functools.lru_cache(maxsize=1024)
def _spaces_before(slot: int, unit: int) -> np.ndarray:
    """Where 32 random bits switch from n to n + 1 free spaces before the pair, for n = 0, 1, …

    Of 2·(slot + 1) − unit places around the pair, slot + 1 − ⌊(unit − 1)/2⌋ of them before it, slot − unit
    are kept at random.
    """
    kept = slot - unit
    ahead = slot + 1 - (unit - 1) // 2
    behind = 2 * (slot + 1) - unit - ahead
    # Chances relative to that of `middle`, by their ratios: nothing but multiplications and sums in a fixed
    # order, so that every platform finds the same table.
    n = np.arange(kept, dtype=np.float64)
    ratio = (ahead - n) * (kept - n) / ((n + 1) * (behind - kept + n + 1))
    middle = kept // 2
    below_it = np.cumprod(1 / ratio[:middle][::-1])[::-1]
    chances = np.concatenate([below_it, [1.0], np.cumprod(ratio[middle:])])
    total = np.cumsum(chances)
    return np.floor(total[:-1] / total[-1] * 2**32).astype(np.uint64)

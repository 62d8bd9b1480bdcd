"""Sort, reverse, copy and recall: what is sampled, how it is laid out, scored, written and read."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parzen.lab.errors import UserError
from parzen.lab.tasks.copy import Copy
from parzen.lab.tasks.mqmtar import ASKS, FIRST, GIVES, MQMTAR, SPACE
from parzen.lab.tasks.reverse import Reverse
from parzen.lab.tasks.sequence import SequenceTask, exact_match, read_pairs, token_accuracy, write_pairs
from parzen.lab.tasks.sort import Sort
from parzen.lab.tasks.task import IGNORED

SMALL = MQMTAR(alphabet=64, keys=4096, fewest_pairs=2)
TASKS = [Sort(), Reverse(), Copy(), Sort(symbols=7), MQMTAR(), SMALL]
ODD = MQMTAR(alphabet=9, keys=80, key_length=3, value_length=2, density=0.5, queries=3)
ids = pytest.mark.parametrize("task", [*TASKS, ODD], ids=repr)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# ---- samples -------------------------------------------------------------------------------------

PLAIN = {"sort": sorted, "reverse": lambda x: x[::-1], "copy": list}


@pytest.mark.parametrize("task", TASKS[:4], ids=repr)
@pytest.mark.parametrize("length", [1, 2, 33, 4096])
def test_targets_rearrange_the_source(task, length):
    for index in range(5):
        source, target = task.sample(3, "test", index, length)
        assert len(source) == length
        assert target.tolist() == PLAIN[task.name](source.tolist())
        assert task.solve(source).tolist() == target.tolist()
    assert source.max() < task.symbols


@ids
def test_the_solver_finds_every_target(task):
    for length in (16, 17, 40, 64, 129, 1000, (32, 64)):
        if task in (SMALL, ODD) and length == 1000:
            continue
        for index in range(20):
            source, target = task.sample(0, "train", index, length)
            assert np.array_equal(task.solve(source), target)


@ids
def test_targets_can_be_read_off_their_origins(task):
    """Another token at an origin changes the target that the solver finds there, and nowhere else."""
    for index, length in enumerate((16, 17, 40, 64)):
        source, target = task.sample(0, "test", index, length)
        origins = task.origins(source)
        assert origins.shape == (len(target), len(source))
        for said, places in zip(target, origins, strict=True):
            assert (source[places] == said).all()
        if isinstance(task, MQMTAR):
            assert np.array_equal(origins.any(1), target != ASKS)
        if isinstance(task, Sort):
            assert np.array_equal(origins.sum(1), np.bincount(source, minlength=task.symbols)[target])
            continue
        assert origins.sum(1).max() == 1
        for place in range(len(source)):
            changed = source.copy()
            if isinstance(task, MQMTAR):
                if source[place] < FIRST or not origins[:, place].any():
                    continue
                changed[place] = FIRST + (source[place] - FIRST + 1) % task.alphabet
            else:
                changed[place] = (source[place] + 1) % task.symbols
            assert np.array_equal(task.solve(changed) != target, origins[:, place])


def test_recall_is_read_off_the_values_asked_for():
    source = [0, 17, 40, 1, 99, 8, 0, 0, 25, 31, 1, 60, 7, 0, 0, 0, 2, 25, 31, 2, 17, 40]
    origins = MQMTAR().origins(np.asarray(source))
    assert [np.flatnonzero(row).tolist() for row in origins] == [[], [11], [12], [], [4], [5]]


def test_recall_at_the_longest_length():
    source, target = MQMTAR().sample(0, "test", 0, 65_536)
    assert (source == GIVES).sum() == 8738
    assert len(source) == 8738 * 7 + 12
    assert np.array_equal(MQMTAR().solve(source), target)


def test_uniform_tokens_and_lengths():
    batch = Sort().batch(0, "train", range(3000), (32, 64))
    source_lengths = (batch.lengths - 2) // 2
    counts = torch.bincount(source_lengths, minlength=65)[32:]
    assert len(counts) == 33
    assert 60 < counts.min() <= counts.max() < 125  # 91 expected, standard deviation 9.4
    tokens = torch.bincount(batch.tokens[batch.tokens < 32], minlength=32) / 2
    assert_close(tokens, tokens.mean().expand(32), rtol=0.05, atol=0)


def test_the_documented_sequence():
    source = [0, 17, 40, 1, 99, 8, 0, 0, 25, 31, 1, 60, 7, 0, 0, 0, 2, 25, 31, 2, 17, 40]
    assert MQMTAR().solve(np.asarray(source)).tolist() == [2, 60, 7, 2, 99, 8]
    assert " ".join(map(str, source)) in " ".join(MQMTAR.__doc__.split())
    for task in (Sort, Reverse, Copy):
        source, target = (line.split()[1:] for line in task.__doc__.strip().splitlines()[2:])
        assert PLAIN[task.name](list(map(int, source))) == list(map(int, target))


@pytest.mark.parametrize("task", [MQMTAR(), SMALL, ODD], ids=repr)
@pytest.mark.parametrize("length", [16, 40, 64, 129])
def test_recall_is_laid_out_as_published(task, length):
    k, v = task.key_length, task.value_length
    pairs = max(task.fewest_pairs, int(task.density * length) // task.unit)
    slot = length // pairs
    offsets, asked = [], []
    for index in range(200):
        source, target = task.sample(1, "validation", index, length)
        assert len(source) == pairs * slot + task.queries * (1 + k)
        assert len(target) == task.queries * (1 + v)
        known = {}
        for cell in source[: pairs * slot].reshape(pairs, slot):
            (at,) = np.flatnonzero(cell == GIVES)
            used = np.arange(at - k, at + 1 + v)
            assert (np.delete(cell, used) == SPACE).all()
            assert (cell[np.delete(used, k)] >= FIRST).all()
            assert used[-1] < slot - 1, "a space follows the pair"
            offsets.append(used[0])
            known[tuple(cell[at - k : at])] = tuple(cell[at + 1 : at + 1 + v])
        assert len(known) == len(set(known.values())) == pairs, "keys differ, values differ"
        questions = source[pairs * slot :].reshape(-1, 1 + k)
        answers = target.reshape(-1, 1 + v)
        assert (questions[:, 0] == ASKS).all()
        assert (answers[:, 0] == ASKS).all()
        assert [known[tuple(q)] for q in questions[:, 1:]] == [tuple(a) for a in answers[:, 1:]]
        asked += [list(known).index(tuple(q)) for q in questions[:, 1:]]
    assert set(asked) == set(range(pairs)), "any pair may be asked for"
    free = slot - task.unit
    assert set(offsets) <= set(range(free + 1))
    places = slot + 1 - (k + v + 1) // 2
    expected = free * places / (2 * (slot + 1) - task.unit)
    assert abs(np.mean(offsets) - expected) < 0.1
    if free == 2:
        assert set(offsets) == {0, 1, 2}


def test_recall_draws_keys_and_values_from_lists_of_their_own():
    task = MQMTAR(alphabet=64, keys=20, density=0, fewest_pairs=20)
    lists = {}
    for split, index in itertools.product(("train", "test"), range(5)):
        source, _ = task.sample(0, split, index, 120)
        at = np.flatnonzero(source == GIVES)
        keys = frozenset(zip(source[at - 2], source[at - 1], strict=True))
        values = frozenset(zip(source[at + 1], source[at + 2], strict=True))
        assert len(keys) == len(values) == 20
        lists.setdefault(split, set()).add((keys, values))
    (train,), (test,) = lists.values()
    assert train[0] != test[0]
    assert train[0] != train[1]


# ---- streams -------------------------------------------------------------------------------------


@ids
def test_a_sample_does_not_depend_on_its_batch(task):
    indices = [5, 0, 2**40, 17, 6]
    batch = task.batch(7, "train", indices, (18, 64))
    for row, index in enumerate(indices):
        source, target = task.sample(7, "train", index, (18, 64))
        tokens = [task.bos, *source, task.sep, *target]
        assert batch.lengths[row] == len(tokens)
        assert batch.tokens[row].tolist() == tokens + [task.pad] * (batch.tokens.shape[1] - len(tokens))
        labels = [IGNORED] * (len(source) + 1) + [*target, task.eos]
        assert batch.labels[row].tolist() == labels + [IGNORED] * (batch.tokens.shape[1] - len(tokens))
    assert batch.tokens.shape[1] == batch.lengths.max()
    assert sorted({task.pad, task.bos, task.eos, task.sep}) == list(range(task.symbols, task.vocab))


@ids
def test_seeds_splits_and_indices_have_streams_of_their_own(task):
    drawn = [
        tuple(task.sample(seed, split, index, 64)[0])
        for seed in (0, 1)
        for split in ("train", "validation", "test")
        for index in range(100)
    ]
    assert len(set(drawn)) == len(drawn)


def test_training_never_repeats_unless_asked():
    def first_rows(**options):
        batches = Sort().batches(0, "train", 4, 20, **options)
        return [tuple(row) for batch in itertools.islice(batches, 5) for row in batch.tokens.tolist()]

    endless = first_rows()
    assert len(set(endless)) == 20
    assert first_rows(start=8)[:12] == endless[8:]
    assert first_rows(epoch=6) == [endless[i % 6] for i in range(20)]


def test_the_same_data_in_another_process():
    code = (
        "from parzen.lab.tasks.mqmtar import MQMTAR; from parzen.lab.tasks.sort import Sort; "
        "print(*(t.sample(4, 'train', 9, (20, 64)) for t in (MQMTAR(), Sort())))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = " ".join(str(task.sample(4, "train", 9, (20, 64))) for task in (MQMTAR(), Sort()))
    assert there.strip() == here


def test_these_streams_for_ever():
    """Published results name a seed: these numbers must never change."""
    assert Sort().sample(0, "train", 0, 8)[0].tolist() == [0, 12, 26, 6, 6, 9, 29, 11]
    pairs = [0, 0, 212, 226, 1, 224, 125, 0, 213, 249, 1, 18, 193, 0, 0, 0]
    asked = [2, 212, 226, 2, 212, 226, 2, 213, 249, 2, 212, 226]
    assert MQMTAR().sample(0, "train", 0, 16)[0].tolist() == [*pairs, *asked]


@pytest.mark.parametrize("task", [Sort(), Reverse(), Copy(), MQMTAR()], ids=repr)
def test_sampling_does_not_bound_training(task):
    """A million tokens a second; the best of a few batches, for other processes may be busy."""
    batches = task.batches(0, "train", 256, (32, 64))
    next(batches)
    rates = []
    for _ in range(8):
        begin = time.perf_counter()
        tokens = int(next(batches).lengths.sum())
        rates.append(tokens / (time.perf_counter() - begin))
    assert max(rates) > 1e6


# ---- scores --------------------------------------------------------------------------------------


def test_scores_count_the_target_and_its_end():
    task = Copy(symbols=5)
    batch = task.batch_of([([1, 2, 3], [1, 2, 3]), ([4], [4]), ([2, 2], [2, 2])])
    said = batch.labels.clamp(min=0)  # anything where nothing is asked
    logits = torch.nn.functional.one_hot(said, task.vocab).double()
    assert exact_match(logits, batch.labels).tolist() == [True, True, True]
    assert token_accuracy(logits, batch.labels).tolist() == [1, 1, 1]
    said[0, 5] = 4  # the second token of three
    said[1, 3] = 4  # EOS
    logits = torch.nn.functional.one_hot(said, task.vocab).double()
    assert exact_match(logits, batch.labels).tolist() == [False, False, True]
    assert_close(token_accuracy(logits, batch.labels), torch.tensor([3 / 4, 1 / 2, 1]))


def test_scores_refuse_what_they_cannot_score():
    with pytest.raises(ValueError, match=r"expected logits \(B, T, V\).* got \(2, 3\) and \(2, 3\)"):
        exact_match(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="a row with none"):
        token_accuracy(torch.zeros(1, 3, 4), torch.full((1, 3), IGNORED))


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sort(symbols=1), "2 or more symbols, got 1"),
        (lambda: Sort().sample(0, "train", 0, 0), "length of 1 or more for sort, got 0"),
        (lambda: Sort().sample(0, "train", 0, -3), "length of 1 or more for sort, got -3"),
        (lambda: Sort().sample(0, "train", 0, (64, 32)), r"got \(64, 32\); swap"),
        (lambda: Sort().sample(0, "training", 0, 8), "train, validation, test, got 'training'"),
        (lambda: Sort().sample(-1, "train", 0, 8), "a seed of 0 or more, got -1"),
        (lambda: Sort().sample(0, "train", -1, 8), r"each 0 or more, got \[-1\]"),
        (lambda: Sort().batch(0, "train", [], 8), r"one or more indices.* got \[\]"),
        (lambda: next(Sort().batches(0, "train", 0, 8)), "batch size and an epoch of 1 or more, got 0"),
        (lambda: next(Sort().batches(0, "train", 1, 8, epoch=0)), "got 1 and 0"),
        (lambda: Sort().batch_of([]), "one or more pairs"),
        (lambda: Sort().batch_of([([3], [32])]), r"tokens in 0 … 31 for sort, got 32"),
        (lambda: MQMTAR().sample(0, "train", 0, 5), r"6 or more, room for 1 pair\(s\) of 6 tokens, got 5"),
        (lambda: SMALL.sample(0, "train", 0, (8, 16)), r"12 or more, room for 2 pair\(s\).* got 8"),
        (lambda: SMALL.sample(0, "test", 0, 65_536), "at most 4096 pairs, one a key, got 8738"),
        (lambda: MQMTAR(alphabet=16), "at most 256 keys .* got 10000"),
        (lambda: MQMTAR(keys=3, fewest_pairs=4), "at least 4 keys, one for each pair, got 3"),
        (lambda: MQMTAR(queries=0), "queries of 1 or more, got 0"),
        (lambda: MQMTAR(density=1.1), "density in 0 … 1, got 1.1"),
    ],
)
def test_bad_parameters_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Sort(), MQMTAR()], ids=repr)
def test_files_give_back_what_was_written(tmp_path, task):
    pairs = [task.sample(0, "test", index, (12, 64)) for index in range(9)]
    path = write_pairs(tmp_path, "test", 3, 64, pairs)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["test_3_64.src", "test_3_64.trg"]
    first = path.read_text().splitlines()[0]
    assert first == " ".join(str(token) for token in pairs[0][0])
    read = [*read_pairs(path, task.symbols)]
    assert len(read) == 9
    assert all(same(one, other) for one, other in zip(read, pairs, strict=True))
    for got, expected in zip(task.batch_of(read), task.batch(0, "test", range(9), (12, 64)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"1 2\n3\n", b"1 2\n", r"test_0_2.trg ends before line 2"),
        (b"1 2\n", b"1 2\n3\n", r"test_0_2.src ends before line 2"),
        (b"", b"", "is empty"),
        (b"1 2\n\n3\n", b"1\n1\n1\n", "test_0_2.src, line 2: expected tokens"),
        (b"1 2\n", b"1 -2\n", "test_0_2.trg, line 1: expected tokens 0 or more"),
        (b"1 2.5\n", b"1\n", "line 1: expected tokens"),
        (b"1 two\n", b"1\n", "line 1: expected tokens"),
        (b"1 " + b"9" * 30 + b"\n", b"1\n", "line 1: expected tokens"),
        (b"1 32\n", b"1\n", "line 1: expected tokens below 32, got 32"),
        (b"\xff\xfe1\n", b"1\n", "is not text"),
        (b"1\n", None, r"cannot read .*test_0_2.trg: No such file"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, source, target, message):
    path = tmp_path / "test_0_2.src"
    path.write_bytes(source)
    if target is not None:
        path.with_suffix(".trg").write_bytes(target)
    with pytest.raises(UserError, match=message) as caught:
        list(read_pairs(path, 32))
    assert "\n" not in str(caught.value)


def test_the_wrong_file_of_the_two(tmp_path):
    with pytest.raises(UserError, match=r"\*\.src, got .*a\.trg"):
        next(read_pairs(tmp_path / "a.trg"))


def test_the_base_class_is_only_an_interface():
    with pytest.raises(TypeError, match="abstract"):
        SequenceTask()

"""RegBench: automata, the instances drawn from them, the predictors to beat, and the scores."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parzen.lab.tasks import regbench
from parzen.lab.tasks.regbench import (
    BAR,
    VOCAB,
    Automaton,
    Bounds,
    Instance,
    Scores,
    batch_of,
    bucketed,
    load_regbench,
    minimal,
    ngram,
    truth_of,
)
from parzen.lab.tasks.task import IGNORED

EASY = Bounds(states=(4, 4), letters=(6, 6))
ONE_LETTER = Bounds(states=(2, 2), letters=(1, 1), edges=(1, 1))


@pytest.fixture(scope="module")
def data():
    return load_regbench(300)


def scored(instances, predict):
    """Scores of ``predict(batch)``, in batches of 250."""
    scores = Scores()
    for start in range(0, len(instances), 250):
        part = instances[start : start + 250]
        batch = batch_of(part)
        scores.add(predict(part, batch), truth_of(part), batch.labels, batch.lengths)
    return scores


def random_edges(random, states, letters=6):
    edges = []
    for _ in range(states):
        count = random.integers(1, 4)
        tokens = random.choice(np.arange(1, letters + 1), count, replace=False)
        edges.append(dict(zip(tokens.tolist(), random.integers(0, states, count).tolist(), strict=True)))
    return edges


def differ(one, p, other, q):
    """Whether the languages from state p of one and q of another differ: a search over pairs of states."""
    seen, queue = {(p, q)}, [(p, q)]
    for p, q in queue:
        if one[p].keys() != other[q].keys():
            return True
        for pair in ((one[p][token], other[q][token]) for token in one[p]):
            if pair not in seen:
                seen.add(pair)
                queue.append(pair)
    return False


# ---- automata ------------------------------------------------------------------------------------


def test_minimal_keeps_the_language_with_the_fewest_states():
    random = np.random.default_rng(0)
    smaller = 0
    for trial in range(300):
        edges = random_edges(random, 1 + trial % 12, letters=3 + trial % 4)
        found = [dict(out) for out in minimal(edges).edges]
        assert not differ(edges, 0, found, 0)
        for p, q in itertools.combinations(range(len(found)), 2):
            assert differ(found, p, found, q), "two states with one language"
        reached = {0}
        for _ in found:
            reached |= {to for state in reached for to in found[state].values()}
        assert reached == set(range(len(found)))
        smaller += len(found) < len(edges)
    assert smaller > 50


def test_isomorphic_automata_are_one():
    """States renamed, one of them doubled, one out of reach added: the same canonical form."""
    random = np.random.default_rng(1)
    languages = set()
    for _ in range(200):
        edges = random_edges(random, 8)
        names = [0, *(1 + random.permutation(7)).tolist()]
        renamed = [{}] * 8
        for state, out in enumerate(edges):
            renamed[names[state]] = dict(
                sorted(((token, names[to]) for token, to in out.items()), reverse=True)
            )
        twin, unreached = dict(renamed[3]), {1: 0, 2: 5}
        split = [
            {t: 8 if to == 3 and random.random() < 0.5 else to for t, to in out.items()} for out in renamed
        ]
        assert minimal([*split, twin, unreached]) == minimal(edges)
        languages.add(minimal(edges))
    assert len(languages) > 190


def test_different_languages_differ():
    assert minimal([{1: 1}, {2: 0}]) != minimal([{1: 1}, {3: 0}])
    assert minimal([{1: 1}, {2: 0}]) != minimal([{2: 1}, {1: 0}]), "another initial state"
    assert minimal([{1: 1}, {1: 0}]) == minimal([{1: 0}]) == Automaton((((1, 0),),))


# ---- instances -----------------------------------------------------------------------------------


def test_every_instance_is_accepted_by_its_automaton(data):
    for instance in itertools.chain(*data):
        edges = [dict(out) for out in instance.automaton.edges]
        state, states = 0, []
        for letter in str(instance):
            state = 0 if letter == "|" else edges[state][ord(letter) - ord("a") + 1]
            states.append(state)
        assert instance.states.tolist() == states == instance.automaton.states(instance.tokens)
    forbidden = next(t for t in range(1, BAR) if t not in edges[states[-2]])
    assert instance.automaton.states([*instance.tokens[:-1], forbidden]) is None


def test_splits_hold_different_languages(data):
    assert [len(split) for split in data] == [300, 500, 1000]
    assert len({i.automaton for i in itertools.chain(*data)}) == 1800


def test_bounds_are_met_and_reached(data):
    strings, lengths, states, letters, edges = set(), set(), set(), set(), set()
    for instance in itertools.chain(*data):
        words = str(instance).split("|")
        strings.add(len(words))
        lengths |= {len(word) for word in words}
        states.add(len(instance.automaton.edges))
        letters |= {token for out in instance.automaton.edges for token, _ in out}
        edges |= {len(out) for out in instance.automaton.edges}
    assert strings == set(range(10, 20))
    assert lengths == set(range(1, 50))
    assert max(states) == 12
    assert letters == set(range(1, 19))
    assert edges == {1, 2, 3}


def test_lengths_are_those_of_the_public_data(data):
    lengths = [len(instance) for instance in data.test]
    assert abs(np.mean(lengths) - 379) < 10
    assert max(lengths) < 650


def test_easier_bounds():
    data = load_regbench(100, test=100, validation=0, bounds=EASY)
    assert data.validation == []
    for instance in data.train + data.test:
        assert len(instance.automaton.edges) <= 4
        assert len({token for out in instance.automaton.edges for token, _ in out}) <= 6
    assert len({i.automaton for i in data.train + data.test}) == 200


def test_equal_languages_are_drawn_once():
    """Two states, one letter: eighteen languages, drawn many times over before all are found."""
    data = load_regbench(18, validation=0, test=0, bounds=ONE_LETTER)
    assert {str(i)[0] for i in data.train} == set(regbench.LETTERS)


def test_more_examples_keep_the_tests_and_the_first_examples(data):
    small = load_regbench(20)
    assert [str(i) for i in small.train] == [str(i) for i in data.train[:20]]
    for few, many in zip(small[1:], data[1:], strict=True):
        assert [str(i) for i in few] == [str(i) for i in many]
    assert str(load_regbench(1, seed=1, validation=0, test=0).train[0]) != str(data.test[0])


def test_the_same_data_in_other_processes():
    code = (
        "from parzen.lab.tasks.regbench import load_regbench; "
        "print(*(i for s in load_regbench(30, validation=5, test=5, seed=3) for i in s), sep='\\n')"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    here = [str(i) for split in load_regbench(30, validation=5, test=5, seed=3) for i in split]
    assert [run.communicate()[0].splitlines() for run in runs] == [here, here]


def test_these_instances_for_ever(data):
    """Published results name a seed: these must never change."""
    assert str(data.test[0]).startswith("ehedhdoeodhedehdoeodhehehehoooodoohdo|edo|edehdhedeeoeo")


def test_forty_thousand_automata_in_a_minute():
    begin = time.process_time()
    load_regbench(500, validation=0, test=0, seed=9)
    assert time.process_time() - begin < 60 / 40_000 * 500


# ---- batches -------------------------------------------------------------------------------------


def spelled(text):
    """One that only has tokens: as if its automaton allowed a and b at any time."""
    free = Automaton((((1, 0), (2, 0)),))
    tokens = np.asarray([regbench.TEXT.index(letter) for letter in text], np.uint8)
    return Instance(free, tokens, np.zeros(len(tokens), np.uint8))


def test_batches_hold_inputs_labels_and_lengths():
    tokens, labels, lengths = batch_of([spelled("ab|ar"), spelled("b|a")])
    assert tokens.tolist() == [[1, 2, 19, 1], [2, 19, 0, 0]]
    assert labels.tolist() == [[2, IGNORED, 1, 18], [IGNORED, 1, IGNORED, IGNORED]]
    assert lengths.tolist() == [4, 2]
    truth = truth_of([spelled("ab|ar"), spelled("b|a")])
    assert truth.shape == (2, 4, VOCAB)
    assert_close(truth.sum(2), torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]))
    assert_close(truth[0, :, 1:3], torch.full((4, 2), 0.5))


def test_truth_is_the_automaton_after_each_token(data):
    for one in data.test[:50]:
        edges = one.automaton.edges
        words, state = one.truth(), 0
        for token, row in zip(one.tokens[:-1], words, strict=True):
            state = 0 if token == BAR else dict(edges[state])[token]
            assert np.flatnonzero(row).tolist() == [token for token, _ in edges[state]]
            assert_close(row[row > 0], np.full(len(edges[state]), 1 / len(edges[state]), np.float32))


@pytest.mark.parametrize(("count", "size"), [(1000, 32), (1001, 32), (1000, 7), (500, 16)])
def test_buckets_hold_every_index_once_with_little_padding(data, count, size):
    lengths = np.asarray([len(i) for i in data.test + data.validation])[:count]
    batches = [*bucketed(lengths, size, seed=4)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert sorted(map(len, batches), reverse=True)[: count // size] == [size] * (count // size)
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert 1 - lengths.sum() / padded < 0.1
    again, other = bucketed(lengths, size, seed=4), bucketed(lengths, size, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert {frozenset(b.tolist()) for b in batches}.isdisjoint(frozenset(b.tolist()) for b in other)
    # Long batches do not come last.
    means = [lengths[batch].mean() for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5


# ---- scores and predictors -----------------------------------------------------------------------


def test_the_automaton_itself_is_perfect(data):
    scores = scored(data.test[:300], lambda part, _: truth_of(part))
    assert scores.accuracy_all == scores.accuracy_last == 1
    assert scores.tvd == 0
    entropy = np.concatenate([-np.log(i.truth().max(1)) for i in data.test[:300]]).mean()
    assert abs(scores.loss - entropy) < 0.02
    curves = scores.by_position()
    assert (curves["accuracy"] == 1).all()
    assert (curves["tvd"] == 0).all()


def test_scores_by_hand():
    """Two instances over a and b, each of chance ½ everywhere; every token read counts, one before | too."""
    part = [spelled("ab|ar"), spelled("b|a")]
    batch = batch_of(part)
    said = torch.zeros(2, 4, VOCAB)
    said[0, 0, 1], said[0, 0, 2] = 0.75, 0.25  # right, distance ¼
    said[0, 1, BAR] = 1  # | is what follows, and wrong: distance 1
    said[0, 2, 1:3] = 0.5  # exact
    said[0, 3, 3], said[0, 3, 18], said[0, 3, 2] = 0.5, 0.25, 0.25  # c is not allowed: distance ¾
    said[1, 0, 2] = 1  # right, distance ½
    said[1, 1, 1] = 1
    said[1, 2:, 5] = 1  # padding
    scores = Scores()
    scores.add(said[:1], truth_of(part[:1]), batch.labels[:1], batch.lengths[:1])
    short = batch_of(part[1:])
    scores.add(said[1:, :2], truth_of(part[1:]), short.labels, short.lengths)
    whole = Scores()
    whole.add(said, truth_of(part), batch.labels, batch.lengths)
    for s in (scores, whole):
        assert s.accuracy_all == 4 / 6
        assert s.accuracy_last == 1 / 2
        assert_close(s.tvd, (0.25 + 1 + 0 + 0.75 + 0.5 + 0.5) / 6)
        assert_close(s.loss, float(-np.log([0.25, 0.5, 0.25, 1]).mean()))
        curves = s.by_position()
        assert curves["count"].tolist() == [2, 2, 1, 1]
        assert curves["accuracy"].tolist() == [1, 0.5, 1, 0]
        assert_close(curves["tvd"], np.asarray([0.375, 0.75, 0, 0.75]))
        assert_close(curves["loss"], -np.log([0.25, 1, 0.5, 0.25]))


def test_ngrams_by_hand():
    tokens = batch_of([spelled("aab|aba"), spelled("cd|ab")]).tokens
    a, b, c, d = (np.eye(VOCAB)[i] for i in range(1, 5))
    # Read: a a b | a b.
    one = [a, a, (2 * a + b) / 3, (2 * a + b) / 3, (3 * a + b) / 4, (3 * a + 2 * b) / 5]
    # Nothing has followed b: the unigram. After | the first letters of strings.
    two = [a, a, one[2], a, (a + b) / 2, one[5]]
    three = [a, a, one[2], a, a, one[5]]
    for order, rows in ((1, one), (2, two), (3, three)):
        assert_close(ngram(tokens, order)[0].double(), torch.tensor(np.stack(rows)), rtol=0, atol=1e-6)
    assert_close(ngram(tokens, 3)[1, 2].double(), torch.tensor(c), rtol=0, atol=1e-6)
    assert_close(ngram(tokens, 1)[1, 1].double(), torch.tensor((c + d) / 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("order", "accuracy", "tvd"), [(1, 0.49, 0.62), (2, 0.82, 0.29), (3, 0.93, 0.20)])
def test_ngrams_score_as_measured_on_the_public_data(data, order, accuracy, tvd):
    scores = scored(data.test, lambda _, batch: ngram(batch.tokens, order))
    assert abs(scores.accuracy_all - accuracy) < 0.02
    assert abs(scores.tvd - tvd) < 0.02


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bounds(states=(5, 4)), r"states as \(smallest, largest\), 1 or more, got \(5, 4\)"),
        (lambda: Bounds(strings=(0, 4)), r"strings as .* got \(0, 4\)"),
        (lambda: Bounds(letters=(4, 19)), "at most 18 letters, got 19"),
        (lambda: Bounds(edges=(1, 4)), "at most 3 edges .* got 4; give more letters or states"),
        (lambda: Bounds(strings=(1, 9)), "2 letters or more in an instance, got 1 string of 1 letter"),
        (lambda: load_regbench(-1), "got seed 0, -1 examples"),
        (lambda: load_regbench(1, seed=-2), "seed -2"),
        (
            lambda: load_regbench(500, test=0, bounds=ONE_LETTER),
            "expected 1000 different languages, found 18 among 21000 automata; ask for fewer",
        ),
        (lambda: batch_of([]), "one or more instances"),
        (lambda: truth_of([]), "one or more instances"),
        (lambda: next(bucketed([3, 4], 0, 0)), r"got \(0, 16, 0\)"),
        (lambda: ngram(torch.ones(1, 3, dtype=torch.long), 0), "order in 1 … 4, got 0"),
        (lambda: ngram(torch.ones(1, 3, dtype=torch.long), 5), "order in 1 … 4, got 5"),
        (
            lambda: scored([spelled("aba")], lambda *_: torch.ones(1, 2, 26) / 26),
            r"truth \(1, 2, 20\) and lengths \(1,\), got \(1, 2, 26\)",
        ),
        (lambda: scored([spelled("aba")], lambda *_: torch.randn(1, 2, VOCAB)), "softmax the logits"),
    ],
)
def test_bad_parameters_are_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()

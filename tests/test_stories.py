"""Stories: reading any file or saying what is wrong with it, generating, tokenising, windows, n-grams."""

import gzip
import itertools
import json
import lzma
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.tasks import stories as task
from parzen.lab.tasks.ngrams import Bigram
from parzen.lab.tasks.stories import (
    END,
    IGNORED,
    Stories,
    cache_dir,
    encode,
    generated_stories,
    load_stories,
    read_stories,
    train_tokenizer,
)
from parzen.lab.tasks.tales import tales

TWO = ["Once there was a fox.\nIt ran.", 'She said "héllo" — 再见 🦊']
TEXT = "\n\n".join(TWO)
LINES = "".join(json.dumps(story) + "\n" for story in TWO)


def named(value):
    """Test names without the data, which may differ between processes."""
    return value if isinstance(value, str) and len(value) < 20 and value.isprintable() else "data"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    def put(name, data):
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return put


# ---- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("traindataset.txt", LINES),
        ("a.jsonl", LINES.replace("\n", "\r\n\r\n")),
        ("a.jsonl", "\ufeff" + LINES),
        ("a.jsonl", "".join(json.dumps({"text": s}) + "\n" for s in TWO)),
        ("a.txt", "".join(json.dumps({"story": s, "id": 1}, ensure_ascii=False) + "\n" for s in TWO)),
        ("a.jsonl", LINES.removesuffix("\n")),
        ("a.txt", TEXT),
        ("a.txt", "\n \n" + TEXT.replace("\n\n", "\n \t\n\n") + "\n\n"),
        ("a.txt", TEXT.replace("\n", "\r\n")),
        ("a.txt", END.join(TWO) + END),
        ("a.jsonl.xz", lzma.compress(LINES.encode())),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("named-otherwise", lzma.compress(TEXT.encode())),
        ("a.txt.gz", gzip.compress(TEXT.encode()) + gzip.compress(b"")),
    ],
    ids=named,
)
def test_every_layout_gives_the_same_stories(write, name, data):
    assert read_stories(write(name, data)) == TWO


def test_blank_lines_belong_to_a_story_when_end_marks_separate(write):
    assert read_stories(write("a.txt", f"One.\n\nTwo.{END}\nThree.{END}")) == ["One.\n\nTwo.", "Three."]


def test_an_end_mark_inside_a_json_story_is_dropped(write):
    assert read_stories(write("a.jsonl", json.dumps(f"a{END}b"))) == ["a b"]


def test_a_lone_surrogate_does_not_stop_the_tokeniser(write):
    (story,) = read_stories(write("a.jsonl", '"a \\ud800 b"'))
    assert story == "a ? b"
    train_tokenizer([story], 300)


RANDOM = np.random.default_rng(0).bytes(5000)
XZ = lzma.compress(RANDOM.hex().encode())
GZ = gzip.compress(RANDOM.hex().encode())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.txt", "", "is empty"),
        ("blank.txt", " \n\n\t\n", "is empty"),
        ("empty.jsonl", '""\n" "\n', "is empty"),
        ("ends.txt", END + "\n" + END, "is empty"),
        ("empty.xz", lzma.compress(b""), "is empty"),
        ("zeros.txt", b"abc\n" + bytes(100), "is binary"),
        ("latin1.txt", "ok\ncaf\u00e9\n".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
        ("utf16.txt", "hello".encode("utf-16"), "is binary|not UTF-8"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + RANDOM[:50], "not UTF-8|is binary"),
        ("a.jsonl", LINES + '"unfinished\n', "line 3: not JSON"),
        ("a.jsonl", LINES + "7\n", 'line 3: expected a JSON string, or an object with "text"'),
        ("a.jsonl", '{"title": "x"}\n', "line 1: expected"),
        ("a.jsonl", '{"text": ["x"]}\n', "line 1: expected"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("plain.jsonl", TEXT, "line 1: not JSON"),
        ("cut.xz", XZ[:-2000], "damaged or cut short"),
        ("cut.gz", GZ[:-2000], "damaged or cut short"),
        ("bad.xz", XZ[:2000] + b"????" + XZ[2004:], "damaged or cut short"),
        ("bad.gz", GZ[:-8] + b"????" + GZ[-4:], "damaged or cut short"),
        ("head.xz", XZ[:6] + bytes(60), "damaged or cut short"),
    ],
    ids=named,
)
def test_a_bad_file_gets_one_clear_line(write, name, data, message):
    with pytest.raises(UserError, match=message) as caught:
        read_stories(write(name, data))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*nowhere.txt: No such file"):
        read_stories(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        read_stories(tmp_path)


def test_a_decompression_bomb_costs_no_memory(write, monkeypatch):
    """100 MB of one line, in 15 kB: refused at the longest line, long before it is all there."""
    monkeypatch.setattr(task, "LONGEST_LINE", 1 << 20)
    bomb = write("bomb.xz", lzma.compress(b"a" * 100_000_000, preset=0))
    with pytest.raises(UserError, match="line 1: longer than 1 MiB"):
        read_stories(bomb)


def test_reading_stops_after_enough_text_and_says_so(write):
    path = write("long.txt.gz", gzip.compress(b"A story.\n\n" * 200_000))
    said = []
    assert len(read_stories(path, most=10_000, say=said.append)) == 1000
    assert said == ["long.txt.gz: only the first 0.00954 MiB are used"]


# ---- the generator -------------------------------------------------------------------------------


def test_the_same_seed_tells_the_same_stories_in_any_process():
    code = (
        "from parzen.lab.tasks.tales import tales; from itertools import islice; print(*islice(tales(5), 20))"
    )
    # A hash seed that no other process has by chance.
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONIOENCODING": "utf-8"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=True
    )
    assert other.stdout == " ".join(itertools.islice(tales(5), 20)) + "\n"
    assert next(tales(5)) != next(tales(6))


def test_stories_are_varied_and_well_formed():
    told = list(itertools.islice(tales(0), 3000))
    assert len(set(told)) == 3000
    text = "\n".join(told)
    assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou\W]", text)
    assert not re.search(r"  |\.\.|\bNone\b|[{}]", text)
    assert not re.search(r'[.!?]"? [a-z](?<!" [a-z])', text), "a sentence begins with a capital"
    assert all(story.endswith(".") for story in told)
    assert len(set(re.findall(r"\w+", text))) > 300


def test_the_end_can_be_told_from_what_came_before():
    """Whoever took, got or was given a thing last, without laying it down since, has it in the end."""
    checked = 0
    for story in itertools.islice(tales(1), 300):
        for holder, thing in re.findall(r"In the end, (\w+) had the \w+ \w+ (\w+)\.", story):
            body = story[: story.index("In the end")]
            last = [m for m in re.finditer(rf"(\w+) gave the {thing} to (\w+)\.", body)]
            if last and thing not in body[last[-1].end() :]:
                assert last[-1].group(2) == holder
                checked += 1
    assert checked > 10


def test_generated_text_has_the_size_asked_for():
    stories = generated_stories(0, 50_000)
    assert 50_000 <= sum(map(len, stories)) < 60_000


# ---- tokens --------------------------------------------------------------------------------------


def test_any_text_survives_the_tokeniser():
    tokenizer = train_tokenizer(generated_stories(0, 20_000), 400)
    for text in (*TWO, "  two  spaces\t\n\n", "\x01\x7f", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.token_to_id(END) == 0


def test_training_is_the_same_in_another_process_and_is_cached():
    stories = generated_stories(3, 30_000)
    first = train_tokenizer(stories, 500).to_str()
    (cached,) = cache_dir().iterdir()
    assert train_tokenizer(stories, 500).to_str() == first
    assert [*cache_dir().iterdir()] == [cached]
    code = (
        "from parzen.lab.tasks.stories import *;"
        "print(train_tokenizer(generated_stories(3, 30_000), 500).to_str(), end='')"
    )
    env = {**os.environ, "XDG_CACHE_HOME": "", "HOME": "", "RAYON_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=True
    )
    assert other.stdout == first


def test_another_text_or_size_is_another_entry():
    train_tokenizer(["a b c"], 300)
    train_tokenizer(["a b", "c"], 300)
    train_tokenizer(["a b c"], 301)
    assert len([*cache_dir().iterdir()]) == 3


def test_a_damaged_cache_is_made_again():
    stories = generated_stories(0, 10_000)
    first = train_tokenizer(stories, 300).to_str()
    (cached,) = cache_dir().iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[:100])
    assert train_tokenizer(stories, 300).to_str() == first
    assert cached.read_bytes() == whole


@pytest.mark.parametrize("home", ["", "relative", "/proc/nowhere"])
def test_no_usable_home_is_no_obstacle(monkeypatch, tmp_path, home):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    assert train_tokenizer(["one two"], 300).get_vocab_size() > 256
    assert [*tmp_path.iterdir()] == []


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b.txt"
    write_whole(path, b"old")
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(UserError, match=r"cannot write .*b.txt: No space left on device"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


# ---- the task ------------------------------------------------------------------------------------


def numbers(train, valid):
    tokenizer = train_tokenizer(["x"], 300)
    return Stories(tokenizer, np.asarray(train, np.uint16), np.asarray(valid, np.uint16), "numbers")


def test_batches_are_seeded_crops():
    stories = numbers(range(50), [0])
    batches = stories.batches(200, 7, seed=1)
    inputs, targets = next(batches)
    assert inputs.shape == targets.shape == (200, 7)
    assert_close(targets, inputs + 1)
    assert_close(inputs[:, 1:], inputs[:, :-1] + 1)
    # Every start is drawn, the first and the last one too.
    assert sorted(set(inputs[:, 0].tolist())) == list(range(43))
    again, other = stories.batches(200, 7, seed=1), stories.batches(200, 7, seed=2)
    assert_close(next(again)[0], inputs)
    assert not torch.equal(next(batches)[0], inputs)
    assert not torch.equal(next(other)[0], inputs)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 23])
def test_windows_have_every_validation_token_as_a_target_once(length):
    inputs, targets = numbers([1], range(length + 1)).windows(5)
    assert inputs.shape == targets.shape == (-(-length // 5), 5)
    real = targets != IGNORED
    assert targets[real].tolist() == list(range(1, length + 1))
    assert inputs[real].tolist() == list(range(length))


def test_load_splits_by_story_and_learns_the_tokeniser_from_training_stories_only(write):
    told = [f"Story number {i}." for i in range(100)]
    path = write("a.txt", "\n\n".join(told))
    stories = load_stories(path, vocab=300, context=8)
    assert stories.tokenizer.decode(stories.train.tolist()) == "".join(told[:94])
    assert stories.valid[0] == 0
    assert stories.tokenizer.decode(stories.valid.tolist()) == "".join(told[94:])
    assert (stories.train == 0).sum() == 94
    assert stories.train[-1] == 0
    assert stories.tokenizer.to_str() == train_tokenizer(told[:94], 300).to_str()


def test_validation_stories_can_come_from_their_own_file(write):
    stories = load_stories(write("a.txt", TEXT), write("b.txt", "Hello."), vocab=300, context=8)
    assert stories.tokenizer.decode(stories.valid.tolist()) == "Hello."
    assert stories.tokenizer.decode(stories.train.tolist()) == "".join(TWO)


def test_too_little_text_is_refused(write):
    with pytest.raises(UserError, match="one story only"):
        load_stories(write("a.txt", "Hello."))
    with pytest.raises(UserError, match=r"holds \d+ tokens to train on; at least 129"):
        load_stories(write("a.txt", TEXT))


def test_built_in_stories_load():
    stories = load_stories(None, vocab=400, most=50_000)
    assert stories.vocab == 400
    assert len(stories.train) > 10 * len(stories.valid) > 0


# ---- n-grams -------------------------------------------------------------------------------------


def test_ngrams_are_distributions():
    stream = np.random.default_rng(0).integers(0, 9, 400).astype(np.uint16)
    model = Bigram(stream, 12)
    v = np.arange(12)
    for u in range(12):
        assert_close(model.probabilities(np.full(12, u), v).sum(), 1.0, rtol=1e-12, atol=0)


def test_ngrams_on_streams_with_known_entropy():
    random = np.random.default_rng(0)
    independent = random.integers(0, 8, 60_000)
    unigram, bigram = Bigram(independent[:50_000], 8).losses(independent[50_000:])
    assert_close(unigram, np.log(8), rtol=0, atol=0.002)
    assert_close(bigram, np.log(8), rtol=0, atol=0.003)
    # The next token is one of two, depending on the last.
    steps = np.cumsum(random.integers(1, 3, 60_000)) % 8
    unigram, bigram = Bigram(steps[:50_000], 8).losses(steps[50_000:])
    assert_close(unigram, np.log(8), rtol=0, atol=0.002)
    assert_close(bigram, np.log(2), rtol=0, atol=0.003)


def test_the_bigram_interpolates_where_counts_are_thin():
    """2,000 tokens over 400² pairs: bigram counts alone would be useless, the mixture never is."""
    stream = (np.random.default_rng(1).zipf(1.5, 4000) % 400).astype(np.uint16)
    unigram, bigram = Bigram(stream[:2000], 400).losses(stream[2000:])
    assert bigram < unigram + 0.05


def test_encode_ends_each_story():
    tokenizer = train_tokenizer(TWO, 300)
    stream = encode(tokenizer, TWO)
    assert stream.dtype == np.uint16
    assert np.flatnonzero(stream == 0).tolist() == [len(tokenizer.encode(TWO[0]).ids), len(stream) - 1]

"""Stories: reading any file or saying what is wrong with it, generating, tokenising, windows, n-grams."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch.testing import assert_close

from parzen.lab.data import text as files
from parzen.lab.data import tokens
from parzen.lab.data.tales import tales
from parzen.lab.data.text import END, Generated, Split, generated_stories, open_text
from parzen.lab.data.tokens import cache_dir, encode, read_tokenizer, sample, token_stream, train_tokenizer
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.tasks.ngrams import Bigram
from parzen.lab.tasks.stories import Batches, Stories, load_stories
from parzen.lab.tasks.task import IGNORED

TWO = ["Once there was a fox.\nIt ran.", 'She said "héllo" — 再见 🦊']
TEXT = "\n\n".join(TWO)
LINES = "".join(json.dumps(story) + "\n" for story in TWO)


def named(value):
    """Test names without the data, which may differ between processes."""
    return value if isinstance(value, str) and len(value) < 20 and value.isprintable() else "data"


def read_stories(path, most=None, say=files.silent):
    return list(open_text(path, most, say))


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


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*nowhere.txt: No such file"):
        read_stories(tmp_path / "nowhere.txt")
    (tmp_path / "README.md").write_text("no story")
    (tmp_path / ".hidden.txt").write_text("no story")
    with pytest.raises(UserError, match=r"holds no stories: no \.txt"):
        read_stories(tmp_path)


def test_what_can_be_read_once_only_is_refused():
    with pytest.raises(UserError, match="/dev/null can be read once only; save it as a file first"):
        read_stories(Path("/dev/null"))


def test_a_decompression_bomb_costs_no_memory(write, monkeypatch):
    """100 MB of one line, in 15 kB: refused at the longest line, long before it is all there."""
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)
    bomb = write("bomb.xz", lzma.compress(b"a" * 100_000_000, preset=0))
    with pytest.raises(UserError, match="line 1: longer than 1 MiB"):
        read_stories(bomb)


@pytest.mark.parametrize("text", [b"A story without end. " * 50_000, b"a\n" * 600_000])
def test_a_story_without_end_costs_no_memory(write, monkeypatch, text):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)
    with pytest.raises(UserError, match="longer than 1 MiB"):
        read_stories(write("endless.txt.xz", lzma.compress(text, preset=0)))


def test_the_separator_is_chosen_from_the_first_mebibyte(write):
    marked = f"One.\n\nStill one.{END}" + "x" * (2 << 20) + f"{END}Three.\n\nStill three."
    assert [len(s) for s in read_stories(write("a.txt", marked))] == [16, 2 << 20, 20]
    late = "One.\n\n" + "Two. \n" * (1 << 18) + f"\nThree.{END}\n\nFour."
    assert read_stories(write("b.txt", late))[2:] == ["Three.", "Four."]


def test_text_is_read_as_a_stream(write, monkeypatch):
    """The first story comes out long before the last is read."""
    path = write("a.jsonl.gz", gzip.compress((json.dumps("story " * 100) + "\n").encode() * 20_000))
    text = open_text(path)
    stories = iter(text)
    next(stories)
    assert 0 < text.share < 0.9
    assert 1 + sum(1 for _ in stories) == 20_000


def test_reading_stops_after_enough_text_and_says_so(write):
    path = write("long.txt.gz", gzip.compress(b"A story.\n\n" * 200_000))
    said = []
    assert len(read_stories(path, most=10_000, say=said.append)) == 1000
    assert said == ["long.txt.gz: only the first 0.00954 MiB are used"]


# ---- folders and archives ------------------------------------------------------------------------


def packed(path, texts):
    py7zr = pytest.importorskip("py7zr")
    with py7zr.SevenZipFile(path, "w") as archive:
        for name, data in texts.items():
            archive.writestr(data, name)
    return path


def test_a_folder_is_read_in_the_order_of_names(write, tmp_path):
    write("c.txt", "Five.\n\nSix.")
    write("a.jsonl.xz", lzma.compress(b'"One."\n"Two."\n'))
    write("b.txt.gz", gzip.compress(f"Three.{END}Four.".encode()))
    write("notes.md", "not a story")
    assert read_stories(tmp_path) == ["One.", "Two.", "Three.", "Four.", "Five.", "Six."]
    text = open_text(tmp_path)
    assert [*text.hashes] == ["a.jsonl.xz", "b.txt.gz", "c.txt"]
    assert text.hashes["c.txt"] == hashlib.sha256(b"Five.\n\nSix.").hexdigest()
    assert read_stories(tmp_path, most=20) == ["One.", "Two.", "Three.", "Four."]


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        ("traindataset.txt", "valdataset.txt"),
        ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"),
        ("tinystories-train.txt", "tinystories-validation.txt"),
        ("valley.txt", "stories_val.txt"),
    ],
)
def test_validation_stories_are_known_by_name(write, tmp_path, train, valid):
    write(train, "To train on.\n\nAnd this.")
    write(valid, "To validate.\n\nAnd that.")
    assert read_stories(tmp_path) == ["To train on.", "And this."]
    assert list(open_text(tmp_path, held_out=True)) == ["To validate.", "And that."]
    # Named by itself, a file is what it is given for.
    assert read_stories(tmp_path / valid) == ["To validate.", "And that."]
    stories = load_stories(tmp_path, vocab=300, context=8)
    assert stories.tokenizer.decode(stories.train.tolist()) == "To train on.And this."
    assert stories.tokenizer.decode(stories.valid.tolist()) == "To validate.And that."
    assert {*stories.hashes} == {train, valid}


def test_stories_are_read_from_a_split_archive(tmp_path):
    whole = packed(
        tmp_path / "whole",
        {"traindataset.txt": LINES, "valdataset.txt": '"Held out."\n', "LICENSE": "no story"},
    ).read_bytes()
    cut = len(whole) // 2
    (tmp_path / "b.7z.001").write_bytes(whole[:cut])
    (tmp_path / "b.7z.002").write_bytes(whole[cut:])
    (tmp_path / "whole").unlink()
    for path in (tmp_path / "b.7z.001", tmp_path):
        assert read_stories(path) == TWO
        assert list(open_text(path, held_out=True)) == ["Held out."]
        assert [*open_text(path).hashes] == ["b.7z.001", "b.7z.002"]
    with pytest.raises(UserError, match=r"later part .* give b\.7z\.001"):
        read_stories(tmp_path / "b.7z.002")


def test_archives_of_compressed_files_and_of_none(tmp_path):
    assert read_stories(packed(tmp_path / "a.7z", {"a.jsonl.xz": lzma.compress(LINES.encode())})) == TWO
    with pytest.raises(UserError, match="holds no stories"):
        read_stories(packed(tmp_path / "b.7z", {"README": "none"}))


def test_a_damaged_archive_gets_one_clear_line(tmp_path):
    data = bytearray(packed(tmp_path / "a.7z", {"a.txt": os.urandom(9000).hex()}).read_bytes())
    data[3000] ^= 1
    (tmp_path / "a.7z").write_bytes(data)
    with pytest.raises(
        UserError, match=r"a\.7z is damaged, or a part of it is missing \(.*\); download it again"
    ):
        read_stories(tmp_path / "a.7z")


def test_the_digest_is_of_the_content(write, tmp_path):
    digest = open_text(write("a.txt", TEXT)).digest
    assert open_text(write("b.txt", TEXT)).digest == digest
    others = [
        open_text(write("c.txt", TEXT + ".")).digest,
        open_text(tmp_path / "a.txt", most=1000).digest,
        open_text(write("d.jsonl", TEXT)).digest,
        open_text(tmp_path).digest,
        Split(open_text(tmp_path / "a.txt"), held_out=False).digest,
        Split(open_text(tmp_path / "a.txt"), held_out=True).digest,
        Generated(0, 1000).digest,
        Generated(1, 1000).digest,
        Generated(0, 1001).digest,
    ]
    assert len({digest, *others}) == 1 + len(others)


# ---- the generator -------------------------------------------------------------------------------


def test_the_same_seed_tells_the_same_stories_in_any_process():
    code = (
        "from parzen.lab.data.tales import tales; from itertools import islice; print(*islice(tales(5), 20))"
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


def test_training_is_the_same_in_another_process():
    code = (
        "from parzen.lab.data.text import generated_stories;"
        "from parzen.lab.data.tokens import train_tokenizer;"
        "print(train_tokenizer(generated_stories(3, 30_000), 500).to_str(), end='')"
    )
    env = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=True
    )
    assert other.stdout == train_tokenizer(generated_stories(3, 30_000), 500).to_str()


def test_a_sample_is_bounded_and_spread_over_the_whole():
    stories = [f"{number:010}" for number in range(1000)]
    assert sample(iter(stories), 10_000) == stories
    chosen = sample(iter(stories), 9_999)
    assert chosen == stories[::2]
    assert sample(iter(stories), 1000) == stories[::16]
    assert sample(["longer than that"], 5) == ["longer than that"]


def gpt2(folder):
    """A vocabulary in the two files of GPT-2, with the end last, as there."""
    tokenizer = train_tokenizer(generated_stories(0, 20_000), 400)
    tokenizer.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    names = sorted((name for name in vocab if name != END), key=vocab.__getitem__)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate([*names, END])}))
    return tokenizer


def test_vocab_and_merges_are_read_as_of_gpt2(tmp_path):
    trained, read = gpt2(tmp_path), read_tokenizer(tmp_path)
    assert read.token_to_id(END) == 399
    assert read.get_vocab_size() == 400
    for text in (*TWO, *generated_stories(1, 5000), " two  spaces\n"):
        assert [i + 1 for i in read.encode(text).ids] == trained.encode(text).ids
        assert read.decode(read.encode(text).ids) == text
    (tmp_path / "one.json").write_text(read.to_str())
    assert read_tokenizer(tmp_path / "one.json").to_str() == read.to_str()


def test_a_tokeniser_that_cannot_be_used(tmp_path, write):
    with pytest.raises(UserError, match=r"cannot read a tokeniser from .*; give a folder with vocab.json"):
        read_tokenizer(tmp_path)
    with pytest.raises(UserError, match="cannot read a tokeniser from"):
        read_tokenizer(write("a.json", "{}"))
    gpt2(tmp_path)
    vocab = (tmp_path / "vocab.json").read_text().replace(END, "<other>")
    write("vocab.json", vocab)
    with pytest.raises(UserError, match=r"has no <\|endoftext\|>"):
        read_tokenizer(tmp_path)


def test_a_trained_tokeniser_is_cached_and_made_again_if_damaged(write, monkeypatch):
    path = write("a.txt", TEXT * 9)
    first = load_stories(path, vocab=300, context=8).tokenizer.to_str()
    (cached,) = cache_dir().glob("bpe-*")
    whole = cached.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "train_tokenizer", None)
        assert load_stories(path, vocab=300, context=8).tokenizer.to_str() == first
    cached.write_bytes(whole[:100])
    assert load_stories(path, vocab=300, context=8).tokenizer.to_str() == first
    assert cached.read_bytes() == whole
    load_stories(path, vocab=301, context=8)
    assert len([*cache_dir().glob("bpe-*")]) == 2


# ---- token streams -------------------------------------------------------------------------------

TOLD = generated_stories(2, 40_000)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TOLD, 400)


@pytest.fixture
def text(write, monkeypatch):
    """Many stories, in batches of a few."""
    monkeypatch.setattr(tokens, "BATCH", 2000)
    return open_text(write("told.jsonl", "".join(json.dumps(story) + "\n" for story in TOLD)))


def expected(tokenizer):
    return [token for story in TOLD for token in [*tokenizer.encode(story).ids, 0]]


def test_a_stream_is_mapped_and_made_once(text, tokenizer, monkeypatch):
    stream, count = token_stream(text, tokenizer)
    assert isinstance(stream, np.memmap)
    assert stream.dtype == np.uint16
    assert stream.tolist() == expected(tokenizer)
    assert count == len(TOLD)
    assert token_stream(text, tokenizer, lead=True)[0].tolist() == [0, *expected(tokenizer)]
    monkeypatch.setattr(tokens, "encode", None)
    again, count = token_stream(text, tokenizer)
    assert again.tolist() == stream.tolist()
    assert count == len(TOLD)


def test_another_text_or_tokeniser_is_another_stream(text, tokenizer, write):
    token_stream(text, tokenizer)
    other, _ = token_stream(open_text(write("b.txt", "Other.")), tokenizer)
    assert tokenizer.decode(other.tolist()) == "Other."
    few = train_tokenizer(TOLD, 300)
    assert few.decode(token_stream(text, few)[0].tolist()) == "".join(TOLD)


def test_many_tokens_need_four_bytes(tmp_path):
    names = [*pre_tokenizers.ByteLevel.alphabet(), *(f"w{i}" for i in range(70_000)), END]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = read_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text("ab")
    stream, _ = token_stream(open_text(tmp_path / "a.txt"), tokenizer)
    assert stream.dtype == np.uint32
    assert stream.tolist() == [*tokenizer.encode("ab").ids, len(names) - 1]


@pytest.mark.parametrize("lead", [False, True])
def test_an_interrupted_stream_is_gone_on_from(text, tokenizer, monkeypatch, lead):
    """Interrupted again and again, by whatever, the stream is that of one go, no story encoded twice."""
    whole, encoded = [0] * lead + expected(tokenizer), []
    monkeypatch.setattr(tokens, "NOTE", 0)

    def some(tokenizer, stories):
        for piece, count in itertools.islice(encode(tokenizer, stories), 3):
            encoded.append(count)
            yield piece, count
        if sum(encoded) < len(TOLD):
            raise KeyboardInterrupt

    interrupted = 0
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "encode", some)
        while True:
            try:
                stream, count = token_stream(text, tokenizer, lead)
                break
            except KeyboardInterrupt:
                interrupted += 1
                # What was written after the last note, as by a kill in the middle of it, does not count.
                (data,) = cache_dir().glob("*.bin")
                with open(data, "ab") as file:
                    file.write(b"garbage")
    assert interrupted >= 4
    assert stream.tolist() == whole
    assert count == sum(encoded) == len(TOLD)


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(text, tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    code = f"""if True:
        import os, signal
        from pathlib import Path
        from parzen.lab.data import tokens
        from parzen.lab.data.text import open_text
        tokens.BATCH, tokens.NOTE, keep = 2000, 0, tokens._keep
        def kill(file, data, note):
            keep(file, data, note)
            if note.stories > {len(TOLD) // 2}:
                file.write(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
        tokens._keep = kill
        tokenizer = tokens.read_tokenizer(Path({str(tmp_path / "tokenizer.json")!r}))
        tokens.token_stream(open_text(Path({str(text.items[0].path)!r})), tokenizer)
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    (note,) = cache_dir().glob("*.json")
    before = json.loads(note.read_text())
    assert not before["done"]
    assert len(TOLD) // 2 < before["stories"] < len(TOLD)
    assert token_stream(text, read_tokenizer(tmp_path / "tokenizer.json"))[0].tolist() == expected(tokenizer)
    assert len([*cache_dir().iterdir()]) == 2


@pytest.mark.parametrize(
    "note", [b"", b"[]", b'{"tokens": 5}', b'{"done": true}', b'{"tokens": "x"}', b"\xff"]
)
def test_a_damaged_note_or_file_is_made_again(text, tokenizer, note):
    token_stream(text, tokenizer)
    (kept,), (data,) = cache_dir().glob("*.json"), cache_dir().glob("*.bin")
    kept.write_bytes(note)
    assert token_stream(text, tokenizer)[0].tolist() == expected(tokenizer)
    data.write_bytes(data.read_bytes()[:-2])
    assert token_stream(text, tokenizer)[0].tolist() == expected(tokenizer)


def test_processes_wait_for_the_one_that_tokenises(text, tokenizer, monkeypatch):
    made = []

    def counted(tokenizer, stories):
        made.append(1)
        yield from encode(tokenizer, stories)

    monkeypatch.setattr(tokens, "encode", counted)
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda _: token_stream(text, tokenizer)[0].tolist(), range(4)))
    assert streams == [expected(tokenizer)] * 4
    assert made == [1]


def test_a_full_disk_is_one_line_and_gone_on_from(text, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "NOTE", 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5001, limits[1]))
    try:
        with pytest.raises(
            UserError, match=r"cannot write .*\.bin: File too large; make room, or set XDG_"
        ) as caught:
            token_stream(text, tokenizer)
        assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert token_stream(text, tokenizer)[0].tolist() == expected(tokenizer)


@pytest.mark.parametrize("home", ["", "relative", "/proc/nowhere"])
def test_without_a_usable_home_tokens_are_held_in_memory(monkeypatch, tmp_path, write, home):
    path = write("a.txt", TEXT)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    stories = load_stories(path, path, vocab=300, context=8)
    assert stories.tokenizer.decode(stories.train.tolist()) == "".join(TWO)
    assert stories.tokenizer.decode(stories.valid.tolist()) == "".join(TWO)
    assert [*tmp_path.iterdir()] == [path]


def test_long_work_says_how_far_it_is(text, tokenizer, monkeypatch):
    clock = itertools.count(0, 11)
    monkeypatch.setattr(tokens.time, "monotonic", lambda: float(next(clock)))
    said = []
    token_stream(text, tokenizer, say=said.append)
    assert re.fullmatch(r"told\.jsonl: 0 M tokens, \d+:\d\d left", said[3])


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
    batches = stories.batches(400, 7, seed=1)
    inputs, targets = next(batches)
    assert inputs.shape == targets.shape == (400, 7)
    assert_close(targets, inputs + 1)
    assert_close(inputs[:, 1:], inputs[:, :-1] + 1)
    # Every start is drawn, the first and the last one too.
    assert sorted(set(inputs[:, 0].tolist())) == list(range(43))
    again, other = stories.batches(400, 7, seed=1), stories.batches(400, 7, seed=2)
    assert_close(next(again)[0], inputs)
    assert not torch.equal(next(batches)[0], inputs)
    assert not torch.equal(next(other)[0], inputs)


def test_batches_go_on_from_any_step():
    stream = np.arange(1000, dtype=np.uint16)
    batches = Batches(stream, 6, 5, seed=3)
    told = [next(batches)[0] for _ in range(5)]
    assert batches.step == 5
    resumed = Batches(stream, 6, 5, seed=3)
    resumed.step = 3
    assert_close(next(resumed)[0], told[3])
    assert_close(next(resumed)[0], told[4])
    assert_close(batches.at(2)[0], told[2])
    assert batches.step == 5


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_parts_of_a_batch_are_the_batch(parts):
    batches = Batches(np.arange(1000, dtype=np.uint16), 6, 5, seed=3)
    whole, pieces = batches.at(7), [batches.at(7, part, parts) for part in range(parts)]
    assert_close(torch.cat([inputs for inputs, _ in pieces]), whole[0])
    assert_close(torch.cat([targets for _, targets in pieces]), whole[1])


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


def test_the_config_is_of_the_content(write, tmp_path):
    first = load_stories(write("a.txt", TEXT), write("v.txt", "Hello."), vocab=300, context=8)
    assert first.config.vocab == 300
    assert first.config.context == 8
    assert first.hashes == {
        "a.txt": hashlib.sha256(TEXT.encode()).hexdigest(),
        "v.txt": hashlib.sha256(b"Hello.").hexdigest(),
    }
    moved = load_stories(write("b.txt", TEXT), tmp_path / "v.txt", vocab=300, context=8)
    assert moved.config == first.config
    for change in ({"vocab": 290}, {"context": 9}, {"most": 1000}, {"valid": write("w.txt", "Bye.")}):
        options = {"valid": tmp_path / "v.txt", "vocab": 300, "context": 8, **change}
        assert load_stories(tmp_path / "a.txt", **options).config != first.config


def test_a_tokeniser_can_be_given(write, tmp_path):
    gpt2(tmp_path)
    stories = load_stories(write("a.txt", TEXT), write("v.txt", "Hello."), tokenizer=tmp_path, context=8)
    assert stories.vocab == stories.config.vocab == 400
    assert stories.train[-1] == stories.valid[0] == 399
    assert stories.tokenizer.decode(stories.train.tolist()) == "".join(TWO)
    assert [*cache_dir().glob("bpe-*")] == []


def test_what_is_done_is_said(write):
    said = []
    load_stories(write("a.txt", TEXT), write("v.txt", "Hello."), vocab=300, context=8, say=said.append)
    assert said[0] == "a.txt: training a tokeniser of 300 tokens"
    assert re.fullmatch(r"a\.txt: 2 stories to train on, 1 to validate; \d+ and \d tokens", said[1])


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
    ((stream, count),) = encode(tokenizer, TWO)
    assert stream.dtype == np.uint16
    assert count == 2
    assert np.flatnonzero(stream == 0).tolist() == [len(tokenizer.encode(TWO[0]).ids), len(stream) - 1]

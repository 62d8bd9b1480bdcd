"""The README and the docs: their Python blocks run, their commands exist, their links and numbers hold."""

import re
import shlex
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from parzen.cli import main, parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)


def commands(block):
    """The arguments of each call of parzen in a shell block; what is cut short with … is left out."""
    for line in block.replace("\\\n", "").splitlines():
        _, called, arguments = line.partition("parzen ")
        if re.fullmatch(r"\s*|torchrun .* -m ", _) and called and "…" not in line:
            yield shlex.split(arguments, comments=True)


def run(example):
    """Does what a block says that stands below ``<!-- run -->``, with little training."""
    if not example.document.text[: example.start].endswith("<!-- run -->\n"):
        return
    for arguments in commands(example.parsed):
        found = [str(p) for a in arguments for p in (sorted(Path().glob(a)) if "*" in a else [a])]
        found = [re.sub("^100000$", "2000", a) for a in found]
        assert main(found) == 0, shlex.join(found)


READER = Sybil(parsers=[PythonCodeBlockParser(), CodeBlockParser("sh", run), SkipParser()])


@ALL
def test_blocks_run(path, tmp_path, monkeypatch):
    # Top to bottom, one namespace and one folder a document.
    monkeypatch.chdir(tmp_path)
    document = READER.parse(path)
    for example in document.examples():
        example.evaluate()
    text = path.read_text(encoding="utf-8")
    assert len(list(document.examples())) >= text.count("\n```python\n") + text.count("\n```sh\n")


@ALL
def test_commands_exist(path):
    for block in re.findall(r"\n```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for arguments in commands(block):
            # This machine may have no GPU.
            parser().parse_args(["cpu" if a == "cuda" else a for a in arguments])


@ALL
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


@ALL
def test_numbers_that_are_links_stand_in_the_table_they_lead_to(path):
    for number, target in re.findall(
        r"\[([+−]?\d[^\]]*)\]\(([^)]+/results/[^)]+)\)", path.read_text(encoding="utf-8")
    ):
        cells = re.split(r"[|\n]", (path.parent / target).read_text(encoding="utf-8"))
        told = {shown.strip() for cell in cells for shown in (cell, cell.partition("±")[0])}
        assert number in told, f"{path.name}: {target} has no {number} any more; change the sentence"

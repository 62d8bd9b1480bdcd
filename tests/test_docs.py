"""Every Python block of the README and the docs runs, top to bottom, one namespace a document."""

import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
READER = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = READER.parse(path)
    for example in document.examples():
        example.evaluate()
    assert len(list(document.examples())) >= path.read_text(encoding="utf-8").count("\n```python\n")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_numbers_that_are_links_stand_in_the_table_they_lead_to(path):
    for number, target in re.findall(
        r"\[([+−]?\d[^\]]*)\]\(([^)]+/results/[^)]+)\)", path.read_text(encoding="utf-8")
    ):
        cells = re.split(r"[|\n]", (path.parent / target).read_text(encoding="utf-8"))
        told = {shown.strip() for cell in cells for shown in (cell, cell.partition("±")[0])}
        assert number in told, f"{path.name}: {target} has no {number} any more; change the sentence"

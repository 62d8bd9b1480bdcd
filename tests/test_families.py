"""Families of transformers: the kernel is at work, or the model is refused with a reason; none is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from families import BEGIN, END, FOLDER, PAGE, families, table, verdict

SCRIPT = Path(__file__).parent / "families.py"
# Of every kind.
WORK = {
    "decoder": "llama",
    "decoder, one matrix for queries, keys and values": "gpt2",
    "decoder with latent keys": "deepseek_v3",
    "encoder": "distilbert",
    "encoder–decoder": "bart",
    "vision": "vit",
    "audio": "wav2vec2",
}
REFUSED = {
    "position bias": "t5",
    "no attention": "mamba",
    "the mask is read elsewhere": "nllb_moe",
}


def sweep(path, *names):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(SCRIPT), str(path), *names]
    subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return sweep(tmp_path_factory.mktemp("families") / "found.json", *WORK.values(), *REFUSED.values())


@pytest.mark.parametrize("family", WORK.values(), ids=WORK)
def test_the_kernel_is_at_work(found, family):
    assert found[family]
    for record in found[family]:
        assert record.get("parzen") == record.get("convert") == "works", record


@pytest.mark.parametrize("family", REFUSED.values(), ids=REFUSED)
def test_a_family_is_refused(found, family):
    assert found[family]
    for record in found[family]:
        assert record["parzen"].startswith("refused"), record
        assert re.search("parzen:", record["parzen_why"]), record


def in_the_docs():
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def test_the_table_lists_every_family():
    text = in_the_docs()
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip(f"the table is of another version than {transformers.__version__}")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    works = re.findall(r"`(\w+)`[,.]", text.split("| family |")[0])
    own = [f for f in families() if any((FOLDER / f).glob("modeling_*.py"))]
    assert sorted(rows + works) == own


@pytest.mark.slow
def test_no_family_is_wrong(tmp_path):
    """All of them; about an hour on one core. Rewrites the table first, which must then be what it was."""
    before = in_the_docs()
    found = sweep(tmp_path / "found.json")
    for family, records in found.items():
        for way in ("parzen", "convert"):
            assert not {"wrong", "crash"} & {verdict([r], way) for r in records}, (family, records)
    assert table(found) == before

"""What is committed below results/ is what the code writes: the names of runs, summaries and the ledger."""

from pathlib import Path

import pytest

from parzen.lab.experiments import find_runs, open_run
from parzen.lab.reports.groups import group
from parzen.lab.reports.ledger import write
from parzen.lab.reports.tables import summary
from parzen.lab.run.folder import to_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
SUMMARIES = sorted(RESULTS.rglob("summary.json"))


def test_every_committed_run_keeps_its_name():
    paths = sorted(RESULTS.rglob("config.json"))
    assert len(paths) > 100
    for path in paths:
        config = open_run(path.parent).config
        assert config.digest() == path.parent.name
        assert to_bytes(config.to_json()) == path.read_bytes(), path


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.parent.relative_to(RESULTS).as_posix())
def test_every_committed_summary_is_what_the_code_writes(path):
    assert summary(group(find_runs([path.parent / "runs"]))).encode() == path.read_bytes()


def test_the_committed_ledger_is_what_the_code_writes(tmp_path):
    write(RESULTS, tmp_path / "results.md")
    committed = ROOT / "docs" / "results.md"
    assert (tmp_path / "results.md").read_bytes() == committed.read_bytes(), "run: parzen report --ledger"

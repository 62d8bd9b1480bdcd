"""The benchmarks of small calls and of weight maps. That of decoding is in test_memory.py."""

import json

import pytest

import parzen
from parzen.backends import cpu
from parzen.cli import main
from parzen.lab.bench import call as bench
from parzen.lab.bench import weights

needs_engine = pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine was not built")


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    for name, few in (("CALLS", (1, 1)), ("TURNS", 1), ("IMPORTS", 1)):
        monkeypatch.setattr(bench, name, few)
    for name, few in (("SHAPES", ((6, 50),)), ("TURNS", (1, 1)), ("OTHERS", (1, 1))):
        monkeypatch.setattr(weights, name, few)


@needs_engine
def test_every_kernel_is_timed_beside_torch(tmp_path, capsys):
    assert main(["bench", "call", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "call.jsonl").read_text().splitlines()]
    assert [line["kernel"] for line in lines] == ["sdpa", *parzen.KERNELS]
    assert lines[0]["ratio"] == lines[0]["gradient_ratio"] == 1
    assert all(line["seconds"] > 0 < line["gradient_seconds"] for line in lines)
    assert 0 < lines[0]["import_seconds"] < 60
    table = (tmp_path / "call.md").read_text()
    assert table.startswith(capsys.readouterr().out)
    assert "engine_isa" in table


@needs_engine
def test_nothing_that_is_off_is_timed(monkeypatch):
    attention = parzen.attention

    def off(*tensors, **options):
        o = attention(*tensors, **options)
        return o * 1.01 if o.dtype.itemsize == 4 else o

    monkeypatch.setattr(parzen, "attention", off)

    with pytest.raises(AssertionError, match=r"relumax is off by .* nothing is timed"):
        bench.bench_call(kernels=("relumax",))


@needs_engine
def test_weight_maps_are_timed_beside_softmax_and_entmax(tmp_path, capsys):
    assert main(["bench", "weights", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    assert len(lines) == len(weights.KERNELS) * len(weights.INPUTS)
    for line in lines:
        assert (line["rows"], line["n"]) == (6, 50)
        assert line["ratio"] > 0 < line["gradient_ratio"]
        assert (line["entmax_ratio"] is not None) == (line["kernel"] in weights.THEIRS)
        if line["inputs"] == "flat":
            assert line["support"] == (16 if line["kernel"] == "knn_gaussian" else 50)
    text = (tmp_path / "weights.md").read_text()
    assert text.count("\n| 6 × 50 |") == len(lines)
    assert all(row in text for row in capsys.readouterr().out.splitlines())


@needs_engine
def test_no_weight_map_that_is_off_is_timed(monkeypatch):
    right = parzen.weights
    monkeypatch.setattr(parzen, "weights", lambda x, kernel: right(x, kernel) * 1.001)
    with pytest.raises(AssertionError, match=r"weights of biweight are off by .* nothing is timed"):
        weights.bench_weights(kernels=("biweight",))

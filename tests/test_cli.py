"""The command line: what it prints, and one clear line with status 2 for every mistake."""

import builtins
import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

import parzen
from parzen import cli
from parzen.cli import main
from parzen.kernels import KERNELS, UnitMass, kernel
from parzen.lab.reports import figures


def fails(capsys, *argv):
    """The error line of a command that must fail with status 2."""
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("parzen: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("parzen: error: ").rstrip()


def test_kernels_prints_every_row(capsys):
    assert main(["kernels"]) == 0
    header, _, *lines, _, free = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "name"
    assert "'power?r=2&margin=1'" in free
    assert [line.split()[0] for line in lines] == list(KERNELS)
    for line, row in zip(lines, KERNELS.values(), strict=True):
        for cell in (*row.aliases, row.ml_name, row.statistical_name, *row.parameters, row.source):
            assert cell in line
    assert "[t]₊³" in lines[list(KERNELS).index("triweight")]


def test_info_and_version(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"parzen: {parzen.__version__}\n" in out
    assert "backends: " in out
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"parzen {parzen.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["kernels", "--colour"], "unrecognized arguments: --colour"),
        (["kernels", "--figure", "a.pdf"], "written as .png or .svg, got 'a.pdf'"),
        (["demo", "--kernel", "biwieght"], "unknown kernel 'biwieght'; did you mean 'biweight'?"),
        (["train", "stories", "--seeds", "1"], "--seeds 1; did you mean --seed? (see parzen train --help)"),
        (["train", "stories", "--kernels", "biweight,relumax"], "expected one kernel"),
        (["demo", "--tokens", "0"], "whole number ≥ 1 and < 1e18, such as 1000 or 1e6, got '0'"),
        (["demo", "--tokens", "1.5"], "such as 1000 or 1e6, got '1.5'"),
        (["demo", "--tokens", "1e-6"], "such as 1000 or 1e6, got '1e-6'"),
        (["demo", "--tokens", "1e18"], "such as 1000 or 1e6, got '1e18'"),
        (["demo", "--minutes", "nan"], "number > 0 and < 1e9, got 'nan'"),
        (["demo", "--minutes", "-1"], "number > 0 and < 1e9, got '-1'"),
        (["demo", "--minutes", "soon"], "number > 0 and < 1e9, got 'soon'"),
        (["demo", "--seed", "-1"], "whole number ≥ 0 and < 1e18, such as 1000 or 1e6, got '-1'"),
        (["demo", "--kernels", "gaussian,foo"], "unknown kernel 'foo'; known: gaussian"),
        (["demo", "--kernels", "relumax?margin=-1"], "margin must be"),
        (["demo", "--kernels", "biweight,biweight"], "named twice"),
        (["demo", "--kernels", "softmax,gaussian"], "named twice"),
        (["demo", "--kernels", ""], "unknown kernel ''"),
        (["demo", "--tokens", "9", "--minutes", "1"], "not allowed with argument"),
        (["demo", "--tokens", "9" * 20], "< 1e18"),
        (["demo", "--minutes", "1e300"], "< 1e9"),
        (["train", "stories", "--device", "nope"], "this machine cannot use the device 'nope'"),
        (["bench", "attention", "--threads", "99999"], "threads must be at most"),
        (["bench", "attention", "--run", "runs/of/mine"], "--run goes with decode only"),
        (["bench", "decode", "--run", "runs/of/mine"], "runs/of/mine"),
        (["bench", "call", "--lengths", "64"], "--lengths goes with attention and decode only"),
        (["demo", "--data", ""], "expected a path, got an empty text"),
        (["kernels", "--figure", ""], "expected a path, got an empty text"),
    ],
)
def test_a_mistake_gets_one_line(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_counts_may_be_written_short_and_kernels_in_singular_or_plural():
    read = cli.parser().parse_args
    for text, count in (
        ("1e6", 1_000_000),
        ("2.2E6", 2_200_000),
        ("7", 7),
        ("9007199254740993e1", 90071992547409930),
    ):
        assert read(["demo", "--tokens", text]).tokens == count
    for option in ("--kernel", "--kernels"):
        assert read(["train", "stories", option, "relumax"]).kernels == ("relumax",)
        assert read(["compare", "stories", option, "relumax"]).kernels == ("relumax",)


def test_help_works_for_every_command(capsys):
    for argv in (["--help"], ["kernels", "--help"], ["demo", "--help"], ["info", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        assert capsys.readouterr().out.startswith("usage: parzen")


def test_the_first_help_is_that_of_the_whole_parser_and_needs_no_torch(monkeypatch):
    code = (
        "import sys; sys.argv = ['parzen', {!r}]; from parzen.__main__ import main; assert main() == 0; "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    said = {}
    for option in ("--help", "-h", "--version"):
        command = [sys.executable, "-c", code.format(option)]
        said[option] = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    assert said["--version"] == f"parzen {parzen.__version__}\n"
    monkeypatch.setenv("COLUMNS", "80")
    whole = cli.parser().format_help()
    # Versions of Python break lines in their own ways.
    assert said["-h"].split() == said["--help"].split() == whole.split(), (
        "write it again: COLUMNS=80 python -c 'from parzen.cli import parser; "
        'print(parser().format_help(), end="")\' > parzen/help.txt'
    )


def test_the_package_is_the_same_whoever_imports_torch_first():
    """And a compiler may be the first to ask for one of its names."""
    code = (
        "{}; import parzen, torch; from parzen.nn import KernelAttention; q = torch.randn(1, 2, 5, 8); "
        "f = torch.compile(lambda q: parzen.attention(q, q, q), fullgraph=True, backend='eager'); "
        "torch.testing.assert_close(f(q), parzen.attention(q, q, q)); import parzen.attention; "
        "assert all(getattr(parzen, name) is not None for name in dir(parzen)); "
        "assert callable(parzen.attention) and callable(parzen.weights)"
    )
    for first in ("import torch", "import sys", "import parzen.memory"):
        subprocess.run([sys.executable, "-c", code.format(first)], check=True)


@pytest.mark.parametrize("missing", ["tokenizers", "matplotlib"])
def test_missing_extras_are_named(monkeypatch, capsys, missing):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *rest)

    for name in [n for n in sys.modules if n.startswith("parzen.lab.")]:
        if name not in ("parzen.lab.console", "parzen.lab.errors"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    argv = ("demo",) if missing == "tokenizers" else ("kernels", "--figure", "a.png")
    assert fails(capsys, *argv) == f"{missing} is not installed; run: pip install 'parzen[lab]'"
    assert main(["kernels"]) == 0


def run(*argv, **options):
    return subprocess.run([sys.executable, "-m", "parzen", *argv], encoding="utf-8", check=False, **options)


def test_python_m_parzen_and_a_terminal_without_unicode():
    done = run("kernels", capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "[t]??" in done.stdout


def test_a_full_disk_behind_stdout():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = run("kernels", stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        2,
        "parzen: error: cannot write the output: No space left on device\n",
    )


def test_a_reader_that_leaves_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = run("kernels", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the figure ----------------------------------------------------------------------------------


def test_figure_is_written_and_equal_each_time(tmp_path, capsys):
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        files = [tmp_path / "new" / f"{i}{name}" for i in range(2)]
        for file in files:
            assert main(["kernels", "--figure", str(file)]) == 0
        first, second = (file.read_bytes() for file in files)
        assert first.startswith(magic)
        assert first == second
    assert "saved" in capsys.readouterr().out


def test_figure_names_every_kernel(tmp_path):
    with figures.rc_context({"svg.fonttype": "none"}):
        drawn = figures.kernels_figure("svg").decode()
    # entmax's default row is the biweight again.
    for name in KERNELS.keys() - {"entmax"}:
        assert name in drawn


def test_figure_where_nothing_can_be_written(capsys):
    assert "cannot write /proc/a.png" in fails(capsys, "kernels", "--figure", "/proc/a.png")


FREE = ("relumax?margin=2", "normrelu?radius=0.7", "power?r=2&margin=1")


@pytest.mark.parametrize("name", [*(n for n in KERNELS if "knn" not in n), *FREE])
@pytest.mark.parametrize("h", [0.8, 1.3])
def test_the_drawn_curves_are_what_attention_does(name, h):
    """Weights of keys at distances u from the query, the best at 0, are proportional to K(u)."""
    chosen = kernel(name)
    u = torch.linspace(0, 1.9, 40, dtype=torch.float64)
    angle = 2 * torch.asin(u / 2)
    keys = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    seen = parzen.attention_weights(keys[:1], keys, scale=1 / h**2, kernel=chosen)
    # A support that adapts ends at the radius H that the call reports.
    adapts = isinstance(chosen.rule, UnitMass)
    drawn = figures.falloff(chosen, u.numpy(), seen.bandwidth.item() if adapts else h)
    assert_close(seen.weights[0] / seen.weights[0, 0], torch.from_numpy(drawn))


def test_the_defaults_that_help_names_are_those_of_the_comparison():
    from parzen.lab.experiments import stories
    from parzen.lab.experiments.stories import Comparison

    for name, about in (stories.SIZES | stories.RATES).items():
        assert f"(default: {getattr(Comparison(), name.replace('-', '_'))})" in about


def test_too_little_memory_is_one_line(capsys, monkeypatch):
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):

        def run(arguments, error=error):
            raise error

        monkeypatch.setattr(cli, "_info", run)
        assert "not enough memory" in fails(capsys, "info")
    monkeypatch.setattr(cli, "_info", lambda arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["info"])

"""What an addition costs, in a copied package: a row, or a file and its row, then it goes the whole way."""

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import parzen

PACKAGE = Path(parzen.__file__).parent
ENGINES = [Path(folder) / "_engine" / "engine.so" for folder in parzen.__path__]


class Copy:
    """The package in another folder, to which things are added."""

    def __init__(self, folder):
        self.folder, self.root = folder, folder / "parzen"
        shutil.copytree(PACKAGE, self.root, ignore=shutil.ignore_patterns("__pycache__", "_engine", "csrc"))

    def add(self, place, table, row, imported="", file="", text=""):
        """A row at the end of a table, and the file that it is imported from, if it has one."""
        code = (self.root / place).read_text(encoding="utf-8")
        end = code.index("\n}\n", code.index(f"\n{table}"))
        code = f"{code[:end]}\n    {row},{code[end:]}"
        if file:
            code = code.replace("\nfrom parzen", f"\n{imported}\nfrom parzen", 1)
            (self.root / file).write_text(text, encoding="utf-8")
        (self.root / place).write_text(code, encoding="utf-8")

    def differs(self):
        """How many lines were added to each file of the package; None for a file that it did not have."""
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            name = path.relative_to(self.root)
            if not (PACKAGE / name).exists():
                found[name.as_posix()] = None
                continue
            texts = [x.read_text(encoding="utf-8").splitlines() for x in (PACKAGE / name, path)]
            if lines := [line for line in difflib.unified_diff(*texts, n=0) if line[0] in "+-"][2:]:
                assert all(line[0] == "+" for line in lines)
                found[name.as_posix()] = len(lines)
        return found

    def run(self, code):
        """What ``code`` prints where the copy is ``parzen``."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if built := [engine for engine in ENGINES if engine.exists()]:
            environment.setdefault("PARZEN_ENGINE", str(built[0]))
        argv = [sys.executable, "-c", START + code, str(self.folder)]
        done = subprocess.run(argv, capture_output=True, encoding="utf-8", env=environment, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def groups(self, folder):
        """What the report in a folder is about: names and tasks."""
        text = (self.folder / folder / "summary.json").read_text(encoding="utf-8")
        return {(group["name"], group["config"]["task"]["kind"]) for group in json.loads(text)["groups"]}


# An editable install has a finder of its own, which would find the package that is copied here.
START = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
sys.path.insert(0, sys.argv[1])
import parzen
assert parzen.__file__.startswith(sys.argv[1]), parzen.__file__
from parzen.cli import main
"""


AVERAGE = '''
"""The mean of what came before."""

from torch import Tensor, nn


class Average(nn.Module):
    """y_t = W·(x_1 + … + x_t) / t."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x.cumsum(1) / x.new_ones(x.shape[1]).cumsum(0)[:, None])
'''


ROTATE = '''
"""Rotate: the tokens, the first of them last."""

from dataclasses import dataclass

import numpy as np

from parzen.lab.tasks.sequence import Rearranged


@dataclass(frozen=True)
class Rotate(Rearranged):
    """The tokens, the first of them last.

    source  7 31  0
    target 31  0  7
    """

    name = "rotate"

    def solve(self, source: np.ndarray) -> np.ndarray:
        return np.roll(source, -1)

    def origins(self, source: np.ndarray) -> np.ndarray:
        return np.roll(np.eye(len(source), dtype=bool), -1, axis=0)

    def _targets(self, source: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        at = np.arange(source.shape[1])
        return np.take_along_axis(source, np.where(at < lengths[:, None], (at + 1) % lengths[:, None], at), 1)
'''


PARITY = '''
"""``parzen parity``: whether the bits so far have an odd sum."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parzen.lab.arguments import kernel_names, path
from parzen.lab.experiments.claims import LOSS, Claim, Place, Table, Within, over
from parzen.lab.experiments.experiment import SCALES, Command, Experiment, Trained
from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import LOCAL, Execution, RunSet, Workload
from parzen.lab.run.train import TrainConfig
from parzen.models.mosaic import MosaicConfig


@dataclass(frozen=True)
class ParityConfig:
    """Bits in a sequence."""

    kind: ClassVar[str] = "parity"
    bits: int = 8

    @property
    def sequence_length(self) -> int:
        return self.bits


class Parity:
    """x = 1 1 0 1, y = 1 0 0 1."""

    vocab = 2

    def __init__(self, config: ParityConfig) -> None:
        self.bits = config.bits

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(1000 * step + seed)
        bits = torch.randint(2, (size, self.bits), generator=drawn)
        return bits, bits.cumsum(1) % 2

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.batch(999, 0, 64)
        with torch.no_grad():
            return {"loss": float(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))}


@dataclass(frozen=True)
class ParitySettings:
    """Every kernel and seed."""

    kernels: Sequence[str] = ("gaussian", "biweight")
    seeds: Sequence[int] = (0, 1)
    runs: Path = Path("runs/parity")
    execution: Execution = LOCAL


def sets(settings: ParitySettings) -> list[RunSet]:
    train, task = TrainConfig(4, 8, evaluate_every=2), ParityConfig()
    models = [MosaicConfig(2, 1, 1, 8, 4, kernel) for kernel in settings.kernels]
    configs = [RunConfig(task, model, train, seed) for seed in settings.seeds for model in models]
    return [RunSet(settings.runs, configs, work)]


def work(run: Run) -> Workload:
    task = Parity(run.config.task)
    return Workload(task, task.evaluate)


def measure(run: Run, model: nn.Module) -> dict[str, float]:
    return Parity(run.config.task).evaluate(model)


def show(runs: Sequence[Run]) -> None:
    for run in runs:
        print(run.config.label, run.results()["loss"])


def options(command: ArgumentParser) -> None:
    command.add_argument("--kernels", type=kernel_names, help="default: gaussian,biweight")
    command.add_argument("--runs", type=path, help="default: runs/parity")


def place(scale: str) -> Place:
    return Place("parity", f"{SCALES[scale]}parity")


def claims(scale: str) -> list[Claim]:
    if scale != "tiny":
        return []
    ahead = Within(place(scale), LOSS, over(("biweight",), ("gaussian",)))
    return [Claim("parity/tiny/ahead", "Figure 9", scale, "biweight leads", ahead, "parity")]


def tables(scale: str) -> list[Table]:
    return [Table("Loss.", ("gaussian", "biweight"), (("8 bits", place(scale), (LOSS,)),))]


EXPERIMENT = Experiment(
    "Figure 9",
    "parity",
    claims,
    tables,
    Trained(
        task=ParityConfig,
        commands=(Command("parity", "learn parity", options, ParitySettings),),
        scales={"tiny": {"parity": (ParitySettings(),)}},
        sets=sets,
        work=work,
        show=show,
        measure=measure,
    ),
)
'''


WIDE = '''
"""The reference, in float64 whatever comes in."""

from dataclasses import replace

import torch
from torch import Tensor

from parzen.backends import reference
from parzen.call import Call


def why_not(call: Call) -> str | None:
    return "it has no packed slopes" if call.slopes is not None else None


def run(call: Call) -> Tensor:
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    return reference.run(wide).to(call.v.dtype)
'''

ADDITIONS = {
    "kernel": (
        "kernels.py",
        "KERNELS",
        '"squared_relumax": Row(Kernel(Power(2), WithinMargin(1.0)), "squared", "biweight", (), ("margin",))',
    ),
    "mixer": (
        "models/sequence.py",
        "MIXERS",
        '"average": Mixer(lambda c: Average(c.width))',
        "from parzen.models.average import Average",
        "models/average.py",
        AVERAGE,
    ),
    "task": (
        "lab/tasks/length.py",
        "TASKS",
        '"rotate": lambda c: Rotate(c.symbols)',
        "from parzen.lab.tasks.rotate import Rotate",
        "lab/tasks/rotate.py",
        ROTATE,
    ),
    "experiment": (
        "lab/experiments/__init__.py",
        "EXPERIMENTS",
        '"parity": parity.EXPERIMENT',
        "from parzen.lab.experiments import parity",
        "lab/experiments/parity.py",
        PARITY,
    ),
    "backend": (
        "backends/__init__.py",
        "BACKENDS",
        '"wide": wide',
        "from parzen.backends import wide",
        "backends/wide.py",
        WIDE,
    ),
}
# Train → report → reproduce; and what a backend and a task must be.
USE = """
import torch
from parzen.lab.tasks.length import TASKS, LengthConfig
from parzen.testing import cases, check_kernel

assert main(["kernels", "--figure", "kernels.svg"]) == 0
assert check_kernel("squared_relumax?margin=2", "wide", torch.float32) == len(list(cases())) - 1
q = torch.zeros(1, 2, 3, 4)
assert parzen.explain(q, q, q, backend="wide").backend == "wide"
assert parzen.explain(q, q, q).why_not["wide"] is None

task = TASKS["rotate"](LengthConfig("rotate"))
for index in range(5):
    source, target = task.sample(0, "train", index, (2, 9))
    assert (task.solve(source) == target).all()

def parzen_does(line):
    assert main(line.split()) == 0, line

parzen_does("length --task rotate --scale tiny --models mosaic,transformer --kernels squared_relumax "
            "--steps 2 --runs runs/rotate")
parzen_does("regbench --scale tiny --models average --runs runs/regbench")
parzen_does("parity --kernels squared_relumax --runs runs/parity")
parzen_does("report runs --to report")
parzen_does("reproduce figure9 --scale tiny --to results")
# The paper's tables are its own.
parzen_does("reproduce table1 --scale paper --dry-run")
assert main(["reproduce", "figure9", "--scale", "small", "--to", "results"]) == 2
from pathlib import Path
run = str(next(Path("runs/parity").iterdir()))
parzen_does(f"evaluate {run}")
parzen_does(f"resume {run}")
"""


@pytest.mark.parametrize("what", ADDITIONS)
def test_an_addition_is_a_row_and_at_most_a_file(what, tmp_path):
    copy, (place, *_, row) = Copy(tmp_path), ADDITIONS[what][:3]
    copy.add(*ADDITIONS[what])
    # With the line that imports it.
    own = {file: None for file in ADDITIONS[what][4:5]}
    assert copy.differs() == {place: 1 + len(own), **own}
    assert row in (tmp_path / "parzen" / place).read_text()


def test_all_of_them_train_report_and_reproduce(tmp_path):
    copy = Copy(tmp_path)
    for addition in ADDITIONS.values():
        copy.add(*addition)
    out = copy.run(USE)
    assert "squared_relumax" in (tmp_path / "kernels.svg").read_text()
    assert "rotate: exact match by source length" in out
    assert "252 runs, 0 done" in out
    assert copy.groups("report") == {
        ("squared_relumax", "length"),
        ("transformer, squared_relumax", "length"),
        ("average", "regbench"),
        ("squared_relumax", "parity"),
    }
    results = tmp_path / "results" / "tiny"
    assert copy.groups(results / "parity") == {("gaussian", "parity"), ("biweight", "parity")}
    assert "biweight leads" in (results / "parity" / "index.html").read_text()
    assert "`parity/tiny/ahead`" in (results / "ledger.md").read_text()
    assert len([*(results / "parity" / "runs").glob("*/results.json")]) == 4

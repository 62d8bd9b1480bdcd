"""The command ``parzen``: thin; each subcommand reads its arguments and calls one function."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

import parzen
from parzen.kernels import KERNELS, Exp
from parzen.lab.arguments import device, kernel_names, lengths, path, positive, whole
from parzen.lab.console import show_table
from parzen.lab.errors import UserError
from parzen.lab.experiments import run, targets, trained
from parzen.lab.experiments.experiment import SCALES, Command, Trained
from parzen.lab.run import stop
from parzen.lab.run.sweep import Execution

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises ``UserError`` where argparse would print and leave."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but a subcommand says itself what it does not know, and what may have been meant."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(rest[0].partition("=")[0], options, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
        return known, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``parzen`` with ``argv``; its status: 2 for a mistake, 130 after Ctrl-C, 143 after SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show ₊ gets a question mark, not a crash.
            stream.reconfigure(errors="replace")
    if os.environ.get("RANK", "0") != "0":
        # torchrun starts many; one of them speaks.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    try:
        arguments = parser().parse_args(argv)
        with stop.listening():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except stop.Terminated:
        return stop.STATUS
    except UserError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if (error.name or "parzen").partition(".")[0] == "parzen":
            raise
        extra = "lab,transformers" if error.name == "transformers" else "lab"
        message = f"{error.name} is not installed; run: pip install 'parzen[{extra}]'"
    except OSError as error:
        # What stdout still holds cannot be written; keep Python from trying again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        message = f"cannot write the output: {error.strerror or error}"
    except (MemoryError, RuntimeError) as error:
        allocation = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)
        if not allocation:
            raise
        message = "there is not enough memory for this; choose smaller sizes, such as --batch or --width"
    except KeyboardInterrupt:
        print("parzen: interrupted", file=sys.stderr)
        return 130
    print(f"parzen: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    """The whole command line; a new subcommand is one more ``_add_…``."""
    top = Parser(prog="parzen", description="Sparse attention as compact kernel regression.")
    top.add_argument("--version", action="version", version=f"parzen {parzen.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    return top


Commands = argparse._SubParsersAction  # argparse gives the type no public name


def _command(commands: Commands[Parser], name: str, run: Run, about: str) -> Parser:
    command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    command.set_defaults(run=run)
    return command


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

# ---- kernels -------------------------------------------------------------------------------------


def _add_kernels(commands: Commands[Parser]) -> None:
    command = _command(commands, "kernels", _kernels, "print the table of kernels, or draw it")
    command.add_argument(
        "--figure", type=path, metavar="FILE", help="draw the kernels into FILE (.png or .svg)"
    )


def _kernels(arguments: argparse.Namespace) -> int:
    if arguments.figure is not None:
        figures = import_module("parzen.lab.reports.figures")
        files = import_module("parzen.lab.files")
        form = figures.file_format(str(arguments.figure))
        files.write_whole(arguments.figure, figures.kernels_figure(form))
        print(f"saved {arguments.figure}")
        return 0
    headers = ("name", "aliases", "statistical name", "ML name", "profile", "rule", "parameters", "source")
    rows = []
    for name, row in KERNELS.items():
        profile, rule = row.kernel.profile, row.kernel.rule
        shape = "exp t" if isinstance(profile, Exp) else f"[t]₊{str(profile.r).translate(SUPERSCRIPT)}"
        rows.append(
            (
                name,
                ", ".join(row.aliases),
                row.statistical_name,
                row.ml_name,
                shape,
                type(rule).__name__,
                ", ".join(row.parameters),
                row.source,
            )
        )
    show_table(headers, rows)
    print("\nAny profile (power, exp) with any rule (radius, margin, k): 'power?r=2&margin=1'")
    return 0


# ---- demo ----------------------------------------------------------------------------------------


def _add_demo(commands: Commands[Parser]) -> None:
    command = _command(
        commands, "demo", _demo, "train a small Memory Mosaic with several kernels on the same stories"
    )
    command.add_argument("--data", type=path, metavar="FILE", help="stories: JSON lines or text, .xz/.gz too")
    command.add_argument("--valid", type=path, metavar="FILE", help="validation stories (default: last 6 %%)")
    command.add_argument(
        "--to",
        type=path,
        metavar="DIR",
        default=Path("runs/demo"),
        help="default: runs/demo",
    )
    command.add_argument("--kernels", type=kernel_names, metavar="A,B", help="default: four of the table")
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--minutes", type=positive, help="about how long, in all (default: 4)")
    amount.add_argument(
        "--tokens", type=whole(1), help="training tokens of each kernel, instead of --minutes"
    )
    command.add_argument(
        "--seed",
        dest="seeds",
        type=whole(0),
        nargs=1,
        metavar="S",
        help="of weights and batches (default: 0)",
    )


def _demo(arguments: argparse.Namespace) -> int:
    demo = import_module("parzen.lab.reports.demo")
    given = _given(arguments, "to")
    minutes = None if "tokens" in given else demo.SIZE.minutes
    return int(demo.run(replace(demo.SIZE, **{"minutes": minutes, **given}), arguments.to))


# ---- training ------------------------------------------------------------------------------------


def _add_experiments(commands: Commands[Parser]) -> None:
    """The subcommands of the rows of ``EXPERIMENTS``, with their own options."""
    for experiment in trained():
        for one in experiment.commands:
            command = _command(commands, one.name, partial(_train, experiment, one), one.about)
            one.options(command)
            _add_execution(command)


def _train(experiment: Trained, one: Command, arguments: argparse.Namespace) -> int:
    execution = _execution(arguments)
    return run(experiment, one.settings(execution=execution, **_given(arguments)))


def _add_execution(command: Parser) -> None:
    """How runs are carried out: the fields of ``parzen.lab.run.Execution``."""
    how = command.add_argument_group("how runs are carried out")
    how.add_argument("--device", type=device, help="cpu (default), cuda, …")
    how.add_argument("--compile", dest="compiled", action="store_true", help="use torch.compile")
    how.add_argument("--tensorboard", action="store_true", help="write losses for TensorBoard too")
    how.add_argument(
        "--gpus-per-run", type=whole(1), metavar="N", help="processes that share a run, with torchrun"
    )
    how.add_argument("--save-seconds", type=positive, metavar="S", help="between checkpoints (default: 60)")
    how.add_argument(
        "--engine", choices=("process", "ray"), help="one run after the other (default), or tasks of Ray"
    )
    how.add_argument(
        "--address", metavar="HOST:PORT", help="of a Ray cluster, or auto (default: one on this machine)"
    )
    how.add_argument(
        "--cpus-per-run", type=whole(1), metavar="N", help="threads of a run with Ray (default: 1)"
    )


def _execution(arguments: argparse.Namespace) -> Execution:
    names = [field.name for field in fields(Execution)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.engine != "ray" and given.keys() & {"address", "cpus_per_run"}:
        raise UserError("--address and --cpus-per-run go with --engine ray")
    for name in names:
        delattr(arguments, name)
    return Execution(**given)


def _add_resume(commands: Commands[Parser]) -> None:
    command = _command(commands, "resume", _resume, "go on with runs, from their folders alone")
    command.add_argument("folders", type=path, nargs="+", metavar="RUN", help="folders of runs")
    _add_execution(command)


def _resume(arguments: argparse.Namespace) -> int:
    revisit = import_module("parzen.lab.experiments.revisit")
    return int(revisit.resume(arguments.folders, _execution(arguments)))


def _given(arguments: argparse.Namespace, *apart: str) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the config."""
    given = {k: v for k, v in vars(arguments).items() if k not in ("run", *apart)}
    return {k: v for k, v in given.items() if v is not None and v is not False}


def _add_reproduce(commands: Commands[Parser]) -> None:
    command = _command(
        commands, "reproduce", _reproduce, "a figure or table of the paper, or all: plan, train, report"
    )
    command.add_argument("target", choices=(*targets(), "all"), help="what is reproduced")
    command.add_argument(
        "--scale", choices=tuple(SCALES), help="tiny (default, minutes), small (a day), paper"
    )
    command.add_argument("--seeds", type=whole(0), nargs="+", metavar="S", help="default: the scale's")
    for experiment in trained():
        experiment.options(command)
    command.add_argument(
        "--to", type=path, metavar="DIR", help="where reports and runs go (default: results)"
    )
    command.add_argument(
        "--dry-run", dest="dry", action="store_true", help="say what it would take, and train nothing"
    )
    _add_execution(command)


def _reproduce(arguments: argparse.Namespace) -> int:
    module = import_module("parzen.lab.reports.reproduce")
    execution, given = _execution(arguments), _given(arguments, "target")
    own = {name: given.pop(name) for name in ("scale", "seeds", "to", "dry") if name in given}
    return int(module.reproduce(arguments.target, module.Request(execution=execution, given=given, **own)))


def _add_evaluate(commands: Commands[Parser]) -> None:
    command = _command(commands, "evaluate", _evaluate, "say what a trained run achieves and its kernel does")
    command.add_argument(
        "folder", type=path, metavar="RUN", help="the folder of a run (a folder of runs: lists them)"
    )
    for experiment in trained():
        experiment.measured_with(command)
    command.add_argument("--to", type=path, metavar="FILE", help="save everything as JSON")


def _evaluate(arguments: argparse.Namespace) -> int:
    revisit = import_module("parzen.lab.experiments.revisit")
    return int(revisit.evaluate_run(**_given(arguments)))


def _add_generate(commands: Commands[Parser]) -> None:
    command = _command(commands, "generate", _generate, "write on from a prompt with a trained run")
    command.add_argument("folder", type=path, metavar="RUN", help="the folder of a run")
    command.add_argument("--prompt", default="Once upon a time", help="how it begins")
    command.add_argument("--tokens", type=whole(1), default=100, help="at most (default: 100)")
    command.add_argument("--temperature", type=positive, default=0.8, help="default: 0.8")
    command.add_argument("--top-k", type=whole(1), help="draw among the k most likely tokens only")
    command.add_argument("--seed", type=whole(0), default=0, help="default: 0")


def _generate(arguments: argparse.Namespace) -> int:
    revisit = import_module("parzen.lab.experiments.revisit")
    return int(
        revisit.generate_from(
            arguments.folder,
            arguments.prompt,
            arguments.tokens,
            arguments.temperature,
            arguments.top_k,
            arguments.seed,
        )
    )


def _add_export(commands: Commands[Parser]) -> None:
    command = _command(commands, "export", _export, "save a trained run as a Hugging Face model")
    command.add_argument("folder", type=path, metavar="RUN", help="the folder of a run")
    command.add_argument("--to", type=path, metavar="DIR", required=True, help="the folder for its files")


def _export(arguments: argparse.Namespace) -> int:
    import_module("parzen.lab.export").export_run(arguments.folder, arguments.to)
    print(f"saved {arguments.to}")
    return 0


def _add_report(commands: Commands[Parser]) -> None:
    command = _command(commands, "report", _report, "tables, figures and one page from run folders")
    command.add_argument(
        "places", type=path, nargs="*", metavar="RUNS", help="run folders, or folders of them"
    )
    command.add_argument("--to", type=path, metavar="DIR", help="where the report goes; required")
    command.add_argument(
        "--ledger", action="store_true", help="instead: docs/results.md from the committed results"
    )


def _report(arguments: argparse.Namespace) -> int:
    if arguments.ledger:
        import_module("parzen.lab.reports.ledger").write()
        return 0
    if not arguments.places or arguments.to is None:
        raise UserError("give the run folders and --to DIR, or --ledger")
    runs, damaged = import_module("parzen.lab.reports.groups").readable(arguments.places)
    for file in import_module("parzen.lab.reports.document").report(runs, arguments.to):
        print(file)
    for said in damaged:
        print(f"parzen: warning: left out: {said}", file=sys.stderr)
    return 1 if damaged else 0


def _add_runs(commands: Commands[Parser]) -> None:
    command = _command(commands, "runs", _runs, "list the runs that are there, and how far they are")
    command.add_argument(
        "places", type=path, nargs="*", metavar="RUNS", help="folders of runs (default: runs)"
    )


def _runs(arguments: argparse.Namespace) -> int:
    revisit = import_module("parzen.lab.experiments.revisit")
    return int(revisit.list_runs(arguments.places or [Path("runs")]))


# ---- data ----------------------------------------------------------------------------------------


def _add_data(commands: Commands[Parser]) -> None:
    command = _command(commands, "data", _data, "download a published set of stories, resumed and verified")
    command.add_argument("name", choices=("babistories", "tinystories"), help="which one")
    command.add_argument("--to", type=path, metavar="DIR", required=True, help="the folder for its files")


def _data(arguments: argparse.Namespace) -> int:
    return int(import_module("parzen.lab.data.download").main(arguments.name, arguments.to))


# ---- bench ---------------------------------------------------------------------------------------


# What each of them takes beside --threads, --kernels and --out, by the names of its function.
BENCHES = {
    "attention": ("lengths", "long"),
    "decode": ("lengths", "folder"),
    "call": (),
    "weights": (),
    "regression": ("quick",),
}


def _add_bench(commands: Commands[Parser]) -> None:
    command = _command(commands, "bench", _bench, "time attention and decoding against dense softmax")
    command.add_argument("what", choices=tuple(BENCHES), help="what is timed")
    command.add_argument("--kernels", type=kernel_names, metavar="A,B", help="default: those of each group")
    command.add_argument(
        "--lengths", type=lengths, metavar="N,M", help="default: all standard lengths, and densities"
    )
    command.add_argument("--threads", type=whole(1), help="default: all cores")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="attention: cuda times the Triton engine"
    )
    command.add_argument("--long", action="store_true", help="attention: also one head of 131072 keys")
    command.add_argument(
        "--run", dest="folder", type=path, metavar="RUN", help="decode: what its memories store"
    )
    command.add_argument("--quick", action="store_true", help="regression: small sizes and tables only")
    command.add_argument("--out", type=path, metavar="DIR", help="save WHAT.md and WHAT.jsonl there")


def _bench(arguments: argparse.Namespace) -> int:
    options, what = _given(arguments, "what", "device"), arguments.what
    if arguments.device == "cuda":
        if what != "attention" or options.keys() & {"long", "folder", "threads"}:
            raise UserError("--device cuda goes with attention, --kernels, --lengths and --out only")
        if import_module("parzen.lab.bench.gpu").bench_gpu(**options) is None:
            print("no GPU to time: torch sees no CUDA device", file=sys.stderr)
            return 3
        return 0
    for name in options.keys() - {"threads", "kernels", "out", *BENCHES[what]}:
        owners = " and ".join(bench for bench, takes in BENCHES.items() if name in takes)
        raise UserError(f"--{'run' if name == 'folder' else name} goes with {owners} only")
    try:
        getattr(import_module(f"parzen.lab.bench.{what}"), f"bench_{what}")(**options)
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


# ---- regress -------------------------------------------------------------------------------------


def _add_regress(commands: Commands[Parser]) -> None:
    about = "compare kernels on a table of your own and save the best, or use a saved one"
    command = _command(commands, "regress", _regress, about)
    command.add_argument("file", type=path, metavar="FILE", help=".csv, .tsv or .parquet, also packed")
    command.add_argument("--target", metavar="COLUMN", help="what to predict: numbers, or labels")
    command.add_argument("--kernels", type=kernel_names, metavar="A,B", help="default: five that differ")
    command.add_argument(
        "--degree", type=int, choices=(0, 1), help="1: local lines, 0: local means (default)"
    )
    command.add_argument("--learn", dest="features", type=whole(1), metavar="N", help="N learned features")
    command.add_argument("--folds", type=whole(2), help="parts of the rows that are held out (default 5)")
    command.add_argument("--seed", type=whole(0), help="of the folds (default 0)")
    command.add_argument(
        "--predict", type=path, metavar="DIR", help="what the model saved there says of the rows of FILE"
    )
    command.add_argument("--coverage", type=positive, help="of the intervals of --predict (default 0.9)")
    command.add_argument(
        "--out", type=path, help="default: a folder FILE-regression, or with --predict FILE-predicted.csv"
    )


def _regress(arguments: argparse.Namespace) -> int:
    module = import_module("parzen.lab.regress")
    options = _given(arguments, "file")
    stem = arguments.file.name.partition(".")[0]
    if arguments.predict is None:
        if arguments.target is None:
            raise UserError("say which column to predict: --target COLUMN")
        if "coverage" in options:
            raise UserError("--coverage goes with --predict only")
        module.regress(arguments.file, **{"out": Path(f"{stem}-regression"), **options})
        return 0
    folder = options.pop("predict")
    if options.keys() - {"coverage", "out"}:
        raise UserError("--predict goes with --coverage and --out only: the rest is in the model")
    if not options.get("coverage", 0.9) < 1:
        raise UserError("--coverage must be between 0 and 1")
    options.setdefault("out", Path(f"{stem}-predicted.csv"))
    rows = module.predict(arguments.file, folder, **options)
    print(f"saved predictions for {rows:,} rows in {options['out']}")
    return 0


# ---- info ----------------------------------------------------------------------------------------


def _add_info(commands: Commands[Parser]) -> None:
    _command(commands, "info", _info, "print versions, backends and what was built")


def _info(arguments: argparse.Namespace) -> int:
    for name, value in parzen.info().items():
        print(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return 0


COMMANDS = (
    _add_kernels,
    _add_demo,
    _add_experiments,
    _add_resume,
    _add_reproduce,
    _add_evaluate,
    _add_generate,
    _add_export,
    _add_report,
    _add_runs,
    _add_data,
    _add_bench,
    _add_regress,
    _add_info,
)


if __name__ == "__main__":
    raise SystemExit(main())

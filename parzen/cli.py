"""The command ``parzen``: thin; each subcommand reads its arguments and calls one function."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

import parzen
from parzen.kernels import KERNELS, Exp, kernel
from parzen.lab.console import show_table
from parzen.lab.errors import UserError
from parzen.lab.tasks.length import TASKS as LENGTH_TASKS
from parzen.models.sequence import MIXERS
from parzen.nn import BANDWIDTHS, POSITIONS

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises ``UserError`` where argparse would print and leave."""
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``parzen`` with ``argv`` and returns the exit status: 2 for a mistake, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show ₊ gets a question mark, not a crash.
            stream.reconfigure(errors="replace")
    if os.environ.get("RANK", "0") != "0":
        # torchrun starts many; one of them speaks.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    try:
        arguments = parser().parse_args(argv)
        run: Run = arguments.run
        status = run(arguments)
        sys.stdout.flush()
        return status
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


MODELS = ("mosaic", *MIXERS)
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

# ---- kernels -------------------------------------------------------------------------------------


def _add_kernels(commands: Commands[Parser]) -> None:
    command = _command(commands, "kernels", _kernels, "print the table of kernels, or draw it")
    command.add_argument(
        "--figure", type=_path, metavar="FILE", help="draw the kernels into FILE (.png or .svg)"
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
    command.add_argument(
        "--data", type=_path, metavar="FILE", help="stories: JSON lines or text, .xz/.gz too"
    )
    command.add_argument(
        "--valid", type=_path, metavar="FILE", help="validation stories (default: last 6 %%)"
    )
    command.add_argument(
        "--to",
        type=_path,
        metavar="DIR",
        default=Path("runs/demo"),
        help="default: runs/demo",
    )
    command.add_argument("--kernels", type=_kernel_names, metavar="A,B", help="default: four of the table")
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--minutes", type=_positive, help="about how long, in all (default: 4)")
    amount.add_argument(
        "--tokens", type=_whole(1), help="training tokens of each kernel, instead of --minutes"
    )
    command.add_argument(
        "--seed",
        dest="seeds",
        type=_whole(0),
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


SIZES = {
    "width": "of a token's vector (default: 128)",
    "heads": "of every layer; they divide the width (default: 4)",
    "slots": "learned pairs of each head of a mosaic (default: 448)",
    "vocab": "of the tokeniser that is trained (default: 2048)",
    "context": "tokens in a sequence (default: 256)",
    "batch": "sequences in a step (default: 8)",
    "accumulate": "parts that a step is cut into, to save memory (default: 1)",
}
RATES = {
    "lr": "peak learning rate (default: 0.01)",
    "norm-lr": "factor on it for the gains of LayerNorms (default: 30.0)",
    "scalar-lr": "the same for bandwidths and other scalars (default: 0.1)",
}


def _add_compare(commands: Commands[Parser]) -> None:
    command = _command(
        commands, "compare", _compare, "train every kernel × depth × seed on the same batches of stories"
    )
    command.add_argument("task", choices=("stories",), help="what is learned")
    command.add_argument("--models", type=_names(MODELS), metavar="A,B", help=f"of {', '.join(MODELS)}")
    command.add_argument("--kernels", type=_kernel_names, metavar="A,B", help="default: eight of the table")
    command.add_argument("--layers", type=_whole(1), nargs="+", metavar="L", help="default: 1")
    command.add_argument("--seeds", type=_whole(0), nargs="+", metavar="S", help="default: 0")
    _add_training(command)


def _add_train(commands: Commands[Parser]) -> None:
    command = _command(commands, "train", _compare, "train one model on stories, or go on with it")
    command.add_argument("task", choices=("stories",), help="what is learned")
    command.add_argument("--model", dest="models", choices=MODELS, nargs=1, help="default: mosaic")
    command.add_argument(
        "--kernel",
        dest="kernels",
        type=_kernel_names,
        metavar="A",
        default=("gaussian",),
        help="default: gaussian",
    )
    command.add_argument("--layers", type=_whole(1), nargs=1, metavar="L", help="default: 1")
    command.add_argument("--seed", dest="seeds", type=_whole(0), nargs=1, metavar="S", help="default: 0")
    _add_training(command)


def _add_text(command: Parser, about: str) -> None:
    command.add_argument("--data", type=_path, metavar="PATH", help=about)
    command.add_argument(
        "--valid", type=_path, metavar="PATH", help="validation stories (default: last 6 %%)"
    )
    command.add_argument(
        "--tokenizer", type=_path, metavar="PATH", help="vocab.json and merges.txt in a folder"
    )


def _add_training(command: Parser) -> None:
    _add_text(command, "stories (default: the built-in ones)")
    command.add_argument(
        "--runs", type=_path, metavar="DIR", help="folder of run folders (default: runs/stories)"
    )
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=_whole(1), help="training tokens of each run (default: 2200000)")
    amount.add_argument("--minutes", type=_positive, help="about how long all take, once turned into tokens")
    for name, about in SIZES.items():
        command.add_argument(f"--{name}", type=_whole(1), metavar="N", help=about)
    for name, about in RATES.items():
        command.add_argument(f"--{name}", type=_positive, metavar="X", help=about)
    command.add_argument("--dropout", type=float, metavar="P", help="on memory weights, … (default: 0.0)")
    command.add_argument("--positions", help="of a transformer: learned, none, rotary (default), alibi, nape")
    command.add_argument("--precision", choices=("float32", "bf16"), help="default: float32")
    _add_how(command)


def _add_how(command: Parser) -> None:
    """How runs are carried out: the fields of ``parzen.lab.run.sweep.How``."""
    how = command.add_argument_group("how runs are carried out")
    how.add_argument("--device", type=_device, help="cpu (default), cuda, …")
    how.add_argument("--compile", dest="compiled", action="store_true", help="use torch.compile")
    how.add_argument("--tensorboard", action="store_true", help="write losses for TensorBoard too")
    how.add_argument(
        "--gpus-per-run", type=_whole(1), metavar="N", help="processes that share a run, with torchrun"
    )
    how.add_argument("--save-seconds", type=_positive, metavar="S", help="between checkpoints (default: 60)")
    how.add_argument(
        "--engine", choices=("process", "ray"), help="one run after the other (default), or tasks of Ray"
    )
    how.add_argument(
        "--address", metavar="HOST:PORT", help="of a Ray cluster, or auto (default: one on this machine)"
    )
    how.add_argument(
        "--cpus-per-run", type=_whole(1), metavar="N", help="threads of a run with Ray (default: 1)"
    )


def _how(arguments: argparse.Namespace) -> Any:
    sweep = import_module("parzen.lab.run.sweep")
    names = [field.name for field in fields(sweep.How)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.engine != "ray" and given.keys() & {"address", "cpus_per_run"}:
        raise UserError("--address and --cpus-per-run go with --engine ray")
    for name in names:
        delattr(arguments, name)
    return sweep.How(**given)


def _compare(arguments: argparse.Namespace) -> int:
    stories = import_module("parzen.lab.experiments.stories")
    how = _how(arguments)
    return int(stories.run(stories.Comparison(how=how, **_given(arguments, "task"))))


def _add_regbench(commands: Commands[Parser]) -> None:
    command = _command(
        commands, "regbench", _regbench, "learn languages in context: every kernel, and six baselines"
    )
    command.add_argument("--scale", choices=("tiny", "small", "paper"), help="default: small")
    command.add_argument("--models", type=_names(MODELS), metavar="A,B", help=f"of {', '.join(MODELS)}")
    command.add_argument(
        "--kernels", type=_kernel_names, metavar="A,B", help="of the mosaic (default: eight)"
    )
    command.add_argument("--examples", type=_whole(1), nargs="+", metavar="N", help="training instances")
    command.add_argument("--seeds", type=_whole(0), nargs="+", metavar="S", help="default: 0")
    command.add_argument("--epochs", type=_whole(1), help="default: that of the scale")
    command.add_argument("--lr", type=_positive, help="peak learning rate (default: that of the scale)")
    command.add_argument("--states", type=_whole(2), help="of every automaton (default: 4 to 12)")
    command.add_argument("--letters", type=_whole(1), help="of every automaton (default: 4 to 18)")
    command.add_argument(
        "--grid", action="store_true", help="tune the baselines: show the best by validation of many runs"
    )
    command.add_argument(
        "--runs", type=_path, metavar="DIR", help="folder of run folders (default: runs/regbench)"
    )
    _add_how(command)


def _regbench(arguments: argparse.Namespace) -> int:
    regbench = import_module("parzen.lab.experiments.regbench")
    how = _how(arguments)
    return int(regbench.run(regbench.Experiment(how=how, **_given(arguments))))


def _add_length(commands: Commands[Parser]) -> None:
    command = _command(
        commands, "length", _length, "learn a task on short sources, and test it on longer and longer ones"
    )
    command.add_argument("--task", choices=tuple(LENGTH_TASKS), required=True, help="what is learned")
    command.add_argument(
        "--models", type=_names(MODELS[:2]), metavar="A,B", help="mosaic (default), transformer"
    )
    command.add_argument(
        "--kernels",
        type=_kernel_names,
        metavar="A,B",
        help="default: eight of the table for mosaics; for Transformers without --bandwidths, softmax with "
        "fixed and ssmax, 1.5-entmax with fixed and asentmax",
    )
    command.add_argument(
        "--bandwidths",
        type=_names(("published", *BANDWIDTHS)),
        metavar="A,B",
        help=f"published (mosaics only), {', '.join(BANDWIDTHS)}",
    )
    command.add_argument(
        "--positions",
        type=_names(("learned", *POSITIONS)),
        metavar="A,B",
        help=f"of Transformers: learned, {', '.join(POSITIONS)} (default: nape)",
    )
    command.add_argument(
        "--lengths", type=_lengths, metavar="N,M", help="source lengths of the tests (default: the scale's)"
    )
    command.add_argument("--scale", choices=("tiny", "small", "paper"), help="default: small")
    command.add_argument("--seeds", type=_whole(0), nargs="+", metavar="S", help="default: 0")
    amount = command.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=_whole(1), help="training tokens of each run (default: the scale's)")
    amount.add_argument("--steps", type=_whole(1), help="training steps of each run, instead of --tokens")
    command.add_argument("--lr", type=_positive, help="peak learning rate (default: that of the scale)")
    command.add_argument(
        "--runs", type=_path, metavar="DIR", help="folder of run folders (default: runs/length/TASK)"
    )
    _add_how(command)


def _length(arguments: argparse.Namespace) -> int:
    length = import_module("parzen.lab.experiments.length")
    how = _how(arguments)
    return int(length.run(length.Experiment(how=how, **_given(arguments))))


def _add_resume(commands: Commands[Parser]) -> None:
    command = _command(commands, "resume", _resume, "go on with runs, from their folders alone")
    command.add_argument("folders", type=_path, nargs="+", metavar="RUN", help="folders of runs")
    _add_how(command)


def _resume(arguments: argparse.Namespace) -> int:
    again = import_module("parzen.lab.again")
    return int(again.resume(arguments.folders, _how(arguments)))


def _given(arguments: argparse.Namespace, *apart: str) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the config."""
    return {k: v for k, v in vars(arguments).items() if v is not None and k not in ("run", *apart)}


def _add_reproduce(commands: Commands[Parser]) -> None:
    command = _command(
        commands, "reproduce", _reproduce, "a figure or table of the paper, or all: plan, train, report"
    )
    command.add_argument(
        "target", choices=("figure1", "figure2", "table1", "table2", "all"), help="what is reproduced"
    )
    command.add_argument(
        "--scale", choices=("tiny", "small", "paper"), help="tiny (default, minutes), small (a day), paper"
    )
    command.add_argument("--seeds", type=_whole(0), nargs="+", metavar="S", help="default: the scale's")
    _add_text(command, "stories of Figure 2 (tiny has its own)")
    command.add_argument(
        "--grid", action="store_true", help="Table 1: tune the baselines, the best by validation counts"
    )
    command.add_argument(
        "--to", type=_path, metavar="DIR", help="where reports and runs go (default: results)"
    )
    command.add_argument(
        "--dry-run", dest="dry", action="store_true", help="say what it would take, and train nothing"
    )
    _add_how(command)


def _reproduce(arguments: argparse.Namespace) -> int:
    module = import_module("parzen.lab.reports.reproduce")
    how = _how(arguments)
    request = module.Request(how=how, **_given(arguments, "target"))
    return int(module.reproduce(arguments.target, request))


def _add_evaluate(commands: Commands[Parser]) -> None:
    command = _command(commands, "evaluate", _evaluate, "say what a trained run achieves and its kernel does")
    command.add_argument("folder", type=_path, metavar="RUN", help="the folder of a run")
    command.add_argument("--valid", type=_path, metavar="PATH", help="another text (default: the run's own)")
    command.add_argument(
        "--lengths", type=_lengths, metavar="N,M", help="other source lengths (runs of parzen length)"
    )
    command.add_argument("--keep", action="store_true", help="add those lengths to the run's results")
    command.add_argument("--to", type=_path, metavar="FILE", help="save everything as JSON")


def _evaluate(arguments: argparse.Namespace) -> int:
    again = import_module("parzen.lab.again")
    return int(again.evaluate_run(**_given(arguments)))


def _add_generate(commands: Commands[Parser]) -> None:
    command = _command(commands, "generate", _generate, "write on from a prompt with a trained run")
    command.add_argument("folder", type=_path, metavar="RUN", help="the folder of a run")
    command.add_argument("--prompt", default="Once upon a time", help="how it begins")
    command.add_argument("--tokens", type=_whole(1), default=100, help="at most (default: 100)")
    command.add_argument("--temperature", type=_positive, default=0.8, help="default: 0.8")
    command.add_argument("--top-k", type=_whole(1), help="draw among the k most likely tokens only")
    command.add_argument("--seed", type=_whole(0), default=0, help="default: 0")


def _generate(arguments: argparse.Namespace) -> int:
    stories = import_module("parzen.lab.experiments.stories")
    return int(
        stories.generate_from(
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
    command.add_argument("folder", type=_path, metavar="RUN", help="the folder of a run")
    command.add_argument("--to", type=_path, metavar="DIR", required=True, help="the folder for its files")


def _export(arguments: argparse.Namespace) -> int:
    import_module("parzen.lab.export").export_run(arguments.folder, arguments.to)
    print(f"saved {arguments.to}")
    return 0


def _add_report(commands: Commands[Parser]) -> None:
    command = _command(commands, "report", _report, "tables, figures and one page from run folders")
    command.add_argument(
        "places", type=_path, nargs="*", metavar="RUNS", help="run folders, or folders of them"
    )
    command.add_argument("--to", type=_path, metavar="DIR", help="where the report goes; required")
    command.add_argument(
        "--ledger", action="store_true", help="instead: docs/results.md from the committed results"
    )


def _report(arguments: argparse.Namespace) -> int:
    if arguments.ledger:
        import_module("parzen.lab.reports.ledger").write()
        return 0
    if not arguments.places or arguments.to is None:
        raise UserError("give the run folders and --to DIR, or --ledger")
    runs = import_module("parzen.lab.run.folder").find_runs(arguments.places)
    for path in import_module("parzen.lab.reports.document").report(runs, arguments.to):
        print(path)
    return 0


# ---- data ----------------------------------------------------------------------------------------


def _add_data(commands: Commands[Parser]) -> None:
    command = _command(commands, "data", _data, "download a published set of stories, resumed and verified")
    command.add_argument("name", choices=("babistories", "tinystories"), help="which one")
    command.add_argument("--to", type=_path, metavar="DIR", required=True, help="the folder for its files")


def _data(arguments: argparse.Namespace) -> int:
    return int(import_module("parzen.lab.data.download").main(arguments.name, arguments.to))


# ---- bench ---------------------------------------------------------------------------------------


def _add_bench(commands: Commands[Parser]) -> None:
    command = _command(commands, "bench", _bench, "time attention and decoding against dense softmax")
    command.add_argument("what", choices=("attention", "decode"), help="what is timed")
    command.add_argument("--kernels", type=_kernel_names, metavar="A,B", help="default: those of each group")
    command.add_argument(
        "--lengths", type=_lengths, metavar="N,M", help="default: all standard lengths, and densities"
    )
    command.add_argument("--threads", type=_whole(1), help="default: all cores")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="attention: cuda times the Triton engine"
    )
    command.add_argument("--long", action="store_true", help="attention: also one head of 131072 keys")
    command.add_argument(
        "--run", dest="folder", type=_path, metavar="RUN", help="decode: what its memories store"
    )
    command.add_argument("--out", type=_path, metavar="DIR", help="save WHAT.md and WHAT.jsonl there")


def _bench(arguments: argparse.Namespace) -> int:
    options = {
        k: v for k, v in vars(arguments).items() if k not in ("run", "what", "long", "folder", "device")
    }
    if arguments.device == "cuda":
        if arguments.what != "attention" or arguments.long or arguments.folder or arguments.threads:
            raise UserError("--device cuda goes with attention, --kernels, --lengths and --out only")
        del options["threads"]
        if import_module("parzen.lab.bench.gpu").bench_gpu(**options) is None:
            print("no GPU to time: torch sees no CUDA device", file=sys.stderr)
            return 3
        return 0
    if arguments.long and arguments.what != "attention":
        raise UserError("--long goes with attention only; for decode see --lengths")
    if arguments.folder and arguments.what != "decode":
        raise UserError("--run goes with decode only")
    try:
        if arguments.what == "attention":
            import_module("parzen.lab.bench.attention").bench_attention(**options, long=arguments.long)
        else:
            import_module("parzen.lab.bench.decode").bench_decode(**options, folder=arguments.folder)
    except ValueError as error:
        raise UserError(str(error)) from error
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
    _add_train,
    _add_compare,
    _add_regbench,
    _add_length,
    _add_resume,
    _add_reproduce,
    _add_evaluate,
    _add_generate,
    _add_export,
    _add_report,
    _add_data,
    _add_bench,
    _add_info,
)

# ---- arguments -----------------------------------------------------------------------------------


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def _device(text: str) -> str:
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"this machine cannot use the device {text!r}: {reason}") from error
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number > 0 and < 1e9, got {text!r}")
    return value


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least):
            raise argparse.ArgumentTypeError(f"expected a whole number ≥ {least} and < 1e18, got {text!r}")
        return int(text)

    return read


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(_whole(1), text.split(",")))


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; known: {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"a name is given twice in {text!r}")
        return names

    return read


def _kernel_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    try:
        kernels = {kernel(name) for name in names}
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len(kernels) < len(names):
        raise argparse.ArgumentTypeError(f"a kernel is named twice in {text!r}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())

"""A run is a folder, and nothing else remembers anything.

    config.json         the frozen config; its hash names the folder
    environment.json    versions, machine, command, when
    metrics.jsonl       one JSON object a line; the same bytes for the same config on the same machine
    times.jsonl         how long things took: everything that differs from one machine to the next
    last.safetensors    weights, optimiser, random state and step: where to go on
    best.safetensors    the weights with the best validation score so far
    results.json        written last: a folder that has it is finished
    error.txt, log.txt  why the last try failed, and what a process of its own printed

Files are replaced whole, so a run that is killed at any moment goes on from its last checkpoint. No file
holds pickled objects.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from parzen.attention import info
from parzen.lab.errors import UserError
from parzen.lab.files import write_whole
from parzen.lab.run.config import RunConfig
from parzen.lab.run.train import STAMP, TIMES, Storage
from parzen.lab.tasks.task import TaskConfig


def to_bytes(value: Any) -> bytes:
    """JSON as it is written everywhere here: indented, one trailing newline."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=True) + "\n").encode()


def read_json(path: Path) -> Any:
    """The JSON in ``path``.

    Raises:
        UserError: missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); put a whole copy of it back") from error


def _commit() -> str | None:
    """That of the checkout that this package is part of, with "-dirty" if it was changed; None elsewhere."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Run(Storage):
    """One folder. ``Run.create`` makes it or finds it again; ``Run.open`` reads one that exists."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config

    @classmethod
    def create(cls, root: Path, config: RunConfig) -> Run:
        """The run of ``config`` below ``root``, in a folder named by its hash.

        Raises:
            UserError: the folder cannot be written.
        """
        run = cls(root / config.digest(), config)
        if (run.folder / "config.json").exists():
            # It may have been damaged or changed since.
            cls.open(run.folder, [type(config.task)])
        else:
            environment = {
                **info(),
                "commit": _commit(),
                "machine": platform.machine(),
                "command": shlex.join(["parzen", *sys.argv[1:]]),
                "started": time.strftime(STAMP, time.gmtime()),
            }
            write_whole(run.folder / "environment.json", to_bytes(environment))
            write_whole(run.folder / "config.json", to_bytes(config.to_json()))
        return run

    @classmethod
    def open(cls, folder: Path, tasks: Iterable[type[TaskConfig]]) -> Run:
        """The run in ``folder``; ``tasks`` are those that it may have.

        Raises:
            UserError: there is none, its config is damaged, or was edited after the run began.
        """
        path = folder / "config.json"
        if not path.exists():
            raise UserError(f"{folder} is not the folder of a run: it has no config.json")
        config = RunConfig.from_json(read_json(path), str(path), tasks)
        if folder.resolve().name != config.digest():
            raise UserError(
                f"{path} does not belong to its folder (its hash is {config.digest()}): it was changed, or "
                "the folder renamed; start a new run with the changed settings, or undo the change"
            )
        return cls(folder, config)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / "results.json").exists()

    def results(self) -> dict[str, Any]:
        """What ``finish`` wrote."""
        return read_json(self.folder / "results.json")

    def finish(self, results: Mapping[str, Any]) -> None:
        """Writes the results; the run is finished."""
        write_whole(self.folder / "results.json", to_bytes(dict(results)))

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """This process alone trains the run: two that log into one folder would spoil it.

        The system frees the lock of a process that dies, on other machines too where the file system has
        locks; so it is waited for.

        Raises:
            UserError: another process holds it for so many ``seconds``.
        """
        try:
            import fcntl
        except ModuleNotFoundError:  # not on Windows
            yield
            return
        with open(self.folder / "config.json", "r+b") as file:
            until = time.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise UserError(f"another process is training {self.folder}; let it end") from None
                    time.sleep(0.2)
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.ENOTSUP):
                        raise
                    break
            yield

    # ---- metrics ---------------------------------------------------------------------------------

    def log(self, record: Mapping[str, Any], file: str = "metrics.jsonl") -> None:
        """Appends one line."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        try:
            with open(self.folder / file, "a", encoding="utf-8") as f:
                f.write(line)
        except OSError as error:
            raise UserError(f"cannot write {self.folder / file}: {error.strerror or error}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a last line cut short by a kill is left out."""
        return self._lines("metrics.jsonl")

    @property
    def speed(self) -> float | None:
        """Training tokens per second, of the process that evaluated last; None before that."""
        measured = [line for line in self._lines(TIMES) if "tokens_per_second" in line]
        return measured[-1]["tokens_per_second"] if measured else None

    def _lines(self, file: str) -> list[dict[str, Any]]:
        path = self.folder / file
        if not path.exists():
            return []
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); put a whole copy of it back") from error

    def _length(self, file: str) -> int:
        path = self.folder / file
        return path.stat().st_size if path.exists() else 0

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Writes ``name``.safetensors: ``tensors``, and ``state`` as JSON in its header."""
        record = {
            **state,
            "config": self.config.digest(),
            "lengths": {file: self._length(file) for file in ("metrics.jsonl", TIMES)},
        }
        plain = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
        from safetensors.torch import save

        data = save(plain, metadata={"parzen": json.dumps(record)})
        write_whole(self.folder / f"{name}.safetensors", data)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What ``save`` wrote, or None if it never did.

        Raises:
            UserError: the file is cut short, damaged, or of another run.
        """
        from safetensors import SafetensorError, safe_open

        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as f:
                tensors = {key: f.get_tensor(key) for key in f.keys()}
                state = json.loads((f.metadata() or {})["parzen"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}); nothing was changed: put a whole copy of it back, or move "
                "it aside to train this run from its beginning"
            ) from error
        if state["config"] != self.config.digest():
            raise UserError(f"{path} belongs to another run ({state['config']})")
        return tensors, state

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Cuts the logs back to where they were when ``state`` was saved (to nothing if it is empty).

        Half-written files that a kill left behind are removed.
        """
        for left in self.folder.glob(".*"):
            left.unlink()
        for file in ("metrics.jsonl", TIMES):
            path = self.folder / file
            if path.exists():
                os.truncate(path, state.get("lengths", {}).get(file, 0))


def find_folders(places: Iterable[Path]) -> list[Path]:
    """The folders of all runs in and below ``places``, in order of name.

    Raises:
        UserError: a place does not exist, or holds none.
    """
    folders = []
    for place in places:
        if not place.exists():
            raise UserError(f"{place} does not exist")
        found = sorted(
            p.parent for p in place.rglob("config.json") if (p.parent / "environment.json").exists()
        )
        if not found:
            raise UserError(f"there is no run in {place}")
        folders += found
    return folders

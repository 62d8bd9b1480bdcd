"""What all benchmarks share: turns in one process, peak memory, and files that say what figures depend on."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from parzen.backends import cpu

Result = TypeVar("Result")
Key = TypeVar("Key")


def take_turns(contenders: Mapping[Key, Callable[[], Result]], repeats: int) -> dict[Key, list[Result]]:
    """What each contender gave, ``repeats`` times in turns, after one turn that does not count."""
    found: dict[Key, list[Result]] = {name: [] for name in contenders}
    for f in contenders.values():
        f()
    for _ in range(repeats):
        for name, f in contenders.items():
            found[name].append(f())
    return found


def _status(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def peak_memory(f: Callable[[], object]) -> float | None:
    """MiB that ``f`` adds to the resident memory at its peak; None where the system does not say."""
    try:
        # What the allocator keeps for later is not in use.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    f()
    peak = _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before) / 1024


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **{f"engine_{key}": value for key, value in cpu.info().items()},
    }


def facts() -> str:
    """The same in a line."""
    return ", ".join(f"{key} {value}" for key, value in environment().items())


def prepare(threads: int | None) -> None:
    """Sets torch's threads, if given.

    Raises:
        ValueError: the CPU engine was not built, or more threads than processors.
    """
    if not cpu.info()["built"]:
        raise ValueError("the CPU engine was not built: there is nothing to time")
    cores = os.cpu_count() or 1
    if threads and threads > cores:
        raise ValueError(f"threads must be at most {cores}, the processors here, got {threads}")
    if threads:
        torch.set_num_threads(threads)


def save(folder: str | Path, name: str, text: str, lines: Sequence[Any]) -> None:
    """Writes name.md and, with the environment, a line of JSON for each of ``lines`` to name.jsonl."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    records = [json.dumps({**environment(), **asdict(x)}, ensure_ascii=False) for x in lines]
    (folder / f"{name}.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")

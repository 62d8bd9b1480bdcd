"""What people see in the terminal: tables and progress, rich where there is a terminal, else plain lines."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

Table = Sequence[Sequence[str]]
# Seconds between two lines of a log about one run.
SILENCE = 1.0


def fancy() -> bool:
    """Whether to draw with rich: it is installed and stdout is a terminal."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def show_table(headers: Sequence[str], rows: Table, title: str = "") -> None:
    """Prints a table; columns of numbers are right-aligned."""
    right = [all(row[i][:1].isdigit() or row[i] in ("", "—") for row in rows) for i in range(len(headers))]
    if fancy():
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=title or None, title_justify="left")
        for header, number in zip(headers, right, strict=True):
            table.add_column(header, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if title:
        print(title)
    for row in (headers, ["─" * width for width in widths], *rows):
        cells = zip(row, widths, right, strict=True)
        print("  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in cells).rstrip())


def markdown_table(headers: Sequence[str], rows: Table) -> str:
    """The table as Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def count(number: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """1:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress(Protocol):
    """A display of ``total`` steps in one or more parts, entered with ``with``."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def part(self, name: str) -> None:
        """The steps from now on belong to ``name``."""

    def step(self, status: str, at: int | None = None) -> None:
        """One step of the part is done: number ``at``, where an earlier process did those before."""

    def mark(self, status: str) -> None:
        """Something worth a line of its own in a log."""


class _Plain:
    """Lines for a log, with the time left."""

    def __init__(self, parts: int, steps: int) -> None:
        self.parts, self.steps, self.done, self.at, self.name = parts, steps, 0, 0, ""
        self.start, self.spoke = time.monotonic(), -math.inf

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def part(self, name: str) -> None:
        self.parts -= 1
        self.name, self.spoke, self.at = name, -math.inf, 0

    def step(self, status: str, at: int | None = None) -> None:
        self.done += 1
        self.at = self.at + 1 if at is None else at

    def mark(self, status: str) -> None:
        now = time.monotonic()
        if now - self.spoke < SILENCE and self.at < self.steps:
            return
        self.spoke = now
        # At the pace of this process.
        left = (now - self.start) / max(1, self.done) * (self.parts * self.steps + self.steps - self.at)
        print(f"{self.name}: step {self.at}/{self.steps}, {status}, {duration(left)} left", flush=True)


class _Rich:
    """One bar a part, with the status beside it and the time left of the whole."""

    def __init__(self, parts: int, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bars = Progress(
            TextColumn("{task.description:12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[status]}", markup=False),
        )
        self.steps, self.total, self.at = steps, parts * steps, 0
        self.whole = self.bars.add_task("all", total=parts * steps, status="")
        self.task = self.whole

    def __enter__(self) -> _Rich:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def part(self, name: str) -> None:
        self.task, self.at = self.bars.add_task(name, total=self.steps, status=""), 0

    def step(self, status: str, at: int | None = None) -> None:
        self.at += 1
        if at is not None and at > self.at:
            # Counted as there already, not as done in no time.
            self.total -= at - self.at
            self.bars.reset(self.task, completed=at - 1, status=status)
            self.bars.update(self.whole, total=self.total)
            self.at = at
        self.bars.advance(self.whole)
        self.bars.update(self.task, advance=1, status=status)

    def mark(self, status: str) -> None:
        self.bars.update(self.task, status=status)


def progress(parts: int, steps: int) -> Progress:
    """A display for this terminal, or for a log if there is none."""
    return (_Rich if fancy() else _Plain)(parts, steps)

"""Runs that differ in nothing but the seed are a *group*; groups that differ in nothing but the kernel (or
mixer) share a *setting* and a panel."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parzen.lab import statistics
from parzen.lab.errors import UserError
from parzen.lab.experiments import open_run
from parzen.lab.reports.page import NONE
from parzen.lab.run.config import about, setting_of
from parzen.lab.run.folder import Run, find_folders, read_json


@dataclass(frozen=True)
class Record:
    """A run as it was read; ``results`` is empty until it is finished."""

    name: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    speed: float | None
    results: Mapping[str, Any]
    environment: Mapping[str, Any]

    def numbers(self, key: str) -> list[float]:
        """The finite number that the results hold at ``key`` ("a.b" where objects are nested), or nothing."""
        value: Any = self.results
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return [float(value)] if finite(value) else []


@dataclass(frozen=True, eq=False)
class Group:
    """Finished runs that differ in their seed only, or unfinished ones.

    Attributes:
        name: kernel or mixer, and what else tells it from others of its setting.
        setting: what its panel is called.
        layers: of the model.
        config: of its runs, without the seed.
        finished: whether its runs are.
        tokens: trained on by each of them, if that is known.
        runs: in order of seeds.
    """

    name: str
    setting: str
    layers: int
    config: Mapping[str, Any]
    finished: bool
    tokens: int | None
    runs: tuple[Record, ...]

    def values(self, key: str) -> list[float]:
        """The numbers that the results hold at ``key``, one of each run that has it."""
        return [value for run in self.runs for value in run.numbers(key)]

    def estimate(self, key: str) -> statistics.Estimate | None:
        """Their mean over seeds; None if no run has it."""
        values = self.values(key)
        return statistics.mean(values) if values else None


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _record(run: Run) -> Record:
    try:
        lines = run.metrics()
        curve = tuple((line["tokens"], line["loss"]) for line in lines)
        ends = lines[-1]["step"] if lines else 0
    except (KeyError, TypeError) as error:
        raise UserError(f"{run.folder / 'metrics.jsonl'} is damaged ({error!r})") from error
    if run.finished and ends != run.config.train.steps:
        raise UserError(
            f"{run.folder / 'metrics.jsonl'} is damaged: the run is finished, and it ends at step {ends} of "
            f"{run.config.train.steps}; put a whole copy of it back"
        )
    results = run.results() if run.finished else {}
    environment = read_json(run.folder / "environment.json")
    for file, value in (("results.json", results), ("environment.json", environment)):
        if not isinstance(value, dict):
            raise UserError(f"{run.folder / file} is damaged: it holds no JSON object")
    return Record(run.folder.name, run.config.seed, curve, run.speed, results, environment)


def readable(places: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in and below ``places`` that can be read, and what is wrong with each of the others.

    Raises:
        UserError: a place does not exist, holds no run, or no run that can be read.
    """
    runs, damaged = [], []
    for folder in find_folders(places):
        try:
            run = open_run(folder)
            _record(run)
        except UserError as error:
            damaged.append(str(error))
        else:
            runs.append(run)
    if not runs:
        raise UserError(damaged[0])
    return runs, damaged


def count_of(number: int | None) -> str:
    return NONE if number is None else f"{number:,}"


def varying(maps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all ``maps``."""
    keys = dict.fromkeys(key for one in maps for key in one)
    return [key for key in keys if len({json.dumps(one.get(key, "")) for one in maps}) > 1]


def _telling(maps: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Those of ``keys`` whose values tell ``maps`` apart, each some that those before it did not."""
    told, said = [], [""] * len(maps)
    for key in keys:
        more = [text + json.dumps(one.get(key, "")) for text, one in zip(said, maps, strict=True)]
        if len(set(more)) > len(set(said)):
            told.append(key)
            said = more
    return told


def kind_of(setting: Mapping[str, Any]) -> Any:
    return setting.get("model.kind")


def task_of(setting: Mapping[str, Any]) -> str:
    return " ".join(str(setting[key]) for key in ("task.kind", "task.name") if key in setting)


def _titles(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each is called: its layers, its task if there are several, and what tells it from others of it.

    Kinds of models differ by the names of their groups.
    """
    keys = dict.fromkeys(key for one in settings for key in one)
    of_models = [key for key in keys if key.startswith("model.") and key != "model.layers"]
    others = [key for key in keys if not key.startswith("model.")]
    titles = []
    for one in settings:
        alike = [other for other in settings if task_of(other) == task_of(one)]
        kin = [other for other in alike if kind_of(other) == kind_of(one)]
        layers = one["model.layers"]
        parts = [f"{layers} layer{'s' if layers > 1 else ''}"]
        if len(alike) < len(settings):
            parts.append(task_of(one))
        differ = _telling(kin, of_models) + _telling(alike, others)
        parts += [f"{key.partition('.')[2]} = {one[key]}" for key in differ if key in one]
        titles.append(", ".join(parts))
    return titles


def group(runs: Sequence[Run]) -> list[Group]:
    """The groups of ``runs``, setting by setting, the lowest TVD or loss first and unfinished ones last.

    Runs that were finished after different numbers of tokens, to two digits, are different groups.

    Raises:
        UserError: a folder holds something else than a run writes.
    """
    found: dict[str, tuple[dict[str, Any], bool, int | None, list[Record]]] = {}
    names = {}
    for run in runs:
        config, record = run.config.to_json(), _record(run)
        del config["seed"]
        names[json.dumps(config)] = run.config.name
        tokens = record.curve[-1][0] if record.curve else None
        # How far an unfinished run has come may differ from seed to seed.
        key = (config, run.finished, about(tokens) if run.finished else None)
        records = found.setdefault(json.dumps(key), (config, run.finished, tokens, []))[-1]
        # The same folder may be named twice.
        if all(record.seed != other.seed for other in records):
            records.append(record)
    settings = [setting_of(config) for config, *_ in found.values()]
    groups = []
    for title, (config, finished, tokens, records) in zip(_titles(settings), found.values(), strict=True):
        layers = config["model"]["layers"]
        others = {about(other[2]) for other in found.values() if finished and other[1] and other[0] == config}
        name = names[json.dumps(config)] + (f" ({count_of(tokens)} tokens)" if len(others) > 1 else "")
        ordered = tuple(sorted(records, key=lambda record: record.seed))
        groups.append(Group(name, title, layers, config, finished, tokens, ordered))

    def order(one: Group) -> tuple[Any, ...]:
        # Where accuracies saturate early the distance decides.
        found = one.estimate("tvd") or one.estimate("loss")
        return one.layers, one.setting, not one.finished, found.mean if found else math.inf, one.name

    return sorted(groups, key=order)


def typed(text: str) -> str:
    """As it is typed, and without the folders of the machine that it ran on."""
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    if words and Path(words[0]).name in ("cli.py", "__main__.py"):
        words[0] = "parzen"
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)

"""The frozen description of a run, its JSON, and the hash that names it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from parzen.kernels import kernel
from parzen.lab.console import count
from parzen.lab.errors import UserError
from parzen.lab.run.train import TrainConfig
from parzen.lab.tasks.task import TaskConfig
from parzen.models.mosaic import MosaicConfig
from parzen.models.sequence import MIXERS, SequenceConfig

# What a model's config may be, by the name that its JSON carries.
MODELS: dict[str, type] = {"mosaic": MosaicConfig, "sequence": SequenceConfig}

T = TypeVar("T")


@dataclass(frozen=True)
class RunConfig:
    """Everything that a result depends on: task, model, training and seed.

    Two runs with equal configs see the same batches and, on the same machine with the same number of
    threads, end with the same numbers.
    Data enters by content hash (inside ``task``), never by path.
    """

    task: Any
    model: Any
    train: TrainConfig
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the kinds of task and model."""
        return {
            "task": {"kind": self.task.kind, **dataclasses.asdict(self.task)},
            "model": {"kind": _kind(self.model), **dataclasses.asdict(self.model)},
            "train": dataclasses.asdict(self.train),
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str, tasks: Iterable[type[TaskConfig]]) -> RunConfig:
        """The config that ``to_json`` wrote; ``where`` names it in errors, ``tasks`` are those it may have.

        Raises:
            UserError: a field is missing, unknown, or of another type or domain.
        """
        for name in ("task", "model", "train", "seed"):
            if name not in data:
                raise UserError(f"{where}: no {name!r} in it; this is not the config of a run")
        return cls(
            _build(_lookup({task.kind: task for task in tasks}, data["task"], where), data["task"], where),
            _build(_lookup(MODELS, data["model"], where), data["model"], where),
            _build(TrainConfig, data["train"], where),
            int(data["seed"]),
        )

    @property
    def name(self) -> str:
        """The mixer if it is no mosaic, then the kernel if it has one, and a bandwidth that is unusual."""
        model = self.model
        mixer = "" if isinstance(model, MosaicConfig) else model.mixer
        if mixer and not MIXERS[mixer].attends:
            return str(mixer)
        parts = [mixer, str(kernel(model.kernel)), model.bandwidth]
        usual = {"", type(model).bandwidth} | ({"gaussian"} if mixer else set())
        return ", ".join(part for part in parts if part not in usual)

    @property
    def label(self) -> str:
        """What tells this run from the others, for people."""
        return f"{self.name}, {count(self.model.layers, 'layer')}, seed {self.seed}"

    def digest(self) -> str:
        """The first 12 hex digits of the SHA-256 of the canonical JSON: the name of the run."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _kind(model: Any) -> str:
    return next(name for name, kind in MODELS.items() if type(model) is kind)


def _lookup(table: Mapping[str, type], data: Any, where: str) -> type:
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in table:
        raise UserError(f"{where}: kind {kind!r} is unknown; known: {', '.join(table)}")
    return table[kind]


def _build(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "kind"}
    if unknown := sorted(set(given) - names):
        raise UserError(
            f"{where}: {cls.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(names))}"
        )
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) for every value that is no mapping."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# What the name of a run says, so that runs that differ in it can be compared.
NAMED = ("model.kernel", "model.mixer", "model.bandwidth")


def setting_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What runs that are compared with one another have in common, by flat key."""
    return {k: v for k, v in flat(config) if k not in NAMED}


def about(tokens: int | None) -> float | None:
    """Two digits: batches of whole instances hold some tokens more with one seed than with another."""
    return None if tokens is None else float(f"{tokens:.2g}")

"""A table of someone's data, as numbers: read from a file, categories as columns of 0 and 1.

Needs pandas.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from parzen.lab.errors import UserError

# What a file's name ends in, before .gz and the like: the columns' separator, or None.
KINDS = {".csv": ",", ".tsv": "\t", ".txt": "\t", ".parquet": None}
PACKED = (".gz", ".bz2", ".xz", ".zip")
# A column of words with more than so many is a name, not a category.
LEVELS = 50


@dataclass(frozen=True)
class Column:
    """A column of the file: its levels if it holds categories, none if numbers."""

    name: str
    levels: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """What its columns of numbers are called."""
        return [f"{self.name}={level}" for level in self.levels] or [self.name]


@dataclass(frozen=True)
class Encoding:
    """How columns of a file become numbers: what a model must know of the table that it was fitted to."""

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> tuple[Encoding, list[str]]:
        """That of all columns, and a sentence for each that is left out."""
        columns, left_out = [], []
        for name, x in frame.items():
            if pd.api.types.is_numeric_dtype(x):
                columns.append(Column(str(name)))
                continue
            levels = sorted(map(str, x.dropna().unique()))
            if len(levels) > LEVELS:
                left_out.append(f"{name}: {len(levels):,} different words, no category (at most {LEVELS})")
            elif len(levels) > 1:
                columns.append(Column(str(name), tuple(levels)))
            else:
                left_out.append(f"{name}: always {levels[0] if levels else 'missing'}")
        return cls(tuple(columns)), left_out

    @classmethod
    def from_json(cls, columns: Any) -> Encoding:
        return cls(tuple(Column(one["name"], tuple(one["levels"])) for one in columns))

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(column) for column in self.columns]

    def numbers(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The columns as float64; NaN where a value is missing, infinite, no number, or an unknown level.

        Raises:
            UserError: a column is not there.
        """
        parts: dict[str, Any] = {}
        for column in self.columns:
            if column.name not in frame:
                raise UserError(f"the table has no column {column.name!r}; it has {_listed(frame)}")
            x = frame[column.name]
            if column.levels:
                text = x.astype("string").to_numpy(dtype=object, na_value="")
                known = np.isin(text.astype(str), column.levels)
                for level, name in zip(column.levels, column.names(), strict=True):
                    parts[name] = np.where(known, text == level, np.nan).astype(np.float64)
            else:
                values = pd.to_numeric(x, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
                parts[column.name] = np.where(np.isfinite(values), values, np.nan)
        return pd.DataFrame(parts, index=frame.index)


def read_table(path: Path) -> pd.DataFrame:
    """The table of a file: csv, tsv (also .gz, .bz2, .xz, .zip) or parquet, with names in its first line.

    Raises:
        UserError: no such file, another kind, empty, damaged, or two columns of one name.
    """
    suffixes = path.suffixes
    kind = suffixes[-2] if len(suffixes) > 1 and suffixes[-1].lower() in PACKED else path.suffix
    if kind.lower() not in KINDS:
        raise UserError(f"{path} is no table that can be read: {', '.join(KINDS)}, packed or not")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    separator = KINDS[kind.lower()]
    try:
        if separator is None:
            frame = pd.read_parquet(path)
        else:
            frame = pd.read_csv(path, sep=separator, low_memory=False)
    except ImportError as error:
        raise UserError(f"a .parquet file needs pyarrow: pip install pyarrow ({path})") from error
    except (OSError, ValueError, EOFError) as error:
        # pandas' own errors and those of its unpackers are ValueErrors.
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read as a table: {reason}") from error
    if frame.empty:
        raise UserError(f"{path} has no rows below its first line, which names the columns")
    frame.columns = [str(name).strip() for name in frame.columns]
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise UserError(f"{path} has two columns named {twice[0]!r}: rename one")
    return frame


def _listed(frame: pd.DataFrame) -> str:
    names = list(map(str, frame.columns))
    return ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")


def target_of(frame: pd.DataFrame, name: str) -> pd.Series:
    """The column to predict.

    Raises:
        UserError: there is none of that name.
    """
    if name not in frame:
        raise UserError(f"the table has no column {name!r}; it has {_listed(frame)}")
    return frame[name]

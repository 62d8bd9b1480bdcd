"""What options of the command line may be: each reads a text, or says in a line what was expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

import torch

from parzen.kernels import kernel


def path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def device(text: str) -> str:
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"this machine cannot use the device {text!r}: {reason}") from error
    return text


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number > 0 and < 1e9, got {text!r}")
    return value


def _whole(text: str) -> int | None:
    """The whole number that ``text`` says, also as 1e6 or 2.2e6; exactly, as no float could."""
    if not re.fullmatch(r"\d{1,18}(\.\d{1,18})?(e\+?\d{1,2})?", text, re.ASCII | re.IGNORECASE):
        return None
    value = Decimal(text)
    return int(value) if value < 10**18 and value == value.to_integral_value() else None


def whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = _whole(text)
        if value is None or value < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number ≥ {least} and < 1e18, such as 1000 or 1e6, got {text!r}"
            )
        return value

    return read


def lengths(text: str) -> tuple[int, ...]:
    return tuple(map(whole(1), text.split(",")))


def names_among(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; known: {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"a name is given twice in {text!r}")
        return names

    return read


def kernel_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    try:
        kernels = {kernel(name) for name in names}
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len(kernels) < len(names):
        raise argparse.ArgumentTypeError(f"a kernel is named twice in {text!r}")
    return names


def one_kernel(text: str) -> tuple[str, ...]:
    names = kernel_names(text)
    if len(names) > 1:
        raise argparse.ArgumentTypeError(f"expected one kernel, got {text!r}; parzen compare trains several")
    return names

"""What options of the command line may be: each reads a text, or says in a line what was expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
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


def whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least):
            raise argparse.ArgumentTypeError(f"expected a whole number ≥ {least} and < 1e18, got {text!r}")
        return int(text)

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

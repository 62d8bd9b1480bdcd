"""Sparse attention as compact kernel regression."""

import importlib
from types import ModuleType

from parzen.attention import (
    AttentionWeights,
    Explanation,
    attention,
    attention_varlen,
    attention_weights,
    explain,
    info,
    weights,
)
from parzen.kernels import KERNELS, Kernel, kernel
from parzen.memory import KeyValueMemory

__version__ = "0.1.0"

__all__ = [
    "KERNELS",
    "AttentionWeights",
    "Explanation",
    "Kernel",
    "KeyValueMemory",
    "attention",
    "attention_varlen",
    "attention_weights",
    "explain",
    "info",
    "kernel",
    "weights",
]

# Imported when they are first asked for.
_MODULES = ("convert", "integrations", "losses", "models", "nn", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"parzen.{name}")
    raise AttributeError(f"module 'parzen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

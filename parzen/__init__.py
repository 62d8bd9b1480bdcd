"""Sparse attention as compact kernel regression."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Where a public name is, if not in parzen.attention.
_ELSEWHERE = {"KERNELS": "kernels", "Kernel": "kernels", "kernel": "kernels", "KeyValueMemory": "memory"}
# Imported when they are first asked for.
_MODULES = ("convert", "integrations", "losses", "models", "nn", "testing")


class _Package(ModuleType):
    """The package, in which ``attention`` is the function and never the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # So does the import of the module end, whoever asks for it.
        if name == "attention" and isinstance(value, ModuleType):
            value = value.attention
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"parzen.{name}")
    if name in __all__:
        value = getattr(importlib.import_module(f"parzen.{_ELSEWHERE.get(name, 'attention')}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'parzen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


# Without torch nothing is imported before it is asked for: `parzen --help` needs none of it. With torch all
# is there at once, so that nothing is left for a compiler to import while it traces.
if "torch" in sys.modules:
    for _name in __all__:
        __getattr__(_name)

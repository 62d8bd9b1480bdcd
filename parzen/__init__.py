"""Sparse attention as compact kernel regression."""

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

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

__version__ = "0.1.0"

__all__ = [
    "KERNELS",
    "AttentionWeights",
    "Explanation",
    "Kernel",
    "attention",
    "attention_varlen",
    "attention_weights",
    "explain",
    "info",
    "kernel",
    "weights",
]

"""Backends: implementations of one and the same call, and the choice among them.

A backend is a module with a function ``why_not(call) -> str | None``: None if it can serve the call,
else a sentence that says why it cannot, and ``run(call) -> Tensor``: the output (B, H, T, Ev), with
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from parzen.kernels import Form, Kernel, Number


@dataclass(frozen=True)
class Call:
    """One attention call after validation: four-dimensional, defaults resolved, numbers only.

    ``scores[b,h,i,j] = scale[b,h,i] · q[b,h,i]·k[b,h//g,j] + bias − slope[b,h]·|i + diagonal − j|`` with
    g = H // Hk, and key j allowed for query i when ``mask`` is True there and
    ``−left ≤ j − (i + diagonal) ≤ right`` (a negative ``left`` or ``right`` is no limit; causal is
    ``right = 0``).
    """

    q: Tensor  # (B, H, T, E)
    k: Tensor  # (B, Hk, S, E)
    v: Tensor  # (B, Hk, S, Ev)
    scale: Number  # float, or broadcastable to (B, H, T)
    form: Form
    kernel: Kernel
    mask: Tensor | None = None  # bool, four-dimensional, broadcastable to (B, H, T, S)
    bias: Tensor | None = None  # floating, likewise, added to the scaled scores
    slopes: Tensor | None = None  # (1 or B, H)
    diagonal: int = 0
    left: int = -1
    right: int = -1
    dropout: float = 0.0


def packed(call: Call, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int) -> tuple[Tensor, Tensor]:
    """The offsets of packed sequences as int64, checked against the lengths of ``call``.

    Raises:
        ValueError: offsets that do not ascend from 0 to the totals, or lengths beyond max_q or max_k.
    """
    offsets = []
    for name, cu, most, total in (
        ("q", cu_seq_q, max_q, call.q.shape[2]),
        ("k", cu_seq_k, max_k, call.k.shape[2]),
    ):
        first = cu.to(torch.int64).contiguous()
        if first.ndim != 1 or first.numel() < 1 or first[0] != 0 or first[-1] != total:
            raise ValueError(f"cu_seq_{name} must ascend from 0 to {total}, got {cu.tolist()}")
        lengths = first.diff()
        if bool((lengths < 0).any()) or bool((lengths > most).any()):
            raise ValueError(f"cu_seq_{name} must ascend by at most max_{name} = {most}, got {cu.tolist()}")
        offsets.append(first)
    if offsets[0].numel() != offsets[1].numel():
        raise ValueError("cu_seq_q and cu_seq_k must hold the same number of sequences")
    return offsets[0], offsets[1]


def choose(call: Call, name: str = "auto") -> tuple[str, ModuleType]:
    """The first backend that can serve the call, or the one called ``name``.

    Raises:
        ValueError: an unknown name, or a named backend that cannot serve this call (it says why).
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    for key, module in BACKENDS.items() if name == "auto" else [(name, BACKENDS[name])]:
        reason = module.why_not(call)
        if reason is None:
            return key, module
    raise ValueError(f"backend {name!r} cannot serve this call: {reason}")


# At the end: the backends import Call from here.
from parzen.backends import cpu, reference, sdpa  # noqa: E402

BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "cpu": cpu, "reference": reference}

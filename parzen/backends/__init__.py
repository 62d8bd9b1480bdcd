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


# An operator, so that a compiled graph looks at the values when it runs.
_library = torch.library.Library("parzen", "FRAGMENT")
_library.define(
    "offsets(Tensor cu_q, Tensor cu_k, SymInt total_q, SymInt total_k, SymInt max_q, SymInt max_k) "
    "-> (Tensor, Tensor)"
)


def _offsets(
    cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    for name, cu, most, total in (("q", cu_q, max_q, total_q), ("k", cu_k, max_k, total_k)):
        if cu[0] != 0 or cu[-1] != total:
            raise ValueError(f"cu_seq_{name} must ascend from 0 to {total}, got {cu.tolist()}")
        lengths = cu.to(torch.int64).diff()
        if bool(((lengths < 0) | (lengths > most)).any()):
            raise ValueError(f"cu_seq_{name} must ascend by at most max_{name} = {most}, got {cu.tolist()}")
    if cu_q.shape != cu_k.shape:
        raise ValueError("cu_seq_q and cu_seq_k must hold the same number of sequences")
    return cu_q.to(torch.int64, copy=True).contiguous(), cu_k.to(torch.int64, copy=True).contiguous()


_library.impl("offsets", _offsets, "CompositeExplicitAutograd")
torch.library.register_fake(
    "parzen::offsets",
    lambda cu_q, cu_k, *_: tuple(cu.new_empty(cu.shape, dtype=torch.int64) for cu in (cu_q, cu_k)),
    lib=_library,
)


def packed(call: Call, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int) -> tuple[Tensor, Tensor]:
    """The offsets of packed sequences as int64, checked against the lengths of ``call``.

    Raises:
        ValueError: offsets that do not ascend from 0 to the totals, or lengths beyond max_q or max_k.
        TypeError: offsets that are not tensors of integers.
    """
    for name, cu, most in (("q", cu_seq_q, max_q), ("k", cu_seq_k, max_k)):
        if not isinstance(cu, Tensor) or cu.is_floating_point() or cu.is_complex() or cu.dtype == torch.bool:
            got = cu.dtype if isinstance(cu, Tensor) else type(cu).__name__
            raise TypeError(f"cu_seq_{name} must be a tensor of integers, got {got}")
        if cu.ndim != 1 or cu.shape[0] < 1:
            raise ValueError(f"cu_seq_{name} must have shape (sequences + 1,), got {tuple(cu.shape)}")
        if cu.device != call.q.device:
            raise ValueError(
                f"cu_seq_{name} is on {cu.device} and query on {call.q.device}: move one of them"
            )
        if not isinstance(most, int | torch.SymInt) or isinstance(most, bool):
            raise TypeError(f"max_{name} must be an integer, got {most!r}")
        if most < 0:
            raise ValueError(f"max_{name} must be ≥ 0, got {most}")
    total_q, total_k = call.q.shape[2], call.k.shape[2]
    longest = torch.sym_min(max_q, total_q), torch.sym_min(max_k, total_k)
    return torch.ops.parzen.offsets(cu_seq_q, cu_seq_k, total_q, total_k, *longest)


def choose(call: Call, name: str = "auto") -> tuple[str, ModuleType]:
    """The first backend that can serve the call, or the one called ``name``.

    Raises:
        ValueError: an unknown name, or a named backend that cannot serve this call (it says why).
    """
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    for key, module in BACKENDS.items() if name == "auto" else [(name, BACKENDS[name])]:
        reason = module.why_not(call)
        if reason is None:
            return key, module
    raise ValueError(f"backend {name!r} cannot serve this call: {reason}")


# At the end: the backends import Call from here.
from parzen.backends import cpu, reference, sdpa, triton  # noqa: E402

BACKENDS: dict[str, ModuleType] = {"sdpa": sdpa, "cpu": cpu, "triton": triton, "reference": reference}

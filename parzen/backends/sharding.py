"""How the operators go over the parts of a sharded tensor (``torch.distributed.tensor``).

Rows of attention are independent: batch and heads may be cut, queries and keys are brought together. Tensors
that broadcast along the axis that is cut are whole on every rank, and their gradients are parts of a sum.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

# Names of engines, and how many of their operators' arguments are the tensors of a call.
ENGINES: dict[str, int] = {}


def register() -> None:
    """Tell torch the operators' shardings, once its sharded tensors are in use. Importing them is slow."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


# What torch.compiler.assume_constant_result does, without importing the compiler.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sharded(x: torch.Tensor) -> bool:
    """Whether it is one of torch's sharded tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def whole(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x, which every rank has, in the company of ``like``."""
    if not sharded(like):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


@cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def along(axis: int, x: Any) -> Any:
        """A tensor's placement where an axis of q is cut; None where there is no tensor."""
        if x is None:
            return None
        return Shard(axis) if axis < len(x.shape) and x.shape[axis] != 1 else Replicate()

    def choices(given: Sequence[Any]) -> list[tuple[int, list[Any]]]:
        """The axes of q that may be cut, each with the placements of the engine's tensors."""
        q, k, *_, seed, first_q, first_k = given
        axes = [] if first_q is not None or q.shape[0] == 1 else [0]
        if q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0:
            axes.append(1)
        whole = [None if x is None else Replicate() for x in (seed, first_q, first_k)]
        return [(axis, [along(axis, x) for x in given[:-3]] + whole) for axis in axes]

    def everywhere(count: int, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return [Replicate()] * count, [Replicate() if hasattr(x, "mesh") else None for x in args]

    def forward(*args: Any, tensors: int, count: int) -> list[Any]:
        rest = [None] * (len(args) - tensors)
        cut = [([Shard(axis)] * count, places + rest) for axis, places in choices(args[:tensors])]
        return [everywhere(count, args), *cut]

    def backward(do: Any, *args: Any, tensors: int) -> list[Any]:
        needs, made = args[-1], [everywhere(8, (do, *args))]
        for axis, places in choices(args[:tensors]):
            saved = [Shard(axis) if hasattr(x, "mesh") else None for x in args[tensors:]]
            # That of the bias has its shape, a sum where it broadcasts; those of the numbers have a row each.
            bias = Partial() if isinstance(places[4], Replicate) else Shard(axis)
            extra = [
                x if need else Replicate() for x, need in zip([bias] + [Shard(axis)] * 4, needs, strict=True)
            ]
            made.append(([Shard(axis)] * 3 + extra, [Shard(axis), *places, *saved]))
        return made

    def rows(first: Any, *args: Any) -> list[Any]:
        """For an operator on the rows of its first tensor; the others are like it, or one number."""
        made = [everywhere(1, (first, *args))]
        for axis in range(len(first.shape) - 1):
            own = [Shard(axis), *(along(axis, x) if hasattr(x, "mesh") else None for x in args)]
            made.append(([Shard(axis)], own))
        return made

    for name, tensors in ENGINES.items():
        operators = [getattr(torch.ops.parzen, f"{name}_{way}").default for way in ("forward", "backward")]
        count = len(operators[0]._schema.returns)
        register_sharding(operators[0])(partial(forward, tensors=tensors, count=count))
        register_sharding(operators[1])(partial(backward, tensors=tensors))
    for operator in ("cpu_weights", "cpu_weights_backward", "unit_mass"):
        register_sharding(getattr(torch.ops.parzen, operator).default)(rows)

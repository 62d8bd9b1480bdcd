"""Exact attention over a growing store of keys and values: decoding, retrieval, associative memory.

    o_i = Σ_j w_ij v_j,    j over everything stored

A compact kernel gives most of a long store a weight of exactly 0. To know which part, the store keeps each
key once more as 8-bit integers that bound its score from both sides; the keys whose bound passes the
threshold are read, and the values of the support. For everything else an eighth of the bytes is enough.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parzen import store
from parzen.backends import choose, recall, reference
from parzen.backends.recall import CHUNK, Codes
from parzen.call import Call, check_flags, check_scale, check_tensor, check_window, make, restore
from parzen.kernels import AlphaPower, Kernel, Number, Power, WithinMargin, plain, recording
from parzen.kernels import kernel as _spelled

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Beyond so many queries of one head at once, passing through the store for each of them costs more than
# putting it together for `parzen.attention`.
_FEW = 64
_FORMAT = 1


@dataclass(frozen=True)
class Reads:
    """What one call read of the store.

    Attributes:
        scored: (…, H, T): how many keys were read exactly; the others were left out by their bounds.
        support: (…, H, T): how many keys have weight, and so how many values were read.
    """

    scored: Tensor
    support: Tensor


@dataclass(frozen=True)
class _Chunk:
    """Up to CHUNK stored pairs. A full one is never written again, so that copies may share it."""

    keys: Tensor  # (B, H, room, E)
    values: Tensor  # (B, H, room, Ev)
    codes: Codes | None = None


class KeyValueMemory:
    """A store of keys and values that grows, with exact attention to all of it.

        s_j = scale·q·k_j        o = Σ_j w_j v_j        as ``parzen.attention``, for the same kernels

    Cost: a compact kernel reads the 8-bit codes of all keys (an eighth of what float32 keys and values
    take), then the keys whose bounds leave it open whether they count, and the values of the support.
    "gaussian" reads everything; α outside [1, 2] and normmax do so by the dense reference. Storing a pair
    takes constant time, and one more copy of nothing: pairs live in chunks of 1024, each coded when it is
    full. With E = Ev = 64 codes add 14 % to float32 and 28 % to half-precision pairs.

    For inference: nothing here has a gradient.

    Args:
        kernel: a name or a ``Kernel``, as for ``parzen.attention``.
        heads: Hk ≥ 1. Queries may have a multiple of it (grouped heads).
        head_dim: E ≥ 1, of queries and keys.
        value_dim: Ev ≥ 1; default E.
        scale: 1/h² > 0: a float, or a tensor that broadcasts to (…, H, T), such as (H, 1) for one bandwidth
            a head. Default 1/√E.
        dtype: of what is stored (float32, float64, bfloat16, float16); pairs are converted. Scores are
            computed in float32, from the stored numbers; in float64 for float64.

    Raises:
        ValueError, TypeError: sizes, dtype, kernel or scale outside their domain.

    Example:
        >>> memory = parzen.KeyValueMemory("biweight", heads=2, head_dim=8)
        >>> memory.append(torch.randn(2, 100, 8), torch.randn(2, 100, 8))
        >>> memory.attend(torch.randn(2, 1, 8)).shape
        torch.Size([2, 1, 8])
    """

    def __init__(
        self,
        kernel: str | Kernel,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        scale: Number | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        heads, head_dim, value_dim, scale = map(plain, (heads, head_dim, value_dim, scale))
        value_dim = head_dim if value_dim is None else value_dim
        for name, n in (("heads", heads), ("head_dim", head_dim), ("value_dim", value_dim)):
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise ValueError(f"{name} must be an integer ≥ 1, got {n!r}")
        if dtype not in DTYPES:
            known = ", ".join(str(d) for d in DTYPES)
            raise ValueError(f"dtype must be one of {known}, got {dtype}")
        if scale is not None:
            check_scale(scale)
        self.kernel = _spelled(kernel)
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.scale, self.dtype = scale, dtype
        self._lead: tuple[int, ...] | None = None  # the axes before H, known from the first pairs
        self._chunks: list[_Chunk] = []
        self._table = array("q")
        self._length = 0

    def __len__(self) -> int:
        """How many pairs each head stores."""
        return self._length

    def __repr__(self) -> str:
        shape = f"heads={self.heads}, head_dim={self.head_dim}, value_dim={self.value_dim}"
        return f"KeyValueMemory({str(self.kernel)!r}, {shape}, {self.dtype}, {len(self)} pairs)"

    @property
    def nbytes(self) -> int:
        """Bytes of the stored pairs and their codes; the last chunk's unused room aside."""
        if not self._chunks:
            return 0
        rows = self._chunks[0].keys.shape[0] * self.heads * self._length
        pairs = rows * (self.head_dim + self.value_dim) * self.dtype.itemsize
        return pairs + sum(chunk.codes.nbytes for chunk in self._chunks if chunk.codes is not None)

    @property
    def keys(self) -> Tensor:
        """A copy of all stored keys, (…, H, n, E)."""
        return self._joined("keys", self.head_dim)

    @property
    def values(self) -> Tensor:
        """A copy of all stored values, (…, H, n, Ev)."""
        return self._joined("values", self.value_dim)

    # ---- storing ---------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store T ≥ 0 more pairs.

        Args:
            key: (…, H, T, E). The leading axes and the device are those of the first pairs.
            value: (…, H, T, Ev).

        Raises:
            ValueError, TypeError: other shapes, devices, or not floating-point.
            RuntimeError: a key or value that would need a gradient.
        """
        _no_export()
        for name, x, size in (("key", key, self.head_dim), ("value", value, self.value_dim)):
            check_tensor(name, x)
            _no_gradient(name, x)
            if x.ndim < 3 or x.shape[-3] != self.heads or x.shape[-1] != size:
                raise ValueError(f"{name} must be (…, {self.heads}, T, {size}), got {tuple(x.shape)}")
            self._check_place(name, x)
        if key.shape[:-1] != value.shape[:-1] or key.device != value.device:
            raise ValueError(
                f"key and value must agree in all but the last axis, and in their device, got "
                f"{tuple(key.shape)} on {key.device} and {tuple(value.shape)} on {value.device}"
            )
        if self._lead is None:
            self._lead = tuple(key.shape[:-3])
        with torch.no_grad():
            k, v = (_four(x).to(self.dtype) for x in (key, value))
            done, total = 0, k.shape[2]
            while done < total:
                start = self._length % CHUNK
                n = min(CHUNK - start, total - done)
                self._write(start, k[:, :, done : done + n], v[:, :, done : done + n])
                self._length += n
                done += n

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` pairs, and forget the others.

        Raises:
            ValueError: not an integer in 0 … ``len(self)``.
        """
        length = plain(length)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= self._length:
            raise ValueError(f"length must be an integer in 0 … {self._length}, got {length!r}")
        whole, rest = divmod(length, CHUNK)
        kept = self._chunks[whole : whole + 1] if rest else []
        del self._chunks[whole:]
        self._length = whole * CHUNK
        for chunk in kept:
            # A copy: others may share the full one. It has no codes until it is full again.
            self._write(0, chunk.keys[:, :, :rest], chunk.values[:, :, :rest])
        self._length = length
        self._tabulate()

    # What is stored outlives the mode it was stored in: a tensor made under inference_mode could not be
    # written again outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def reorder(self, index: Tensor) -> None:
        """Sequence i goes on from what sequence ``index[i]`` has stored (beam search, batch selection).

        Args:
            index: integers (N,) below B; the store must have been filled with (B, H, T, …).

        Raises:
            ValueError, TypeError: other shapes or types, or an index out of range.
        """
        if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
            got = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"index must be a tensor of integers, got {got}")
        if index.ndim != 1 or (self._lead is not None and len(self._lead) != 1):
            raise ValueError(
                f"reordering needs index (N,) and pairs of (B, H, T, …), got {tuple(index.shape)} and "
                f"leading axes {self._lead}"
            )
        if self._lead is None:
            return
        size = self._lead[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(f"index must be in 0 … {size - 1}, got {index.tolist()}")
        self._lead = (len(index),)

        if self._chunks:
            index = index.to(self._chunks[0].keys.device)
        for i, c in enumerate(self._chunks):
            codes = None if c.codes is None else c.codes.reordered(index)
            self._chunks[i] = _Chunk(c.keys.index_select(0, index), c.values.index_select(0, index), codes)
        self._tabulate()

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self) -> KeyValueMemory:
        """A memory that goes on by itself. Full chunks are shared, so this costs next to nothing."""
        other = KeyValueMemory(
            self.kernel, self.heads, self.head_dim, self.value_dim, scale=self.scale, dtype=self.dtype
        )
        other._lead, other._length = self._lead, self._length
        other._chunks = [
            c if (i + 1) * CHUNK <= self._length else _Chunk(c.keys.clone(), c.values.clone())
            for i, c in enumerate(self._chunks)
        ]
        other._tabulate()
        return other

    def __copy__(self) -> KeyValueMemory:
        return self.copy()

    def __deepcopy__(self, memo: object) -> KeyValueMemory:
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError("a KeyValueMemory is not pickled: use save and KeyValueMemory.load")

    # ---- attending -------------------------------------------------------------------------------

    def attend(
        self,
        query: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        window: tuple[int, int] | None = None,
        scale: Number | None = None,
    ) -> Tensor:
        """The kernel regression of each query on all pairs, as ``parzen.attention(query, keys, values)``.

        Args:
            query: (…, H, T, E) with the leading axes of the pairs; H a multiple of the stored heads, query
                head h reading stored head h // (H/Hk).
            attn_mask: bool, broadcastable to (…, H, T, n): False hides a key, such as padding.
            is_causal: the last query stands at the last key, each one before it a key earlier, and sees no
                later key: what T new tokens need after their own pairs were appended. Default: every query
                sees every key.
            window: (left, right), as for ``parzen.attention``, with the same places.
            scale: in place of the memory's own.

        Returns:
            (…, H, T, Ev), in the common dtype of query and store. A query that sees no key, an empty store
            included, gets 0; a stored score of NaN or +∞ that it sees makes it NaN.

        Raises:
            ValueError, TypeError: shapes, dtypes, devices or parameters that do not fit.
            RuntimeError: a query that would need a gradient.
        """
        call, lead, dtype = self._prepare(query, attn_mask, is_causal, window, scale)
        return restore(self._run(call), lead).to(dtype)

    def reads(
        self,
        query: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        window: tuple[int, int] | None = None,
        scale: Number | None = None,
    ) -> Reads:
        """How many keys and values ``attend`` reads for each query. Arguments as for it.

        Raises:
            ValueError: as ``attend``, or the engine that screens is not there.
        """
        call, lead, _ = self._prepare(query, attn_mask, is_causal, window, scale)
        counts = tuple(torch.zeros(call.q.shape[:3], dtype=torch.int64) for _ in range(2))
        if self._length:
            reason = recall.why_not(self._chunks[0].keys, call.form)
            if reason is not None:
                raise ValueError(reason)
            recall.run(call, self._table, self.dtype, counts)  # type: ignore[arg-type]
        return Reads(*(restore(x, lead) for x in counts))

    def _run(self, call: Call) -> Tensor:
        if not self._length:
            return call.q.new_zeros((*call.q.shape[:3], self.value_dim))
        few = call.q.shape[2] * (call.q.shape[1] // self.heads) <= _FEW
        if few and self._length < 2**31 and recall.why_not(self._chunks[0].keys, call.form) is None:
            return recall.run(call, self._table, self.dtype)
        k, v = (_four(x).to(call.q.dtype) for x in (self.keys, self.values))
        call = replace(call, k=k, v=v)
        return choose(call)[1].run(call)

    def _prepare(
        self,
        query: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        window: tuple[int, int] | None,
        scale: Number | None,
    ) -> tuple[Call, tuple[int, ...], torch.dtype]:
        _no_export()
        check_tensor("query", query)
        _no_gradient("query", query)
        check_flags(is_causal=is_causal)
        if attn_mask is not None and (not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool):
            got = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
            raise TypeError(f"attn_mask must be a bool tensor, True = attend, got {got}")
        if query.ndim < 3 or query.shape[-1] != self.head_dim or query.shape[-3] % self.heads:
            raise ValueError(
                f"query must be (…, a multiple of {self.heads}, T, {self.head_dim}), got {tuple(query.shape)}"
            )
        self._check_place("query", query)
        dtype = torch.promote_types(query.dtype, self.dtype)
        if reference.compute_dtype(dtype) != reference.compute_dtype(self.dtype):
            raise TypeError(
                f"query is {query.dtype} and the store {self.dtype}, which is not computed in float64: "
                "convert query, or make the memory with dtype=torch.float64"
            )
        left, right = (-1, -1) if window is None else check_window(window)
        # The door of `attention` checks the rest. These keys and values only tell their shape.
        plain = query.detach().to(dtype)
        key, value = (
            plain.new_empty(()).expand(*query.shape[:-3], self.heads, self._length, size)
            for size in (self.head_dim, self.value_dim)
        )
        with torch.autocast(query.device.type, enabled=False):
            call, lead = make(
                plain, key, value, attn_mask, 0.0, False, self.scale if scale is None else scale, True,
                self.kernel, (left, 0 if is_causal else right), None,
            )  # fmt: skip
        return call, lead, dtype

    # ---- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one file in the safetensors format, settings as JSON in its header.

        The file appears whole or not at all.

        Raises:
            OSError: the file cannot be written.
            ImportError: ``safetensors`` is not installed.
        """
        chosen, tensors = _plain(self.kernel)
        tensors |= {"keys": self.keys, "values": self.values}
        if isinstance(self.scale, Tensor):
            tensors["scale"] = self.scale.detach()
        settings = {
            "format": _FORMAT,
            "kernel": str(chosen),
            "heads": self.heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "scale": None if isinstance(self.scale, Tensor) else self.scale,
        }
        store.write(path, "parzen.memory", settings, tensors)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> KeyValueMemory:
        """The memory that ``save`` wrote. Codes are made anew, so that a file cannot lie about them.

        Raises:
            OSError: no such file, or it cannot be read.
            ValueError: it is damaged, or was not written by ``save``.
            ImportError: ``safetensors`` is not installed.
        """
        with store.reading(path, "parzen.memory", "KeyValueMemory.save") as (settings, tensors):
            return cls._from(settings, tensors, device)

    @classmethod
    def _from(
        cls, settings: dict[str, Any], tensors: dict[str, Tensor], device: str | torch.device
    ) -> KeyValueMemory:
        names = {"format", "kernel", "heads", "head_dim", "value_dim", "scale"}
        if set(settings) != names:
            raise ValueError("the settings are not those of a memory")
        if settings.pop("format") != _FORMAT:
            raise ValueError(f"another version of the format than {_FORMAT}")
        chosen = _restored(_spelled(settings.pop("kernel")), tensors)
        if "scale" in tensors:
            settings["scale"] = tensors.pop("scale")
        if set(tensors) != {"keys", "values"}:
            raise ValueError(f"tensors keys and values expected, got {', '.join(sorted(tensors))}")
        k, v = tensors["keys"], tensors["values"]
        if k.dtype != v.dtype:
            raise ValueError(f"keys are {k.dtype} and values {v.dtype}")
        memory = cls(chosen, dtype=k.dtype, **settings)
        memory.append(k.to(device), v.to(device))
        return memory

    # ---- chunks ----------------------------------------------------------------------------------

    def _check_place(self, name: str, x: Tensor) -> None:
        if self._lead is not None and x.shape[:-3] != self._lead:
            raise ValueError(
                f"{name} has leading axes {tuple(x.shape[:-3])}, the stored pairs {self._lead}: "
                "they must agree"
            )
        device = self._chunks[0].keys.device if self._chunks else x.device
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and the stored pairs on {device}: move one of them")

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put pairs at ``start`` of the last chunk, or of a new one."""
        stop = start + k.shape[2]
        old = self._chunks.pop() if start else None
        room = 0 if old is None else old.keys.shape[2]
        if stop > room:
            # A chunk grows by doubling: small memories stay small, and no pair moves more than a few times.
            room = min(CHUNK, max(64, 1 << (stop - 1).bit_length()))
            grown = [x.new_empty((*x.shape[:2], room, x.shape[3])) for x in (k, v)]
            new = _Chunk(grown[0], grown[1])
            if old is not None:
                new.keys[:, :, :start] = old.keys[:, :, :start]
                new.values[:, :, :start] = old.values[:, :, :start]
        else:
            assert old is not None
            new = old
        new.keys[:, :, start:stop] = k
        new.values[:, :, start:stop] = v
        if stop == CHUNK and recall.why_not(k) is None:
            new = replace(new, codes=recall.code(new.keys))
        self._chunks.append(new)
        if new is not old:
            self._tabulate(len(self._chunks) - 1)

    def _tabulate(self, first: int = 0) -> None:
        """Addresses of the chunks from ``first`` on, for the engine."""
        del self._table[first * recall.ENTRY :]
        if self._chunks and self._chunks[0].keys.device.type == "cpu":
            for chunk in self._chunks[first:]:
                self._table.frombytes(recall.entry(chunk.keys, chunk.values, chunk.codes))

    def _joined(self, name: str, size: int) -> Tensor:
        lead = self._lead or ()
        parts = [getattr(chunk, name) for chunk in self._chunks]
        if not parts:
            return torch.empty((*lead, self.heads, 0, size), dtype=self.dtype)
        parts[-1] = parts[-1][:, :, : self._length - CHUNK * (len(parts) - 1)]
        return torch.cat(parts, 2).reshape(*lead, self.heads, self._length, size)


def _four(x: Tensor) -> Tensor:
    """(…, H, T, E) as (B, H, T, E)."""
    return x[None] if x.ndim == 3 else x.flatten(0, -4)


def _no_export() -> None:
    if recording() or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "a KeyValueMemory changes from call to call, it is neither exported nor vmapped: use "
            "parzen.attention on all keys and values"
        )


def _no_gradient(name: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            f"{name} requires a gradient, and a memory has none: use torch.no_grad() or {name}.detach(), or "
            "parzen.attention on all keys and values"
        )


# A kernel with tensor parameters is spelled with numbers, and the tensors are kept beside it.
def _plain(k: Kernel) -> tuple[Kernel, dict[str, Tensor]]:
    if isinstance(k.rule, WithinMargin) and isinstance(k.rule.margin, Tensor):
        return Kernel(k.profile, WithinMargin()), {"margin": k.rule.margin.detach()}
    if k.learned is not None:
        return Kernel(Power(2), k.rule), {k.learned[0]: k.learned[1].detach()}
    return k, {}


def _restored(k: Kernel, tensors: dict[str, Tensor]) -> Kernel:
    if "alpha" in tensors:
        return Kernel(AlphaPower(tensors.pop("alpha")), k.rule)
    if "r" in tensors:
        return Kernel(Power(tensors.pop("r")), k.rule)
    if "margin" in tensors:
        return Kernel(k.profile, WithinMargin(tensors.pop("margin")))
    return k

"""Linear-time recurrences over a sequence, computed in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32


def leaky_sum(x: Tensor, decay: Tensor, chunk: int = CHUNK) -> Tensor:
    """The exponentially fading sum of everything seen so far, in time linear in the length.

        y_t = Σ_{i≤t} e^{−λ(t−i)} x_i,    that is    y_t = e^{−λ} y_{t−1} + x_t

    Inside a chunk of C steps this is one C×C product; what a chunk leaves behind fades by e^{−λC} per
    chunk, which is the same sum again over T/C steps. Every exponent is ≤ 0, so nothing overflows
    however large λT is, and there is no maximal length.

    Args:
        x: (B, H, T, E).
        decay: λ ≥ 0, (H,).
        chunk: C ≥ 2.

    Returns:
        (B, H, T, E), differentiable in ``x`` and ``decay``.
    """
    length = x.shape[-2]
    if length <= chunk:
        return _fading(decay, length) @ x
    chunks = -(-length // chunk)
    x_BHNCE = F.pad(x, (0, 0, 0, chunks * chunk - length)).unflatten(-2, (chunks, chunk))
    inside = _fading(decay, chunk)[:, None] @ x_BHNCE
    after = leaky_sum(inside[..., -1, :], decay * chunk, chunk)
    before = F.pad(after, (0, 0, 1, -1))
    steps = torch.arange(1, chunk + 1, device=decay.device, dtype=decay.dtype)
    fade_HC = torch.exp(-decay[:, None] * steps)
    y = inside + fade_HC[:, None, :, None] * before[..., None, :]
    return y.flatten(-3, -2)[..., :length, :]


def _fading(decay: Tensor, length: int) -> Tensor:
    """e^{−λ(t−i)} for i ≤ t, else 0: (H, length, length)."""
    t = torch.arange(length, device=decay.device, dtype=decay.dtype)
    ago = (t[:, None] - t).clamp(min=0)
    return torch.exp(-decay[:, None, None] * ago).tril()

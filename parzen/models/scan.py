"""Linear-time recurrences over a sequence, computed in chunks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        (B, H, T, E), in the dtype of ``x``; computed in float32 at least. Differentiable in both.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return _leaky(x.to(wide), decay.to(wide), chunk).to(x.dtype)


def _leaky(x: Tensor, decay: Tensor, chunk: int) -> Tensor:
    length = x.shape[-2]
    if length <= chunk:
        return _fading(decay, length) @ x
    inside = _fading(decay, chunk)[:, None] @ _in_chunks(x, chunk)
    after = _leaky(inside[..., -1, :], decay * chunk, chunk)
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


def gated_sum(x: Tensor, gate: Tensor, decay: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """A fading sum whose gate and decay change along the sequence, with its scale kept apart.

        ȳ_t = e^{g_t} x_t + e^{−d_t} ȳ_{t−1},    m_t = max(g_t, m_{t−1} − d_t)

    The result is y_t = ȳ_t e^{−m_t} and m_t, so gates of any size neither overflow nor vanish. Chunks work
    as in ``leaky_sum``: what each leaves behind is the same sum over T/C steps, with m as its gate. Every
    exponent is ≤ 0, and decays are only ever added up, so a strong one costs its neighbours no digits.

    Autograd takes m_t as a constant, which is right for what does not depend on how ȳ is split in two: for
    y_t e^{m_t}, and for its direction y_t/‖y_t‖.

    Args:
        x: (B, H, T, E).
        gate: g, finite, (B, H, T).
        decay: d ≥ 0, (B, H, T).
        chunk: C ≥ 2.

    Returns:
        y (B, H, T, E) and m (B, H, T), in float32 at least.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, gate, decay = (z.to(wide) for z in (x, gate, decay))
    length = x.shape[-2]
    if length <= chunk:
        return _gated(x, gate, decay)
    x = _in_chunks(x, chunk)
    gate, decay = (_in_chunks(z[..., None], chunk)[..., 0] for z in (gate, decay))
    inside, m_inside = _gated(x, gate, decay)
    faded = decay.cumsum(-1)
    after, m_after = gated_sum(inside[..., -1, :], m_inside[..., -1], faded[..., -1], chunk)
    before = F.pad(after, (0, 0, 1, -1))[..., None, :]
    m_before = F.pad(m_after, (1, -1), value=-torch.inf)[..., None] - faded
    m = torch.maximum(m_inside, m_before.detach())
    y = (m_inside - m).exp()[..., None] * inside + (m_before - m).exp()[..., None] * before
    return y.flatten(-3, -2)[..., :length, :], m.flatten(-2)[..., :length]


def _gated(x: Tensor, gate: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """``gated_sum`` as one product with a matrix (…, T, T)."""
    length = x.shape[-2]
    # Row t, column i: the sum of the decays after i up to t.
    between = decay[..., None].expand(*decay.shape, length).tril(-1).cumsum(-2)
    ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    s = (gate[..., None, :] - between).masked_fill(ahead, -torch.inf)
    m = s.detach().amax(-1)
    with torch.autocast(x.device.type, enabled=False):
        return (s - m[..., None]).exp() @ x, m


def causal_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """y_t = Σ_{j≤t} taps_j x_{t−j}, a filter for each channel, in time T·log T.

    By the fast Fourier transform, padded so that nothing wraps around. Rounding spreads over the whole
    sequence: a position sees later ones at the level of the rounding unit.

    Args:
        x: (B, T, D).
        taps: (D, K); those from T on act on nothing.

    Returns:
        (B, T, D), in the dtype of ``x``; computed in float32 at least. Differentiable in both.
    """
    length = x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = taps[:, :length].to(wide)
    size = _fast_size(length + taps.shape[1] - 1)
    spectrum = torch.fft.rfft(x.mT.to(wide), size) * torch.fft.rfft(taps, size)
    return torch.fft.irfft(spectrum, size)[..., :length].mT.to(x.dtype)


def _fast_size(least: int) -> int:
    """The smallest m·2^k ≥ least with m in 5 … 8: a length whose transform is fast."""
    step = 1 << max(0, (least - 1).bit_length() - 3)
    return -(-least // step) * step


def decayed_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk: int = 8) -> Tensor:
    """Linear attention whose past fades, in time and memory linear in the length.

        o_t = q_tᵀ S_t,    S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ,    g = log_decay ≤ 0

    Inside a chunk of C steps, with b the running sum of g and m its value in the middle,

        o_t = Σ_{i≤t} ⟨q_t ⊙ e^{b_t − m}, k_i ⊙ e^{m − b_i}⟩ v_i + (q_t ⊙ e^{b_t})ᵀ S_before

    Exponents of the second term are ≤ 0. Those of the first stay finite because g is raised to a floor of
    −160/C (float32) or −1276/C (float64): at C = 8 that is a decay of 2e-9 a step, as good as none left.

    Args:
        q, k: (B, H, T, K).
        v: (B, H, T, V).
        log_decay: broadcastable to (B, H, T, K).
        chunk: C ≥ 2; 8 is right for any decay, more is faster and right for decays above the floor.

    Returns:
        (B, H, T, V), in the dtype of ``v``; computed in float32 at least.

    Source: *Gated Linear Attention Transformers* (arXiv 2312.06635), section 4.
    """
    dtype, length = v.dtype, v.shape[-2]
    wide = torch.promote_types(dtype, torch.float32)
    g = log_decay.to(wide).clamp(min=-1.8 * math.log(torch.finfo(wide).max) / chunk)
    g = g.expand(*g.shape[:-2], length, g.shape[-1])
    q, k, v, g = (_in_chunks(x.to(wide), chunk) for x in (q, k, v, g))
    b = g.cumsum(-2)
    end = b[..., -1:, :]
    # The result does not depend on m, so no gradient flows through it.
    m = b[..., (chunk - 1) // 2, None, :].detach()
    with torch.autocast(q.device.type, enabled=False):
        inside = ((q * (b - m).exp()) @ (k * (m - b).exp()).mT).tril() @ v
        added = (k * (end - b).exp()).mT @ v
        o = inside + (q * b.exp()) @ _before(added, end.exp().mT)
    return o.flatten(-3, -2)[..., :length, :].to(dtype)


def decayed_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of ``decayed_attention``: (o_t, S_t) from S_{t−1}.

    Args:
        q, k: (B, H, K).
        v: (B, H, V).
        log_decay: broadcastable to (B, H, K).
        state: (B, H, K, V), zero at the start.
    """
    state = log_decay.exp()[..., None] * state + k[..., None] * v[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """(…, T, E) → (…, T/C, C, E), with zeros at the end."""
    chunks = -(-x.shape[-2] // chunk)
    return F.pad(x, (0, 0, 0, chunks * chunk - x.shape[-2])).unflatten(-2, (chunks, chunk))


def _before(added: Tensor, fade: Tensor) -> Tensor:
    """The state before each chunk: S_c = fade_{c−1} S_{c−1} + added_{c−1}, S_0 = 0; (B, H, T/C, K, V)."""
    states = [torch.zeros_like(added[..., 0, :, :])]
    for a, f in zip(added.unbind(-3)[:-1], fade.unbind(-3)[:-1], strict=True):
        states.append(torch.addcmul(a, f, states[-1]))
    return torch.stack(states, -3)


def selective_scan(u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int = 16) -> Tensor:
    """The output of a diagonal state space whose step, input and output maps change along the sequence.

        h_t = e^{Δ_t A} ⊙ h_{t−1} + (Δ_t u_t) B_tᵀ,    y_t = h_t C_t,    h_t in R^{D×N}

    States are made a chunk at a time and only those between chunks are kept; the backward pass makes them
    again. So memory is that of ``u`` times 1 + N/chunk, and a chunk stays in the processor's cache.
    It can be differentiated once.

    Args:
        u: (B, T, D).
        step: Δ > 0, (B, T, D).
        A: < 0, (D, N).
        B, C: (B, T, N).
        chunk: steps whose states are held at the same time.

    Returns:
        (B, T, D), in the dtype of ``u``; computed in float32 at least.

    Source: *Mamba* (arXiv 2312.00752), algorithm 2.
    """
    wide = torch.promote_types(u.dtype, torch.float32)
    x_TBD, step_TBD, B_TBN, C_TBN = (z.transpose(0, 1).to(wide).contiguous() for z in (step * u, step, B, C))
    with torch.autocast(u.device.type, enabled=False):
        y = _SelectiveScan.apply(x_TBD, step_TBD, A.mT.to(wide).contiguous(), B_TBN, C_TBN, chunk)
    return y.transpose(0, 1).to(u.dtype)


class _SelectiveScan(torch.autograd.Function):
    """``selective_scan`` on time-major arguments, x = Δu and A as (N, D): states are (T, B, N, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int) -> Tensor:
        y = torch.empty_like(x)
        starts = [x.new_zeros(x.shape[1], *A.shape)]
        # One block of memory for all chunks: asking for a new one each time costs as much as the sums.
        room = x.new_empty(2, chunk, *starts[0].shape)
        for now in _slices(len(x), chunk):
            h = _states(x[now], step[now], A, B[now], starts[-1], room)[1]
            torch.matmul(C[now][:, :, None], h, out=y[now][:, :, None])
            starts.append(h[-1].clone())
        ctx.save_for_backward(x, step, A, B, C, *starts[:-1])
        ctx.chunk = chunk
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, step, A, B, C, *starts = ctx.saved_tensors
        dx, dstep, dB, dC = (torch.empty_like(z) for z in (x, step, B, C))
        dA = torch.zeros_like(A)
        room = x.new_empty(4, ctx.chunk, *starts[0].shape)
        # What reaches h_t from the steps after it: e^{Δ_{t+1} A} ⊙ dh_{t+1}.
        later = torch.zeros_like(starts[0])
        for now, start in zip(reversed(_slices(len(x), ctx.chunk)), reversed(starts), strict=True):
            decay, h = _states(x[now], step[now], A, B[now], start, room)
            dh, product = room[2:, : len(h)]
            torch.mul(dy[now][:, :, None], C[now][..., None], out=dh)
            dh[-1] += later
            for t in range(len(dh) - 2, -1, -1):
                dh[t].addcmul_(decay[t + 1], dh[t + 1])
            torch.matmul(B[now][:, :, None], dh, out=dx[now][:, :, None])
            torch.matmul(dh, x[now][..., None], out=dB[now][..., None])
            torch.matmul(h, dy[now][..., None], out=dC[now][..., None])
            dh *= decay
            later.copy_(dh[0])
            # From here on the gradient of Δ_t A.
            dh[1:] *= h[:-1]
            dh[0] *= start
            torch.sum(torch.mul(dh, A, out=product), 2, out=dstep[now])
            dA += torch.mul(dh, step[now][:, :, None], out=product).sum((0, 1))
        return dx, dstep, dA, dB, dC, None


def _states(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, start: Tensor, room: Tensor
) -> tuple[Tensor, Tensor]:
    """e^{Δ_t A} and h_t for the steps of one chunk, in the memory of ``room``."""
    decay, h = room[:2, : len(x)]
    torch.mul(step[:, :, None], A, out=decay).exp_()
    torch.mul(x[:, :, None], B[..., None], out=h)
    before = start
    for now, a in zip(h, decay, strict=True):
        before = now.addcmul_(a, before)
    return decay, h


def _slices(length: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, length)) for i in range(0, length, chunk)]

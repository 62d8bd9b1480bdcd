"""The dense Gaussian through ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parzen.backends import cpu
from parzen.backends.reference import per_query_head
from parzen.backends.sharding import sharded
from parzen.call import Call
from parzen.kernels import EVERYWHERE, eager, recording

_aten = torch.ops.aten
_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION


def why_not(call: Call) -> str | None:
    """A sentence for everything but the dense Gaussian in the forms that torch takes."""
    if call.form.rule != EVERYWHERE:
        return "scaled_dot_product_attention is the dense Gaussian; this kernel has compact support"
    if call.q.dtype.itemsize == 1:
        return f"scaled_dot_product_attention does not compute in {call.q.dtype}"
    if call.slopes is not None:
        return "scaled_dot_product_attention has no ALiBi without a T×S bias"
    if call.left >= 0 or call.right > 0:
        return "scaled_dot_product_attention has no window without a T×S mask"
    if call.right == 0 and call.diagonal != 0 and not _lower_right(call):
        return "scaled_dot_product_attention has no lower-right causal alignment without a T×S mask"
    if call.right == 0 and (call.mask is not None or call.bias is not None):
        return "scaled_dot_product_attention takes a mask or is_causal, not both"
    if 0 in (*call.q.shape, *call.k.shape, *call.v.shape):
        return "scaled_dot_product_attention fails on axes of length 0"
    if call.q.device.type == "cpu" and not _fused(call) and cpu.why_not(call) is None:
        return (
            "scaled_dot_product_attention would be T×S on a CPU: its fused kernel takes no dropout, no value "
            "width but the keys', no stride along the last axis and no mask with a gradient"
        )
    if call.q.device.type == "cpu" and sharded(call.q):
        return "torch does not know how to go back through sharded tensors in its CPU kernel"
    if torch._C._are_functorch_transforms_active():
        return "scaled_dot_product_attention has neither a vmap rule nor a second derivative"
    return None


def _fused(call: Call) -> bool:
    """Whether torch's CPU kernel serves the call (``use_flash_attention_cpp`` of aten)."""
    learnt = call.bias is not None and call.bias.requires_grad
    unit = all(x.stride(-1) == 1 for x in (call.q, call.k, call.v))
    return call.dropout == 0 and call.q.shape[3] == call.v.shape[3] and unit and not learnt


def _lower_right(call: Call) -> bool:
    """A single last query sees every key: causal, lower-right aligned, is no limit."""
    return call.q.shape[2] == 1 and call.diagonal == call.k.shape[2] - 1


class _Flash(torch.autograd.Function):
    """torch's CPU flash attention, with a second derivative (through the dense reference)."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, mask, ctx.causal, ctx.scale = inputs
        out, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, mask, out, lse)

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            # create_graph: differentiate the plain composition instead, to any order.
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                dense = F.scaled_dot_product_attention(q, k, v, mask, is_causal=ctx.causal, scale=ctx.scale)
            wanted = [x for x, need in zip((q, k, v), ctx.needs_input_grad, strict=False) if need]
            found = iter(torch.autograd.grad(dense, wanted, do, create_graph=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None, None
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, out, lse, 0.0, ctx.causal, attn_mask=mask, scale=ctx.scale
        )
        return *grads, None, None, None


# autograd looks at the signature in each call, which is found at once where it is written down.
_Flash.forward.__signature__ = signature(_Flash.forward)  # type: ignore[attr-defined]


def run(call: Call) -> Tensor:
    """Softmax attention (B, H, T, Ev)."""
    q, k, v, scale = call.q, call.k, call.v, call.scale
    if isinstance(scale, Tensor):
        q, scale = (q * scale.unsqueeze(-1)).to(q.dtype), 1.0
    mask = call.mask
    if call.bias is not None:
        bias = call.bias.to(q.dtype)
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    causal = call.right == 0 and not _lower_right(call)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # torch's CPU kernel reads the keys of a group where they are; its backward is slower on few of them than
    # on copies, and on other devices some of its kernels would give way to a T×S one.
    grouped = q.is_cpu and not learns and eager(q, k, v) and q.shape[1] != k.shape[1]
    if not grouped:
        k, v = (per_query_head(x, q.shape[1]) for x in (k, v))
    # The choice of kernel and the additive form of a mask are as inside scaled_dot_product_attention.
    if learns and q.is_cpu and eager(q, k, v):
        if torch._fused_sdp_choice(q, k, v, mask, call.dropout, causal, scale=scale) == _FLASH:
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
            return _Flash.apply(q, k, v, mask, causal, scale)[0]
    o = F.scaled_dot_product_attention(q, k, v, mask, call.dropout, causal, scale=scale, enable_gqa=grouped)
    if mask is not None and recording():
        # Where the graph goes, such as into ONNX, softmax of a row with nothing allowed is no 0.
        seen = mask if mask.dtype == torch.bool else mask > -torch.inf
        o = torch.where(seen.any(-1, keepdim=True), o, 0)
    return o

"""Every public function in every tool that takes a function of tensors, for every kernel.

A row of CASES is a module and its inputs; a row of WAYS runs a module in one of torch's tools and gives what
comes out. What a tool cannot do is a row of REFUSED with the sentence that says so.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_list import NAMES
from torch import Tensor, nn
from torch.testing import assert_close

import parzen
from parzen import losses
from parzen.models.mosaic import Mosaic, MosaicConfig
from parzen.nn import KernelAttention

T, E = 6, 16


class Call(nn.Module):
    """A public function as a module."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.function(*inputs, **self.options)
        return out.weights if isinstance(out, parzen.AttentionWeights) else out


def _qkv() -> list[Tensor]:
    return [torch.randn(2, 2, T, E) for _ in range(3)]


def _mask() -> Tensor:
    mask = torch.rand(T, T) > 0.3
    mask[2] = False  # a row with nothing allowed
    return mask


def _scores() -> Tensor:
    scores = torch.randn(5, 9)
    scores[2] = -torch.inf
    return scores


def _memory(kernel: str) -> Callable[[Tensor], Tensor]:
    memory = parzen.KeyValueMemory(kernel, 2, E)
    memory.append(*_qkv()[:2])
    return memory.attend


def _mosaic(kernel: str) -> nn.Module:
    config = MosaicConfig(vocab=11, width=E, layers=1, heads=2, slots=3, kernel=kernel, dropout=0.0)
    return Mosaic(config)


SLOPES, SCALE = torch.tensor([0.1, 0.3]), torch.tensor([[0.5], [0.2]])
OPTIONS = {"window": (4, 3), "alibi_slopes": SLOPES, "scale": SCALE}
OFFSETS = [torch.tensor([0, 2, 6]) for _ in range(2)]

# kernel → (module, inputs). The first axis of the inputs is a batch where the module has one.
CASES: dict[str, Callable[[str], tuple[nn.Module, list[Tensor]]]] = {
    "attention": lambda kernel: (Call(parzen.attention, kernel=kernel), [*_qkv(), _mask()]),
    "attention, options": lambda kernel: (
        Call(parzen.attention, kernel=kernel, **OPTIONS),
        [*_qkv(), torch.where(_mask(), torch.randn(T, T), -torch.inf)],
    ),
    "attention_varlen": lambda kernel: (
        Call(parzen.attention_varlen, max_q=4, max_k=4, kernel=kernel),
        [*(x[0].transpose(0, 1).contiguous() for x in _qkv()), *OFFSETS],
    ),
    "attention_weights": lambda kernel: (
        Call(parzen.attention_weights, kernel=kernel), [*_qkv()[:2], _mask()]
    ),
    "weights": lambda kernel: (Call(parzen.weights, kernel=kernel), [_scores()]),
    "fenchel_young": lambda kernel: (
        Call(losses.fenchel_young, kernel=kernel, reduction="none"),
        [torch.randn(5, 9), torch.tensor([0, 8, 3, -100, 1])],
    ),
    "linear_fenchel_young": lambda kernel: (
        Call(losses.linear_fenchel_young, kernel=kernel, reduction="none"),
        [torch.randn(5, E), torch.randn(9, E), torch.tensor([0, 8, 3, -100, 1])],
    ),
    "KeyValueMemory": lambda kernel: (Call(_memory(kernel)), [torch.randn(2, 2, 3, E)]),
    "KernelAttention": lambda kernel: (
        KernelAttention(E, 2, kernel=kernel, causal=True, bandwidth="learned", positions="alibi"),
        [torch.randn(2, T, E)],
    ),
    "Mosaic": lambda kernel: (_mosaic(kernel), [torch.randint(11, (2, T))]),
}  # fmt: skip


# ---- the tools -----------------------------------------------------------------------------------


def _compiled(module: nn.Module, inputs: list[Tensor], backend: str = "aot_eager") -> Tensor:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)(*inputs)


def _exported(module: nn.Module, inputs: list[Tensor], strict: bool = False) -> Tensor:
    program = torch.export.export(module, tuple(inputs), strict=strict)
    assert "parzen" not in str(program.graph)
    return program.module()(*inputs)


def _onnx(module: nn.Module, inputs: list[Tensor]) -> Tensor:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
        torch.onnx.export(module, tuple(inputs), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def _mapped(module: nn.Module, inputs: list[Tensor]) -> Tensor:
    twice = [torch.stack([x, x.flip(0) if x.is_floating_point() else x]) for x in inputs]
    first, second = torch.func.vmap(module)(*twice)
    assert_close(second, module(*(x[1] for x in twice)), rtol=0, atol=2e-6)
    return first


def _inferred(module: nn.Module, inputs: list[Tensor]) -> Tensor:
    with torch.inference_mode():
        return module(*inputs).clone()


WAYS: dict[str, Callable[[nn.Module, list[Tensor]], Tensor]] = {
    "compile": _compiled,
    "inductor": lambda module, inputs: _compiled(module, inputs, "inductor"),
    "export": _exported,
    "export, strict": lambda module, inputs: _exported(module, inputs, strict=True),
    "onnx": _onnx,
    "vmap": _mapped,
    "pickle": lambda module, inputs: pickle.loads(pickle.dumps(module))(*inputs),
    "deepcopy": lambda module, inputs: copy.deepcopy(module)(*inputs),
    "inference mode": _inferred,
}

STORE, PACKED = "it is neither exported nor vmapped", "attention_varlen is not exported"
# (case, way) → what the error says.
REFUSED = {
    **{("attention_varlen", way): PACKED for way in ("export", "export, strict", "onnx")},
    **{("KeyValueMemory", way): STORE for way in ("export", "export, strict", "onnx", "vmap")},
    # torch.compile breaks its graph there, which fullgraph forbids in torch's words.
    **{("KeyValueMemory", way): None for way in ("compile", "inductor")},
    ("KeyValueMemory", "pickle"): "use save and KeyValueMemory.load",
    ("attention_varlen", "vmap"): "packed sequences have no vmap rule",
}
# What make test runs; the rest is slow.
QUICK = {("biweight", way) for way in WAYS if way not in ("inductor", "onnx", "export", "export, strict")}


def _has_loss(kernel: str) -> bool:
    try:
        losses.excess(parzen.kernel(kernel))
    except ValueError:
        return False
    return True


def _rows() -> list[Any]:
    rows = []
    for kernel in NAMES:
        for way in WAYS:
            marks = () if (kernel, way) in QUICK else pytest.mark.slow
            for case in CASES:
                if "fenchel_young" not in case or _has_loss(kernel):
                    rows.append(pytest.param(case, way, kernel, marks=marks))
    return rows


@pytest.mark.parametrize(("case", "way", "kernel"), _rows())
def test_everywhere(case: str, way: str, kernel: str):
    module, inputs = CASES[case](kernel)
    module.eval()
    expected = module(*inputs)
    if (case, way) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[case, way]):
            WAYS[way](module, inputs)
        return
    got = WAYS[way](module, inputs)
    assert_close(got, expected, rtol=0, atol=2e-6)

"""torch.compile, export, ONNX, checkpointing and autocast."""

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import parzen

NAMES = ["gaussian", "biweight", "entmax?alpha=1.3", "relumax", "knn_gaussian?k=3", "normrelu"]


def qkv(t, dtype=torch.float32):
    return [torch.randn(2, 2, t, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_compiles_in_one_graph_for_all_lengths(name):
    torch._dynamo.reset()
    counters.clear()

    def f(q, k, v):
        return parzen.attention(q, k, v, kernel=name, is_causal=True)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for t in (5, 9, 17, 33, 40):
        q, k, v = qkv(t)
        out, expected = compiled(q, k, v), f(q, k, v)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out.sin().sum(), (q, k, v))
        torch.testing.assert_close(got, torch.autograd.grad(expected.sin().sum(), (q, k, v)))
    # One static graph, one with a dynamic length.
    assert counters["stats"]["unique_graphs"] <= 2


def test_compiles_with_a_learnt_alpha():
    torch._dynamo.reset()
    alpha = torch.tensor([1.2, 1.7], requires_grad=True)

    def f(q, k, v, alpha):
        return parzen.attention(q, k, v, kernel=parzen.kernel("entmax", alpha=alpha), is_causal=True)

    inputs = (*qkv(9), alpha)
    out, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs), f(*inputs)
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out.sin().sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(expected.sin().sum(), inputs))


class Attend(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, q, k, v):
        return parzen.attention(q, k, v, kernel=self.kernel, is_causal=True)


@pytest.mark.parametrize("name", NAMES)
def test_exports_in_plain_operators(name):
    inputs = tuple(x.detach() for x in qkv(33))
    program = torch.export.export(Attend(name), inputs)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [t for t in targets if "parzen" in t]
    torch.testing.assert_close(program.module()(*inputs), Attend(name)(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_exports_to_onnx(name, tmp_path):
    inputs = tuple(x.detach() for x in qkv(33))
    with warnings.catch_warnings():
        # The exporter warns about its own internals.
        warnings.simplefilter("ignore")
        torch.onnx.export(Attend(name).eval(), inputs, tmp_path / "a.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    (got,) = session.run(None, feed)
    np.testing.assert_allclose(got, Attend(name)(*inputs).numpy(), rtol=0, atol=2e-6)


class Masked(Attend):
    def forward(self, q, k, v, mask):
        return parzen.attention(q, k, v, mask, kernel=self.kernel)


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", ["gaussian", "knn_gaussian?k=3"])
def test_a_row_with_nothing_allowed_is_0_in_onnx(name, dynamo, floating, tmp_path):
    mask = torch.rand(9, 9) > 0.3
    mask[4] = False
    inputs = (*(x.detach() for x in qkv(9)), torch.where(mask, 0.3, -torch.inf) if floating else mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Masked(name).eval(), inputs, tmp_path / "a.onnx", dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    (got,) = session.run(None, feed)
    assert (got[:, :, 4] == 0).all()
    np.testing.assert_allclose(got, Masked(name)(*inputs).numpy(), rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_the_old_exporter_lacks_is_said(tmp_path):
    inputs = tuple(x.detach() for x in qkv(9))
    with pytest.raises(NotImplementedError, match="leave dynamo=True"):
        torch.onnx.export(Attend("biweight").eval(), inputs, tmp_path / "a.onnx", dynamo=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_serves_all_lengths(name):
    traced = torch.jit.trace(Attend(name), tuple(x.detach() for x in qkv(20)))
    assert "parzen::" not in str(traced.inlined_graph)
    for t in (2, 20, 33):
        inputs = [x.detach() for x in qkv(t)]
        torch.testing.assert_close(traced(*inputs), Attend(name)(*inputs))


@pytest.mark.parametrize("name", ["knn_gaussian?k=16", "knn_uniform?k=16", "biweight"])
def test_exports_with_a_dynamic_length(name, tmp_path):
    """On both sides of k: one graph for all lengths."""
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"q": {2: length}, "k": {2: length}, "v": {2: length}}
    inputs = tuple(x.detach() for x in qkv(40))
    programs = [
        torch.export.export(Attend(name), inputs, dynamic_shapes=shapes, strict=strict).module()
        for strict in (False, True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Attend(name).eval(),
            inputs,
            tmp_path / "a.onnx",
            dynamo=True,
            verbose=False,
            dynamic_shapes=shapes,
        )
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    for t in (2, 15, 16, 17, 64):
        x = [x.detach() for x in qkv(t)]
        expected = Attend(name)(*x)
        for program in programs:
            torch.testing.assert_close(program(*x), expected)
        (got,) = session.run(None, {i.name: y.numpy() for i, y in zip(session.get_inputs(), x, strict=True)})
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=2e-6)


def test_compiles_with_tensors_that_are_checked():
    """Tensor values are looked at where that is free: not in a graph."""
    torch._dynamo.reset()

    def f(q, k, v, scale, slopes):
        options = {"scale": scale, "alibi_slopes": slopes, "window": (2**70, 3)}
        return parzen.attention(q, k, v, kernel="biweight", **options)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    slopes = torch.tensor([0.5, 0.1])
    for t in (5, 9):
        inputs = (*qkv(t), torch.tensor([[0.3], [2.0]]), slopes)
        torch.testing.assert_close(compiled(*inputs), f(*inputs))
    compiled(*qkv(5), torch.zeros(2, 1), slopes)
    with pytest.raises(ValueError, match="> 0"):
        f(*qkv(5), torch.zeros(2, 1), slopes)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_nothing(name):
    q, k, v = qkv(9)

    def f(q, k, v):
        return parzen.attention(q, k, v, kernel=name, is_causal=True, dropout_p=0.3)

    torch.manual_seed(3)
    expected = torch.autograd.grad(f(q, k, v).sin().sum(), (q, k, v))
    torch.manual_seed(3)
    got = torch.autograd.grad(checkpoint(f, q, k, v, use_reentrant=False).sin().sum(), (q, k, v))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_accepts_mixed_dtypes(name):
    q, k, v = qkv(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = parzen.attention(q, k.bfloat16(), v, kernel=name, is_causal=True)
        assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    expected = parzen.attention(q, k, v, kernel=name, is_causal=True)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=5e-2)
    # Without autocast the wider dtype wins, as in arithmetic.
    assert parzen.attention(q, k.double(), v, kernel=name).dtype == torch.float64


def test_dropout_drops_whole_weights_and_keeps_the_mean():
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8)
    v = torch.eye(6)[None, None]
    for name in NAMES:
        exact = parzen.attention(q, k, v, kernel=name)
        drawn = torch.stack([parzen.attention(q, k, v, kernel=name, dropout_p=0.25) for _ in range(800)])
        kept = torch.isclose(drawn, exact / 0.75, atol=1e-6) | (drawn == 0)
        assert kept.all(), name
        torch.testing.assert_close(drawn.mean(0), exact, rtol=0, atol=0.08)
    assert (parzen.attention(q, k, v, kernel="biweight", dropout_p=1.0) == 0).all()

"""The loss of an output layer without its matrix, against the loss of that matrix."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import parzen
from parzen.backends import cpu, output
from parzen.kernels import kernel
from parzen.losses import REDUCTIONS, fenchel_young, linear_fenchel_young

NAMES = ["gaussian", "epanechnikov", "biweight", "triweight", "entmax?alpha=1.2"]


def plain(hidden, weight, target, bias=None, kernel="biweight", class_weight=None, **options):
    """The same with the matrix."""
    scores = F.linear(hidden, weight, bias).flatten(0, -2)
    loss = fenchel_young(scores, target.flatten(), kernel, weight=class_weight, **options)
    return loss.view(target.shape) if loss.ndim else loss


def layer(rows=200, width=24, classes=1500, dtype=torch.float64, scale=3.0):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, dtype=dtype) * (scale / width**0.5)
    weight, bias = torch.randn(classes, width, dtype=dtype), torch.randn(classes, dtype=dtype)
    target = torch.randint(classes, (rows,))
    target[::9] = -100
    # Some rows for which the target is the best class.
    target[1::7] = F.linear(hidden, weight, bias).argmax(-1)[1::7]
    return hidden.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


def check(options, inputs, target, rtol=1e-11, atol=1e-12):
    hidden, weight, bias = inputs
    wanted = [x for x in inputs if x is not None]
    results = [f(hidden, weight, target, bias, **options) for f in (linear_fenchel_young, plain)]
    assert_close(*results, rtol=rtol, atol=atol)
    torch.manual_seed(1)
    g = torch.randn_like(results[0])
    for got, expected in zip(*(torch.autograd.grad(x, wanted, g) for x in results), strict=True):
        assert_close(got, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_loss_of_the_matrix(name, biased, monkeypatch):
    hidden, weight, target, bias = layer()
    # Several products of matrices, and several calls of the engine.
    monkeypatch.setattr(output, "AT_ONCE", 40_000)
    monkeypatch.setattr(output, "ENGINE_ROWS", 130)
    inputs = (hidden, weight, bias if biased else None)
    for reduction in REDUCTIONS:
        check({"kernel": name, "reduction": reduction}, inputs, target)
    factors = torch.rand(len(weight), dtype=torch.float64)
    check(
        {"kernel": name, "label_smoothing": 0.1, "class_weight": factors, "ignore_index": 3},
        inputs,
        target.abs(),
    )


def test_lists_and_matrices_in_one_call(monkeypatch):
    """Tiles of flat rows have no list of the engine; a row that comes first decides on the rest."""
    calls = []
    real = output._by_lists
    monkeypatch.setattr(output, "_by_lists", lambda *args: calls.append(1) or real(*args))
    hidden, weight, target, _ = layer(rows=700)
    for flat in (slice(300, 330), slice(0, 300), slice(650, 700), slice(0, 0)):
        factor = torch.ones(700, 1, dtype=torch.float64)
        factor[flat] = 1e-3
        check({"kernel": "biweight", "reduction": "none"}, (hidden * factor, weight, None), target)
    assert len(calls) == 3
    sizes = torch.ops.parzen.output(hidden.detach() * factor, weight.detach(), None, 1, 1, 2.0)[3]
    assert bool((sizes > 0).all())
    assert not cpu._built() or bool((sizes < 512).all())


def test_no_value_is_negative_and_certain_rows_are_zero():
    hidden, weight, target, _ = layer(dtype=torch.float32, scale=12.0)
    for name in NAMES[1:4]:
        loss = linear_fenchel_young(hidden, weight, target, kernel=name, reduction="none")
        assert bool((loss >= 0).all())
        p = parzen.weights(F.linear(hidden, weight), name)
        chance = p.gather(1, target.clamp_min(0)[:, None])[:, 0]
        certain = (chance == 1) & ((p > 0).sum(1) == 1)
        assert bool(certain.any())
        assert bool((loss[certain] == 0).all())
        close = fenchel_young(F.linear(hidden.double(), weight.double()), target, name, reduction="none")
        assert_close(loss, close.float(), rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("name", ["gaussian", "epanechnikov", "biweight"])
def test_derivatives(name):
    hidden, weight, target, bias = layer(rows=5, width=3, classes=6, scale=1.0)

    def loss(*inputs):
        return linear_fenchel_young(*inputs[:2], target, inputs[2], name, label_smoothing=0.05)

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    assert torch.autograd.gradgradcheck(loss, (hidden, weight, bias))
    each = torch.stack(
        [linear_fenchel_young(h[None], weight, y[None]) for h, y in zip(hidden, target, strict=True)]
    )
    mapped = torch.vmap(lambda h, y: linear_fenchel_young(h[None], weight, y[None]))(hidden, target)
    assert_close(mapped, each, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_and_autocast(dtype):
    hidden, weight, target, bias = (x.detach() for x in layer(dtype=torch.float32))
    narrow = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    got = linear_fenchel_young(*narrow[:2], target, narrow[2])
    expected = plain(*wide[:2], target, wide[2])
    assert got.dtype == dtype
    assert_close(got.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    pairs = zip(torch.autograd.grad(got, narrow), torch.autograd.grad(expected, wide), strict=True)
    for a, b in pairs:
        assert a.dtype == dtype
        assert_close(a.float(), b, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    full = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype):
        inside = linear_fenchel_young(*full[:2], target, full[2])
    assert inside.dtype == torch.float32
    assert_close(inside, expected, rtol=1e-6, atol=0)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(inside, full))


# Of torch itself, on inductor's first import.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled():
    hidden, weight, target, bias = layer()
    compiled = torch.compile(linear_fenchel_young, fullgraph=True)
    results = [f(hidden, weight, target, bias) for f in (compiled, linear_fenchel_young)]
    assert_close(*results)
    grads = [torch.autograd.grad(x, (hidden, weight, bias)) for x in results]
    for a, b in zip(*grads, strict=True):
        assert_close(a, b)


def test_shapes_and_what_is_refused():
    hidden, weight, target, bias = layer(rows=6, classes=9)
    blocks = linear_fenchel_young(hidden.view(2, 3, -1), weight, target.view(2, 3), reduction="none")
    assert_close(blocks.flatten(), linear_fenchel_young(hidden, weight, target, reduction="none"))
    alpha = torch.tensor(1.5)
    for error, message, call in [
        (ValueError, "no such loss", lambda: linear_fenchel_young(hidden, weight, target, kernel="relumax")),
        (ValueError, "must be a number here", lambda: linear_fenchel_young(
            hidden, weight, target, kernel=kernel("entmax", alpha=alpha))),
        (ValueError, "weight", lambda: linear_fenchel_young(hidden, weight.T, target)),
        (ValueError, "target must have shape", lambda: linear_fenchel_young(hidden, weight, target[:5])),
        (ValueError, "bias must have shape", lambda: linear_fenchel_young(hidden, weight, target, bias[:5])),
        (ValueError, "classes 0 … 8", lambda: linear_fenchel_young(hidden, weight, target.abs() + 9)),
        (TypeError, "class numbers", lambda: linear_fenchel_young(hidden, weight, hidden)),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()


_MEMORY = """
import resource, torch
from parzen.losses import linear_fenchel_young
torch.set_num_threads(2)
hidden, weight = torch.randn(4096, 32), torch.randn(24000, 32)
hidden, weight = (hidden / 2).requires_grad_(), weight.requires_grad_()
target = torch.randint(24000, (4096,))
def peak(rows):
    linear_fenchel_young(hidden[:rows], weight, target[:rows]).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(-peak(100) + peak(4096))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts in other units here")
def test_memory_follows_the_support():
    """The matrix would be 393 MB."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MEMORY],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert int(done.stdout) < 100 * 1024

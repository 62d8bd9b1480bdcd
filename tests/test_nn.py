"""The layer against its formulas, written out by hand in float64."""

import copy
import inspect
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.testing import assert_close

import parzen
from parzen.nn import (
    BANDWIDTHS,
    POSITIONS,
    ASEntmax,
    KernelAttention,
    LearnedKernel,
    PowerLaw,
    SSMax,
    alibi_slopes,
    nape_slopes,
    rotate,
)
from parzen.testing import witness_weights

B, T, D, H, E = 2, 7, 12, 4, 3


def layer(**options) -> KernelAttention:
    """A float64 layer whose every parameter has been moved off its start."""
    torch.manual_seed(0)
    made = KernelAttention(D, H, **({"kernel": "biweight", "dtype": torch.float64} | options))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made


def inputs(rows: int = T, seed: int = 1) -> Tensor:
    return torch.randn(B, rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scale_by_hand(made: KernelAttention, x: Tensor, n: Tensor) -> Tensor:
    """(B, H, T), from the formulas; n is (T,)."""
    b = made.bandwidth
    plain = torch.full((H, 1), b.start, dtype=x.dtype)
    constant = b.log_scale.exp()[:, None] if hasattr(b, "log_scale") else plain
    if isinstance(b, SSMax):
        # softmax(s_h · log n · z), z the scores at the initial scale.
        grown = (b.log_scale.exp() / b.start)[:, None] * n.clamp_min(2).log() * b.start
    elif isinstance(b, ASEntmax):
        beta = F.softplus(torch.einsum("btd,hd->bht", x, b.beta))
        gamma = 2 * torch.tanh(torch.einsum("btd,hd->bht", x, b.gamma))
        grown = (1 + beta * (n + 1).log() ** gamma) * b.start
    elif isinstance(b, PowerLaw):
        beta_1 = torch.sigmoid(b.share) * b.log_scale.exp().sqrt()
        beta_0 = b.log_scale.exp().sqrt() - beta_1
        grown = (beta_1[:, None] * n ** torch.sigmoid(b.power)[:, None] + beta_0[:, None]) ** 2
    else:
        grown = constant
    still = made.positions == "nape" and torch.tensor([[True], [True], [False], [False]])
    scale = torch.where(still, constant, grown) if made.positions == "nape" else grown
    return scale.expand(B, H, x.shape[1])


def by_hand(made: KernelAttention, x: Tensor) -> Tensor:
    """Causal self-attention, step by step."""
    t = x.shape[1]
    q, k, v = (
        torch.einsum("btd,hed->bhte", x, m.weight.view(-1, made.head_size, D))
        for m in (made.query, made.key, made.value)
    )
    k, v = (z.repeat_interleave(H // made.key_heads, 1) for z in (k, v))
    if made.unit_keys:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    if made.positions == "rotary":
        q, k = (torch.stack([_turned(z[:, :, i], i) for i in range(t)], 2) for z in (q, k))
    scale = scale_by_hand(made, x, torch.arange(1, t + 1, dtype=x.dtype))
    s = torch.einsum("bhte,bhse->bhts", q, k) * scale[..., None]
    slopes = {"alibi": [1 / 4, 1 / 16, 1 / 64, 1 / 256], "nape": [1, 1 / 2, 0, 0]}.get(made.positions)
    if slopes:
        distance = (torch.arange(t)[:, None] - torch.arange(t)).abs()
        s = s - torch.tensor(slopes, dtype=x.dtype)[:, None, None] * distance
    s = s.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
    w = witness_weights(s, made.kernel, scale[..., None])
    return torch.einsum("bhts,bhse->bthe", w, v).flatten(2) @ made.output.weight.T


def _turned(x: Tensor, position: int) -> Tensor:
    """(…, E) as complex numbers e^{iθ}, one for each pair."""
    even = x.shape[-1] // 2 * 2
    z = torch.view_as_complex(x[..., :even].unflatten(-1, (even // 2, 2)).clone())
    angle = torch.tensor([position * 10_000 ** (-2 * i / even) for i in range(even // 2)], dtype=x.dtype)
    z = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat([z, x[..., even:]], -1)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_layer_is_the_composition_of_its_formulas(bandwidth, positions):
    made = layer(bandwidth=bandwidth, positions=positions, causal=True)
    assert_close(made(inputs()), by_hand(made, inputs()), atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"unit_keys": True},
        {"key_heads": 2, "head_size": 5, "positions": "rotary"},
        {"kernel": "relumax?margin=2", "unit_keys": True, "bandwidth": "power_law"},
        {"kernel": "gaussian", "head_size": 1, "positions": "rotary"},
        {"kernel": "normrelu", "unit_keys": True, "bandwidth": "ssmax"},
    ],
    ids=str,
)
def test_options_are_the_composition_of_their_formulas(options):
    made = layer(causal=True, **options)
    assert_close(made(inputs()), by_hand(made, inputs()), atol=1e-11, rtol=0)


def test_weights_are_those_of_the_output():
    made, x = layer(causal=True, bandwidth="asentmax", positions="alibi"), inputs()
    seen = made.weights(x)
    v = made.value(x).unflatten(-1, (H, E)).transpose(1, 2)
    assert_close(made(x), made.output((seen.weights @ v).transpose(1, 2).flatten(2)))
    assert_close(seen.support, (seen.weights > 0).sum(-1))
    assert_close(made.weights(x, sparse=True).weights.to_dense(), seen.weights)


# ---- schedules -----------------------------------------------------------------------------------


def _scale(name: str, n: list[float], **moved: float) -> Tensor:
    """scale of one head at the given numbers of keys, with some raw parameters set."""
    made = BANDWIDTHS[name](D, [True], E, 0.5, dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in moved.items():
            getattr(made, parameter).fill_(value)
    x = torch.ones(1, len(n), D, dtype=torch.float64)
    return torch.as_tensor(made(x, torch.tensor(n)), dtype=torch.float64).expand(1, 1, len(n))[0, 0].detach()


def test_schedules_start_where_they_say():
    n = [1, 2, 10, 1000]
    logs = torch.tensor(n, dtype=torch.float64).log()
    assert _scale("fixed", n).tolist() == [0.5] * 4
    assert_close(_scale("learned", n), torch.full((4,), 0.5, dtype=torch.float64))
    assert_close(_scale("ssmax", n), 0.5 * logs.clamp_min(math.log(2)))
    assert_close(_scale("asentmax", n), torch.full((4,), 0.5 * (1 + math.log(2)), dtype=torch.float64))
    assert_close(_scale("power_law", n), 0.5 * (0.5 * torch.exp(logs / (E + 4)) + 0.5) ** 2)


def test_schedules_with_their_parameters_moved():
    n = torch.tensor([1.0, 2, 10, 1000], dtype=torch.float64)
    assert_close(_scale("ssmax", n.tolist(), log_scale=math.log(3)), 3 * n.clamp_min(2).log())
    beta, gamma = math.log1p(math.exp(D * 0.1)), 2 * math.tanh(D * 0.05)
    expected = 0.5 * (1 + beta * (n + 1).log() ** gamma)
    made = ASEntmax(D, [True], E, 0.5, dtype=torch.float64)
    with torch.no_grad():
        made.beta.fill_(0.1)
        made.gamma.fill_(0.05)
    assert_close(made(torch.ones(1, 4, D, dtype=torch.float64), n)[0, 0], expected)
    # β₁ = 3, β₀ = 1, a = 1/4.
    moved = {"log_scale": math.log(16), "share": math.log(3), "power": -math.log(3)}
    assert_close(_scale("power_law", n.tolist(), **moved), (3 * n**0.25 + 1) ** 2)


@pytest.mark.parametrize("name", BANDWIDTHS)
def test_scale_is_positive_even_where_no_key_is_in_sight(name):
    made = BANDWIDTHS[name](D, [True] * H, E, 0.5)
    scale = torch.as_tensor(made(torch.randn(B, 3, D), torch.tensor([0, 1, 5])))
    assert bool((scale > 0).all())
    assert bool(scale.isfinite().all())


@pytest.mark.parametrize("name", ["ssmax", "asentmax", "power_law"])
def test_half_precision_tells_lengths_apart(name):
    made = BANDWIDTHS[name](D, [True], E, 0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        # γ starts at 0, where no length counts.
        getattr(made, "gamma", torch.empty(0)).fill_(0.1)
    scale = made(torch.ones(1, 2, D, dtype=torch.bfloat16), torch.tensor([1000, 1001])).flatten()
    assert scale[1] > scale[0]


def _counted(made: KernelAttention, x: Tensor, *context: Tensor, **masks: Tensor) -> Tensor:
    """The n that the schedule was given."""
    counts = []
    handle = made.bandwidth.register_forward_pre_hook(lambda _, arguments: counts.append(arguments[1]))
    made(x, *context, **masks)
    handle.remove()
    return counts[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [6] * 6),
        ({"causal": True}, [1, 2, 3, 4, 5, 6]),
        ({"window": (2, 1)}, [2, 3, 4, 4, 4, 3]),
        ({"window": (2, 1), "causal": True}, [1, 2, 3, 3, 3, 3]),
    ],
    ids=str,
)
def test_keys_in_sight(options, expected):
    made, x = layer(bandwidth="ssmax", **options), inputs(6)
    assert _counted(made, x).tolist() == expected
    # The dense count and the running totals say the same.
    everything = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    assert _counted(made, x, attn_mask=everything)[0, 0].tolist() == expected
    assert _counted(made, x, key_padding_mask=torch.ones(B, 6).bool())[1, 0].tolist() == expected


def test_keys_in_sight_through_masks():
    made, x = layer(bandwidth="ssmax", causal=True), inputs(4)
    padding = torch.tensor([[False, True, True, True], [True, True, False, True]])
    assert _counted(made, x, key_padding_mask=padding)[:, 0].tolist() == [[0, 1, 2, 3], [1, 2, 2, 3]]
    bias = torch.zeros(4, 4).masked_fill(torch.eye(4).bool(), -torch.inf)
    both = _counted(made, x, key_padding_mask=padding, attn_mask=bias.double())
    assert both[:, 0].tolist() == [[0, 0, 1, 2], [0, 1, 2, 2]]
    # The last two of six.
    assert _counted(made, inputs(2), inputs(6)).tolist() == [5, 6]


# ---- positions -----------------------------------------------------------------------------------


def test_alibi_slopes():
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(8) == [2**-i for i in range(1, 9)]
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8)
    assert_close(torch.tensor(twelve[8:]), torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]))
    assert [len(alibi_slopes(h)) for h in range(1, 20)] == list(range(1, 20))


def test_nape_slopes():
    assert nape_slopes(6) == [1, 1 / 2, 1 / 3, 0, 0, 0]
    assert nape_slopes(5) == [1, 1 / 2, 0, 0, 0]
    assert nape_slopes(1) == [0]


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_rotary_products_depend_on_the_difference_of_positions(size):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, size, generator=g, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        return float((rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([j]))).sum())

    for i, j, shift in itertools.product([0, 3], [0, 5], [1, 1000]):
        assert_close(product(i + shift, j + shift), product(i, j), atol=1e-11, rtol=0)
    assert_close(rotate(q, torch.tensor([7])).norm(), q.norm())
    assert_close(rotate(q, torch.tensor([0])), q, atol=0, rtol=0)
    # Not a law of constants: another difference is another product.
    assert size == 1 or abs(product(3, 0) - product(0, 0)) > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_last_queries_over_the_whole_context(bandwidth, positions):
    made, x = layer(bandwidth=bandwidth, positions=positions, causal=True, window=(4, 0)), inputs()
    assert_close(made(x[:, -3:], x), made(x)[:, -3:], atol=1e-12, rtol=0)


def test_causal_means_causal():
    made, x = layer(causal=True, bandwidth="ssmax", positions="rotary"), inputs()
    changed = x.clone()
    changed[:, 4:] += 1
    assert_close(made(changed)[:, :4], made(x)[:, :4], atol=0, rtol=0)
    assert not torch.equal(made(changed)[:, 4:], made(x)[:, 4:])


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("kernel", ["biweight", "gaussian", "normrelu"])
def test_a_padded_batch_equals_the_unpadded_one(kernel, bandwidth):
    made = layer(causal=True, kernel=kernel, bandwidth=bandwidth, positions="rotary", unit_keys=True)
    x = inputs(5)
    noise = 100 * inputs(2, seed=3)
    there = torch.tensor([True] * 5 + [False] * 2).expand(B, 7)
    right = made(torch.cat([x, noise], 1), key_padding_mask=there)
    left = made(torch.cat([noise, x], 1), key_padding_mask=there.flip(1))
    assert_close(right[:, :5], made(x), atol=1e-11, rtol=0)
    assert_close(left[:, 2:], made(x), atol=1e-11, rtol=0)
    assert left[:, :2].abs().max() == 0


def test_padding_and_mask_together():
    made, x = layer(), inputs()
    padding = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.6
    mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(3)) < 0.6
    both = made(x, attn_mask=mask & padding[:, None, None])
    assert_close(made(x, attn_mask=mask, key_padding_mask=padding), both, atol=0, rtol=0)
    bias = torch.zeros(B, 1, T, T).double().masked_fill(~mask, -torch.inf)
    assert_close(made(x, attn_mask=bias, key_padding_mask=padding), both)
    assert not torch.allclose(made(x, attn_mask=mask), both)


def test_cross_attention():
    made, x, context = layer(), inputs(3), inputs(5, seed=2)
    w = made.weights(x, context).weights
    assert w.shape == (B, H, 3, 5)
    assert_close(w.sum(-1), torch.ones(B, H, 3).double())
    assert_close(
        made(x, context), made.output((w @ made._split(made.value(context), H)).transpose(1, 2).flatten(2))
    )


def test_dropout_acts_in_training_only():
    made, x = layer(dropout=0.5), inputs()
    plain = layer()(x)
    assert not torch.allclose(made(x), plain)
    assert_close(made.eval()(x), plain, atol=0, rtol=0)


# ---- learning ------------------------------------------------------------------------------------

LEARNED = ["entmax?alpha=1.3", "biweight", "relumax?margin=0.7", "power?r=2&margin=1.5", "exp?margin=2"]


@pytest.mark.parametrize("kernel", LEARNED)
def test_a_learned_kernel_starts_as_itself(kernel):
    made = layer(kernel=kernel, learn_kernel=True)
    made.learned_kernel.reset_parameters()
    fixed = layer(kernel=kernel)
    fixed.load_state_dict({n: p for n, p in made.state_dict().items() if "raw" not in n})
    assert_close(made(inputs()), fixed(inputs()), atol=1e-10, rtol=0)


@pytest.mark.parametrize("kernel", ["biweight", "relumax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_learned_parameter_stays_in_its_domain(kernel, dtype):
    made = LearnedKernel(kernel, 5, dtype=dtype)
    with torch.no_grad():
        made.raw.copy_(torch.tensor([-1e4, -40, 0, 40, 1e4]))
    value = made.value()
    assert (
        bool((value >= 1).all() and (value <= 2).all()) if kernel == "biweight" else bool((value > 0).all())
    )
    assert bool(value.isfinite().all())
    s = torch.randn(5, 3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = parzen.attention_weights(s, torch.eye(9).expand(5, 9, 9).double(), scale=1.0, kernel=made()).weights
    assert_close(w.sum(-1), torch.ones(5, 3).double())
    (gradient,) = torch.autograd.grad((w**2).sum(), made.raw)
    assert bool(gradient.isfinite().all())


def test_alpha_goes_from_softmax_to_sparsemax():
    made = LearnedKernel("biweight", 2, dtype=torch.float64)
    with torch.no_grad():
        made.raw.copy_(torch.tensor([-40.0, 40.0]))
    q = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = parzen.attention_weights(q, q, kernel=made()).weights
    assert_close(w[0], torch.softmax(q[0] @ q[0].T / 2, -1), atol=1e-9, rtol=0)
    assert_close(w[1], parzen.weights(q[1] @ q[1].T / 2, "sparsemax"), atol=1e-9, rtol=0)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("kernel", ["entmax?alpha=1.4", "relumax"])
def test_gradients_of_every_parameter(kernel, bandwidth):
    made = layer(kernel=kernel, learn_kernel=True, bandwidth=bandwidth, causal=True, positions="nape")
    x = inputs(5)
    names, values = zip(*made.named_parameters(), strict=True)

    def run(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(made, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, values, fast_mode=True)
    gradients = torch.autograd.grad((run(*values) ** 2).sum(), values)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.abs().max() > 0, name


# ---- the layer as a module -----------------------------------------------------------------------


# Dynamo itself instantiates the Function that it traces.
tracing = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@tracing
@pytest.mark.parametrize(("bandwidth", "learn_kernel"), [("asentmax", True), ("power_law", False)])
def test_compiles_whole(bandwidth, learn_kernel):
    torch._dynamo.reset()
    made = layer(bandwidth=bandwidth, learn_kernel=learn_kernel, causal=True, positions="rotary")
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    x, there = inputs(), torch.tensor([[True] * T, [True] * (T - 2) + [False] * 2])
    assert_close(compiled(x, key_padding_mask=there), made(x, key_padding_mask=there))
    expected = torch.autograd.grad((made(x) ** 2).sum(), list(made.parameters()))
    got = torch.autograd.grad((compiled(x) ** 2).sum(), list(made.parameters()))
    assert_close(got, expected)


@tracing
def test_compiles_once_for_all_lengths():
    torch._dynamo.reset()
    made = layer(bandwidth="ssmax", causal=True, positions="rotary")
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(made, fullgraph=True, backend=counter, dynamic=True)
    compiled(inputs(5))
    first = counter.frame_count
    for rows in (8, 14):
        assert_close(compiled(inputs(rows)), made(inputs(rows)))
    assert counter.frame_count == first


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_state_dict_round_trip(bandwidth):
    options = {"bandwidth": bandwidth, "learn_kernel": True, "positions": "nape"}
    made = layer(**options)
    other = KernelAttention(D, H, kernel="biweight", dtype=torch.float64, **options)
    assert not torch.allclose(other(inputs()), made(inputs()))
    other.load_state_dict(made.state_dict())
    assert_close(other(inputs()), made(inputs()), atol=0, rtol=0)
    assert set(made.state_dict()) == {name for name, _ in made.named_parameters()}


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_dtype_device_and_a_late_start(bandwidth):
    options = {"bandwidth": bandwidth, "positions": "nape", "kernel": "biweight", "learn_kernel": True}
    made = KernelAttention(D, H, device="meta", dtype=torch.bfloat16, **options)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in made.parameters()} == {"meta"}
    late = made.to_empty(device="cpu")
    torch.manual_seed(0)
    late.reset_parameters()
    torch.manual_seed(0)
    here = KernelAttention(D, H, dtype=torch.bfloat16, **options)
    x = inputs().to(torch.bfloat16)
    assert late(x).dtype == torch.bfloat16
    assert_close(late(x), here(x), atol=0, rtol=0)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_autocast(bandwidth):
    made = layer(dtype=torch.float32, bandwidth=bandwidth, positions="rotary", kernel="gaussian")
    x = inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = made(x)
    assert got.dtype == torch.bfloat16
    assert (got - made(x)).norm() < 0.02 * made(x).norm()


def test_repr_tells_what_differs():
    text = str(KernelAttention(8, 2, kernel="relumax", learn_kernel=True, causal=True, bandwidth="ssmax"))
    assert "width=8, heads=2, kernel=relumax, causal" in text
    assert "margin of each head, from relumax" in text
    assert "SSMax(scale=0.5, growing heads=2/2)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads must divide width"),
        ({"heads": 0}, "heads must be an integer ≥ 1, got 0"),
        ({"key_heads": 3}, "key_heads must divide heads, got 3 for 4 heads"),
        ({"bandwidth": "wide"}, "known: fixed, learned, ssmax, asentmax, power_law"),
        ({"positions": "sine"}, "known: none, rotary, alibi, nape"),
        ({"backend": "fast"}, "unknown backend 'fast'; known: auto"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"scale": 0.0}, "scale = 1/h² must be finite and > 0"),
        ({"window": (1, -2)}, "integers ≥ −1"),
        ({"kernel": "knn_gaussian", "learn_kernel": True}, "nothing to learn"),
        ({"kernel": "sparsemax", "learn_kernel": True}, "must start below 2"),
        ({"kernel": "power?r=1e18", "learn_kernel": True}, "below 2 and above 1"),
        ({"window": 3}, r"window must be \(left, right\)"),
        ({"bandwidth": ["ssmax"]}, r"unknown bandwidth \['ssmax'\]"),
        ({"scale": "x"}, "scale = 1/h² must be a number, got str"),
        ({"dropout": "x"}, "dropout must be a number, got str"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"learn_kernel": 1}, "learn_kernel must be True or False"),
    ],
    ids=str,
)
def test_errors_at_the_door(options, message):
    arguments = {"width": 8, "heads": 4} | options
    with pytest.raises((ValueError, TypeError), match=message):
        KernelAttention(**arguments)


def test_errors_of_a_call():
    made, x = layer(), inputs()
    with pytest.raises(ValueError, match="x must be"):
        made(x[0])
    with pytest.raises(ValueError, match="context must be"):
        made(x, x[:1])
    with pytest.raises(ValueError, match="True = attend"):
        made(x, key_padding_mask=torch.zeros(B, T))
    with pytest.raises(TypeError, match="bool"):
        made(x, attn_mask=torch.ones(T, T, dtype=torch.int64))
    with pytest.raises(TypeError, match="got CausalBias; see causal, window"):
        made(x, attn_mask=causal_lower_right(T, T))
    with pytest.raises(ValueError, match="got list"):
        made(x, key_padding_mask=[True] * T)
    for wrong in (x.tolist(), x.long()):
        with pytest.raises(TypeError, match="x must be"):
            made(wrong)
        with pytest.raises(TypeError, match="context must be"):
            made(x, wrong)


@pytest.mark.parametrize("padding", [None, torch.ones(B, T, dtype=torch.bool)])
@pytest.mark.parametrize("bandwidth", ["fixed", "ssmax"])
@pytest.mark.parametrize("shape", [(T, T + 1), (1, 1, 1, T, T), (B + 1, 1, T, T)])
def test_a_mask_of_another_shape(shape, bandwidth, padding):
    made = layer(bandwidth=bandwidth)
    with pytest.raises(ValueError, match=r"attn_mask must broadcast to \(B, H, T, S\)"):
        made(inputs(), attn_mask=torch.ones(shape, dtype=torch.bool), key_padding_mask=padding)


def test_an_input_of_another_dtype_than_the_weights():
    layer, x = KernelAttention(16, 4), torch.randn(1, 3, 16)
    with pytest.raises(TypeError, match=r"x must be torch.float32 like the weights, got torch.float64"):
        layer(x.double())
    with pytest.raises(TypeError, match=r"context must be torch.float32 like the weights"):
        layer(x, x.half())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "parameter"), [("entmax", "alpha"), ("relumax", "margin")])
def test_the_parameter_of_a_kernel_belongs_to_the_layer(name, parameter):
    value = nn.Parameter(torch.tensor([1.3, 1.6]))
    layer = KernelAttention(8, 2, kernel=parzen.kernel(name, **{parameter: value}), causal=True)
    assert layer.kernel.learned[1] is value
    assert any(p is value for p in layer.parameters())
    assert "kernel_parameter" in layer.state_dict()
    x = torch.randn(1, 6, 8)
    old = layer(x).detach()
    step = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(2):
        step.zero_grad()
        layer(x).square().sum().backward()
        step.step()
    assert (value.detach() != torch.tensor([1.3, 1.6])).all()
    other = KernelAttention(8, 2, kernel=parzen.kernel(name, **{parameter: torch.ones(2)}), causal=True)
    assert (layer(x) - old).abs().max() > 0
    for assign in (False, True):
        other.load_state_dict(layer.state_dict(), assign=assign)
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.kernel_parameter.fill_(1.9)
    assert (twin(x) - layer(x)).abs().max() > 1e-4
    twin.double()
    torch.testing.assert_close(twin.kernel.learned[1], torch.full((2,), 1.9, dtype=torch.float64))


@pytest.mark.parametrize("bandwidth", ["fixed", "learned", "ssmax"])
def test_layers_whose_linear_maps_are_replaced(bandwidth):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x)

    layer = KernelAttention(8, 2, kernel="biweight", causal=True, bandwidth=bandwidth)
    x = torch.randn(2, 5, 8)
    expected = layer(x)
    for name in ("query", "key", "value", "output"):
        setattr(layer, name, Adapter(getattr(layer, name)))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_dynamic_quantisation():
    layer = KernelAttention(16, 2, kernel="biweight", causal=True).eval()
    x = torch.randn(2, 5, 16)
    with warnings.catch_warnings():
        # torch says that it will move to another package.
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.query) is not nn.Linear
    torch.testing.assert_close(quantized(x), layer(x), rtol=0, atol=0.02)


@pytest.mark.parametrize("bandwidth", list(BANDWIDTHS))
def test_a_trainable_module_has_no_buffers(bandwidth):
    """The rule of Opacus."""
    layer = KernelAttention(8, 2, bandwidth=bandwidth, positions="nape", learn_kernel=True, kernel="biweight")
    for module in layer.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            assert not list(module.buffers())


@pytest.mark.parametrize("bandwidth", ["fixed", "learned", "ssmax"])
def test_gradients_of_each_sample_by_hooks(bandwidth):
    """As Opacus takes them: each module by itself, from its first input and the gradient of its output."""
    layer = KernelAttention(8, 2, kernel="biweight", bandwidth=bandwidth, causal=True)
    x = torch.randn(3, 5, 8)
    expected = []
    for sample in x:
        expected.append(torch.autograd.grad(layer(sample[None]).square().sum(), tuple(layer.parameters())))
    found, seen = {}, []

    def keep(module, inputs, output):
        seen.append((module, inputs[0].detach(), output))

    handles = [m.register_forward_hook(keep) for m in layer.modules() if len(m._parameters.keys() - {"bias"})]
    loss = layer(x).square().sum()
    for handle in handles:
        handle.remove()
    grads = torch.autograd.grad(loss, [output for *_, output in seen])
    names = {p: name for name, p in layer.named_parameters()}
    for (module, inputs, _), grad in zip(seen, grads, strict=True):
        own = dict(module.named_parameters())

        def one(values, inputs, grad, module=module):
            return (torch.func.functional_call(module, values, inputs[None]) * grad[None]).sum()

        if bandwidth == "ssmax" and module is layer.bandwidth:
            with pytest.raises(ValueError, match="SSMax grows with n"):
                torch.func.vmap(torch.func.grad(one), (None, 0, 0))(own, inputs, grad)
            continue
        each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(own, inputs, grad)
        found |= {names[p]: each[name] for name, p in own.items()}
    for name, wanted in zip(names.values(), zip(*expected, strict=True), strict=True):
        if name in found:
            torch.testing.assert_close(found[name], torch.stack(wanted))
    assert len(found) == len(names) - (bandwidth == "ssmax")


def test_sizes_and_flags_of_numpy():
    torch.manual_seed(1)
    options = {
        "dropout": np.float32(0),
        "bias": np.bool_(True),
        "causal": np.bool_(True),
        "scale": np.float32(0.5),
    }
    window = (np.int64(2), np.int64(0))
    layer = KernelAttention(np.int64(8), np.int32(2), head_size=np.int64(3), window=window, **options)
    assert type(layer.heads) is int
    torch.manual_seed(1)
    plain = KernelAttention(8, 2, head_size=3, window=(2, 0), bias=True, causal=True, scale=0.5)
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    assert repr(layer) == repr(plain)
    with pytest.raises(ValueError, match="width must be an integer"):
        KernelAttention(np.bool_(True), 1)


def test_the_names_of_torch_are_told_ours():
    with pytest.raises(TypeError, match="embed_dim is called width, num_heads is called heads"):
        KernelAttention(embed_dim=16, num_heads=2)
    with pytest.raises(TypeError, match="batch is always first"):
        KernelAttention(16, 2, batch_first=True)
    assert list(inspect.signature(KernelAttention).parameters)[:2] == ["width", "heads"]

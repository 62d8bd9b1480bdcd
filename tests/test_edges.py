"""Sizes, strides, masks, extremes and mistakes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kernel_list import COMPACT, NAMES, NEVER_EMPTY
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

import parzen
from parzen.testing import witness


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1, 1), (0, 2, 3, 3, 4, 4), (2, 0, 3, 3, 4, 4), (2, 1, 0, 3, 4, 4),
        (2, 1, 3, 0, 4, 4), (1, 2, 3, 5, 7, 40), (1, 1, 3, 5, 300, 2), (1, 1, 2, 3, 4, 0),
        (1, 1, 2, 3, 0, 4), (1, 1, 3, 4, 80, 80),
    ],
)  # fmt: skip
def test_every_size_works(name, sizes):
    b, h, t, s, e, ev = sizes
    q, k, v = (torch.randn(b, h, *x, requires_grad=True) for x in ((t, e), (s, e), (s, ev)))
    out = parzen.attention(q, k, v, kernel=name)
    assert out.shape == (b, h, t, ev)
    grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    assert all(g.isfinite().all() for g in grads)
    if s == 0:
        assert (out == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_leading_axes(name):
    q = torch.randn(2, 3, 4, 5, 8)
    out = parzen.attention(q, q, q, kernel=name)
    assert out.shape == q.shape
    torch.testing.assert_close(out[1, 2], parzen.attention(*[q[1, 2]] * 3, kernel=name))
    torch.testing.assert_close(out[1, 2, 3], parzen.attention(*[q[1, 2, 3]] * 3, kernel=name))
    mask = torch.rand(2, 1, 1, 5, 5) < 0.7
    masked = parzen.attention(q, q, q, mask, kernel=name)
    torch.testing.assert_close(masked[1, 2], parzen.attention(*[q[1, 2]] * 3, mask[1, 0], kernel=name))
    for sparse in (False, True):
        w = parzen.attention_weights(q, q, mask, kernel=name, sparse=sparse)
        assert w.tau.shape == w.support.shape == w.bandwidth.shape == q.shape[:-1]
        dense = w.weights.to_dense()
        torch.testing.assert_close(dense @ q, masked)
        assert torch.equal((dense > 0).sum(-1), w.support)


@pytest.mark.parametrize("name", NAMES)
def test_strides_and_broadcasts_do_not_matter(name):
    q = torch.randn(2, 5, 3, 16)[..., ::2].transpose(1, 2)
    k = torch.randn(1, 1, 8, 7).mT.expand(2, 3, 7, 8)
    v = torch.randn(7, 4).expand(2, 3, 7, 4)
    expected = parzen.attention(q.contiguous(), k.contiguous(), v.contiguous(), kernel=name)
    torch.testing.assert_close(parzen.attention(q, k, v, kernel=name), expected)
    torch.testing.assert_close(parzen.attention(q, k[:1, :1], v[:1, :1], kernel=name), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask_kind", ["bool", "−∞", "finfo.min"])
def test_a_row_with_nothing_allowed_is_zero_and_alone(name, mask_kind):
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (6, 9, 9))
    allowed = torch.rand(2, 1, 6, 9) < 0.7
    allowed[..., 0] = True
    blocked = allowed.clone()
    blocked[:, :, 2] = False
    low = {"bool": None, "−∞": -torch.inf, "finfo.min": torch.finfo(torch.float32).min}[mask_kind]

    def run(mask):
        return parzen.attention(q, k, v, mask if low is None else torch.where(mask, 0.0, low), kernel=name)

    out, full = run(blocked), run(allowed)
    others = [0, 1, 3, 4, 5]
    assert (out[:, :, 2] == 0).all()
    assert torch.equal(out[:, :, others], full[:, :, others])
    gq, gk, gv = torch.autograd.grad(out.sin().sum(), (q, k, v))
    assert (gq[:, :, 2] == 0).all()
    rest = torch.autograd.grad(full[:, :, others].sin().sum(), (q, k, v))
    torch.testing.assert_close(gk, rest[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(gv, rest[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", COMPACT)
def test_nan_stays_in_the_rows_that_may_see_it(name):
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    clean = parzen.attention(q, k, v, kernel=name, is_causal=True)
    for spoilt in ("q", "k", "v"):
        bad = {"q": q.clone(), "k": k.clone(), "v": torch.ones_like(v)}
        bad[spoilt][:, :, 3, 2] = torch.nan
        out = parzen.attention(
            bad["q"], bad["k"], bad["v"] if spoilt == "v" else v, kernel=name, is_causal=True
        )
        if spoilt == "v":
            seen = parzen.attention_weights(q, k, kernel=name, is_causal=True).weights[..., 3] > 0
            expected = torch.zeros(1, 2, 6, 8, dtype=torch.bool)
            expected[..., 2] = seen
            assert torch.equal(out.isnan(), expected)
            continue
        assert out[:, :, 3 if spoilt == "q" else slice(3, None)].isnan().all()
        assert torch.equal(out[:, :, :3], clean[:, :, :3])
    w = parzen.weights(torch.tensor([[1.0, torch.nan, 0.5], [1.0, 2.0, 0.5]]), name)
    assert w[0].isnan().all()
    assert w[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NEVER_EMPTY)
def test_half_precision_rows_sum_to_one(name, dtype):
    scores = (torch.randn(50, 300) * 8).to(dtype)
    w = parzen.weights(scores, name)
    assert w.dtype == dtype
    assert (w.float().sum(-1) - 1).abs().amax() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("name", NEVER_EMPTY)
@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
def test_huge_scores(name, size):
    s = torch.randn(20, 33) * size
    s.requires_grad_()
    w = parzen.weights(s, name)
    torch.testing.assert_close(w.sum(-1), torch.ones(20))
    (g,) = torch.autograd.grad((w * torch.randn(33)).sum(), s)
    assert g.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_equal_scores_share_equally(name):
    s = torch.full((2, 1000), 0.75)
    w = parzen.weights(s, name, scale=0.5)
    torch.testing.assert_close(w, torch.full_like(w, w[0, 0].item()))
    assert w[0, 0].item() in (0.0, pytest.approx(1e-3, rel=1e-5))


def test_gaussian_is_sdpa():
    q, k, v = (torch.randn(2, 4, 7, 8, requires_grad=True) for _ in range(3))
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.randn(7, 7)}):
        ours, theirs = (
            parzen.attention(q, k, v, **options),
            F.scaled_dot_product_attention(q, k, v, **options),
        )
        torch.testing.assert_close(ours, theirs)
        got, expected = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (ours, theirs))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["gaussian", "biweight", "knn_gaussian?k=3"])
def test_causal_alignments(name):
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)

    def dense(offset):
        mask = torch.ones(4, 7, dtype=torch.bool).tril(offset)
        return parzen.attention(q, k, v, mask, kernel=name)

    upper, lower = dense(0), dense(3)
    for got, expected in [
        (parzen.attention(q, k, v, is_causal=True, kernel=name), upper),
        (parzen.attention(q, k, v, causal_upper_left(4, 7), kernel=name), upper),
        (parzen.attention(q, k, v, causal_lower_right(4, 7), kernel=name), lower),
        (parzen.attention(q, k, v, window=(-1, 0), kernel=name), lower),
        (parzen.attention(q, k, v, window=(-1, -1), is_causal=True, kernel=name), upper),
    ]:
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="made for lengths"):
        parzen.attention(q, k, v, causal_lower_right(4, 8), kernel=name)
    with pytest.raises(ValueError, match="give one of them"):
        parzen.attention(q, k, v, causal_lower_right(4, 7), is_causal=True, kernel=name)


@pytest.mark.parametrize("name", ["gaussian", "biweight"])
def test_masks_combine(name):
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    padding = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None]
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = parzen.attention(q, k, v, padding & causal, kernel=name)
    torch.testing.assert_close(parzen.attention(q, k, v, padding, is_causal=True, kernel=name), expected)
    additive = torch.where(padding, 0.0, -torch.inf)
    torch.testing.assert_close(parzen.attention(q, k, v, additive, is_causal=True, kernel=name), expected)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
    torch.testing.assert_close(
        parzen.attention(q, k, v, block, kernel=name), parzen.attention(q, k, v, causal, kernel=name)
    )


@pytest.mark.parametrize("name", ["gaussian", "biweight"])
def test_window_and_alibi_as_in_flash_attention(name):
    """i + S − T is the position of query i; ALiBi falls with the distance to it."""
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    slopes = torch.tensor([[0.5, 0.25], [0.1, 0.2]])
    distance = (torch.arange(9)[None] - (torch.arange(5)[:, None] + 4)).abs()
    bias = -slopes[:, :, None, None] * distance
    ahead = torch.arange(9)[None] - (torch.arange(5)[:, None] + 4)
    bias = bias.masked_fill((ahead < -3) | (ahead > 1), -torch.inf)
    got = parzen.attention(q, k, v, window=(3, 1), alibi_slopes=slopes, kernel=name)
    torch.testing.assert_close(got, parzen.attention(q, k, v, bias, kernel=name))


def _case(draw):
    size = st.integers(1, 9)
    b, h, g, t, s, e, ev = (draw(size) for _ in range(7))
    h, g = min(h, 3), min(g, 2)
    return b % 3 + 1, h, h * g, t, s, e, ev


@given(st.data())
def test_any_shape_any_mask_against_the_witness(data):
    b, hk, h, t, s, e, ev = _case(data.draw)
    name = data.draw(st.sampled_from(NEVER_EMPTY))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    size = data.draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    # Quarters: exact in float64, with ties, so that no threshold is decided by rounding.
    q, k = ((torch.randn(b, n, m, e, generator=g) * 4).round().double() / 4 for n, m in ((h, t), (hk, s)))
    v = torch.randn(b, hk, s, ev, generator=g, dtype=torch.float64)
    mask = data.draw(st.sampled_from([None, "bool", "bias"]))
    if mask is not None:
        shape = [data.draw(st.sampled_from([1, n])) for n in (b, h, t, s)]
        keep = torch.rand(shape, generator=g) < data.draw(st.sampled_from([0.0, 0.3, 0.9]))
        mask = (
            keep
            if mask == "bool"
            else torch.where(keep, torch.randint(-3, 4, shape, generator=g) / 4, -torch.inf)
        )
    options = {"is_causal": data.draw(st.booleans()), "scale": max(size, 2**-20)}
    got = parzen.attention(q, k, v, mask, enable_gqa=True, kernel=name, **options)
    torch.testing.assert_close(got, witness(q, k, v, mask, kernel=name, **options), rtol=0, atol=1e-9)


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=12), st.sampled_from(NAMES))
def test_any_scores_give_weights_or_zero(scores, name):
    w = parzen.weights(torch.tensor(scores, dtype=torch.float32), name)
    if math.inf in scores:
        return
    assert w.isfinite().all()
    total = w.sum().item()
    assert total == 0 or total == pytest.approx(1, abs=1e-5)


def _x(*shape, **options):
    return torch.zeros(*shape, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a: a(_x(2, 3, 4), _x(2, 5, 6), _x(2, 5, 6)), ValueError, "sizes differ: 4 and 6"),
        (lambda a: a(_x(2, 3, 4), _x(2, 5, 4), _x(2, 6, 4)), ValueError, "lengths differ: 5 and 6"),
        (lambda a: a(_x(4), _x(4), _x(4)), ValueError, "must be"),
        (lambda a: a([1.0], _x(2, 4), _x(2, 4)), TypeError, "query must be a tensor"),
        (lambda a: a(_x(2, 4, dtype=torch.int64), _x(2, 4), _x(2, 4)), TypeError, "floating-point"),
        (lambda a: a(_x(6, 3, 4), _x(2, 3, 4), _x(2, 3, 4)), ValueError, "enable_gqa=True"),
        (lambda a: a(_x(5, 3, 4), _x(2, 3, 4), _x(2, 3, 4), enable_gqa=True), ValueError, "multiple"),
        (lambda a: a(_x(2, 3, 4), _x(2, 3, 4), _x(1, 3, 4)), ValueError, "value 1"),
        (lambda a: a(_x(2, 1, 3, 4), _x(3, 1, 3, 4), _x(3, 1, 3, 4)), ValueError, "do not broadcast"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, _x(4, 4)), ValueError, "attn_mask must broadcast"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, _x(3, 3, dtype=torch.int64)), TypeError, "bool or floating"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, "causal"), TypeError, "tensor or a causal bias"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, dropout_p=1.5), ValueError, r"\[0, 1\]"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, scale=-1.0), ValueError, "> 0"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, scale=math.nan), ValueError, "> 0"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, scale="big"), TypeError, "number or a tensor"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, scale=torch.ones(5)), ValueError, "scale must broadcast"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, window=3), ValueError, r"\(left, right\)"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, window=(-2, 0)), ValueError, "≥ −1"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, alibi_slopes=torch.ones(3)), ValueError, "alibi_slopes must"),
        (lambda a: a(*[_x(2, 3, 4)] * 3, kernel="nearest"), ValueError, "known:"),
        (
            lambda a: a(*[_x(2, 3, 4)] * 3, kernel=parzen.kernel("entmax", alpha=torch.full((3,), 1.5))),
            ValueError,
            "alpha must broadcast",
        ),
    ],
)
def test_mistakes_get_one_clear_line(call, error, words):
    for function in (parzen.attention, parzen.explain):
        with pytest.raises(error, match=words) as raised:
            call(function)
        assert "\n" not in str(raised.value)


def test_weights_mistakes():
    with pytest.raises(TypeError, match="floating-point"):
        parzen.weights(torch.arange(3))
    with pytest.raises(ValueError, match="at least one axis"):
        parzen.weights(torch.tensor(1.0))
    with pytest.raises(ValueError, match="> 0"):
        parzen.weights(torch.ones(3), scale=0.0)


def test_weights_along_any_axis():
    s = torch.randn(3, 4, 5)
    for dim in (0, 1, 2, -2):
        w = parzen.weights(s, "biweight", dim=dim)
        torch.testing.assert_close(w.sum(dim), torch.ones_like(w.sum(dim)))
        torch.testing.assert_close(w.movedim(dim, -1), parzen.weights(s.movedim(dim, -1), "biweight"))
    scale = torch.rand(3, 1, 5) + 0.5
    torch.testing.assert_close(
        parzen.weights(s, "normrelu", dim=1, scale=scale)[0, :, 2],
        parzen.weights(s[0, :, 2], "normrelu", scale=scale[0, 0, 2].item()),
    )


def test_repeated_calls_are_checked_like_the_first():
    """What follows from shapes, kernel and scale is remembered: no mistake, nothing that looks equal."""
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    for _ in range(2):
        grouped = parzen.attention(q, k, k, enable_gqa=True, scale=1.0, kernel="biweight")
        with pytest.raises(ValueError, match="must agree, or pass enable_gqa"):
            parzen.attention(q, k, k, enable_gqa=False, scale=1.0, kernel="biweight")
        with pytest.raises(TypeError, match="scale"):
            parzen.attention(q, k, k, enable_gqa=True, scale=True, kernel="biweight")
        with pytest.raises(ValueError, match="scale"):
            parzen.attention(q, k, k, enable_gqa=True, scale=-1.0, kernel="biweight")
        with pytest.raises(ValueError, match="unknown kernel"):
            parzen.attention(q, k, k, enable_gqa=True, scale=1.0, kernel="biweigth")
    expected = witness(q, k, k, scale=1.0, kernel="biweight")
    torch.testing.assert_close(grouped.double(), expected, rtol=1e-4, atol=1e-5)
    wider = parzen.attention(q, k, k, enable_gqa=True, scale=0.25, kernel="biweight")
    expected = witness(q, k, k, scale=0.25, kernel="biweight")
    torch.testing.assert_close(wider.double(), expected, rtol=1e-4, atol=1e-5)

"""Packed sequences: each is attended to as if it were alone."""

import itertools

import numpy as np
import pytest
import torch

import parzen
from parzen.backends import cpu

NAMES = ["gaussian", "biweight", "entmax?alpha=1.3", "relumax", "knn_gaussian?k=3", "normrelu"]
QUERIES, KEYS = [0, 3, 3, 10, 15], [0, 4, 6, 13, 22]
BACKENDS = ["auto", "reference"]


def tensors(heads=4, key_heads=2):
    q = torch.randn(15, heads, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(22, key_heads, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(22, key_heads, 5, dtype=torch.float64, requires_grad=True)
    return q, k, v


def packed(q, k, v, **options):
    cu = torch.tensor(QUERIES), torch.tensor(KEYS, dtype=torch.int32)
    return parzen.attention_varlen(q, k, v, *cu, 7, 9, enable_gqa=True, **options)


def one_by_one(q, k, v, window, **options):
    parts = []
    for (q0, k0), (q1, k1) in itertools.pairwise(zip(QUERIES, KEYS, strict=True)):
        alone = [x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        out = parzen.attention(*alone, enable_gqa=True, window=window, backend="reference", **options)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_one_by_one(name, window, backend):
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    options = {"kernel": name, "scale": 0.7, "alibi_slopes": slopes}
    got, expected = (
        packed(q, k, v, window=window, backend=backend, **options),
        one_by_one(q, k, v, window, **options),
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    seed = torch.randn_like(got)
    grads = (torch.autograd.grad((x * seed).sum(), (q, k, v)) for x in (got, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_is_lower_right(backend):
    q, k, v = tensors()
    causal = packed(q, k, v, is_causal=True, kernel="biweight", backend=backend)
    torch.testing.assert_close(causal, packed(q, k, v, window=(-1, 0), kernel="biweight", backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 4)], ids=str)
def test_slopes_of_each_sequence(shape, backend):
    tensors_of_call = (*tensors(), torch.rand(shape, dtype=torch.float64, requires_grad=True))

    def together(q, k, v, slopes):
        return packed(q, k, v, alibi_slopes=slopes, kernel="biweight", backend=backend)

    def alone(q, k, v, slopes):
        parts = []
        for n, row in enumerate(slopes.expand(4, 4)):
            rows, columns = slice(*QUERIES[n : n + 2]), slice(*KEYS[n : n + 2])
            x = (x.transpose(0, 1) for x in (q[rows], k[columns], v[columns]))
            out = parzen.attention(
                *x, enable_gqa=True, alibi_slopes=row, kernel="biweight", backend="reference"
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    got, expected = together(*tensors_of_call), alone(*tensors_of_call)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    grads = (torch.autograd.grad(x.sin().sum(), tensors_of_call) for x in (got, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)
    assert torch.autograd.gradgradcheck(together, tensors_of_call, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_for_each_query(backend):
    q, k, v = tensors()
    scale = torch.rand(4, 15, dtype=torch.float64) + 0.5
    got = packed(q, k, v, scale=scale, kernel="biweight", backend=backend)
    third = parzen.attention(
        *(x.transpose(0, 1) for x in (q[3:10], k[6:13], v[6:13])),
        enable_gqa=True, scale=scale[:, 3:10], kernel="biweight", backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(got[3:10], third.transpose(0, 1), rtol=0, atol=1e-11)


@pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine was not built here")
def test_auto_is_the_engine_on_the_cpu(monkeypatch):
    seen = []
    monkeypatch.setattr(cpu, "run_varlen", lambda call, *_, **__: seen.append(1) or call.q)
    packed(*tensors(), kernel="biweight")
    assert seen == [1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["biweight", "knn_gaussian?k=3"])
def test_derivatives(name, backend):
    q, k, v = tensors()

    def f(q, k, v):
        return packed(q, k, v, kernel=name, is_causal=True, backend=backend)

    assert torch.autograd.gradcheck(f, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_without_queries_or_keys(backend):
    q, k, v = torch.randn(3, 2, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 3)

    def run(first_q, first_k):
        cu = torch.tensor(first_q), torch.tensor(first_k)
        sizes = first_q[-1], first_k[-1]
        return parzen.attention_varlen(
            q[: sizes[0]], k[: sizes[1]], v[: sizes[1]], *cu, *sizes, kernel="biweight", backend=backend
        )

    assert run([0], [0]).shape == run([0, 0], [0, 5]).shape == (0, 2, 3)
    assert (run([0, 3], [0, 0]) == 0).all()
    out = run([0, 0, 2, 3], [0, 2, 2, 5])
    assert (out[:2] == 0).all()
    alone = parzen.attention(*(x[2:].transpose(0, 1) for x in (q, k, v)), kernel="biweight")
    torch.testing.assert_close(out[2:], alone.transpose(0, 1))


@pytest.mark.skipif(not cpu.info()["built"], reason="the other backends read the offsets")
def test_compiles_whole_and_looks_at_the_offsets_when_it_runs():
    torch._dynamo.reset()

    slopes = torch.rand(4, 4, dtype=torch.float64)

    def f(q, k, v, cu_q, cu_k):
        return parzen.attention_varlen(
            q, k, v, cu_q, cu_k, 9, 9,
            enable_gqa=True, kernel="biweight", is_causal=True, alibi_slopes=slopes,
        )  # fmt: skip

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    q, k, v = tensors()
    for first in (QUERIES, [0, 8, 8, 9, 15]):
        offsets = torch.tensor(first), torch.tensor(KEYS)
        got, expected = (run(q, k, v, *offsets) for run in (compiled, f))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        grads = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (got, expected))
        torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match="cu_seq_q must ascend by at most max_q = 9"):
        compiled(q, k, v, torch.tensor([0, 8, 7, 9, 15]), torch.tensor(KEYS))


def test_shapes_on_the_meta_device():
    q, k, v = (x.detach().to("meta") for x in tensors(key_heads=4))
    cu = torch.tensor(QUERIES, device="meta"), torch.tensor(KEYS, device="meta")
    assert parzen.attention_varlen(q, k, v, *cu, 7, 9, kernel="biweight").shape == (15, 4, 5)


def test_no_length_is_too_long():
    q, k, v = tensors(key_heads=4)
    cu = torch.tensor(QUERIES), torch.tensor(KEYS)
    got = parzen.attention_varlen(q, k, v, *cu, 2**70, 10**12, kernel="biweight")
    assert torch.equal(
        got, parzen.attention_varlen(q, k, v, *cu, np.int64(7), np.int32(9), kernel="biweight")
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cu_seq_q": torch.tensor([0, 3, 14])}, ValueError, "cu_seq_q must ascend from 0 to 15"),
        ({"cu_seq_q": torch.tensor([1, 3, 3, 10, 15])}, ValueError, "cu_seq_q must ascend from 0 to 15"),
        ({"cu_seq_k": torch.tensor([0, 9, 4, 9, 22])}, ValueError, "ascend by at most max_k = 9"),
        ({"cu_seq_q": torch.tensor([0, -1, 3, 10, 15])}, ValueError, "cu_seq_q must ascend by at most"),
        ({"max_q": 4}, ValueError, "at most max_q = 4"),
        ({"max_q": -1}, ValueError, "max_q must be ≥ 0, got -1"),
        ({"max_q": 7.0}, TypeError, "max_q must be an integer, got 7.0"),
        ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes must .* \(4, 4\), got"),
        ({"max_k": None}, TypeError, "max_k must be an integer, got None"),
        ({"cu_seq_k": torch.tensor([0, 9, 18, 22])}, ValueError, "same number of sequences"),
        ({"cu_seq_k": torch.tensor([KEYS])}, ValueError, r"shape \(sequences \+ 1,\), got \(1, 5\)"),
        ({"cu_seq_k": torch.tensor([], dtype=torch.int64)}, ValueError, r"got \(0,\)"),
        ({"cu_seq_q": QUERIES}, TypeError, "cu_seq_q must be a tensor of integers, got list"),
        ({"cu_seq_q": torch.tensor(QUERIES).float()}, TypeError, "integers, got torch.float32"),
        ({"cu_seq_q": torch.tensor(QUERIES).bool()}, TypeError, "integers, got torch.bool"),
        ({"cu_seq_q": torch.tensor(QUERIES).to("meta")}, ValueError, "cu_seq_q is on meta and query on cpu"),
        ({"query": torch.zeros(2, 15, 4, 8)}, ValueError, r"packed .* \(total, H, size\), got query"),
        ({"query": torch.zeros(1, 4, 15, 8)}, ValueError, r"packed sequences are \(total, H, size\)"),
        ({"key": [1.0]}, TypeError, "key must be a tensor, got list"),
        ({"window": 3}, ValueError, r"window must be \(left, right\)"),
        ({"is_causal": "no"}, TypeError, "is_causal must be True or False"),
    ],
)  # fmt: skip
def test_mistakes(change, error, words, backend):
    q, k, v = tensors(key_heads=4)
    arguments = {"query": q, "key": k, "value": v, "max_q": 7, "max_k": 9, "backend": backend}
    arguments |= {"cu_seq_q": torch.tensor(QUERIES), "cu_seq_k": torch.tensor(KEYS)} | change
    with pytest.raises(error, match=words):
        parzen.attention_varlen(**arguments)

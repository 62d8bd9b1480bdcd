"""Packed sequences: each is attended to as if it were alone."""

import itertools

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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seq_q": torch.tensor([0, 3, 14])}, "cu_seq_q must ascend from 0 to 15"),
        ({"cu_seq_k": torch.tensor([0, 9, 4, 9, 22])}, "cu_seq_k must ascend by at most max_k = 9"),
        ({"max_q": 4}, "at most max_q = 4"),
        ({"cu_seq_k": torch.tensor([0, 9, 18, 22])}, "same number of sequences"),
        ({"query": torch.zeros(2, 15, 4, 8)}, r"packed sequences are \(total, H, size\)"),
    ],
)
def test_mistakes(change, words):
    q, k, v = tensors(key_heads=4)
    arguments = {"query": q, "key": k, "value": v, "max_q": 7, "max_k": 9}
    arguments |= {"cu_seq_q": torch.tensor(QUERIES), "cu_seq_k": torch.tensor(KEYS)} | change
    with pytest.raises(ValueError, match=words):
        parzen.attention_varlen(**arguments)

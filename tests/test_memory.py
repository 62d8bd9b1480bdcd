"""The growing store against the dense reference in float64: every kernel, size and distribution of keys."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_list import NAMES
from torch import Tensor
from torch.testing import assert_close

import parzen
from parzen.backends import cpu, native, recall
from parzen.kernels import Exp, Kernel, Power, UnitMass, WithinMargin
from parzen.lab.bench import decode as bench
from parzen.lab.data.tales import tales
from parzen.memory import DTYPES, KeyValueMemory
from parzen.models.mosaic import Mosaic, MosaicConfig

ISAS = cpu.info()["isas"]
needs_engine = pytest.mark.skipif(not ISAS, reason="the CPU engine was not built")
# One of each rule, and both profiles.
SOME = ["gaussian", "epanechnikov", "biweight", "entmax?alpha=1.3", "relumax", "normrelu", "knn_gaussian"]
COMPACT = ["epanechnikov", "biweight", "relumax", "knn_gaussian"]
E, EV = 40, 24


@pytest.fixture(params=ISAS or ["none"])
def isa(request, monkeypatch: pytest.MonkeyPatch) -> str:
    if ISAS:
        engine = native.choose(request.param)
        monkeypatch.setattr(native, "engine", lambda: engine)
    return request.param


def pairs(
    n: int, kind: str = "normal", batch: tuple[int, ...] = (2,), heads: int = 2
) -> tuple[Tensor, Tensor]:
    """Keys and values on a grid of 1/8: products are exact in float32, so that ties are ties anywhere."""
    g = torch.Generator().manual_seed(n)
    k, v = (torch.randn(*batch, heads, n, size, generator=g) for size in (E, EV))
    if kind == "clustered":
        centres = 2 * torch.randn(*batch, heads, 9, E, generator=g)
        k = centres[..., torch.randint(9, (n,), generator=g), :] + k / 4
    elif kind == "outliers":
        k[..., 3] *= 32
        k[..., 5] += 24
        k[..., 7, :] = 0
    elif kind == "smooth":
        # Unit vectors that move slowly, as those of a mosaic's leaky averages do.
        k = 4 * F.normalize(k.cumsum(-2), dim=-1)
    return (k * 8).round() / 8, (v * 8).round() / 8


def queries(t: int = 2, batch: tuple[int, ...] = (2,), heads: int = 4) -> Tensor:
    g = torch.Generator().manual_seed(99)
    return (torch.randn(*batch, heads, t, E, generator=g) * 8).round() / 8


def filled(kernel, n: int, kind: str = "normal", **options) -> KeyValueMemory:
    options = {"scale": 0.125} | options
    memory = KeyValueMemory(kernel, 2, E, EV, **options)
    memory.append(*pairs(n, kind))
    return memory


def expected(memory: KeyValueMemory, q: Tensor, is_causal: bool = False, **options) -> Tensor:
    """The definition, in float64, over what is stored."""
    if is_causal:
        options["window"] = (-1, 0)
    return parzen.attention(
        q.double(),
        memory.keys.double(),
        memory.values.double(),
        kernel=memory.kernel,
        enable_gqa=True,
        backend="reference",
        **{"scale": memory.scale, **options},
    )


def agrees(memory: KeyValueMemory, q: Tensor, atol: float = 3e-6, **options) -> None:
    assert_close(memory.attend(q, **options).double(), expected(memory, q, **options), atol=atol, rtol=0)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "clustered", "outliers", "smooth"])
@pytest.mark.parametrize("kernel", NAMES)
def test_every_kernel_agrees_with_the_reference(isa: str, kernel: str, kind: str):
    agrees(filled(kernel, 2500, kind), queries())


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 1023, 1024, 1025, 2047, 3 * 1024, 9 * 1024 + 1])
@pytest.mark.parametrize("kernel", SOME)
def test_every_size(kernel: str, n: int):
    agrees(filled(kernel, n), queries())


@pytest.mark.parametrize("size", [1, 3, 4, 16, 17, 64, 100, 1030])
@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "knn_gaussian"])
def test_every_width(isa: str, kernel: str, size: int):
    g = torch.Generator().manual_seed(0)
    k, v = ((torch.randn(2, 1100, n, generator=g) * 8).round() / 8 for n in (size, size + 4))
    memory = KeyValueMemory(kernel, 2, size, size + 4)
    memory.append(k, v)
    q = (torch.randn(2, 3, size, generator=g) * 8).round() / 8
    agrees(memory, q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", SOME)
def test_every_stored_type(isa: str, kernel: str, dtype: torch.dtype):
    memory = filled(kernel, 1500, "outliers", dtype=dtype)
    assert memory.keys.dtype == dtype
    # The query is not rounded to what is stored.
    q = queries().to(torch.promote_types(torch.float32, dtype))
    assert memory.attend(q).dtype == q.dtype
    agrees(memory, q, atol=1e-13 if dtype == torch.float64 else 3e-6)
    assert memory.attend(q.to(dtype)).dtype == dtype


def test_numbers_of_half_precision_are_read_as_they_are(isa: str):
    # Every finite float16, and as many of bfloat16: subnormal, smallest, largest.
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[x.isfinite() & (x.abs() < 1e30)]
        memory = KeyValueMemory("gaussian", 1, 1, 1, dtype=dtype, scale=1.0)
        for chunk in x.split(5000):
            memory.truncate(0)
            memory.append(torch.zeros(1, len(chunk), 1, dtype=dtype), chunk[None, :, None])
            assert_close(
                memory.attend(torch.zeros(1, 1, 1)).double().item(),
                chunk.double().mean().item(),
                rtol=1e-5,
                atol=0.0 if dtype == torch.float16 else 1e24,
            )
            for j in (0, len(chunk) // 2, len(chunk) - 1):
                memory.truncate(0)
                memory.append(torch.zeros(1, 1, 1, dtype=dtype), chunk[None, j : j + 1, None])
                assert memory.attend(torch.zeros(1, 1, 1)).item() == chunk[j].item()


@pytest.mark.parametrize("kernel", SOME)
def test_queries_see_their_past_where_asked(isa: str, kernel: str):
    memory, q = filled(kernel, 2111), queries(t=70)
    for t in (1, 5, 70):
        agrees(memory, q[:, :, :t], is_causal=True)
        agrees(memory, q[:, :, :t], window=(1200, 0))
        agrees(memory, q[:, :, :t], window=(5, 3))
    assert_close(
        memory.attend(q[:, :, :5], is_causal=True), memory.attend(q[:, :, :5], window=(-1, 0)), atol=0, rtol=0
    )


def test_more_queries_than_keys():
    memory = filled("biweight", 3)
    o = memory.attend(queries(t=8), is_causal=True)
    assert not o[:, :, :5].any()
    agrees(memory, queries(t=8), is_causal=True)


@pytest.mark.parametrize("kernel", NAMES)
def test_masks(isa: str, kernel: str):
    memory, q = filled(kernel, 1700), queries(3)
    g = torch.Generator().manual_seed(1)
    padding = torch.arange(1700) >= torch.tensor([0, 1300])[:, None, None, None]
    heads = torch.tensor([True, False, True, True])[:, None, None]
    scattered = torch.rand(2, 4, 3, 1700, generator=g) < 0.3
    for mask in (padding, heads, scattered, scattered & padding & heads, scattered[0, 0]):
        agrees(memory, q, attn_mask=mask)
    assert not memory.attend(q, attn_mask=heads)[:, 1].any()


@pytest.mark.parametrize("kernel", SOME)
def test_an_empty_store_gives_zero(kernel: str):
    memory = KeyValueMemory(kernel, 2, E, EV)
    assert len(memory) == 0
    o = memory.attend(queries(3))
    assert o.shape == (2, 4, 3, EV)
    assert not o.any()
    memory.append(*pairs(0))
    assert not memory.attend(queries(3)).any()
    assert memory.keys.shape == (2, 2, 0, E)


def test_ties_at_the_k_th_neighbour_are_all_kept(isa: str):
    k, v = torch.zeros(1, 1, 3000, E), torch.randn(1, 1, 3000, EV)
    k[..., 0] = 1
    k[:, :, 100:2900:10, 0] = 2
    memory = KeyValueMemory("knn_gaussian?k=3", 1, E, EV, scale=1.0)
    memory.append(k, v)
    q = torch.zeros(1, 1, 1, E)
    q[..., 0] = 1
    assert_close(memory.attend(q)[0, 0, 0], v[0, 0, 100:2900:10].mean(0), atol=1e-6, rtol=0)
    if ISAS:
        assert memory.reads(q).support.item() == 280
    # Fewer than k distinct ones above the ties.
    k[0, 0, 5, 0] = 3
    memory.truncate(0)
    memory.append(k, v)
    agrees(memory, q)


@pytest.mark.parametrize("size", [2.0**n for n in (-100, -60, -20, 20, 60)])
@pytest.mark.parametrize("kernel", ["relumax?margin={}", "power?r=0&k=9", "power?r=0&margin={}"])
def test_no_size_of_numbers_matters(isa: str, kernel: str, size: float):
    def f(size: float, factor_k: float, factor_q: float) -> Tensor:
        memory = KeyValueMemory(kernel.format(4 * size), 2, E, EV, scale=1.0)
        k, v = pairs(1500)
        memory.append(k * factor_k, v)
        return memory.attend(queries() * factor_q)

    plain = f(1, 1, 1)
    assert_close(f(size, size, 1), plain, atol=1e-5, rtol=0)
    assert_close(f(size, 1, size), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 30.0, 1e4, 1e30])
@pytest.mark.parametrize(
    "kernel", ["epanechnikov", "triweight", "relumax", "knn_uniform", "uniform?radius=h"]
)
def test_any_scale(isa: str, kernel: str, scale: float):
    # A power of two, so that both precisions see the same scores.
    memory = filled(kernel, 2100, scale=2.0 ** round(torch.tensor(scale).log2().item()))
    agrees(memory, queries(), atol=1e-5)


@pytest.mark.parametrize("j", [40, 2400])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", SOME)
def test_keys_that_are_not_finite_reach_the_output(isa: str, kernel: str, bad: float, j: int):
    k, v = pairs(2500)
    k[0, 1, j, 2] = bad
    memory = KeyValueMemory(kernel, 2, E, EV, scale=0.125)
    memory.append(k, v)
    q = queries()
    q[..., 2] = q[..., 2].abs() + 1
    o, e = memory.attend(q), expected(memory, q)
    assert_close(o.double(), e, atol=3e-6, rtol=0, equal_nan=True)
    assert o[0, 2:].isfinite().all() == (bad == -torch.inf)
    assert o[1].isfinite().all()
    # Hidden, it does no harm.
    mask = torch.arange(2500) != j
    assert memory.attend(q, attn_mask=mask).isfinite().all()


@pytest.mark.parametrize("kernel", COMPACT)
def test_values_that_are_not_seen_do_no_harm(isa: str, kernel: str):
    memory = filled(kernel, 1500)
    q = queries(1)
    w = parzen.attention_weights(q, memory.keys, kernel=kernel, scale=0.125, enable_gqa=True).weights
    unseen = (w == 0).all(1).all(1).all(0)
    k, v = memory.keys, memory.values
    v[:, :, unseen] = torch.nan
    clean = memory.attend(q)
    memory.truncate(0)
    memory.append(k, v)
    assert torch.equal(memory.attend(q), clean)
    q[0, 0, 0, 0] = torch.nan
    o = memory.attend(q)
    assert o[0, 0].isnan().all()
    assert torch.equal(o[1], clean[1])


@pytest.mark.parametrize("kernel", ["relumax", "entmax"])
def test_one_parameter_for_each_head(isa: str, kernel: str):
    scale = torch.tensor([0.125, 0.25, 0.5, 1.0])[:, None]
    if kernel == "relumax":
        chosen = parzen.kernel("relumax", margin=torch.tensor([0.5, 1.0, 2.0, 3.0]))
    else:
        chosen = parzen.kernel("entmax", alpha=torch.tensor([2.0, 1.5, 1.25, 1.125]))
    agrees(filled(chosen, 2500, scale=scale), queries(3), atol=1e-5)
    each = torch.full((2, 4, 3), 0.25)
    each[1, 2] = 0.5
    agrees(filled("biweight", 2500), queries(3), scale=each)


def test_the_scale_is_that_of_attention_by_default():
    memory = filled("biweight", 300, scale=None)
    assert_close(memory.attend(queries()), expected(memory, queries()).float(), atol=1e-5, rtol=0)


def test_leading_axes_and_none():
    for batch in ((), (3,), (2, 3)):
        memory = KeyValueMemory("biweight", 2, E, EV, scale=0.125)
        memory.append(*pairs(1300, batch=batch))
        q = queries(batch=batch)
        assert memory.attend(q).shape == (*batch, 4, 2, EV)
        agrees(memory, q)


@needs_engine
def test_wide_supports_go_through_in_slices(isa: str):
    # More candidates than one item of work takes.
    for kernel in ("gaussian", "entmax?alpha=1.02", "normrelu?radius=2", "power?r=0&margin=40"):
        memory = filled(kernel, 11000, scale=2.0**-7)
        assert memory.reads(queries()).support.min() > 4096
        agrees(memory, queries())


# ---- growth --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", SOME)
def test_growth_by_pieces_is_growth_at_once(kernel: str):
    k, v = pairs(3333)
    whole, parts = (KeyValueMemory(kernel, 2, E, EV) for _ in range(2))
    whole.append(k, v)
    sizes = [1, 1, 62, 7, 0, 953, 1, 1500, 808]
    assert sum(sizes) == 3333
    for a, b in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True):
        parts.append(a, b)
    assert len(parts) == 3333
    assert torch.equal(parts.keys, k)
    assert torch.equal(parts.values, v)
    assert torch.equal(whole.attend(queries()), parts.attend(queries()))


@pytest.mark.parametrize("length", [0, 1, 63, 1000, 1024, 2048, 2300, 2500])
def test_truncated_is_never_stored(length: int):
    k, v = pairs(2500)
    memory, short = (KeyValueMemory("biweight", 2, E, EV) for _ in range(2))
    memory.append(k, v)
    before = memory.copy()
    memory.truncate(length)
    short.append(k[:, :, :length], v[:, :, :length])
    assert len(memory) == length
    assert torch.equal(memory.attend(queries()), short.attend(queries()))
    other = [x + 1 for x in pairs(1100)]
    memory.append(*other)
    short.append(*other)
    assert torch.equal(memory.attend(queries()), short.attend(queries()))
    # What was copied before still has the old pairs.
    assert torch.equal(before.keys, k)
    agrees(before, queries())


def test_a_copy_goes_on_by_itself():
    memory = filled("biweight", 1500)
    for other in (memory.copy(), copy.copy(memory), copy.deepcopy(memory)):
        k, v = pairs(1500)
        other.append(k[:, :, :700], v[:, :, :700])
        assert (len(memory), len(other)) == (1500, 2200)
        assert torch.equal(memory.keys, k)
        assert torch.equal(other.keys, torch.cat((k, k[:, :, :700]), 2))
        agrees(memory, queries())
        agrees(other, queries())
    with pytest.raises(TypeError, match="use save"):
        pickle.dumps(memory)


def test_sequences_are_reordered():
    memory = filled("relumax", 1500)
    k = memory.keys
    memory.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(memory.keys, k[[1, 1, 0]])
    agrees(memory, queries(batch=(3,)))
    with pytest.raises(ValueError, match="0 … 2"):
        memory.reorder(torch.tensor([3]))


def test_memory_stays_near_that_of_the_pairs():
    for dtype, most in ((torch.float32, 1.3), (torch.bfloat16, 1.35)):
        memory = KeyValueMemory("biweight", 2, 64, dtype=dtype)
        x = torch.randn(2, 5 * 1024 + 100, 64)
        memory.append(x, x)
        plain = 2 * x.numel() * dtype.itemsize
        assert plain <= memory.nbytes <= most * plain
        assert sum(c.keys.nbytes + c.values.nbytes for c in memory._chunks) <= plain * 1.05


# ---- screening -----------------------------------------------------------------------------------


@needs_engine
@pytest.mark.parametrize("kind", ["normal", "clustered", "outliers", "smooth"])
@pytest.mark.parametrize("kernel", COMPACT)
def test_few_keys_are_read(isa: str, kernel: str, kind: str):
    n = 16 * 1024
    memory = filled(kernel, n, kind)
    reads = memory.reads(queries(1))
    weights = parzen.attention_weights(
        queries(1), memory.keys, kernel=kernel, scale=0.125, enable_gqa=True
    ).weights
    assert torch.equal(reads.support, (weights > 0).sum(-1))
    assert (reads.scored >= reads.support).all()
    # Beyond the support, those that a bound cannot tell from it: smooth keys lie close to one another.
    assert (reads.scored <= 4 * reads.support + n // (8 if kind == "smooth" else 50)).all()


@needs_engine
def test_the_number_of_threads_changes_no_bit(isa: str):
    before = torch.get_num_threads()
    try:
        for kernel in SOME:
            memory = filled(kernel, 20000, "clustered")
            found = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(memory.attend(queries(3), is_causal=True))
            assert all(torch.equal(x, found[0]) for x in found)
    finally:
        torch.set_num_threads(before)


@needs_engine
def test_codes_do_not_depend_on_threads_or_pieces():
    k, v = pairs(1024)
    before = torch.get_num_threads()
    found = []
    try:
        for threads, piece in ((1, 1024), (3, 100)):
            torch.set_num_threads(threads)
            memory = KeyValueMemory("biweight", 2, E, EV)
            for a, b in zip(k.split(piece, 2), v.split(piece, 2), strict=True):
                memory.append(a, b)
            found.append(memory._chunks[0].codes)
    finally:
        torch.set_num_threads(before)
    for name in ("codes", "bounds", "frame"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))


@needs_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "clustered", "outliers", "smooth"])
def test_codes_bound_what_they_lose(isa: str, kind: str, dtype: torch.dtype):
    k = pairs(1024, kind)[0] + 1e-3 * torch.randn(2, 2, 1024, E)
    k[0, 0, 100] *= 1e4
    k[0, 0, 200, 1] = torch.inf
    k[0, 1, 300] = 0
    k = k.to(dtype).contiguous()
    made = recall.code(k)
    assert made is not None
    centre, spread, radius = made.frame.double().split([E, E, 1], -1)
    codes = made.codes.double() - 128  # (B, H, block, E/4, key, 4)
    codes = codes.permute(0, 1, 2, 4, 3, 5).reshape(2, 2, 1024, E)
    step, error = (made.bounds[..., i, :].reshape(2, 2, 1024, 1).double() for i in (0, 1))
    x = (k.double() - centre[:, :, None]) / spread[:, :, None]
    lost = (x - step * codes).norm(dim=-1, keepdim=True)
    bad = torch.zeros_like(lost, dtype=torch.bool)
    bad[0, 0, 200] = True
    assert (error[bad] == torch.inf).all()
    assert (step[bad] == 0).all()
    assert (lost <= error)[~bad].all()
    assert (error <= 1.001 * lost + 1e-6 * x.norm(dim=-1, keepdim=True))[~bad].all()
    assert (radius[..., None, :] >= x.norm(dim=-1, keepdim=True))[~bad].all()
    assert radius[0, 0] == torch.inf
    # A step for each key: the loss is relative to its own size.
    assert (lost[1] <= 0.02 * x[1].norm(dim=-1, keepdim=True)).all()


@pytest.mark.parametrize("kernel", SOME)
def test_without_the_engine(kernel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recall, "why_not", lambda *_: "not built")
    memory = filled(kernel, 1500)
    agrees(memory, queries(), is_causal=True)
    with pytest.raises(ValueError, match="not built"):
        memory.reads(queries())


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_saved_memory_comes_back(dtype: torch.dtype, tmp_path):
    path = tmp_path / "memory.safetensors"
    memory = filled("relumax?margin=2", 1500, dtype=dtype)
    memory.save(path)
    back = KeyValueMemory.load(path)
    assert (back.kernel, back.scale, back.dtype, len(back)) == (memory.kernel, 0.125, dtype, 1500)
    assert torch.equal(back.attend(queries()), memory.attend(queries()))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_tensor_parameters_come_back(tmp_path):
    path = tmp_path / "memory"
    for chosen in (
        Kernel(Power(torch.tensor([1.0, 2.5])), UnitMass()),
        Kernel(Power(2), WithinMargin(torch.ones(2))),
        Kernel(Exp(), WithinMargin(torch.ones(2))),
        parzen.kernel("entmax", alpha=torch.nn.Parameter(torch.tensor([1.0, 1.7], dtype=torch.float64))),
    ):
        memory = KeyValueMemory(chosen, 2, E, EV, scale=torch.tensor([[0.5], [1.0]]))
        memory.append(*pairs(70))
        memory.save(path)
        back = KeyValueMemory.load(path)
        (name, value), (wanted, expected) = back.kernel.learned, chosen.learned
        assert (name, value.dtype) == (wanted, expected.dtype)
        assert torch.equal(value, expected)
        q = queries(heads=2)
        assert torch.equal(back.attend(q), memory.attend(q))
    empty = KeyValueMemory("biweight", 2, E, EV)
    empty.save(path)
    assert len(KeyValueMemory.load(path)) == 0


def header(path, change) -> bytes:
    """The file with its JSON header changed."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + n])
    settings = json.loads(head["__metadata__"]["parzen.memory"])
    change(head, settings)
    if "parzen.memory" in head.get("__metadata__", {}):
        head["__metadata__"]["parzen.memory"] = json.dumps(settings)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + n :]


DAMAGE = {
    "truncated": lambda path: path.read_bytes()[:-100],
    "no header": lambda path: path.read_bytes()[:5],
    "empty": lambda path: b"",
    "garbage": lambda path: b"\x80\x04" + b"x" * 1000,
    "a huge header": lambda path: struct.pack("<Q", 2**62) + path.read_bytes()[8:],
    "no settings": lambda path: header(path, lambda head, _: head.pop("__metadata__")),
    "a list": lambda path: header(path, lambda head, s: s.clear()),
    "another format": lambda path: header(path, lambda head, s: s.update(format=99)),
    "an unknown kernel": lambda path: header(path, lambda head, s: s.update(kernel="os.system")),
    "a number for a kernel": lambda path: header(path, lambda head, s: s.update(kernel=3)),
    "other heads": lambda path: header(path, lambda head, s: s.update(heads=3)),
    "heads that are text": lambda path: header(path, lambda head, s: s.update(heads="2")),
    "a scale below 0": lambda path: header(path, lambda head, s: s.update(scale=-1)),
    "a scale of text": lambda path: header(path, lambda head, s: s.update(scale=["1"])),
    "one more setting": lambda path: header(path, lambda head, s: s.update(device="cuda")),
    "no values": lambda path: header(path, lambda head, s: head.update(other=head.pop("values"))),
    "integers": lambda path: header(
        path, lambda head, s: [head[n].update(dtype="I32") for n in ("keys", "values")]
    ),
    "another shape": lambda path: header(path, lambda head, s: head["keys"].update(shape=[2, 2, E, 70])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_clear_error(damage: str, tmp_path):
    path = tmp_path / "memory"
    filled("biweight", 70).save(path)
    path.write_bytes(DAMAGE[damage](path))
    with pytest.raises(ValueError, match="is damaged, or no file of KeyValueMemory"):
        KeyValueMemory.load(path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        KeyValueMemory.load(tmp_path / "nothing")


# ---- errors --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    for arguments, message in (
        (("biweight", 0, E), "heads"),
        (("biweight", 2, 1.5), "head_dim"),
        (("biweight", 2, E, True), "value_dim"),
        (("no such", 2, E), "unknown kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            KeyValueMemory(*arguments)
    with pytest.raises(ValueError, match="float32"):
        KeyValueMemory("biweight", 2, E, dtype=torch.int8)
    with pytest.raises(ValueError, match="scale"):
        KeyValueMemory("biweight", 2, E, scale=0.0)
    memory = filled("biweight", 10)
    k, v = pairs(3)
    for a, b in ((k[..., :-1], v), (k, v[:, :1]), (k[:, :, :2], v), (k[0], v[0])):
        with pytest.raises(ValueError, match=r"got|leading axes"):
            memory.append(a, b)
    with pytest.raises(TypeError, match="floating"):
        memory.append(k.int(), v)
    assert len(memory) == 10
    for bad in (-1, 11, 2.0, True):
        with pytest.raises(ValueError, match="length"):
            memory.truncate(bad)
    for q in (queries()[..., :-1], queries(heads=3), queries()[0]):
        with pytest.raises(ValueError, match="query"):
            memory.attend(q)
    with pytest.raises(TypeError, match="float64"):
        memory.attend(queries().double())
    with pytest.raises(TypeError, match="bool"):
        memory.attend(queries(), attn_mask=torch.zeros(10))
    with pytest.raises(ValueError, match="attn_mask"):
        memory.attend(queries(), attn_mask=torch.ones(9, dtype=torch.bool))
    with pytest.raises(ValueError, match="scale"):
        memory.attend(queries(), scale=-1.0)


def test_gradients_are_refused_and_not_lost():
    memory = filled("biweight", 10)
    q = queries().requires_grad_()
    k, v = pairs(3)
    with pytest.raises(RuntimeError, match="query requires a gradient"):
        memory.attend(q)
    with pytest.raises(RuntimeError, match="value requires a gradient"):
        memory.append(k, v.requires_grad_())
    with torch.no_grad():
        memory.append(k, v)
        assert not memory.attend(q).requires_grad
    with torch.inference_mode():
        memory.append(k, v)
        memory.attend(q)
    memory.append(k, v.detach())
    assert len(memory) == 19


def test_autocast_leaves_the_store_alone():
    memory = filled("biweight", 1500)
    plain = memory.attend(queries())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(memory.attend(queries()), plain)


@needs_engine
def test_the_benchmark_times_nothing_that_is_off(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "INPUTS", {"clustered": bench.INPUTS["clustered"]})
    lines = bench.bench_decode(lengths=[1100], kernels=COMPACT, out=tmp_path, show=lambda text: None)
    assert [x.kernel for x in lines] == 2 * COMPACT
    assert all(x.ratio > 0 and 1 < x.memory_ratio < 1.35 for x in lines)
    assert len((tmp_path / "decode.jsonl").read_text().splitlines()) == len(lines)
    attend = KeyValueMemory.attend
    monkeypatch.setattr(KeyValueMemory, "attend", lambda self, q: 1.01 * attend(self, q))
    with pytest.raises(AssertionError, match="nothing is timed"):
        bench.bench_decode(lengths=[1100], show=lambda text: None)


def test_the_benchmark_reads_what_each_layer_of_a_run_stores(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = Mosaic(MosaicConfig(256, 2, 2, 8, slots=5, kernel="biweight", dropout=0.0)).eval()
    monkeypatch.setattr(bench, "_opened", lambda folder: (model, lambda story: list(story.encode())))
    n = 4100
    tokens = "".join(itertools.islice(tales(0), 99)).encode()[: n + bench.TURNS + 1]
    x = model.embedding(torch.tensor([list(tokens)]))
    sources = bench._layers(Path("runs/of/a/mosaic"))
    assert list(sources) == ["layer 1", "layer 2"]
    with torch.no_grad():
        for block, make in zip(model.blocks, sources.values(), strict=True):
            query, key, _ = block.mixer.read(block.mixer_norm(x))
            values = block.mixer.values(block.mixer_norm(x))
            stored = make(n)
            for got, expected in (
                (stored.keys, key[:, :, :n]),
                (stored.values, values[:, :, :n]),
                (stored.queries, query[:, :, n - 1 :]),
                (stored.scale, block.mixer.bandwidth.base()),
            ):
                assert_close(got, expected.expand_as(got), rtol=0, atol=1e-4)
            x = block(x)


@pytest.mark.parametrize("length", [10, 1030])
def test_a_memory_goes_on_in_another_mode(length):
    x = torch.randn(1, 2, length, 8)
    memory = parzen.KeyValueMemory("biweight", np.int64(2), np.int64(8), scale=np.float32(0.5))
    with torch.inference_mode():
        memory.append(x.clone(), x.clone())
        reordered = memory.copy()
        reordered.reorder(torch.tensor([0]))
        cut = memory.copy()
        cut.truncate(np.int64(length - 3))
    for one in (memory, reordered, cut):
        n = len(one)
        one.append(x, x)
        kept = torch.cat((x[:, :, :n], x), 2)
        expected = parzen.attention(x[:, :, :3], kept, kept, kernel="biweight", scale=0.5)
        torch.testing.assert_close(one.attend(x[:, :, :3]), expected)
        with torch.inference_mode():
            one.append(x, x)

"""Memory Mosaics: sizes, causality, and the leaky average against its definition."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from parzen.kernels import KERNELS
from parzen.models.mosaic import ContextualMemory, Mosaic, MosaicConfig, PersistentMemory
from parzen.models.scan import leaky_sum

SMALL = MosaicConfig(vocab=23, layers=2, heads=3, width=12, slots=7, dropout=0.0)


def small(kernel="gaussian", persistent="gaussian", dropout=0.0):
    torch.manual_seed(0)
    config = MosaicConfig(23, 2, 3, 12, 7, kernel, persistent, dropout)
    return Mosaic(config).double().eval()


@pytest.mark.parametrize(("layers", "count"), [(1, 45_713_748), (8, 95_270_304), (12, 123_588_336)])
def test_published_parameter_counts(layers, count):
    with torch.device("meta"):
        model = Mosaic(MosaicConfig(layers=layers))
    assert sum(p.numel() for p in model.parameters()) == count


def tensors(published, key):
    return {n: torch.tensor(x, dtype=torch.float64) for n, x in published[key].items()}


def test_logits_and_gradients_are_the_published_codes():
    """The fixture names the code, and how its numbers were made."""
    path = Path(__file__).parent / "fixtures" / "mosaic" / "published.json"
    published = json.loads(path.read_text(encoding="utf-8"))
    model = Mosaic(MosaicConfig(**published["config"])).double()
    model.load_state_dict(tensors(published, "weights"))
    tokens = torch.tensor(published["tokens"])
    logits = model(tokens)
    assert_close(logits, torch.tensor(published["logits"], dtype=torch.float64), rtol=0, atol=1e-12)
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert_close(gradients, tensors(published, "gradients"), rtol=0, atol=1e-11)
    single = model.float()(tokens)
    assert_close(single, torch.tensor(published["float32_logits"]), rtol=0, atol=1e-6)


def sequential(x, decay):
    y, state = [], torch.zeros_like(x[:, :, 0])
    for t in range(x.shape[2]):
        state = torch.exp(-decay)[:, None] * state + x[:, :, t]
        y.append(state)
    return torch.stack(y, 2)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 64, 99])
def test_leaky_sum_is_the_recurrence_with_its_gradients(length):
    torch.manual_seed(length)
    decay = torch.tensor([0.0, 0.01, 0.7, 30.0], dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 4, length, 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(2, 4, length, 3, dtype=torch.float64)
    expected = sequential(x, decay)
    got = leaky_sum(x, decay, chunk=4)
    assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((got * pull).sum(), (x, decay)),
        torch.autograd.grad((expected * pull).sum(), (x, decay)),
        strict=True,
    ):
        assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_leaky_sum_is_exact_over_many_steps_and_strong_decay():
    decay = torch.tensor([0.0, 500.0])
    y = leaky_sum(torch.ones(1, 2, 10_000, 1), decay)
    assert_close(y[0, 0, :, 0], torch.arange(1.0, 10_001))
    assert_close(y[0, 1], torch.ones(10_000, 1))


def test_leaky_sum_makes_nothing_quadratic():
    """100,000 steps squared would be 37 GiB."""
    y = leaky_sum(torch.ones(1, 1, 100_000, 1), torch.tensor([1.0]))
    assert_close(y[0, 0, -1, 0].item(), 1 / (1 - math.exp(-1)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_logits_depend_on_the_past_only(kernel):
    model = small(kernel)
    tokens = torch.randint(23, (2, 40), generator=torch.Generator().manual_seed(1))
    before = model(tokens)
    for t in (1, 20, 39):
        changed = tokens.clone()
        changed[:, t:] = (changed[:, t:] + 5) % 23
        after = model(changed)
        assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert not torch.allclose(after[:, t], before[:, t])


def test_a_later_token_sees_an_earlier_one():
    model = small()
    tokens = torch.arange(20)[None] % 23
    changed = tokens.clone()
    changed[0, 3] = 22
    assert not torch.allclose(model(changed)[0, 15], model(tokens)[0, 15], atol=1e-9)


def test_any_length_from_one_on_and_prefixes_agree():
    model = small("biweight")
    tokens = torch.randint(23, (3, 70), generator=torch.Generator().manual_seed(2))
    whole = model(tokens)
    assert whole.shape == (3, 70, 23)
    for length in (1, 2, 33, 69):
        assert_close(model(tokens[:, :length]), whole[:, :length], rtol=0, atol=1e-12)


def test_contextual_memory_is_its_formula():
    memory = ContextualMemory(SMALL).double()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    k_raw = memory.keys.project(x).view(6, 3, 4)
    u = memory.values.project(x).view(6, 3, 4)
    y = torch.zeros(6, 3, 4, dtype=torch.float64)
    for h in range(3):
        decay = 10 * memory.keys.leak[h].abs()
        c = memory.values.mix[h]
        k, v = [], []
        for t in range(6):
            k.append(F.normalize(sum(torch.exp(-decay * (t - i)) * k_raw[i, h] for i in range(t + 1)), dim=0))
        for t in range(5):
            unit = F.normalize(c * u[t, h] + (1 - c) * u[t + 1, h], dim=0)
            v.append(unit * torch.exp(10 * memory.values.gain[h]))
        beta = torch.exp(10 * memory.bandwidth.sharpness[h])
        for t in range(1, 6):
            w = torch.softmax(torch.stack([beta**2 * k[t] @ k[i] for i in range(t)]), 0)
            y[t, h] = sum(w[i] * v[i] for i in range(t))
    assert_close(memory(x)[0], memory.output(y.flatten(1)))


def test_persistent_memory_is_its_formula():
    memory = PersistentMemory(SMALL).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    k = memory.keys(x)
    beta = torch.exp(10 * memory.bandwidth.sharpness)[:, None, None]
    w = torch.softmax(beta**2 * k @ memory.stored_keys.mT, -1)
    y = w @ memory.stored_values * torch.exp(10 * memory.gain)[:, None, None]
    assert_close(memory(x), memory.output(y.transpose(1, 2).flatten(2)))


def test_initial_scales_are_the_published_ones():
    memory = ContextualMemory(MosaicConfig(layers=4))
    assert_close(memory.bandwidth.base(), torch.full((12, 1), math.exp(2)))
    assert_close(10 * memory.keys.leak.detach(), torch.linspace(0.5, 5, 12))
    assert_close(torch.exp(10 * memory.values.gain).mean().item(), math.exp(-0.5), rtol=1e-6, atol=0)
    assert_close(memory.keys.project.weight.std().item(), 768**-0.5, rtol=0.01, atol=0)
    assert_close(memory.output.weight.std().item(), 768**-0.5 / 2, rtol=0.01, atol=0)


def test_bandwidth_has_a_floor():
    memory = ContextualMemory(SMALL)
    with torch.no_grad():
        memory.bandwidth.sharpness.fill_(9.0)
    assert_close(memory.bandwidth.base(), torch.full((3, 1), math.exp(10)))


@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "relumax", "knn_gaussian?k=3"])
def test_every_parameter_gets_a_gradient(kernel):
    model = small(kernel, persistent=kernel)
    tokens = torch.randint(23, (4, 30), generator=torch.Generator().manual_seed(3))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name


def test_dropout_acts_in_training_only():
    model = small(dropout=0.5)
    tokens = torch.arange(12)[None]
    assert_close(model(tokens), model(tokens), rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 5}, "heads must divide width"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"kernel": "cosine"}, "unknown kernel"),
        ({"persistent_kernel": "relumax?margin=0"}, "margin must be"),
    ],
)
def test_a_wrong_config_says_so(wrong, message):
    with pytest.raises(ValueError, match=message):
        MosaicConfig(**wrong)

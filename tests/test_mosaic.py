"""Memory Mosaics: sizes, causality, and the leaky average against its definition."""

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from parzen import weights
from parzen.backends import cpu
from parzen.kernels import KERNELS
from parzen.memory import KeyValueMemory
from parzen.models.generate import generate
from parzen.models.mosaic import ContextualMemory, Mosaic, MosaicConfig, Pairs, PersistentMemory
from parzen.models.scan import gated_sum, leaky_sum

SMALL = MosaicConfig(vocab=23, layers=2, heads=3, width=12, slots=7, dropout=0.0)
SCALED = {"bandwidth": "power_law", "gated_keys": True}
each_kernel = pytest.mark.parametrize("kernel", list(KERNELS))
each_variant = pytest.mark.parametrize("options", [{}, SCALED], ids=["published", "at scale"])


def small(kernel="gaussian", persistent="gaussian", **options):
    torch.manual_seed(0)
    config = replace(SMALL, kernel=kernel, persistent_kernel=persistent, **options)
    return Mosaic(config).double().eval()


def some_tokens(batch, length):
    return torch.randint(23, (batch, length), generator=torch.Generator().manual_seed(4))


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
    """65,536 steps squared would be 16 GiB."""
    decay = torch.tensor([1.0], requires_grad=True)
    x = torch.ones(1, 1, 65_536, 1, requires_grad=True)
    y = leaky_sum(x, decay)[0, 0, -1, 0]
    assert_close(y.item(), 1 / (1 - math.exp(-1)), rtol=1e-6, atol=0)
    y.backward()
    assert_close(decay.grad.item(), -math.exp(-1) / (1 - math.exp(-1)) ** 2, rtol=1e-6, atol=0)
    assert_close(x.grad[0, 0, -30:, 0], torch.exp(-torch.arange(29.0, -1, -1)))


def test_leaky_sum_keeps_float32_under_autocast():
    decay, x = torch.tensor([0.1]), torch.randn(1, 1, 300, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(leaky_sum(x, decay), leaky_sum(x.double(), decay.double()).float())


def gated_sequential(x, gate, decay):
    y, state = [], torch.zeros_like(x[:, :, 0])
    for t in range(x.shape[2]):
        state = torch.exp(-decay[..., t, None]) * state + torch.exp(gate[..., t, None]) * x[:, :, t]
        y.append(state)
    return torch.stack(y, 2)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 64, 99])
def test_gated_sum_is_the_recurrence_with_its_gradients(length):
    x = torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True)
    gate = (2 * torch.randn(2, 3, length, dtype=torch.float64)).requires_grad_()
    strength = torch.tensor([0.01, 1, 40], dtype=torch.float64)[:, None]
    decay = (strength * torch.rand(2, 3, length, dtype=torch.float64)).requires_grad_()
    pull = torch.randn(2, 3, length, 4, dtype=torch.float64)
    expected = gated_sequential(x, gate, decay)
    y, m = gated_sum(x, gate, decay, chunk=4)
    got = y * torch.exp(m)[..., None]
    assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((got * pull).sum(), (x, gate, decay)),
        torch.autograd.grad((expected * pull).sum(), (x, gate, decay)),
        strict=True,
    ):
        assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("level", [0, -400])
def test_gated_sum_takes_gates_and_decays_of_any_size(level):
    """In float32 e^89 is infinite; a decay of 10⁴ beside one of 10⁻³ must not blur it."""
    x = torch.randn(1, 2, 300, 3)
    gate = level + 150 * torch.randn(1, 2, 300).sin()
    decay = torch.where(torch.rand(1, 2, 300) < 0.1, 1e4, 1e-3)
    y, m = gated_sum(x, gate, decay)
    expected = gated_sequential(x.double(), gate.double(), decay.double())
    # The square of e^−400 is 0 in float64, too.
    largest = expected.abs().amax(-1, keepdim=True)
    assert_close(F.normalize(y, dim=-1), F.normalize(expected / largest, dim=-1).float(), rtol=0, atol=1e-4)
    size = (expected / largest).norm(dim=-1).log() + largest[..., 0].log()
    assert_close(y.norm(dim=-1).log() + m, size.float(), rtol=1e-5, atol=1e-4)


def test_gated_sum_is_the_leaky_sum_over_many_steps():
    x = torch.randn(1, 2, 65_536, 1, dtype=torch.float64)
    decay = torch.tensor([0.02, 3.0], dtype=torch.float64, requires_grad=True)
    constant = decay[None, :, None].expand(1, 2, 65_536)
    y, m = gated_sum(x, torch.zeros_like(constant), constant)
    expected = leaky_sum(x, decay)
    assert_close(y, expected)
    assert_close(m, torch.zeros_like(m))
    pull = torch.randn_like(y)
    (mine,) = torch.autograd.grad((y * pull).sum(), decay)
    (theirs,) = torch.autograd.grad((expected * pull).sum(), decay)
    assert_close(mine, theirs)


@each_variant
@each_kernel
def test_logits_depend_on_the_past_only(kernel, options):
    model = small(kernel, **options)
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


@each_variant
def test_contextual_memory_is_its_formula(options):
    memory = ContextualMemory(replace(SMALL, **options)).double()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    k_raw = memory.keys.project(x).view(6, 3, 4)
    u = memory.values.project(x).view(6, 3, 4)
    y = torch.zeros(6, 3, 4, dtype=torch.float64)
    for h in range(3):
        if options:
            gate = torch.exp(x[0] @ memory.keys.gate.weight[h])
            fade = torch.exp(-(x[0] @ memory.keys.fade.weight[h]).abs())
            total = memory.bandwidth.log_scale[h].exp() ** 0.5
            growing = torch.sigmoid(memory.bandwidth.share[h]) * total
            power = torch.sigmoid(memory.bandwidth.power[h])
            beta = [growing * n**power + total - growing for n in range(1, 6)]
        else:
            gate = torch.ones(6, dtype=torch.float64)
            fade = torch.exp(-10 * memory.keys.leak[h].abs()).expand(6)
            beta = [torch.exp(10 * memory.bandwidth.sharpness[h])] * 5
        c = memory.values.mix[h]
        k, v, average = [], [], torch.zeros(4, dtype=torch.float64)
        for t in range(6):
            average = gate[t] * k_raw[t, h] + fade[t] * average
            k.append(F.normalize(average, dim=0))
        for t in range(5):
            unit = F.normalize(c * u[t, h] + (1 - c) * u[t + 1, h], dim=0)
            v.append(unit * torch.exp(10 * memory.values.gain[h]))
        for t in range(1, 6):
            w = torch.softmax(torch.stack([beta[t - 1] ** 2 * k[t] @ k[i] for i in range(t)]), 0)
            y[t, h] = sum(w[i] * v[i] for i in range(t))
    assert_close(memory(x)[0], memory.output(y.flatten(1)))


@each_kernel
def test_persistent_memory_is_its_formula(kernel):
    memory = PersistentMemory(replace(SMALL, persistent_kernel=kernel)).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    k = memory.keys(x)
    beta = torch.exp(10 * memory.bandwidth.sharpness)[:, None, None]
    w = weights(k @ memory.stored_keys.mT, kernel, scale=beta**2)
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


# ---- reading on from a state ---------------------------------------------------------------------


def read_on(model, tokens):
    """The logits of ``step``, one token after the other, and the state after them."""
    logits, state = [], model.initial_state(len(tokens))
    for column in tokens.unbind(1):
        now, state = model.step(column, state)
        logits.append(now)
    return torch.stack(logits, 1), state


@each_variant
@each_kernel
def test_steps_give_the_logits_of_the_parallel_form(kernel, options):
    model = small(kernel, persistent=kernel, **options)
    tokens = some_tokens(2, 37)
    assert_close(read_on(model, tokens)[0], model(tokens), rtol=0, atol=1e-11)
    model.float()
    assert_close(read_on(model, tokens[:, :25])[0], model(tokens[:, :25]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bandwidth", ["learned", "ssmax", "asentmax"])
def test_other_bandwidths_agree_in_both_forms(bandwidth):
    model = small("sparsemax", bandwidth=bandwidth)
    tokens = some_tokens(2, 20)
    assert not torch.allclose(model(tokens), small("sparsemax", **SCALED)(tokens))
    assert_close(read_on(model, tokens)[0], model(tokens), rtol=0, atol=1e-11)


@each_variant
@pytest.mark.parametrize("length", [1, 2, 33, 69])
def test_prefill_leaves_the_state_that_steps_leave(length, options):
    model = small("biweight", **options)
    tokens = some_tokens(3, 70)
    steps, stepped = read_on(model, tokens[:, :length])
    logits, state = model.prefill(tokens[:, :length])
    assert_close(logits, steps[:, -1], rtol=0, atol=1e-11)
    for (a, p), (b, q) in zip(state, stepped, strict=True):
        assert len(a.pairs) == length - 1
        assert_close((a.pairs.keys, a.pairs.values), (b.pairs.keys, b.pairs.values), rtol=1e-9, atol=1e-11)
        assert_close((a.key, a.value, a.keys, p), (b.key, b.value, b.keys, q), rtol=1e-9, atol=1e-11)
    rest, _ = model.prefill(tokens[:, length:], state)
    assert_close(rest, model(tokens)[:, -1], rtol=0, atol=1e-11)


def test_steps_agree_under_gates_of_any_size():
    model = small(gated_keys=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p.mul_(60)
    tokens = some_tokens(2, 20)
    assert_close(read_on(model, tokens)[0], model(tokens), rtol=0, atol=1e-11)


def test_a_value_waits_for_the_token_after_it():
    """With mix = 0 a value is all about the next position."""
    memory = ContextualMemory(SMALL).double()
    torch.nn.init.zeros_(memory.values.mix)
    x = torch.randn(1, 3, 12, dtype=torch.float64)
    with torch.no_grad():
        y, state = memory.extend(x[:, :1], memory.initial_state(1))
        assert_close(y, torch.zeros_like(y))
        assert len(state.pairs) == 0
        _, state = memory.extend(x[:, 1:], state)
    u = memory.values.project(x).view(3, 3, 4).transpose(0, 1)
    assert_close(state.pairs.values[0], F.normalize(u[:, 1:], dim=-1) * math.exp(-0.5))
    assert_close(state.pairs.keys, memory.keys(x)[:, :, :-1])


def test_ties_at_the_kth_key_are_all_kept_in_both_forms():
    """Keys from ± four orthogonal rows of ±½, and no average: equal scores are equal to the last bit."""
    memory = ContextualMemory(replace(SMALL, heads=1, width=4, kernel="knn_gaussian?k=2")).double()
    with torch.no_grad():
        memory.keys.leak.fill_(1e3)
        memory.keys.project.weight.copy_(torch.eye(4))
        rows = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).double()
        x = torch.cat((rows, -rows))[torch.randint(8, (2, 30))]
        state, y = memory.initial_state(2), []
        for t in range(30):
            y_t, state = memory.extend(x[:, t : t + 1], state)
            y.append(y_t)
        parallel = memory(x)
        assert_close(torch.cat(y, 1), parallel, rtol=0, atol=1e-12)
        # The definition; and more than k keys were kept often enough.
        k, v = x / 2, memory.values(x)[:, 0]
        ties = 0
        for t in range(1, 30):
            s = k[:, t, None] @ k[:, :t].mT
            kept = s >= s.topk(min(2, t)).values[..., -1:]
            ties += int((kept.sum(-1) > 2).sum())
            w = torch.softmax((math.e**2 * s).masked_fill(~kept, -torch.inf), -1)
            assert_close(parallel[:, t], memory.output((w @ v[:, :t])[:, 0]))
    assert ties > 20


def test_storing_a_pair_rarely_moves_the_others():
    model = small()
    state, places = model.initial_state(1), set()
    for _ in range(200):
        _, state = model.step(torch.zeros(1, dtype=torch.long), state)
        places.add(state[0][0].pairs._buffer.shape)
    assert len(places) <= 6


@pytest.mark.parametrize("kernel", ["gaussian", "biweight"])
def test_a_copied_state_goes_its_own_way(kernel):
    model = small(kernel)
    tokens = some_tokens(1, 30)
    _, state = model.prefill(tokens[:, :20])
    other = copy.deepcopy(state)
    model.prefill((tokens[:, 20:] + 1) % 23, state)
    assert_close(model.prefill(tokens[:, 20:], other)[0], model(tokens)[:, -1], rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="deepcopy it first"):
        model.step(tokens[:, 20], state)


engine = pytest.mark.skipif(not cpu.info()["built"], reason="the CPU engine is not built")


@engine
@each_variant
@pytest.mark.parametrize("kernel", ["sparsemax", "biweight", "relumax", "uniform?radius=0.3"])
def test_steps_from_a_memory_are_the_parallel_form(kernel, options):
    """Over chunks that are coded, the last one unfinished; in float32 as near as the parallel form itself."""
    model, length = small(kernel, **options), 2500
    tokens = some_tokens(2, length + 4)
    with torch.no_grad():
        expected = model(tokens)[:, length - 1 :]
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        first, state = model.prefill(tokens[:, :length])
        rows = torch.tensor([1, 0])
        state = [(stored.select(rows), tuple(k[rows] for k in keys)) for stored, keys in state]
        logits = [first.flip(0)]
        for column in tokens[:, length:].flip(0).unbind(1):
            now, state = model.step(column, state)
            logits.append(now)
        with torch.no_grad():
            parallel = model(tokens)[:, length - 1 :].double() - expected
        error = torch.stack(logits, 1).flip(0).double() - expected
        assert error.abs().max() < 3 * parallel.abs().max() + 1e-12
        memories = [stored.pairs for stored, _ in state]
        assert all(type(m) is KeyValueMemory and len(m) == length + 3 for m in memories)


@engine
def test_a_memory_is_for_compact_kernels_without_gradients():
    tokens = some_tokens(1, 40)
    for kernel, kind in (("gaussian", Pairs), ("biweight", KeyValueMemory)):
        model = small(kernel)
        assert type(model.prefill(tokens)[1][0][0].pairs) is kind
        assert type(model.extend(tokens, model.initial_state(1))[1][0][0].pairs) is Pairs
        for block in model.blocks:
            block.mixer.dropout.p = 0.5
        assert type(model.train().prefill(tokens)[1][0][0].pairs) is Pairs


@engine
def test_gradients_flow_after_what_was_read_without():
    model = small("biweight")
    tokens = some_tokens(2, 60)
    gradients = []
    for last in (0, 1):
        state = model.initial_state(2)
        with torch.no_grad():
            _, state = model.extend(tokens[:, :40], state)
            if last == 0:
                state = [(replace(s, pairs=Pairs(s.pairs.keys, s.pairs.values)), keys) for s, keys in state]
        x, _ = model.extend(tokens[:, 40:], state)
        model.zero_grad()
        x.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-11)
    assert len(gradients[0]) > 10


def peak_memory():
    """In bytes, since this process started."""
    resource = pytest.importorskip("resource")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@engine
def test_a_sparse_kernel_reads_65536_tokens_in_little_memory():
    """All scores of one head in one layer would take 16 GiB."""
    model = Mosaic(replace(SMALL, layers=1, heads=1, width=8, kernel="biweight")).eval()
    tokens = torch.randint(23, (1, 65_536))
    before = peak_memory()
    with torch.no_grad():
        logits = model(tokens)[:, -1]
    assert peak_memory() - before < 2**30
    _, state = model.prefill(tokens[:, :-1])
    assert_close(model.step(tokens[:, -1], state)[0], logits, rtol=0, atol=1e-5)


# ---- writing -------------------------------------------------------------------------------------


def test_greedy_generation_is_the_argmax_of_the_whole_prefix():
    model = small("biweight")
    prompt = some_tokens(3, 5)
    written = generate(model, prompt, 12, temperature=0)
    whole = torch.cat((prompt, written), 1)
    assert_close(written, model(whole)[:, 4:-1].argmax(-1))
    assert_close(generate(model, prompt, 12, temperature=5, top_k=1), written)
    assert generate(model, prompt, 0).shape == (3, 0)


def test_generation_follows_its_seed():
    model = small()

    def write(seed):
        return generate(model, some_tokens(2, 3), 20, generator=torch.Generator().manual_seed(seed))

    assert_close(write(1), write(1), rtol=0, atol=0)
    assert not torch.equal(write(1), write(2))


class Fixed:
    """A model of one distribution, whatever it reads."""

    def __init__(self, logits):
        self.logits = torch.tensor(logits)

    def prefill(self, tokens):
        return self.logits.expand(len(tokens), -1), None

    def step(self, tokens, state):
        return self.logits.expand(len(tokens), -1), None


@pytest.mark.parametrize(
    ("temperature", "top_k", "kept"),
    [(1.0, None, 4), (0.5, None, 4), (2.0, 2, 3), (1.0, 9, 4), (1e-30, None, 1)],
)
def test_draws_have_the_frequencies_of_the_softmax(temperature, top_k, kept):
    """The second and third logit are equal: a tie at the 2nd place."""
    logits = [1.0, 0.0, 0.0, -0.5]
    draws = generate(Fixed(logits), torch.zeros(20_000, 1, dtype=torch.long), 2, temperature, top_k)
    z = torch.tensor(logits).double() / temperature
    p = torch.softmax(torch.where(torch.arange(4) < kept, z, -torch.inf), 0)
    for column in draws.unbind(1):
        assert_close(torch.bincount(column, minlength=4) / 20_000, p.float(), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, "prompt must be"),
        ({"prompt": torch.zeros(4, dtype=torch.long)}, "prompt must be"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_k": 0}, "top_k must be at least 1"),
    ],
)
def test_a_wrong_wish_says_so(wrong, message):
    arguments = {"prompt": torch.zeros(1, 1, dtype=torch.long), "max_tokens": 1, **wrong}
    with pytest.raises(ValueError, match=message):
        generate(Fixed([0.0]), **arguments)


# ---- training ------------------------------------------------------------------------------------


@each_variant
@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "relumax", "knn_gaussian?k=3"])
def test_every_parameter_gets_a_gradient(kernel, options):
    model = small(kernel, persistent=kernel, **options)
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
        ({"bandwidth": "wide"}, "unknown bandwidth 'wide'; known: published, fixed"),
    ],
)
def test_a_wrong_config_says_so(wrong, message):
    with pytest.raises(ValueError, match=message):
        MosaicConfig(**wrong)

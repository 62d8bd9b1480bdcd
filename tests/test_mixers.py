"""Sequence mixers: two forms of each, against published code, causality, lengths, and the models of them."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from parzen.models.gla import GLA
from parzen.models.h3 import H3
from parzen.models.mamba import Mamba
from parzen.models.retnet import RetNet
from parzen.models.s4 import S4D, DiagonalSSM
from parzen.models.scan import (
    causal_convolution,
    decayed_attention,
    decayed_attention_step,
    selective_scan,
)
from parzen.models.sequence import MIXERS, SequenceConfig, SequenceModel
from parzen.models.transformer import CausalAttention
from parzen.nn import POSITIONS, rotate

WIDTH = 12
MAKE = {
    "s4": lambda: S4D(WIDTH, state=8),
    "h3": lambda: H3(WIDTH, state=8),
    "retnet": lambda: RetNet(WIDTH, heads=2),
    "gla": lambda: GLA(WIDTH, heads=2),
    "mamba": lambda: Mamba(WIDTH, state=5),
    "transformer": lambda: CausalAttention(WIDTH, heads=2),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
each_mixer = pytest.mark.parametrize("name", list(MAKE))


def recur(mixer, x):
    """The output of ``step``, one position after the other."""
    y, state = [], mixer.initial_state(len(x))
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, state)
        y.append(y_t)
    return torch.stack(y, 1)


def gradients(y, sources):
    pull = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * pull).sum(), sources)


# ---- the two forms -------------------------------------------------------------------------------


@each_mixer
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("length", [1, 2, 9, 131])
def test_parallel_and_recurrent_forms_agree_with_their_gradients(name, dtype, length):
    mixer = MAKE[name]().to(dtype)
    x = torch.randn(2, length, WIDTH, dtype=dtype, requires_grad=True)
    sources = {"x": x, **dict(mixer.named_parameters())}
    parallel, steps = mixer(x), recur(mixer, x)
    tolerance = TOLERANCE[dtype]
    assert_close(parallel, steps, rtol=tolerance, atol=tolerance)
    for source, mine, theirs in zip(
        sources,
        gradients(parallel, list(sources.values())),
        gradients(steps, list(sources.values())),
        strict=True,
    ):
        # Long sums: the error is measured against the largest entry.
        size = max(1.0, theirs.abs().max().item())
        assert_close(mine / size, theirs / size, rtol=0, atol=tolerance, msg=lambda m, s=source: f"{s}: {m}")


@pytest.mark.parametrize("positions", list(POSITIONS))
@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "relumax", "knn_gaussian?k=3"])
def test_attention_agrees_with_its_steps(kernel, positions):
    mixer = CausalAttention(WIDTH, heads=3, kernel=kernel, positions=positions).double()
    x = torch.randn(2, 19, WIDTH, dtype=torch.float64)
    assert_close(mixer(x), recur(mixer, x), rtol=1e-10, atol=1e-10)


@each_mixer
def test_outputs_depend_on_the_past_and_present_only(name):
    mixer = MAKE[name]().double()
    x = torch.randn(2, 70, WIDTH, dtype=torch.float64)
    before = mixer(x)
    for t in (0, 1, 8, 64, 69):
        changed = x.clone()
        changed[:, t] += torch.randn(2, WIDTH, dtype=torch.float64)
        after = mixer(changed)
        assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        for u in range(t, min(t + 3, 70)):
            assert (after[:, u] - before[:, u]).abs().max() > 1e-9, f"{u} does not see {t}"


@each_mixer
@pytest.mark.parametrize("length", [1, 67, 4096])
def test_float32_stays_near_float64_at_any_length(name, length):
    mixer = MAKE[name]()
    x = 3 * torch.randn(1, length, WIDTH)
    x.requires_grad_()
    y = mixer(x)
    exact = copy.deepcopy(mixer).double()(x.detach().double())
    assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    assert x.grad.isfinite().all()
    for parameter in mixer.parameters():
        assert parameter.grad.isfinite().all()


@each_mixer
def test_mixed_precision_stays_near_single(name):
    mixer = MAKE[name]()
    x = torch.randn(2, 40, WIDTH)
    exact = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)
    assert_close(y.float(), exact, rtol=0.05, atol=0.03)
    y.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


# ---- against published code ----------------------------------------------------------------------


def fixture(name, dtype=torch.float32):
    """The recorded numbers, by group and name; their origin is in the file, under "source"."""
    text = (Path(__file__).parent / "fixtures" / "mixers" / f"{name}.json").read_text(encoding="utf-8")
    groups = json.loads(text)
    assert groups.pop("source")
    return {
        group: {k: torch.tensor(v) if k == "tokens" else torch.tensor(v, dtype=dtype) for k, v in t.items()}
        for group, t in groups.items()
    }


def test_s4d_is_the_published_one():
    data = fixture("s4", torch.float64)
    w = data["weights"]
    mixer = S4D(3, state=8).double()
    mixer.load_state_dict(
        {
            "ssm.log_step": w["kernel.log_dt"],
            "ssm.log_damping": w["kernel.log_A_real"],
            "ssm.frequency": w["kernel.A_imag"],
            "ssm.read": w["kernel.C"],
            "ssm.skip": w["D"],
            "output.weight": w["output_linear.0.weight"].squeeze(-1),
            "output.bias": w["output_linear.0.bias"],
        }
    )
    x = data["inputs"]["x"].requires_grad_()
    y = mixer(x)
    assert_close(y, data["outputs"]["y"], rtol=1e-12, atol=1e-12)
    taps = mixer.ssm.taps(37) - F.pad(mixer.ssm.skip[:, None], (0, 36))
    assert_close(taps, data["outputs"]["kernel"], rtol=1e-12, atol=1e-12)
    got = gradients(y, [x, mixer.ssm.log_step, mixer.ssm.frequency])
    for mine, theirs in zip(got, data["gradients"].values(), strict=True):
        assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_h3_is_the_published_one():
    data = fixture("h3")
    w = data["weights"]
    both = torch.view_as_complex(w["kernel.kernel.B"]) * torch.view_as_complex(w["kernel.kernel.C"][0])
    shift = w["ssm_k_kernel.kernel.C"][0].clone()
    assert_close(w["ssm_k_kernel.kernel.B"], F.one_hot(torch.zeros(3, dtype=torch.long), 8).float())
    shift[:, 0] += w["ssm_k_D"]
    mixer = H3(3, state=8)
    mixer.load_state_dict(
        {
            "shift": shift,
            "input.weight": torch.cat([w[f"{p}_proj.weight"] for p in "qkv"]),
            "input.bias": torch.cat([w[f"{p}_proj.bias"] for p in "qkv"]),
            "ssm.log_step": w["kernel.kernel.log_dt"],
            "ssm.log_damping": w["kernel.kernel.inv_A_real"],
            "ssm.frequency": w["kernel.kernel.A_imag"],
            "ssm.read": torch.view_as_real(both),
            "ssm.skip": w["D"],
            "output.weight": w["output_linear.weight"],
            "output.bias": w["output_linear.bias"],
        }
    )
    assert_close(mixer(data["inputs"]["x"]), data["outputs"]["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [2, 8, 64])
def test_retention_is_the_published_one(chunk):
    data = fixture("retnet")
    q, k, v = data["inputs"].values()
    log_decay = RetNet(8, heads=2).log_decay()[..., None]
    o = decayed_attention(q * q.shape[-1] ** -0.5, k, v, log_decay, chunk)
    assert_close(o, data["outputs"]["o"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [2, 8, 16])
def test_gated_linear_attention_is_the_published_one(chunk):
    data = fixture("gla")
    q, k, v, log_decay = data["inputs"].values()
    q = q * q.shape[-1] ** -0.5
    o = decayed_attention(q, k, v, log_decay, chunk)
    assert_close(o, data["outputs"]["o"], rtol=1e-5, atol=1e-5)
    state = torch.zeros_like(data["outputs"]["state"])
    for t in range(q.shape[2]):
        o_t, state = decayed_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], log_decay[:, :, t], state)
    assert_close(o_t, data["outputs"]["o"][:, :, -1], rtol=1e-5, atol=1e-5)
    assert_close(state, data["outputs"]["state"], rtol=1e-5, atol=1e-5)


def test_mamba_is_the_published_one():
    data = fixture("mamba")
    w = data["weights"]
    norms = [nn.RMSNorm(6, eps=1e-5) for _ in range(3)]
    mixers = [Mamba(6, state=4, rank=2) for _ in range(2)]
    for norm, name in zip(norms, ("layers.0.norm", "layers.1.norm", "norm_f"), strict=True):
        norm.load_state_dict({"weight": w[f"{name}.weight"]})
    names = {
        "input.weight": "in_proj.weight",
        "conv_weight": "conv1d.weight",
        "conv_bias": "conv1d.bias",
        "select.weight": "x_proj.weight",
        "step_weight": "dt_proj.weight",
        "step_bias": "dt_proj.bias",
        "log_a": "A_log",
        "skip": "D",
        "output.weight": "out_proj.weight",
    }
    for i, mixer in enumerate(mixers):
        state = {mine: w[f"layers.{i}.mixer.{theirs}"] for mine, theirs in names.items()}
        mixer.load_state_dict({**state, "conv_weight": state["conv_weight"].squeeze(1)})
    for forms in (lambda m, x: m(x), recur):
        x = w["embeddings.weight"][data["inputs"]["tokens"]]
        for norm, mixer in zip(norms, mixers, strict=False):
            x = x + forms(mixer, norm(x))
        assert_close(norms[-1](x), data["outputs"]["y"], rtol=1e-5, atol=1e-5)


# ---- the layers around them, from their formulas -------------------------------------------------


def test_retnet_is_its_formula():
    mixer = RetNet(WIDTH, heads=2).double()
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64)
    o = []
    for h in range(2):
        gamma = 1 - 2.0 ** (-5 - h)
        q, k = (
            rotate(project(x[0])[:, 6 * h : 6 * h + 6], torch.arange(9))
            for project in (mixer.query, mixer.key)
        )
        v = mixer.value(x[0])[:, 12 * h : 12 * h + 12]
        rows = [sum(gamma ** (t - i) * (q[t] @ k[i]) * v[i] for i in range(t + 1)) for t in range(9)]
        o.append(F.layer_norm(torch.stack(rows) / math.sqrt(6), (12,)))
    y = mixer.output(F.silu(mixer.gate(x[0])) * torch.cat(o, 1))
    assert_close(mixer(x)[0], y)


def test_gla_is_its_formula():
    mixer = GLA(WIDTH, heads=1).double()
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64)
    alpha = torch.sigmoid(mixer.decay(x[0])) ** (1 / 16)
    q, k, v = mixer.query(x[0]), mixer.key(x[0]), mixer.value(x[0])
    state, o = torch.zeros(6, 12, dtype=torch.float64), []
    for t in range(9):
        state = alpha[t][:, None] * state + torch.outer(k[t], v[t])
        o.append(q[t] @ state / math.sqrt(6))
    y = mixer.output(F.silu(mixer.gate(x[0])) * F.layer_norm(torch.stack(o), (12,)))
    assert_close(mixer(x)[0], y)


def test_state_spaces_start_as_published():
    ssm = DiagonalSSM(500)
    assert ssm.frequency.shape == (500, 32)
    assert_close(ssm.frequency[3], math.pi * torch.arange(32.0))
    assert_close(ssm.log_damping.exp(), torch.full((500, 32), 0.5))
    assert_close(ssm.read.square().sum(-1).mean().item(), 1.0, rtol=0.05, atol=0)
    log_step = ssm.log_step.detach()
    assert math.log(1e-3) <= log_step.min() < math.log(1.2e-3)
    assert math.log(0.8e-1) < log_step.max() <= math.log(1e-1)
    mamba = Mamba(100)
    step = F.softplus(mamba.step_bias)
    assert 1e-3 <= step.min() < step.max() <= 0.1 + 1e-6
    assert_close(mamba.log_a[7].exp(), torch.arange(1.0, 17))


# ---- the scans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 13, 64, 101])
@pytest.mark.parametrize("count", [1, 5, 150])
def test_convolution_is_the_sum(length, count):
    x = torch.randn(2, length, 3, dtype=torch.float64)
    taps = torch.randn(3, count, dtype=torch.float64)
    y = torch.zeros_like(x)
    for t in range(length):
        for j in range(min(t + 1, count)):
            y[:, t] += taps[:, j] * x[:, t - j]
    assert_close(causal_convolution(x, taps), y, rtol=1e-12, atol=1e-12)


def attend_slowly(q, k, v, log_decay):
    state, o = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        o_t, state = decayed_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], log_decay[:, :, t], state)
        o.append(o_t)
    return torch.stack(o, 2)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_decays_of_any_strength_are_exact_and_so_are_gradients(dtype):
    q, k = torch.randn(2, 2, 3, 50, 4, dtype=dtype).unbind()
    v = torch.randn(2, 3, 50, 5, dtype=dtype)
    strength = torch.tensor([0.0, 1e-3, 1.0, 15.0, 30.0, 200.0, 1e4], dtype=dtype)
    log_decay = -strength[torch.randint(7, q.shape)]
    sources = [z.requires_grad_() for z in (q, k, v, log_decay)]
    got, expected = decayed_attention(*sources), attend_slowly(*sources)
    tolerance = TOLERANCE[dtype]
    assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(gradients(got, sources), gradients(expected, sources), strict=True):
        assert_close(mine, theirs, rtol=tolerance, atol=5 * tolerance)


def test_half_precision_is_computed_in_single():
    q, k, v = torch.randn(3, 1, 2, 100, 8, dtype=torch.bfloat16).unbind()
    log_decay = -torch.rand(1, 2, 100, 8, dtype=torch.bfloat16)
    y = decayed_attention(q, k, v, log_decay)
    exact = decayed_attention(*(z.double() for z in (q, k, v, log_decay)))
    assert y.dtype == torch.bfloat16
    assert_close(y, exact.bfloat16(), rtol=1e-2, atol=1e-6)


def scan_slowly(u, step, A, B, C):
    h, y = u.new_zeros(len(u), *A.shape), []
    for t in range(u.shape[1]):
        x = (step[:, t] * u[:, t])[..., None] * B[:, t, None]
        h = torch.exp(step[:, t, :, None] * A) * h + x
        y.append((h * C[:, t, None]).sum(-1))
    return torch.stack(y, 1)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("length", [1, 4, 23])
def test_selective_scan_is_the_recurrence_with_its_gradients(length, chunk):
    u, step, B, C = (torch.randn(2, length, n, dtype=torch.float64) for n in (3, 3, 5, 5))
    A = -torch.rand(3, 5, dtype=torch.float64) * 4
    sources = [z.requires_grad_() for z in (u, step.exp(), A, B, C)]
    got, expected = selective_scan(*sources, chunk), scan_slowly(*sources)
    assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(got, sources), gradients(expected, sources), strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


NARROW = {
    "s4": lambda: S4D(2, state=2),
    "h3": lambda: H3(2, state=2),
    "retnet": lambda: RetNet(2, heads=1),
    "gla": lambda: GLA(2),
    "mamba": lambda: Mamba(2, state=2),
}


@pytest.mark.parametrize("name", list(NARROW))
def test_nothing_is_quadratic(name):
    """100,000 steps squared would be 37 GiB."""
    with torch.no_grad():
        assert NARROW[name]()(torch.ones(1, 100_000, 2)).isfinite().all()


# ---- the models ----------------------------------------------------------------------------------

each_model = pytest.mark.parametrize("mixer", list(MIXERS))


def small(mixer, **options):
    return SequenceModel(SequenceConfig(20, 16, 2, mixer, 2, dropout=0.0, **options))


@each_model
def test_models_see_the_past_only_and_every_parameter_learns(mixer):
    model = small(mixer).double()
    tokens = torch.randint(20, (3, 40))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 20
    after = model(changed)
    assert logits.shape == (3, 40, 20)
    assert_close(after[:, :25], logits[:, :25], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 25], logits[:, 25])
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@each_model
def test_models_learn_to_copy_the_token_before(mixer):
    model = SequenceModel(SequenceConfig(20, 32, 2, mixer, 2, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    for _ in range(150):
        tokens = torch.randint(20, (16, 12))
        loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < math.log(20) - 1


@each_model
def test_weights_start_as_in_the_benchmark(mixer):
    model = SequenceModel(SequenceConfig(500, 128, 8, mixer, 2))
    assert_close(model.embedding.weight.std().item(), 0.02, rtol=0.02, atol=0)
    outputs = [m for name, m in model.named_modules() if name.endswith(".output")]
    assert len(outputs) == (8 if mixer == "mamba" else 16)
    for output in outputs:
        assert_close(output.weight.std().item(), 0.02 / 4, rtol=0.05, atol=0)
    others = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in outputs]
    for linear in others:
        assert_close(linear.weight.std().item(), 0.02, rtol=0.1, atol=0)
    for linear in [*others, *outputs]:
        assert linear.bias is None or not linear.bias.any()


def test_learned_positions_end():
    model = small("transformer", max_length=8)
    model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="8 positions were learned, got 9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.long))
    small("transformer", positions="nape", max_length=8)(torch.zeros(1, 9, dtype=torch.long))
    small("gla", max_length=8)(torch.zeros(1, 9, dtype=torch.long))


def test_positions_and_dropout_matter():
    same = torch.full((1, 6), 3)
    logits = small("transformer")(same)
    assert not torch.allclose(logits[:, 1], logits[:, 4])
    logits = small("transformer", positions="none")(same)
    assert_close(logits[:, 1], logits[:, 4])
    model = SequenceModel(SequenceConfig(20, 16, 2, "gla", dropout=0.5))
    assert not torch.allclose(model(same), model(same))
    model.eval()
    assert_close(model(same), model(same), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SequenceConfig(20, mixer="lstm"), "unknown mixer 'lstm'; known: transformer"),
        (lambda: SequenceConfig(20, positions="far"), "unknown positions 'far'; known: learned, none"),
        (lambda: SequenceConfig(20, layers=0), "layers must be at least 1"),
        (lambda: SequenceConfig(20, dropout=1.0), r"dropout must be in \[0, 1\)"),
        (lambda: RetNet(10, heads=3), "heads must divide width"),
        (lambda: GLA(10, heads=2), "heads must divide width/2"),
        (lambda: DiagonalSSM(4, 7), "state must be even"),
        (lambda: DiagonalSSM(4, step=(0.1, 0.01)), "step must be an interval"),
    ],
)
def test_wrong_sizes_say_so(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()

"""Moving models over: convert, anneal, match."""

import copy
import functools
import itertools
import pickle
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import parzen
from parzen.convert import Attention, layers
from parzen.kernels import kernel
from parzen.nn import anneal, convert, match, restore

D, HEADS, T = 16, 4, 7


class Plain(nn.Module):
    """A causal layer as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def mha(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(D, HEADS, **options)


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["grad", "no grad"])
def grad(request):
    with torch.set_grad_enabled(request.param == "grad"):
        yield


# ---- convert -------------------------------------------------------------------------------------

MHA = {
    "batch first": {"batch_first": True},
    "sequence first": {},
    "no bias": {"bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero": {"add_zero_attn": True, "batch_first": True},
    "widths": {"kdim": D, "vdim": D - 3, "batch_first": True},
}


@pytest.mark.parametrize("options", MHA.values(), ids=MHA)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.usefixtures("grad")
def test_multihead_attention_with_the_gaussian_is_unchanged(options, train, need_weights):
    module = mha(**options).train(train)
    x = batch(2, T) if module.batch_first else batch(T, 2)
    value = x[..., : module.vdim]
    if value.shape == x.shape:
        value = x
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    calls = [{}, {"attn_mask": mask}, {"attn_mask": mask, "average_attn_weights": False}]
    if module.batch_first:
        padding = torch.zeros(2, T, dtype=torch.bool)
        padding[1, T - 2 :] = True
        calls += [{"key_padding_mask": padding}, {"key_padding_mask": padding, "attn_mask": mask}]
    before = [module(x, x, value, need_weights=need_weights, **call) for call in calls]
    keys = set(module.state_dict())
    assert convert(module, "gaussian") == ("",)
    assert set(module.state_dict()) == keys
    for call, (y, w) in zip(calls, before, strict=True):
        got, weights = module(x, x, value, need_weights=need_weights, **call)
        assert_close(got, y, atol=1e-6, rtol=1e-5)
        assert (weights is None) == (w is None)
        if w is not None:
            assert_close(weights, w, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("grad")
def test_multihead_attention_with_another_kernel():
    module = mha(batch_first=True).eval()
    x = batch(2, T)
    convert(module, "epanechnikov")
    got, weights = module(x, x, x, average_attn_weights=False)
    q, k, v = (
        y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for y in F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    )
    w = parzen.weights(q @ k.mT * (D // HEADS) ** -0.5, "sparsemax")
    assert_close(weights, w)
    assert_close(got, module.out_proj((w @ v).transpose(1, 2).flatten(2)), atol=1e-6, rtol=1e-5)
    assert_close(module(x[0], x[0], x[0])[1], w[0].mean(0))
    assert_close(module(x, x, x, None, False)[0], got, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.usefixtures("grad")
def test_no_layer_of_a_stack_takes_the_fused_path(train):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, 32, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2).train(train)
    x, padding = batch(2, T), torch.zeros(2, T, dtype=torch.bool)
    padding[1, T - 2 :] = True
    with warnings.catch_warnings():
        # torch's own fused layers go through its nested tensors, which it calls a prototype.
        warnings.simplefilter("ignore")
        softmax = stack(x, src_key_padding_mask=padding)
    assert convert(stack, "gaussian") == ("layers.0.self_attn", "layers.1.self_attn")
    same = stack(x, src_key_padding_mask=padding)
    kept = ~padding
    assert_close(same[kept], softmax[kept], atol=1e-5, rtol=1e-5)
    convert(stack, "epanechnikov")
    other = stack(x, src_key_padding_mask=padding)
    assert (other - softmax)[kept].abs().max() > 1e-3
    assert_close(stack(x[1:, : T - 2]), other[1:, : T - 2], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("grad")
def test_layers_that_call_torch_themselves():
    model = nn.Sequential(Plain(), nn.ReLU(), Plain())
    x = batch(2, T)
    softmax = model(x)
    assert convert(model, "gaussian") == ("0", "2")
    assert_close(model(x), softmax, atol=1e-6, rtol=1e-5)
    assert isinstance(model[0], Plain)
    convert(model, "biweight")
    layer = model[0]
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer.qkv(x).chunk(3, -1))
    y = parzen.attention(q, k, v, is_causal=True, kernel="biweight")
    assert_close(layer(x), layer.out(y.transpose(1, 2).flatten(2)))
    # Outside of the model nothing has changed.
    softmax = (q @ k.mT / (D // HEADS) ** 0.5).softmax(-1) @ v
    assert_close(F.scaled_dot_product_attention(q, k, v), softmax, atol=1e-6, rtol=1e-5)


def test_gradients_copies_and_state():
    model = nn.Sequential(Plain(), mha_layer())
    convert(model, "biweight")
    x = batch(2, T)
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    twin = copy.deepcopy(model)
    convert(twin, "gaussian")
    assert {a.kernel for a in layers(model).values()} == {kernel("biweight")}
    fresh = nn.Sequential(Plain(), mha_layer())
    fresh.load_state_dict(model.state_dict())
    convert(fresh, "biweight")
    assert_close(fresh(x), model(x))


class mha_layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = mha(batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


def test_compiled():
    model = nn.Sequential(Plain(), mha_layer()).eval()
    convert(model, "biweight")
    x = batch(2, T)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), model(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (nn.Linear(2, 2), "biweight", "Linear has no layer to convert"),
        (nn.Sequential(Plain()), "bisquare", "bisquare"),
    ],
)
def test_what_convert_refuses(model, name, message):
    with pytest.raises(ValueError, match=message):
        convert(model, name)


# ---- what a converted layer is -------------------------------------------------------------------


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def no_change(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@no_change
def decorated(q, k, v):
    return by_torch(q, k, v)


class Processor:
    """As in diffusers: an object that attends for a layer."""

    def __call__(self, q, k, v):
        return sdpa(q, k, v, is_causal=True)


TABLE = {"torch": by_torch}


class Layer(nn.Module):
    """``attend`` in one way or another; what is around it is the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Aliased(Layer):
    def attend(self, q, k, v):
        return sdpa(q, k, v, is_causal=True)


class LongPath(Layer):
    def attend(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHelper(Layer):
    def attend(self, q, k, v):
        return decorated(q, k, v)


class Static(Layer):
    @staticmethod
    def attend(q, k, v):
        return by_torch(q, k, v)


class Nested(Layer):
    def attend(self, q, k, v):
        def inner(scale=None):
            return next(sdpa(q, k, v, is_causal=True, scale=s) for s in (scale,))

        return inner()


class ByDefault(Layer):
    def attend(self, q, k, v, how=by_torch):
        return how(q, k, v)


class ByTable(Layer):
    def attend(self, q, k, v):
        return TABLE["torch"](q, k, v)


class ByProcessor(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def attend(self, q, k, v):
        return self.processor(q, k, v)


class ByPartial(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.how = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def attend(self, q, k, v):
        return self.how(q, k, v)


class Inherited(Aliased):
    def attend(self, q, k, v):
        return super().attend(q, k, v)


class Checkpointed(Layer):
    """Runs again in the backward, and there in a thread of autograd's."""

    reentrant = True

    def attend(self, q, k, v):
        return checkpoint(by_torch, q, k, v, use_reentrant=self.reentrant)


class CheckpointedAnew(Checkpointed):
    reentrant = False


WAYS = [
    Layer, Aliased, LongPath, ByHelper, Static, Nested, ByDefault, ByTable, ByProcessor, ByPartial, Inherited,
    Checkpointed, CheckpointedAnew,
]  # fmt: skip


class ByHand(Layer):
    """The same weights, and parzen called where the layer is written."""

    def attend(self, q, k, v):
        return parzen.attention(q, k, v, is_causal=True, kernel="biweight")


def passed(layer, x):
    """Output and gradients, of parameters and of ``x``."""
    x = x.clone().requires_grad_()
    output = layer(x)
    layer.zero_grad()
    output.square().sum().backward()
    return output, [p.grad for p in (x, *layer.parameters())]


@pytest.fixture(scope="module")
def expected():
    return passed(ByHand(), batch(2, T))


@pytest.mark.parametrize("way", WAYS)
def test_output_and_gradients_of_every_way_to_write_it(way, expected):
    layer, x, others = way(), batch(2, T), set(globals())
    before = passed(layer, x)
    assert convert(layer, "biweight") == ("",)
    assert isinstance(layer, way)
    assert_close(passed(layer, x), expected)
    assert (before[0] - expected[0]).abs().max() > 1e-2
    # In another thread.
    with ThreadPoolExecutor(1) as pool:
        assert_close(pool.submit(passed, layer, x).result(), expected)
    # A method of it, called directly.
    q, k, v = torch.randn(3, 1, HEADS, T, D // HEADS, requires_grad=True)
    assert_close(layer.attend(q, k, v), ByHand().attend(q, k, v))
    # Others of its class, and what it calls, are as they were.
    assert_close(passed(way(), x), before)
    assert_close(by_torch(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    # Converted twice it is converted once, and taken back it is what it was.
    names = set(globals())
    convert(layer, "gaussian")
    assert set(globals()) <= names
    assert_close(passed(layer, x), before)
    restore(layer)
    assert type(layer) is way
    assert vars(layer).keys() == vars(way()).keys()
    assert_close(passed(layer, x), before, atol=0, rtol=0)
    assert set(globals()) <= others


@pytest.mark.parametrize("way", WAYS)
def test_copied_saved_and_sent_to_another_process(way, expected, tmp_path):
    layer, x = way(), batch(2, T)
    convert(layer, "biweight")
    layer.parzen.gain = torch.ones(HEADS)
    torch.save(layer, tmp_path / "layer.pt")
    copies = [
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(tmp_path / "layer.pt", weights_only=False),
    ]
    for other in [*copies, copy.deepcopy(copies[2])]:
        assert isinstance(other, way)
        assert_close(passed(other, x), expected)
    # They go on alone.
    convert(copies[0], "gaussian")
    assert_close(passed(layer, x), expected)
    restore(copies[2])
    assert type(copies[2]) is way
    assert_close(passed(copies[2], x), passed(way(), x))


def test_in_a_process_that_is_started_anew(expected):
    layer = ByProcessor()
    convert(layer, "biweight")
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        output, _ = pool.submit(in_numbers, layer).result(timeout=120)
    assert_close(torch.tensor(output), expected[0])


def in_numbers(layer):
    output, gradients = passed(layer, batch(2, T))
    return output.tolist(), len(gradients)


@pytest.mark.parametrize("way", [w for w in WAYS if w is not Checkpointed])
def test_every_way_compiles(way, expected):
    torch.compiler.reset()
    layer, x = way(), batch(2, T)
    convert(layer, "biweight")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), expected[0])
    assert_close(compiled(x), expected[0])


def test_hooks_stay_and_are_called():
    layer, seen = Aliased(), []
    layer.register_forward_hook(lambda module, args, output: seen.append("before"))
    convert(layer, "biweight")
    layer.register_forward_pre_hook(lambda module, args: seen.append("after"))
    layer(batch(2, T))
    assert seen == ["after", "before"]


def test_a_parameter_of_the_kernel_is_one_of_the_model():
    r = nn.Parameter(torch.tensor(2.0))
    model = nn.Sequential(Aliased(), mha_layer())
    learned = kernel("power", r=r)
    convert(model, learned)
    assert any(p is r for p in model.parameters())
    assert "0.parzen.kernel_parameter" in model.state_dict()
    model(batch(2, T)).square().sum().backward()
    assert r.grad is not None
    assert r.grad != 0
    other = nn.Sequential(Aliased(), mha_layer())
    convert(other, kernel("power", r=nn.Parameter(torch.tensor(4.0))))
    other.load_state_dict(model.state_dict())
    assert_close(other(batch(2, T)), model(batch(2, T)))
    with torch.no_grad():
        r.fill_(3.0)
    assert (other(batch(2, T)) != model(batch(2, T))).any()
    convert(model, "biweight")
    assert not any(p is r for p in model.parameters())


class Switched(Layer):
    """Two branches, of which the second is not torch's."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash

    def attend(self, q, k, v):
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q @ k.mT).softmax(-1) @ v


def test_a_branch_not_taken_is_found_at_the_first_call(expected):
    model = nn.Sequential(Switched(True), Switched(False))
    assert convert(model, "biweight") == ("0", "1")
    assert_close(model[0](batch(2, T)), expected[0])
    message = (
        r"Switched was converted, and its forward ended without .*parzen\.weights in place of its softmax"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model[1](batch(2, T))


class ImportsInside(Layer):
    def attend(self, q, k, v):
        import torch.nn.functional as inside

        return inside.scaled_dot_product_attention(q, k, v, is_causal=True)


class TwoMeanings(Layer):
    def attend(self, q, k, v):
        return sdpa(q, k, v, is_causal=True) + self.qkv.weight.new_zeros(()) * getattr(self.sdpa, "none", 0)

    sdpa = 0


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            ImportsInside,
            "ImportsInside.attend in .* imports scaled_dot_product_attention where it runs",
        ),
        (TwoMeanings, "TwoMeanings.attend in .* uses 'sdpa' both as a global and otherwise: rename one"),
    ],
)
def test_code_that_cannot_be_rebuilt_is_refused_and_left_alone(way, message):
    model, names = nn.Sequential(Aliased(), way()), set(globals())
    with pytest.raises(ValueError, match=message):
        convert(model, "biweight")
    assert [type(m) for m in model] == [Aliased, way]
    assert "parzen" not in dict(model[0].named_children())
    assert set(globals()) <= names


# ---- anneal --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", ["epanechnikov", "biweight", "entmax?alpha=1.3", "relumax", "power?r=2&margin=3"]
)
@torch.no_grad()
def test_annealing_goes_from_softmax_to_the_end(end: str):
    model = nn.Sequential(Plain())
    x = batch(2, 40)
    softmax = model(x)
    annealing = anneal(model, end, 50)
    assert_close(model(x), softmax, atol=1e-6, rtol=1e-5)
    seen = [model(x)]
    for _ in range(50):
        annealing.step()
        seen.append(model(x))
    assert annealing.kernel == kernel(end)
    convert(model, end)
    assert_close(seen[-1], model(x))
    # No step is a jump.
    moves = [float((b - a).abs().max()) for a, b in itertools.pairwise(seen)]
    first = 3.0 if end == "power?r=2&margin=3" else 0.3
    assert moves[0] < first
    assert max(moves[1:]) < 0.2
    annealing.step()
    assert annealing.kernel == kernel(end)
    assert annealing.done == 50


def test_annealing_is_over_after_its_last_step():
    model = nn.Sequential(Plain())
    annealing = anneal(model, "relumax", 1)
    annealing.step()
    convert(model, "biweight")
    annealing.step()
    assert layers(model)["0"].kernel == kernel("biweight")


def test_annealing_says_where_it_is_and_refuses_the_state_of_another():
    annealing = anneal(nn.Sequential(Plain()), "biweight", 10)
    annealing.step()
    assert repr(annealing) == "anneal(gaussian → biweight, step 1 of 10, now power?r=20)"
    state = annealing.state_dict()
    assert state == {"done": 1, "steps": 10, "kernel": "biweight"}
    with pytest.raises(ValueError, match="the state has kernel 'biweight', this anneal 'relumax'"):
        anneal(nn.Sequential(Plain()), "relumax", 10).load_state_dict(state)
    with pytest.raises(ValueError, match="the state has steps 10, this anneal 20"):
        anneal(nn.Sequential(Plain()), "biweight", 20).load_state_dict(state)


def test_annealing_is_resumed():
    one, other = nn.Sequential(Plain()), nn.Sequential(Plain())
    a, b = anneal(one, "biweight", 10), anneal(other, "biweight", 10)
    for _ in range(4):
        a.step()
    b.load_state_dict(a.state_dict())
    assert layers(other)["0"].kernel == layers(one)["0"].kernel == kernel("power?r=5")


@pytest.mark.parametrize(
    ("end", "steps", "message"),
    [
        ("knn_gaussian", 10, "no path leads from softmax to knn_gaussian"),
        ("normrelu", 10, "no path leads"),
        ("gaussian", 10, "no path leads"),
        ("biweight", 0, "steps must be"),
        ("biweight", 1.5, "steps must be"),
    ],
)
def test_what_anneal_refuses(end: str, steps, message: str):
    with pytest.raises(ValueError, match=message):
        anneal(nn.Sequential(Plain()), end, steps)


# ---- match ---------------------------------------------------------------------------------------


def scattered() -> nn.Module:
    """Heads of different sharpness."""
    torch.manual_seed(3)
    model = nn.Sequential(Plain(), Plain())
    with torch.no_grad():
        sharpness = torch.tensor([5.0, 15.0, 30.0, 50.0]).repeat_interleave(D // HEADS)[:, None]
        for layer in model:
            layer.qkv.weight[:D] *= sharpness
    return model


@pytest.mark.parametrize("name", ["epanechnikov", "biweight", "relumax"])
def test_entropies_match(name: str):
    model = scattered()
    convert(model, name)
    data = [batch(2, 30), batch(1, 50)]
    found = match(model, data, lambda x: model(x).square().mean())
    assert found.loss_before != found.loss_after
    for layer, wanted in found.wanted.items():
        assert_close(found.after[layer], wanted, atol=2e-3, rtol=0)
        assert (found.before[layer] - wanted).abs().max() > 0.05
        assert_close(layers(model)[layer].gain, found.gain[layer])
    # The first layer by hand.
    layer, total, rows = model[0], 0.0, 0
    for x in data:
        q, k, _ = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer.qkv(x).chunk(3, -1))
        s = (q @ k.mT / 2).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        w = s.softmax(-1)
        total, rows = total - torch.xlogy(w, w).sum((0, 2, 3)), rows + x.shape[0] * x.shape[1]
    assert_close(found.wanted["0"], total.detach() / rows, atol=1e-4, rtol=1e-4)
    # Gains are part of the model's state.
    state = model.state_dict()
    fresh = scattered()
    convert(fresh, name)
    fresh.load_state_dict(state)
    assert_close(fresh(data[0]), model(data[0]))


def test_supports_match():
    model = scattered()
    convert(model, "biweight")
    found = match(model, [batch(4, 60)], lambda x: model(x).mean(), statistic="support", target=6.0)
    for after in found.after.values():
        assert_close(after, torch.full_like(after, 6.0), atol=0.1, rtol=0)


def test_what_match_refuses():
    model = scattered()

    def loss(x):
        return model(x).mean()

    with pytest.raises(ValueError, match="no converted layer"):
        match(model, [batch(1, 4)], loss)
    convert(model, "biweight")
    with pytest.raises(ValueError, match="at least one batch"):
        match(model, [], loss)
    with pytest.raises(ValueError, match="a target for the support"):
        match(model, [batch(1, 4)], loss, statistic="support")
    with pytest.raises(ValueError, match="statistic must be one of"):
        match(model, [batch(1, 4)], loss, statistic="variance")
    assert isinstance(layers(model)["0"], Attention)
    assert layers(model)["0"].gain is None


# ---- models of transformers ----------------------------------------------------------------------


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    from parzen.integrations.transformers import register

    register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@torch.no_grad()
def test_a_model_of_transformers_is_converted_annealed_and_matched():
    model, tokens = llama(), torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    softmax = model(tokens).logits
    assert convert(model, "gaussian") == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert_close(model(tokens).logits, softmax, atol=1e-5, rtol=1e-5)
    convert(model, "knn_gaussian?k=5")
    nearest = model(tokens).logits
    expected = llama()
    from parzen.integrations.transformers import register

    register("knn_gaussian?k=5")
    expected.set_attn_implementation("parzen:knn_gaussian?k=5")
    assert_close(nearest, expected(tokens).logits, atol=1e-5, rtol=1e-5)
    annealing = anneal(model, "biweight", 2)
    assert_close(model(tokens).logits, softmax, atol=1e-5, rtol=1e-5)
    annealing.step()
    annealing.step()
    found = match(model, [tokens], lambda batch: model(batch, labels=batch).loss)
    for name, wanted in found.wanted.items():
        assert_close(found.after[name], wanted, atol=5e-3, rtol=0)
    assert_close(found.loss_softmax, float(llama()(tokens, labels=tokens).loss), atol=1e-4, rtol=0)
    seen = model(tokens, output_attentions=True).attentions[0]
    w = seen.double()
    assert_close(
        -torch.xlogy(w, w).sum(-1).mean((0, 2)).float(),
        found.after["model.layers.0.self_attn"],
        atol=1e-3,
        rtol=0,
    )


def test_transformers_must_know_the_kernels(monkeypatch):
    import transformers

    model = llama()
    monkeypatch.setattr(
        transformers.AttentionInterface,
        "_global_mapping",
        {k: v for k, v in transformers.AttentionInterface._global_mapping.items() if "parzen" not in k},
    )
    with pytest.raises(ValueError, match="register"):
        convert(model, "biweight")

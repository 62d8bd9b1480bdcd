"""Output and every gradient against float64, every kernel on every backend; and the check checks."""

import importlib
import sys

import pytest
import torch
from kernel_list import NAMES

import parzen
from parzen.backends import BACKENDS, cpu, recall
from parzen.call import Call
from parzen.kernels import EXP, NEAREST, POWER, Form
from parzen.testing import cases, check_kernel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The Triton engine has the check in test_triton.py, at the pace of its interpreter.
SERVES = {"sdpa": {"gaussian"}, "triton": set()}
# How many cases of the sweep: all, but for torch's attention those that its fused kernel takes.
ALL = len(list(cases()))
SERVED = {"sdpa": 13 if cpu.info()["built"] else 21}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_conforms(name, backend, dtype):
    half = dtype in (torch.bfloat16, torch.float16)
    # Inside torch's own kernel half-precision weights are rounded before the value product.
    tolerance = 2e-2 if half and backend == "sdpa" else None
    if name in SERVES.get(backend, NAMES) and (backend != "cpu" or cpu.info()["built"]):
        assert check_kernel(name, backend, dtype, tolerance=tolerance) == SERVED.get(backend, ALL)
    else:
        with pytest.raises(ValueError, match=f"'{backend}' serves no case"):
            check_kernel(name, backend, dtype, tolerance=tolerance)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kernel": parzen.kernel("entmax", alpha=torch.tensor([1.2, 1.5]))}, "numbers for its parameters"),
        ({"kernel": parzen.kernel("relumax", margin=torch.tensor(1.0))}, "numbers for its parameters"),
        ({"dtype": torch.int32}, "dtype must be one of torch.float64, .* got torch.int32"),
        ({"backend": "sdpa"}, "'sdpa' serves no case of biweight .*compact support"),
        ({"backend": ["cpu"]}, "unknown backend"),
    ],
    ids=str,
)
def test_a_check_that_would_check_nothing_is_an_error(arguments, words):
    with pytest.raises(ValueError, match=words):
        check_kernel(**{"kernel": "biweight"} | arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["gaussian", "biweight", "relumax", "knn_uniform"])
def test_the_canary_is_rejected(name, dtype):
    """A backend that is off by 1 % must fail the check, and so must one with a wrong gradient."""

    def off(**arguments):
        return parzen.attention(**arguments) * 1.01

    def wrong_gradient(**arguments):
        out = parzen.attention(**arguments)
        return out.detach() + (out - out.detach()) * 1.01

    for canary, words in ((off, "output"), (wrong_gradient, "gradient")):
        with pytest.raises(AssertionError, match=words):
            check_kernel(name, dtype=dtype, attend=canary)


BACKEND = """
from dataclasses import replace

from parzen.backends import reference


def why_not(call):
    return "MPS devices have no float64" if call.q.device.type == "mps" else None


def run(call):
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    return FACTOR * reference.run(wide).to(call.v.dtype)
"""


@pytest.mark.parametrize("name", ["gaussian", "biweight", "knn_uniform"])
def test_a_backend_is_one_file_and_one_row(name, tmp_path, monkeypatch):
    """And the check holds it as it holds the others: one that is off by 1 % is rejected."""
    package = tmp_path / "someones_backends"
    package.mkdir()
    (package / "__init__.py").touch()
    for module, factor in (("wide", "1"), ("canary", "1.01")):
        (package / f"{module}.py").write_text(BACKEND.replace("FACTOR", factor))
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("wide", "canary"):
        monkeypatch.setitem(BACKENDS, module, importlib.import_module(f"someones_backends.{module}"))
        monkeypatch.delitem(sys.modules, f"someones_backends.{module}")
    monkeypatch.delitem(sys.modules, "someones_backends")
    assert check_kernel(name, "wide", torch.float32) == ALL
    with pytest.raises(AssertionError, match=r"on canary, .*: output"):
        check_kernel(name, "canary", torch.float32)


@pytest.mark.parametrize(("profile", "rule"), [(7, NEAREST), (POWER, 9), (EXP, -1)])
def test_an_engine_refuses_a_profile_or_rule_it_has_not(profile, rule):
    if not cpu.info()["built"]:
        pytest.skip("the CPU engine was not built")
    q = torch.randn(1, 1, 3, 4)
    form = Form(profile, rule, 1.0, 0.5, 2)
    call = Call(q, q, q, 1.0, form, parzen.kernel("biweight"))
    words = f"does not know profile {profile} with rule {rule}"
    assert words in cpu.why_not(call)
    assert words in recall.why_not(q, form)
    assert cpu.why_not(Call(q, q, q, 1.0, Form(POWER, NEAREST, 0.0, 0.0, 2), call.kernel)) is None


def test_a_backend_asked_for_by_name_says_why_not():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"'sdpa' cannot serve this call.*compact support"):
        parzen.attention(q, q, q, kernel="biweight", backend="sdpa")
    with pytest.raises(ValueError, match="unknown backend 'fast'; known: auto"):
        parzen.attention(q, q, q, backend="fast")
    with pytest.raises(ValueError, match="unknown backend"):
        check_kernel("biweight", "fast")


def test_explain_names_the_backend_that_runs():
    q = torch.randn(1, 1, 3, 4)
    explanation = parzen.explain(q, q, q)
    assert explanation.backend == "sdpa"
    assert explanation.reasons["sdpa"] == "serves this call"
    assert set(explanation.reasons) == set(BACKENDS)
    assert "compact support" in str(parzen.explain(q, q, q, kernel="biweight"))
    assert parzen.explain(q, q, q, backend="reference").backend == "reference"
    # Dropout needs no T×S mask where the engine is built.
    dropout = parzen.explain(q, q, q, dropout_p=0.1).backend
    assert dropout == ("cpu" if parzen.explain(q, q, q, kernel="biweight").backend == "cpu" else "sdpa")


def test_info_is_plain_data():
    import json

    assert json.loads(json.dumps(parzen.info()))["parzen"] == parzen.__version__

"""Output and every gradient against float64, every kernel on every backend; and the check checks."""

import pytest
import torch
from kernel_list import NAMES

import parzen
from parzen.backends import BACKENDS, cpu
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

"""Every public name has an example in its docstring, and it runs."""

import doctest

import pytest
import torch

import parzen
from parzen import losses, nn, regression, testing

PUBLIC = {
    parzen: set(parzen.__all__) - {"KERNELS"},
    losses: {"fenchel_young", "linear_fenchel_young", "FenchelYoungLoss"},
    nn: {"KernelAttention", "LearnedKernel", "anneal", "convert", "match", "restore"},
    regression: {"KernelRegressor", "KernelClassifier"},
    testing: {"check_kernel"},
}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in sorted(names)]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_example_of_a_public_name_runs(module, name):
    thing = getattr(module, name)
    names = {"parzen": parzen, "torch": torch}
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs=names)
    assert test.examples, f"{name} has no example"
    torch.manual_seed(0)
    said = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not result.failed, "".join(said)


def test_the_symbols_of_a_formula_are_defined_where_it_stands():
    for thing in (parzen.attention, parzen.weights, parzen.kernel):
        for word in ("profile", "gain", "threshold"):
            assert word in thing.__doc__, (thing, word)

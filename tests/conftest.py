"""Shared settings: one seed, few threads, the kernels that every sweep visits."""

import os

import pytest
import torch
from hypothesis import settings

# Triton decides when it is imported whether its functions can be interpreted; torch.compile imports it.
os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton  # noqa: F401
except ImportError:
    pass
# From here on only test_triton.py interprets.
del os.environ["TRITON_INTERPRET"]

settings.register_profile("parzen", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("parzen")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

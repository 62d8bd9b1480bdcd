"""Shared settings: one seed, few threads, the kernels that every sweep visits."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("parzen", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("parzen")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

"""Where there is a C++ compiler, a failed build of the engine is a failure."""

import shutil

import pytest

import parzen


def test_the_engine_is_built_where_it_can_be():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here: the pure Python install is what is tested")
    assert parzen.info()["cpu engine"]["built"]

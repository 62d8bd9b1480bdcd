"""`make` leaves an environment that another checkout owns as it is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("goal", ["docs", "demo"])
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not there")
def test_the_environment_of_another_checkout_is_left_alone(tmp_path, goal):
    mine, other = tmp_path / "mine", tmp_path / "other"
    bin = other / ".venv" / "bin"
    bin.mkdir(parents=True)
    mine.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, mine)
    python = bin / "python"
    python.write_text(
        '#!/bin/sh\necho "$*" >> log\ncase "$*" in *show*) '
        'echo "Editable project location: $(cat ../owner)";; esac\n'
    )
    for program in (python, bin / "parzen", bin / "sphinx-build"):
        if program != python:
            program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (mine / ".venv").symlink_to(other / ".venv")

    def make(owner):
        (tmp_path / "owner").write_text(str(owner))
        # Without the flags of a make that runs these tests.
        environment = {k: v for k, v in os.environ.items() if "MAKE" not in k}
        return subprocess.run(["make", goal], cwd=mine, capture_output=True, text=True, env=environment)

    done = make(other)
    assert done.returncode
    assert f".venv belongs to the checkout {other} and is left alone" in done.stdout
    assert "install" not in (mine / "log").read_text()
    assert not (other / ".venv" / ".installed").exists()
    assert make(mine).returncode == 0
    assert "pip install" in (mine / "log").read_text()

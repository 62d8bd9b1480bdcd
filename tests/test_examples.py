"""Examples run."""

import importlib.util
import math
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_moving_a_llama():
    spec = importlib.util.spec_from_file_location("move_llama", EXAMPLES / "move_llama.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(["--steps", "12", "--further", "12", "--most", "100000"])
    assert len(found) == 12
    assert all(0 < loss < math.log(2048) for loss in found.values())
    # More training helps, whichever way the model was moved.
    for kernel in ("biweight", "epanechnikov"):
        assert found[f"{kernel}, matched, further"] < found[f"{kernel}, matched"]

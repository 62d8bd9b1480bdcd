"""Backends: implementations of one and the same call, and the choice among them.

A backend is a module with a function ``why_not(call) -> str | None``: None if it can serve the call,
else a sentence that says why it cannot, and ``run(call) -> Tensor``: the output (B, H, T, Ev), with
gradients.
"""

from __future__ import annotations

from types import ModuleType

from parzen.backends import cpu, reference, sdpa, triton
from parzen.call import Call

# In the order in which they are asked.
BACKENDS: dict[str, ModuleType] = {
    "sdpa": sdpa,
    "cpu": cpu,
    "triton": triton,
    "reference": reference,
}


def choose(call: Call, name: str = "auto") -> tuple[str, ModuleType]:
    """The first backend that can serve the call, or the one called ``name``.

    Raises:
        ValueError: an unknown name, or a named backend that cannot serve this call (it says why).
    """
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    for key, module in BACKENDS.items() if name == "auto" else [(name, BACKENDS[name])]:
        reason = module.why_not(call)
        if reason is None:
            return key, module
    raise ValueError(f"backend {name!r} cannot serve this call: {reason}")

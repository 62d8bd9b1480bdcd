"""Compile the kernels for GPUs that need not be there, and print registers, shared memory and spills.

    python -m parzen.backends.triton.build --arch 80 90 100 --width 64 128 --kernels epanechnikov biweight

Exits with 1 where a kernel spills registers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from parzen.backends.triton import Config, _kernels, config, options
from parzen.kernels import EVERYWHERE, KERNELS, Form, kernel, lower

_POINTERS = {
    **dict.fromkeys(("q", "k", "v", "bias", "o", "do", "dq", "dk", "dv"), "bf16"),
    "mask": "u8",
    "lists": "i64",
    "live": "i8",
}
# What the launcher finds in ordinary calls: aligned pointers and rows.
_ALIGNED = re.compile(r".*_ptr|cu_q|cu_k|[qkv]_[bhts]")


def _static(form: Form, width: int, chosen: Config, forward: bool) -> dict[str, Any]:
    """The compile-time arguments of a plain causal call in training."""
    r = float(form.r)
    options = ("SCALE_AT", "LEVEL_AT", "R_AT", "HAS_MASK", "HAS_BIAS", "HAS_SLOPE", "PACKED", "LOWER_RIGHT",
               "SLOPES", "BY_R", "DENSE")  # fmt: skip
    return dict.fromkeys(options, False) | {
        "PROFILE": form.profile,
        "RULE": form.rule,
        "R": int(r) if r in (0, 1, 2, 3) else -1,
        "SAVE": True,
        "LISTS": form.rule != EVERYWHERE,
        "E": width,
        "EV": width,
        "E_PAD": width,
        "EV_PAD": width,
        "BLOCK_M": chosen.m,
        "BLOCK_N": chosen.n,
        "CROWD": chosen.crowd,
        "CAPACITY": chosen.capacity if forward else chosen.room,
    }


def _type(name: str, static: dict[str, Any]) -> str:
    if name in static:
        return "constexpr"
    if name in ("cu_q", "cu_k"):
        return "*i64"
    if name.endswith("_ptr"):
        return "*" + _POINTERS.get(name.removesuffix("_ptr"), "fp32")
    return "fp32" if name.endswith("_all") else "i32"


def compile(function: Any, static: dict[str, Any], arch: int, chosen: Config) -> tuple[bytes, int]:
    """The cubin of a kernel for sm_``arch`` in bfloat16, and its bytes of shared memory."""
    names = function.arg_names
    static = {name: value for name, value in static.items() if name in names}
    signature = {name: _type(name, static) for name in names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(names)
        if name not in static and _ALIGNED.fullmatch(name)
    }
    constants = {(names.index(name),): value for name, value in static.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options(chosen))
    return made.asm["cubin"], made.metadata.shared


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and how many of its instructions spill them: all that load or store local memory.

    A stack frame alone is none: LLVM may leave one that nothing touches.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", text)
    code = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@\S+ +)?([A-Z]\w*)", text)
    if registers is None or "EXIT" not in code:
        raise RuntimeError(f"{tool} shows no registers or no code: {text[:500]}")
    return int(registers[1]), code.count("LDL") + code.count("STL")


def main(argv: list[str] | None = None) -> int:
    """Compile, print a line for each kernel, and return 1 if one spills."""
    parser = argparse.ArgumentParser(prog="python -m parzen.backends.triton.build", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    asked = parser.parse_args(argv)
    spilled = 0
    for arch in asked.arch:
        for width in asked.width:
            chosen = config(width, torch.bfloat16.itemsize, (arch // 10, arch % 10))
            for name in asked.kernels:
                form = lower(kernel(name), 1.0)
                for part in ("forward", "backward_queries", "backward_keys"):
                    start = time.perf_counter()
                    static = _static(form, width, chosen, part == "forward")
                    cubin, shared = compile(getattr(_kernels(), part), static, arch, chosen)
                    registers, spills = usage(cubin)
                    spilled += spills
                    took = time.perf_counter() - start
                    what = f"sm_{arch} width {width} {name} {part}"
                    used = f"{registers} registers, {shared} bytes shared, {spills} spills"
                    print(f"{what}: {used} ({took:.1f} s)", flush=True)
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())

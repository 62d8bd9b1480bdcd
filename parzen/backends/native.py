"""The compiled library (``parzen/csrc``): its structs as tables of named fields, and its functions.

The library says the name, offset and size of every field of its structs; a build whose fields are not
those of the tables here is refused when it is loaded. A further struct is one ``Struct`` here and one list
of fields in ``csrc/fields.h``; a further function is one name in ``FUNCTIONS``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# (int64 instruction set, struct) → 0, or 1 when memory ran out: parzen_{name} of csrc/dispatch.cpp.
FUNCTIONS = (
    "forward", "backward", "recall", "code", "weights", "weights_backward", "weight_rows",
    "weight_rows_backward",
)  # fmt: skip

# One more whenever what a field means changes and its name stays, here and in csrc/dispatch.cpp; 1: tensors
# of any width, which are not padded to 16 columns.
CONTRACT = 1

# How a kind of field is packed. A pointer is given as a number; a start and a view, which are the address
# of a tensor and that with four strides, are given as a tensor or None.
_FORMATS = {"int": "q", "float": "d", "pointer": "q", "start": "q", "view": "40s"}
_ABSENT = {"int": "0", "float": "0.0", "pointer": "0", "start": "None", "view": "None"}
# Written out for each field: a call of a function would cost more than the packing.
_PACKED = {"start": "0 if {0} is None else {0}.data_ptr()", "view": "b'' if {0} is None else _view({0})"}


# By the number of axes; the strides of the axes that are not there are zero.
_VIEWS = [struct.Struct(f"={1 + axes}q") for axes in range(5)]


def view(x: Tensor) -> bytes:
    """Address and strides of up to four axes, 0 along those that broadcast."""
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    return _VIEWS[len(strides)].pack(x.data_ptr(), *strides)


class Struct:
    """A struct of 8-byte fields in ``csrc``.

    Args:
        name: its name there.
        fields: a kind ("int", "float", "pointer", "start" or "view") and the names of fields of that kind,
            in order.

    Attributes:
        pack: called with fields by keyword, the struct for the library; what is not named is zero.
    """

    pack: Callable[..., bytes]

    def __init__(self, name: str, *fields: tuple[str, str]) -> None:
        self.name = name
        self.fields = kinds = {field: kind for kind, names in fields for field in names.split()}
        # Name and size, one after the other.
        self.layout = tuple((field, struct.calcsize(_FORMATS[kind])) for field, kind in kinds.items())
        packer = struct.Struct("=" + "".join(_FORMATS[kind] for kind in kinds.values()))
        self.size = packer.size
        # Written out, as dataclasses does: arguments by keyword cost a call no dictionary.
        absent = ", ".join(f"{field}={_ABSENT[kind]}" for field, kind in kinds.items())
        packed = ", ".join(_PACKED.get(kind, "{0}").format(field) for field, kind in kinds.items())
        made: dict[str, Any] = {"_pack": packer.pack, "_view": view}
        exec(f"def {name}(*, {absent}):\n    return _pack({packed})", made)
        self.pack = made[name]


ARGS = Struct(
    "Args",
    ("int", "B H Hk T S E D is_double profile rule nearest diagonal left right threads"),
    ("float", "scale level r dropout"),
    ("pointer", "parallel_for"),
    ("start", "first_q first_k"),
    ("int", "rows lower_right"),
    ("start", "seed"),
    ("view", "q k v o mask bias slopes scale_at level_at r_at"),
    ("start", "stats where count index score"),
    ("int", "per_row"),
    ("view", "dout dq dk dv dbias"),
    ("int", "dbias_B dbias_H dbias_T dbias_S"),
    ("start", "dscale dlevel dr dslopes"),
)
RECALL = Struct(
    "Recall",
    ("int", "B H Hk T S E D stored profile rule nearest diagonal left right threads"),
    ("float", "scale level r"),
    ("pointer", "parallel_for chunks"),
    ("int", "chunk"),
    ("view", "q o mask scale_at level_at r_at"),
    ("start", "scored support"),
)
CHUNK = Struct(
    "Chunk", ("start", "keys values"), ("int", "keys_head values_head"), ("start", "codes bounds frame")
)
WEIGHT_MAP = Struct(
    "WeightMap",
    ("int", "rows n is_double profile rule nearest threads"),
    ("float", "scale level r least"),
    ("pointer", "parallel_for"),
    ("start", "x dout out"),
)
ROW_MAP = Struct("RowMap", ("pointer", "map"), ("start", "r_at level_at score push"))
STRUCTS = (ARGS, RECALL, CHUNK, WEIGHT_MAP, ROW_MAP)


# ---- the library ---------------------------------------------------------------------------------


class Engine:
    """The loaded library for one instruction set, and torch's parallel loop."""

    def __init__(self, lib: ctypes.CDLL, isas: tuple[str, ...], isa: str, number: int) -> None:
        self.isas, self.isa = isas, isa
        self.parallel_for = _parallel_for()
        self._number = number
        self._functions = {name: getattr(lib, f"parzen_{name}") for name in FUNCTIONS}
        for function in self._functions.values():
            function.argtypes = (ctypes.c_int64, ctypes.c_char_p)
            function.restype = ctypes.c_int32

    def call(self, function: str, args: bytes) -> None:
        """Run one of ``FUNCTIONS`` on a packed struct.

        Raises:
            MemoryError: the library found none.
        """
        if self._functions[function](self._number, args):
            raise MemoryError("the CPU engine ran out of memory")


def _parallel_for() -> int:
    """The address of ``torch_parallel_for``, or 0 where this torch does not export it."""
    try:
        lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(lib.torch_parallel_for, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def _path() -> Path | None:
    """The library. An editable install keeps it in another folder of the package's path.

    PARZEN_ENGINE names another build, such as one with sanitizers.
    """
    if other := os.environ.get("PARZEN_ENGINE"):
        return Path(other)
    places = (Path(folder) / "_engine" / "engine.so" for folder in sys.modules["parzen"].__path__)
    return next((place for place in places if place.exists()), None)


class _Field(ctypes.Structure):
    """struct Field of csrc/fields.h."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64)]


def compare(table: Struct, built: list[tuple[str, int, int]]) -> str | None:
    """None where the library's fields (name, offset, size) are the table's, else the first that is not."""
    offset = 0
    for n, (name, size) in enumerate(table.layout):
        if n == len(built):
            return f"{table.name}.{name} is missing"
        if built[n] != (name, offset, size):
            there = "{} (offset {}, {} bytes)".format(*built[n])
            return f"{table.name}.{name} (offset {offset}, {size} bytes) is {there} there"
        offset += size
    more = built[len(table.layout) :]
    return f"{table.name}.{more[0][0]} is not known here" if more else None


def _check_fields(lib: ctypes.CDLL, path: Path) -> None:
    """Raises ImportError, naming a field, unless every struct of the library is as in its table here."""
    # Restype of a function is int32 where nothing is said: enough for so small a number.
    built = lib.parzen_contract() if hasattr(lib, "parzen_contract") else 0
    if built != CONTRACT:
        there = f"contract {built}, here {CONTRACT}"
        raise ImportError(f"{path} was built from another version of parzen ({there}): build it again")
    lib.parzen_field.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.POINTER(_Field))
    lib.parzen_field.restype = ctypes.c_int32
    for table in STRUCTS:
        found: list[tuple[str, int, int]] = []
        field = _Field()
        while lib.parzen_field(table.name.encode(), len(found), field):
            found.append((field.name.decode(), field.offset, field.size))
        if wrong := compare(table, found):
            raise ImportError(f"{path} was built from another version of parzen ({wrong}): build it again")


def choose(isa: str | None) -> Engine | None:
    """The engine for ``isa``, or for the best instruction set; None where it was not built.

    Raises:
        ValueError: the instruction set is not available; the available ones are named.
        ImportError: the library's structs are not those of this version.
    """
    path = _path()
    if path is None:
        return None
    lib = ctypes.CDLL(str(path))
    _check_fields(lib, path)
    lib.parzen_isa.argtypes = (ctypes.c_int64,)
    lib.parzen_isa.restype = ctypes.c_char_p
    # Worst first, "" where this processor lacks one.
    names: list[str] = []
    while (name := lib.parzen_isa(len(names))) is not None:
        names.append(name.decode())
    usable = tuple(name for name in names if name)
    isa = isa or usable[-1]
    if isa not in usable:
        raise ValueError(f"PARZEN_CPU_ISA={isa!r}: this processor and build have {', '.join(usable)}")
    return Engine(lib, usable, isa, names.index(isa))


@cache
def engine() -> Engine | None:
    """The engine in use; None where it was not built."""
    return choose(os.environ.get("PARZEN_CPU_ISA"))


def _alone() -> None:
    """In a forked child, which has none of the pool's threads: a call that waits for one never returns."""
    if engine.cache_info().currsize and (found := engine()) is not None:
        found.parallel_for = 0
        # Nor may torch wait for one, around the engine.
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)


def loaded() -> Engine:
    """The engine in use, where ``why_not`` has seen that there is one."""
    found = engine()
    assert found is not None
    return found

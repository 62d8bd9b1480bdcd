"""Code that reaches one function, rebuilt to call another; whoever else uses that code sees no change.

    rewire = Rewiring(Reach(F.scaled_dot_product_attention), mine)
    module.__class__ = rewire.layer(type(module))

Followed are global names (also of modules, and under an alias), functions called from there, decorators and
nested functions, default arguments, partials, tables, and objects of classes that are no ``nn.Module``.
"""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

# Whose code is left alone, with that of Python itself.
FOREIGN = {"torch", "numpy", "parzen", *sys.stdlib_module_names} - {"__main__"}
# Tables with more entries are data.
LARGEST_TABLE = 256
_numbers = itertools.count()


class Reach:
    """Whether a function, class, table or object reaches ``target``; what was found is kept."""

    def __init__(self, target: Any) -> None:
        self.target = target
        # By identity; the thing itself is kept so that its identity stays its own.
        self._known: dict[int, tuple[Any, bool]] = {}

    def __call__(self, thing: Any) -> bool:
        """Whether ``thing`` does."""
        if id(thing) in self._known:
            return self._known[id(thing)][1]
        seen, todo, found = {}, [thing], False
        while todo and not found:
            now = todo.pop()
            found = now is self.target or self._known.get(id(now), (None, False))[1]
            if not found and id(now) not in seen:
                seen[id(now)] = now
                todo += _next(now, self.target)
        if not found:
            self._known |= {key: (now, False) for key, now in seen.items()}
        self._known[id(thing)] = (thing, found)
        return found

    def layer(self, cls: type) -> bool:
        """Whether something that a class of modules or a base of it defines does."""
        defined = (item for c in cls.__mro__ if not _foreign(c) for item in vars(c).items())
        return any(_may_be_code(name, value) and self(value) for name, value in defined)


class Rewiring:
    """Calling it gives the argument, rebuilt if it reaches the target, or the argument itself.

    Rebuilt functions keep their globals, so that what changes there later is seen; what they call in place of
    a global is a further global, of a name of its own, until ``undo``.

    Args:
        reach: knows the function that is called now.
        replacement: what shall be called in its place.
        classes: what certain classes become, known beforehand.
    """

    def __init__(self, reach: Reach, replacement: Any, classes: dict[type, type] | None = None) -> None:
        self.reached, self.target, self.replacement = reach, reach.target, replacement
        self._built: dict[int, tuple[Any, Any]] = {id(a): (a, b) for a, b in (classes or {}).items()}
        self._aliases: dict[tuple[int, str], str] = {}
        self._added: list[tuple[dict[str, Any], str]] = []

    def __call__(self, thing: Any) -> Any:
        """``thing`` as it is to be used; a class of modules as it is, see ``layer``.

        Raises:
            ValueError: a function in whose code the name cannot be told apart, or that imports it itself.
        """
        if thing is self.target:
            return self.replacement
        if id(thing) in self._built:
            return self._built[id(thing)][1]
        if not self.reached(thing):
            return thing
        if isinstance(thing, type):
            return self.layer(thing)
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, MethodType):
            return MethodType(self(thing.__func__), thing.__self__)
        if isinstance(thing, functools.partial):
            new: Any = functools.partial(
                self(thing.func), *map(self, thing.args), **{k: self(v) for k, v in thing.keywords.items()}
            )
        elif isinstance(thing, staticmethod | classmethod):
            new = type(thing)(self(thing.__func__))
        elif isinstance(thing, property):
            new = property(self(thing.fget), self(thing.fset), self(thing.fdel), thing.__doc__)
        elif type(thing) is dict:
            new = {k: self(v) for k, v in thing.items()}
        elif type(thing) in (list, tuple):
            new = type(thing)(map(self, thing))
        else:
            new = copy.copy(thing)
            new.__class__ = self(type(thing))
            for name, value in list(vars(new).items()):
                if _is_code(value) or value is self.target:
                    vars(new)[name] = self(value)
        return self._keep(thing, new)

    def layer(self, cls: type) -> type:
        """The class with what it and its bases define rebuilt; itself if there is nothing.

        Each rebuilt base comes just before the one that it stands for in the order of bases, so ``super()``
        finds it.
        """
        if id(cls) in self._built:
            found: type = self._built[id(cls)][1]
            return found
        bases = [b for base in cls.__bases__ if (b := self.layer(base)) is not base]
        items = {} if _foreign(cls) else vars(cls)
        own = {k: b for k, a in items.items() if _may_be_code(k, a) and (b := self(a)) is not a}
        if not bases and not own:
            return cls
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        new: type = self._keep(cls, type(cls)(cls.__name__, (cls, *bases), {**names, **own}))
        return new

    def forget(self) -> None:
        """Lets go of what was rebuilt; who uses it keeps it."""
        self._built.clear()

    def undo(self) -> None:
        """Removes the global names."""
        for names, alias in self._added:
            names.pop(alias, None)
        self._added.clear()

    def _keep(self, old: Any, new: Any) -> Any:
        self._built[id(old)] = (old, new)
        return new

    def _function(self, f: Any) -> Any:
        if _imports(f.__code__, self.target.__name__):
            raise ValueError(
                f"{f.__qualname__} in {f.__code__.co_filename} imports {self.target.__name__} where it runs: "
                "import it, or the module that has it, at the top of the file"
            )
        uses: dict[str, set[tuple[str, ...]]] = {}
        for name, path in _reads(f.__code__):
            value, path = _resolve(f.__globals__, name, path)
            if self.reached(value):
                uses.setdefault(name, set()).add(path)
        aliases = {}
        for name in uses:
            key = (id(f.__globals__), name)
            aliases[name] = self._aliases.setdefault(key, f"_parzen_{next(_numbers)}_{name}")
        cells = {
            name: CellType()
            for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
            if name != "__class__" and self.reached(_contents(cell))
        }
        closure = tuple(
            cells.get(name, cell)
            for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        )
        code = _renamed(f.__code__, aliases, f.__qualname__)
        new = FunctionType(code, f.__globals__, f.__name__, None, closure)
        self._keep(f, new)
        functools.update_wrapper(new, f)
        # It shows the same signature by itself; unwrapped it would be the old one.
        vars(new).pop("__wrapped__", None)
        if "__wrapped__" in vars(f):
            new.__wrapped__ = self(f.__wrapped__)  # type: ignore[attr-defined]
        new.__defaults__ = f.__defaults__ and tuple(map(self, f.__defaults__))
        new.__kwdefaults__ = f.__kwdefaults__ and {k: self(v) for k, v in f.__kwdefaults__.items()}
        for name, old in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if name in cells:
                cells[name].cell_contents = self(old.cell_contents)
        for name, paths in uses.items():
            self._put(f.__globals__, name, aliases[name], paths)
        return new

    def _put(self, names: dict[str, Any], name: str, alias: str, paths: set[tuple[str, ...]]) -> None:
        """Makes ``alias`` what stands for ``name``."""
        if () in paths:
            value = self(names[name])
        else:
            value = names[alias] if alias in names else View(names[name])
            for path in paths:
                self._fill(value, path)
        if alias not in names:
            self._added.append((names, alias))
        names[alias] = value

    def _fill(self, view: View, path: tuple[str, ...]) -> None:
        first, *rest = path
        original = getattr(view.under, first)
        if not rest:
            vars(view)[first] = self(original)
            return
        if not isinstance(vars(view).get(first), View):
            vars(view)[first] = View(original)
        self._fill(vars(view)[first], tuple(rest))


class View(ModuleType):
    """A module in which some names are others."""

    under: ModuleType

    def __init__(self, under: ModuleType) -> None:
        super().__init__(under.__name__)
        vars(self)["under"] = under

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["under"], name)


def _next(thing: Any, target: Any) -> Iterator[Any]:
    """What is used by ``thing``, one step on."""
    if isinstance(thing, FunctionType):
        if not _foreign(thing):
            if _imports(thing.__code__, target.__name__):
                yield target
            for name, path in _reads(thing.__code__):
                yield _resolve(thing.__globals__, name, path)[0]
            names = thing.__code__.co_freevars
            for name, cell in zip(names, thing.__closure__ or (), strict=True):
                if name != "__class__":
                    yield _contents(cell)
            yield from thing.__defaults__ or ()
            yield from (thing.__kwdefaults__ or {}).values()
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, staticmethod | classmethod | MethodType):
        yield thing.__func__
    elif isinstance(thing, property):
        yield from (thing.fget, thing.fset, thing.fdel)
    elif type(thing) is dict and len(thing) <= LARGEST_TABLE:
        yield from thing.values()
    elif type(thing) in (list, tuple) and len(thing) <= LARGEST_TABLE:
        yield from thing
    elif isinstance(thing, type):
        # Modules are looked at one by one, each as a layer.
        if not issubclass(thing, nn.Module):
            for cls in thing.__mro__:
                if not _foreign(cls):
                    yield from (value for name, value in vars(cls).items() if _may_be_code(name, value))
    elif not isinstance(thing, nn.Module | ModuleType) and not _foreign(type(thing)):
        yield type(thing)
        yield from (v for v in getattr(thing, "__dict__", {}).values() if _is_code(v) or v is target)


def _foreign(thing: Any) -> bool:
    """Whether its code is of a library that is not looked into."""
    parts = (getattr(thing, "__module__", None) or "").split(".")
    return parts[0] in FOREIGN or (parts[0] == "transformers" and parts[1:2] != ["models"])


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | functools.partial)


def _may_be_code(name: str, value: Any) -> bool:
    """Whether it may be something that a class defines, and not what Python notes about it."""
    return not (name.startswith("__") and name.endswith("__")) or isinstance(value, FunctionType)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Not assigned yet.
        return None


def _resolve(names: dict[str, Any], name: str, path: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """What a global name and attributes lead to while they lead through modules, and how far that was."""
    value = names.get(name)
    for n, part in enumerate(path):
        if not isinstance(value, ModuleType):
            return value, path[:n]
        value = vars(value).get(part)
    return value, path


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


@functools.lru_cache(4096)
def _reads(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The global names that it and functions within it read, each with the attributes that follow."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    steps = _instructions(code)
    for i, step in enumerate(steps):
        if step.opname == "LOAD_GLOBAL":
            follow = itertools.takewhile(lambda s: s.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[i + 1 :])
            found[step.argval, tuple(s.argval for s in follow)] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= dict.fromkeys(_reads(inner))
    return tuple(found)


def _imports(code: CodeType, name: str) -> bool:
    """Whether it or a function within it uses the name, and imports something of torch that may have it."""
    if name in code.co_names:
        imported = {s.argval.split(".")[0] for s in _instructions(code) if s.opname == "IMPORT_NAME"}
        if "torch" in imported:
            return True
    return any(_imports(c, name) for c in code.co_consts if isinstance(c, CodeType))


def _renamed(code: CodeType, aliases: dict[str, str], where: str) -> CodeType:
    """The same code with other names for some globals; always a new object, for compilers that key on it."""
    steps = _instructions(code)
    taken = {s.argval for s in steps if s.opname == "LOAD_GLOBAL"} & aliases.keys()
    others = {s.argval for s in steps if s.opcode in dis.hasname and s.opname != "LOAD_GLOBAL"}
    if both := taken & others:
        raise ValueError(
            f"{where} in {code.co_filename} uses {both.pop()!r} both as a global and otherwise: rename one"
        )
    return code.replace(
        co_names=tuple(aliases[n] if n in taken else n for n in code.co_names),
        co_consts=tuple(
            _renamed(c, aliases, where) if isinstance(c, CodeType) else c for c in code.co_consts
        ),
    )

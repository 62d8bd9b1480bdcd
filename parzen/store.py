"""One file of tensors with settings beside them: the safetensors format, JSON in its header, no pickle.

Needs ``safetensors``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor


def write(path: str | Path, tag: str, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write ``tensors``, and ``settings`` under ``tag``; the file appears whole or not at all.

    Raises:
        OSError: it cannot be written.
        TypeError: settings that JSON cannot hold.
        ImportError: ``safetensors`` is not installed.
    """
    from safetensors.torch import save_file

    header = {tag: json.dumps(settings)}
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, beside, header)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def reading(path: str | Path, tag: str, writer: str) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """The settings and tensors of a file of ``writer``; what is wrong with them inside is said of the file.

    Raises:
        OSError: no such file, or it cannot be read.
        ValueError: it is damaged, or was not written by ``writer``.
        ImportError: ``safetensors`` is not installed.
    """
    from safetensors import SafetensorError, safe_open

    with Path(path).open("rb"):
        pass  # what the system says of a missing file is clearer
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            settings = json.loads((file.metadata() or {})[tag])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if not isinstance(settings, dict):
            raise ValueError("the settings are not a table")
        yield settings, tensors
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged, or no file of {writer} ({what})") from error

"""Runs on several machines: Ray places them. No scheduling of our own.

A task of Ray is the path of a run folder. When its worker or node dies Ray starts it again elsewhere, and it
goes on from the run's last checkpoint; so the folder of runs must be one that all machines share.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from parzen.lab import console
from parzen.lab.errors import UserError
from parzen.lab.run.folder import Run
from parzen.lab.run.sweep import Execution, Reopen, RunSet, attempt

# How often the death of workers or nodes starts one run again.
RETRIES = 20


def carry_out(
    todo: Sequence[tuple[Run, RunSet]], execution: Execution, reopen: Reopen
) -> Iterator[tuple[Run, str | None]]:
    """Each of the runs ``todo`` as it ends, and why it failed.

    Raises:
        UserError: Ray is missing, there is no cluster at ``execution.address``, or no machine for such runs.
    """
    runs = [run for run, _ in todo]
    if not runs:
        return
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("ray is not installed; run: pip install 'parzen[ray]'") from error
    began_here = not ray.is_initialized()
    if began_here:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if execution.address is None:
            quiet["include_dashboard"] = False
        try:
            _knock(execution.address)
            ray.init(execution.address, **quiet)
        except (OSError, ValueError) as error:
            raise UserError(
                f"no Ray cluster answers at {execution.address!r} ({' '.join(str(error).split())}); "
                "start one with: ray start --head"
            ) from error
    try:
        yield from _on_ray(ray, runs, execution, reopen)
    finally:
        if began_here:
            ray.shutdown()


def _knock(address: str | None) -> None:
    """Fails at once where nobody listens: Ray would try for minutes, and then end the process."""
    if address not in (None, "auto", "local"):
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()


def _on_ray(
    ray: Any, runs: Sequence[Run], execution: Execution, reopen: Reopen
) -> Iterator[tuple[Run, str | None]]:
    cuda = torch.device(execution.device).type == "cuda"
    asked = {"CPU": float(execution.cpus_per_run), "GPU": float(execution.gpus_per_run if cuda else 0)}
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(have.get(name, 0) >= n for name, n in asked.items()) for have in machines):
        raise UserError(
            f"no machine of the Ray cluster has {asked['CPU']:g} CPUs and {asked['GPU']:g} GPUs for a run; "
            "ask for fewer with --cpus-per-run or --gpus-per-run"
        )
    there = console.count(len(machines), "machine")
    print(f"Ray: {there}, {_total(machines, 'CPU')} CPUs, {_total(machines, 'GPU')} GPUs")
    task = ray.remote(num_cpus=asked["CPU"], num_gpus=asked["GPU"], max_retries=RETRIES)(_remote)
    # A driver may run where the machines of the cluster share its folder, under the same path.
    waiting = {task.remote(str(run.folder.resolve()), execution, reopen): run for run in runs}
    began = time.monotonic()
    try:
        while waiting:
            done, _ = ray.wait([*waiting], num_returns=1)
            run = waiting.pop(done[0])
            try:
                reason = ray.get(done[0])
            except ray.exceptions.RayError as error:
                reason = f"Ray gave up: {' '.join(str(error).split())}"
            if reason is None and not run.finished:
                reason = f"it ended on a machine that does not share the folder {run.folder}"
            passed = time.monotonic() - began
            ended = len(runs) - len(waiting)
            print(
                f"{run.config.label}: {'failed' if reason else 'done'} ({ended} of {len(runs)}), "
                f"{console.duration(passed)}, about {console.duration(passed / ended * len(waiting))} left",
                flush=True,
            )
            yield run, reason
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def _total(machines: Sequence[dict[str, float]], resource: str) -> str:
    return f"{sum(have.get(resource, 0) for have in machines):g}"


def _remote(folder: str, execution: Execution, reopen: Reopen) -> str | None:
    """The task: ``attempt`` on the run in ``folder``."""
    place = Path(folder)
    if not place.exists():
        return f"{folder} is not there on the machine {os.uname().nodename}: all machines must share it"
    try:
        run, needed = reopen(place)
    except UserError as error:
        return str(error)
    torch.set_num_threads(execution.cpus_per_run)
    return attempt(run, lambda: needed, execution)

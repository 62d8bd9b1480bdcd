"""Runs on a real Ray cluster, one of whose machines is lost, and on several processes."""

import json
import subprocess
import sys
import threading
import time

import pytest

from parzen.cli import main
from parzen.lab.data.text import generated_stories
from parzen.lab.experiments import find_runs

KERNELS, SEEDS = ("gaussian", "biweight"), ("0", "1")
TOKENS = 2 * 16 * 400


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    path.write_text("".join(json.dumps(story) + "\n" for story in generated_stories(0, 40_000)))
    return path


def command(text, runs, *more, tokens=TOKENS):
    return [
        *("compare", "stories", "--data", str(text), "--runs", str(runs), "--kernels", ",".join(KERNELS)),
        *("--width", "16", "--heads", "2", "--slots", "8", "--vocab", "300", "--context", "16"),
        *("--batch", "2", "--tokens", str(tokens), "--seeds", *SEEDS, *more),
    ]


def outcome(runs):
    """Everything that must not depend on where a run was trained."""
    return {
        run.folder.name: (run.results(), (run.folder / "metrics.jsonl").read_bytes())
        for run in find_runs([runs])
    }


def test_without_ray_there_is_one_line(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(command(text, tmp_path, "--engine", "ray", tokens=32)) == 2
    assert capsys.readouterr().err == (
        "parzen: error: ray is not installed; run: pip install 'parzen[ray]'\n"
    )
    assert main(command(text, tmp_path, "--address", "auto", tokens=32)) == 2
    assert "--address and --cpus-per-run go with --engine ray" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:port"])
def test_an_address_where_nobody_listens(text, tmp_path, capsys, address):
    assert main(command(text, tmp_path, "--engine", "ray", "--address", address, tokens=32)) == 2
    assert capsys.readouterr().err.startswith(f"parzen: error: no Ray cluster answers at {address!r} (")


@pytest.mark.slow
# Ray itself leaves sockets and files to the collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_machine_is_lost_and_nothing_else(text, tmp_path, capsys):
    from ray.cluster_utils import Cluster

    assert main(command(text, tmp_path / "here")) == 0
    capsys.readouterr()
    alone = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=alone)
    lost = cluster.add_node(num_cpus=1)
    runs = tmp_path / "there"
    events = []

    def interfere():
        """Waits until two runs have a checkpoint, then takes one of the two machines away."""
        until = time.monotonic() + 240
        while time.monotonic() < until:
            begun = [p.parent for p in runs.glob("*/last.safetensors")]
            going = [folder for folder in begun if not (folder / "results.json").exists()]
            if len(going) == 2:
                events.append({folder.name for folder in going})
                cluster.remove_node(lost, allow_graceful=False)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=interfere)
    thread.start()
    try:
        ray_there = ("--engine", "ray", "--address", cluster.address, "--save-seconds", "0.01")
        assert main(command(text, runs, *ray_there)) == 0
    finally:
        thread.join()
        cluster.shutdown()
    said = capsys.readouterr().out
    assert "Ray: 2 machines, 2 CPUs" in said
    assert "done (4 of 4)" in said
    assert events, "the machine was never taken away"
    assert outcome(runs) == outcome(tmp_path / "here")
    # One of the two was begun again, from a checkpoint.
    times = {
        name: [json.loads(line) for line in (runs / name / "times.jsonl").read_text().splitlines()]
        for name in events[0]
    }
    again = [line["step"] for lines in times.values() for line in lines if "begun" in line and line["step"]]
    assert len(again) == 1
    assert 0 < again[0] < 400
    # Once more: nothing is left to do, and no cluster is needed for that.
    assert main(command(text, runs, "--engine", "ray")) == 0
    assert "4 runs, 4 of them done" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cluster_of_ones_own_and_a_run_that_fails_there(text, tmp_path, capsys):
    nan = command(text, tmp_path, "--engine", "ray", "--lr", "1e8", tokens=3200)
    assert main(nan) == 1
    said = capsys.readouterr()
    assert "Ray: 1 machines" in said.out
    assert said.err.count("failed: ") == said.out.count(": failed (") == 4
    assert all((r.folder / "error.txt").exists() for r in find_runs([tmp_path]))
    assert main(command(text, tmp_path / "b", "--engine", "ray", "--cpus-per-run", "1000", tokens=32)) == 2
    assert "no machine of the Ray cluster has 1000 CPUs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_two_processes(text, tmp_path, capsys):
    short = command(text, tmp_path, "--gpus-per-run", "2", "--kernels", "biweight", tokens=160)
    assert main(short) == 0
    runs = find_runs([tmp_path])
    assert all(run.finished for run in runs)
    assert (runs[0].folder / "log.txt").exists()
    (runs[0].folder / "results.json").unlink()
    (runs[0].folder / "last.safetensors").write_bytes(b"broken")
    assert main(short) == 1
    assert "last.safetensors cannot be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends the children of a process that is killed"
)
def test_no_process_outlives_the_one_that_started_it(text, tmp_path):
    arguments = command(text, tmp_path, "--gpus-per-run", "2", tokens=2 * 16 * 100_000)
    started = subprocess.Popen([sys.executable, "-m", "parzen", *arguments], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not [*tmp_path.glob("*/metrics.jsonl")] and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        started.kill()
        started.wait()
    deadline = time.monotonic() + 60
    while left := _talking_about(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _talking_about(path):
    done = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if path in line and "ps -eo" not in line]

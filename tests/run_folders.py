"""Folders of runs that were never trained, with text that wants to be more than text."""

import json
import math

import numpy as np

from parzen.lab.run.config import RunConfig
from parzen.lab.run.folder import Run
from parzen.lab.run.train import TrainConfig
from parzen.lab.tasks.stories import StoriesConfig
from parzen.models.mosaic import MosaicConfig

WORDS = ["Once", " upon", "<script>alert(1)</script>", "$x_1$", "\n", "猫", "\ud800", "&amp;"]
OFFSETS = {"gaussian": 0.0, "epanechnikov": -0.05, "biweight": -0.06, "knn_gaussian?k=4": -0.01}


def results_of(kernel, layers, seed, loss):
    rng = np.random.default_rng(seed)
    size = len(WORDS)
    weights = rng.random((layers, 4, size, size)) * np.tril(np.ones((size, size)), -1)
    weights *= weights > (0 if kernel == "gaussian" else 0.5)
    support = 20 * rng.random((layers, 4))
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "tokens": 1,
        "share_of_keys": 1.0 if kernel == "gaussian" else 0.1 + 0.01 * seed,
        "support": support.tolist(),
        "bandwidth": [[None] * 4] * layers,
        "attention": {"words": WORDS, "layers": weights.tolist()},
        "baselines": {"unigram": 5.8, "bigram": 4.0},
    }


def add_run(root, kernel="gaussian", layers=1, seed=0, offset=0.0, finished=True, results=None, steps=12):
    model = MosaicConfig(vocab=17, layers=layers, heads=4, width=16, slots=8, kernel=kernel)
    run = Run.create(root, RunConfig(StoriesConfig("a", "b", "c"), model, TrainConfig(steps), seed))
    environment = {
        "torch": "2",
        "machine": "<b>x</b>",
        "command": "/home/me/parzen/cli.py compare --data /a/b.txt",
    }
    (run.folder / "environment.json").write_text(json.dumps(environment))
    loss = math.nan
    for step in range(1, steps + 1 if finished else steps // 2):
        loss = 2 + 4 / step + offset - 0.02 * layers + 0.01 * seed
        run.log({"step": step, "tokens": step * 1000, "train_loss": loss, "loss": loss})
    if finished:
        found = results_of(kernel, layers, seed, loss) if results is None else results
        (run.folder / "results.json").write_text(json.dumps(found))
    return run


def add_runs(root):
    """Four kernels at two depths, the shallow one with two seeds, and a run that did not finish."""
    for name, offset in OFFSETS.items():
        for layers in (1, 4):
            for seed in (0, 1) if layers == 1 else (0,):
                add_run(root, name, layers, seed, offset + (0.003 * seed if name == "biweight" else 0))
    add_run(root, "triweight", 4, finished=False)
    return root

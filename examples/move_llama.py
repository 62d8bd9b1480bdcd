"""A Llama-shaped model learns stories with softmax, then moves to a sparse kernel in three ways.

    python examples/move_llama.py [TRAIN VALID] [--steps 1000] [--further 200] [--seed 0]

Prints validation losses, in nats a token: at the moment of the change and after a few more steps. Without
files the built-in stories are read. Needs ``pip install 'parzen[lab,transformers]'``.
"""

import argparse
import copy
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from parzen.integrations.transformers import register
from parzen.lab.tasks.stories import load_stories
from parzen.nn import anneal, convert, match

CONTEXT, BATCH = 128, 8
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}


def main(argv=None):
    """Trains, moves, and returns the losses by name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", help="stories to learn, and to validate on")
    parser.add_argument("--steps", type=int, default=1000, help="with softmax")
    parser.add_argument("--further", type=int, default=200, help="after the move")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, help="bytes of text to read")
    given = parser.parse_args(argv)
    train_file, valid_file = (*given.files, None, None)[:2]
    stories = load_stories(train_file, valid_file, vocab=2048, context=CONTEXT, most=given.most, say=print)
    stream = torch.tensor(stories.train[:]).long()
    windows = stories.windows(CONTEXT)[0]
    held_out = windows[:: max(1, len(windows) // 64)][:64]

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(stream) - CONTEXT, (BATCH,), generator=generator)
            yield torch.stack([stream[i : i + CONTEXT] for i in starts.tolist()])

    @torch.no_grad()
    def validate(model):
        return float(torch.stack([model(x, labels=x).loss for x in held_out.split(16)]).mean())

    def train(model, steps, lr, annealing=None):
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
        for _, tokens in zip(range(steps), batches(given.seed + 1), strict=False):
            model(tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if annealing:
                annealing.step()
        return validate(model)

    register()
    torch.manual_seed(given.seed)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=stories.vocab, **LLAMA))
    found = {"softmax": train(llama, given.steps, 3e-3)}
    found["softmax, further"] = train(copy.deepcopy(llama), given.further, 1e-3)
    for kernel in ("biweight", "epanechnikov"):
        at_once, matched, annealed = (copy.deepcopy(llama) for _ in range(3))
        convert(at_once, kernel)
        found[f"{kernel}, at once"] = validate(at_once)
        found[f"{kernel}, at once, further"] = train(at_once, given.further, 1e-3)
        convert(matched, kernel)
        calibration = [tokens for _, tokens in zip(range(2), batches(7), strict=False)]
        match(matched, calibration, lambda x, model=matched: model(x, labels=x).loss)
        found[f"{kernel}, matched"] = validate(matched)
        found[f"{kernel}, matched, further"] = train(matched, given.further, 1e-3)
        annealing = anneal(annealed, kernel, given.further // 2)
        found[f"{kernel}, annealed, further"] = train(annealed, given.further, 1e-3, annealing)
    for name, loss in found.items():
        print(f"{name:32} {loss:.3f}")
    return found


if __name__ == "__main__":
    main()

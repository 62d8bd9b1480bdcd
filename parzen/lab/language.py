"""Language modelling on stories, as the training loop sees it."""

from __future__ import annotations

from torch import Tensor, nn

from parzen.lab import evaluate
from parzen.lab.tasks.stories import Stories

Windows = tuple[Tensor, Tensor]


class Language:
    """Random crops to train on; the loss on fixed windows of the validation stream.

    Args:
        stories: the two streams.
        context: T.
        windows: what to evaluate on (inputs and targets, (N, T)); default the whole validation stream.
    """

    def __init__(self, stories: Stories, context: int, windows: Windows | None = None) -> None:
        self.stories, self.context, self.vocab = stories, context, stories.vocab
        self.windows = stories.windows(context) if windows is None else windows

    def batch(self, seed: int, step: int, size: int) -> Windows:
        """Inputs and targets (size, T) of one step."""
        return self.stories.batches(size, self.context, seed).at(step)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss, in nats per token."""
        return {"loss": evaluate.loss(model, self.windows)}

"""``parzen export``: a trained run as a folder that transformers loads."""

from __future__ import annotations

import errno
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast

from parzen.integrations.transformers import MosaicForCausalLM, ParzenMosaicConfig
from parzen.lab.data.text import END
from parzen.lab.data.tokens import read_tokenizer
from parzen.lab.errors import UserError
from parzen.lab.experiments import open_run
from parzen.lab.run.sweep import best_model
from parzen.lab.tasks.stories import StoriesConfig
from parzen.models.mosaic import Mosaic


def export_run(folder: Path, to: Path) -> MosaicForCausalLM:
    """Writes the best weights of a mosaic that learned stories, its config and its tokeniser into ``to``.

    ``<|endoftext|>`` begins, ends and pads a text; padding goes to the left.

    Args:
        folder: of the run.
        to: a folder, made if it is missing; files of the same names in it are replaced.

    Raises:
        UserError: no such run, one without a checkpoint, another model or task; ``to`` cannot be written.
    """
    run = open_run(folder)
    model = best_model(run)
    if not isinstance(run.config.task, StoriesConfig) or not isinstance(model, Mosaic):
        raise UserError(f"{folder} is no mosaic that was trained on stories")
    tokens = read_tokenizer(folder / "tokenizer.json")
    end = tokens.token_to_id(END)
    config = ParzenMosaicConfig.of(model.config, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    exported = MosaicForCausalLM(config)
    exported.mosaic.load_state_dict(model.state_dict())
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, padding_side="left", **special)
    try:
        # Of a file in its place transformers says nothing but a line in its log.
        if to.exists() and not to.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        exported.save_pretrained(to)
        tokenizer.save_pretrained(to)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write into {to}: {reason}; choose another place") from error
    return exported.eval()

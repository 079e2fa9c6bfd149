"""A model of Qwen2.5-0.5B's shape that says a text by heart, so that its answers can be copies of parts of a prompt.

Random weights say random things, which no strategy can guess. Here each token has one successor: rows of the output layer
are the embeddings of the tokens before, and the layers, of full size, add next to nothing. A step costs as much as one of
the shape; its output layer is a matrix of its own.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

__all__ = ["CYCLE", "successors", "write_chain_model"]

CYCLE = 500  # tokens until a text begins again
FIRST = 300  # ids below are bytes and special tokens
QUIET = 0.02  # so little that only the last token counts


def successors(vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: the token that follows each; ids from `FIRST` on lie in cycles of `CYCLE`, the others follow
    themselves."""
    order = np.random.default_rng(7).permutation(np.arange(FIRST, FIRST + (vocab_size - FIRST) // CYCLE * CYCLE))
    cycles = order.reshape(-1, CYCLE)
    following = np.arange(vocab_size)
    following[cycles] = np.roll(cycles, -1, axis=1)
    return following


def write_chain_model(folder: Path, quiet: float = QUIET) -> Path:
    """Turn the folder of a random model with tied embeddings into one that follows `successors`.

    Args:
        quiet: what is left of each layer's contribution; with much of it the text before decides some tokens.
    """
    weights_file, config_file = folder / "model.safetensors", folder / "config.json"
    weights = load_file(weights_file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * quiet
    embedding = weights["model.embed_tokens.weight"]
    head = torch.empty_like(embedding)
    head[torch.from_numpy(successors(len(embedding)))] = embedding
    head[:FIRST] *= 0.01  # special tokens never win
    weights["lm_head.weight"] = head
    save_file(weights, weights_file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    return folder

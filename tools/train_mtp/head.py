"""A multi-token-prediction head for a Llama-like model, and its chain of drafts over whole rows of documents.

The head has the structure and the names of Qwen3-Next's and Qwen3.5's heads. From the target's hidden state of slot p
(after the final norm) and the embedding of token p + 1, it predicts token p + 2. Embedding and LM head are the
target's::

    hidden state of slot p --norm--.
                                   fc -> decoder layer -> norm -> the target's LM head -> token p + 2
    embedding of p + 1 ----norm----'

The first draft after slot p comes from slot p. Each further draft comes from the next slot, where the head's own output
of the slot before replaces the target's hidden state. The head's keys of slots up to p come from the target's hidden
states, because the head follows the target: after each step, its KV is computed from the true tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import ModelArgs, TransformerBlock

WEIGHTS, CONFIG = "mtp.safetensors", "config.json"
_PREFIX = "mtp."


class MTPHead(nn.Module):
    """Head with one decoder layer of the target's kind. ``args`` are the target's."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.layers = [TransformerBlock(args)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, mask: mx.array, cache: ChainCache) -> mx.array:
        """Return the head's output, [B, L, H].

        Args:
            embeddings: [B, L, H], embedding of the token after each slot.
            hidden: [B, L, H], hidden state of each slot, or the head's output of the slot before.
            mask: [B, 1, L, S] bool, True where a slot attends to a key of ``cache``.
        """
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(mx.concatenate(parts, axis=-1)), mask, cache))


class ChainCache:
    """Keys and values of all passes of :func:`chain`, in order of the passes. Works as an mlx-lm layer's cache."""

    offset = 0  # position of a row's first slot for RoPE, in every pass

    def __init__(self) -> None:
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a pass, [B, heads, L, D]. Return the keys and values of all passes, [B, heads, S, D]."""
        self._keys.append(keys)
        self._values.append(values)
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def new_head(target: nn.Module) -> MTPHead:
    """Return a head to be trained, in float32.

    Its layer and its last norm are copies of the target's last layer and final norm. ``fc`` starts as the identity
    on the hidden state, plus half of the random initial weights.
    """
    head = MTPHead(target.args)
    head.layers[0].update(_copies(target.model.layers[-1].parameters()))
    head.norm.update(_copies(target.model.norm.parameters()))
    size = target.args.hidden_size
    identity = mx.concatenate([mx.zeros((size, size)), mx.eye(size)], axis=1)
    head.fc.weight = 0.5 * head.fc.weight + identity
    head.set_dtype(mx.float32)
    mx.eval(head.parameters())
    return head


def _copies(parameters: Any) -> Any:
    return tree_map(lambda array: array.astype(mx.float32) + 0, parameters)


def chain(head: MTPHead, hidden: mx.array, embeddings: mx.array, segments: mx.array, num_passes: int) -> list[mx.array]:
    """Compute the head's outputs for chains of drafts that start in each slot, one chain a slot.

    Passes count from 1. Pass k computes draft k of every chain. A chain that starts in slot p has the output for draft
    k in slot p + k - 1. The hidden state of a slot in pass k is the output of pass k - 1 in the slot before. The
    embeddings are of the true tokens, as if all earlier drafts were right. In pass k, the first k - 1 slots of a
    document have no meaningful output.

    Args:
        hidden: [B, L, H], the target's hidden states.
        embeddings: [B, L, H], embedding of the token after each slot.
        segments: [B, L] int32, number of each slot's document within the row.
        num_passes: number of drafts of a chain.

    Returns:
        For each pass, [B, L, H].
    """
    length = hidden.shape[1]
    slots = mx.arange(length)
    back = slots[:, None] - slots  # [L, L], distance from a slot back to a key's slot
    same = segments[:, None, :, None] == segments[:, None, None, :]
    cache = ChainCache()
    outputs: list[mx.array] = []
    for num_drafts in range(num_passes):  # number of drafts of a chain before this pass
        # True keys end with the slot of the first draft. Each later slot has the key of its own pass.
        masks = [same & (back >= num_drafts)]
        masks += [mx.broadcast_to(back == num_drafts - earlier, same.shape) for earlier in range(1, num_drafts + 1)]
        outputs.append(head(embeddings, hidden, mx.concatenate(masks, axis=-1), cache))
        hidden = mx.pad(outputs[-1][:, :-1], [(0, 0), (1, 0), (0, 0)])
    return outputs


def save_head(folder: Path, head: MTPHead, facts: dict[str, Any]) -> None:
    """Write a head as ``mtp.safetensors`` (float16) and ``config.json``. Creates the folder or replaces the files.

    Args:
        facts: JSON-compatible facts about the target and the training, for ``config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {_PREFIX + name: array.astype(mx.float16) for name, array in tree_flatten(head.parameters())}
    mx.save_safetensors(str(folder / WEIGHTS), weights, metadata={"format": "mlx"})
    config = {
        "model_type": "mtp",
        "mtp_num_hidden_layers": 1,
        "norms": "unshifted",  # a norm multiplies by its weight, not by 1 + weight
        "fc_input": ["embedding", "hidden"],
        "torch_dtype": "float16",
        **facts,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_head(folder: Path, args: ModelArgs) -> MTPHead:
    """Return the head of a folder, in float32. Raises SystemExit if it is missing or does not fit the target."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: run `python -m tools.fixtures.train_mtp train` first")
    head = MTPHead(args)
    weights = [(name.removeprefix(_PREFIX), array.astype(mx.float32)) for name, array in mx.load(str(path)).items()]
    try:
        head.load_weights(weights)
    except ValueError as error:
        raise SystemExit(f"{path} does not fit the target model: {error}") from error
    mx.eval(head.parameters())
    return head

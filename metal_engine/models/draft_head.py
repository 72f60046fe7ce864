"""Draft head of a checkpoint (multi-token prediction): one more decoder layer over the model's hidden states.

Heads of all supported architectures have this structure. In Nemotron, the layer consists of two blocks: attention, then
experts.

From the hidden state of position p and token p + 1, a head predicts token p + 2. It uses the model's LM head, and the
model's embeddings unless it has its own. It stores its own keys and values in the blocks of the model's requests::

    hidden state of p  --norm--.
                               fc -> blocks, KV at the slot of p -> norm -> the model's LM head -> token p + 2
    embedding of p + 1 --norm--'

If token p + 1 belongs to an image, its image feature replaces its embedding. Rotary positions have the model's axes
(M-RoPE).

The head can draft several tokens in a chain. Each further run takes the head's output after the last norm in place of
the hidden state of p + 1. With token p + 2, the run predicts token p + 3.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.checkpoints.dequantized import dequantize as dequantize_layers
from metal_engine.checkpoints.draft_heads.quantization import check_finite, check_types, mlx_quantization
from metal_engine.checkpoints.draft_heads.weights import (
    HeadWeights,
    embedding_table,
    has_attention,
    last_attention_layer,
)
from metal_engine.checkpoints.loader import read_weights
from metal_engine.device.info import computes_on_cpu
from metal_engine.errors import ModelLoadError, UnsupportedModelError, one_line
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.models.cache_tree import CacheGroup
from metal_engine.models.cpu_ops import StepPositions, use_faster_layers
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.indexer import indexers, patch_indexers
from metal_engine.models.layer_cache import LayerCache, RecordingCache, layer_cache, link_indexes
from metal_engine.models.multimodal.axes_rope import rotary_positions, use_axes
from metal_engine.models.multimodal.merging import StepImages
from metal_engine.models.paged_model import PagedModel

# Names of the norms' epsilon in mlx-lm's arguments.
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon")


class DraftHead(nn.Module):
    """Head with the structure and the parameter names of Qwen3-Next's and Qwen3.5's heads.

    Args:
        layers: mlx-lm blocks, exactly one of them with attention.
        hidden_size: width of hidden states and embeddings.
        eps: epsilon of the norms.
        hidden_first: True if the first half of the input of ``fc`` is the hidden state, False if it is the embedding.
        scales_hidden: True if the head multiplies hidden states by ``hidden_scale`` before their norm.
        vocab_size: number of rows of the head's own embedding table; 0 if it uses the model's.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        hidden_size: int,
        eps: float,
        *,
        hidden_first: bool = False,
        scales_hidden: bool = False,
        vocab_size: int = 0,
    ) -> None:
        super().__init__()
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = layers
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self._hidden_first = hidden_first
        if scales_hidden:
            self.hidden_scale = mx.ones(hidden_size)
        if vocab_size:
            self.embed_tokens = nn.Embedding(vocab_size, hidden_size)

    def __call__(self, embeddings: mx.array, hidden: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return the head's output after the last norm, [N, T, hidden_size].

        Args:
            embeddings: for each position p, the embedding of token p + 1, [N, T, hidden_size].
            hidden: for each position p, its hidden state, [N, T, hidden_size].
            mask: result of the cache's ``make_mask``.
            cache: cache of the block with attention.
        """
        if "hidden_scale" in self:
            hidden = hidden * self.hidden_scale
        parts = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(parts[::-1] if self._hidden_first else parts, axis=-1))
        for layer in self.layers:
            x = layer(x, mask, cache)
        return self.norm(x)


def new_head(model: nn.Module, layers: Sequence[int] = (), **options: Any) -> DraftHead:
    """Return a head with random weights for a model.

    Args:
        model: a loaded mlx-lm model.
        layers: for each block, the index of the layer of the model that has the same structure. Default: one block like
            the last layer with attention.
        options: further arguments of :class:`DraftHead`.

    Raises:
        UnsupportedModelError: the model's layers cannot be created in this way, not exactly one block has attention, or
            the epsilon of the model's norms has an unknown name.
    """
    args = getattr(getattr(model, "language_model", model), "args", None) or model.args
    blocks = [_new_layer(model.layers[i], i, args) for i in layers or (last_attention_layer(model),)]
    if (num_attention := sum(map(has_attention, blocks))) != 1:
        raise UnsupportedModelError(f"its draft head has {num_attention} blocks with attention, not one")
    eps = next((getattr(args, name) for name in _EPSILONS if hasattr(args, name)), None)
    if eps is None:
        raise UnsupportedModelError("its norms have no epsilon of the usual name, which a draft head needs")
    return DraftHead(blocks, args.hidden_size, eps, **options)


def _new_layer(like: nn.Module, index: int, args: Any) -> nn.Module:
    """Return a new layer of the same class as another layer, created with the same arguments.

    Args:
        like: layer of the model.
        index: index of ``like`` in the model.
        args: mlx-lm's arguments of the model.

    Raises:
        UnsupportedModelError: the class requires more than two arguments.
    """
    cls: Any = type(like)
    required = [p for p in inspect.signature(cls.__init__).parameters.values() if p.default is p.empty][1:]  # not self
    if len(required) not in (1, 2):
        raise UnsupportedModelError(f"its {cls.__name__} cannot be created for a draft head")
    return cls(args) if len(required) == 1 else cls(args, getattr(like, required[1].name, index))


def load_head(model: nn.Module, weights: HeadWeights, dtype: mx.Dtype, *, dequantize: bool) -> DraftHead:
    """Return the head of a checkpoint for its model, with its weights in memory.

    Args:
        model: a loaded mlx-lm model.
        weights: weights of the head in the checkpoint.
        dtype: type of floating-point weights, scales and biases, except arrays that MLX or mlx-lm needs in float32.
        dequantize: True to dequantize all weights.

    Raises:
        ModelLoadError: the weights do not fit the model, lack their scales, or are not finite.
        UnsupportedModelError: see :func:`new_head`.
    """
    head = new_head(
        model,
        weights.layers,
        hidden_first=weights.hidden_first,
        scales_hidden="hidden_scale" in weights.arrays,
        vocab_size=weights.vocab_size,
    )
    nn.quantize(head, class_predicate=lambda path, module: mlx_quantization(path, module, weights.arrays))
    try:
        head.load_weights(list(weights.arrays.items()))
    except ValueError as error:
        raise ModelLoadError(f"its weights do not fit the model: {one_line(error)}") from error
    check_types(head)
    if dequantize:
        dequantize_layers(head)
    may_cast = getattr(model, "cast_predicate", lambda name: True)  # mlx-lm keeps some weights of routers in float32
    cast = {name: array.astype(dtype) for name, array in _floats(head) if may_cast(name) and _has_any_type(name)}
    head.update(tree_unflatten(list(cast.items())))
    head.eval()
    read_weights(head)
    check_finite(head)
    return head


def _has_any_type(name: str) -> bool:
    """Return True if MLX takes the weights of this name in any floating-point type, and not only in float32."""
    return not name.endswith(".global_scale")


def _floats(head: DraftHead) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(head.parameters())
    return [(name, array) for name, array in flat if mx.issubdtype(array.dtype, mx.floating)]


def _one_or_group(caches: Sequence[Any]) -> Any:
    """Return a layer's caches as mlx-lm expects them: the only cache, or a group."""
    return caches[0] if len(caches) == 1 else CacheGroup(caches)


class _Written(Exception):
    """Raised to end a forward pass of the head after it has written its keys and values."""


class _OnlyWrites:
    """Attention of a step that raises :class:`_Written` when a layer attends, which is after it has written K and V.

    Args:
        attention: attention of the step, to which all other methods are delegated.
    """

    def __init__(self, attention: StepAttention) -> None:
        self._attention = attention

    def attend(self, *args: Any, **options: Any) -> mx.array:
        raise _Written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


class PagedDraftHead:
    """Draft head that runs packed rows. The constructor adds the head's states to its model's pool.

    Args:
        head: head with the weights of a checkpoint.
        target: model of the head. Its pool must not be allocated yet.

    Raises:
        UnsupportedModelError: the model has no usable hidden states, or the head does not run on them. Also raised if
            the head computes attention without mlx-lm's shared function, or if no layer has a state like the head's.

    Attributes:
        head: the head.
        pool: pool of only the head's states: keys and values, and also index keys if the head's layer has an index. The
            model's pool has the same states.
    """

    def __init__(self, head: DraftHead, target: PagedModel) -> None:
        if target.hidden_problem is not None:
            raise UnsupportedModelError(target.hidden_problem)
        self.head, self._target = head, target
        self._embedding = head.embed_tokens if "embed_tokens" in head else embedding_table(target.model)
        if computes_on_cpu():
            use_faster_layers(head)
        patch_indexers(head)
        if target.images is not None and target.images.encoder.axes is not None:
            use_axes(head, target.images.encoder.axes)
        recorders, hidden = [RecordingCache()], mx.zeros((2, head.norm.weight.size), target.dtype)
        if indexers(head):
            recorders.append(RecordingCache())
        try:
            mask, cache = recorders[0].make_mask(1), _one_or_group(recorders)
            output = head(self._embedding(mx.array([[0], [1]])), hidden[:, None], mask, cache)
            target.logits_of(output[:, 0])
        except Exception as error:
            problem = f"{type(error).__name__}: {one_line(error)}"
            raise UnsupportedModelError(
                f"its draft head does not run on the output of its trunk ({problem})"
            ) from error
        specs = [recorder.spec for recorder in recorders if recorder.spec is not None and recorder.num_reads]
        if len(specs) < len(recorders):
            raise UnsupportedModelError("its draft head computes attention in a way of its own")
        own_pool = target.pool
        self.pool = StatePool([target.add_state(spec) for spec in specs])
        checked = [state.spec for state in own_pool.states]
        if any(state.spec not in checked for state in self.pool.states):
            target.pool = own_pool
            raise UnsupportedModelError("the attention of its draft head differs from that of its layers")
        self._step = CurrentStep()
        caches = [layer_cache(self._step, state, None) for state in self.pool.states]
        assert isinstance(caches[0], LayerCache)
        self._attention, self._cache = caches[0], _one_or_group(caches)
        link_indexes([self._cache])
        self._positions: type[mx.array] = StepPositions if computes_on_cpu() else mx.array

    def __call__(
        self,
        token_ids: mx.array,
        hidden: mx.array,
        rows: StepRows,
        attention: StepAttention,
        images: StepImages | None = None,
    ) -> mx.array:
        """Write the keys and values of some rows, and return the head's output for them, [N, hidden_size].

        Args:
            token_ids: for a row of position p, token p + 1, [N] int32.
            hidden: hidden states of the rows, [N, hidden_size]. In a chain, the head's output for position p - 1.
            rows: rows of a step.
            attention: attention of the backend for ``rows``.
            images: features of the tokens in ``token_ids``; None if none of these tokens has a feature.
        """
        return self._run(token_ids, hidden, rotary_positions(rows, self._positions), rows, attention, images)

    def write(
        self,
        token_ids: mx.array,
        hidden: mx.array,
        rows: StepRows,
        attention: StepAttention,
        images: StepImages | None = None,
    ) -> None:
        """Write the keys and values of some rows, with the arguments of :meth:`__call__`.

        Does not build the graph after the writes, which saves most of the head's host time.
        """
        with suppress(_Written):
            self(token_ids, hidden, rows, _OnlyWrites(attention), images)

    def forward_of_arrays(
        self, token_ids: mx.array, hidden: mx.array, positions: mx.array, rows: TracedRows, attention: StepAttention
    ) -> tuple[mx.array, None]:
        """Run the head with rows that are given only as arrays, for a trace that other steps will replay.

        The arguments correspond to those of :meth:`__call__`. ``positions`` are the rows' rotary positions, [N] int32.

        Returns:
            Output, [N, hidden_size], and None. The pair matches :meth:`PagedModel.forward_of_arrays`, whose second
            item are hidden states.
        """
        return self._run(token_ids, hidden, self._positions(positions), rows, attention), None

    def _run(
        self,
        token_ids: mx.array,
        hidden: mx.array,
        positions: mx.array,
        rows: StepRows | TracedRows,
        attention: StepAttention,
        images: StepImages | None = None,
    ) -> mx.array:
        step = self._step
        step.rows, step.attention, step.positions = rows, attention, positions
        try:
            embeddings = self._embedding(token_ids[:, None])
            if images is not None:
                embeddings[images.rows, 0] = images.embeddings.astype(embeddings.dtype)
            return self.head(embeddings, hidden[:, None], self._attention.make_mask(1), self._cache)[:, 0]
        finally:
            step.rows = step.attention = step.positions = None
            step.selection_plans = {}

    def follow(
        self,
        token_ids: mx.array,
        hidden: mx.array,
        rows: StepRows,
        attention: StepAttention,
        backend: AttentionBackend,
        images: StepImages | None = None,
    ) -> mx.array:
        """Write the keys and values of a step's rows, and return the head's output for the rows that sample.

        If at most half of the rows sample, the head runs a second time with only the rows that sample. The first run's
        attention and feed-forward layer are then never evaluated, only its writes.

        Args:
            token_ids: for a row of position p, token p + 1, [N] int32.
            hidden: hidden states of the rows, [N, hidden_size].
            rows: rows of a step of the model.
            attention: attention of ``backend`` for ``rows``.
            backend: attention backend of the model.
            images: features of the tokens in ``token_ids``. The token after a row that samples must have no feature.

        Returns:
            Output for the rows in ``rows.logits_indices``, [R, hidden_size].
        """
        output = self(token_ids, hidden, rows, attention, images)
        if len(rows.logits_indices) == rows.num_tokens:
            return output
        indices = mx.array(rows.logits_indices)
        if 2 * len(rows.logits_indices) > rows.num_tokens:
            return output[indices]
        del output  # its graph refers to arrays of the pool
        sampling = rows.sampling_rows()
        return self(token_ids[indices], hidden[indices], sampling, backend.for_step(sampling))

    def logits(self, output: mx.array) -> mx.array:
        """Return the logits of the predicted tokens, [R, vocab_size], from the head's output, [R, hidden_size]."""
        return self._target.logits_of(output)

"""Engines on a small random model that share KV through a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from metal_engine.kv_transfer.fingerprint import kv_fingerprint
from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.runner_side import KVConnectorRunner, block_parts, state_parts
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import KVStore
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.kv_transfer.transfer import KVTransfer
from metal_engine.models.draft_head import DraftHead, PagedDraftHead
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import engine_for
from tests.support.speculation import draft_for_free
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import tiny_model

MakeEngine = Callable[..., "KVEngine"]


@dataclass
class KVEngine:
    """Engine with its KV transfer (None without a KV store)."""

    core: SteppedEngine
    paged: PagedModel
    transfer: KVTransfer | None
    layout: BlockLayout

    @property
    def stats(self) -> KVTransferStats:
        return self.core.metrics.kv_transfer

    def add(self, prompts: Sequence[list[int]], max_tokens: int = 6, *, options: RequestOptions | None = None) -> None:
        """Submit each prompt as a request for greedy tokens. Its id is the prompt's index."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self.core.add_request(str(i), self.core.prepare(prompt, params), options)

    def run(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int = 6,
        *,
        options: RequestOptions | None = None,
        flush: bool = True,
    ) -> list[list[int]]:
        """Return the greedy tokens of each prompt.

        All prompts run at once, and every step checks the scheduler's integrity.
        """
        outputs: list[list[int]] = [[] for _ in prompts]
        self.add(prompts, max_tokens, options=options)
        while self.core.has_requests:
            for output in self.core.step():
                assert output.error is None, output.error
                outputs[int(output.request_id)] += output.token_ids
            self.core.scheduler.check_integrity()
        assert self.core.stats.num_used_blocks == 0
        if self.transfer is not None:
            assert self.transfer.num_reserved_bytes == 0, "host memory leaked"
            assert not flush or self.transfer.flush(60.0)
        return outputs


def kv_engine(
    tokenizer: Tokenizer,
    store: Path | KVStore | None,
    *,
    model: Any = None,
    budget: int = 64,
    block_size: int = 8,
    num_blocks: int = 200,
    max_size: int = 1 << 30,
    dtype: mx.Dtype = mx.float32,
    ahead: bool = False,
    behind: bool = False,
    replay: bool = False,
    draft: Any = None,
    make_head: Callable[[Any], DraftHead] | None = None,
    kv_cache_dtype: str = "auto",
    **config: Any,
) -> KVEngine:
    """Return an engine with its own model and pool, like one in a separate process.

    Args:
        store: directory or store of the KV; None for an engine without a KV store.
        max_size: capacity of a disk store in bytes.
        behind: dispatch a step while earlier steps run, as on a GPU.
        replay: replay decode steps as soon as their sizes are known.
        draft: draft model. Its drafts are treated as free.
        make_head: makes a draft head for the model. Its drafts are treated as free.
        config: fields of :class:`KVTransferConfig`.
    """
    model = tiny_model(dtype=dtype) if model is None else model
    paged = PagedModel(model, kv_cache_dtype=kv_cache_dtype)
    if make_head is not None:
        draft = PagedDraftHead(make_head(model), paged)
    sizes = {"budget": budget, "block_size": block_size, "num_blocks": num_blocks, "max_num_seqs": 16}
    specs = [state.spec for state in paged.pool.states]
    parts, of_states = block_parts(specs, block_size), state_parts(specs)
    weights = tree_flatten(model.parameters())
    fingerprint = kv_fingerprint(weights, {"rope_theta": 10000.0}, block_size, [*parts, *of_states])  # type: ignore[arg-type]
    layout = BlockLayout(parts, fingerprint)
    state_layout = BlockLayout(of_states, fingerprint) if of_states else None
    if store is None:
        core = engine_for(paged, tokenizer, vocab_size=256, ahead=ahead, behind=behind, replay=replay, **sizes)
        return KVEngine(core, paged, None, layout)
    transfer_config = KVTransferConfig(kv_connector="disk", **config)
    if isinstance(store, Path):
        store = DiskStore(store, fingerprint, max_size=max_size)
    stats = KVTransferStats()
    transfer = KVTransfer(store, layout, transfer_config, stats, state_layout=state_layout)
    runner_side = KVConnectorRunner(transfer, layout, state_layout)
    core = engine_for(
        paged,
        tokenizer,
        vocab_size=256,
        ahead=ahead,
        behind=behind,
        replay=replay,
        connector=(KVConnectorScheduler(transfer, transfer_config, stats), runner_side),
        fingerprint=fingerprint,
        draft=draft,
        **sizes,
    )
    if draft is not None:
        draft_for_free(core)
    return KVEngine(core, paged, transfer, layout)


def hand_over(
    producer: KVEngine,
    consumer: KVEngine,
    prompts: Sequence[list[int]],
    after_step: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the consumer's outputs. Its requests arrive while the producer still computes the prompts.

    Calls ``after_step`` after each step of the consumer.
    """
    producer.add(prompts, 1, options=RequestOptions(do_remote_decode=True))
    consumer.add(prompts, options=RequestOptions(do_remote_prefill=True))
    outputs: list[list[int]] = [[] for _ in prompts]
    while consumer.core.has_requests:
        if producer.core.has_requests:
            producer.core.step()
        for output in consumer.core.step():
            outputs[int(output.request_id)] += output.token_ids
        after_step()
        consumer.core.scheduler.check_integrity()
    return outputs

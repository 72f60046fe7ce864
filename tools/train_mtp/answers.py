"""The target's own answers: the documents that a head is trained on.

Prompts alternate between templates (``prompts``) and user turns that the model samples itself: it continues the chat
template after the beginning of a user's turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tools.train_mtp.documents import MIN_PROMPT_TOKENS, Document
from tools.train_mtp.prompts import Message, held_out_prompts, training_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tools.train_mtp.target import Target

HELD_OUT_TOKENS = 128  # longest greedy answer to a held-out prompt
_TURN_TOKENS = 64  # longest user turn that the model samples
_MIN_TURN_TOKENS = 4
_MAX_PROMPT_TOKENS = 256
_BLOCK_SIZE = 16
# Freed memory that MLX keeps on a GPU other than Metal's, where the engine would keep as little as on a CPU.
_GPU_CACHE_BYTES = 8 << 30
# Temperatures of successive rounds of answers.
_TEMPERATURES = (0.7, 0.0, 0.7)


class Generator(Protocol):
    """Function that generates outputs for a batch of prompts."""

    def __call__(self, prompts: list[list[int]], *, temperature: float, max_tokens: int, seed: int) -> list[list[int]]:
        """Return the output tokens of each prompt. The end-of-sequence token of a completed output is the last one."""
        ...


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """Settings of a run. It ends after ``minutes``, or with ``num_documents``, whichever comes first.

    Attributes:
        num_documents: number of documents for training. Held-out documents do not count.
        batch: requests that run at a time.
        max_tokens: tokens of the longest answer.
    """

    minutes: float
    num_documents: int
    batch: int
    max_tokens: int
    seed: int = 0


def make_documents(
    generate: Generator,
    tokenizer: PreTrainedTokenizerFast,
    eos_token_ids: frozenset[int],
    settings: AnswerSettings,
    report: Callable[[str], None],
) -> list[Document]:
    """Return held-out documents with greedy answers, and documents for training.

    A round has twice as many prompts as a batch. The run may last one round longer than ``minutes``.

    Args:
        report: called with a line of text after each round.
    """
    began = time.monotonic()
    held_out = [chat_tokens(tokenizer, messages) for messages in held_out_prompts()]
    answers = generate(held_out, temperature=0.0, max_tokens=HELD_OUT_TOKENS, seed=settings.seed)
    documents = [_document(prompt, answer, held_out=True) for prompt, answer in zip(held_out, answers, strict=True)]
    report(f"{len(documents)} held-out answers, {sum(map(len, answers))} tokens, {time.monotonic() - began:.1f} s")
    known = {tuple(prompt) for prompt in held_out}
    templates = itertools.cycle([chat_tokens(tokenizer, m) for m in training_prompts(settings.seed)])
    num_tokens, num_held_out, per_round = 0, len(documents), 2 * settings.batch
    for turn in itertools.count():
        done = len(documents) - num_held_out
        if time.monotonic() - began >= 60 * settings.minutes or done >= settings.num_documents:
            return documents
        wanted = min(per_round, settings.num_documents - done)
        seed = settings.seed + turn * per_round
        if turn % 2 == 0:
            prompts = list(itertools.islice(templates, wanted))
        else:
            prompts = sampled_prompts(generate, tokenizer, eos_token_ids, wanted, seed)
        prompts = [p for p in prompts if tuple(p) not in known and len(p) <= _MAX_PROMPT_TOKENS]
        temperature = _TEMPERATURES[turn // 2 % len(_TEMPERATURES)]
        answers = (
            generate(prompts, temperature=temperature, max_tokens=settings.max_tokens, seed=seed) if prompts else []
        )
        new = [_document(p, a) for p, a in zip(prompts, answers, strict=True) if len(a) > 1]
        documents += new
        num_tokens += sum(map(len, answers))
        seconds = time.monotonic() - began
        kind = "templates" if turn % 2 == 0 else "sampled prompts"
        report(
            f"{len(documents) - num_held_out} documents ({len(new)} new, {kind}, temperature {temperature}), "
            f"{num_tokens} answer tokens, {seconds:.1f} s"
        )
    raise AssertionError  # the loop above has no end


def chat_tokens(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """Return the token ids of a conversation, up to the beginning of the assistant's next turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def sampled_prompts(
    generate: Generator, tokenizer: PreTrainedTokenizerFast, eos_token_ids: frozenset[int], count: int, seed: int
) -> list[list[int]]:
    """Return up to ``count`` prompts whose user turn the model has sampled at temperature 1.

    Turns without an end, very short turns and repeated turns are left out.
    """
    mark = "MARK"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in text.split(mark))
    turns = generate([list(before)] * count, temperature=1.0, max_tokens=_TURN_TOKENS, seed=seed)
    complete = {tuple(turn[:-1]): None for turn in turns if len(turn) > _MIN_TURN_TOKENS and turn[-1] in eos_token_ids}
    return [[*before, *turn, *after] for turn in complete]


def _document(prompt: list[int], answer: list[int], held_out: bool = False) -> Document:
    assert len(prompt) >= MIN_PROMPT_TOKENS
    return Document(np.array([*prompt, *answer], np.int32), len(prompt), held_out)


class EngineGenerator:
    """:class:`Generator` that uses :class:`metal_engine.LLM`. Each request has its own seed.

    On a GPU other than Metal's, the engine uses its settings for CPUs, so sizes are given explicitly.

    Call ``load_optimized_blas`` first: this class imports MLX.
    """

    def __init__(self, path: Path, settings: AnswerSettings) -> None:
        import mlx.core as mx

        from metal_engine import LLM

        longest = _MAX_PROMPT_TOKENS + max(settings.max_tokens, HELD_OUT_TOKENS)
        blocks = -(-longest // _BLOCK_SIZE)
        is_other_gpu = mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()
        self._llm = LLM(
            str(path),
            max_num_seqs=settings.batch,
            max_num_batched_tokens=max(2048, 2 * settings.batch) if is_other_gpu else None,
            max_model_len=blocks * _BLOCK_SIZE,
            num_gpu_blocks_override=(blocks + 1) * settings.batch,
            block_size=_BLOCK_SIZE,
        )
        if is_other_gpu:
            mx.set_cache_limit(_GPU_CACHE_BYTES)

    def __call__(self, prompts: list[list[int]], *, temperature: float, max_tokens: int, seed: int) -> list[list[int]]:
        from metal_engine import SamplingParams

        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i) for i in range(len(prompts))
        ]
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(result.token_ids) for result in results]

    def close(self) -> None:
        self._llm.close()


class MlxLmGenerator:
    """:class:`Generator` that uses mlx-lm's batches. All requests of a call share one seed."""

    def __init__(self, target: Target, settings: AnswerSettings) -> None:
        self._target, self._batch = target, settings.batch

    def __call__(self, prompts: list[list[int]], *, temperature: float, max_tokens: int, seed: int) -> list[list[int]]:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.sample_utils import make_sampler

        mx.random.seed(seed)
        generator = BatchGenerator(
            self._target.model,
            stop_tokens=[[token_id] for token_id in sorted(self._target.eos_token_ids)],
            sampler=make_sampler(temperature),
            completion_batch_size=self._batch,
            prefill_batch_size=max(1, self._batch // 4),
        )
        outputs: dict[Any, list[int]] = {uid: [] for uid in generator.insert(prompts, [max_tokens] * len(prompts))}
        while responses := generator.next_generated():
            for response in responses:
                outputs[response.uid].append(response.token)
        generator.close()
        return list(outputs.values())

    def close(self) -> None:
        pass

"""What :class:`metal_engine.LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import ToolCall, assemble
from metal_engine.request import RequestOutput, TokenLogprobs, merge_outputs


@dataclass(frozen=True)
class GeneratedOutput:
    """One of the ``n`` outputs for a prompt.

    Attributes:
        text: all that was generated; of a chat, with the marks of reasoning and tool calls in it.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or token id that ended it, if one did.
        logprobs: one entry for each of ``token_ids``, if asked for.
        content: of a chat, the text without reasoning and tool calls; None for an answer that is tool calls alone.
        reasoning: of a chat, what the model wrote as its reasoning, if it did.
        tool_calls: of a chat, the calls of its tools.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


def _of_first_output(name: str) -> property:
    """A property of a :class:`GenerationResult`: the attribute ``name`` of its first output."""
    return property(lambda result: getattr(result.outputs[0], name))


@dataclass(frozen=True)
class GenerationResult:
    """A prompt and its outputs; ``text`` and the like are the first one's.

    ``prompt_logprobs`` has one entry for each prompt token, None for the first, if asked for.
    """

    prompt_token_ids: list[int]
    outputs: list[GeneratedOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    text = _of_first_output("text")
    token_ids = _of_first_output("token_ids")
    finish_reason = _of_first_output("finish_reason")
    stop_reason = _of_first_output("stop_reason")
    logprobs = _of_first_output("logprobs")
    content = _of_first_output("content")
    reasoning = _of_first_output("reasoning")
    tool_calls = _of_first_output("tool_calls")


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingResult:
    """A prompt and its vector, ``outputs.embedding``. (The name is vLLM's.)"""

    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


def generation_result(prompt: list[int], sequences: list[list[RequestOutput]]) -> GenerationResult:
    return GenerationResult(
        prompt_token_ids=prompt,
        outputs=[_generated(i, outputs) for i, outputs in enumerate(sequences)],
        prompt_logprobs=sequences[0][0].prompt_logprobs,
    )


def _generated(index: int, outputs: list[RequestOutput]) -> GeneratedOutput:
    output = merge_outputs(outputs)
    reason = output.finish_reason or ""
    return GeneratedOutput(index, output.text, output.token_ids, reason, output.stop_reason, output.logprobs)


def read_answers(result: GenerationResult, answers: ChatAnswers) -> GenerationResult:
    """Returns the result with each output's text split into content, reasoning and tool calls."""
    outputs = []
    for output in result.outputs:
        answer = assemble(answers.reader(incremental=False).add(output.text, (), output.finish_reason))
        outputs.append(
            replace(output, content=answer.content, reasoning=answer.reasoning, tool_calls=answer.tool_calls)
        )
    return replace(result, outputs=outputs)

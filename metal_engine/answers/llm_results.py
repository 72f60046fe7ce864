"""Result classes of :class:`metal_engine.LLM`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import ToolCall, assemble
from metal_engine.request import RequestOutput, TokenLogprobs, merge_outputs


@dataclass(frozen=True)
class GeneratedOutput:
    """One of the ``n`` outputs for a prompt.

    Attributes:
        index: index of the output.
        text: generated text. For a chat, it includes the marks of reasoning and tool calls.
        token_ids: generated token ids.
        finish_reason: ``stop`` or ``length``.
        stop_reason: stop string or id of the stop token that ended the output; None if neither did.
        logprobs: log probabilities, one entry for each of ``token_ids``; None if not requested.
        content: text without reasoning and tool calls; None if the output consists of tool calls only. Only for chats.
        reasoning: text of the reasoning; None if the model did not reason. Only for chats.
        tool_calls: tool calls in their order. Only for chats.
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
    """Return a property of :class:`GenerationResult` that reads the attribute ``name`` of the first output."""
    return property(lambda result: getattr(result.outputs[0], name))


@dataclass(frozen=True)
class GenerationResult:
    """Prompt and its outputs. ``text`` and the other properties are taken from the first output.

    Attributes:
        prompt_token_ids: token ids of the prompt.
        outputs: the ``n`` outputs, by their index.
        prompt_logprobs: log probabilities, one entry for each prompt token; None if not requested. The entry of the
            first token is None.
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
    """Embedding vector of a prompt."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingResult:
    """Prompt and its embedding vector, which is ``outputs.embedding`` as in vLLM."""

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
    """Return the result with each output's text split into content, reasoning and tool calls."""
    outputs = []
    for output in result.outputs:
        reader = answers.reader(incremental=False)
        answer = assemble(reader.add(output.text, (), output.finish_reason, output.stop_reason))
        outputs.append(
            replace(output, content=answer.content, reasoning=answer.reasoning, tool_calls=answer.tool_calls)
        )
    return replace(result, outputs=outputs)

"""Converts requests and grammars to messages and back (:mod:`metal_engine.engine.process.wire`)."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from metal_engine.engine.process.packed_images import InputArrays, packed_images, unpacked_images
from metal_engine.engine.process.packed_results import packed_output
from metal_engine.engine.process.wire import PackedRules, Sampling, Submit, checked
from metal_engine.lora_adapter import Adapter
from metal_engine.output_phases import CallPhase, OutputPhases
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.token_rules import Grammar, TokenRules

_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
# Sampling parameters that are sent unchanged.
_PLAIN_PARAMS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                 "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs")  # fmt: skip


def packed_text(text: str) -> bytes:
    """Return a client's text as bytes. The text may have lone surrogates, which a message's text cannot have."""
    return text.encode("utf-8", "surrogatepass")


def unpacked_text(data: bytes) -> str:
    """Return the text of :func:`packed_text`."""
    return data.decode("utf-8", "surrogatepass")


def packed_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as the bytes of int32 numbers."""
    return array("i", ids).tobytes()


def unpacked_ids(data: bytes) -> list[int]:
    """Return the token ids of :func:`packed_ids`."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def packed_request(
    request_id: str,
    prepared: PreparedRequest,
    seed: int,
    options: RequestOptions | None,
    so_far: RequestOutput | None,
    num_failures: int,
    grammar_key: int | None,
    image_keys: Mapping[bytes, int],
) -> Submit:
    """Return the message that submits a request.

    :meth:`metal_engine.engine.engine_thread.EngineThread.submit` describes the first six arguments.

    Args:
        grammar_key: key of the request's grammar; None without a grammar.
        image_keys: map from content hashes of the request's images to the keys of their inputs.
    """
    rules = prepared.rules
    if options is not None:
        options = replace(options, priority=max(min(options.priority, _INT64_MAX), -_INT64_MAX))
    return Submit(
        request_id=request_id,
        prompt=packed_ids(prepared.prompt_token_ids),
        sampling=_packed_params(prepared.params),
        max_tokens=prepared.max_tokens,
        rules=PackedRules(
            rules.stop_token_ids.tobytes(),
            [(before, list(last)) for before, last in rules.bad_words.items()],
            None if rules.allowed is None else rules.allowed.tobytes(),
            rules.bias_ids.tobytes(),
            rules.biases.tobytes(),
            grammar_key,
        ),
        seed=seed,
        options=options,
        eos_token_ids=list(prepared.eos_token_ids),
        cache_salt=packed_text(prepared.cache_salt),
        block_hashes=prepared.block_hashes,
        pooling_params=prepared.pooling_params,
        num_lasting_tokens=prepared.num_lasting_tokens,
        num_instruction_tokens=prepared.num_instruction_tokens,
        adapter=None if prepared.adapter is None else prepared.adapter.slot,
        images=packed_images(prepared.images, image_keys),
        so_far=None if so_far is None else packed_output(so_far),
        num_failures=num_failures,
    )


def unpacked_request(
    message: Submit, grammar: Grammar | None, adapter: Adapter | None, image_inputs: Mapping[int, InputArrays]
) -> PreparedRequest:
    """Return the request of a message. Raises WireError.

    Args:
        image_inputs: map from keys to the inputs of images.
    """
    rules = message.rules
    with checked():
        return PreparedRequest(
            unpacked_ids(message.prompt),
            _unpacked_params(message.sampling),
            message.max_tokens,
            TokenRules(
                stop_token_ids=np.frombuffer(rules.stop_token_ids, np.int32),
                bad_words=dict(rules.bad_words),
                allowed=None if rules.allowed is None else np.frombuffer(rules.allowed, np.int32),
                bias_ids=np.frombuffer(rules.bias_ids, np.int32),
                biases=np.frombuffer(rules.biases, np.float32),
                grammar=grammar,
            ),
            eos_token_ids=frozenset(message.eos_token_ids),
            cache_salt=unpacked_text(message.cache_salt),
            block_hashes=message.block_hashes,
            pooling_params=message.pooling_params,
            num_lasting_tokens=message.num_lasting_tokens,
            num_instruction_tokens=message.num_instruction_tokens,
            adapter=adapter,
            images=unpacked_images(message.images, image_inputs),
        )


def _packed_params(params: SamplingParams) -> Sampling:
    return Sampling(
        **{name: getattr(params, name) for name in _PLAIN_PARAMS},
        top_k=min(params.top_k, _INT32_MAX),
        stop_token_ids=packed_ids([i for i in params.stop_token_ids if i <= _INT32_MAX]),  # larger ids: never sampled
        has_stop=bool(params.stop),
        has_bad_words=bool(params.bad_words),
        has_biases=bool(params.logit_bias),
        has_allowed=params.allowed_token_ids is not None,
        is_structured=params.structured_outputs is not None,
        has_phase_rules=params.has_phase_rules,
    )


def _unpacked_params(sampling: Sampling) -> SamplingParams:
    """Return parameters that the engine treats like the original parameters.

    Stop strings, bad words, biases, allowed tokens, structured outputs and phases have dummy values: the engine reads
    only whether they are set. Their contents are in :class:`TokenRules`.
    """
    is_structured = sampling.is_structured and not sampling.has_phase_rules
    return SamplingParams(
        **{name: getattr(sampling, name) for name in _PLAIN_PARAMS},
        max_tokens=None,
        top_k=sampling.top_k,
        stop_token_ids=tuple(unpacked_ids(sampling.stop_token_ids)),
        stop=("-",) if sampling.has_stop else (),
        bad_words=("-",) if sampling.has_bad_words else (),
        logit_bias={0: 0.0} if sampling.has_biases else None,
        allowed_token_ids=(0,) if sampling.has_allowed else None,
        structured_outputs=StructuredOutputsParams(json_object=True) if is_structured else None,
        phases=OutputPhases(calls=CallPhase(())) if sampling.has_phase_rules else None,
    )


def packed_grammar(
    structured: StructuredOutputsParams | None, phases: OutputPhases | None
) -> tuple[bytes | None, bytes | None]:
    """Return a structured output and phases as JSON; None for each that is None.

    JSON, unlike msgpack, can represent integers of more than 64 bits and lone surrogates.
    """

    def packed(value: Any) -> bytes | None:
        return None if value is None else json.dumps(value).encode()

    if phases is not None and phases.reasoning is not None:  # the engine does not search for stop strings
        phases = replace(phases, reasoning=replace(phases.reasoning, calls=None))
    # The fields are copied one by one: a JSON schema may be nested too deeply for `asdict`.
    return packed(None if structured is None else vars(structured)), packed(None if phases is None else asdict(phases))


def unpacked_structured(data: bytes | None) -> StructuredOutputsParams | None:
    """Return the structured output of :func:`packed_grammar`. Raises WireError."""
    with checked():
        return None if data is None else StructuredOutputsParams(**json.loads(data))


@lru_cache(maxsize=16)  # requests with the same tools share the phases, and so the grammars of calls
def unpacked_phases(data: bytes | None) -> OutputPhases | None:
    """Return the phases of :func:`packed_grammar`. Raises WireError."""
    with checked():
        return None if data is None else msgspec.convert(json.loads(data), OutputPhases)

"""Every field of a request and of an output survives the way to the engine's process and back."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from metal_engine.answers.call_end import CallEnd
from metal_engine.answers.call_syntaxes.syntax import JSON_QUOTES
from metal_engine.engine.metrics import EngineMetrics, Histogram
from metal_engine.engine.process import wire
from metal_engine.engine.process.packed_requests import (
    packed_grammar,
    packed_request,
    unpacked_phases,
    unpacked_request,
    unpacked_structured,
)
from metal_engine.engine.process.packed_results import (
    MetricsTotals,
    packed_error,
    packed_metrics,
    packed_output,
    unpacked_error,
    unpacked_output,
)
from metal_engine.engine.step_observer import Frame, SeenRequest, StepRow, StepSegment, TableChange
from metal_engine.errors import AdapterError, ConfigError, ModelLoadError, OverloadedError, ParameterError
from metal_engine.grammars.compiler import GrammarRefusedError
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.lora_adapter import Adapter
from metal_engine.output_phases import CallPhase, CallText, CallTrigger, OutputPhases, ReasoningPhase, ToolArguments
from metal_engine.pooling_params import POOLING_TYPES, PoolingParams
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, TokenLogprobs
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import AttentionLayers, CommandBufferLimits, EngineConfig, RankInfo, RerankerConfig
from metal_engine.token_rules import TokenRules
from tools.fixtures.fake_engine import fake_config

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
COUNTS = st.integers(0, 2**40)
FINITE = st.floats(allow_nan=False)
# Texts of clients may have lone surrogates.
TEXTS = st.text(st.characters(codec=None), max_size=8)
LOGPROBS = st.builds(
    TokenLogprobs, st.integers(0, 2**31 - 1), FINITE, COUNTS, st.lists(st.tuples(COUNTS, FINITE), max_size=3).map(tuple)
)
ADAPTER = Adapter("a", "p", 2, 8, "f")


def arrays(dtype: type, values: SearchStrategy[Any]) -> SearchStrategy[np.ndarray]:
    return st.lists(values, max_size=4).map(lambda items: np.array(items, dtype))


INT32 = st.integers(-(2**31), 2**31 - 1)
RULES = st.builds(
    TokenRules,
    stop_token_ids=arrays(np.int32, INT32),
    bad_words=st.dictionaries(TOKENS.map(tuple), TOKENS, max_size=3),
    allowed=st.none() | arrays(np.int32, INT32),
    bias_ids=arrays(np.int32, INT32),
    biases=arrays(np.float32, st.floats(-100, 100, width=32)),
)
STRUCTURED = st.sampled_from(
    [
        StructuredOutputsParams(json={"type": "object", "maximum": 10**30, "a": [None, 1.5, "\ud800"]}),
        StructuredOutputsParams(json='{"type": "array"}', whitespace_pattern=" ?", strict=True),
        StructuredOutputsParams(json=True, disable_any_whitespace=True),
        StructuredOutputsParams(choice=("a", "\udfff")),
        StructuredOutputsParams(regex="a+"),
        StructuredOutputsParams(grammar='start: "a"'),
        StructuredOutputsParams(json_object=True),
    ]
)
TRIGGERS = st.builds(
    CallTrigger,
    mark=TEXTS,
    grammar=TEXTS,
    arguments=st.lists(st.builds(ToolArguments, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple),
    heads=st.lists(st.tuples(TEXTS, TEXTS), max_size=2).map(tuple),
    is_whole=st.booleans(),
)
PHASES = st.builds(
    OutputPhases,
    reasoning=st.none()
    | st.builds(ReasoningPhase, TEXTS, TEXTS, st.booleans(), st.none() | st.integers(0, 1 << 20), TEXTS),
    calls=st.none() | st.builds(CallPhase, st.lists(TRIGGERS, max_size=2).map(tuple), st.booleans()),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    is_structured = draw(st.booleans())
    others = st.just(()) if is_structured else st.lists(st.sampled_from(["a", "word"]), max_size=2)
    return SamplingParams(
        max_tokens=None,
        min_tokens=draw(st.integers(0, 1 << 20)),
        temperature=draw(st.floats(0, 1e30)),
        top_p=draw(st.floats(0.001, 1)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 2.0])),
        logit_bias=draw(st.none() | st.dictionaries(COUNTS, st.floats(-100, 100), max_size=2)),
        allowed_token_ids=None if is_structured else draw(st.none() | TOKENS.filter(bool)),
        bad_words=draw(others),
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        stop=draw(st.lists(TEXTS.filter(bool), max_size=2)),
        stop_token_ids=draw(TOKENS),
        ignore_eos=not is_structured and draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        structured_outputs=draw(STRUCTURED) if is_structured else None,
        phases=draw(st.none() | PHASES),
    )


POOLING = st.builds(
    PoolingParams,
    pooling_type=st.none() | st.sampled_from(POOLING_TYPES),
    normalize=st.none() | st.booleans(),
    dimensions=st.none() | st.integers(1, 1 << 20),
    truncate_prompt_tokens=st.none() | st.just(-1) | st.integers(1, 1 << 20),
    token_ids=TOKENS.map(tuple),
)
PREPARED = st.builds(
    PreparedRequest,
    TOKENS,
    sampling_params(),
    st.integers(1, 1 << 30),
    RULES,
    eos_token_ids=TOKENS.map(frozenset),
    cache_salt=TEXTS,
    block_hashes=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
    pooling_params=st.none() | POOLING,
    num_lasting_tokens=COUNTS,
    num_instruction_tokens=COUNTS,
    adapter=st.sampled_from([None, ADAPTER]),
)
OPTIONS = st.builds(
    RequestOptions,
    priority=st.integers(-(2**63) + 1, 2**63 - 1),
    do_remote_prefill=st.booleans(),
    do_remote_decode=st.booleans(),
    use_speculation=st.booleans(),
    predicted_token_ids=TOKENS.map(tuple),
)
OUTPUTS = st.builds(
    RequestOutput,
    st.text(st.characters(codec="utf-8"), max_size=8),
    TOKENS,
    COUNTS,
    COUNTS,
    st.tuples(COUNTS, COUNTS),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 2**31) | st.text(st.characters(codec="utf-8"), max_size=8),
    error=st.none() | st.text(st.characters(codec="utf-8"), max_size=8),
    caused_by_request=st.booleans(),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | LOGPROBS, max_size=3),
    pooled=st.none() | arrays(np.float32, st.floats(width=32)),
)
# Properties of sampling parameters that the engine reads.
READ = ("is_greedy", "has_penalties", "edits_logits", "has_phase_rules", "needs_token_on_host", "temperature", "top_p",
        "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos",
        "logprobs", "prompt_logprobs", "stop_token_ids")  # fmt: skip


def to_engine(message: wire.Message) -> Any:
    return wire.decode_to_engine(wire.encode(message))


def from_engine(message: wire.Message) -> Any:
    return wire.decode_from_engine(wire.encode(message))


@given(PREPARED, st.integers(-(2**63), 2**63 - 1), st.none() | OPTIONS, st.none() | OUTPUTS)
def test_requests(
    prepared: PreparedRequest, seed: int, options: RequestOptions | None, so_far: RequestOutput | None
) -> None:
    message = to_engine(packed_request("r#1", prepared, seed, options, so_far, 2, 7, {}))
    assert (message.request_id, message.seed, message.options) == ("r#1", seed, options)
    assert (message.rules.grammar, message.num_failures) == (7, 2)
    assert message.adapter == (None if prepared.adapter is None else prepared.adapter.slot)
    assert (None if so_far is None else unpacked_output(message.so_far)) == so_far
    grammar: Any = object()
    found = unpacked_request(message, grammar, prepared.adapter, {})
    assert found.rules.grammar is grammar
    for field in fields(PreparedRequest):
        if field.name not in ("params", "rules", "stop_automaton"):
            assert getattr(found, field.name) == getattr(prepared, field.name), field.name
    for field in fields(TokenRules):
        ours, theirs = getattr(prepared.rules, field.name), getattr(found.rules, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), field.name
        elif field.name != "grammar":
            assert ours == theirs, field.name
    assert {name: getattr(found.params, name) for name in READ} == {
        name: getattr(prepared.params, name) for name in READ
    }
    assert bool(found.params.stop) == bool(prepared.params.stop)


def test_numbers_beyond_msgpack_are_cut_without_a_difference() -> None:
    params = SamplingParams(top_k=10**30, stop_token_ids=[5, 10**30])
    prepared = PreparedRequest([1], params, 1, TokenRules())
    message = to_engine(packed_request("r", prepared, 0, RequestOptions(priority=-(10**30)), None, 0, None, {}))
    found = unpacked_request(message, None, None, {})
    assert found.params.top_k >= 2**31 - 1 and found.params.stop_token_ids == (5,)
    assert message.options.priority < -(2**62)


def test_new_fields_must_be_sent_or_listed_here() -> None:
    """A new field is read by the engine, unless it is listed here as one of the client."""
    of_client = {"n", "max_tokens", "logit_bias", "allowed_token_ids", "bad_words", "seed", "stop",
                 "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "structured_outputs",
                 "thinking_token_budget", "phases"}  # fmt: skip
    of_text = {"text", "token_ends", "num_prompt_tokens", "num_output_tokens", "text_logprobs"}
    for ours, theirs, others in (
        (SamplingParams, wire.Sampling, of_client),
        (PreparedRequest, wire.Submit, {"prompt_token_ids", "params", "stop_automaton"}),
        (TokenRules, wire.PackedRules, set()),
        (RequestOutput, wire.Output, of_text),
        (Adapter, wire.LoadedAdapter, set()),
    ):
        assert {field.name for field in fields(ours)} - others <= set(theirs.__struct_fields__)


@given(STRUCTURED | st.none(), PHASES | st.none())
def test_grammars(structured: StructuredOutputsParams | None, phases: OutputPhases | None) -> None:
    message = to_engine(wire.MakeGrammar(3, *packed_grammar(structured, phases), b""))
    assert unpacked_structured(message.structured) == structured
    assert unpacked_phases(message.phases) == phases


def test_the_text_of_calls_is_not_sent() -> None:
    """Only the client searches for stop strings."""
    reasoning = ReasoningPhase("a", "b", calls=CallText(("c",), lambda: CallEnd(JSON_QUOTES, ("d",))))
    phases = OutputPhases(replace(reasoning, calls=None))
    assert packed_grammar(None, OutputPhases(reasoning)) == packed_grammar(None, phases)


@given(st.lists(OUTPUTS, max_size=3))
def test_outputs(outputs: list[RequestOutput]) -> None:
    stats = SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    message = from_engine(wire.Outputs([packed_output(output) for output in outputs], stats))
    assert message.stats == stats
    found = [unpacked_output(output) for output in message.outputs]
    assert found == outputs
    for ours, theirs in zip(outputs, found, strict=True):
        assert (ours.pooled is None) == (theirs.pooled is None)
        if ours.pooled is not None:
            assert theirs.pooled is not None and ours.pooled.tobytes() == theirs.pooled.tobytes()


def test_metrics() -> None:
    metrics = EngineMetrics(KVTransferStats(loads_started=3), "a reason")
    for i, (name, value) in enumerate(vars(metrics).items()):
        if isinstance(value, Histogram):
            value.add(0.01 * i)
        elif isinstance(value, int):
            setattr(metrics, name, i)
        elif isinstance(value, dict) and name != "_times":
            value["b"] = i
    metrics.num_accepted_tokens += [3, 2]
    snapshot = from_engine(wire.Numbers(SchedulerStats(1, 2, 3, 4, 5, 6), packed_metrics(metrics))).metrics
    found = EngineMetrics()
    totals = MetricsTotals(found)
    totals.update(snapshot)

    def plain(of: EngineMetrics, factor: int = 1) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in vars(of).items():
            if isinstance(value, Histogram):
                values[name] = [factor * n for n in value.counts], pytest.approx(factor * value.sum)
            elif isinstance(value, dict):
                values[name] = {label: factor * n for label, n in value.items()}
            elif isinstance(value, list):
                values[name] = [factor * n for n in value]
            else:
                values[name] = factor * value if isinstance(value, int) else value
        return values

    assert plain(found) == plain(metrics)
    totals.begin_engine()  # of a second engine with the same numbers
    totals.update(snapshot)
    assert found.kv_transfer is not None and found.kv_transfer.loads_started == 6
    found.kv_transfer = metrics.kv_transfer
    assert plain(found) == plain(metrics, 2)


def test_counts_of_schedulers_never_decrease() -> None:
    """They continue in the next engine. Other numbers are the numbers of the current engine."""
    totals = MetricsTotals(EngineMetrics())
    numbers = {"num_running": 3, "num_waiting": 1, "num_blocks": 9, "num_used_blocks": 4}
    ended = SchedulerStats(**numbers, num_preemptions=5, peak_used_blocks=8, checkpoint_hits=2, checkpoint_evictions=1)
    assert totals.add_stats(ended) is ended
    totals.begin_engine(ended)
    new = SchedulerStats(**numbers, num_preemptions=1, peak_used_blocks=4, checkpoint_hits=0, checkpoint_evictions=3)
    counts = {"num_preemptions": 6, "peak_used_blocks": 8, "checkpoint_hits": 2, "checkpoint_evictions": 4}
    expected = replace(new, **counts)
    assert totals.add_stats(new) == expected
    totals.begin_engine(expected)
    assert totals.add_stats(new).num_preemptions == 7


def test_frames_and_configurations() -> None:
    frame = Frame(
        forget=True,
        rows=[StepRow(1, 0.5, [StepSegment(1, 2, 3, True, False, 4, 5)], 2, 0.25)],
        requests=[SeenRequest(1, "r#1", 5, 2)],
        tables={7: TableChange(True, [1, 2]), 8: TableChange()},
        cached=[1],
        uncached=[2],
        preempted=[3],
        finished=[4],
        drafts={1: (2, 3)},
        is_whole=False,
    )
    assert from_engine(wire.FrameOf(3, frame)).frame == frame
    reranker = RerankerConfig(true_token_id=1, false_token_id=2, prefix="", pair="a", suffix="", instruction="")
    plain = fake_config(reranker=reranker)
    config = EngineConfig(
        **{
            **vars(plain),
            "draft": plain.model,
            "command_buffers": CommandBufferLimits(1, None),
            "attention_layers": AttentionLayers(metal=1, not_covered=("a",)),
            "ranks": (RankInfo(host="h", weight_bytes=1, peak_bytes=2, num_layers=3),),
        }
    )
    config.model.default_sampling.update(top_k=20, temperature=0.5)
    numbers = wire.Numbers(SchedulerStats(1, 2, 3, 4, 5, 6), packed_metrics(EngineMetrics()))
    adapter = wire.LoadedAdapter("a", "p", 1, 8, "f", None)
    found = from_engine(wire.Ready(numbers, config, [1], "path", [adapter]))
    assert found.config == config and type(found.config.model.default_sampling["top_k"]) is int
    assert found.adapters == [adapter] and found.numbers == numbers


def test_settings() -> None:
    args = EngineArgs(model="demo", lora_modules=("a=b",), max_model_len=512, speculative_config='{"method": "ngram"}')
    models = to_engine(wire.Start([msgspec.to_builtins(args)], "info", "json")).models
    assert msgspec.convert(models, list[EngineArgs]) == [args]
    assert msgspec.convert(to_engine(wire.Build(msgspec.to_builtins(args), None, 7)).args, EngineArgs) == args


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("--port", "is taken"),
        ConfigError(None, "a problem"),
        ParameterError("top_p", "must be a number"),
        GrammarRefusedError("cannot be compiled: unsatisfiable", 0.25),
        GrammarRefusedError("takes too long", math.inf),
        AdapterError("no room", "lora_name"),
        OverloadedError("16 others wait"),
        ModelLoadError("no such model \ud800"),
    ],
)
def test_errors(error: Exception) -> None:
    found = unpacked_error(from_engine(wire.Reply(1, error=packed_error(error))).error)
    assert type(found) is type(error) and str(found) == str(error).replace("\ud800", "\\ud800")
    assert {k: v for k, v in vars(found).items() if k != "__notes__"} == vars(error)


def test_unknown_errors_keep_their_words() -> None:
    assert str(unpacked_error(packed_error(ZeroDivisionError("a bug")))) == "ZeroDivisionError: a bug"


@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda data: wire.encode(wire.Watch(1))[:-1] + data))
def test_decoding_arbitrary_bytes_raises_only_wire_errors(data: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_from_engine):
        try:
            decode(data)
        except wire.WireError as error:
            assert str(error)


@given(st.data())
def test_decoding_damaged_messages_raises_only_wire_errors(data: st.DataObject) -> None:
    """Bytes of valid messages are changed, so that many of them still decode."""
    output, prepared = data.draw(OUTPUTS), data.draw(PREPARED)
    metrics = EngineMetrics()
    stats = SchedulerStats(1, 2, 3, 4, 5, 6)
    for message in (
        packed_request("r#1", prepared, 1, None, None, 0, None, {}),
        wire.Outputs([packed_output(output)], stats),
        wire.Numbers(stats, packed_metrics(metrics)),
        wire.Reply(1, error=packed_error(ValueError("x"))),
    ):
        encoded = bytearray(wire.encode(message))
        for _ in range(3):
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
        try:
            if isinstance(message, wire.Submit):
                if isinstance(found := wire.decode_to_engine(bytes(encoded)), wire.Submit):
                    unpacked_request(found, None, None, {})
                continue
            match wire.decode_from_engine(bytes(encoded)):
                case wire.Outputs(outputs=outputs):
                    for one in outputs:
                        unpacked_output(one)
                case wire.Numbers(metrics=snapshot):
                    MetricsTotals(EngineMetrics()).update(snapshot)
                case wire.Reply(error=error) if error is not None:
                    unpacked_error(error)
        except wire.WireError as problem:
            assert str(problem)

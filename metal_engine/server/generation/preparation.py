"""From a request body to a generation: what all generating endpoints check, and what sets one apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pydantic import BaseModel

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.chat_answers import AnswerReader
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.errors import ContextLengthError, OverloadedError, ParameterError, PromptError
from metal_engine.lora_adapter import Adapter
from metal_engine.request import PreparedRequest, RequestOptions
from metal_engine.sampling_params import SamplingParams, TokenRules
from metal_engine.server.errors import APIError, engine_dead, invalid, model_not_found
from metal_engine.server.generation.admission import Admission, overloaded
from metal_engine.server.generation.generation import MAX_LOGPROB_ENTRIES, ChoiceOutput, Generation
from metal_engine.server.generation.log_once import Notices
from metal_engine.server.generation.logprobs import num_entries
from metal_engine.server.generation.parameters import ParameterPolicy
from metal_engine.server.generation.sampling import parameter_error, sampling_params
from metal_engine.server.generation.streaming import EVENT_STREAM, sse
from metal_engine.server.protocol import GenerationBody, KVTransferParams
from metal_engine.server.usage import Usage
from metal_engine.server.workers import Weight, Workers
from metal_engine.text.tokenizer import Tokenizer

# Sequences of one request; each takes memory before it runs.
MAX_SEQUENCES = 2048
# Log probabilities of prompts in a stream, which are one event, encoded in the event loop: 5 ms.
MAX_STREAMED_ENTRIES = 1 << 12
# Token ids of a prompt in a stream, which are part of one event: 10 ms.
MAX_STREAMED_IDS = 1 << 18
# Tokens of a text that is counted or truncated: four times the context and some, a million at most.
_MORE_TOKENS = 1 << 16
MAX_TOKENS = 1 << 20
# Tokens of all of them: each sequence has a list of its own, of 8 bytes a token.
MAX_PROMPT_TOKENS = 1 << 22

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True)
class ServedModel:
    """The engine as the API presents it: under these names, with this policy about parameters.

    Attributes:
        names: what it is called; answers carry the first.
        any_name: whether it answers to every other name, too.
        adapter: what requests go through besides the model; None: nothing.
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    parameters: ParameterPolicy
    answer_format: AnswerFormat
    admission: Admission
    workers: Workers
    auto_tool_choice: bool = True
    any_name: bool = False
    adapter: Adapter | None = None
    notices: Notices = field(default_factory=Notices)

    @property
    def tokenizer_beyond_context(self) -> Tokenizer:
        """A tokenizer for texts that may be longer than the model's context, but not by far."""
        max_model_len = self.engine.config.scheduler.max_model_len
        return self.engine.tokenizer.limited(min(4 * max_model_len + _MORE_TOKENS, max(max_model_len, MAX_TOKENS)))

    @property
    def all_names(self) -> list[str]:
        """What it answers to: its own names, and those of its adapters."""
        adapters = self.engine.adapters
        return [*self.names, *([] if adapters is None else (adapter.name for adapter in adapters.adapters))]

    def resolve(self, model: str | None) -> ServedModel:
        """Returns what a request's ``model`` names: this, or this with one of its adapters.

        Raises:
            APIError: a 404, for a model that is neither.
        """
        if model is None or model in self.names:
            return self
        adapters = self.engine.adapters
        if adapters is not None and (adapter := adapters.find(model)) is not None:
            return replace(self, names=(adapter.name,), any_name=False, adapter=adapter)
        if self.any_name:
            return self
        raise model_not_found(model, self.all_names)


class Endpoint(ABC, Generic[BodyT]):
    """What sets a generating endpoint apart from the others, for one request."""

    id_prefix: str
    """What ids of its answers begin with."""
    has_choices = True
    """Whether its answer has a place for more than one output of a prompt."""
    stream_media_type = EVENT_STREAM
    """What a stream of its is; comments keep only event streams alive."""

    @abstractmethod
    def tokenize(self, body: BodyT, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts' token ids; runs in a thread. Raises APIError for a body that cannot be a prompt."""

    def echoes(self, body: BodyT, prompts: list[list[int]], tokenizer: Tokenizer) -> list[str] | None:
        """Each prompt's text, if the answer is to begin with it; runs in a thread."""
        return None

    def predicted(self, body: BodyT, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the text that the client expects; runs in a thread. Raises APIError if it is too long."""
        return []

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what the prompt asks of sampling; the same ones if that is nothing.

        Comes after :meth:`tokenize`. Raises ParameterError for what cannot be asked.
        """
        return params

    def reader(self) -> AnswerReader | None:
        """A reader for one choice's answer; None if answers are plain text. After :meth:`tokenize`."""
        return None

    @abstractmethod
    def response(self, generation: Generation) -> BaseModel:
        """The answer to a request that does not stream, once the generation is complete."""

    def begin(self, generation: Generation) -> bytes:
        """What a stream begins with, before there is any output."""
        return b""

    @abstractmethod
    def chunk(self, generation: Generation, arrived: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        """The events of one output in a stream.

        Args:
            first: it is the first of its choice.
            usage: to be told with it, if the client asked for that.
        """

    @abstractmethod
    def end(self, generation: Generation, include_usage: bool) -> bytes:
        """What a stream ends with when all has gone well."""

    def error(self, generation: Generation, error: APIError) -> bytes:
        """What a stream ends with otherwise."""
        return sse(error.body)


async def prepare(
    served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT, num_bytes: int, request_id: str
) -> Generation:
    """Validate a request for a model and make a generation of it; nothing reaches the engine's queue yet.

    Args:
        num_bytes: what the prompt was made of.
        request_id: what the answer is called.

    Raises:
        APIError: the request cannot be served; 4xx with the field at fault, or 503 if the engine has ended.
    """
    engine = served.engine
    served.admission.check(0)  # before any work on it
    if engine.error is not None:
        raise engine_dead(engine.error)
    # Long for a long prompt, for many parameters or for a large grammar, and the event loop serves everybody.
    preparation, weight = _Preparation(served, endpoint, body), Weight.of(num_bytes)
    await served.workers.run(weight, preparation.begin)
    if preparation.needs_grammar:
        await served.workers.run(Weight.COMPILING, preparation.compile)
        await served.workers.run(weight, preparation.finish)
    requests, echoes = preparation.requests, preparation.echoes
    prompt_lens = [len(request.prompt_token_ids) for request in requests for _ in range(request.params.n)]
    reservation = served.admission.admit(prompt_lens)
    return Generation(
        engine,
        reservation,
        request_id=request_id,
        model=served.names[0],
        requests=requests,
        options=_options(body, preparation.predicted_token_ids),
        timeout=served.admission.request_timeout,
        echoes=echoes,
        is_echo_only=echoes is not None and body.max_tokens == 0,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        reader=endpoint.reader,
        shows_token_ids=bool(body.return_token_ids),
        spells_ids=bool(body.return_tokens_as_token_ids),
    )


def _options(body: GenerationBody, predicted_token_ids: list[int]) -> RequestOptions:
    transfer = body.kv_transfer_params or KVTransferParams()
    return RequestOptions(
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        do_remote_prefill=transfer.do_remote_prefill,
        do_remote_decode=transfer.do_remote_decode,
        use_speculation=body.use_speculation is not False,
        predicted_token_ids=tuple(predicted_token_ids),
    )


class _Preparation(Generic[BodyT]):
    """What is done for a request in threads: :meth:`begin`, and where that says so :meth:`compile` and :meth:`finish`.

    Compiling is apart, because many may wait for it at once; work on prompts is for few threads.

    Attributes:
        needs_grammar: whether there is a grammar to compile; known after :meth:`begin`.
        predicted_token_ids: what the client expects, where tokens are proposed; known after :meth:`begin`.
        requests: one for each prompt, in the end.
        echoes: the prompts' texts if they are wanted back, in the end.
    """

    def __init__(self, served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT) -> None:
        self._served = served
        self._endpoint = endpoint
        self._body = body
        self._prompts: list[list[int]] = []
        self._params: SamplingParams  # from `begin` on
        self._rules: TokenRules | None = None
        self._is_forced = False  # the grammar is that of tool calls
        self.needs_grammar = False
        self.predicted_token_ids: list[int] = []
        self.requests: list[PreparedRequest] = []
        self.echoes: list[str] | None = None

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Within it, an error is told by the name that the body has for what is at fault."""
        body = self._body
        try:
            yield
        except ParameterError as error:
            raise parameter_error(error, body, is_forced=self._is_forced) from error
        except OverloadedError as error:
            raise overloaded(str(error)) from error
        except ContextLengthError as error:
            param = body.max_tokens_field if error.name == "max_tokens" else body.prompt_field
            raise invalid(str(error), param=param, code="context_length_exceeded") from error
        except PromptError as error:
            raise invalid(str(error), param=body.prompt_field) from error

    def begin(self) -> None:
        """Judge the parameters and tokenize the prompts; all there is to do, if there is no grammar."""
        served, endpoint, body = self._served, self._endpoint, self._body
        config = served.engine.config
        served.parameters.check(body)
        params = sampling_params(body, config.model.default_sampling)
        if params.n > 1 and not endpoint.has_choices:
            raise invalid(" must be 1: the answer is one message", where="n")
        for name in ("return_token_ids", "return_tokens_as_token_ids"):
            if getattr(body, name) and not endpoint.has_choices:
                raise invalid(" is not supported here", where=name, code="unsupported_parameter")
        tokenizer = served.tokenizer_beyond_context
        if body.truncate_prompt_tokens is None:
            tokenizer = served.engine.tokenizer.limited(config.scheduler.max_model_len)
        self._prompts = endpoint.tokenize(body, tokenizer)
        if config.scheduler.speculative is not None:
            self.predicted_token_ids = endpoint.predicted(body, tokenizer)
        if len(self._prompts) * params.n > MAX_SEQUENCES:
            raise invalid(f"n times the number of prompts may be {MAX_SEQUENCES} at most", param="n")
        self._is_forced = True  # what fails in `adjust` is what tool calls ask for
        with self._told():
            self._params = endpoint.adjust(params)
        self._is_forced = self._params.structured_outputs is not params.structured_outputs
        self.needs_grammar = self._params.structured_outputs is not None
        if not self.needs_grammar:
            self.finish()

    def compile(self) -> None:
        """Compile the grammar."""
        with self._told():
            self._rules = self._served.engine.rules_for(self._params)

    def finish(self) -> None:
        """Make the requests."""
        body, params, engine = self._body, self._params, self._served.engine
        with self._told():
            salt, adapter = body.cache_salt or "", self._served.adapter
            self.requests = engine.prepare_all(self._prompts, params, salt, self._rules, adapter)
        prompts = [request.prompt_token_ids for request in self.requests]
        num_tokens = sum(map(len, prompts)) * params.n
        if num_tokens > MAX_PROMPT_TOKENS:
            raise invalid(f"n times the tokens of the prompts may be {MAX_PROMPT_TOKENS} at most", param="n")
        num_prompt_entries = num_entries(num_tokens, params.prompt_logprobs)
        limit = MAX_STREAMED_ENTRIES if body.stream else MAX_LOGPROB_ENTRIES
        if num_prompt_entries > limit:
            field = body.logprobs_field if body.prompt_logprobs is None else "prompt_logprobs"
            raise invalid(f" of the prompts are {num_prompt_entries}, and may be {limit} at most", where=field)
        if body.return_token_ids and body.stream and max(map(len, prompts)) > MAX_STREAMED_IDS:
            raise invalid(
                f" cannot be streamed for a prompt of more than {MAX_STREAMED_IDS} tokens", where="return_token_ids"
            )
        self.echoes = self._endpoint.echoes(body, prompts, engine.tokenizer)

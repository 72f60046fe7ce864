"""Turns a request body into a generation, with the checks and the interface of all generating endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.chat_answers import AnswerReader
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.errors import ContextLengthError, OverloadedError, ParameterError, PromptError
from metal_engine.lora_adapter import Adapter
from metal_engine.media.image_preparer import LoadedImage
from metal_engine.media.sources import ImageSource
from metal_engine.prompt_images import PromptImages
from metal_engine.request import PreparedRequest, RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.server.errors import APIError, beyond_context, engine_dead, invalid, model_not_found
from metal_engine.server.generation.generation import MAX_LOGPROB_ENTRIES, ChoiceOutput, Generation
from metal_engine.server.generation.image_loading import load_images
from metal_engine.server.generation.logprobs import num_entries
from metal_engine.server.generation.parameters import ParameterPolicy
from metal_engine.server.generation.queue_limit import QueueLimit, overloaded
from metal_engine.server.generation.sampling import parameter_error, sampling_params
from metal_engine.server.generation.schema_errors import with_place
from metal_engine.server.generation.streaming import EVENT_STREAM, sse
from metal_engine.server.logs import UniqueWarnings
from metal_engine.server.protocol import GenerationBody, KVTransferParams
from metal_engine.server.usage import Usage
from metal_engine.server.workers import Weight, Workers
from metal_engine.text.tokenizer import Tokenizer
from metal_engine.token_rules import TokenRules

# Maximum number of sequences of one request. Each takes memory before it runs.
MAX_SEQUENCES = 2048
# Maximum number of prompt log probabilities in a stream. They are one event, encoded in the event loop in 5 ms.
MAX_STREAMED_ENTRIES = 1 << 12
# Maximum number of a prompt's token ids in a stream. One event contains all of them, and takes 10 ms to encode.
MAX_STREAMED_IDS = 1 << 18
# Limits for a text that is only counted or truncated. It may have four times the context plus ``_MORE_TOKENS`` tokens,
# up to a cap. The cap is ``MAX_TOKENS``, or the context if that is larger.
_MORE_TOKENS = 1 << 16
MAX_TOKENS = 1 << 20
# Maximum number of prompt tokens of all sequences. Each sequence has its own list, with 8 bytes for each token.
MAX_PROMPT_TOKENS = 1 << 22
# Fields that add data to choices. Responses without choices cannot contain this data. The value 0 of ``top_logprobs``
# adds nothing.
_OF_CHOICES = ("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids")

# Tag that Ollama's clients add to names without a tag. They use these names in OpenAI's API, too.
LATEST = ":latest"

BodyT = TypeVar("BodyT", bound=GenerationBody)


def own_name(names: Sequence[str], name: str) -> str:
    """Return the server's name of the model that a client calls ``name``. The result may be unknown to the server.

    Removes ``LATEST`` from a name that is not in ``names``.
    """
    return name if name in names else name.removesuffix(LATEST)


@dataclass(frozen=True)
class ServedModel:
    """A loaded model as the API presents it: its names, and the policy about unknown parameters.

    Attributes:
        names: names of the model. Responses contain the first one.
        auto_tool_choice: setting ``--enable-auto-tool-choice``.
        tool_grammar: setting ``--tool-grammar``.
        any_name: True if the model also serves requests with any other name.
        allowed_media_domains: hosts from which images may be downloaded. If empty, nothing is downloaded.
        adapter: LoRA adapter that requests use; None to use the model alone.
        warnings: log of warnings about requests to the model.
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    parameters: ParameterPolicy
    answer_format: AnswerFormat
    queue_limit: QueueLimit
    workers: Workers
    auto_tool_choice: bool = True
    tool_grammar: str = "auto"
    any_name: bool = False
    allowed_media_domains: tuple[str, ...] = ()
    adapter: Adapter | None = None
    warnings: UniqueWarnings = field(default_factory=UniqueWarnings)

    @property
    def tokenizer_beyond_context(self) -> Tokenizer:
        """Tokenizer for texts that are only counted or truncated, and may therefore exceed the context length.

        Its limit is four times the context length plus ``_MORE_TOKENS`` tokens, up to a cap. The cap is ``MAX_TOKENS``,
        or the context length if that is larger.
        """
        max_model_len = self.engine.config.scheduler.max_model_len
        max_tokens = min(4 * max_model_len + _MORE_TOKENS, max(max_model_len, MAX_TOKENS))
        return self.engine.tokenizer.limited(max_tokens, max_model_len)

    @property
    def all_names(self) -> list[str]:
        """All names that clients can use: the model's own names and the names of its LoRA adapters."""
        adapters = self.engine.adapters
        return [*self.names, *([] if adapters is None else (adapter.name for adapter in adapters.adapters))]

    def resolve(self, model: str | None) -> ServedModel:
        """Return this model for a request's ``model`` field, with the LoRA adapter that the field names, if any.

        Raises:
            APIError: status 404, for an unknown name, unless :attr:`any_name` is True.
        """
        if model is None:
            return self
        model = own_name(self.all_names, model)
        if model in self.names:
            return self
        adapters = self.engine.adapters
        if adapters is not None and (adapter := adapters.find(model)) is not None:
            return replace(self, names=(adapter.name,), any_name=False, adapter=adapter)
        if self.any_name:
            return self
        raise model_not_found(model, self.all_names)


class Endpoint(ABC, Generic[BodyT]):
    """Interface of a generating endpoint. An instance serves one request."""

    id_prefix: str
    """Prefix of the ids of this endpoint's responses."""
    has_choices = True
    """True if the response can contain more than one output for a prompt."""
    stream_media_type = EVENT_STREAM
    """Media type of a stream. Only event streams get keep-alive comments."""
    num_earlier_characters = 0
    """Number of characters in the prompt that are not from the request's body, but from stored earlier responses."""

    def image_sources(self, body: BodyT) -> list[ImageSource]:
        """Return the images of the prompt, in order. Raises APIError for a malformed image.

        An endpoint with images has one prompt, with a placeholder for each image.
        """
        return []

    @abstractmethod
    def tokenize(self, body: BodyT, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of the prompts. Runs in a thread. Raises APIError for a body that cannot be a prompt."""

    def echoes(self, body: BodyT, prompts: list[list[int]], tokenizer: Tokenizer) -> list[str] | None:
        """Return each prompt's text if the response must begin with it, otherwise None. Runs in a thread."""
        return None

    def predicted(self, body: BodyT, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids of the client's predicted output; an empty list if the client predicts nothing.

        Runs in a thread. Raises APIError if the text cannot be tokenized, for example because it is too long.
        """
        return []

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with changes for this prompt, such as a grammar of tool calls.

        Returns the same object if there are no changes.

        Called after :meth:`tokenize`. Raises ParameterError for an unsupported combination.
        """
        return params

    def explained(self, error: ParameterError, compile_grammar: Callable[[SamplingParams], object]) -> ParameterError:
        """Return a better error if a grammar that :meth:`adjust` made, e.g. from tools, does not compile.

        The better error names the field at fault. If :meth:`adjust` did not make the grammar, ``error`` is returned.
        Runs in a thread.

        Args:
            error: error of compiling the grammar of the adjusted parameters.
            compile_grammar: function that compiles the grammar of given parameters, to find the field at fault. Raises
                ParameterError on failure.
        """
        return error

    def reader(self) -> AnswerReader | None:
        """Create the parser of one choice's output; None if outputs are plain text. Called after :meth:`tokenize`."""
        return None

    @abstractmethod
    def response(self, generation: Generation) -> BaseModel:
        """Return the response to a request that does not stream. Called after :meth:`Generation.read`.

        Runs in a thread if the response is long (:attr:`Generation.is_long`).
        """

    def begin(self, generation: Generation) -> bytes:
        """Return the first events of a stream, before there is any output."""
        return b""

    @abstractmethod
    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        """Return the events of one output in a stream. Empty bytes if the output adds nothing.

        Args:
            first: True for the first output of its choice.
            usage: usage to include, if the client wants it in every chunk; otherwise None.
        """

    @abstractmethod
    def end(self, generation: Generation, include_usage: bool) -> bytes:
        """Return the last events of a stream that succeeded."""

    def error(self, generation: Generation, error: APIError) -> bytes:
        """Return the last events of a stream that failed."""
        return sse(error.body)


async def prepare(
    request: Request, served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT, request_id: str
) -> Generation:
    """Validate a request for a model and create its generation.

    Reserves places in the engine's queue, but submits no sequence.

    Args:
        request: request of the client, whose body has been read.
        body: body for the endpoint. May be converted from the client's body.
        request_id: id of the response.

    Raises:
        APIError: the request cannot be served: 4xx with the field at fault, or 503 if the engine has stopped or too
            many requests wait.
    """
    engine = served.engine
    served.queue_limit.check(0)  # before the expensive work
    if engine.error is not None:
        raise engine_dead(engine.error)
    # Long prompts, many parameters and large grammars take long, so this work must not block the event loop.
    weight = Weight.of(len(await request.body()) + endpoint.num_earlier_characters)
    images = await load_images(served, endpoint.image_sources(body), weight)
    preparation = _Preparation(served, endpoint, body, images)
    await served.workers.run(weight, preparation.begin)
    if preparation.needs_grammar:
        await served.workers.run(Weight.COMPILING, preparation.compile)
        await served.workers.run(weight, preparation.finish)
    requests, echoes = preparation.requests, preparation.echoes
    prompt_lens = [len(request.prompt_token_ids) for request in requests for _ in range(request.params.n)]
    reservation = served.queue_limit.admit(prompt_lens)
    return Generation(
        engine,
        reservation,
        request_id=request_id,
        model=served.names[0],
        requests=requests,
        options=_options(body, preparation.predicted_token_ids),
        timeout=served.queue_limit.request_timeout,
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
        do_remote_prefill=transfer.do_remote_prefill,
        do_remote_decode=transfer.do_remote_decode,
        use_speculation=body.use_speculation is not False,
        predicted_token_ids=tuple(predicted_token_ids),
    )


class _Preparation(Generic[BodyT]):
    """Work that turns a request's body into prepared requests. Each step runs in a worker thread.

    Call :meth:`begin`. Then, if :attr:`needs_grammar` is True, call :meth:`compile` and :meth:`finish`. Each of these
    methods raises APIError if the request cannot be served.

    Compiling is a separate step because many threads may compile, but only few threads may work on prompts.

    Attributes:
        needs_grammar: True if there is a grammar to compile. Valid after :meth:`begin`.
        predicted_token_ids: predicted output of the client; empty without speculation. Valid after :meth:`begin`.
        requests: one prepared request for each prompt. Valid after the last step.
        echoes: texts of the prompts; None if the response does not repeat the prompts. Valid after the last step.
    """

    def __init__(
        self, served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT, images: Sequence[LoadedImage]
    ) -> None:
        self._served = served
        self._endpoint = endpoint
        self._body = body
        self._images = images
        self._inserted: list[PromptImages] | None = None  # images of the prompt
        self._prompts: list[list[int]] = []
        self._params: SamplingParams  # set in `begin`
        self._rules: TokenRules | None = None
        self._is_forced = False  # True if the grammar forces tool calls
        self.needs_grammar = False
        self.predicted_token_ids: list[int] = []
        self.requests: list[PreparedRequest] = []
        self.echoes: list[str] | None = None

    @contextmanager
    def _errors_as_api_errors(self) -> Iterator[None]:
        """Within this context, convert errors to an APIError that uses the body's name of the field at fault.

        Converts ParameterError, OverloadedError, ContextLengthError and PromptError.
        """
        body = self._body
        try:
            yield
        except ParameterError as error:
            raise parameter_error(error, body, is_forced=self._is_forced) from error
        except OverloadedError as error:
            raise overloaded(str(error)) from error
        except ContextLengthError as error:
            param = body.max_tokens_field if error.name == "max_tokens" else body.prompt_field
            raise beyond_context(error, param) from error
        except PromptError as error:
            raise invalid(str(error), param=body.prompt_field) from error

    def begin(self) -> None:
        """Check the parameters and tokenize the prompts. Without a grammar, also finish the preparation."""
        served, endpoint, body = self._served, self._endpoint, self._body
        config = served.engine.config
        served.parameters.check(body)
        if not endpoint.has_choices:
            asked = [name for name in _OF_CHOICES if getattr(body, name, None)]
            asked += ["prompt_logprobs"] if body.prompt_logprobs is not None else []
            if asked:
                raise invalid(" is not supported here", where=asked[0], code="unsupported_parameter")
        params = sampling_params(body, config.model.default_sampling)
        if params.n > 1 and not endpoint.has_choices:
            raise invalid(" must be 1: the answer is one message", where="n")
        tokenizer = served.tokenizer_beyond_context
        if body.truncate_prompt_tokens is None:
            tokenizer = served.engine.tokenizer.limited(config.scheduler.max_model_len)
        if self._images and body.truncate_prompt_tokens is not None:
            raise invalid(" cannot be used with images", where="truncate_prompt_tokens")
        self._prompts = endpoint.tokenize(body, tokenizer)
        if self._images:
            with self._errors_as_api_errors():
                self._insert_images()
        if config.scheduler.speculative is not None:
            # Tokenizers may have more tokens than the model, which cannot compute them as drafts.
            vocab_size = config.model.vocab_size
            self.predicted_token_ids = [i for i in endpoint.predicted(body, tokenizer) if i < vocab_size]
        if len(self._prompts) * params.n > MAX_SEQUENCES:
            raise invalid(f"n times the number of prompts must be at most {MAX_SEQUENCES}", param="n")
        self._is_forced = True  # an error in `adjust` is caused by tool calls
        with self._errors_as_api_errors():
            self._params = endpoint.adjust(params)
        self._is_forced = self._params.structured_outputs is not params.structured_outputs
        self.needs_grammar = self._params.structured_outputs is not None
        if not self.needs_grammar:
            self.finish()

    def _insert_images(self) -> None:
        processing = self._served.engine.preparer.images
        assert processing is not None
        (prompt,) = self._prompts
        whole, inserted = processing.insert(prompt, self._images)
        self._prompts, self._inserted = [whole], [inserted]

    def compile(self) -> None:
        """Compile the grammar, which may take seconds. An error names the faulty part of the grammar."""
        compile_grammar = self._served.engine.preparer.rules_for
        with self._errors_as_api_errors():
            try:
                self._rules = compile_grammar(self._params)
            except ParameterError as error:
                explained = self._endpoint.explained(error, compile_grammar)
                raise with_place(explained, self._params.structured_outputs, compile_grammar) from error

    def finish(self) -> None:
        """Check the limits on all sequences together. Set :attr:`requests` and :attr:`echoes`."""
        body, params, engine = self._body, self._params, self._served.engine
        with self._errors_as_api_errors():
            salt, adapter = body.cache_salt or "", self._served.adapter
            self.requests = engine.preparer.prepare_all(
                self._prompts, params, salt, self._rules, adapter, self._inserted
            )
        prompts = [request.prompt_token_ids for request in self.requests]
        num_tokens = sum(map(len, prompts)) * params.n
        if num_tokens > MAX_PROMPT_TOKENS:
            raise invalid(f"n times the tokens of the prompts must be at most {MAX_PROMPT_TOKENS}", param="n")
        num_prompt_entries = num_entries(num_tokens, params.prompt_logprobs)
        limit = MAX_STREAMED_ENTRIES if body.stream else MAX_LOGPROB_ENTRIES
        if num_prompt_entries > limit:
            field = body.logprobs_field if body.prompt_logprobs is None else "prompt_logprobs"
            raise invalid(
                f": the prompts would have {num_prompt_entries} log probabilities; the limit is {limit}", where=field
            )
        if body.return_token_ids and body.stream and max(map(len, prompts)) > MAX_STREAMED_IDS:
            raise invalid(
                f" cannot be streamed for a prompt of more than {MAX_STREAMED_IDS} tokens", where="return_token_ids"
            )
        self.echoes = self._endpoint.echoes(body, prompts, engine.tokenizer)

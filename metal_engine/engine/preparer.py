"""Checks and resolves requests before they enter the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from metal_engine.cancellation import check_cancelled
from metal_engine.engine.pooling_defaults import resolve_pooling
from metal_engine.engine.token_rules_maker import GrammarMaker, TokenRulesMaker
from metal_engine.errors import ContextLengthError, ParameterError, PromptError
from metal_engine.lora_adapter import Adapter
from metal_engine.media.image_preparer import ImagePreparer
from metal_engine.media.limits import MAX_INPUT_BYTES
from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.request import PreparedRequest
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.image_planner import largest_step
from metal_engine.scheduling.prefix_cache import prompt_block_hashes
from metal_engine.scheduling.token_allotment import check_fits, chunk_unit
from metal_engine.settings.config import EngineConfig
from metal_engine.text.prompt_boundaries import PromptBoundaries
from metal_engine.text.stop_strings import stop_automaton
from metal_engine.text.tokenizer import Tokenizer
from metal_engine.token_rules import NO_RULES, TokenRules

# Sampling parameters of pooling requests: they produce one result where other requests produce a first token.
_POOLING = SamplingParams(max_tokens=1, temperature=0.0)

# Maximum size of a prompt's encoder inputs in bytes. The request holds them until its end, and messages carry them to
# the engine's process.
MAX_IMAGE_BYTES = MAX_INPUT_BYTES


class RequestPreparer:
    """Factory of :class:`PreparedRequest` for one model. Thread-safe.

    Call it outside the engine thread: it may compile a grammar, which would delay steps.

    Args:
        config: configuration of the engine, with every value resolved.
        tokenizer: tokenizer of the model.
        grammars: factory of grammars; None to compile them in this process.

    Attributes:
        images: prepares images; None if the model takes no images.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, grammars: GrammarMaker | None = None) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._rules = TokenRulesMaker(tokenizer, config.model.vocab_size, grammars)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self.images = None if config.vision is None else ImagePreparer(config.vision, encode)
        self._boundaries = PromptBoundaries(tokenizer) if config.cache.num_state_slots else None

    def prepare(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        images: PromptImages | None = None,
    ) -> PreparedRequest:
        """Validate a prompt and its parameters, and resolve them for this model.

        Truncates the prompt if ``params.truncate_prompt_tokens`` is set.

        Args:
            images: images of the prompt. The prompt must have one token for each feature of an image.

        Raises:
            ParameterError: the model does not support the parameters, or a token id is outside its vocabulary.
            ContextLengthError: the prompt, alone or with its output, exceeds the model's context length.
            PromptError: the model cannot generate, the prompt is empty, the request exceeds the KV cache, or the images
                are not supported or too large.
            ValueError: the positions of the images do not fit the prompt.
            OverloadedError: too many grammars are waiting to be compiled.
            Cancelled: the client has disconnected.
        """
        return self.prepare_all([prompt_token_ids], params, cache_salt, images=[images])[0]

    def prepare_all(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        cache_salt: str = "",
        rules: TokenRules | None = None,
        adapter: Adapter | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[PreparedRequest]:
        """Prepare several prompts that share sampling parameters. Raises as :meth:`prepare`.

        Args:
            rules: result of :meth:`rules_for` for ``params``; None to resolve ``params`` once for all prompts.
            adapter: LoRA adapter of the requests; None without an adapter.
            images: images of each prompt; None if no prompt has images.
        """
        if not self._config.model.can_generate:
            raise PromptError(f"{self._config.model.name} has no LM head: it gives embeddings, and cannot generate")
        rules = rules or self.rules_for(params)
        stops = stop_automaton(params.stop) if params.stop else None
        prepared = []
        for prompt, of_prompt in zip(prompts, images or [None] * len(prompts), strict=True):
            check_cancelled()
            if of_prompt is not None:
                self._check_images(prompt, of_prompt, params)
            kept = self._truncated(prompt, params.truncate_prompt_tokens, params.max_tokens or 1)
            max_tokens = self._max_tokens(len(kept), params)
            self._check_token_ids(kept)
            hashes = prompt_block_hashes(kept, self._config.cache, cache_salt, adapter, of_prompt)
            request = PreparedRequest(
                kept,
                params,
                max_tokens,
                rules,
                eos_token_ids=self.tokenizer.eos_token_ids,
                stop_automaton=stops,
                cache_salt=cache_salt,
                block_hashes=hashes,
                adapter=adapter,
                images=of_prompt,
            )
            prepared.append(request if self._boundaries is None else self._boundaries.with_boundaries(request))
        return prepared

    def prepare_pooling(
        self, prompts: list[list[int]], params: PoolingParams, cache_salt: str = "", adapter: Adapter | None = None
    ) -> list[PreparedRequest]:
        """Prepare several prompts for pooling, as :meth:`prepare_all` does for generation.

        Raises:
            ParameterError: the model does not support the parameters, or a token id is outside its vocabulary.
            ContextLengthError: a prompt exceeds the model's context length.
            PromptError: a prompt is empty or exceeds the KV cache.
            Cancelled: the client has disconnected.
        """
        whole = resolve_pooling(params, self._config.model)
        prepared = []
        for prompt in prompts:
            check_cancelled()
            kept = self._truncated(prompt, params.truncate_prompt_tokens, 0)
            self._check_fits_alone(len(kept))
            self._check_token_ids(kept)
            hashes = prompt_block_hashes(kept, self._config.cache, cache_salt, adapter)
            request = PreparedRequest(
                kept,
                _POOLING,
                1,
                NO_RULES,
                cache_salt=cache_salt,
                block_hashes=hashes,
                pooling_params=whole,
                adapter=adapter,
            )
            prepared.append(request)
        return prepared

    @property
    def grammars(self) -> GrammarMaker:
        """Factory of the grammars of outputs."""
        return self._rules.grammars

    def rules_for(self, params: SamplingParams) -> TokenRules:
        """Resolve sampling parameters for this model. Compiles the grammar if there is one.

        Raises:
            ParameterError: the model does not support the parameters.
            OverloadedError: too many grammars are waiting to be compiled.
            Cancelled: the client has disconnected while the grammar was compiled.
        """
        return self._rules.rules_for(params)

    def close(self) -> None:
        """End the processes that compile grammars and decode images."""
        self._rules.close()
        if self.images is not None:
            self.images.close()

    def _check_images(self, prompt: list[int], images: PromptImages, params: SamplingParams) -> None:
        """Raise PromptError, ParameterError or ValueError, as :meth:`prepare`, if images cannot be served."""
        if (refusal := self._config.model.image_refusal) is not None:
            raise PromptError(f"{self._config.model.name} cannot be given images here: {refusal}")
        if params.truncate_prompt_tokens is not None:
            raise ParameterError("truncate_prompt_tokens", "a prompt with images cannot be truncated")
        images.check(len(prompt))
        largest, limit = max(image.num_features for image in images.images), self._config.scheduler
        if images.bidirectional_layers:
            self._check_step(images, params)
        if largest > limit.max_num_encoder_tokens:
            message = (
                f"an image has {largest} tokens, more than --max-num-encoder-tokens {limit.max_num_encoder_tokens}"
            )
            raise PromptError(message)
        different = {image.content_hash: image.inputs for image in images.images}
        num_bytes = sum(array.nbytes for inputs in different.values() for array in inputs.values())
        if num_bytes > MAX_IMAGE_BYTES:
            message = f"the images take {num_bytes >> 20} MiB of memory together, more than {MAX_IMAGE_BYTES >> 20} MiB"
            raise PromptError(message)

    def _check_step(self, images: PromptImages, params: SamplingParams) -> None:
        """Check that one step can compute all tokens of a bidirectional image.

        Raises:
            PromptError: an image is too large for a step.
            ParameterError: log probabilities of the prompt are requested.
        """
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", "is not supported with images of this model")
        limit = self._config.scheduler
        needed = largest_step(images, chunk_unit(limit, self._config.cache.block_size))
        most = limit.max_num_batched_tokens - (limit.max_num_seqs - 1)  # decodes of other requests take a token each
        if needed > most:
            raise PromptError(
                f"an image needs {needed} tokens of one step, but a step has only {most} tokens for it beside the "
                f"decodes of {limit.max_num_seqs - 1} requests; raise --max-num-batched-tokens or lower --max-num-seqs"
            )
        if needed > limit.image_cache_tokens:
            raise PromptError(
                f"images need {needed} tokens of one step together, but only {limit.image_cache_tokens} features are "
                "kept; raise --max-num-encoder-tokens"
            )

    def _truncated(self, prompt_token_ids: list[int], limit: int | None, num_new_tokens: int) -> list[int]:
        """Return the last ``limit`` tokens of the prompt.

        None keeps all tokens. -1 keeps as many tokens as fit into the context together with ``num_new_tokens`` new
        tokens. Raises ParameterError if ``limit`` exceeds the context length.
        """
        max_model_len = self._config.scheduler.max_model_len
        if limit is None:
            return prompt_token_ids
        if limit > max_model_len:
            message = f"{limit} is more than the maximum context length {max_model_len}"
            raise ParameterError("truncate_prompt_tokens", message)
        if limit == -1:
            limit = max(max_model_len - num_new_tokens, 1)
        return prompt_token_ids[-limit:]

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens may follow a prompt of this length. Raises as :meth:`prepare` if there is no room."""
        max_model_len = self._config.scheduler.max_model_len
        if num_prompt_tokens >= max_model_len:
            message = f"the prompt has {num_prompt_tokens} tokens, but the maximum context length is {max_model_len} "
            message += "tokens and must leave room for at least one more"
            raise ContextLengthError("prompt", message, num_prompt_tokens=num_prompt_tokens, limit=max_model_len - 1)
        max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len - num_prompt_tokens
        if params.min_tokens > max_tokens:
            message = f"{params.min_tokens} is more than the {max_tokens} tokens there is room for"
            raise ParameterError("min_tokens", message)
        check_fits(num_prompt_tokens, max_tokens, self._config.scheduler, self._config.cache)
        return max_tokens

    def _check_fits_alone(self, num_prompt_tokens: int) -> None:
        """Raise as :meth:`prepare_pooling` if the prompt is empty or too long."""
        max_model_len = self._config.scheduler.max_model_len
        if num_prompt_tokens > max_model_len:
            message = f"the prompt has {num_prompt_tokens} tokens, but the maximum context length is {max_model_len}"
            raise ContextLengthError("prompt", message, num_prompt_tokens=num_prompt_tokens, limit=max_model_len)
        check_fits(num_prompt_tokens, 0, self._config.scheduler, self._config.cache)

    def _check_token_ids(self, prompt: list[int]) -> None:
        vocab_size = self._config.model.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ParameterError("prompt", f"has token ids outside the vocabulary of {vocab_size}")

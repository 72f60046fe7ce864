"""An engine without a model: a runner that computes tokens in Python, and a tiny tokenizer. Loads no MLX.

The runner keeps to :class:`metal_engine.step.Runner` and checks every plan it is given, so a scheduler that
forgets a block or hands out a token twice fails the step here.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.core import EngineCore
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import CacheConfig, DeviceInfo, EngineConfig, ModelInfo, SchedulerConfig
from metal_engine.step import ModelOutput, SchedulerOutput

# --- tokenizer --------------------------------------------------------------------------------------------

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)
# Enough merges for texts to have more than one tokenization.
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("Ġ", "the"), ("S", "T"), ("O", "P")]


def byte_tokens() -> list[str]:
    """The 256 bytes as byte-level BPE spells them, byte 0 first (GPT-2's table, from `tokenizers` itself)."""
    alphabet = sorted(ByteLevel.alphabet())
    spelled = {ch: ch.encode("latin-1")[0] for ch in alphabet if ord(ch) < 256}
    missing = [byte for byte in range(256) if byte not in spelled.values()]
    spelled |= dict(zip((ch for ch in alphabet if ord(ch) >= 256), missing, strict=True))
    return sorted(spelled, key=spelled.__getitem__)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """A byte-level tokenizer whose ids 0-255 are the bytes, then merges, then special tokens."""
    tokens = byte_tokens() + [a + b for a, b in MERGES]
    backend = BackendTokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    hf.chat_template = chat_template
    return Tokenizer(hf)


def byte_ids(text: str) -> list[int]:
    """A text as one token a byte, so that every character beyond ASCII is split."""
    return list(text.encode())


EOS = 256 + len(MERGES) + SPECIAL_TOKENS.index("<|im_end|>")
VOCAB_SIZE = 256 + len(MERGES) + len(SPECIAL_TOKENS)

# --- what to generate -------------------------------------------------------------------------------------

NextToken = Callable[[list[int], int], int]
"""(all tokens so far, length of the prompt) -> the next token."""


def hash_chain(tokens: list[int], num_prompt_tokens: int) -> int:
    """A printable ASCII token that depends on every token before it; never EOS."""
    return 32 + zlib.crc32(repr(tokens).encode()) % 95


def echo(tokens: list[int], num_prompt_tokens: int) -> int:
    """The prompt's tokens again, one by one, then EOS."""
    num_output_tokens = len(tokens) - num_prompt_tokens
    return tokens[num_output_tokens] if num_output_tokens < num_prompt_tokens else EOS


def generated(prompt: list[int], num_tokens: int, next_token: NextToken = hash_chain) -> list[int]:
    """What a request alone generates: the truth that served tokens are checked against."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, len(prompt)))
    return tokens[len(prompt) :]


def script(text: str) -> NextToken:
    """A text, byte by byte, then EOS, whatever the prompt."""
    tokens = [*byte_ids(text), EOS]

    def next_token(so_far: list[int], num_prompt_tokens: int) -> int:
        return tokens[min(len(so_far) - num_prompt_tokens, len(tokens) - 1)]

    return next_token


# --- runner -----------------------------------------------------------------------------------------------


@dataclass
class _Held:
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]


@dataclass
class FakeRunner:
    """Implements :class:`metal_engine.step.Runner` over :data:`NextToken`.

    Attributes:
        step_time: seconds to sleep in a step, so that clients can act while requests run.
        running: cleared to hold the engine before its next step, set to let it go on.
        has_arrived: whether a step has begun, held or not.
        raise_next: raised by the next step, once.
        seen_params: the sampling parameters of every request so far, in order of admission.
        seen_seeds: the seeds of their draws.
    """

    block_size: int
    next_token: NextToken = hash_chain
    step_time: float = 0.0
    running: threading.Event = field(default_factory=threading.Event)
    has_arrived: bool = False
    raise_next: BaseException | None = None
    num_steps: int = 0
    seen_params: list[SamplingParams] = field(default_factory=list)
    seen_seeds: list[int] = field(default_factory=list)
    _held: dict[str, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running.set()

    def close(self) -> None:
        """Nothing here belongs to a thread."""

    def execute(self, plan: SchedulerOutput) -> FakeStep:
        self.has_arrived = True
        self.running.wait()
        if self.step_time:
            time.sleep(self.step_time)
        self.num_steps += 1
        for request_id in plan.dropped_req_ids:
            del self._held[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self._held, f"{new.request_id} is held already"
            self.seen_params.append(new.sampling_params)
            self.seen_seeds.append(new.seed)
            self._held[new.request_id] = _Held(
                list(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, list(new.block_ids)
            )
        for request_id, block_ids in plan.new_block_ids.items():
            self._held[request_id].block_ids += block_ids
        if self.raise_next is not None:
            error, self.raise_next = self.raise_next, None
            raise error
        self._check(plan)
        sampled = []
        for request_id, length in plan.num_scheduled_tokens.items():
            held = self._held[request_id]
            held.num_computed += length
            if request_id in plan.sampled_req_ids:
                assert held.num_computed == len(held.tokens), f"{request_id} samples before its last token"
                held.tokens.append(self.next_token(held.tokens, held.num_prompt_tokens))
                sampled.append(held.tokens[-1])
        return FakeStep(ModelOutput(sampled))

    def _check(self, plan: SchedulerOutput) -> None:
        assert plan.num_scheduled_tokens, "an empty step"
        holders = Counter(block_id for held in self._held.values() for block_id in held.block_ids)
        for request_id, length in plan.num_scheduled_tokens.items():
            held = self._held[request_id]
            assert length > 0
            end = held.num_computed + length
            assert end <= len(held.tokens), f"{request_id}: computes {end} of {len(held.tokens)} tokens"
            assert end <= len(held.block_ids) * self.block_size, f"{request_id}: too few blocks"
            written = held.block_ids[held.num_computed // self.block_size : -(-end // self.block_size)]
            assert all(holders[block_id] == 1 for block_id in written), (
                f"{request_id}: writes to a shared block"
            )


@dataclass
class FakeStep:
    output: ModelOutput

    def result(self) -> ModelOutput:
        return self.output


# --- engine -----------------------------------------------------------------------------------------------


def fake_config(
    *,
    num_blocks: int = 256,
    block_size: int = 8,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 64,
    max_model_len: int = 512,
    scheduling_policy: str = "fcfs",
    async_scheduling: bool = False,
    vocab_size: int = VOCAB_SIZE,
) -> EngineConfig:
    return EngineConfig(
        model=ModelInfo(
            name="fake",
            model_type="fake",
            dtype="float32",
            vocab_size=vocab_size,
            num_layers=1,
            num_params=0,
            weight_bytes=0,
            kv_bytes_per_token=1,
            max_position_embeddings=max_model_len,
        ),
        device=DeviceInfo(kind="cpu", name="fake", compute="Python", memory_bytes=1 << 30),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            scheduling_policy=scheduling_policy,
            async_scheduling=async_scheduling,
        ),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=True),
        attention_backend="fake",
        seed=0,
    )


def fake_engine(
    runner: FakeRunner | None = None, config: EngineConfig | None = None, tokenizer: Tokenizer | None = None
) -> AsyncEngine:
    """An engine like the real one, on a fake runner; started."""
    config = config or fake_config()
    runner = runner or FakeRunner(config.cache.block_size)
    tokenizer = tokenizer or tiny_tokenizer()
    engine = AsyncEngine(lambda: EngineCore(config, runner, tokenizer))
    engine.start()
    return engine

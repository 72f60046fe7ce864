"""Creates the requests of the benchmarks, and their arrival times.

Prompts are random texts of exact lengths, which depend on a seed, or they come from a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metal_engine.bench.args import WorkloadArgs
from metal_engine.bench.tokens import PromptTokenizer
from metal_engine.bench.verses import LINES
from metal_engine.errors import ConfigError
from metal_engine.local_paths import local_path

Message = dict[str, Any]


@dataclass(frozen=True)
class BenchRequest:
    """One request of a benchmark.

    Attributes:
        prompt: text of the prompt.
        output_len: number of output tokens to request.
        prompt_len: number of tokens of the prompt's text; None if they were not counted.
        messages: messages to send to the chat endpoint instead of the prompt.
        images: data URLs of images. They come before the text of the last message.
    """

    prompt: str
    output_len: int
    prompt_len: int | None = None
    messages: list[Message] | None = None
    images: tuple[str, ...] = ()

    @property
    def chat_messages(self) -> list[Message]:
        messages = self.messages or [{"role": "user", "content": self.prompt}]
        if not self.images:
            return messages
        content = messages[-1]["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return [*messages[:-1], {**messages[-1], "content": [*images, *texts]}]


def make_requests(args: WorkloadArgs, seed: int, load_tokenizer: Callable[[], PromptTokenizer]) -> list[BenchRequest]:
    """Return the requests that ``args`` describe. The same seed gives the same requests.

    Args:
        load_tokenizer: function that loads the tokenizer. Not called for the dataset ``custom``.

    Raises:
        ConfigError: the file cannot be used, or has fewer usable prompts than ``--num-prompts``, or the instruction of
            the dataset ``sonnet`` does not fit into a request's input length.
    """
    if args.dataset_name in ("sharegpt", "custom"):
        return _from_file(args, seed, load_tokenizer)
    tokenizer, rng = load_tokenizer(), np.random.default_rng(seed)
    long = rng.permutation(args.num_prompts) < round(args.long_ratio * args.num_prompts)
    prefix = random_text(tokenizer, rng, args.prefix_len) if args.prefix_len else ""
    requests = []
    for i in range(args.num_prompts):
        is_long = args.dataset_name == "mixed" and bool(long[i])
        input_len = _vary(rng, args.long_input_len if is_long else args.input_len, args.range_ratio)
        output_len = _vary(rng, args.output_len, args.range_ratio)
        make = verse_text if args.dataset_name == "sonnet" else random_text
        prompt = make(tokenizer, rng, args.prefix_len + input_len, prefix)
        requests.append(BenchRequest(prompt, output_len, len(tokenizer.encode(prompt))))
    return requests


def _vary(rng: np.random.Generator, length: int, ratio: float) -> int:
    low, high = max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio)))
    return int(rng.integers(low, high + 1))


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Return the time at which each request is sent, in seconds after the start, [num_requests] float64.

    The first request is sent at 0. Times between requests follow a gamma distribution with shape ``burstiness`` and
    mean ``1 / rate``. Its coefficient of variation is ``burstiness ** -0.5``. Shape 1 is a Poisson process.

    Args:
        rate: requests per second; infinity for all at once.
    """
    if math.isinf(rate):
        return np.zeros(num_requests)
    # A separate generator, so that prompts do not change with the rate.
    rng = np.random.default_rng([seed, 1])
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), num_requests - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])


def random_text(tokenizer: PromptTokenizer, rng: np.random.Generator, length: int, prefix: str = "") -> str:
    """Return a text that begins with ``prefix`` and has exactly ``length`` tokens, if the vocabulary allows it.

    The rest of the text consists of random words, which are tokens of a space and letters. Random tokens of all kinds
    would often change when they are decoded and encoded. If the tokenizer merges words, letters are removed or words
    are added.
    """
    words = _words(tokenizer)
    text = prefix
    for _ in range(8):
        missing = length - len(tokenizer.encode(text))
        if missing == 0:
            break
        if missing > 0:
            text += "".join(words[i] for i in rng.integers(len(words), size=missing))
        else:
            # Remove one letter at a time until the text fits.
            while len(tokenizer.encode(text)) > length:
                text = text[:-1]
    return text


def _words(tokenizer: PromptTokenizer) -> list[str]:
    letters = [" " + letter for letter in "abcdefghijklmnopqrstuvwxyz"]
    # The vocabularies of tests have hardly any words.
    return tokenizer.words if len(tokenizer.words) > len(letters) else letters


_INSTRUCTION = "Pick as many lines as you can from these verses, and go on in the same manner:\n"


def verse_text(tokenizer: PromptTokenizer, rng: np.random.Generator, length: int, prefix: str = "") -> str:
    """Return ``prefix``, an instruction, and as many random lines as fit into ``length`` tokens in total.

    Raises:
        ConfigError: the instruction alone does not fit.
    """
    lengths = [len(tokenizer.encode(line + "\n")) for line in LINES]
    text = prefix + _INSTRUCTION
    left = length - len(tokenizer.encode(text))
    if left < 0:
        raise ConfigError("--input-len", f"is {-left} tokens too short for the instruction before the verses")
    lines = []
    while True:
        i = int(rng.integers(len(LINES)))
        if lengths[i] > left:
            break
        lines.append(LINES[i] + "\n")
        left -= lengths[i]
    # Together, lines may take more tokens than separately.
    while lines and len(tokenizer.encode(text + "".join(lines))) > length:
        lines.pop()
    return text + "".join(lines)


# --- files ---


def _from_file(args: WorkloadArgs, seed: int, load_tokenizer: Callable[[], PromptTokenizer]) -> list[BenchRequest]:
    path = local_path(args.dataset_path or "")
    read = _sharegpt if args.dataset_name == "sharegpt" else _custom
    try:
        requests = list(read(path, args, load_tokenizer))
    except OSError as error:
        raise ConfigError("--dataset-path", f"cannot read --dataset-path {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError("--dataset-path", f"{path} is not a valid {args.dataset_name} file: {error!r}") from error
    if len(requests) < args.num_prompts:
        raise ConfigError(
            "--num-prompts", f"{path} has {len(requests)} usable prompts, fewer than --num-prompts {args.num_prompts}"
        )
    picked = np.random.default_rng(seed).permutation(len(requests))[: args.num_prompts]
    return [requests[i] for i in picked]


def _objects(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list, or one JSON object per line."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _custom(path: Path, args: WorkloadArgs, load_tokenizer: Callable[[], PromptTokenizer]) -> Iterator[BenchRequest]:
    for one in _objects(path):
        messages = one.get("messages")
        prompt = one["prompt"] if messages is None else "\n".join(str(m["content"]) for m in messages)
        if not isinstance(prompt, str):
            raise TypeError("a prompt is not a text")
        output_len = int(one.get("output_len", args.output_len))
        if output_len < 1:
            raise ValueError(f"an output_len is {output_len}")
        yield BenchRequest(prompt, output_len, None, messages)


def _sharegpt(path: Path, args: WorkloadArgs, load_tokenizer: Callable[[], PromptTokenizer]) -> Iterator[BenchRequest]:
    """Yield a request for each conversation: its first text is the prompt, and the length of its second text in tokens
    is the output length.

    Conversations with very short or long texts are left out.
    """
    tokenizer = load_tokenizer()
    for one in _objects(path):
        turns = one["conversations"]
        if len(turns) < 2:
            continue
        prompt, answer = turns[0]["value"], turns[1]["value"]
        prompt_len, output_len = len(tokenizer.encode(prompt)), len(tokenizer.encode(answer))
        # The same limits as in other benchmarks: neither too short, nor too long for a small model's context.
        if min(prompt_len, output_len) >= 4 and prompt_len <= 1024 and prompt_len + output_len <= 2048:
            yield BenchRequest(prompt, output_len, prompt_len)

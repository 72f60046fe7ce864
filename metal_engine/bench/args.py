"""Settings of the ``bench`` commands. Settings of vLLM's benchmarks keep their names."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import SettingsBase, setting

DATASETS = ("random", "sonnet", "prefix", "mixed", "sharegpt", "custom")
ENDPOINTS = ("completions", "chat", "embeddings")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class WorkloadArgs(SettingsBase):
    """Settings of the requests to send: their prompts, lengths and number."""

    dataset_name: str = setting(
        "random",
        "Kind of prompts: random (random words), sonnet (an instruction and random lines of verse), prefix (random "
        "words after a common prefix), mixed (random words, some prompts long), sharegpt, or custom (JSONL).",
        choices=DATASETS,
    )
    dataset_path: str | None = setting(
        None,
        "File to read. For sharegpt: JSON or JSONL with `conversations`. For custom: JSONL with `prompt` or "
        "`messages`, and optionally `output_len`.",
    )
    num_prompts: int = setting(100, "Requests to send.", ge=1)
    input_len: int = setting(512, "Tokens of a prompt.", ge=1)
    output_len: int = setting(128, "Tokens to generate per request.", ge=1)
    range_ratio: float = setting(
        0.0, "Spread: each length is drawn uniformly between (1 - X) and (1 + X) times its value.", ge=0, lt=1
    )
    prefix_len: int = setting(0, "Tokens of a common prefix of all prompts, in addition to --input-len.", ge=0)
    long_ratio: float = setting(0.25, "Fraction of long prompts in `mixed`.", ge=0, le=1)
    long_input_len: int = setting(2048, "Tokens of a long prompt in `mixed`.", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset_name in ("sharegpt", "custom")) != (self.dataset_path is not None):
            raise ConfigError(
                "--dataset-path", "is required for the datasets sharegpt and custom, and not allowed for others"
            )
        if self.dataset_name == "prefix" and not self.prefix_len:
            raise ConfigError("--prefix-len", "is required for the dataset prefix")


@dataclass(frozen=True, kw_only=True)
class BenchServeArgs(WorkloadArgs):
    """Settings of ``bench serve``."""

    base_url: str = setting("http://127.0.0.1:8000", "URL of a server with OpenAI's API.")
    endpoint: str = setting("completions", "Endpoint below /v1/: completions, chat or embeddings.", choices=ENDPOINTS)
    model: str | None = setting(None, "Model to request. Default: the server's first.")
    tokenizer: str | None = setting(
        None,
        "Tokenizer that counts prompt tokens: a directory, a repository, a .gguf file or `demo`. Default: --model's.",
    )
    images: int = setting(0, "Random images of each prompt. Requires --endpoint chat.", ge=0, le=256)
    image_size: str = setting("512x512", "Width and height of an image in pixels, as in 1024x768.")
    seed: int = setting(0, "Seed of prompts, images, lengths and arrivals.", ge=0)
    api_key: str | None = setting(None, "Key to send as `Authorization: Bearer KEY`.", secret=True)
    request_rate: float = setting(inf, "Requests per second; inf sends all at once.", gt=0)
    burstiness: float = setting(
        1.0, "Shape of the gamma distribution of times between requests: 1 is Poisson, less is burstier.", gt=0, lt=inf
    )
    max_concurrency: int | None = setting(None, "Maximum requests in flight.", ge=1)
    num_warmups: int = setting(1, "Requests to complete before the measured ones.", ge=0)
    temperature: float = setting(0.0, "Sampling temperature.", ge=0, lt=inf)
    ignore_eos: bool = setting(True, "Request exactly --output-len tokens, and check their number.")
    extra_body: str | None = setting(None, "JSON object with more fields for every request.")
    request_timeout: float = setting(3600.0, "Maximum seconds of a request.", gt=0, lt=inf)
    ready_timeout: float = setting(0.0, "Seconds to wait for the server.", ge=0, lt=inf)
    percentiles: tuple[str, ...] = setting(("99",), "Percentiles to report.")
    goodput: tuple[str, ...] = setting((), "Limit in ms for a good request: ttft:N, tpot:N or e2el:N. Repeatable.")
    save_result: str | None = setting(None, "JSON file for the result, including every request.")
    plot: str | None = setting(None, "PNG file for a plot (requires the extra `plots`).")
    progress: bool = setting(True, "Show progress on a terminal.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError("--base-url", f"must begin with http:// or https://, got {self.base_url!r}")
        if self.images and self.endpoint != "chat":
            raise ConfigError("--images", "requires --endpoint chat")
        _ = self.percentile_values, self.goodput_limits, self.image_sides

    @property
    def image_sides(self) -> tuple[int, int]:
        """Width and height of an image in pixels. Raises ConfigError if ``--image-size`` is invalid."""
        width, _, height = self.image_size.partition("x")
        if not all(side.isdecimal() and 0 < int(side[:6]) <= 8192 for side in (width, height)):
            raise ConfigError("--image-size", f"must be WIDTHxHEIGHT, each at most 8192, got {self.image_size!r}")
        return int(width), int(height)

    @property
    def percentile_values(self) -> tuple[float, ...]:
        """Values of ``--percentiles``, from 0 to 100. Raises ConfigError if one is invalid."""
        try:
            values = tuple(float(p) for p in self.percentiles)
        except ValueError:
            values = (-1.0,)
        if not all(0 <= value <= 100 for value in values):
            raise ConfigError("--percentiles", f"must be numbers from 0 to 100, got {', '.join(self.percentiles)}")
        return values

    @property
    def goodput_limits(self) -> dict[str, float]:
        """Limits of ``--goodput`` by metric, in milliseconds, e.g. ``{"ttft": 500.0}``; empty without the flag.

        Raises ConfigError if the flag is invalid.
        """
        limits = {}
        for one in self.goodput:
            name, _, value = one.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[""] = 0.0
        if not limits.keys() <= set(GOODPUT_METRICS) or not all(limit > 0 for limit in limits.values()):
            raise ConfigError("--goodput", f"must be {', '.join(GOODPUT_METRICS)} with milliseconds, as in ttft:500")
        return limits


@dataclass(frozen=True, kw_only=True)
class BenchThroughputArgs(WorkloadArgs):
    """Settings of ``bench throughput``, which submits all requests at the start."""

    save_result: str | None = setting(None, "JSON file for the result.")


@dataclass(frozen=True, kw_only=True)
class BenchLatencyArgs(SettingsBase):
    """Settings of ``bench latency``, which repeats the same batch of requests."""

    input_len: int = setting(32, "Tokens of a prompt.", ge=1)
    output_len: int = setting(128, "Tokens to generate per request.", ge=1)
    batch_size: int = setting(8, "Requests in the batch.", ge=1)
    num_iters: int = setting(10, "Measured repetitions.", ge=1)
    num_iters_warmup: int = setting(2, "Repetitions before the measured ones.", ge=0)
    save_result: str | None = setting(None, "JSON file for the result.")

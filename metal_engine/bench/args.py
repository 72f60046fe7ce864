"""Settings of the ``bench`` commands. Names follow vLLM's where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import SettingsBase, setting

DATASETS = ("random", "sonnet", "prefix", "mixed", "sharegpt", "custom")
ENDPOINTS = ("completions", "chat", "embeddings")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class WorkloadArgs(SettingsBase):
    """Settings of the requests to send: what they ask for, and how many there are."""

    dataset_name: str = setting(
        "random",
        "What the prompts are: random (words that mean nothing), sonnet (lines of verse below one instruction), prefix "
        "(random, all beginning with the same --prefix-len tokens), mixed (random, a share of --long-ratio with "
        "--long-input-len tokens), sharegpt, or custom (JSONL).",
        choices=DATASETS,
    )
    dataset_path: str | None = setting(
        None,
        "File to read: for sharegpt JSON or JSONL with `conversations`, for custom JSONL with `prompt` or `messages` "
        "(and `output_len`, if you like).",
    )
    num_prompts: int = setting(100, "How many requests to send.", ge=1)
    input_len: int = setting(512, "Tokens of a prompt.", ge=1)
    output_len: int = setting(128, "Tokens to generate for each.", ge=1)
    range_ratio: float = setting(
        0.0, "Spread of lengths: each is drawn evenly between (1 - X) and (1 + X) times what is asked for.", ge=0, lt=1
    )
    prefix_len: int = setting(0, "How many tokens all prompts begin with; --input-len counts those after them.", ge=0)
    long_ratio: float = setting(0.25, "Share of long prompts in `mixed`.", ge=0, le=1)
    long_input_len: int = setting(2048, "Tokens of a long prompt in `mixed`.", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset_name in ("sharegpt", "custom")) != (self.dataset_path is not None):
            raise ConfigError("--dataset-path", "is for the datasets sharegpt and custom, and they need it")


@dataclass(frozen=True, kw_only=True)
class BenchServeArgs(WorkloadArgs):
    """Settings of ``bench serve``."""

    base_url: str = setting("http://127.0.0.1:8000", "Address of the server; any that speaks OpenAI's API.")
    endpoint: str = setting(
        "completions", "Where to send requests: completions, chat or embeddings (each below /v1/).", choices=ENDPOINTS
    )
    model: str | None = setting(None, "Model to ask for. Default: the first that the server lists.")
    tokenizer: str | None = setting(
        None,
        "Tokenizer that counts prompt tokens: a directory, a repository, a .gguf file or `demo`. Default: --model's.",
    )
    seed: int = setting(0, "Seed of prompts, lengths and arrivals.", ge=0)
    api_key: str | None = setting(None, "Key to send as `Authorization: Bearer KEY`.", secret=True)
    request_rate: float = setting(float("inf"), "Requests to send a second; inf sends all at once.", gt=0)
    burstiness: float = setting(
        1.0, "Shape of the gamma distribution of times between requests: 1 is Poisson, less is burstier.", gt=0
    )
    max_concurrency: int | None = setting(None, "Most requests under way at once.", ge=1)
    num_warmups: int = setting(1, "How many requests to send, and wait for, before the measured ones.", ge=0)
    temperature: float = setting(0.0, "Sampling temperature.", ge=0)
    ignore_eos: bool = setting(True, "Ask for exactly --output-len tokens, and check that they came.")
    extra_body: str | None = setting(None, "JSON object with more fields for every request.")
    request_timeout: float = setting(3600.0, "Seconds that a request may take.", gt=0)
    ready_timeout: float = setting(0.0, "Seconds to wait for the server to come up.", ge=0)
    percentiles: tuple[str, ...] = setting(("99",), "Percentiles to report.")
    goodput: tuple[str, ...] = setting(
        (), "Limit in ms that a good request keeps: ttft:N, tpot:N or e2el:N. Repeat the flag for several."
    )
    save_result: str | None = setting(None, "JSON file for the result, every request included.")
    plot: str | None = setting(None, "PNG file for a plot (needs the extra `plots`).")
    progress: bool = setting(True, "Show progress on a terminal.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError("--base-url", f"must begin with http:// or https://, got {self.base_url!r}")
        _ = self.percentile_values, self.goodput_limits

    @property
    def percentile_values(self) -> tuple[float, ...]:
        try:
            values = tuple(float(p) for p in self.percentiles)
        except ValueError:
            values = (-1.0,)
        if not all(0 <= value <= 100 for value in values):
            raise ConfigError("--percentiles", f"must be numbers from 0 to 100, got {', '.join(self.percentiles)}")
        return values

    @property
    def goodput_limits(self) -> dict[str, float]:
        """Metric -> its largest good value, in milliseconds."""
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
    """Settings of ``bench throughput``: all requests are there from the start."""

    save_result: str | None = setting(None, "JSON file for the result.")


@dataclass(frozen=True, kw_only=True)
class BenchLatencyArgs(SettingsBase):
    """Settings of ``bench latency``: the same requests at once, again and again."""

    input_len: int = setting(32, "Tokens of a prompt.", ge=1)
    output_len: int = setting(128, "Tokens to generate for each.", ge=1)
    batch_size: int = setting(8, "Requests at once.", ge=1)
    num_iters: int = setting(10, "Measured repetitions.", ge=1)
    num_iters_warmup: int = setting(2, "Repetitions before those.", ge=0)
    save_result: str | None = setting(None, "JSON file for the result.")

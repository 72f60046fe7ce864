"""Settings from the command line, the environment or a file, with one field for each setting.

:mod:`metal_engine.settings.resolve` replaces "auto", and None where it means "auto", by a value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf

from metal_engine.errors import ConfigError
from metal_engine.settings import attention_args, memory_args, rank_args, step_args
from metal_engine.settings.fields import FILE, HELP_ALL, SettingsBase, setting
from metal_engine.settings.format_names import REASONING_PARSER_CHOICES, TOOL_PARSER_CHOICES
from metal_engine.settings.lora_args import ENABLE_LORA, LORA, LORA_MODULES, MAX_LORA_RANK, MAX_LORAS, LoRAArgs
from metal_engine.settings.served_names import check_name

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "int8", "int4")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
TOOL_GRAMMARS = ("auto", "required", "never")

# Maximum of --max-num-seqs. The runner keeps an entry for each sequence. Devices compute far fewer at once.
MAX_NUM_SEQS = 65_536

GIB = 1 << 30

# Value of --served-model-name that accepts requests for any other name.
ANY_NAME = "*"
# Headings of groups of settings in `--help` and in docs/cli.md.
MODEL, MEMORY = attention_args.MODEL, memory_args.MEMORY
SCHEDULING, KV_TRANSFER = step_args.SCHEDULING, "KV transfer"
SERVER, SECURITY, LIMITS, ANSWERS, LOGGING = "Server", "Security", "Limits", "Answers", "Logging"


@dataclass(frozen=True, kw_only=True)
class EngineArgs(LoRAArgs, rank_args.RankArgs):
    """Settings of the engine as the user gave them. A field's help text has the meaning of ``None``.

    Field names are the command-line flags with underscores. A field that vLLM also has has the same meaning there.
    """

    model: str
    tokenizer: str | None = setting(
        None, "Tokenizer instead of the model's own: a directory or a repository.", group=MODEL, listing=HELP_ALL
    )
    revision: str | None = setting(None, "Branch, tag or commit of the repository.", group=MODEL, listing=HELP_ALL)
    download_dir: str | None = setting(
        None, "Folder for downloaded repositories. Default: the hub's cache.", group=MODEL, listing=HELP_ALL
    )
    trust_remote_code: bool = setting(False, "Run Python code from the model's repository.", group=MODEL)
    generation_config: str = setting(
        "auto",
        "Source of the sampling defaults: auto (the model's generation_config.json), vllm (none), or a folder with "
        "such a file.",
        group=MODEL,
        listing=HELP_ALL,
    )
    chat_template: str | None = setting(
        None, "Chat template instead of the model's own: a file or Jinja text.", group=MODEL
    )
    allow_special_tokens_in_content: bool = setting(
        False,
        "Read special tokens such as <|im_end|> in messages as control tokens, so that message content can forge a "
        "turn.",
        group=MODEL,
        listing=FILE,
    )
    dtype: str = setting(
        "auto",
        "Data type of the weights: auto (as stored; float32 on a CPU), float32, float16 or bfloat16.",
        group=MODEL,
        choices=DTYPES,
    )
    seed: int = setting(0, "Default seed of requests.", group=MODEL, listing=HELP_ALL, ge=0, lt=2**64)
    max_model_len: int | None = setting(
        None,
        "Maximum tokens of a request, prompt and output together. Default: the model's context length, at most the "
        "capacity of the KV cache.",
        group=MEMORY,
        kind="count",
        ge=1,
    )
    max_num_seqs: int | None = setting(
        None,
        "Maximum running requests. Default: 256 on Metal, 64 on a CPU; fewer if recurrent states would take more "
        "than a third of the pool's memory, or a step has fewer tokens.",
        group=SCHEDULING,
        ge=1,
        le=MAX_NUM_SEQS,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Maximum tokens of a step. Default: 2,048 on Metal, about a second's work on a CPU.",
        group=SCHEDULING,
        kind="count",
        ge=1,
    )
    block_size: int = setting(16, "Tokens in a block of the KV cache.", group=MEMORY, listing=HELP_ALL, ge=1)
    num_gpu_blocks_override: int | None = setting(
        None, "KV cache size in blocks instead of bytes.", group=MEMORY, listing=HELP_ALL, ge=1
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "KV cache size including recurrent states, as in 2GiB. Default: the rest of --gpu-memory-utilization on "
        "Metal; 2 GiB on a CPU, at most a quarter of the free memory.",
        group=MEMORY,
        kind="size",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.9, "Fraction of the device's memory for weights, KV cache and activations (Metal).", group=MEMORY, gt=0, le=1
    )
    wire_memory: bool = memory_args.WIRE_MEMORY
    attention_backend: str = attention_args.ATTENTION_BACKEND
    attention_tuning: str = attention_args.ATTENTION_TUNING
    kv_cache_dtype: str = setting(
        "auto",
        "Data type of the KV cache: auto (the type of K and V), int8 or int4 (see docs/tuning.md).",
        group=MEMORY,
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = setting(True, "Compute a prefix that several requests share only once.", group=MEMORY)
    kv_cache_dir: str | None = setting(
        None, "Directory that stores KV across restarts, so that known prompts are not recomputed.", group=KV_TRANSFER
    )
    kv_cache_dir_size: int = setting(
        20 * GIB, "Maximum size of --kv-cache-dir.", group=KV_TRANSFER, listing=HELP_ALL, kind="size", ge=1
    )
    kv_transfer_config: str | None = setting(
        None,
        "Connector that loads and saves KV, as JSON (see docs/several-macs.md).",
        group=KV_TRANSFER,
        listing=HELP_ALL,
    )
    lora_modules: tuple[str, ...] = LORA_MODULES
    enable_lora: bool = ENABLE_LORA
    max_loras: int | None = MAX_LORAS
    max_lora_rank: int | None = MAX_LORA_RANK
    tensor_parallel_size: int = rank_args.TENSOR_PARALLEL_SIZE
    pipeline_parallel_size: int = rank_args.PIPELINE_PARALLEL_SIZE
    distributed_timeout_seconds: float = rank_args.DISTRIBUTED_TIMEOUT_SECONDS
    max_num_partial_prefills: int = setting(
        4, "Maximum prompts in concurrent prefill.", group=SCHEDULING, listing=HELP_ALL, ge=1
    )
    max_long_partial_prefills: int = setting(
        1, "Maximum long prompts in concurrent prefill.", group=SCHEDULING, listing=HELP_ALL, ge=1
    )
    long_prefill_token_threshold: int = setting(
        0,
        "A prompt with more uncomputed tokens than this is long. 0 means the tokens of a step.",
        group=SCHEDULING,
        listing=HELP_ALL,
        ge=0,
    )
    page_aligned_scheduling: bool = setting(
        False, "Split long prompts only at the ends of blocks.", group=SCHEDULING, listing=HELP_ALL
    )
    scheduling_policy: str = setting(
        "fcfs",
        "Order of requests: fcfs (by arrival), or priority (by the request's priority, lower first).",
        group=SCHEDULING,
        listing=HELP_ALL,
        choices=SCHEDULING_POLICIES,
    )
    max_attention_work: int | None = setting(
        None,
        "Maximum pairs of a query token and a key token in a step's attention. Default: about a second's work.",
        group=SCHEDULING,
        listing=FILE,
        ge=1,
    )
    max_num_encoder_tokens: int | None = step_args.MAX_NUM_ENCODER_TOKENS
    mm_processor_kwargs: str | None = setting(
        None,
        'Settings of the image processor, as JSON: {"max_pixels": 4000000}. Default: those of the checkpoint, with at '
        "most 1,280 tokens for an image.",
        group=MODEL,
        listing=HELP_ALL,
        kind="json",
    )
    async_scheduling: bool | None = step_args.ASYNC_SCHEDULING
    replay_decodes: str = step_args.REPLAY_DECODES
    speculative_config: str | None = setting(
        None,
        "Speculative decoding, as JSON (see docs/tuning.md). Outputs do not change.",
        group=SCHEDULING,
        kind="json",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("speculative_config", "mm_processor_kwargs"):
            if isinstance(value := getattr(self, name), dict):  # format of vLLM's LLM
                object.__setattr__(self, name, json.dumps(value))
        if self.mm_processor_kwargs is not None and not _is_object(self.mm_processor_kwargs):
            raise ConfigError("--mm-processor-kwargs", f"must be a JSON object, got {self.mm_processor_kwargs!r}")
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                "--max-long-partial-prefills",
                f"{self.max_long_partial_prefills} exceeds --max-num-partial-prefills {self.max_num_partial_prefills}",
            )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, kw_only=True)
class ServerArgs(SettingsBase):
    """Settings of ``metal-engine serve`` in addition to the engine's."""

    host: str = setting("127.0.0.1", "Address to listen on, or 0.0.0.0 for all.", group=SERVER)
    port: int = setting(8000, "Port to listen on; 0 selects a free port.", group=SERVER, ge=0, le=65535)
    uds: str | None = setting(None, "Unix domain socket instead of --host and --port.", group=SERVER, listing=HELP_ALL)
    engine_process: bool = setting(
        True,
        "Run the engine in a process of its own, unless a launcher starts the ranks. Several models need it.",
        group=SERVER,
        listing=HELP_ALL,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Name in the API instead of MODEL; * accepts any name. Repeatable. Responses contain the first.",
        group=SERVER,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Key that clients must send. Repeatable. METAL_ENGINE_API_KEY is safer: other users can see the command line.",
        group=SECURITY,
        secret=True,
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins whose web pages may call the server (CORS), as in https://chat.example; * allows all. Repeatable.",
        group=SECURITY,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "Host names for clients of a server without a key; * allows any. Repeatable.", group=SECURITY
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (), "Hosts from which images of requests may be downloaded. Repeatable.", group=SECURITY, listing=HELP_ALL
    )
    max_connections: int = setting(
        0,
        "Maximum connections. 0 means 4,096, or fewer if the limit of open files is low.",
        group=LIMITS,
        listing=FILE,
        ge=0,
    )
    timeout_read: float = setting(
        15.0,
        "Seconds for a client to send the headers, or the next part of a body.",
        group=LIMITS,
        listing=FILE,
        gt=0,
        lt=inf,
    )
    timeout_write: float = setting(
        60.0,
        "Seconds after which a response that the client does not read is dropped.",
        group=LIMITS,
        listing=FILE,
        gt=0,
        lt=inf,
    )
    timeout_keep_alive: float = setting(
        5.0, "Seconds after which an idle connection is closed.", group=LIMITS, listing=FILE, gt=0, lt=inf
    )
    max_num_queued_reqs: int = setting(
        2048,
        "Maximum waiting requests; others get 503 with Retry-After. A request with many prompts counts as at most "
        "twice --max-num-seqs. 0: no limit.",
        group=LIMITS,
        listing=HELP_ALL,
        ge=0,
    )
    max_num_queued_tokens: int = setting(
        0,
        "Maximum prompt tokens of requests without output; others get 503 with Retry-After. 0: no limit.",
        group=LIMITS,
        listing=FILE,
        ge=0,
    )
    request_timeout: float = setting(
        0.0, "Seconds after which a request ends with 504. 0: no limit.", group=LIMITS, listing=HELP_ALL, ge=0, lt=inf
    )
    ssl_keyfile: str | None = setting(None, "Private key of the certificate (PEM).", group=SECURITY, listing=HELP_ALL)
    ssl_keyfile_password: str | None = setting(
        None, "Password of the private key.", group=SECURITY, listing=FILE, secret=True
    )
    ssl_certfile: str | None = setting(None, "Certificate (PEM) for TLS.", group=SECURITY, listing=HELP_ALL)
    ssl_ca_certs: str | None = setting(
        None, "Certificate authorities (PEM) of mandatory client certificates.", group=SECURITY, listing=FILE
    )
    max_body_size: int = setting(
        16 << 20, "Maximum size of a request body.", group=LIMITS, listing=HELP_ALL, kind="size", ge=1
    )
    shutdown_timeout: float = setting(
        30.0,
        "Seconds for running requests to finish after SIGTERM or SIGINT.",
        group=SERVER,
        listing=HELP_ALL,
        ge=0,
        lt=inf,
    )
    lora_dir: str | None = setting(
        None,
        "Folder with LoRA adapters that clients may load and unload (/v1/load_lora_adapter). Requires --enable-lora.",
        group=LORA,
        listing=HELP_ALL,
    )
    strict_params: bool = setting(
        False, "Reject unknown parameters instead of ignoring them.", group=ANSWERS, listing=HELP_ALL
    )
    enable_auto_tool_choice: bool = setting(
        True, "Let the model decide whether to call a tool (tool_choice auto).", group=ANSWERS, listing=HELP_ALL
    )
    tool_call_parser: str = setting(
        "auto",
        "Format of the model's tool calls: auto (by its tokenizer), none, or a name.",
        group=ANSWERS,
        choices=TOOL_PARSER_CHOICES,
    )
    tool_grammar: str = setting(
        "auto",
        "Tool calls that a grammar constrains to names and schemas: auto (forced calls and the model's own), "
        "required (forced calls), or never (the prompt asks for forced calls).",
        group=ANSWERS,
        listing=HELP_ALL,
        choices=TOOL_GRAMMARS,
    )
    reasoning_parser: str = setting(
        "auto",
        "Format of the model's reasoning: auto (by its tokenizer), none, or a name.",
        group=ANSWERS,
        choices=REASONING_PARSER_CHOICES,
    )
    sse_keep_alive: float = setting(
        15.0,
        "Seconds between comments in a silent stream, which keep proxies connected. 0: never.",
        group=ANSWERS,
        listing=FILE,
        ge=0,
        lt=inf,
    )
    max_stored_responses: int = setting(
        1000,
        "Maximum responses of /v1/responses in memory, for previous_response_id. 0: none.",
        group=ANSWERS,
        listing=FILE,
        ge=0,
    )
    log_level: str = setting(
        "info", "Minimum severity in the log: debug, info, warning or error.", group=LOGGING, choices=LOG_LEVELS
    )
    log_format: str = setting(
        "text",
        "Format of log lines: text, or json (an object per line).",
        group=LOGGING,
        listing=HELP_ALL,
        choices=LOG_FORMATS,
    )
    log_stats_interval: float = setting(
        10.0,
        "Seconds between log lines about throughput, requests and KV cache. 0: never.",
        group=LOGGING,
        listing=FILE,
        ge=0,
        lt=inf,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile", "and --ssl-keyfile must be set together")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_keyfile_password) is not None:
            raise ConfigError("ssl-ca-certs", "and ssl-keyfile-password need --ssl-certfile")
        if isinstance(self.api_key, str):
            object.__setattr__(self, "api_key", (self.api_key,))
        if not all(key.strip() and key.isascii() for key in self.api_key):
            raise ConfigError("--api-key", "must be ASCII and not empty")
        if not all(name.strip() for name in self.allowed_hosts):
            raise ConfigError("--allowed-hosts", "must not be empty")
        for name in self.served_model_name:
            check_name("--served-model-name", name)

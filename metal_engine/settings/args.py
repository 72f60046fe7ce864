"""What the user asked for, in the command, the environment or a file: one field a setting.

None stands for "auto"; :mod:`metal_engine.settings.resolve` settles what that comes to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf

from metal_engine.errors import ConfigError
from metal_engine.settings import attention_args, memory_args, rank_args, step_args
from metal_engine.settings.fields import SettingsBase, setting
from metal_engine.settings.format_names import REASONING_PARSER_CHOICES, TOOL_PARSER_CHOICES
from metal_engine.settings.lora_args import ENABLE_LORA, LORA, LORA_MODULES, MAX_LORA_RANK, MAX_LORAS, LoRAArgs
from metal_engine.settings.model_names import check_name

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "int8", "int4")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

# The runner keeps an entry for each sequence; this is far beyond what a device computes at once.
MAX_NUM_SEQS = 65_536

GIB = 1 << 30

# Among the names that a model is served by: every other name.
ANY_NAME = "*"
# Headings in `--help` and in docs/cli.md, below which the settings stand.
MODEL, MEMORY = attention_args.MODEL, memory_args.MEMORY
SCHEDULING, KV_TRANSFER = step_args.SCHEDULING, "KV transfer"
SERVER, SECURITY, LIMITS, ANSWERS, LOGGING = "Server", "Security", "Limits", "Answers", "Logging"


@dataclass(frozen=True, kw_only=True)
class EngineArgs(LoRAArgs, rank_args.RankArgs):
    """Settings as the user gave them; ``None`` means "auto".

    Field names are the command-line flags with underscores, and mean what they mean in vLLM.
    """

    model: str
    tokenizer: str | None = setting(
        None, "Tokenizer to use instead of the model's own: a directory, or a repository.", group=MODEL
    )
    revision: str | None = setting(None, "Branch, tag or commit of the repository to load.", group=MODEL)
    download_dir: str | None = setting(
        None, "Folder for downloaded repositories. Default: the hub's cache.", group=MODEL
    )
    trust_remote_code: bool = setting(False, "Run code that the model's repository brings along.", group=MODEL)
    generation_config: str = setting(
        "auto",
        "Where sampling defaults come from: auto (the model's own generation_config.json), vllm (no file), or a folder "
        "with such a file.",
        group=MODEL,
    )
    chat_template: str | None = setting(
        None, "Chat template to use instead of the model's own: a file, or the Jinja text itself.", group=MODEL
    )
    allow_special_tokens_in_content: bool = setting(
        False,
        "Read <|im_end|> and the like in a message as control tokens. Else they are text: nobody can forge a turn.",
        group=MODEL,
    )
    dtype: str = setting(
        "auto",
        "Type of the weights: auto (as stored; float32 on a CPU), float32, float16 or bfloat16.",
        group=MODEL,
        choices=DTYPES,
    )
    seed: int = setting(0, "Seed for requests that do not set one.", group=MODEL, ge=0, lt=2**64)
    max_model_len: int | None = setting(
        None,
        "Longest request in tokens, prompt and output together. Default: what the model was trained for, "
        "or what the KV cache holds if that is less.",
        group=MEMORY,
        kind="count",
        ge=1,
    )
    max_num_seqs: int | None = setting(
        None,
        "Most requests that run at once. Default: 256 on Metal, 64 on a CPU, or as many recurrent states as fit into a "
        "third of the pool's memory; never more than tokens per step.",
        group=SCHEDULING,
        ge=1,
        le=MAX_NUM_SEQS,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens that one step computes. Default: 2,048 on Metal, about a second's work on a CPU.",
        group=SCHEDULING,
        kind="count",
        ge=1,
    )
    block_size: int = setting(16, "Tokens in a block of the KV cache.", group=MEMORY, ge=1)
    num_gpu_blocks_override: int | None = setting(
        None, "Size of the KV cache in blocks, instead of in bytes.", group=MEMORY, ge=1
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Size of the KV cache, recurrent states included, as in 2GiB. Default: what --gpu-memory-utilization leaves "
        "on Metal; on a CPU 2 GiB, at most a quarter of the free memory.",
        group=MEMORY,
        kind="size",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of the device's memory that weights, KV cache and activations may take together (Metal).",
        group=MEMORY,
        gt=0,
        le=1,
    )
    wire_memory: bool = memory_args.WIRE_MEMORY
    attention_backend: str = attention_args.ATTENTION_BACKEND
    attention_tuning: str = attention_args.ATTENTION_TUNING
    kv_cache_dtype: str = setting(
        "auto",
        "Type in which K and V are kept: auto (as the model computes them), int8 or int4 with a scale and a bias for "
        "each 64 numbers: 1.9 and 3.6 times the tokens of 16 bits in the same memory (see docs/tuning.md).",
        group=MEMORY,
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = setting(
        True, "Compute a beginning that several requests share only once.", group=MEMORY
    )
    kv_cache_dir: str | None = setting(
        None,
        "Directory that keeps the KV cache across restarts, so that a prompt seen before is not computed again.",
        group=KV_TRANSFER,
    )
    kv_cache_dir_size: int = setting(
        20 * GIB,
        "Largest size of that directory. What was used longest ago is removed first.",
        group=KV_TRANSFER,
        kind="size",
        ge=1,
    )
    kv_transfer_config: str | None = setting(
        None,
        "Where KV is loaded from and saved to, as JSON: kv_connector, kv_role, kv_connector_extra_config, "
        "kv_load_failure_policy (see docs/several-macs.md).",
        group=KV_TRANSFER,
    )
    lora_modules: tuple[str, ...] = LORA_MODULES
    enable_lora: bool = ENABLE_LORA
    max_loras: int | None = MAX_LORAS
    max_lora_rank: int | None = MAX_LORA_RANK
    tensor_parallel_size: int = rank_args.TENSOR_PARALLEL_SIZE
    pipeline_parallel_size: int = rank_args.PIPELINE_PARALLEL_SIZE
    distributed_timeout_seconds: float = rank_args.DISTRIBUTED_TIMEOUT_SECONDS
    max_num_partial_prefills: int = setting(4, "Most prompts that are computed side by side.", group=SCHEDULING, ge=1)
    max_long_partial_prefills: int = setting(
        1, "Most long prompts among those computed side by side.", group=SCHEDULING, ge=1
    )
    long_prefill_token_threshold: int = setting(
        0,
        "A prompt is long if it has more tokens than this left to compute. 0 means as many as a step has.",
        group=SCHEDULING,
        ge=0,
    )
    page_aligned_scheduling: bool = setting(False, "Cut long prompts at the ends of blocks only.", group=SCHEDULING)
    scheduling_policy: str = setting(
        "fcfs",
        "Who goes first: fcfs (who came first), or priority (the request's own, lower first).",
        group=SCHEDULING,
        choices=SCHEDULING_POLICIES,
    )
    max_attention_work: int | None = setting(
        None,
        "Most attention work in a step, counted in pairs of a token and a token that it sees. "
        "Default: about a second's work.",
        group=SCHEDULING,
        ge=1,
    )
    async_scheduling: bool | None = step_args.ASYNC_SCHEDULING
    replay_decodes: str = step_args.REPLAY_DECODES
    speculative_config: str | None = setting(
        None,
        "How to propose tokens ahead of the model, as JSON: method (ngram or draft_model), num_speculative_tokens; "
        "prompt_lookup_max, prompt_lookup_min; model, revision (see docs/tuning.md). Answers stay the same.",
        group=SCHEDULING,
        kind="json",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.speculative_config, dict):  # as vLLM's LLM takes it
            object.__setattr__(self, "speculative_config", json.dumps(self.speculative_config))
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                "--max-long-partial-prefills",
                f"{self.max_long_partial_prefills} exceeds --max-num-partial-prefills {self.max_num_partial_prefills}",
            )


@dataclass(frozen=True, kw_only=True)
class ServerArgs(SettingsBase):
    """Settings of ``metal-engine serve`` beside the engine's."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 listens on all.", group=SERVER)
    port: int = setting(8000, "Port to listen on; 0 takes any free one.", group=SERVER, ge=0, le=65535)
    uds: str | None = setting(None, "Unix domain socket to listen on instead of --host and --port.", group=SERVER)
    served_model_name: tuple[str, ...] = setting(
        (),
        "Name of the model in the API, instead of MODEL; * takes any name. Several: behind MODEL, or by repeating the "
        "flag; answers carry the first.",
        group=SERVER,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Key that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`; /health and /ready stay open. "
        "Repeat the flag for several. Others can read a command line: METAL_ENGINE_API_KEY is safer.",
        group=SECURITY,
        secret=True,
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins whose web pages may call the server (CORS), as in https://chat.example; * allows all. Repeat the flag "
        "for several.",
        group=SECURITY,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host names under which clients may call a server that has no key. Addresses, localhost, --host and the "
        "machine's own name are always allowed; * allows any. Repeat the flag for several.",
        group=SECURITY,
    )
    max_connections: int = setting(
        0,
        "Most connections at once. Then a new one takes the place of one that waits for its client, or is refused "
        "(/health and /ready have a few of their own). 0 means 4,096, or what the limit of open files leaves.",
        group=LIMITS,
        ge=0,
    )
    h11_max_incomplete_event_size: int = setting(
        64 << 10,
        "Largest size of a request's first line and headers together, as in 64KiB.",
        group=LIMITS,
        kind="size",
        ge=1024,
    )
    h11_max_header_count: int = setting(256, "Most headers of a request.", group=LIMITS, ge=1)
    timeout_read: float = setting(
        15.0,
        "Seconds that a client may take to send a request's headers, or to go on with its body.",
        group=LIMITS,
        gt=0,
        lt=inf,
    )
    timeout_write: float = setting(
        60.0, "Seconds that an answer waits for a client that does not read it.", group=LIMITS, gt=0, lt=inf
    )
    timeout_keep_alive: float = setting(
        5.0, "Seconds that a connection stays open between requests.", group=LIMITS, gt=0, lt=inf
    )
    max_num_queued_reqs: int = setting(
        2048,
        "Most requests that may wait; further ones get 503 with Retry-After. One with many prompts is handed over "
        "little by little, and counts as twice --max-num-seqs at most. 0 means no limit.",
        group=LIMITS,
        ge=0,
    )
    max_num_queued_tokens: int = setting(
        0,
        "Most prompt tokens of requests that have no output yet; further requests get 503 with Retry-After. "
        "0 means no limit.",
        group=LIMITS,
        ge=0,
    )
    request_timeout: float = setting(
        0.0, "Seconds after which a request ends with an error (504). 0 means never.", group=LIMITS, ge=0, lt=inf
    )
    ssl_keyfile: str | None = setting(None, "Private key of the certificate (PEM).", group=SECURITY)
    ssl_keyfile_password: str | None = setting(None, "Password of the private key.", group=SECURITY, secret=True)
    ssl_certfile: str | None = setting(None, "Certificate (PEM) to serve TLS with.", group=SECURITY)
    ssl_ca_certs: str | None = setting(
        None, "Certificate authorities (PEM). Clients must show a certificate from one of them.", group=SECURITY
    )
    max_body_size: int = setting(16 << 20, "Largest request body, as in 16MiB.", group=LIMITS, kind="size", ge=1)
    shutdown_timeout: float = setting(
        30.0, "Seconds that running requests get to finish after SIGTERM or SIGINT.", group=SERVER, ge=0, lt=inf
    )
    lora_dir: str | None = setting(
        None,
        "Folder whose adapters clients may load and unload while the server runs (/v1/load_lora_adapter), with "
        "--enable-lora. Default: they may not.",
        group=LORA,
    )
    strict_params: bool = setting(
        False, "Refuse requests with unknown parameters instead of ignoring those parameters.", group=ANSWERS
    )
    log_level: str = setting(
        "info", "Least severe messages to log: debug, info, warning or error.", group=LOGGING, choices=LOG_LEVELS
    )
    enable_auto_tool_choice: bool = setting(
        True, "Let the model decide by itself whether to call a tool (tool_choice auto).", group=ANSWERS
    )
    tool_call_parser: str = setting(
        "auto",
        "Format in which the model writes tool calls: auto (what its tokenizer says), none, or a name.",
        group=ANSWERS,
        choices=TOOL_PARSER_CHOICES,
    )
    reasoning_parser: str = setting(
        "auto",
        "Format in which the model writes its reasoning: auto (what its tokenizer says), none, or a name.",
        group=ANSWERS,
        choices=REASONING_PARSER_CHOICES,
    )
    sse_keep_alive: float = setting(
        15.0,
        "Seconds of silence after which a stream gets a comment, so that nobody cuts it. 0 means never.",
        group=ANSWERS,
        ge=0,
        lt=inf,
    )
    max_stored_responses: int = setting(
        1000,
        "Most responses of /v1/responses kept in memory for previous_response_id. 0 keeps none.",
        group=ANSWERS,
        ge=0,
    )
    log_format: str = setting(
        "text", "Form of log lines: text, or json (one object a line).", group=LOGGING, choices=LOG_FORMATS
    )
    log_stats_interval: float = setting(
        10.0,
        "Seconds between log lines about throughput, requests and KV cache. 0 writes none.",
        group=LOGGING,
        ge=0,
        lt=inf,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile", "and --ssl-keyfile need each other")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_keyfile_password) is not None:
            raise ConfigError("--ssl-ca-certs", "and --ssl-keyfile-password need --ssl-certfile")
        if isinstance(self.api_key, str):
            object.__setattr__(self, "api_key", (self.api_key,))
        if not all(key.strip() and key.isascii() for key in self.api_key):
            raise ConfigError("--api-key", "must be ASCII and not empty")
        if not all(name.strip() for name in self.allowed_hosts):
            raise ConfigError("--allowed-hosts", "must not be empty")
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name", "must not be empty")
        for name in self.served_model_name:
            check_name("--served-model-name", name)

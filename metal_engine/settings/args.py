"""What the user asked for, in the command, the environment or a file: one field a setting.

None stands for "auto"; :mod:`metal_engine.settings.resolve` settles what that comes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import Settings, setting
from metal_engine.settings.format_names import REASONING_PARSER_CHOICES, TOOL_PARSER_CHOICES

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION_BACKENDS = ("auto", "metal", "mlx")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

# The runner keeps an entry for each sequence; this is far beyond what a device computes at once.
MAX_NUM_SEQS = 65_536

GIB = 1 << 30

# Among the names that a model is served by: every other name.
ANY_NAME = "*"


@dataclass(frozen=True, kw_only=True)
class EngineArgs(Settings):
    """Settings as the user gave them; ``None`` means "auto".

    Field names are the command-line flags with underscores, and mean what they mean in vLLM.
    """

    model: str
    tokenizer: str | None = setting(None, "Tokenizer, if not the model's own.")
    revision: str | None = setting(None, "Branch, tag or commit of the repository.")
    download_dir: str | None = setting(None, "Where repositories are kept. Default: the hub's cache.")
    trust_remote_code: bool = setting(False, "Run code that the model's repository brings.")
    generation_config: str = setting(
        "auto", "Sampling defaults: auto (the model's own), vllm (none of them), or a folder with such a file."
    )
    chat_template: str | None = setting(
        None, "Chat template instead of the model's own: a file, or the Jinja text itself."
    )
    allow_special_tokens_in_content: bool = setting(
        False, "Read the spelling of a control token in a conversation's texts as that token, instead of as text."
    )
    dtype: str = setting("auto", "auto (as stored; float32 on a CPU), float32, float16 or bfloat16.", choices=DTYPES)
    seed: int = setting(0, "Seed for requests that bring none of their own.", ge=0, lt=2**64)
    max_model_len: int | None = setting(
        None,
        "Longest request, prompt and output, in tokens. Default: what the model was trained for, "
        "or what the KV cache holds if that is less.",
        kind="count",
        ge=1,
    )
    max_num_seqs: int | None = setting(
        None,
        "Requests running at once. Default: 256 on Metal, 64 on a CPU; never more than tokens per step.",
        ge=1,
        le=MAX_NUM_SEQS,
    )
    max_num_batched_tokens: int | None = setting(
        None, "Tokens per step. Default: 2,048 on Metal, about a second's work on a CPU.", kind="count", ge=1
    )
    block_size: int = setting(16, "Tokens per KV cache block.", ge=1)
    num_gpu_blocks_override: int | None = setting(None, "KV cache size in blocks, instead of in bytes.", ge=1)
    kv_cache_memory_bytes: int | None = setting(
        None,
        "KV cache size, as in 2GiB. Default: what --gpu-memory-utilization leaves on Metal; on a CPU 2 GiB, "
        "at most a quarter of the free memory.",
        kind="size",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of the device's memory for weights, KV cache and activations (Metal).", gt=0, le=1
    )
    attention_backend: str = setting(
        "auto", "auto (the fastest that runs here), metal or mlx.", choices=ATTENTION_BACKENDS
    )
    enable_prefix_caching: bool = setting(True, "Compute prefixes that requests share once.")
    kv_cache_dir: str | None = setting(
        None, "Directory that keeps KV beyond a restart, so that prompts seen before need not be computed."
    )
    kv_cache_dir_size: int = setting(
        20 * GIB, "Largest size of that directory; what was used longest ago goes first.", kind="size", ge=1
    )
    kv_transfer_config: str | None = setting(
        None,
        "JSON: where KV comes from and goes to (kv_connector, kv_role, kv_connector_extra_config, "
        "kv_load_failure_policy; see docs/kv-transfer.md).",
    )
    max_num_partial_prefills: int = setting(4, "Prompts that may be in progress at once.", ge=1)
    max_long_partial_prefills: int = setting(1, "Long prompts that may be in progress at once.", ge=1)
    long_prefill_token_threshold: int = setting(
        0, "A prompt with more tokens than this left to compute is long. 0: the tokens of a step.", ge=0
    )
    page_aligned_scheduling: bool = setting(False, "End chunks of prompts on block boundaries.")
    scheduling_policy: str = setting(
        "fcfs", "fcfs, or priority (of the request, lower first).", choices=SCHEDULING_POLICIES
    )
    max_attention_work: int | None = setting(
        None, "Pairs of a query row and a visible key in a step. Default: about a second's attention.", ge=1
    )
    async_scheduling: bool = setting(False, "Plan and build a step while the one before it runs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                "--max-long-partial-prefills",
                f"{self.max_long_partial_prefills} exceeds --max-num-partial-prefills {self.max_num_partial_prefills}",
            )


@dataclass(frozen=True, kw_only=True)
class ServerArgs(Settings):
    """Settings of ``metal-engine serve`` beside the engine's."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8000, "Port to listen on; 0 for any free one.", ge=0, le=65535)
    uds: str | None = setting(None, "Unix domain socket to listen on, instead of --host and --port.")
    served_model_name: tuple[str, ...] = setting(
        (),
        "Name of the model in the API, instead of MODEL; * for any name, as tools need that ask for a model of their "
        "own. Several may be given by repeating the flag; answers carry the first.",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Clients must send this as `Authorization: Bearer KEY`, or as `x-api-key`; /health and /ready stay open. "
        "Several may be given by repeating the flag. Better given in the environment than on a command line that "
        "others can read.",
        secret=True,
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins whose web pages may call the server (CORS), as in https://chat.example; * for all. Several may be "
        "given by repeating the flag.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names under which clients may call a server without a key, beside addresses, localhost, --host and the "
        "machine's own name; * for any. Several may be given by repeating the flag.",
    )
    max_connections: int = setting(
        0,
        "Connections at once. Beyond them one that waits for its client is closed, or the new one is refused "
        "(/health and /ready have a few of their own). 0: 4,096, or what the limit of open files leaves.",
        ge=0,
    )
    h11_max_incomplete_event_size: int = setting(
        64 << 10, "Largest request line and headers, together, as in 64KiB.", kind="size", ge=1024
    )
    h11_max_header_count: int = setting(256, "Headers of a request at most.", ge=1)
    timeout_read: float = setting(
        15.0, "Seconds that a client may take for the headers of a request, or pause within its body.", gt=0, lt=inf
    )
    timeout_write: float = setting(
        60.0, "Seconds for which an answer may wait for a client that does not read it.", gt=0, lt=inf
    )
    timeout_keep_alive: float = setting(
        5.0, "Seconds for which a connection stays open between requests.", gt=0, lt=inf
    )
    max_num_queued_reqs: int = setting(
        2048, "Requests that may wait; further ones are answered 503 with Retry-After. 0: no limit.", ge=0
    )
    max_num_queued_tokens: int = setting(
        0, "Prompt tokens of requests without any output yet; beyond it, 503 with Retry-After. 0: no limit.", ge=0
    )
    request_timeout: float = setting(
        0.0, "Seconds after which a request is ended with an error (504); 0: never.", ge=0, lt=inf
    )
    ssl_keyfile: str | None = setting(None, "Private key of the certificate (PEM).")
    ssl_keyfile_password: str | None = setting(None, "Password of the private key.", secret=True)
    ssl_certfile: str | None = setting(None, "Certificate (PEM): serve over TLS.")
    ssl_ca_certs: str | None = setting(
        None, "Certificate authorities (PEM): clients must show a certificate of one of them."
    )
    max_body_size: int = setting(16 << 20, "Largest request body, as in 16MiB.", kind="size", ge=1)
    shutdown_timeout: float = setting(
        30.0, "Seconds that running requests may take to finish after SIGTERM or SIGINT.", ge=0, lt=inf
    )
    strict_params: bool = setting(False, "Refuse request parameters that are unknown, instead of ignoring them.")
    log_level: str = setting("info", "Least severe messages to log: debug, info, warning or error.", choices=LOG_LEVELS)
    enable_auto_tool_choice: bool = setting(
        True, "Whether a request with tools may leave it to the model to call them."
    )
    tool_call_parser: str = setting(
        "auto",
        "Format of the model's tool calls: auto (what its tokenizer says), none, or a name.",
        choices=TOOL_PARSER_CHOICES,
    )
    reasoning_parser: str = setting(
        "auto",
        "Format of the model's reasoning: auto (what its tokenizer says), none, or a name.",
        choices=REASONING_PARSER_CHOICES,
    )
    sse_keep_alive: float = setting(
        15.0,
        "Seconds without an event after which a stream is sent a comment, so that it is not cut; 0: never.",
        ge=0,
        lt=inf,
    )
    max_stored_responses: int = setting(
        1000, "Responses of /v1/responses kept in memory for previous_response_id; 0: none.", ge=0
    )
    log_format: str = setting("text", "text, or json (one object a line).", choices=LOG_FORMATS)
    log_stats_interval: float = setting(
        10.0, "Seconds between log lines about throughput, running, waiting and KV cache; 0: none.", ge=0, lt=inf
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


@dataclass(frozen=True, kw_only=True)
class ChatArgs(Settings):
    """Settings of ``metal-engine chat`` beside the engine's."""

    system: str | None = setting(None, "System prompt.")
    temperature: float = setting(0.7, "0 is greedy.")
    top_p: float = setting(0.95, "Nucleus sampling.")
    max_tokens: int | None = setting(None, "Longest answer, in tokens.")
    log_level: str = setting(
        "warning", "Least severe messages to log: debug, info, warning or error.", choices=LOG_LEVELS
    )

"""Settings of a server in addition to the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import FILE, HELP_ALL, SettingsBase, setting
from metal_engine.settings.format_names import REASONING_PARSER_CHOICES, TOOL_PARSER_CHOICES
from metal_engine.settings.lora_args import LORA
from metal_engine.settings.served_names import check_name

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
TOOL_GRAMMARS = ("auto", "required", "never")

# Value of --served-model-name that accepts requests for any other name.
ANY_NAME = "*"
# Headings of groups of settings in `--help` and in docs/cli.md.
SERVER, SECURITY, LIMITS, ANSWERS, LOGGING = "Server", "Security", "Limits", "Answers", "Logging"


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
        if not all(key and key == key.strip() and key.isascii() and key.isprintable() for key in self.api_key):
            raise ConfigError("--api-key", "must be printable ASCII, not empty, and without spaces around it")
        if not all(name.strip() for name in self.allowed_hosts):
            raise ConfigError("--allowed-hosts", "must not be empty")
        # Browsers send origins without a slash at the end. Their address bars show one.
        object.__setattr__(self, "allowed_origins", tuple(one.rstrip("/") for one in self.allowed_origins))
        for name in self.served_model_name:
            check_name("--served-model-name", name)

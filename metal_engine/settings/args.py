"""Settings of the engine from the command line, the environment or a file, with one field for each setting.

:mod:`metal_engine.settings.resolve` replaces the value "auto", and None if it means "auto", by the value to use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from metal_engine.errors import ConfigError
from metal_engine.settings import rank_args
from metal_engine.settings.fields import FILE, HELP_ALL, setting
from metal_engine.settings.lora_args import ENABLE_LORA, LORA_MODULES, MAX_LORA_RANK, MAX_LORAS, LoRAArgs

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "int8", "int4")
SCHEDULING_POLICIES = ("fcfs", "priority")

# Maximum of --max-num-seqs. The runner keeps an entry for each sequence. Devices compute far fewer at once.
MAX_NUM_SEQS = 65_536

GIB = 1 << 30

# Headings of groups of settings in `--help` and in docs/cli.md.
MODEL, MEMORY, SCHEDULING, KV_TRANSFER = "Model", "Memory", "Scheduling", "KV transfer"


@dataclass(frozen=True, kw_only=True)
class EngineArgs(LoRAArgs, rank_args.RankArgs):
    """Settings of the engine as the user gave them. A field's help text explains ``None``.

    Field names are the command-line flags with underscores. A field that vLLM also has means the same as in vLLM.
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
    wire_memory: bool = setting(
        True,
        "Wire the memory of weights, KV cache and largest step (Metal), so that macOS cannot swap it out (see "
        "docs/mac.md for kernel panics).",
        group=MEMORY,
        listing=HELP_ALL,
    )
    attention_backend: str = setting(
        "auto",
        "Attention backend: metal (our kernel, or an error), mlx (MLX's operations), or auto (our kernel where it "
        "supports the layer).",
        group=MODEL,
        listing=HELP_ALL,
        choices=("auto", "metal", "mlx"),
    )
    attention_tuning: str = setting(
        "auto",
        "Tuning of the attention kernel at the first start on a GPU: auto (at most 10 s) or never.",
        group=MODEL,
        listing=HELP_ALL,
        choices=("auto", "never"),
    )
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
    max_num_encoder_tokens: int | None = setting(
        None,
        "Maximum image tokens that a step encodes, and maximum tokens of an image. Default: the tokens of a step, at "
        "least 2,048. Memory is reserved for the features of four times this number.",
        group=SCHEDULING,
        listing=HELP_ALL,
        kind="count",
        ge=1,
    )
    mm_processor_kwargs: str | None = setting(
        None,
        'Settings of the image processor, as JSON: {"max_pixels": 4000000}. Default: those of the checkpoint, with at '
        "most 1,280 tokens for an image.",
        group=MODEL,
        listing=HELP_ALL,
        kind="json",
    )
    async_scheduling: bool | None = setting(
        None,
        "Plan the next step while the device computes. Default: on with Metal on one machine without a draft model.",
        group=SCHEDULING,
        listing=HELP_ALL,
    )
    replay_decodes: str = setting(
        "auto",
        "Replay traced graphs in decode steps, which saves CPU time: always, never, or auto (on Metal).",
        group=SCHEDULING,
        listing=FILE,
        choices=("auto", "always", "never"),
    )
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

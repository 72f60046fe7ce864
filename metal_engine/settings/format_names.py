"""Names of formats for ``--tool-call-parser`` and ``--reasoning-parser``."""

from __future__ import annotations

# mlx-lm's names for formats of tool calls, and vLLM's names for those that mlx-lm lacks.
TOOL_PARSERS = (
    "auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "function_gemma", "gemma4", "glm47",
    "json_tools", "kimi_k2", "kimi_k3", "laguna", "llama3_json", "llama4_pythonic", "longcat", "minicpm5", "minimax_m2",
    "mistral", "muse_spark", "olmo3", "pythonic", "qwen3_coder",
)  # fmt: skip
# vLLM's names for formats that have another name in mlx-lm.
TOOL_PARSER_ALIASES = {"hermes": "json_tools", "qwen3_xml": "qwen3_coder", "glm45": "glm47", "lfm2": "pythonic"}
# Maps a format's name to the marks at the beginning and end of reasoning.
REASONING_MARKS = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "think_tokens": ("<|think:start|>", "<|think:end|>"),
}
# vLLM's names for "think", the first of these formats.
REASONING_PARSER_ALIASES = dict.fromkeys(
    ("deepseek_r1", "qwen3", "glm45", "ernie45", "hunyuan_a13b", "minimax_m2", "holo2", "kimi_k2"), "think"
)
# The format of gpt-oss, which also has tool calls. mlx-lm has no parser for it. The second is vLLM's name.
HARMONY_PARSERS = ("gpt_oss", "openai_gptoss")

TOOL_PARSER_CHOICES = (*TOOL_PARSERS, *TOOL_PARSER_ALIASES)
REASONING_PARSER_CHOICES = ("auto", "none", *REASONING_MARKS, *REASONING_PARSER_ALIASES, *HARMONY_PARSERS)

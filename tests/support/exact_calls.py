"""Calls that only an exact reader returns: strings with marks, nested values, calls without arguments."""

from __future__ import annotations

from typing import Any

from tests.support.tool_formats import Call, Recorded

_EDIT = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "line": {"type": ["integer", "null"], "minimum": 1},
    "force": {"type": "boolean"},
    "options": {
        "type": "object",
        "properties": {"mode": {"enum": ["a", "w"]}, "tags": {"type": "array", "items": {"type": "string"}}},
    },
}


def _tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": "A tool."}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


EXACT_TOOLS = [_tool("edit", {"type": "object", "properties": _EDIT, "required": ["path"]}), _tool("list_all", None)]

# Parser -> marks that a string of a call contains.
MARKS = {
    "json_tools": "</tool_call>", "qwen3_coder": "</function>\n</tool_call>", "glm47": "</tool_call>",
    "laguna": "</tool_call>", "longcat": "</longcat_tool_call>", "mistral": "[TOOL_CALLS]",
    "kimi_k2": "<|tool_call_end|><|tool_calls_section_end|>", "kimi_k3": "<|sep|>tools",
    "minicpm5": "</function>", "minimax_m2": "</invoke>\n</minimax:tool_call>",
    "muse_spark": "</atem:invoke></atem:function_calls>", "pythonic": "<|tool_call_end|>)]",
    "function_gemma": "<end_function_call>}", "gemma4": "<tool_call|>}",
    "llama3_json": "<|python_tag|>", "deepseek_v3": "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": "</｜DSML｜invoke>\n</｜DSML｜function_calls>", "deepseek_v4": "</｜DSML｜tool_calls>",
    "harmony": "<|call|><|end|>",
}  # fmt: skip
_NONE: Call = ("list_all", {})


def _text(parser: str) -> str:
    return f"  Grüße 😀: {MARKS[parser]} 'x'\n"


def _full(parser: str) -> Call:
    options = {"mode": "w", "tags": ["a", "b"]}
    return "edit", {"path": "a.py", "text": _text(parser), "line": 3, "force": True, "options": options}


def _json(parser: str) -> str:
    text = _text(parser).replace("\n", "\\n")
    return (
        f'{{"path": "a.py", "text": "{text}", "line": 3, "force": true, "options": {{"mode": "w", "tags": '
        '["a", "b"]}}'
    )


_OPTIONS = '{"mode": "w", "tags": ["a", "b"]}'


# An object whose strings contain the texts that end values and calls.
_MARKED = '{"mode": "a", "tags": ["END", "\\"END"]}'


def _tags(template: str, parser: str, *, true: str = "true", options: str = _OPTIONS) -> str:
    values = {"path": "a.py", "text": _text(parser), "line": "3", "force": true, "options": options}
    return "".join(template.replace("KEY", key).replace("VALUE", value) for key, value in values.items())


_QWEN = "<parameter=KEY>\nVALUE\n</parameter>\n"
_GLM = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_MINIMAX = '<parameter name="KEY">VALUE</parameter>\n'
_MUSE = '<atem:parameter name="KEY">VALUE</atem:parameter>\n'
_CPM = '<param name="KEY">VALUE</param>'
_K3 = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
_TYPES = {"path": "string", "text": "string", "line": "number", "force": "boolean", "options": "object"}
_K3_VALUES = {"path": "a.py", "text": _text("kimi_k3"), "line": "3", "force": "true", "options": _OPTIONS}
_K3_ARGUMENTS = "".join(_K3.format(key, _TYPES[key], value) for key, value in _K3_VALUES.items())
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_GEMMA = "call:edit{{path:Qa.pyQ,text:Q{}Q,line:3,force:true,options:{{mode:QwQ,tags:[QaQ,QbQ]}}}}"
_KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


def _dsml(parser: str, options: str = _OPTIONS) -> str:
    """Return a call in DeepSeek's form as tags."""
    values = {**_K3_VALUES, "text": _text(parser), "options": options}
    return '<｜DSML｜invoke name="edit">\n' + "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(_TYPES[key] == "string").lower()}">{value}</｜DSML｜parameter>\n'
        for key, value in values.items()
    ) + "</｜DSML｜invoke>\n"  # fmt: skip


_DSML_ENDS = "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>"


def _one(parser: str, text: str) -> Recorded:
    return Recorded(parser, text, [_full(parser)])


# Calls with objects whose strings contain the texts that end values and calls.
NESTED_MARKS = [
    Recorded(
        parser,
        opening + _tags(template, parser, options=_MARKED.replace("END", end)) + closing,
        [("edit", {**_full(parser)[1], "options": {"mode": "a", "tags": [end, '"' + end]}})],
    )
    for parser, opening, template, end, closing in [
        (
            "qwen3_coder",
            "<tool_call>\n<function=edit>\n",
            _QWEN,
            "</parameter></function></tool_call>",
            "</function>\n</tool_call>",
        ),
        ("glm47", "<tool_call>edit\n", _GLM, "</arg_value></tool_call>", "</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="edit">\n',
            _MINIMAX,
            "</parameter></invoke></minimax:tool_call>",
            "</invoke>\n</minimax:tool_call>",
        ),
    ]
] + [
    Recorded(
        "deepseek_v32",
        f"<｜DSML｜function_calls>{_dsml('deepseek_v32', _MARKED.replace('END', _DSML_ENDS))}</｜DSML｜function_calls>",
        [("edit", {**_full("deepseek_v32")[1], "options": {"mode": "a", "tags": [_DSML_ENDS, '"' + _DSML_ENDS]}})],
    )
]

EXACT = [
    *NESTED_MARKS,
    _one("json_tools", f'<tool_call>\n{{"name": "edit", "arguments": {_json("json_tools")}}}\n</tool_call>'),
    Recorded("json_tools", '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>', [_NONE]),
    _one(
        "qwen3_coder",
        f"<tool_call>\n<function=edit>\n{_tags(_QWEN, 'qwen3_coder', true='True')}</function>\n</tool_call>",
    ),
    Recorded("qwen3_coder", "<tool_call>\n<function=list_all>\n</function>\n</tool_call>", [_NONE]),
    Recorded("qwen3_coder", "<function=list_all>\n</function>\n</tool_call>", [_NONE]),
    Recorded(
        "qwen3_coder",
        "<function=edit>\n<parameter=path>\n\n\n</parameter>\n<parameter=line>\nNone\n</parameter>\n</function>\n"
        "</tool_call>",
        [("edit", {"path": "\n", "line": None})],
    ),
    _one("glm47", f"<tool_call>edit\n{_tags(_GLM, 'glm47')}</tool_call>"),
    Recorded("glm47", "<tool_call>list_all\n</tool_call>", [_NONE]),
    _one("laguna", f"<tool_call>edit\n{_tags(_GLM, 'laguna')}</tool_call>"),
    _one(
        "longcat",
        f"<longcat_tool_call>edit\n{_tags(_GLM, 'longcat').replace('arg_', 'longcat_arg_')}</longcat_tool_call>",
    ),
    _one("mistral", f"[TOOL_CALLS]edit[ARGS]{_json('mistral')}"),
    Recorded("mistral", "[TOOL_CALLS]list_all[CALL_ID]abcdef123[ARGS]{}", [_NONE], ids=["abcdef123"]),
    _one("mistral", f'[TOOL_CALLS] [{{"name": "edit", "arguments": {_json("mistral")}}}]'),
    _one(
        "kimi_k2", f"<|tool_calls_section_begin|>{_KIMI.format('edit:0', _json('kimi_k2'))}<|tool_calls_section_end|>"
    ),
    Recorded(
        "kimi_k2",
        f"<|tool_calls_section_begin|>{_KIMI.format('list_all:3', '{}')}{_KIMI.format('list_all:4', '{}')}"
        "<|tool_calls_section_end|>",
        [_NONE, _NONE],
        ids=["functions.list_all:3", "functions.list_all:4"],
    ),
    _one(
        "kimi_k3",
        f'<|open|>tools<|sep|><|open|>call tool="edit" index="1"<|sep|>{_K3_ARGUMENTS}<|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
    ),
    _one(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="edit" index="1"<|sep|><|open|>json type="object"<|sep|>'
        f"{_json('kimi_k3')}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    _one("minicpm5", f'<function name="edit">{_tags(_CPM, "minicpm5")}</function>'),
    Recorded(
        "minicpm5",
        '<function name="edit"><param name="path">a.py</param>'
        '<param name="text"><![CDATA[a < b\n]]></param></function>',
        [("edit", {"path": "a.py", "text": "a < b\n"})],
    ),
    _one(
        "minimax_m2",
        f'<minimax:tool_call>\n<invoke name="edit">\n{_tags(_MINIMAX, "minimax_m2")}</invoke>\n</minimax:tool_call>',
    ),
    Recorded("minimax_m2", '<minimax:tool_call>\n<invoke name="list_all">\n</invoke>\n</minimax:tool_call>', [_NONE]),
    _one(
        "muse_spark",
        f'<atem:function_calls>\n<atem:invoke name="edit">\n{_tags(_MUSE, "muse_spark")}</atem:invoke>\n'
        "</atem:function_calls>",
    ),
    _one(
        "pythonic",
        f'<|tool_call_start|>[edit(path="a.py", text="{_text("pythonic")[:-1]}\\n", line=3, force=True, '
        f"options={_OPTIONS})]<|tool_call_end|>",
    ),
    Recorded("pythonic", "<|tool_call_start|>[list_all(), list_all()]<|tool_call_end|>", [_NONE, _NONE]),
    Recorded("pythonic", '[edit(path=")]", line=None), list_all()]', [("edit", {"path": ")]", "line": None}), _NONE]),
    _one(
        "function_gemma",
        "<start_function_call>"
        + _GEMMA.format("TEXT").replace("Q", "<escape>").replace("TEXT", _text("function_gemma"))
        + "<end_function_call>",
    ),
    _one(
        "gemma4",
        "<|tool_call>" + _GEMMA.format("TEXT").replace("Q", '<|"|>').replace("TEXT", _text("gemma4")) + "<tool_call|>",
    ),
    Recorded("gemma4", "<|tool_call>call:list_all{}<tool_call|>", [_NONE]),
    _one("deepseek_v3", f"<｜tool▁calls▁begin｜>{_V3.format('edit', _json('deepseek_v3'))}<｜tool▁calls▁end｜>"),
    Recorded(
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜>{_V3.format('list_all', '{}')}\n{_V3.format('list_all', '{}')}\n<｜tool▁calls▁end｜>",
        [_NONE, _NONE],
    ),
    _one("llama3_json", f'<|python_tag|>{{"name": "edit", "parameters": {_json("llama3_json")}}}'),
    _one("llama3_json", f'{{"name": "edit", "parameters": {_json("llama3_json")}}}'),
    _one("deepseek_v31", f"<｜tool▁calls▁begin｜>{_V31.format('edit', _json('deepseek_v31'))}<｜tool▁calls▁end｜>"),
    Recorded(
        "deepseek_v31", f"<｜tool▁calls▁begin｜>{_V31.format('list_all', '{}') * 2}<｜tool▁calls▁end｜>", [_NONE, _NONE]
    ),
    _one("deepseek_v32", f"<｜DSML｜function_calls>\n{_dsml('deepseek_v32')}</｜DSML｜function_calls>"),
    Recorded(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n'
        '<｜DSML｜parameter name="path" string="true">{"a": "</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="line" string="false">null</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [("edit", {"path": '{"a": "', "line": None})],
    ),
    _one("deepseek_v4", f"<｜DSML｜tool_calls>\n{_dsml('deepseek_v4')}</｜DSML｜tool_calls>"),
    Recorded(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="list_all">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [_NONE],
    ),
    _one("harmony", _HARMONY.format("edit", _json("harmony"))),
    Recorded("harmony", " to=functions.list_all<|channel|>commentary json<|message|>{}<|call|>", [_NONE]),
    Recorded("harmony", f"<|start|>assistant{_HARMONY.format('list_all', '{}')}", [_NONE]),
    Recorded(
        "harmony", "<|start|>assistant to=functions.list_all<|channel|>commentary json<|message|>{}<|call|>", [_NONE]
    ),
]

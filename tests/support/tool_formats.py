"""Model outputs in each tool call format, with the calls that they contain: a line of prose, then calls.

Written after each model's published chat template. The tools are in OpenAI's form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "exact": {"type": "boolean"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("get_weather", "find_trains")
]

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """Output in one format, with its parsed content and calls."""

    parser: str
    text: str
    calls: list[Call]
    content: str = ""
    ids: list[str] = field(default_factory=list)


WEATHER: Call = ("get_weather", {"city": "Zürich 😀", "days": 3})
TRAINS: Call = ("find_trains", {"city": "Rome"})
PROSE = "Let me look: 1 < 2.\n\n"
SAID = PROSE.strip()

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_DSML = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Zürich 😀</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="find_trains">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)

RECORDED = [
    Recorded(
        "json_tools",
        PROSE + '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n</tool_call>'
        '\n<tool_call>\n{"name": "find_trains", "arguments": {"city": "Rome"}}\n</tool_call>',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "qwen3_coder",
        PROSE + "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 😀\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=find_trains>\n<parameter=city>\nRome\n"
        "</parameter>\n</function>\n</tool_call>",
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "glm47",
        PROSE + "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 😀</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>find_trains\n"
        "<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "laguna",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich 😀</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        [WEATHER],
    ),
    Recorded(
        "longcat",
        PROSE + "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Zürich 😀</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        [WEATHER],
        SAID,
    ),
    Recorded(
        "mistral",
        PROSE + '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich 😀", "days": 3}'
        '[TOOL_CALLS]find_trains[ARGS]{"city": "Rome"}',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 3}, "id": "abc123def"}, '
        '{"name": "find_trains", "arguments": {"city": "Rome"}, "id": "abc123deg"}]',
        [WEATHER, TRAINS],
        ids=["abc123def", "abc123deg"],
    ),
    Recorded(
        "kimi_k2",
        PROSE + "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Zürich 😀", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.find_trains:1'
        '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        [WEATHER, TRAINS],
        SAID,
        ["functions.get_weather:0", "functions.find_trains:1"],
    ),
    Recorded(
        "kimi_k3",
        PROSE + '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich 😀<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="find_trains" index="2"<|sep|><|open|>json type="object"<|sep|>{"city": "Rome"}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "minimax_m2",
        PROSE + '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich 😀</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="find_trains">\n'
        '<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "minicpm5",
        PROSE + '<function name="get_weather"><param name="city">Zürich 😀</param><param name="days">3</param>'
        '</function>\n<function name="find_trains"><param name="city"><![CDATA[Rome]]></param></function>',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "muse_spark",
        PROSE + '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Zürich 😀'
        '</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        [WEATHER],
        SAID,
    ),
    Recorded(
        "pythonic",
        PROSE + '<|tool_call_start|>[get_weather(city="Zürich 😀", days=3), find_trains(city="Rome")]<|tool_call_end|>',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "llama4_pythonic",
        PROSE + '<|python_start|>[get_weather(city="Zürich 😀", days=3), find_trains(city="Rome")]<|python_end|>',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "olmo3",
        PROSE + '<function_calls>\nget_weather(city="Zürich 😀", days=3)\nfind_trains(city="Rome")\n</function_calls>',
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "llama3_json",
        PROSE + '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich 😀", "days": 3}}',
        [WEATHER],
        SAID,
    ),
    Recorded(
        "deepseek_v3",
        PROSE
        + "<｜tool▁calls▁begin｜>"
        + _V3.format("get_weather", '{"city": "Zürich 😀", "days": 3}')
        + "\n"
        + _V3.format("find_trains", '{"city": "Rome"}')
        + "<｜tool▁calls▁end｜>",
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "deepseek_v31",
        PROSE + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich 😀", "days": 3}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>find_trains<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [WEATHER, TRAINS],
        SAID,
    ),
    Recorded(
        "deepseek_v32", f"{PROSE}<｜DSML｜function_calls>\n{_DSML}</｜DSML｜function_calls>", [WEATHER, TRAINS], SAID
    ),
    Recorded("deepseek_v4", f"{PROSE}<｜DSML｜tool_calls>\n{_DSML}</｜DSML｜tool_calls>", [WEATHER, TRAINS], SAID),
    Recorded(
        "function_gemma",
        "<start_function_call>call:get_weather{city:<escape>Zürich 😀<escape>,days:3}<end_function_call>"
        "<start_function_call>call:find_trains{city:<escape>Rome<escape>}<end_function_call>",
        [WEATHER, TRAINS],
    ),
    Recorded(
        "gemma4",
        PROSE + '<|tool_call>call:get_weather{city:<|"|>Zürich 😀<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:find_trains{city:<|"|>Rome<|"|>}<tool_call|>',
        [WEATHER, TRAINS],
        SAID,
    ),
]

# Parser -> text that starts like a call of that format but is not a call.
MALFORMED = {
    "json_tools": "Hm. <tool_call>\n{'name': get_weather}\n</tool_call> So be it.",
    "qwen3_coder": "Hm. <tool_call>\n<function>get_weather\n</tool_call> So be it.",
    "glm47": "Hm. <tool_call>what is this?</tool_call> So be it.",
    "laguna": "Hm. <tool_call>nobody\n<arg_key>a</arg_key></tool_call> So be it.",
    "longcat": "Hm. <longcat_tool_call>nothing</longcat_tool_call> So be it.",
    "mistral": 'Hm. [TOOL_CALLS]get_weather[ARGS]{"city": So be it.',
    "kimi_k2": "Hm. <|tool_calls_section_begin|>none<|tool_calls_section_end|> So be it.",
    "kimi_k3": "Hm. <|open|>tools<|sep|>none<|close|>tools<|sep|> So be it.",
    "minimax_m2": 'Hm. <minimax:tool_call>\n<invoke name="other"></invoke></minimax:tool_call> So be it.',
    "minicpm5": 'Hm. <function name="other"></function> So be it.',
    "muse_spark": "Hm. <atem:function_calls>get_weather</atem:function_calls> So be it.",
    "pythonic": "Hm. <|tool_call_start|>get_weather<|tool_call_end|> So be it.",
    "llama4_pythonic": "Hm. <|python_start|>get_weather<|python_end|> So be it.",
    "olmo3": "Hm. <function_calls>x = get_weather()</function_calls> So be it.",
    "llama3_json": 'Hm. <|python_tag|>get_weather.call(city="Rome")',
    "deepseek_v3": "Hm. <｜tool▁calls▁begin｜>function<｜tool▁sep｜>get_weather<｜tool▁calls▁end｜> So be it.",
    "deepseek_v31": "Hm. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁calls▁end｜> So be it.",
    "deepseek_v32": "Hm. <｜DSML｜function_calls>get_weather</｜DSML｜function_calls> So be it.",
    "deepseek_v4": 'Hm. <｜DSML｜tool_calls><｜DSML｜invoke name="x"></｜DSML｜invoke></｜DSML｜tool_calls> So be it.',
    "function_gemma": "Hm. <start_function_call>get_weather<end_function_call> So be it.",
    "gemma4": "Hm. <|tool_call>call:get_weather{city<tool_call|> So be it.",
}

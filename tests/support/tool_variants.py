"""Model outputs that deviate from a call format. `VARIANTS` parse as calls. `UNREADABLE` must stay content."""

from __future__ import annotations

from metal_engine.answers.deltas import json_text
from tests.support.tool_formats import TRAINS, WEATHER, Recorded

_JSON = {name: json_text({"name": name, "arguments": arguments}) for name, arguments in (WEATHER, TRAINS)}
_WEATHER_TAGS = "<parameter=city>\nZürich 😀\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
_WEATHER_FUNCTION = f"<function=get_weather>\n{_WEATHER_TAGS}</function>"
_ONE_TAG_LESS = _WEATHER_FUNCTION.replace("</parameter>\n", "", 1)
_TRAINS_FUNCTION = "<function=find_trains>\n<parameter=city>\nRome\n</parameter>\n</function>"
_NESTED = "Write <parameter=x>1</parameter> and <function=f></function>, then go on."
_BOTH = '[get_weather(city="Zürich 😀", days=3), find_trains(city="Rome")]'

_DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>find_trains\n```json\n{"city": "Rome"}\n```'
_DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="find_trains">\n{}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
_DSML_CITY = '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'

# Name -> answer, calls and content.
VARIANTS: dict[str, Recorded] = {
    "hermes parameters": Recorded(
        "json_tools", '<tool_call>{"name": "find_trains", "parameters": {"city": "Rome"}}</tool_call>', [TRAINS]
    ),
    "hermes arguments as a string": Recorded(
        "json_tools",
        '<tool_call>{"name": "find_trains", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        [TRAINS],
    ),
    "hermes two objects": Recorded(
        "json_tools",
        f"Both.\n<tool_call>\n{_JSON['get_weather']}\n{_JSON['find_trains']}\n</tool_call>",
        [WEATHER, TRAINS],
        "Both.",
    ),
    "hermes a list": Recorded(
        "json_tools", f"<tool_call>[{_JSON['get_weather']}, {_JSON['find_trains']}]</tool_call>", [WEATHER, TRAINS]
    ),
    "hermes no arguments": Recorded(
        "json_tools", '<tool_call>{"name": "find_trains"}</tool_call>', [("find_trains", {})]
    ),
    "hermes closing braces too many": Recorded(
        "json_tools", f"<tool_call>\n{_JSON['get_weather']}}}\n }}\n</tool_call>", [WEATHER]
    ),
    "hermes a closing brace too many, without a closing mark": Recorded(
        "json_tools", f"<tool_call>{_JSON['get_weather']}\n{_JSON['find_trains']}}}", [WEATHER, TRAINS]
    ),
    "qwen3_coder two functions": Recorded(
        "qwen3_coder", f"<tool_call>\n{_WEATHER_FUNCTION}\n{_TRAINS_FUNCTION}\n</tool_call>", [WEATHER, TRAINS]
    ),
    "qwen3_coder no opening mark": Recorded(
        "qwen3_coder", f"Well.\n\n{_WEATHER_FUNCTION}\n</tool_call>", [WEATHER], "Well."
    ),
    "qwen3_coder no marks": Recorded(
        "qwen3_coder", f"Well.\n{_WEATHER_FUNCTION}\n{_TRAINS_FUNCTION}\n", [WEATHER, TRAINS], "Well."
    ),
    "qwen3_coder an opening mark for the second call only": Recorded(
        "qwen3_coder", f"{_WEATHER_FUNCTION}\n<tool_call>\n{_TRAINS_FUNCTION}\n</tool_call>", [WEATHER, TRAINS]
    ),
    "qwen3_coder a closing tag of a parameter is missing": Recorded(
        "qwen3_coder", f"<tool_call>\n{_ONE_TAG_LESS}\n</tool_call>", [WEATHER]
    ),
    "qwen3_coder the last closing tag of a parameter is missing": Recorded(
        "qwen3_coder", "<function=find_trains>\n<parameter=city>\nRome\n</function>\n</tool_call>", [TRAINS]
    ),
    "qwen3_coder the closing tag of a function is missing": Recorded(
        "qwen3_coder", f"<tool_call>\n{_WEATHER_FUNCTION.removesuffix('</function>')}</tool_call>", [WEATHER]
    ),
    "qwen3_coder the call ends within a parameter": Recorded(
        "qwen3_coder", "<tool_call>\n<function=find_trains>\n<parameter=city>\nRome\n</tool_call>", [TRAINS]
    ),
    "qwen3_coder the output ends within a parameter": Recorded(
        "qwen3_coder", "Well. <function=find_trains><parameter=city>Rome", [TRAINS], "Well."
    ),
    "qwen3_coder a closing tag is missing before another parameter": Recorded(
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>Rome\n<parameter=line>S 3\n<parameter=stop>a</parameter>"
        "</function></tool_call>",
        [("find_trains", {"city": "Rome", "line": "S 3", "stop": "a"})],
    ),
    "qwen3_coder no closing tag, other parameters": Recorded(
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>Rome<parameter=line>S 3<parameter=stop>a</tool_call>",
        [("find_trains", {"city": "Rome", "line": "S 3", "stop": "a"})],
    ),
    "qwen3_coder text after a function with a missing closing tag": Recorded(
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>Rome</function>\nDone.</tool_call>",
        [TRAINS],
        "Done.",
    ),
    "qwen3_coder a closing tag twice": Recorded(
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>Rome</parameter></parameter></function></tool_call>",
        [TRAINS],
    ),
    "qwen3_coder tags within a value": Recorded(
        "qwen3_coder",
        f"<tool_call>\n<function=find_trains>\n<parameter=city>\n{_NESTED}\n</parameter>\n</function>\n</tool_call>",
        [("find_trains", {"city": _NESTED})],
    ),
    "qwen3_coder text beside a function": Recorded(
        "qwen3_coder", f"<tool_call>\n{_TRAINS_FUNCTION}\nDone.\n</tool_call>", [TRAINS], "Done."
    ),
    "qwen3_coder text around a bare function": Recorded(
        "qwen3_coder", f"Text {_TRAINS_FUNCTION} after", [TRAINS], "Text after"
    ),
    "qwen3_coder text before and beside a function": Recorded(
        "qwen3_coder", f"Well.<tool_call>{_TRAINS_FUNCTION}\nDone. </tool_call>So.", [TRAINS], "Well.\nDone. So."
    ),
    "hermes text around two calls": Recorded(
        "json_tools",
        f"Both<tool_call>{_JSON['get_weather']}</tool_call> <tool_call>{_JSON['find_trains']}</tool_call>done ",
        [WEATHER, TRAINS],
        "Both done ",
    ),
    "hermes a call that cannot be read behind a call": Recorded(
        "json_tools",
        f"One <tool_call>{_JSON['find_trains']}</tool_call><tool_call>what</tool_call>",
        [TRAINS],
        "One <tool_call>what</tool_call>",
    ),
    "qwen3_coder other types": Recorded(
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>null</parameter><parameter=days>many</parameter>"
        '<parameter=tags>["a", 1]</parameter><parameter=exact>True</parameter></function></tool_call>',
        [("find_trains", {"city": "null", "days": "many", "tags": ["a", 1], "exact": True})],
    ),
    "pythonic bare": Recorded("pythonic", _BOTH, [WEATHER, TRAINS]),
    "pythonic bare with space": Recorded("pythonic", f"\n{_BOTH}\n", [WEATHER, TRAINS]),
    "pythonic literals": Recorded(
        "pythonic",
        "[find_trains(city='it\\'s', tags=['a', \"b\"], exact=true)]",
        [("find_trains", {"city": "it's", "tags": ["a", "b"], "exact": True})],
    ),
    "pythonic a line break": Recorded(
        "pythonic",
        '<|tool_call_start|>[find_trains(city="a\nb")]<|tool_call_end|>',
        [("find_trains", {"city": "a\nb"})],
    ),
    "mistral call id": Recorded(
        "mistral",
        'Well.[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Zürich 😀", "days": 3}'
        '[TOOL_CALLS]find_trains[CALL_ID]abc123deg[ARGS]{"city": "Rome"}',
        [WEATHER, TRAINS],
        "Well.",
        ["abc123def", "abc123deg"],
    ),
    "mistral arguments as a string": Recorded(
        "mistral", 'Well.[TOOL_CALLS]find_trains[ARGS] "{\\"city\\": \\"Rome\\"}"', [TRAINS], "Well."
    ),
    "mistral no mark of arguments": Recorded("mistral", '[TOOL_CALLS]find_trains{"city": "Rome"}', [TRAINS]),
    "mistral one object": Recorded("mistral", f"[TOOL_CALLS]{_JSON['find_trains']}", [TRAINS]),
    "mistral text behind": Recorded(
        "mistral", '[TOOL_CALLS]find_trains[ARGS]{"city": "Rome"}\nOne moment.', [TRAINS], "One moment."
    ),
    "mistral text behind a list": Recorded(
        "mistral", f"[TOOL_CALLS] [{_JSON['find_trains']}] One moment.", [TRAINS], "One moment."
    ),
    "glm47 json": Recorded("glm47", f"<tool_call>{_JSON['find_trains']}</tool_call>", [TRAINS]),
    "glm47 no arguments": Recorded("glm47", "<tool_call>find_trains\n</tool_call>", [("find_trains", {})]),
    "kimi_k2 arguments as a string": Recorded(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find_trains:0<|tool_call_argument_begin|>"
        '"{\\"city\\": \\"Rome\\"}"<|tool_call_end|><|tool_calls_section_end|>',
        [TRAINS],
    ),
    "llama3_json bare": Recorded("llama3_json", '\n{"name": "find_trains", "parameters": {"city": "Rome"}}', [TRAINS]),
    "llama3_json two objects": Recorded(
        "llama3_json", f"Both. <|python_tag|>{_JSON['get_weather']}; {_JSON['find_trains']}", [WEATHER, TRAINS], "Both."
    ),
    "llama3_json text behind": Recorded(
        "llama3_json", f"<|python_tag|>{_JSON['find_trains']} One moment.", [TRAINS], "One moment."
    ),
    "deepseek_v3 no code block": Recorded(
        "deepseek_v3",
        _DEEPSEEK.format('<｜tool▁call▁begin｜>function<｜tool▁sep｜>find_trains\n{"city": "Rome"}<｜tool▁call▁end｜>'),
        [TRAINS],
    ),
    "deepseek_v3 without the mark that ends the call": Recorded(
        "deepseek_v3", f"Well. <｜tool▁calls▁begin｜>{_V3}", [TRAINS], "Well."
    ),
    "deepseek_v31 in the form of V3": Recorded(
        "deepseek_v31", _DEEPSEEK.format(f"{_V3}\n<｜tool▁call▁end｜>\n"), [TRAINS]
    ),
    "deepseek_v31 arguments as a string": Recorded(
        "deepseek_v31",
        _DEEPSEEK.format('<｜tool▁call▁begin｜>find_trains<｜tool▁sep｜>"{\\"city\\": \\"Rome\\"}"<｜tool▁call▁end｜>'),
        [TRAINS],
    ),
    "deepseek_v31 json": Recorded("deepseek_v31", _DEEPSEEK.format(f"\n{_JSON['find_trains']}\n"), [TRAINS]),
    "deepseek_v32 one object": Recorded("deepseek_v32", _DSML.format('{"city": "Rome"}\n'), [TRAINS]),
    "deepseek_v32 no attribute": Recorded(
        "deepseek_v32", _DSML.format(_DSML_CITY.replace(' string="true"', "")), [TRAINS]
    ),
    "deepseek_v32 other types": Recorded(
        "deepseek_v32",
        _DSML.format(
            _DSML_CITY.replace("city", "days").replace("true", "false") + _DSML_CITY.replace("Rome", "a <b> </c>")
        ),
        [("find_trains", {"days": "Rome", "city": "a <b> </c>"})],
    ),
    "qwen3_coder a value has the closing mark": Recorded(
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>Rome</parameter><parameter=days></tool_call></parameter>"
        "</function>",
        [("find_trains", {"city": "Rome", "days": "</tool_call>"})],
    ),
    "function_gemma nested": Recorded(
        "function_gemma",
        "<start_function_call>call:find_trains{city:{name:1},days:2}<end_function_call>",
        [("find_trains", {"city": {"name": 1}, "days": 2})],
    ),
    "gemma4 nested": Recorded(
        "gemma4",
        '<|tool_call>call:find_trains{city:<|"|>a}{b<|"|>,tags:[<|"|>x<|"|>,{y:{z:1}}]}<tool_call|>',
        [("find_trains", {"city": "a}{b", "tags": ["x", {"y": {"z": 1}}]})],
    ),
}

_ARG = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
_KIMI = "<|tool_call_begin|>functions.find_trains:0<|tool_call_argument_begin|>{}<|tool_call_end|>"

# Name -> (parser, output). A lenient parser would return an incomplete call, so the whole output must stay content.
UNREADABLE: dict[str, tuple[str, str]] = {
    "hermes another key": ("json_tools", '<tool_call>{"name": "find_trains", "input": {"city": "Rome"}}</tool_call>'),
    "hermes arguments at the top": ("json_tools", '<tool_call>{"name": "find_trains", "city": "Rome"}</tool_call>'),
    "hermes a closing brace before the call": ("json_tools", f"<tool_call>}}{_JSON['find_trains']}</tool_call>"),
    "hermes a closing brace between calls": (
        "json_tools", f"<tool_call>{_JSON['find_trains']}}}{_JSON['get_weather']}</tool_call>",
    ),
    "hermes one object of two": ("json_tools", f"<tool_call>{_JSON['find_trains']} {{</tool_call>"),
    "qwen3_coder an end of a value cannot be told": (
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>a <parameter=days>b</parameter> c</parameter></function>"
        "</tool_call>",
    ),
    "qwen3_coder a parameter within a value": (
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>a <parameter=x>b</parameter></parameter></function>"
        "</tool_call>",
    ),
    "qwen3_coder text after a value": (
        "qwen3_coder", "<tool_call><function=find_trains><parameter=city>Rome</parameter>days: 3</tool_call>",
    ),
    "qwen3_coder a value has a function": (
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city><function=a></function><function=b></function></parameter>"
        "<parameter=city>2</parameter></function></tool_call>",
    ),
    "qwen3_coder text between parameters": (
        "qwen3_coder",
        "<tool_call><function=find_trains><parameter=city>Rome</parameter>days: 3</function></tool_call>",
    ),
    "qwen3_coder one function is not a tool": (
        "qwen3_coder", f"<tool_call>{_TRAINS_FUNCTION}<function=other></function></tool_call>",
    ),
    "qwen3_coder bare, not a tool": ("qwen3_coder", "Write <function=other>\n</function>\n</tool_call>"),
    "pythonic bare, not a tool": ("pythonic", "[other(city=1)]"),
    "pythonic bare, behind text": ("pythonic", 'Like so: [find_trains(city="Rome")]'),
    "pythonic bare, before text": ("pythonic", '[find_trains(city="Rome")] or so'),
    "pythonic a position": ("pythonic", '[find_trains("Rome", days=3)]'),
    "pythonic an argument twice": ("pythonic", '[find_trains(city="Rome", city="Oslo")]'),
    "pythonic a variable": ("pythonic", "[find_trains(city=Rome)]"),
    "pythonic two strings": ("pythonic", '[find_trains(city="Rome" days=3)]'),
    "mistral a string without an object": ("mistral", '[TOOL_CALLS]find_trains[ARGS]"Rome"'),
    "mistral a string without a mark": ("mistral", '[TOOL_CALLS]find_trains "{}"'),
    "mistral a header alone": ("mistral", "[TOOL_CALLS]find_trains[CALL_ID]abc[ARGS] Rome"),
    "glm47 a closing tag is missing": (
        "glm47",
        "<tool_call>find_trains\n<arg_key>city</arg_key><arg_value>Rome<arg_key>days</arg_key><arg_value>3</arg_value>"
        "</tool_call>",
    ),
    "glm47 prose": ("glm47", "<tool_call>find_trains to Rome</tool_call>"),
    "glm47 two calls": (
        "glm47",
        f"<tool_call>find_trains{_ARG.format('city', 'Rome')}get_weather{_ARG.format('city', 'Rome')}</tool_call>",
    ),
    "longcat a closing tag is missing": (
        "longcat",
        "<longcat_tool_call>find_trains\n<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Rome"
        "<longcat_arg_key>days</longcat_arg_key><longcat_arg_value>3</longcat_arg_value></longcat_tool_call>",
    ),
    "minimax_m2 a closing tag is missing": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="find_trains"><parameter name="city">Rome<parameter name="days">3</parameter>'
        "</invoke></minimax:tool_call>",
    ),
    "minimax_m2 the last closing tag is missing": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="find_trains"><parameter name="city">Rome</invoke></minimax:tool_call>',
    ),
    "minimax_m2 a second call is broken": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="find_trains"></invoke><invoke name="get_weather"></minimax:tool_call>',
    ),
    "muse_spark a closing tag is missing": (
        "muse_spark",
        '<atem:function_calls><atem:invoke name="find_trains"><atem:parameter name="city">Rome</atem:invoke>'
        "</atem:function_calls>",
    ),
    "minicpm5 a closing tag is missing": (
        "minicpm5", '<function name="find_trains"><param name="city">Rome</function>',
    ),
    "kimi_k2 one call of two": (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{_KIMI.format('{}')}<|tool_call_begin|>functions.get_weather:1"
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3 one call of two": (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="find_trains"<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="get_weather"<|sep|><|open|>json<|sep|>[<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
    ),
    "kimi_k3 a closing tag is missing": (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="find_trains"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "llama3_json bare, not a tool": ("llama3_json", '{"name": "other", "parameters": {}}'),
    "llama3_json bare, behind text": ("llama3_json", f"Like so: {_JSON['find_trains']}"),
    "llama3_json bare, another key": ("llama3_json", '{"name": "find_trains", "city": "Rome"}'),
    "deepseek_v3 text between calls": (
        "deepseek_v3",
        _DEEPSEEK.format(f"{_V3}<｜tool▁call▁end｜> and"),
    ),
    "deepseek_v3 text after the arguments": (
        "deepseek_v3",
        _DEEPSEEK.format(f"{_V3.replace('}', '} or {}')}<｜tool▁call▁end｜>"),
    ),
    "deepseek_v31 no arguments": (
        "deepseek_v31", _DEEPSEEK.format("<｜tool▁call▁begin｜>find_trains<｜tool▁sep｜><｜tool▁call▁end｜>"),
    ),
    "deepseek_v31 no tool": (
        "deepseek_v31", _DEEPSEEK.format("<｜tool▁call▁begin｜>fly<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ),
    "deepseek_v32 a closing tag is missing": (
        "deepseek_v32", _DSML.format(_DSML_CITY.replace("</｜DSML｜parameter>", "") + _DSML_CITY),
    ),
    "deepseek_v32 an argument twice": ("deepseek_v32", _DSML.format(_DSML_CITY * 2)),
    "deepseek_v32 text behind": ("deepseek_v32", _DSML.format(f"{_DSML_CITY}Done.")),
    "function_gemma two calls": (
        "function_gemma",
        "<start_function_call>call:find_trains{days:2}call:get_weather{days:3}<end_function_call>",
    ),
    "gemma4 text behind": ("gemma4", "<|tool_call>call:find_trains{days:2} and call:get_weather{<tool_call|>"),
}  # fmt: skip

"""Chat templates: output as that of ``transformers``, bounded work, and places where prompts share a prefix."""

from __future__ import annotations

import datetime
import threading
import tracemalloc
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from metal_engine.cancellation import Cancelled, caller_disconnected
from metal_engine.errors import ConfigError
from metal_engine.sampling_params import SamplingParams
from metal_engine.text import chat_template, template_budget
from metal_engine.text.chat_template_file import read_chat_template
from metal_engine.text.long_text import TextTooLongError
from metal_engine.text.prompt_boundaries import PromptBoundaries
from metal_engine.text.tokenizer import Tokenizer
from tests.support.chat_templates import TEMPLATES
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hi! 1 < 2 "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThat.", "name": None},
        {"role": "user", "content": "Why é😀?"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning": "Let me look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "c"},
        {"role": "tool", "content": "<b>sun</b>", "tool_call_id": "c"},
        {"role": "assistant", "content": "Rain."},
    ],
]
VARIABLES: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False, "tools": TOOLS, "enable_thinking": False},
]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_rendered_templates_equal_transformers_output(source: str) -> None:
    hf: Any = tiny_tokenizer(source).hf_tokenizer
    for chat in CHATS:
        for variables in VARIABLES:
            told = hf.apply_chat_template(chat, tokenize=False, **variables)
            assert written(hf, chat, variables) == told
    for chat in (CHATS[2], [*CHATS[0], {"role": "assistant", "content": "So "}]):
        told = hf.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert written(hf, chat, {"continue_final_message": True}) == told


def test_the_demo_models_template(demo_tokenizer: Tokenizer) -> None:
    for chat in CHATS[:2]:
        told = demo_tokenizer.hf_tokenizer.apply_chat_template(chat, return_dict=False, add_generation_prompt=True)
        assert demo_tokenizer.apply_chat_template(chat) == told


def written(hf: Any, chat: list[Any], variables: dict[str, Any]) -> str:
    given = {"add_generation_prompt": False, **variables}
    return chat_template.render(hf, chat_template.plain_messages(chat), chat_template.plain_variables(given))


LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = EXPR %}{% endfor %}{{ ns.x | length }}"
NESTED = "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}" + (
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
THRICE = "{% for i in range(3) %}{% set y = EXPR %}{% endfor %}"
# A cheap way to build 16,000 characters.
LONG = (
    "{% set ns = namespace(s='x' * 1000) %}{% for i in range(4) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}"
    + ("{% set s = ns.s %}")
)
COSTLY = {
    "loops": LOOP,
    "loops over a list": "{% set r = range(90000) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "multiplication": "{{ 'x' * 10 ** 10 }}",
    "lists": "{{ ([1] * 10 ** 10) | length }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "numbers": DOUBLED.replace("x='ab'", "x=3").replace("EXPR", "ns.x * ns.x"),
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000, 1) * 100 }}",
    "percent filter": "{{ '%1000000000d' | format(n) }}",
    "format": "{{ '{:>1000000000}'.format('x') }}",
    "format precision": "{{ '{:.1000000000f}'.format(1.0) }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "indent": "{{ 'x\n' * 1000 | indent(10 ** 9) }}",
    "tojson": "{{ [1, [2]] | tojson(indent=10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "to_bytes": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10 ** 9) | list | length }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "concatenation": DOUBLED.replace("EXPR", "ns.x ~ ns.x"),
    "addition": DOUBLED.replace("EXPR", "ns.x + ns.x"),
    "replace": DOUBLED.replace("EXPR", "ns.x.replace('a', ns.x)"),
    "replace filter": DOUBLED.replace("EXPR", "ns.x | replace('a', ns.x)"),
    "join": DOUBLED.replace("EXPR", "ns.x | join(ns.x)"),
    "join method": DOUBLED.replace("EXPR", "ns.x.join([ns.x, ns.x])"),
    "set block": DOUBLED.replace("{% set ns.x = EXPR %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "slices": "{% set x = 'x' * 100000 %}{% for i in range(90000) %}{% set y = x[1:] %}{% endfor %}",
    "searches": "{% set x = 'x' * 100000 %}{% for i in range(90000) %}{% if 'y' in x %}{% endif %}{% endfor %}",
    "output": "{% for i in range(90000) %}{{ 'x' * 100000 }}{% endfor %}",
    "literal text": "{% set t %}{% for i in range(90000) %}" + "x" * 9000 + "{% endfor %}{% endset %}{{ t | length }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "nested shown": NESTED + "{{ ns.x }}",
    "nested compared": NESTED + "{{ ns.x == ns.y }}",
    "nested in a test": NESTED + "{{ ns.x is eq(ns.y) }}",
    "nested as JSON": NESTED + "{{ ns.x | tojson | length }}",
    "nested as text": NESTED + "{{ ns.x | string | length }}",
    "nested joined": NESTED + "{{ (ns.x ~ '') | length }}",
    "nested sought": NESTED + "{{ ns.x in [ns.y] }}",
    "nested counted": NESTED + "{{ [ns.x].count(ns.y) }}",
    "a namespace shown": NESTED + "{{ (ns ~ '') | length }}",
    "sum": "{{ ((range(90000) | batch(1) | list) | sum(start=[])) | length }}",
    "a range joined": THRICE.replace("EXPR", "range(99999) | join"),
    "large integers": "{{ 2 ** 5000 // 3 }}",
    "wordwrap": LONG + "{{ s | wordwrap(1) | length }}",
    "striptags method": LONG + "{{ (s.replace('x', '<>') | safe).striptags() }}",
    "strip": LONG + "{{ s.strip(s.replace('x', 'y') ~ 'x') | length }}",
    "trim": LONG + "{{ s | trim(s.replace('x', 'y') ~ 'x') | length }}",
    "other line breaks": "{{ ('a\r' * 1000) | indent(10 ** 5) | length }}",
    "replace in a list": LONG + "{{ range(9999) | list | replace('1', s) | length }}",
    "replace a number": LONG + "{{ s.replace('x', '1') | replace(1, s) | length }}",
    "join by a list": LONG + "{{ range(9999) | join([s]) | length }}",
    "join keys": LONG + "{{ dict.fromkeys(range(9999)).keys() | join(s) | length }}",
    "separators": LONG + "{{ ([1] * 1000) | tojson(separators=(s, 'b')) | length }}",
    "separators of members": LONG + "{{ dict.fromkeys(range(999)) | tojson(separators=('b', s)) | length }}",
    "dates": LONG + "{{ strftime_now(s.replace('x', '%9d')) | length }}",
    "paths of attributes": "{{ range(9999) | map(attribute='a.' * 99 ~ 'a', default={}) | list | length }}",
    "escapes": LONG + "{% set l = s.replace('x', '<') %}{% for i in range(99) %}{% set y = l | e %}{% endfor %}",
    "escapes in JSON": LONG + (
        "{% set l = s.replace('x', '\x00') %}{% for i in range(99) %}{% set y = l | tojson %}{% endfor %}"
    ),
    "words": LONG + "{% for i in range(30) %}{% set y = s | wordcount %}{% endfor %}",
    "entities": LONG + (
        "{% set l = s.replace('x', '&lt;') | safe %}{% for i in range(9) %}{% set y = l.unescape() %}{% endfor %}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY)
def test_costly_templates_are_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_WORK", 1 << 23)  # reaches the limit sooner
    with pytest.raises(ValueError, match=r"took too long|too large|may not"):
        tiny_tokenizer(source).apply_chat_template([{"role": "user", "content": "x"}], n=1)


WIDE = {
    "percent star": "{{ '%*d' % (3 * 10 ** 8, 1) }}",
    "precision of a star": "{{ '%.*f' % (3 * 10 ** 8, 1.0) }}",
    "bytes of a star": "{{ '%*d' | format(3 * 10 ** 8, 1) }}",
    "nested": "{{ '{:{}}'.format(1, 3 * 10 ** 8) }}",
    "nested text": "{{ '{:{}}'.format('x', '300000000') }}",
    "nested digits": "{{ '{:{}{}{}}'.format('x', 300, '000', '000') }}",
    "nested zeros": "{{ '{:3{}}'.format('x', '00000000') }}",
    "attribute": "{% set f = '{:{}}' | attr('format') %}{{ f(1, 3 * 10 ** 8) }}",
    "map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 3 * 10 ** 8}) }}",
    "escaped": "{{ ('{:{}}' | safe).format(1, 3 * 10 ** 8) }}",
    "separators": "{{ ([1] * 3000) | tojson(separators=('a' * 99999, 'b')) }}",
    "dates": "{{ strftime_now('%999999d' * 99999) }}",
}


@pytest.mark.parametrize("source", WIDE.values(), ids=WIDE)
def test_templates_that_format_huge_texts_are_refused_before_allocation(source: str) -> None:
    """Uses the budget of a real request. Peak memory stays far below the size of the text."""
    tokenizer = tiny_tokenizer(source)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="took too long or wrote too much"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


FORMATS = """{{ '{:>9}|{:{}}|{:0{w}d}'.format('a', 'b', 5, 3, w=4) }} {{ '%5d|%-5s|%*d' % (3, 'c', 7, 42) }}
{{ '%d' % 1700000000000 }} {{ '{}'.format(1700000000000) }} {{ '{:,.2f}'.format(1234567.891) }} {{ '%.3f%%' % 1.5 }}
{{ '{a[0]} {b.c!r}'.format(a=[1], b={'c': 'd'}) }} {{ '{x}'.format_map({'x': 1}) }} {{ ('<{}>' | safe).format('<') }}
{{ '%s %s' | format('a', [1, {'b': none}]) }} {{ '%(a)s %(a)3s' | format(a='x') }} {{ '%(a)s' % {'a': 1.5} }}
{{ {'a': [1, 'é']} | tojson(separators=(',', ':')) }} {{ {'a': [1, 'é']} | tojson(indent=2, ensure_ascii=true) }}
{{ 'a b'.split() | join(', ') }} {{ 'x-y'.partition('-') }} {{ '  a '.strip() ~ 'xax'.strip('x') ~ 'a\nb' | indent(2) }}
{{ 2 ** 64 }} {{ 10 ** 18 % 97 }} {{ range(5) | sum }} {{ range(3) | join('-') }} {{ 'a b c' | wordwrap(3) }}"""


def test_formatting_in_templates_gives_the_output_of_jinja() -> None:
    tokenizer: Any = tiny_tokenizer(FORMATS).hf_tokenizer
    chat = [{"role": "user", "content": "x"}]
    assert written(tokenizer, chat, {}) == tokenizer.apply_chat_template(chat, tokenize=False)
    dated = tiny_tokenizer("{{ strftime_now('%d %b %Y') }}").hf_tokenizer
    datetime.datetime.strptime(written(dated, chat, {}), "%d %b %Y")


def test_templates_with_autoescape_are_refused() -> None:
    """Escaping would increase the output after its cost was paid."""
    tokenizer = tiny_tokenizer("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}")
    with pytest.raises(ValueError, match="autoescape"):
        tokenizer.apply_chat_template([{"role": "user", "content": "<"}])


def test_costly_template_variables_of_a_request_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_WORK", 1 << 23)
    tokenizer = tiny_tokenizer("{{ 'x' * n }}{{ 'y' | center(w or 1) }}{{ format and format % 1 }}")
    for variables in ({"n": 10**10}, {"n": 1, "w": 10**9}, {"n": 1, "format": "%999999999d"}):
        with pytest.raises(ValueError, match="took too long or wrote too much"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], **variables)


def test_endless_recursion_is_refused() -> None:
    tokenizer = tiny_tokenizer("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    with pytest.raises(ValueError, match="refused"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_long_conversations_stay_within_the_budget() -> None:
    """Templates loop over messages, and inside the loop over all messages. The budget allows for the cost of that."""
    turns = [{"role": role, "content": "word " * 40} for role in ("user", "assistant")] * 300
    nested = "{% for m in messages %}{% if m == (messages | selectattr('role', 'eq', 'user') | list)[-1] %}{% endif %}"
    for source in (*TEMPLATES.values(), nested + "{{ m.content }}{% endfor %}"):
        tiny_tokenizer(source).apply_chat_template(turns, tools=TOOLS)
    long = [{"role": "user", "content": "</think> word " * 200_000}]
    for source in TEMPLATES.values():
        assert written(tiny_tokenizer(source).hf_tokenizer, long, {"tools": TOOLS})


def test_rendering_stops_once_the_text_exceeds_the_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []
    budget = template_budget.Budget.spend
    monkeypatch.setattr(template_budget.Budget, "spend", lambda self, work: (spent.append(work), budget(self, work)))
    tokenizer = tiny_tokenizer("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}")
    with pytest.raises(TextTooLongError, match="maximum context length"):
        tokenizer.limited(100).apply_chat_template([{"role": "user", "content": "x"}])
    assert len(spent) < 1000


def test_rendering_is_cancelled_when_the_client_disconnects() -> None:
    left = threading.Event()
    left.set()
    context = copy_context()
    context.run(caller_disconnected.set, left)
    with pytest.raises(Cancelled):
        context.run(tiny_tokenizer(LOOP).apply_chat_template, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["self", "messages", "conversation", "context", "environment", "args", "a b", "", "é"])
def test_variables_may_have_any_name(name: str) -> None:
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "x"}]
    given: dict[str, Any] = {name: 1} if name != "messages" else {"messages_": 1}
    assert tokenizer.apply_chat_template(chat, **given) == tokenizer.apply_chat_template(chat)


def test_a_template_from_a_file_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_chat_template(str(file)) == file.read_text()
    for text in ("{{ messages[0].content }}", "{% generation %}{{ messages[0].content }}{% endgeneration %}"):
        assert read_chat_template(text) == text


@pytest.mark.parametrize(("given", "message"), [
    ("no/such/file.jinja", "cannot read --chat-template no/such/file.jinja: No such file"),
    ("~nosuchuser/x", "cannot read --chat-template ~nosuchuser/x: No such file or directory"),
    (".", "cannot read --chat-template"),
    ("{% for m in messages %}", "--chat-template is not valid Jinja: line 1"),
    ("{% if messages add_generation_prompt %}{% endif %}", "--chat-template is not valid Jinja: line 1"),
])  # fmt: skip
def test_templates_that_cannot_be_used(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as info:
        read_chat_template(given)
    assert message in str(info.value)


# As in Qwen's templates: an answer starts with reasoning, which is removed from the history.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "what is it?"}]


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_generation_prompt_boundary_is_found_for_each_thinking_switch(switch: str) -> None:
    tokenizer = tiny_tokenizer(THINKING.replace("enable_thinking", switch))
    parts = PromptBoundaries(tokenizer)
    for variables in ({}, {switch: True}, {switch: False}):
        prompt = tokenizer.apply_chat_template(MESSAGES, **variables)
        history = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False, **variables)
        assert len(prompt) > parts.num_lasting_tokens(prompt) == len(history)
        assert parts.num_lasting_tokens(history) == len(history)
    assert parts.num_lasting_tokens([]) == 0


def test_a_tokenizer_without_a_template_has_none() -> None:
    parts = PromptBoundaries(tiny_tokenizer(None))
    assert parts.num_lasting_tokens([1, 2, 3]) == 3 and parts.num_instruction_tokens([1, 2, 3]) == 0


def test_instructions_end_before_the_first_users_text() -> None:
    tokenizer = tiny_tokenizer(THINKING)
    parts = PromptBoundaries(tokenizer)
    system = {"role": "system", "content": "be brief"}
    told = tokenizer.apply_chat_template([system], add_generation_prompt=False)
    for rest in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "that"}, *MESSAGES]):
        prompt = tokenizer.apply_chat_template([system, *rest])
        instructions = prompt[: parts.num_instruction_tokens(prompt)]
        assert tokenizer.decode(instructions[len(told) :]) in ("user\n", "<|im_start|>user\n")
        assert tokenizer.decode(prompt[len(instructions) :]).startswith(MESSAGES[0]["content"])
    assert parts.num_instruction_tokens(tokenizer.encode("be brief")) == 0


def recurrent_engine() -> SteppedEngine:
    sizes = {"num_state_slots": 16, "max_num_seqs": 4, "block_size": 4, "num_blocks": 512, "max_model_len": 2048}
    return tiny_engine(tokenizer=tiny_tokenizer(THINKING), architecture="qwen3_5", **sizes)


def test_conversations_with_the_same_instructions_share_a_cached_prefix() -> None:
    """The second conversation may arrive later or at the same time."""
    system = {"role": "system", "content": "be brief " * 40}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for at_once in (False, True):
        engine = recurrent_engine()
        render = engine.tokenizer.apply_chat_template
        prompts = [render([system, {"role": "user", "content": text}]) for text in ("one", "another")]
        if at_once:
            outputs = run_all(engine, [(prompt, params) for prompt in prompts])
        else:
            outputs = [run_all(engine, [(prompt, params)])[0] for prompt in prompts]
        num_instructions = PromptBoundaries(engine.tokenizer).num_instruction_tokens(prompts[0])
        assert num_instructions > 256
        assert [o[-1].num_cached_tokens for o in outputs] == [0, num_instructions - num_instructions % 4]


def test_a_chat_that_strips_reasoning_hits_up_to_the_last_message() -> None:
    engine = recurrent_engine()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    messages: list[dict[str, str]] = []
    lasting = 0  # tokens before the generation prompt of the previous prompt
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}, of some words"})
        (outputs,) = run_all(engine, [(engine.tokenizer.apply_chat_template(messages), params)])
        num_cached = outputs[-1].num_cached_tokens
        assert lasting - 4 < num_cached <= lasting or turn == 0, (turn, num_cached, lasting)
        lasting = len(engine.tokenizer.apply_chat_template(messages, add_generation_prompt=False))
        assert token_ids(outputs)
        messages.append({"role": "assistant", "content": f"answer {turn}"})  # without the reasoning

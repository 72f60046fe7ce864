"""End-to-end tests: the command, the server on the demo model, the offline API and the tools."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from metal_engine import LLM, SamplingParams
from tests.support.checkpoint_files import CHAT_TEMPLATE, write_checkpoint, write_tokenizer
from tools.fixtures.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# At start, an engine tries its largest step and clears its KV cache. The default sizes would take seconds on a CPU.
SMALL = [
    *("--max-num-batched-tokens", "128", "--max-num-seqs", "32"),
    *("--max-model-len", "2048", "--num-gpu-blocks-override", "320"),
]


@pytest.fixture(scope="module")
def process(demo_path: Path) -> Iterator[tuple[str, int]]:
    """Yield URL and process id of `metal-engine serve demo` on a free port. SIGINT must end it with status 0."""
    port = free_port()
    command = [sys.executable, "-m", "metal_engine", "serve", "demo", "--port", str(port), *SMALL]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        try:
            httpx.get(f"{url}/health").raise_for_status()
            break
        except httpx.HTTPError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.2)
    yield url, process.pid
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log, log
    assert "OpenBLAS" in log or sys.platform == "darwin", log


@pytest.fixture(scope="module")
def server(process: tuple[str, int]) -> str:
    """Return the URL of the shared server."""
    return process[0]


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny checkpoint, which loads fast, for tests that do not depend on the model."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(demo_path: Path) -> Iterator[LLM]:
    with LLM("demo", num_gpu_blocks_override=512, max_num_batched_tokens=128, max_num_seqs=8) as llm:
        yield llm


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_memory_of_large_bodies_is_returned(process: tuple[str, int]) -> None:
    """The bodies of 12 MB contain texts of 4 kB, which the allocator takes from its arena, and are refused."""
    url, pid = process

    def resident() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    httpx.post(f"{url}/v1/completions", json={"prompt": "Rome", "max_tokens": 4}, timeout=60).raise_for_status()
    before = resident()
    # The server refuses the wrong field after parsing. Computing the tokens of the texts would take a minute.
    body = {"prompt": [f"{i:04}" * 1000 for i in range(3000)], "max_tokens": "one"}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert refused.status_code == 400, refused.text
    assert resident() > before + (48 << 20)  # not returned at this point
    deadline = time.monotonic() + 120
    while resident() > before + (24 << 20):
        assert time.monotonic() < deadline, f"{(resident() - before) >> 20} MiB more than before"
        time.sleep(0.2)


def test_chat_completion(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=20, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == "The capital of France is Paris."


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"$ref": "#/$defs/unit"}},
                "required": ["city", "unit"],
                "additionalProperties": False,
                "$defs": {"unit": {"enum": units}},
            },
        },
    }
    for name, description, units in [
        ("get_weather", "The weather in a city.", ["celsius", "fahrenheit"]),
        ("get_distance", "How far a city is.", ["km", "miles"]),
    ]
]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome, in celsius?"}]


def check_call(name: str, arguments: Any) -> None:
    (schema,) = (t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name)
    Draft202012Validator(schema).validate(arguments)


@pytest.mark.full
def test_tools_that_must_be_called(server: str) -> None:
    """The demo model was not trained on tools. The grammar alone turns its output into calls."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    parameters: dict[str, Any] = {
        "model": "demo",
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    answers = list(client.chat.completions.create(**parameters).choices)
    with client.chat.completions.stream(**parameters) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        answers += stream.get_final_completion().choices
    assert len(deltas) > 5 and len(answers) == 2
    for answer in answers:
        assert not answer.message.content and answer.message.tool_calls is not None
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        check_call(call.function.name, json.loads(call.function.arguments))
    assert len({(c.function.name, c.function.arguments) for one in answers for c in one.message.tool_calls}) == 1


@pytest.mark.full
def test_tools_that_must_be_called_of_other_endpoints(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = client.responses.create(
        model="demo", input=ASKED[0]["content"], tools=tools, tool_choice="required",
        parallel_tool_calls=False, temperature=0, max_output_tokens=100,
    )  # fmt: skip
    (item,) = response.output
    assert response.status == "completed" and item.type == "function_call"
    check_call(item.name, json.loads(item.arguments))
    claude = anthropic.Anthropic(base_url=server, api_key="none")
    inputs: list[Any] = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    message = claude.messages.create(
        model="demo", max_tokens=100, messages=ASKED, tools=inputs,
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, extra_body={"temperature": 0},
    )  # fmt: skip
    (block,) = message.content
    assert message.stop_reason == "tool_use" and block.type == "tool_use"
    check_call(block.name, block.input)


@pytest.mark.full
def test_completion_with_seed_and_stop(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")

    def complete(**parameters: object) -> str:
        return client.completions.create(model="demo", prompt="One, two, three,", **parameters).choices[0].text

    sampled = complete(temperature=1.0, top_p=0.9, seed=7, max_tokens=8)
    assert complete(temperature=1.0, top_p=0.9, seed=7, max_tokens=8) == sampled
    greedy = complete(temperature=0, max_tokens=8)
    assert "five" in greedy
    assert complete(temperature=0, max_tokens=8, stop=["five"]) == greedy[: greedy.index("five")]


# More streams than the engine runs together, so that some clients leave the queue.
@pytest.mark.full
def test_half_of_many_streams_disconnect(server: str) -> None:
    """Afterwards all blocks are free and nothing runs."""
    rng = random.Random(5)
    plans = [(i, rng.randint(0, 6) if i % 2 else None) for i in range(100)]
    finished = []

    async def stream(client: openai.AsyncOpenAI, i: int, leave_after: int | None) -> None:
        chunks = await client.completions.create(
            model="demo",
            prompt=f"Chapter {i}. " + "It was a dark night. " * rng.randint(0, 6),
            max_tokens=8,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        count = 0
        async for chunk in chunks:
            if count == leave_after:
                await chunks.close()
                return
            count += 1
            if chunk.choices[0].finish_reason:
                finished.append(i)

    async def everybody() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", timeout=300) as client:
            await asyncio.gather(*(stream(client, *plan) for plan in plans))

    asyncio.run(everybody())
    assert set(finished) >= {i for i, leave_after in plans if leave_after is None}
    deadline = time.monotonic() + 60
    while True:
        health = httpx.get(f"{server}/health").json()
        if health["running"] == health["waiting"] == 0:
            break
        assert time.monotonic() < deadline, health
        time.sleep(0.1)
    assert health["kv_cache_usage"] == 0.0


def test_generate_keeps_the_prompts_order(llm: LLM) -> None:
    prompts = ["The capital of France is", llm.tokenizer.encode("1, 2, 3, 4,"), "Once upon a time"]
    params = replace(GREEDY, max_tokens=6)
    together = llm.generate(prompts, params, use_tqdm=True)
    assert [len(r.token_ids) for r in together] == [6, 6, 6]
    assert together[0].text.startswith(" Paris")
    assert together[1].text.startswith(" 5, 6")
    for prompt, result in zip(prompts, together, strict=True):
        assert llm.generate(prompt, params, use_tqdm=False)[0].text == result.text


def test_chat(llm: LLM) -> None:
    one = llm.chat(QUESTION, GREEDY)
    assert one[0].text == "The capital of France is Paris."
    two = llm.chat([QUESTION, [{"role": "user", "content": "Say hi."}]], GREEDY, use_tqdm=False)
    assert two[0].text == one[0].text
    assert len(two) == 2


@pytest.mark.full
def test_the_demo_has_sampling_defaults_under_which_it_makes_sense(llm: LLM) -> None:
    defaults = llm.default_sampling_params
    assert (defaults.temperature, defaults.top_p) == (0.2, 0.5)
    params = [replace(defaults, seed=seed, max_tokens=12) for seed in range(8)]
    answers = llm.chat([QUESTION] * 8, params, use_tqdm=False)
    assert {answer.text for answer in answers} == {"The capital of France is Paris."}


def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="maximum context length"):
        llm.generate(["fine", [5] * 9000], GREEDY)
    assert not llm.stats.num_running
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.stats.num_used_blocks == 0


@pytest.mark.full
def test_chat_command_with_its_own_engine(demo_path: Path) -> None:
    command = [sys.executable, "-m", "metal_engine", "chat", "demo", "--temperature", "0", "--max-tokens", "20", *SMALL]
    lines = "What is the capital of France?\n/reset\nWhat is the capital of France?\n\n"
    done = subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n" * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "TINY", "--max-model-len", "99999"], "--max-model-len 99999 exceeds"),
        pytest.param(
            ["serve", "TINY", "--kv-cache-memory-bytes", "100"], "raise --kv-cache-memory-bytes", marks=pytest.mark.full
        ),
    ],
)
def test_command_line_errors_are_one_line(arguments: list[str], message: str, tiny_checkpoint: Path) -> None:
    arguments = [str(tiny_checkpoint) if argument == "TINY" else argument for argument in arguments]
    command = [sys.executable, "-m", "metal_engine", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_repro_block_exhaustion(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "tools/repro_block_exhaustion.py", "--model", str(tiny_checkpoint)]
    command += ["--max-num-batched-tokens", "256"]
    small = ["--num-prompts", "12", "--max-tokens", "48", "--max-num-seqs", "12", "--pool-fraction", "0.3"]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100.0%" in done.stdout
    assert re.search(r"^2 of 2: tight pool, \d+ blocks: \d+ s$", done.stdout, re.MULTILINE)


@pytest.mark.full
def test_repro_with_room_for_all_requests_is_reported(tiny_checkpoint: Path) -> None:
    """Such a pool shows nothing about preemption."""
    command = [sys.executable, "tools/repro_block_exhaustion.py", "--model", str(tiny_checkpoint)]
    ample = ["--num-prompts", "4", "--max-tokens", "2", "--pool-fraction", "5"]
    done = subprocess.run([*command, *ample], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "preemption never happened" in done.stdout


@pytest.mark.full
def test_repro_block_exhaustion_at_full_size() -> None:
    command = [sys.executable, "tools/repro_block_exhaustion.py"]
    command += ["--num-prompts", "160", "--max-tokens", "48", "--max-num-seqs", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr

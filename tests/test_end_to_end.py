"""End-to-end tests: the command, the server on the demo model, the offline API and the tools."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

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


def test_chat_of_llm(demo_path: Path) -> None:
    with LLM("demo", num_gpu_blocks_override=512, max_num_batched_tokens=128, max_num_seqs=8) as llm:
        defaults = llm.default_sampling_params
        assert (defaults.temperature, defaults.top_p) == (0.2, 0.5)
        one, two = llm.chat([QUESTION, [{"role": "user", "content": "Say hi."}]], GREEDY)
    assert one.text == "The capital of France is Paris." and two.text


def test_command_line_errors_are_one_line(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "metal_engine", "serve", str(tiny_checkpoint), "--max-model-len", "99999"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "--max-model-len 99999 exceeds" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "returncode", "words"),
    [
        (
            "--num-prompts 12 --max-tokens 48 --max-num-seqs 12 --pool-fraction 0.3 --max-num-batched-tokens 256",
            0,
            [r"100\.0%", r"^2 of 2: tight pool, \d+ blocks: \d+ s$"],
        ),
        # A pool with room for all requests shows nothing about preemption.
        pytest.param(
            "--num-prompts 4 --max-tokens 2 --pool-fraction 5", 1, ["preemption never happened"], marks=pytest.mark.full
        ),
    ],
    ids=["full pool", "ample pool"],
)
def test_repro_block_exhaustion(arguments: str, returncode: int, words: list[str], tiny_checkpoint: Path) -> None:
    command = [sys.executable, "tools/repro_block_exhaustion.py", "--model", str(tiny_checkpoint), *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == returncode, done.stdout + done.stderr
    assert all(re.search(word, done.stdout, re.MULTILINE) for word in words), done.stdout

"""Tests `metal-engine bench serve` against a live server: its counts, its errors, and its files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metal_engine.bench.args import BenchServeArgs
from metal_engine.bench.datasets import BenchRequest
from metal_engine.bench.serve import bench_serve
from metal_engine.errors import ConfigError
from metal_engine.prompt_images import PromptImages
from metal_engine.request import PreparedRequest
from metal_engine.scheduling.speculation.ngram import NgramProposer
from tests.grammars.hostile import descendants
from tests.support.http_server import QuietHandler, http_server
from tests.support.image_serving import serve_seeing
from tests.support.serving import MODEL, Served, serve
from tests.support.speculation import propose_from, speculative_config
from tools.fixtures.fake_engine import fake_config, script, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().hf_tokenizer.save_pretrained(folder)
    return str(folder)


def args(url: str, tokenizer: str, **settings: object) -> BenchServeArgs:
    defaults = {"num_prompts": 12, "input_len": 20, "output_len": 6, "progress": False}
    return BenchServeArgs(base_url=url, tokenizer=tokenizer, **{**defaults, **settings})


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_counts_are_the_servers(
    served: Served, tokenizer_folder: str, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, picture = tmp_path / "deep" / "result.json", tmp_path / "run.png"
    seen = len(served.runner.seen_params)
    one = args(
        served.url, tokenizer_folder, endpoint=endpoint, save_result=str(saved), plot=str(picture), api_key="sesame"
    )
    summary = bench_serve(one)
    assert (summary.num_ok, summary.num_failed, summary.output_tokens) == (12, 0, 72)
    result = json.loads(saved.read_text())
    lengths = [request["prompt_len"] for request in result["requests"]]
    assert summary.input_tokens == sum(lengths)
    if endpoint == "completions":
        assert set(lengths) == {20}
    assert all(request["output_len"] == 6 and request["ttft"] > 0 for request in result["requests"])
    assert result["summary"]["kv_cache_dtype"] == served.core.config.model.kv_dtype == summary.kv_cache_dtype
    assert result["model"] == MODEL and "sesame" not in saved.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"KV cache dtype of the server:{summary.kv_cache_dtype:>29}" in printed
    for label in ("Successful requests:", "Mean TTFT (ms):", "Median TPOT (ms):", "P99 ITL (ms):"):
        assert label in printed
    params = served.runner.seen_params[seen:]
    assert len(params) == 13  # with the warm-up
    assert all(p.ignore_eos and p.temperature == 0 for p in params)


def test_images(tmp_path: Path, tokenizer_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "result.json"
    seen: list[PromptImages] = []
    with serve_seeing(max_num_batched_tokens=512, num_blocks=512) as served:
        prepare = served.engine.preparer.prepare_all

        def recorded(*args: Any) -> list[PreparedRequest]:
            requests: list[PreparedRequest] = prepare(*args)
            seen.extend(request.images for request in requests if request.images is not None)
            return requests

        served.engine.preparer.prepare_all = recorded  # type: ignore[method-assign]
        sizes: dict[str, object] = {"images": 2, "image_size": "64x48", "save_result": str(saved)}
        summary = bench_serve(args(served.url, tokenizer_folder, endpoint="chat", num_prompts=5, **sizes))
    assert (summary.num_ok, summary.num_failed, summary.image_tokens) == (5, 0, 5 * 2 * 48)
    assert "Image tokens:" in capsys.readouterr().out
    assert {request["image_len"] for request in json.loads(saved.read_text())["requests"]} == {96}
    hashes = [image.content_hash for images in seen for image in images.images]
    assert len(set(hashes)) == len(hashes) == 12  # with the warm-up
    for name, settings in {
        "--images": {"images": 1},
        "--image-size": {"images": 1, "endpoint": "chat", "image_size": "64"},
    }.items():
        with pytest.raises(ConfigError) as raised:
            args("http://localhost", tokenizer_folder, **settings)  # type: ignore[arg-type]
        assert raised.value.flag == name


def test_images_precede_the_text_of_the_last_message() -> None:
    system, parts = {"role": "system", "content": "a"}, [{"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    for content in ("b", parts):
        request = BenchRequest("b", 1, messages=[system, {"role": "user", "content": content}], images=("data:x",))
        assert request.chat_messages == [system, {"role": "user", "content": [image, *parts]}]
    assert BenchRequest("b", 1).chat_messages == [{"role": "user", "content": "b"}]


def test_embeddings(served: Served, tokenizer_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "result.json"
    seen = len(served.runner.seen_pooling)
    summary = bench_serve(args(served.url, tokenizer_folder, endpoint="embeddings", save_result=str(saved)))
    assert (summary.num_ok, summary.num_failed, summary.input_tokens, summary.output_tokens) == (12, 0, 240, 0)
    assert len(served.runner.seen_pooling) - seen == 13  # with the warm-up
    assert all(request["latency"] > 0 and not request["itls"] for request in json.loads(saved.read_text())["requests"])
    printed = capsys.readouterr().out
    assert "Mean E2EL (ms):" in printed and "Total token throughput (tok/s):" in printed
    assert "TTFT" not in printed and "generated" not in printed
    with pytest.raises(ConfigError, match=r"failed a warm-up request: status 400.*dimensions"):
        bench_serve(args(served.url, tokenizer_folder, endpoint="embeddings", extra_body='{"dimensions": 99}'))


def test_concurrency_is_limited(served: Served, tokenizer_folder: str) -> None:
    summary = bench_serve(args(served.url, tokenizer_folder, max_concurrency=3))
    assert summary.peak_concurrency == 3
    assert summary.num_ok == 12


def test_a_rate_spreads_requests(served: Served, tokenizer_folder: str) -> None:
    summary = bench_serve(args(served.url, tokenizer_folder, request_rate=200.0, seed=5, goodput=("e2el:60000",)))
    from metal_engine.bench.datasets import arrival_times

    assert summary.duration >= arrival_times(12, 200.0, 1.0, 5)[-1]
    assert summary.goodput == pytest.approx(summary.request_throughput)


def test_refused_requests_are_failures(served: Served, tokenizer_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"failed a warm-up request: status 400.*top_p"):
        bench_serve(args(served.url, tokenizer_folder, extra_body='{"top_p": 7}'))
    summary = bench_serve(args(served.url, tokenizer_folder, extra_body='{"top_p": 7}', num_warmups=0))
    assert (summary.num_ok, summary.num_failed) == (0, 12)


def test_an_answer_that_ends_early_is_noticed(echoing: Served, tokenizer_folder: str) -> None:
    """The server stops at an end-of-sequence token, although the request has ignore_eos."""
    settings = {"input_len": 4, "output_len": 30, "extra_body": '{"ignore_eos": false}'}
    assert bench_serve(args(echoing.url, tokenizer_folder, num_warmups=0, **settings)).num_failed == 12
    fine = bench_serve(args(echoing.url, tokenizer_folder, num_warmups=0, ignore_eos=False, **settings))
    assert fine.num_failed == 0 and fine.output_tokens < 12 * 30


def chunk(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}})


@contextmanager
def answering(events: list[str]) -> Iterator[str]:
    """Server that streams the same events to every client."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_body(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.send_body("".join(f"data: {e}\n\n" for e in events).encode(), "text/event-stream")

    with http_server(Handler) as url:
        yield url


@pytest.mark.parametrize(("events", "error"), [
    ([chunk("a"), chunk("b", "length"), USAGE, "[DONE]"], ""),
    ([chunk("a"), chunk("b", "length"), USAGE], "without [DONE]"),
    ([chunk("a"), chunk("b", "length"), "[DONE]"], "no usage"),
    ([chunk("a"), chunk("b"), USAGE, "[DONE]"], "no finish_reason"),
    ([chunk("", "length"), USAGE, "[DONE]"], "no text"),
    ([chunk("a"), '{"error": {"message": "boom"}}'], "boom"),
    ([chunk("a", "length"), USAGE.replace('s": 2,', 's": 3,'), "[DONE]"], "3 tokens, but 2 were requested"),
    ([chunk("a", "length"), USAGE.replace("20", "11"), "[DONE]"], "11 prompt tokens were read"),
    (["{"], "JSON"),
])  # fmt: skip
def test_every_answer_is_checked(
    events: list[str], error: str, tokenizer_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(events) as url:
        settings = {"num_prompts": 2, "output_len": 2, "num_warmups": 0}
        summary = bench_serve(args(url, tokenizer_folder, **settings))
    assert summary.num_failed == (2 if error else 0)
    assert error in capsys.readouterr().out


def test_no_server(tokenizer_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"no server at http://127\.0\.0\.1:9 "):
        bench_serve(args("http://127.0.0.1:9", tokenizer_folder))
    with pytest.raises(ConfigError, match="--extra-body must be a JSON object"):
        bench_serve(args("http://127.0.0.1:9", tokenizer_folder, extra_body="[]"))


def test_a_server_that_does_not_answer(tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_engine.bench.serve._LEAST_READY_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match="it does not respond"):
            bench_serve(args(url, tokenizer_folder, request_timeout=20.0))


def test_bench_stops_at_once_if_the_server_responds_with_401(tokenizer_folder: str) -> None:
    class Refusing(QuietHandler):
        def do_GET(self) -> None:
            self.send_error(401, "no key")

    with (
        http_server(Refusing) as url,
        pytest.raises(ConfigError, match=r"/v1/models responds with status 401: .*no key"),
    ):
        bench_serve(args(url, tokenizer_folder, ready_timeout=20.0))


def test_output_files_are_checked_before_any_request_is_sent(tokenizer_folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for settings, message in (
        ({"save_result": str(tmp_path)}, "--save-result must name a file"),
        ({"save_result": str(tmp_path / "file" / "run.json")}, r"cannot write to .*file \(--save-result\)"),
        ({"plot": str(tmp_path / "run.nothing")}, "--plot must be a file of a supported type"),
        ({"plot": str(tmp_path / "file" / "run.png")}, r"cannot write to .*file \(--plot\)"),
        ({"save_result": str(tmp_path / "new" / "run.json")}, "no server"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench_serve(args("http://127.0.0.1:9", tokenizer_folder, **settings))
    assert (tmp_path / "new").is_dir() and not list((tmp_path / "new").iterdir())


def test_the_command_loads_no_mlx(served: Served, tokenizer_folder: str) -> None:
    code = (
        "import sys\nfrom metal_engine.cli.main import app\n"
        f"app(['bench', 'serve', '--base-url', {served.url!r}, '--tokenizer', {tokenizer_folder!r}, '--num-prompts',"
        " '3', '--input-len', '8', '--output-len', '4'], standalone_mode=False)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Successful requests:" in done.stdout


def test_bench_reports_draft_acceptance_only_for_a_speculating_server(
    served: Served, tokenizer_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = speculative_config(4)
    with serve(script("abc" * 20), config=fake_config(speculative=config)) as speculating:
        propose_from(speculating.core, NgramProposer(config))
        summary = bench_serve(args(speculating.url, tokenizer_folder, output_len=40))
        metrics = speculating.core.metrics
    printed = capsys.readouterr().out
    counts = summary.speculation
    assert counts is not None and counts.num_accepted_tokens > 100
    # The counts exclude the warm-up.
    assert counts.num_accepted_tokens < sum(metrics.num_accepted_tokens)
    assert counts.num_draft_tokens < metrics.num_draft_tokens
    assert f"Acceptance rate (%):{counts.acceptance_rate:>38.2f}" in printed
    assert counts.acceptance_length > 2 and "Acceptance length:" in printed
    assert bench_serve(args(served.url, tokenizer_folder)).speculation is None
    assert "Speculative" not in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells another process's peak memory")
def test_the_servers_peak_memory(served: Served, tokenizer_folder: str) -> None:
    import resource

    # The server is this process. Earlier tests may have left it child processes, whose peaks are added.
    before = sum(map(peak_of, descendants()))
    summary = bench_serve(args(served.url, tokenizer_folder))
    assert summary.server_peak_bytes is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0.9 * peak <= summary.server_peak_bytes <= 1.5 * peak + before


def peak_of(pid: int) -> int:
    """Return the peak resident size of a process in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0

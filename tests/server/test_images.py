"""Images of requests in all APIs: from the request to the engine's prompt."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from metal_engine.media.image_preparer import ImagePreparer
from metal_engine.prompt_images import PromptImages
from metal_engine.request import PreparedRequest
from metal_engine.server.workers import Weight
from metal_engine.settings.server_args import ServerArgs
from tests.support.image_files import data_url, encoded, hostile_files, picture
from tests.support.image_serving import END, IMAGE, START, serve_seeing
from tests.support.serving import DEADLINE, MODEL, Served

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
# Files of 48 and of 16 tokens.
A, B = encoded(picture(64, 48, 1)), encoded(picture(32, 32, 2), "JPEG")
URL_A, URL_B = data_url(A), data_url(B, "image/jpeg")
MEDIA = ("audio", "video")


@pytest.fixture(scope="module")
def seeing() -> Iterator[Served]:
    with serve_seeing() as served:
        yield served


@pytest.fixture
def prepared(seeing: Served, monkeypatch: pytest.MonkeyPatch) -> list[PreparedRequest]:
    """Return the list of requests that the server has prepared."""
    requests: list[PreparedRequest] = []
    prepare = seeing.engine.preparer.prepare_all

    def recorded(*args: Any) -> list[PreparedRequest]:
        requests.extend(found := prepare(*args))
        return found

    monkeypatch.setattr(seeing.engine.preparer, "prepare_all", recorded)
    return requests


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def tokens(served: Served, *turns: tuple[str, list[str | int]]) -> list[int]:
    """Return the prompt of a conversation. A number stands for the tokens of an image."""
    ids: list[int] = []
    encode = served.tokenizer.encode
    for role, content in turns:
        ids += encode(f"<|im_start|>{role}\n")
        for part in content:
            ids += encode(part) if isinstance(part, str) else [START, *[IMAGE] * part, END]
        ids += encode("<|im_end|>\n")
    return ids + encode("<|im_start|>assistant\n")


def seen(request: PreparedRequest) -> PromptImages:
    assert request.images is not None
    return request.images


def test_image_tokens_keep_the_order_of_texts_and_images(seeing: Served, prepared: list[PreparedRequest]) -> None:
    messages = [
        user(text("see "), image(URL_A), text(" and "), image(URL_B, detail="high"), text("?")),
        {"role": "assistant", "content": "yes"},
        user(image(URL_B, detail="auto"), text("again")),
    ]
    answer = seeing.post(CHAT, {"messages": messages, "max_tokens": 3, "n": 2}).json()
    (request,) = prepared
    expected = tokens(seeing, ("user", ["see ", 48, " and ", 16, "?"]), ("assistant", ["yes"]), ("user", [16, "again"]))
    assert request.prompt_token_ids == expected
    first, second, third = seen(request).images
    assert [one.num_features for one in (first, second, third)] == [48, 16, 16]
    assert all(expected[position] == IMAGE for one in (first, second, third) for position in one.positions)
    assert second.content_hash == third.content_hash != first.content_hash
    assert first.inputs["pixel_values"].shape == (192, 96)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(expected)
    assert usage["prompt_tokens_details"]["image_tokens"] == 80


def test_prompts_without_images_are_as_before(seeing: Served, prepared: list[PreparedRequest]) -> None:
    answer = seeing.post(CHAT, {"messages": [user(text("a <|image_pad|>"), text("b"))], "max_tokens": 1}).json()
    (request,) = prepared
    assert request.images is None and IMAGE not in request.prompt_token_ids
    assert "image_tokens" not in answer["usage"]["prompt_tokens_details"]


def test_marks_in_texts_stay_text(seeing: Served, prepared: list[PreparedRequest]) -> None:
    content = user(text("<|vision_start|><|image_pad|><|vision_end|>"), image(URL_A))
    assert seeing.post(CHAT, {"messages": [content], "max_tokens": 1}).status_code == 200
    assert prepared[0].prompt_token_ids.count(IMAGE) == 48


def test_all_image_details_except_low_take_the_same_tokens() -> None:
    from tests.support.image_serving import VISION

    with serve_seeing(max_model_len=4096, num_blocks=1024) as served:
        large = data_url(encoded(picture(1600, 1200, 3)))
        counts = {}
        for detail in ("low", "high", "auto", "original", None):
            body = {"messages": [user(image(large, **({"detail": detail} if detail else {})))]}
            counts[detail] = served.post("/tokenize", body).json()["tokens"].count(IMAGE)
        assert counts["high"] == counts["auto"] == counts["original"] == counts[None]
        assert VISION.max_image_tokens is not None and counts["high"] <= VISION.max_image_tokens


def test_responses(seeing: Served, prepared: list[PreparedRequest]) -> None:
    image_of_result = {"type": "input_image", "image_url": URL_B, "detail": "low"}
    items = [
        user({"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": URL_A}),
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [image_of_result]},
    ]
    answer = seeing.post(RESPONSES, {"input": items, "max_output_tokens": 2}).json()
    assert answer["usage"]["input_tokens_details"]["image_tokens"] == 64
    follow = {"input": "more", "previous_response_id": answer["id"], "max_output_tokens": 2}
    assert seeing.post(RESPONSES, follow).json()["usage"]["input_tokens_details"]["image_tokens"] == 64
    assert [one.num_features for one in seen(prepared[1]).images] == [48, 16]


def test_anthropic(seeing: Served, prepared: list[PreparedRequest]) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(A).decode()}
    result = [text("seen"), {"type": "image", "source": {"type": "url", "url": URL_B}}]
    messages = [
        user({"type": "image", "source": source}, text("what?")),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        user({"type": "tool_result", "tool_use_id": "1", "content": result}, text("and now?")),
    ]
    assert seeing.post(MESSAGES, {"model": MODEL, "messages": messages, "max_tokens": 2}).status_code == 200
    (request,) = prepared
    decoded = seeing.tokenizer.decode(request.prompt_token_ids).replace("<|image_pad|>", ".")
    dots = [len(part) for part in decoded.replace("<|vision_end|>", "<|vision_start|>").split("<|vision_start|>")[1::2]]
    assert dots == [48, 16] and "<|im_start|>tool\nseen<|vision_start|>" in decoded
    count = seeing.post(f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": messages}).json()
    assert count == {"input_tokens": len(request.prompt_token_ids)}


def test_ollama(seeing: Served, prepared: list[PreparedRequest]) -> None:
    images = [base64.b64encode(A).decode(), URL_B]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi", "images": images}], "stream": False}
    assert seeing.post(OLLAMA_CHAT, {**chat, "options": {"num_predict": 2}}).status_code == 200
    generate = {"model": MODEL, "prompt": "hi", "images": images, "stream": False, "options": {"num_predict": 2}}
    assert seeing.post(OLLAMA_GENERATE, generate).status_code == 200
    assert [request.prompt_token_ids for request in prepared] == [tokens(seeing, ("user", [48, 16, "hi"]))] * 2
    assert "vision" in seeing.post("/api/show", {"model": MODEL}).json()["capabilities"]


def test_tool_result_images_move_if_the_template_ignores_the_images() -> None:
    """Without roles for calls, results become user texts. With them, images follow in a user message."""
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    plain += "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    plain += "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    only_text = "{% if m.role == 'tool' %}{{ m.content if m.content is string else m.content[0].text }}"
    only_text += "{% elif m.tool_calls %}{{ m.tool_calls }}{% elif m.content is string %}"
    texts_only = plain.replace("{% if m.content is string %}", only_text)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        user(text("do it")),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("done"), image(URL_A)]},
    ]
    for template, expected in (
        (plain, "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|vision_start|>"),
        (texts_only, "tool\ndone<|im_end|>\n<|im_start|>user\nImages in the results of the calls:\n<|vision_start|>"),
    ):
        with serve_seeing(template) as served:
            for more in ([], [user(text("and?"), image(URL_B))]):
                answer = served.post("/tokenize", {"messages": [*messages, *more]}).json()
                written = served.tokenizer.decode(answer["tokens"])
                assert expected in written, written
                assert answer["tokens"].count(IMAGE) == 48 + 16 * len(more)


BAD = {
    "no image": ({"type": "image_url"}, "messages[1].content[1].image_url is required"),
    "text": (image("hello"), "messages[1].content[1].image_url.url must be a data URL"),
    "base64": (image("data:image/png;base64,a!b"), "messages[1].content[1].image_url.url is not valid base64"),
    "local file": (image("file:///etc/passwd"), "messages[1].content[1].image_url.url must be a data URL"),
    "download": (image("http://example.org/a.png"), "--allowed-media-domains"),
    "detail": (image(URL_A, detail="some"), "messages[1].content[1].image_url.detail must be one of low"),
    "audio": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "'input_audio' is not supported"),
    "video": ({"type": "video_url", "video_url": {"url": "data:,"}}, "'video_url' is not supported"),
}


@pytest.mark.parametrize("name", [*BAD, "bomb", "truncated PNG", "text"])
def test_errors_name_the_image(seeing: Served, name: str) -> None:
    if name in BAD:
        part, problem = BAD[name]
    else:
        data, reason = hostile_files()[name]
        part, problem = image(data_url(data)), reason
    response = seeing.post(CHAT, {"messages": [user(image(URL_A)), user(text("hi"), part)], "max_tokens": 1})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages", response.text
    assert problem in error["message"] and "messages[1].content[1]" in error["message"]


def test_other_apis_name_their_own_fields(seeing: Served) -> None:
    wrong, valid = "data:image/png;base64,aGVsbG8=", base64.b64encode(A).decode()
    sound = base64.b64encode(b"RIFF....WAVE").decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}

    def asked(path: str, *content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        limit = {"max_tokens": 1} if path is MESSAGES else {}
        return path, {"input" if path is RESPONSES else "messages": [user(*content)], **limit}

    def input_image(**fields: Any) -> tuple[str, dict[str, Any]]:
        return asked(RESPONSES, {"type": "input_image", **fields})

    for (path, body), problem in [
        (asked(MESSAGES, text("a"), block), "messages[0].content[1].source.data is not"),
        (asked(MESSAGES, result), "messages[0].content[0].content[0].source.data is not"),
        (
            asked(MESSAGES, {**block, "source": {"type": "base64", "data": 5}}),
            "content[0].source.data must be a string",
        ),
        (input_image(image_url=wrong), "input[0].content[0].image_url is not"),
        (input_image(file_id="a"), "input[0].content[0].image_url must be a string"),
        (input_image(image_url=wrong, detail=5), "input[0].content[0].detail must be a string"),
        (asked(CHAT, {"type": "image_url", "image_url": wrong}), "messages[0].content[0].image_url is not"),
        ((OLLAMA_CHAT, {"messages": [{"role": "user", "images": ["aGVsbG8="]}]}), "messages[0].images[0] is not"),
        ((OLLAMA_GENERATE, {"prompt": "a", "images": [valid, "aGVsbG8="]}), "images[1] is not"),
        ((OLLAMA_GENERATE, {"prompt": "a", "images": [sound]}), "images[0] is not"),
        *((asked(MESSAGES, {"type": kind}), f"'{kind}' are not supported here; send text and") for kind in MEDIA),
        *((asked(RESPONSES, {"type": f"input_{kind}"}), f"'input_{kind}' is not") for kind in MEDIA),
    ]:
        response = seeing.post(path, {"model": MODEL, **body})
        assert response.status_code == 400 and problem in response.text, response.text


def test_roles_without_images(seeing: Served) -> None:
    for role in ("system", "assistant"):
        response = seeing.post(CHAT, {"messages": [{"role": role, "content": [image(URL_A)]}, user(text("a"))]})
        assert response.status_code == 400 and f"role {role}" in response.text


def test_the_context_is_checked_after_expansion(seeing: Served) -> None:
    response = seeing.post(CHAT, {"messages": [user(*[image(URL_A)] * 11)], "max_tokens": 1})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    response = seeing.post(CHAT, {"messages": [user(image(URL_A))], "max_tokens": 480})
    assert "context" in response.json()["error"]["message"]
    response = seeing.post(CHAT, {"messages": [user(image(URL_A))], "truncate_prompt_tokens": 10})
    assert response.status_code == 400 and response.json()["error"]["param"] == "truncate_prompt_tokens"


def test_a_conversation_decodes_its_images_once(
    seeing: Served, prepared: list[PreparedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [user(image(data_url(encoded(picture(64, 48, 9)))), text("turn"))]
    assert seeing.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    preparer = seeing.engine.preparer.images
    assert isinstance(preparer, ImagePreparer)
    monkeypatch.setattr(preparer._decoder, "decode", None)
    for _ in range(2):
        messages += [{"role": "assistant", "content": "answer"}, user(text("more"))]
        answer = seeing.post(CHAT, {"messages": messages, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 48
    arrays = [seen(request).images[0].inputs["pixel_values"] for request in prepared]
    assert all(array is arrays[0] for array in arrays)


def test_metrics_of_images(seeing: Served) -> None:
    seeing.engine.metrics.image_encode_seconds = 1.5
    found = dict(re.findall(r"^metal_engine:(image\w+)\{.*\} (\S+)$", httpx.get(seeing.url + "/metrics").text, re.M))
    assert found.keys() >= {"images_encoded_total", "image_encode_seconds_total", "image_cache_hits_total"}
    assert found["image_encode_seconds_total"] == "1.5" and found["image_input"] == "1.0"


def test_the_number_of_images_is_limited(seeing: Served) -> None:
    response = seeing.post(CHAT, {"messages": [user(*[image("data:")] * 300)]})
    assert response.status_code == 400 and "messages[0].content[256].image_url.url is one too many" in response.text
    response = seeing.post(OLLAMA_CHAT, {"model": MODEL, "messages": [{"role": "user", "images": ["aGk="] * 5000}]})
    assert response.status_code == 400 and "messages[0].images[256] is one too many" in response.text


def test_a_template_without_images_is_named() -> None:
    with serve_seeing("{% for m in messages %}{{ m.content[0].text }}{% endfor %}") as served:
        response = served.post(CHAT, {"messages": [user(text("a"), image(URL_A))]})
        assert response.status_code == 400 and "wrote 0 images instead of 1" in response.text


def test_downloads_need_allowed_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    from metal_engine.media import sources

    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(sources, "fetch", lambda url, allowed: asked.append((url, allowed)) or A)
    with serve_seeing(args=ServerArgs(shutdown_timeout=1, allowed_media_domains=("example.org",))) as served:
        url = "https://example.org/a.png"
        answer = served.post(CHAT, {"messages": [user(image(url))], "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 48
        assert asked == [(url, ("example.org",))]


@pytest.mark.parametrize("name", ["read", "decode"])
def test_the_event_loop_answers_while_images_are_read_and_decoded(
    seeing: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The work on an image waits until the server has answered other requests."""
    started, answered = threading.Event(), threading.Event()
    method = getattr(ImagePreparer, name)

    def slow(*args: Any, **options: Any) -> Any:
        started.set()
        assert answered.wait(DEADLINE), "the event loop waits for the image"
        return method(*args, **options)

    monkeypatch.setattr(ImagePreparer, name, staticmethod(slow) if name == "read" else slow)
    body = {"messages": [user(image(data_url(encoded(picture(64, 48, 11)))))], "max_tokens": 1}
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(seeing.post, CHAT, body)
        assert started.wait(DEADLINE)
        for _ in range(3):
            assert httpx.get(f"{seeing.url}/health", timeout=DEADLINE / 2).status_code == 200
        assert seeing.post(CHAT, {"messages": [user(text("hi"))], "max_tokens": 2}).status_code == 200
        answered.set()
        assert waiting.result().status_code == 200


def test_images_delay_only_images(seeing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While images occupy all of their threads, other requests are served, and further images get a 503."""
    num_threads = Weight.IMAGES.value[1]
    started, answered = threading.Semaphore(0), threading.Event()
    decode = ImagePreparer.decode

    def slow(*args: Any, **options: Any) -> Any:
        started.release()
        assert answered.wait(DEADLINE), "other requests wait for images"
        return decode(*args, **options)

    monkeypatch.setattr(ImagePreparer, "decode", slow)
    body = {"messages": [user(image(URL_A))], "max_tokens": 1}
    with ThreadPoolExecutor(num_threads) as clients:
        waiting = [clients.submit(seeing.post, CHAT, body) for _ in range(num_threads)]
        assert all(started.acquire(timeout=DEADLINE) for _ in waiting)
        with_grammar = {**body, "messages": [user(text("hi"))], "response_format": {"type": "json_object"}}
        assert httpx.post(seeing.url + CHAT, json=with_grammar, timeout=DEADLINE / 2).status_code == 200
        for path in (CHAT, "/tokenize"):
            refused = seeing.post(path, body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded", refused.text
            assert refused.headers["retry-after"] == "1"
        answered.set()
        assert {request.result().status_code for request in waiting} == {200}
    assert seeing.post(CHAT, body).status_code == 200

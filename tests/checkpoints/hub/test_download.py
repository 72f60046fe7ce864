"""Downloads into the hub's cache: interrupted downloads resume, and the content is verified."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.utils import WeakFileLock

from metal_engine.checkpoints.cached_models import cached_models, plan_removal
from metal_engine.checkpoints.find import fetch_model
from metal_engine.checkpoints.hub import download as hub_download
from metal_engine.checkpoints.hub.repository import find_repo
from metal_engine.checkpoints.model_names import parse_hub_name
from metal_engine.errors import ModelLoadError
from tests.support.fake_hub import FakeHub, Repo, asked_hub

WEIGHTS = {"model-00001-of-00002.safetensors": b"abc" * 500_000, "model-00002-of-00002.safetensors": b"xyz" * 400_000}
TOTAL = sum(map(len, WEIGHTS.values()))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a repository of safetensors and one of GGUF files."""
    plain, gguf = tmp_path / "plain", tmp_path / "gguf"
    plain.mkdir()
    gguf.mkdir()
    (plain / "config.json").write_text('{"model_type": "llama"}')
    for name, content in WEIGHTS.items():
        (plain / name).write_bytes(content)
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf"):
        (gguf / name).write_bytes(name.encode() * 50_000)
    for i in (1, 2):
        (gguf / f"x-F16-0000{i}-of-00002.gguf").write_bytes(bytes(1_000 * i))
    with asked_hub({"org/plain": Repo(plain), "org/gguf": Repo(gguf)}, monkeypatch) as server:
        yield server


def pull(name: str, cache: Path) -> Path:
    return fetch_model(parse_hub_name(name), str(cache), lambda repo: None)


def blobs(cache: Path) -> Path:
    return cache / "models--org--plain" / "blobs"


def leave_partial(cache: Path, name: str, content: bytes) -> Path:
    """Write the files that a process leaves if it is killed while it downloads a file."""
    blobs(cache).mkdir(parents=True)
    part = blobs(cache) / f"{hashlib.sha256(WEIGHTS[name]).hexdigest()}.incomplete"
    part.write_bytes(content)
    return part


def sent_of(hub: FakeHub, name: str) -> int:
    return sum(num for path, num in hub.sent.items() if path.endswith(name))


def assert_whole(folder: Path) -> None:
    for name, content in WEIGHTS.items():
        assert (folder / name).read_bytes() == content


def test_a_killed_download_resumes_from_the_partial_file(hub: FakeHub, tmp_path: Path) -> None:
    cache, name = tmp_path / "cache", "model-00001-of-00002.safetensors"
    part = leave_partial(cache, name, WEIGHTS[name][:1_000_000])
    assert_whole(pull("org/plain", cache))
    assert sent_of(hub, name) == len(WEIGHTS[name]) - 1_000_000
    assert not part.exists() and not list(cache.rglob("*.incomplete"))
    before = hub.file_bytes
    assert_whole(pull("org/plain", cache))
    assert hub.file_bytes == before


def test_an_interrupt_ends_the_wait_for_another_process(hub: FakeHub, tmp_path: Path) -> None:
    repo, name = find_repo("org/plain", None), next(iter(WEIGHTS))
    sha256, folder, stop = hashlib.sha256(WEIGHTS[name]).hexdigest(), blobs(tmp_path), threading.Event()
    lock = tmp_path / ".locks" / folder.parent.name / f"{sha256}.lock"
    lock.parent.mkdir(parents=True)
    arguments = (repo, name, sha256, folder, lambda num_bytes: None, stop)
    with WeakFileLock(lock):
        waiting = threading.Thread(target=hub_download._fetch, args=arguments, daemon=True)
        waiting.start()
        stop.set()
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_download_resumes_after_a_broken_connection(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_download, "_CHUNK_BYTES", 1 << 14)
    hub.repos["org/plain"].cut_after = 700_000
    assert_whole(pull("org/plain", tmp_path / "cache"))
    # At most one chunk of each file was sent twice.
    assert TOTAL <= hub.file_bytes <= TOTAL + 2 * (1 << 14) + 1000


def test_files_download_from_a_hub_that_reports_no_sizes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = find_repo("org/plain", None)
    without = replace(repo, files={name: replace(file, size=0) for name, file in repo.files.items()})
    hub_download.download(without, list(WEIGHTS), str(tmp_path / "cache"))
    assert_whole(tmp_path / "cache" / "models--org--plain" / "snapshots" / repo.commit)


def test_a_download_fails_after_repeated_empty_responses(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses end without an error, and without content."""
    attempts: list[str] = []
    monkeypatch.setattr(hub_download, "_append", lambda repo, name, *rest: attempts.append(name))
    monkeypatch.setattr(hub_download, "_MAX_ATTEMPTS", 2)
    with pytest.raises(ModelLoadError, match="the hub sends no byte of model-0000"):
        pull("org/plain", tmp_path / "cache")
    assert max(map(attempts.count, attempts)) == 2


@pytest.mark.parametrize("length", [1_000_000, 2_000_000])
def test_a_part_that_is_no_part_of_the_file(hub: FakeHub, tmp_path: Path, length: int) -> None:
    """A damaged part is refused and removed. A part longer than the file is removed at once."""
    cache, name = tmp_path / "cache", "model-00001-of-00002.safetensors"
    part = leave_partial(cache, name, bytes(length))
    if length < len(WEIGHTS[name]):
        with pytest.raises(ModelLoadError, match=r"model-00001.* arrived damaged"):
            pull("org/plain", cache)
        assert not part.exists()
    assert_whole(pull("org/plain", cache))


def test_a_complete_model_beside_a_partial_file(hub: FakeHub, tmp_path: Path) -> None:
    """Another program, or the download of another revision, may leave a partial file."""
    folder = pull("org/plain", tmp_path)
    (blobs(tmp_path) / "x.incomplete").write_bytes(bytes(1000))

    def listed() -> tuple[int, bool]:
        (model,) = (model for model in cached_models(str(tmp_path)) if model.name == "org/plain")
        return model.size, model.is_complete

    size = sum(path.stat().st_size for path in folder.iterdir())
    assert listed() == (size, True)
    gone = folder / "model-00001-of-00002.safetensors"
    index = {"weight_map": {str(i): name for i, name in enumerate(WEIGHTS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    gone.unlink()
    assert not listed()[1]


def test_a_split_gguf_model_is_listed_and_removed_as_one(hub: FakeHub, tmp_path: Path) -> None:
    """Another program has downloaded it."""
    cache = tmp_path / "cache"
    snapshot_download("org/gguf", cache_dir=cache, allow_patterns="x-*-of-*")
    (size,) = (model.size for model in cached_models(str(cache)) if model.name == "org/gguf:F16")
    removal = plan_removal("org/gguf:F16", str(cache))
    removal.execute()
    assert size == removal.size == 3_000
    assert not list(cache.rglob("*-of-*"))


def test_a_full_disk_is_noticed_before(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": TOTAL - 1})
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelLoadError, match=r"no space for org/plain: it needs 3 MiB more.* has 3 MiB free"):
        pull("org/plain", tmp_path / "cache")
    assert hub.file_bytes == 0


def test_one_gguf_file_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = pull("org/gguf:q8_0", cache)
    assert path.name == "x-Q8_0.gguf" and path.read_bytes() == b"x-Q8_0.gguf" * 50_000
    assert sent_of(hub, "x-Q4_K_M.gguf") == 0
    assert pull("org/gguf", cache).name == "x-Q4_K_M.gguf"
    assert [model.name for model in cached_models(str(cache)) if "/" in model.name] == [
        "org/gguf:Q4_K_M",
        "org/gguf:Q8_0",
    ]


def test_removal(hub: FakeHub, tmp_path: Path) -> None:
    """Remove a file, then a repository, but never the target of a link."""
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    pull("org/gguf:Q8_0", cache)
    pull("org/gguf", cache)
    folder = pull("org/plain", cache)
    outside.mkdir()
    (outside / "kept.txt").write_text("kept")
    (folder / "link").symlink_to(outside)
    (folder / "kept.txt").symlink_to(outside / "kept.txt")
    removal = plan_removal("org/gguf:q8_0", str(cache))
    assert removal.size == len(b"x-Q8_0.gguf") * 50_000
    removal.execute()
    assert [path.name for path in cache.rglob("*.gguf")] == ["x-Q4_K_M.gguf"]
    plan_removal("ORG/plain", str(cache)).execute()
    assert not (cache / "models--org--plain").exists()
    assert (outside / "kept.txt").read_text() == "kept"
    assert {repo.repo_id for repo in scan_cache_dir(cache).repos} == {"org/gguf"}
    for name, message in [
        ("org/plain", "org/plain is not in the cache"),
        ("org/guff", r"did you mean org/gguf\?"),
        ("org/gguf:Q2_K", "no Q2_K GGUF file in the cache; there are Q4_K_M"),
        ("org/gguf@v9", "no revision 'v9' in the cache; there are main"),
    ]:
        with pytest.raises(ModelLoadError, match=message):
            plan_removal(name, str(cache))
    elsewhere = tmp_path / "elsewhere"
    (cache / "models--org--gguf").rename(elsewhere)
    (cache / "models--org--gguf").symlink_to(elsewhere)
    with pytest.raises(ModelLoadError, match="is a link to"):
        plan_removal("org/gguf", str(cache))
    assert list(elsewhere.rglob("*.gguf"))


def test_an_interrupted_download_is_listed_and_can_be_removed(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    repo = find_repo("org/plain", None)

    def interrupt(*_: object) -> None:
        (blobs(cache) / "abc.incomplete").write_bytes(bytes(100))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_download, "_fetch_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hub_download.download(repo, list(repo.files), str(cache))
    (model,) = [model for model in cached_models(str(cache)) if model.name == "org/plain"]
    assert not model.is_complete
    plan_removal("org/plain", str(cache)).execute()
    assert not list(cache.rglob("*.incomplete"))

"""Tests settings from the command line, the environment and a YAML file: precedence, kinds, and sources in errors."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.chat_args import ChatArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.settings.fields import ENV_PREFIX, make_args, parse_count, parse_size, settings_of
from metal_engine.settings.multi_model import per_model_args, refuse_for_one_model
from metal_engine.settings.resolve import plans_ahead
from metal_engine.settings.server_args import ServerArgs
from metal_engine.settings.sources import CONSTANTS, read_settings

SETTINGS = settings_of(ServerArgs, EngineArgs)
BY_NAME = {one.name: one for one in SETTINGS}


# Given text and value of each kind of setting.
OF_KIND: dict[str, tuple[str, Any]] = {
    "int": ("7", 7), "count": ("7", 7), "float": ("0.5", 0.5), "size": ("2KiB", 2048), "bool": ("true", True),
    "str": ("x", "x"), "list": ("x", ("x",)), "json": ("x", "x"),
}  # fmt: skip


def resolve(
    command_line: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    yaml: str | None = None,
    tmp_path: Path | None = None,
) -> dict[str, Any]:
    file = None
    if yaml is not None:
        assert tmp_path is not None
        file = tmp_path / "config.yaml"
        file.write_text(yaml)
    return read_settings(SETTINGS, command_line or {}, environ or {}, file, known=settings_of(ChatArgs))


def test_precedence(tmp_path: Path) -> None:
    environ = {"METAL_ENGINE_PORT": "2", "METAL_ENGINE_HOST": "env", "HOME": "/"}
    yaml = "port: 1\nhost: file\nmax-num-seqs: 5\n"
    values = resolve({"port": "3"}, environ, yaml, tmp_path)
    assert values == {"port": 3, "host": "env", "max_num_seqs": 5}
    args = make_args(ServerArgs, values)
    assert (args.port, args.host, args.api_key) == (3, "env", ())
    assert make_args(EngineArgs, {"model": "m", **values}).max_num_seqs == 5


@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.name)
def test_every_setting_from_everywhere(one: Any, tmp_path: Path) -> None:
    given, wanted = OF_KIND[one.kind]
    if one.choices:
        given = wanted = one.choices[-1]
    key = one.flag.removeprefix("--")
    if one.has_flag:
        assert resolve({one.name: given}) == {one.name: wanted}
    else:
        with pytest.raises(ConfigError, match=f"^{one.flag} is now a field of the config file: {key}: "):
            resolve({one.name: given})
    assert resolve(None, {one.variable: given}) == {one.name: wanted}
    assert resolve(None, None, f"{key}: {given}", tmp_path) == {one.name: wanted}
    assert resolve(None, None, f"{one.name}: {given}", tmp_path) == {one.name: wanted}
    assert one.help.endswith(".")


def test_a_removed_flag_shows_the_line_of_the_config_file() -> None:
    for given, line in (
        ({"sse_keep_alive": "15"}, "sse-keep-alive: 15"),
        ({"allow_special_tokens_in_content": False}, "allow-special-tokens-in-content: false"),
        ({"ssl_keyfile_password": "hidden"}, "ssl-keyfile-password: TEXT"),
    ):
        with pytest.raises(ConfigError, match=f"{line}$"):
            resolve(given)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_former_setting_is_a_constant(name: str, tmp_path: Path) -> None:
    for given, place in (
        (({name: "8"}, None, None), f"^--{name.replace('_', '-')} is now a constant: "),
        ((None, {ENV_PREFIX + name.upper(): "8"}, None), f"^METAL_ENGINE_{name.upper()} is now a constant: "),
        ((None, None, f"{name}: 8"), f"config.yaml: {name} is now a constant: "),
    ):
        with pytest.raises(ConfigError, match=place):
            resolve(*given, tmp_path)


def test_errors_of_settings_without_a_flag_name_the_key() -> None:
    for cls in (ServerArgs, EngineArgs):
        for one in settings_of(cls):
            if not one.has_flag and "ge" in one.bounds:
                with pytest.raises(ConfigError, match=f"^{one.key} must be at least"):
                    cls(**{"model": "m"} if cls is EngineArgs else {}, **{one.name: one.bounds["ge"] - 1})


def test_every_field_is_a_setting() -> None:
    for cls in (ServerArgs, EngineArgs, ChatArgs):
        assert {field.name for field in dataclasses.fields(cls)} - {"model"} == {one.name for one in settings_of(cls)}


def test_lists(tmp_path: Path) -> None:
    assert resolve({"served_model_name": ["a", "b,c"]}) == {"served_model_name": ("a", "b,c")}
    assert resolve(None, {"METAL_ENGINE_SERVED_MODEL_NAME": "a, b"}) == {"served_model_name": ("a", "b")}
    module = '{"name": "a", "path": "b"}'
    assert resolve(None, {"METAL_ENGINE_LORA_MODULES": module}) == {"lora_modules": (module,)}
    assert resolve(None, None, "served_model_name: [a, b]", tmp_path) == {"served_model_name": ("a", "b")}


def test_settings_of_other_commands_are_ignored(tmp_path: Path) -> None:
    assert resolve(None, {"METAL_ENGINE_SYSTEM": "x"}, "temperature: 0.5", tmp_path) == {}


def test_empty_environment_and_yaml_values_are_ignored(tmp_path: Path) -> None:
    assert resolve(None, {"METAL_ENGINE_PORT": ""}, "# nothing\n", tmp_path) == {}
    assert resolve(None, None, "port:\n", tmp_path) == {}


@pytest.mark.parametrize(("yaml", "message"), [
    ("prot: 1", "config.yaml: unknown setting 'prot'; did you mean port?"),
    ("max_modellen: 1", "did you mean max-model-len?"),
    ("3: 4", "unknown setting '3'"),
    ("port: [1]", "config.yaml: port must be a whole number, got [1]"),
    ("port: yes", "port must be a whole number, got True"),
    ("port: 1.5", "port must be a whole number"),
    ("host: {a: b}", "host must be a text"),
    ("dtype: int3", "dtype must be one of auto, float32, float16, bfloat16, got 'int3'"),
    ("strict-params: maybe", "strict-params must be true or false"),
    ("kv-cache-memory-bytes: lots", "kv-cache-memory-bytes must be a size such as 2GiB"),
    ("port: 1\nport_: 2", "unknown setting 'port_'"),
    ("max-num-seqs: 1\nmax_num_seqs: 2", "given twice"),
    ("port: 1\nhost: a\nport: 2", "given twice"),
    ("- port", "must contain `flag: value` lines, not a list"),
    ("port: 'a", "is not valid YAML"),
    ("revision: 2024-02-30", "is not valid YAML: day is out of range"),
    ("a: &a [*a]", "unknown setting"),
    ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
])  # fmt: skip
def test_bad_files(yaml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as info:
        resolve(None, None, yaml, tmp_path)
    assert message in str(info.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read --config"):
            read_settings(SETTINGS, {}, {}, path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_settings(SETTINGS, {}, {}, binary)


def test_bad_variables_and_flags() -> None:
    with pytest.raises(ConfigError, match="METAL_ENGINE_PROT; did you mean METAL_ENGINE_PORT"):
        resolve(None, {"METAL_ENGINE_PROT": "1"})
    with pytest.raises(ConfigError, match="environment variable METAL_ENGINE_PORT must be a whole number"):
        resolve(None, {"METAL_ENGINE_PORT": "tcp://10.0.0.1:80"})
    with pytest.raises(ConfigError, match="--port must be a whole number, got 'x'") as caught:
        resolve({"port": "x"})
    assert caught.value.flag == "--port"
    assert resolve(None, {"METAL_ENGINE_CACHE": "x", "METAL_ENGINE_BLAS": "none", "OTHER": ""}) == {}


def test_secrets_stay_secret() -> None:
    key = BY_NAME["api_key"]
    with pytest.raises(ConfigError, match="--api-key") as info:
        read_settings([key], {"api_key": [{"hidden": 1}]}, {})
    assert "hidden" not in str(info.value)
    # Set but empty is a mistake, which must not leave the server open.
    with pytest.raises(ConfigError, match="--api-key"):
        make_args(ServerArgs, resolve(None, {"METAL_ENGINE_API_KEY": ""}))


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1073741824", 1 << 30), ("2GiB", 2 << 30), ("2gib", 2 << 30), ("2 Gi", 2 << 30), ("1.5GiB", 3 << 29),
     ("512MB", 512_000_000), ("512M", 512 << 20), ("512m", 512_000_000), ("16KiB", 16384), ("1TiB", 1 << 40),
     ("7B", 7)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "2 Gigs", "1,000", "0x10", "1i", "1ib", "nan", "1..5G", "1.5"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("7.0", 7), ("4k", 4000), ("4.1k", 4100), ("4K", 4096), ("1.5K", 1536), ("2m", 2_000_000),
     ("1M", 1 << 20)],
)  # fmt: skip
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "4kb", "4KiB", "-4k", "4.5.6k", "1e3", "1.5", "4096.7", "0.0001k"])
def test_no_counts(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)


@pytest.mark.parametrize(("arguments", "flag"), [
    ({"port": -1}, "--port"),
    ({"port": 65536}, "--port"),
    ({"max_body_size": 0}, "--max-body-size"),
    ({"shutdown_timeout": -1.0}, "--shutdown-timeout"),
    ({"shutdown_timeout": float("nan")}, "--shutdown-timeout"),
    ({"api_key": " "}, "--api-key"),
    ({"api_key": "schlüssel"}, "--api-key"),
    ({"api_key": ("key", "key ")}, "--api-key"),
    ({"api_key": "a\nb"}, "--api-key"),
    ({"served_model_name": ("a", "")}, "--served-model-name"),
])  # fmt: skip
def test_bad_server_settings_name_the_flag(arguments: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        ServerArgs(**arguments)
    assert caught.value.flag is not None and caught.value.flag in str(caught.value)


HIDDEN_NAMES = ["a\nb", "a\0b", "a\x1b[31m", "a\x7f", "invoice\u202efdp", "a\u2066b", "a\u200bb", "a\u2028b", "\ud800"]
VISIBLE_NAMES = ["demo", "org/model-7B@rev:Q4_K_M", "a name", "a$(cmd)'\"`;", "Übung", "模型", "🦙", "❤\ufe0f"]
BLANK_NAMES = [
    "", " ", "   ", " a", "a ", "\u3164", "\u2800", "a\u2800b", "a\u115f", "\u1160", "\uffa0a", "a\u00a0b", "\u3000",
]  # fmt: skip
BLANK_NAMES += ["a\ue000", "\u2029", "\ufe0f", "\u0301 "]


@pytest.mark.parametrize("name", [*HIDDEN_NAMES, *BLANK_NAMES])
def test_names_are_visible(name: str) -> None:
    """The error names a hidden character by its code."""
    makers = [
        (lambda: ServerArgs(served_model_name=("b", name)), "--served-model-name"),
        (lambda: EngineArgs(model="m", lora_modules={name: "path"}), "--lora-modules"),
    ]
    code = ""
    if name in HIDDEN_NAMES:
        code = next(f"U+{ord(char):04X}" for char in name if not char.isprintable())
        makers.append((lambda: EngineArgs(model="m", lora_modules=(f"x{name}x=path",)), "--lora-modules"))
    for make, flag in makers:
        with pytest.raises(ConfigError, match=re.escape(code)) as caught:
            make()
        assert caught.value.flag == flag and str(caught.value).isascii() and "\n" not in str(caught.value)


def test_visible_names() -> None:
    assert ServerArgs(served_model_name=tuple(VISIBLE_NAMES)).served_model_name == tuple(VISIBLE_NAMES)
    assert EngineArgs(model="m", lora_modules=dict.fromkeys(VISIBLE_NAMES, "path")).num_slots() == len(VISIBLE_NAMES)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ConfigError, match="--seed"):
        EngineArgs(model="m", seed=seed)


# --- ranks ---


def test_there_is_one_rank_by_default() -> None:
    assert EngineArgs(model="m", kv_cache_dir="somewhere", enable_lora=True).num_ranks == 1


@pytest.mark.parametrize(
    ("name", "flag"), [("tensor", "--tensor-parallel-size"), ("pipeline", "--pipeline-parallel-size")]
)
def test_either_flag_makes_ranks(name: str, flag: str) -> None:
    args = EngineArgs(model="m", **{f"{name}_parallel_size": 3})  # type: ignore[arg-type]
    assert (args.num_ranks, args.ranks_flag) == (3, flag)


@pytest.mark.parametrize(("flag", "value"), [
    ("--pipeline-parallel-size", 2),
    ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
    ("--kv-cache-dir", "somewhere"),
    ("--kv-transfer-config", "{}"),
    ("--lora-modules", ("a=b",)),
    ("--enable-lora", True),
])  # fmt: skip
def test_flags_incompatible_with_tensor_parallelism_are_refused_by_name(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} .*--tensor-parallel-size") as error:
        EngineArgs(model="m", tensor_parallel_size=2, **{flag[2:].replace("-", "_"): value})
    assert error.value.flag == flag


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 0}, {"distributed_timeout_seconds": 0.0}])
def test_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineArgs(model="m", **settings)


def test_several_models_have_one_rank_each() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is for one model"):
        refuse_for_one_model(EngineArgs(model="m", tensor_parallel_size=2))


# --- steps planned ahead ---


NGRAM = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 4})}
DRAFT_MODEL = {
    "speculative_config": json.dumps({"method": "draft_model", "model": "small", "num_speculative_tokens": 3})
}


@pytest.mark.parametrize(
    ("given", "on_metal"),
    [({}, True), (NGRAM, True), (DRAFT_MODEL, False), ({"tensor_parallel_size": 2}, False)],
    ids=["plain", "ngram", "draft model", "ranks"],
)
def test_async_planning_is_on_only_on_metal_without_draft_model_or_ranks(given: dict[str, Any], on_metal: bool) -> None:
    args = EngineArgs(model="model", **given)
    assert plans_ahead(args, "metal") == on_metal
    assert not plans_ahead(args, "cpu")


@pytest.mark.parametrize("kind", ["metal", "cpu"])
@pytest.mark.parametrize("given", [True, False])
def test_the_flag_decides(kind: str, given: bool) -> None:
    assert plans_ahead(EngineArgs(model="model", async_scheduling=given, **DRAFT_MODEL), kind) == given


def test_each_of_several_models_plans_ahead() -> None:
    device = DeviceInfo(kind="metal", name="GPU", compute="GPU", memory_bytes=1 << 34)
    assert plans_ahead(per_model_args(EngineArgs(model="model"), 1 << 33, device), device.kind)

"""Names of models, and the files of a repository that they select."""

from __future__ import annotations

import pytest

from metal_engine.checkpoints.hub.preflight import choose_gguf
from metal_engine.checkpoints.model_names import HubName, did_you_mean, gguf_models, is_local, parse_hub_name
from metal_engine.errors import ModelLoadError


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None, None)),
        ("gpt2", ("gpt2", None, None)),
        ("org/x:Q4_K_M", ("org/x", None, "Q4_K_M")),
        ("org/x@v1.0", ("org/x", "v1.0", None)),
        ("org/x@refs/pr/1:q8_0", ("org/x", "refs/pr/1", "q8_0")),
        ("org/x:", ("org/x:", None, None)),
        ("not a name", ("not a name", None, None)),
    ],
)
def test_parts_of_a_name(name: str, parts: tuple[str, str | None, str | None]) -> None:
    assert parse_hub_name(name) == HubName(*parts)


def test_a_name_that_the_system_refuses_to_look_up() -> None:
    assert not is_local("x" * 5_000)


def test_names_of_files_in_upper_case() -> None:
    assert is_local("nowhere/M.gguf") and is_local("nowhere/M.GGUF") and not is_local("nowhere/M")


# Names as on the hub.
FILES = [
    "README.md",
    *(f"Llama-3.2-1B-Instruct-{quantization}.gguf" for quantization in ("Q4_K_M", "Q4_K_S", "IQ4_XS", "f16")),
    "llama-3.2-1b-instruct-q8_0.gguf",
    "Llama-3.2-1B-Instruct-UD-Q2_K_XL.gguf",
    "BF16/Llama-3.2-1B-Instruct-BF16-00001-of-00002.gguf",
    "BF16/Llama-3.2-1B-Instruct-BF16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
    "Llama-3.2-1B-Instruct.mmproj-Q8_0.gguf",
    "Llama-3.2-1B-Instruct.imatrix.gguf",
    "._llama-3.2-1b-instruct-q8_0.gguf",
]


def test_quantizations_in_names_of_files() -> None:
    found = {model.quantization: (model.name, model.num_parts) for model in gguf_models(FILES)}
    assert sorted(found) == ["BF16", "F16", "IQ4_XS", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q2_K_XL"]
    assert found["BF16"] == (FILES[7], 2)
    assert next(model.files for model in gguf_models(FILES) if model.num_parts > 1) == (FILES[7], FILES[8])
    assert [model.quantization for model in gguf_models(["model.gguf", "SmolLM2.Q4_1.gguf"])] == ["Q4_1", ""]
    assert [model.quantization for model in gguf_models(["x-Q4_0-imatrix.gguf"])] == ["Q4_0"]


def chosen(name: str, files: list[str] = FILES) -> str | None:
    model = choose_gguf(parse_hub_name(name), files, lambda file: 1 << 30)
    return None if model is None else model.name


def test_a_quantization_chooses_a_file() -> None:
    assert chosen("o/x:q4_k_m") == chosen("o/x") == FILES[1] and chosen("o/x:F16") == FILES[4]
    assert chosen("o/x:Q8_0") == FILES[5]
    assert chosen("o/x:Q2_K_XL") == chosen("o/x:UD-Q2_K_XL") == FILES[6]
    assert chosen("o/x", ["only.gguf", "README.md"]) == "only.gguf"
    assert chosen("o/x", [*FILES, "config.json", "model.safetensors"]) is None
    assert chosen("o/x:Q4_K_M", [*FILES, "config.json", "model.safetensors"]) == FILES[1]
    assert chosen("o/x", ["config.json", "model.safetensors"]) is None


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("o/x:Q5_K_M", FILES, r"no Q5_K_M GGUF file; there are BF16 \(2.00 GiB\), IQ4_XS .*Q4_K_M"),
        ("o/x:Q4_K", FILES, "no Q4_K GGUF file"),
        ("o/x", [*FILES[2:]], "no Q4_K_M GGUF file, the default for a name without a quantization; there are .*Q4_K_S"),
        ("o/x:bf16", FILES, "one of 2 parts.*there are .*Q8_0"),
        ("o/x:Q8_0", [*FILES, "other-Q8_0.gguf"], "2 GGUF files of Q8_0: llama-3.2-1b.*, other-Q8_0.gguf"),
        ("o/x:Q8_0", ["model.safetensors"], "no GGUF files"),
    ],
)
def test_the_error_for_a_missing_or_ambiguous_gguf_file_lists_files(name: str, files: list[str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        chosen(name, files)


def test_did_you_mean() -> None:
    known = ["Qwen/Qwen3-0.6B", "mlx-community/Llama-3.2-1B-Instruct-4bit"]
    assert did_you_mean("demoo", known) == "; did you mean demo?"
    assert did_you_mean("Demo", known) == "; did you mean demo?"
    assert did_you_mean("Qwen3-0.6b", known) == "; did you mean Qwen/Qwen3-0.6B?"
    assert did_you_mean("Qwen/Qwen3-0.6", known) == "; did you mean Qwen/Qwen3-0.6B?"
    assert did_you_mean("mistralai/Mistral-7B", known) == "" and did_you_mean("demo", known) == ""

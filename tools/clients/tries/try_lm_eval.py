"""Tries EleutherAI's lm-evaluation-harness on a custom task that needs no download.

Asks three multiple-choice questions (log likelihoods of given texts) with the server's tokenizer. Requests three
completions twice: with the server's tokenizer, and without a tokenizer in lm-eval.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tried import KEY, MODEL, URL, expect, run, try_all

FOLDER = Path(tempfile.mkdtemp(prefix="lm-eval-"))
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
DATASET = """\
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/capitals.jsonl}}
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
target_delimiter: " "
"""
CHOOSE = """\
task: capitals_choose
output_type: multiple_choice
doc_to_choice: [Paris, Rome, Tokyo]
doc_to_target: "{{city}}"
metric_list: [{metric: acc}]
"""
GENERATE = """\
task: capitals_generate
output_type: generate_until
doc_to_target: "{{city}}"
generation_kwargs: {until: [".", ",", "\\n"], max_gen_toks: 8, temperature: 0, do_sample: false}
filter_list: [{name: strip, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""


def write_tasks() -> None:
    lines = [json.dumps({"country": country, "city": city}) for country, city in CAPITALS.items()]
    (FOLDER / "capitals.jsonl").write_text("\n".join(lines) + "\n")
    for name, task in (("choose", CHOOSE), ("generate", GENERATE)):
        (FOLDER / f"{name}.yaml").write_text(task + DATASET.format(folder=FOLDER))


def evaluate(task: str, metric: str, tokenizer: str) -> None:
    arguments = f"model={MODEL},base_url={URL}/v1/completions,max_retries=1,max_length=1024,{tokenizer}"
    output = FOLDER / tokenizer.partition("=")[2].partition(",")[0] / task
    options = ("--tasks", task, "--include_path", str(FOLDER), "--output_path", str(output), "--batch_size", "1")
    run(
        *("lm_eval", "run", "--model", "local-completions", "--model_args", arguments, *options),
        OPENAI_API_KEY=KEY,
        HF_HOME=str(FOLDER / "cache"),
        HF_HUB_OFFLINE="1",
    )
    (results,) = output.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"][task]
    (score,) = (value for name, value in scores.items() if name.startswith(f"{metric},"))
    expect(score >= 0.66, scores)


def loglikelihood_remote_tokenizer() -> None:
    evaluate("capitals_choose", "acc", "tokenizer_backend=remote")


def generate_until_remote_tokenizer() -> None:
    evaluate("capitals_generate", "exact_match", "tokenizer_backend=remote")


def generate_until_no_tokenizer() -> None:
    evaluate("capitals_generate", "exact_match", "tokenizer_backend=None,tokenized_requests=False")


if __name__ == "__main__":
    write_tasks()
    try_all(loglikelihood_remote_tokenizer, generate_until_remote_tokenizer, generate_until_no_tokenizer)

"""Serves the scripted model: the real server and engine on a tiny model whose logits follow the script.

    python -m tools.agents.scripted_model FORMAT FOLDER LOG [arguments of `metal-engine serve`]

Prompts, KV cache, grammar masks and sampling are computed as with any other model. Before sampling, a large number is
added to the logit of the script's next token. If a mask excludes this token, the output differs from the script.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from tools.agents.formats import FORMATS, Call, Format
from tools.agents.script import next_output
from tools.fixtures.hf_checkpoints import CONFIGS, write_hf

if TYPE_CHECKING:
    import mlx.core as mx
    from transformers import PreTrainedTokenizerFast

    from metal_engine.runner.batch import PackedBatch, RequestTable
    from metal_engine.runner.step_sampling import StepSampling
    from metal_engine.step import NewRequestData, SchedulerOutput

_BONUS = 10_000.0
_MAX_MODEL_LEN = 262_144
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class LoggedRequest:
    """A request as the model has seen it.

    Attributes:
        time: time of its first step, in seconds since the epoch.
        turn: number of the turn; None for a request without a task, for example for a title.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_known_tokens: length of the longest prefix that the prompt has in common with the tokens (prompt and output)
            of an earlier request.
        num_earlier_tokens: number of tokens (prompt and output) of that earlier request; 0 if there is none.
        num_output_tokens: length of the scripted output.
        content: text for the user.
        calls: names and arguments of the calls.
        reasoning: reasoning before the content.
        was: text of the earlier request after the common prefix, at most 120 characters; empty if the prompt continues
            the whole earlier request.
        now: text of the prompt after the common prefix, at most 120 characters; empty if the prompt continues the whole
            earlier request, or ends with the prefix.
    """

    time: float
    turn: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_known_tokens: int
    num_earlier_tokens: int
    num_output_tokens: int
    content: str
    calls: tuple[Call, ...]
    reasoning: str
    was: str
    now: str


@dataclass
class Script:
    """Scripted output tokens of all requests, by request id.

    Attributes:
        tokenizer: the model's tokenizer.
        answer_format: format of prompts and outputs.
        log: file to which a line of JSON is written for each request.
    """

    tokenizer: Tokenizer
    answer_format: Format
    log: Path
    _outputs: dict[str, list[int]] = field(default_factory=dict)
    _earlier: list[np.ndarray] = field(default_factory=list)

    def begin(self, new: NewRequestData) -> None:
        """Determine the output of a new request and write the request to the log.

        A request that resumes after preemption keeps its output and is not logged again.
        """
        if new.request_id in self._outputs:
            return
        prompt = np.array(new.token_ids[: new.num_prompt_tokens], np.int32)
        text = self.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        output = next_output(text, self.answer_format)
        tokens = self.tokenizer.encode(output.text + output.end, add_special_tokens=False).ids
        self._outputs[new.request_id] = tokens
        num_known, earlier = self._common_prefix(prompt)
        diverges = num_known < len(earlier)
        logged = LoggedRequest(
            time=time.time(),
            turn=output.turn,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=new.num_computed_tokens,
            num_known_tokens=num_known,
            num_earlier_tokens=len(earlier),
            num_output_tokens=len(tokens),
            content=output.content,
            calls=output.calls,
            reasoning=output.reasoning,
            was=self._shown(earlier[num_known:]) if diverges else "",
            now=self._shown(prompt[num_known:]) if diverges else "",
        )
        self._earlier.append(np.concatenate([prompt, np.array(tokens, np.int32)]))
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(logged)) + "\n")

    def _common_prefix(self, prompt: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the length of the longest prefix in common with an earlier request, and that request's tokens.

        If several requests have this prefix, the latest is chosen. Without earlier requests, the tokens are empty.
        """
        best, of = 0, np.empty(0, np.int32)
        for earlier in self._earlier:
            shared = min(len(prompt), len(earlier))
            differing = np.flatnonzero(prompt[:shared] != earlier[:shared])
            length = int(differing[0]) if len(differing) else shared
            if length >= best:
                best, of = length, earlier
        return best, of

    def _shown(self, tokens: np.ndarray) -> str:
        text: str = self.tokenizer.decode(tokens[:_SHOWN_CHARACTERS].tolist(), skip_special_tokens=False)
        return text[:_SHOWN_CHARACTERS]

    def token(self, request_id: str, position: int) -> int:
        """Return the token at a position of a request's output; its last token if the position is beyond the end."""
        tokens = self._outputs[request_id]
        return tokens[min(position, len(tokens) - 1)]


def scripted_sampling(script: Script) -> type[StepSampling]:
    """Return a subclass of :class:`StepSampling` with which each request generates its tokens of ``script``. Loads MLX.

    A large number is added to the logit of each row's scripted token before sampling.
    """
    import mlx.core as mx

    from metal_engine.runner.step_sampling import StepSampling

    class ScriptedSampling(StepSampling):
        def __init__(self, table: RequestTable, plan: SchedulerOutput, batch: PackedBatch, **options: Any) -> None:
            super().__init__(table, plan, batch, **options)
            for new in plan.new_requests:
                if new.pooling_params is None:
                    script.begin(new)
            requests = [self._row(row)[0] for row in range(len(self._positions))]
            positions = self._positions.tolist()
            self._scripted = [script.token(*one) for one in zip(requests, positions, strict=True)]

        def build(self, logits: mx.array, *, is_dispatched: bool) -> None:
            if self._scripted:
                rows = mx.arange(len(self._scripted))
                logits = logits.at[rows, mx.array(self._scripted)].add(_BONUS)
            super().build(logits, is_dispatched=is_dispatched)

    return ScriptedSampling


def write_checkpoint(folder: Path, tokenizer: PreTrainedTokenizerFast, answer_format: Format) -> Path:
    """Write a tiny model with random weights and ``tokenizer`` to ``folder``. Return the model's path.

    The marks and the template of the format are added to ``tokenizer`` itself.
    """
    known = tokenizer.get_vocab()
    for marks, special in ((answer_format.special, True), (answer_format.added, False)):
        tokenizer.add_tokens([mark for mark in marks if mark not in known], special_tokens=special)
    tokenizer.chat_template = answer_format.template
    tokenizer.save_pretrained(folder)
    config = {
        **CONFIGS["llama"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": _MAX_MODEL_LEN,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.convert_tokens_to_ids([answer_format.end, answer_format.call_end]),
        "torch_dtype": "float32",
    }
    return write_hf(folder, config)


def read_script(folder: Path, log: Path, answer_format: Format) -> Script:
    """Return the script for a checkpoint of :func:`write_checkpoint`."""
    return Script(Tokenizer.from_file(str(folder / "tokenizer.json")), answer_format, log)


def main() -> None:
    from metal_engine.cli.main import app
    from metal_engine.device.blas.load import load_optimized_blas

    name, folder, log, *arguments = sys.argv[1:]
    load_optimized_blas()  # before the import below, which loads MLX
    from metal_engine.runner import model_runner

    script = read_script(Path(folder), Path(log), FORMATS[name])
    model_runner.StepSampling = scripted_sampling(script)  # type: ignore[misc]
    app(["serve", folder, *arguments])


if __name__ == "__main__":
    main()

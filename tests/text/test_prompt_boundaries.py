"""Places at which prompts share a prefix with later prompts: after instructions, and before generation prompts."""

from __future__ import annotations

import pytest

from metal_engine.sampling_params import SamplingParams
from metal_engine.text.prompt_boundaries import PromptBoundaries
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

# As in Qwen's templates: an answer starts with reasoning, which is removed from the history.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "what is it?"}]


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_each_way_to_ask_is_known(switch: str) -> None:
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


def test_the_second_conversation_with_the_same_instructions_hits() -> None:
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
        prompt = engine.tokenizer.apply_chat_template(messages)
        (outputs,) = run_all(engine, [(prompt, params)])
        num_cached = outputs[-1].num_cached_tokens
        assert lasting - 4 < num_cached <= lasting or turn == 0, (turn, num_cached, lasting)
        lasting = len(engine.tokenizer.apply_chat_template(messages, add_generation_prompt=False))
        assert token_ids(outputs)
        messages.append({"role": "assistant", "content": f"answer {turn}"})  # without the reasoning

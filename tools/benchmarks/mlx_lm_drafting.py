"""Runs mlx-lm's speculative decoding on prompts of token ids, for comparison in ``tools.benchmarks.speculation``.

    python -m tools.benchmarks.mlx_lm_drafting < request.json

Runs in its own process, because metal-engine patches functions of mlx-lm. The JSON on stdin has ``model`` and
``draft_model`` (directories that mlx-lm loads), ``num_draft_tokens``, ``max_tokens`` and ``prompts`` (token ids by
name). The output is one JSON object. Its entry for a prompt has the tokens and the seconds after the first token,
without and with the draft model. It also has the number of output tokens that come from the draft model. Both runs are
greedy and use metal-engine's BLAS.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from metal_engine.device.blas.load import load_optimized_blas


def main() -> None:
    load_optimized_blas()
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.utils import load

    request = json.load(sys.stdin)
    model, tokenizer = load(request["model"])[:2]
    draft_model = load(request["draft_model"])[0]
    ends = set(tokenizer.eos_token_ids)

    def timed(steps: Any) -> dict[str, Any]:
        token_ids, num_drafted, began = [], 0, 0.0
        for token_id, _, *from_draft in steps:
            token_ids.append(int(token_id))
            num_drafted += any(from_draft)
            began = began or time.perf_counter()
            if token_ids[-1] in ends:
                break
        return {"tokens": token_ids, "seconds": time.perf_counter() - began, "drafted": num_drafted}

    answers = {}
    for name, ids in request["prompts"].items():
        prompt, limits = mx.array(ids), {"max_tokens": request["max_tokens"]}
        drafts = {"num_draft_tokens": request["num_draft_tokens"], **limits}
        answers[name] = {
            "without": timed(generate_step(prompt, model, **limits)),
            "with": timed(speculative_generate_step(prompt, model, draft_model, **drafts)),
        }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

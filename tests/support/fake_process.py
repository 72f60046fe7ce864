"""Server process like `metal-engine serve`, but on a fake runner without a model. For tests of shutdown.

``python -m tests.support.fake_process '{"shutdown_timeout": 1}' 0.01`` takes the settings of ServerArgs and the seconds
per step. A prompt that contains token 1 kills the engine's thread. The step that computes token 2 never ends. After
SIGUSR1, steps take no time.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time

from metal_engine.cli.options import one_line_errors
from metal_engine.server.listen import listen
from metal_engine.server.run import run_server
from metal_engine.settings.server_args import ServerArgs
from tools.fixtures.fake_engine import FakeRunner, fake_config, fake_engine, hash_chain

DEADLY, ENDLESS = 1, 2


class Death(BaseException):
    """Exception that ends the engine's thread, because a step handles only `Exception`."""


def _next_token(tokens: list[int], num_prompt_tokens: int) -> int:
    if DEADLY in tokens:
        raise Death("killed by a token")
    while ENDLESS in tokens:
        time.sleep(60)
    return hash_chain(tokens, num_prompt_tokens)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    args = ServerArgs(**json.loads(sys.argv[1]))
    config = fake_config(max_model_len=100_000, num_blocks=20_000)
    with one_line_errors(), listen(args) as listener:
        runner = FakeRunner(config.cache.block_size, _next_token, float(sys.argv[2]))
        signal.signal(signal.SIGUSR1, lambda number, frame: setattr(runner, "step_time", 0.0))
        engine = fake_engine(runner, config)
        sys.exit(run_server(engine, args, ("fake",), listener, on_ready=lambda url: print(url, flush=True)))


if __name__ == "__main__":
    main()

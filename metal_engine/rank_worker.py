"""Runs a rank other than 0. The rank computes its shard of the steps that rank 0 plans."""

from __future__ import annotations

import json
import logging
import signal
import sys

from metal_engine.distributed.launch import end_with, launched_rank
from metal_engine.errors import ConfigError, ModelLoadError, one_line
from metal_engine.loading.build import build_engine
from metal_engine.settings.args import EngineArgs


def run_as_follower(args: EngineArgs) -> int:
    """Load this rank's shard, and compute until rank 0 ends.

    Ignores SIGINT from the call on, also after the return.

    Returns:
        Exit status of the process: 0 if rank 0 has ended, 1 if this rank has failed or a rank was lost.

    Raises:
        ConfigError: the settings cannot work.
        ModelLoadError: this rank or another rank cannot load the model.
    """
    # A terminal sends SIGINT to all ranks. Rank 0 drains its requests and then ends the other ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        build_engine(args)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("rank 0 cannot follow")


def main() -> None:
    """Run a rank that another process has started on this machine.

    The first line of standard input contains the settings as JSON. Standard input is closed when the other process
    ends, and this process then ends, too.
    """
    parameters = json.loads(sys.stdin.readline())
    end_with(sys.stdin.fileno())
    form = f"rank {launched_rank()}: %(levelname)s %(message)s"
    logging.basicConfig(level=parameters["log_level"], format=form)
    try:
        sys.exit(run_as_follower(EngineArgs(**parameters["args"])))
    except (ConfigError, ModelLoadError) as error:
        logging.getLogger(__name__).info("ends: %s", one_line(error))  # rank 0 reports the error, too
        sys.exit(1)


if __name__ == "__main__":
    main()

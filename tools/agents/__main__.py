"""Coding agents' command lines, without a terminal, against the real server on a scripted model.

    python -m tools.agents soak --turns 40                 # every agent
    python -m tools.agents soak --turns 8 --agent codex    # one agent
    python -m tools.agents soak --turns 12 --format glm    # another format of calls and reasoning
    python -m tools.agents soak --turns 40 --write         # and put the table into docs/connect.md

The agents are installed from npm into the cache folder. In each turn, the model answers with text, or with calls of the
agent's own tools; the agent runs them and returns the results. For each turn, a row shows:

- prompt tokens: tokens of the prompts of all requests, titles and the like excluded
- known: prompt tokens in the longest common prefix with the prompt and output of an earlier request
- cached: prompt tokens found in the prefix cache
- missed: known tokens that were not cached; 0 for a request that lacks at most one block (16 tokens)
- changed: tokens of the earlier request after the common prefix, which the agent has changed or left out
- calls, lost: calls that the model wrote, and calls that the agent did not receive as written
- leaks: received texts that contain marks of the format, such as ``<tool_call>``, or differ from the script
- errors: responses with errors, and failures of the agent itself

The exit status is 1 if an agent did not run, or if a turn has a problem.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tools.agents.clients import AGENTS
from tools.agents.formats import FORMATS
from tools.agents.report import SUMMARY_HEADER
from tools.agents.soak import ROOT, AgentReport, scripted_server, soak

PAGE = ROOT / "docs" / "connect.md"
BEGIN, END = "<!-- agents: made by tools/agents -->\n", "<!-- end of agents -->"


def table(found: list[AgentReport]) -> str:
    """Return the figures of all agents as a Markdown table, and a line for each agent that did not run."""
    rows = [one.row for one in found if one.row is not None]
    missing = [f"{one.agent.title} did not run: {one.problem}" for one in found if one.problem is not None]
    return "\n".join([SUMMARY_HEADER, *rows, *([""] * bool(missing)), *missing])


def with_table(page: str, text: str) -> str:
    """Return ``page`` with ``text`` in place of the table between ``BEGIN`` and ``END``."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.agents", description=(__doc__ or "").splitlines()[0])
    command = parser.add_subparsers(required=True).add_parser("soak", help="run agents for a number of turns")
    command.add_argument("--turns", type=int, default=40, help="turns of each agent's conversation (default: 40)")
    command.add_argument("--agent", action="append", choices=AGENTS, help="agent to run; repeatable (default: all)")
    command.add_argument(
        "--format", choices=FORMATS, default="hermes", help="format of calls and reasoning (default: hermes)"
    )
    command.add_argument("--folder", type=Path, help="new folder for files and logs (default: a temporary one)")
    command.add_argument("--write", action="store_true", help="put the table into docs/connect.md")
    args = parser.parse_args()
    if args.write and args.format != "hermes":
        parser.error("--write is for the format hermes")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="agents-"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is stopped
    print(f"logs: {folder}", file=sys.stderr, flush=True)
    answer_format = FORMATS[args.format]
    with scripted_server(answer_format, folder.resolve()) as (url, log):
        found = [
            soak(AGENTS[name], answer_format, args.turns, url, log, folder.resolve() / name)
            for name in args.agent or AGENTS
        ]
    print(f"\n{table(found)}")
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(found)), encoding="utf-8")
    return 1 if any(one.has_problems for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())

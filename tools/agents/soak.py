"""Runs agents against the scripted model, turn by turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from metal_engine.checkpoints.demo import fetch_demo_model
from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer
from metal_engine.cli.launch_tools import RunningServer
from tools.agents.clients import Agent, environment, install, version_of
from tools.agents.formats import Format
from tools.agents.recorder import read_exchanges, recording
from tools.agents.report import HEADER, Turn, TurnReport, read_log, report, row, summary
from tools.agents.script import note, task
from tools.agents.scripted_model import write_checkpoint
from tools.compare.peers import stop, wait_until_up
from tools.fixtures.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_MODEL = "soak"
_MAX_MODEL_LEN = 200_000
_TURN_SECONDS = 600


@dataclass(frozen=True)
class AgentReport:
    """Figures of an agent.

    Attributes:
        agent: the agent.
        reports: figures of its turns.
        row: the agent's row in the table of all agents; None if there is a ``problem``.
        problem: error of the installation or of the first turn; None if both succeeded.
    """

    agent: Agent
    reports: Sequence[TurnReport] = ()
    row: str | None = None
    problem: str | None = None

    @property
    def has_problems(self) -> bool:
        return self.problem is not None or any(one.problems for one in self.reports)


@contextmanager
def scripted_server(answer_format: Format, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a server with the scripted model, and the path of the model's log."""
    model = write_checkpoint(folder / "model", load_gguf_tokenizer(fetch_demo_model()), answer_format)
    log, port = folder / "requests.jsonl", free_port()
    command = [sys.executable, "-P", "-m", "tools.agents.scripted_model", answer_format.name, str(model), str(log)]
    command += ["--port", str(port), "--served-model-name", _MODEL, "--kv-cache-memory-bytes", "512MiB"]
    command += ["--max-model-len", str(_MAX_MODEL_LEN), "--tool-call-parser", answer_format.tool_parser]
    command += ["--reasoning-parser", answer_format.reasoning_parser]
    output = folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_up("the scripted model", process, url, output)
        yield url, log
    finally:
        stop(process)


def soak(agent: Agent, answer_format: Format, num_turns: int, url: str, log: Path, folder: Path) -> AgentReport:
    """Run an agent for a number of turns of one conversation. Prints a row for each turn.

    Stops if the agent cannot be installed, or if the first turn has errors. The report then has a ``problem``.

    Args:
        url: URL of the scripted server.
        log: log of the scripted model.
        folder: folder to create for the agent's files and its recorded exchanges.
    """
    try:
        install(agent)
    except RuntimeError as error:
        return AgentReport(agent, problem=f"cannot be installed: {error}")
    folder.mkdir(parents=True)
    work = folder / "work"
    work.mkdir()
    print(f"\n{agent.title} {version_of(agent)}, {answer_format.name}\n\n{HEADER}", flush=True)
    reports, exchanges = [], folder / "exchanges.jsonl"
    with recording(url, exchanges) as recorded:
        server = RunningServer(recorded, "none", _MODEL, _MAX_MODEL_LEN)
        env = environment(agent, server, folder / "home")
        for number in range(1, num_turns + 1):
            turn = _run(agent, server, number, work, env)
            reports.append(report(turn, read_log(log), read_exchanges(exchanges), answer_format.marks))
            print(row(reports[-1]), flush=True)
            for problem in reports[-1].problems:
                print(f"  {problem}", file=sys.stderr, flush=True)
            if number == 1 and reports[-1].errors:
                return AgentReport(agent, reports, problem=f"its first turn failed: {reports[-1].errors[0]}")
    return AgentReport(agent, reports, summary(agent.title, version_of(agent), reports))


def _run(agent: Agent, server: RunningServer, number: int, work: Path, env: dict[str, str]) -> Turn:
    file = work / f"note-{number}.txt"
    file.write_text(note(number) + "\n")
    text = task(number, str(file))
    arguments = (agent.first if number == 1 else agent.later)(server, text)
    start = time.time()
    try:
        done = subprocess.run(
            [str(agent.path), *arguments],
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TURN_SECONDS,
        )
    except subprocess.TimeoutExpired as stopped:
        printed = (stopped.stdout or b"").decode(errors="replace")
        return Turn(number, start, time.time(), printed, f"{stopped.timeout:.0f} s passed")
    printed = done.stdout.decode(errors="replace")
    last = done.stderr.decode(errors="replace").strip()[-300:]
    problem = f"exit status {done.returncode}: {last}" if done.returncode else None
    return Turn(number, start, time.time(), printed, problem)

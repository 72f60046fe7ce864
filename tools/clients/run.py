"""Try clients from PyPI against a server, each in its own virtual environment.

    python -m tools.clients.run --venvs ../venvs                      # every client, a server on the demo model
    python -m tools.clients.run --venvs ../venvs openai llm           # only these
    python -m tools.clients.run --venvs ../venvs --url http://127.0.0.1:8000 --model NAME
    python -m tools.clients.run --venvs ../venvs --write              # and put the table into docs/connect.md

Prints a table of attempts and results. The exit status is 1 if an attempt failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.clients.groups import CLIENTS, TRIES, Client
from tools.compare.peers import OURS, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "connect.md"
BEGIN, END = "<!-- tried: made by tools/clients/run.py -->\n", "<!-- end -->"
_CLIENT_SECONDS = 1800


@dataclass(frozen=True)
class Attempt:
    """One attempt of a client. ``error`` is None if the attempt worked."""

    what: str
    error: str | None


@dataclass(frozen=True)
class ClientResult:
    client: str
    package: str
    version: str
    attempts: tuple[Attempt, ...]


def python_of(client: Client, venvs: Path) -> Path:
    return client.folder(venvs) / "bin" / "python"


def install(client: Client, venvs: Path) -> None:
    """Make the client's environment with the newest versions, unless it exists.

    Raises:
        subprocess.CalledProcessError: pip failed. ``stderr`` holds its output, or ``stdout`` as bytes if pip could not
            be installed.
    """
    done = client.folder(venvs) / ".installed"
    if done.exists():
        return
    print(f"installing {client.name} ...", file=sys.stderr, flush=True)
    venv.create(client.folder(venvs), with_pip=True, clear=True)
    pip = [str(python_of(client, venvs)), "-m", "pip", "install", "--quiet", client.package, *client.requirements]
    subprocess.run(pip, check=True, stderr=subprocess.PIPE, text=True)
    done.touch()


def version_of(client: Client, venvs: Path) -> str:
    code = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    done = subprocess.run([str(python_of(client, venvs)), "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def attempts_of(python: Path, script: Path, url: str, model: str) -> tuple[Attempt, ...]:
    """Run a script of ``tries/`` and parse its output.

    If the script itself fails or takes longer than ``_CLIENT_SECONDS``, a failed attempt ``the script`` comes last.
    The script gets an empty home folder and none of this shell's settings, keys and proxies.
    """
    with tempfile.TemporaryDirectory(prefix="client-") as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"SERVER_URL": url, "SERVER_MODEL": model}
        command = [str(python), str(script)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_CLIENT_SECONDS)
        except subprocess.TimeoutExpired as stopped:
            return (
                *attempts_in((stopped.stdout or b"").rpartition(b"\n")[0].decode()),  # the last line may be cut
                Attempt("the script", f"{stopped.timeout} s passed"),
            )
    if done.returncode == 0:
        return attempts_in(done.stdout)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return (*attempts_in(done.stdout), Attempt("the script", f"exit status {done.returncode}: {last}"))


def attempts_in(printed: str) -> tuple[Attempt, ...]:
    """Parse the lines of JSON that ``try_all`` printed. Other lines, which the client printed, are skipped."""
    return tuple(Attempt(**json.loads(line)) for line in printed.splitlines() if line.startswith('{"what":'))


def try_client(client: Client, venvs: Path, url: str, model: str) -> ClientResult:
    try:
        install(client, venvs)
    except subprocess.CalledProcessError as error:
        output = error.stderr or (error.stdout or b"").decode(errors="replace")
        last = (output.strip().splitlines() or ["no output"])[-1]
        return ClientResult(client.name, client.package, "-", (Attempt("installing", last),))
    attempts = attempts_of(python_of(client, venvs), TRIES / client.script, url, model)
    return ClientResult(client.name, client.package, version_of(client, venvs), attempts)


def cell(text: str, limit: int = 160) -> str:
    """Return a text as a cell of a Markdown table: one line of at most ``limit`` characters."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def table(results: list[ClientResult]) -> str:
    """Return the results as a Markdown table with a row for each client."""
    rows = ["| client | package | worked | failed |", "| --- | --- | --- | --- |"]
    for result in results:
        worked = ", ".join(attempt.what for attempt in result.attempts if attempt.error is None)
        failed = "; ".join(f"{attempt.what}: {attempt.error}" for attempt in result.attempts if attempt.error)
        rows.append(f"| {result.client} | {result.package} {result.version} | {worked} | {cell(failed)} |")
    return "\n".join(rows)


def with_table(page: str, text: str) -> str:
    """Return ``page`` with ``text`` in place of the table between ``BEGIN`` and ``END``."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}\n{END}{after}"


@contextmanager
def server(url: str | None, model: str) -> Iterator[str]:
    """Yield ``url``. If it is None, start a server that serves ``model``, yield its URL, and stop it at the end."""
    if url is not None:
        yield url.rstrip("/")
        return
    extra = ("--kv-cache-memory-bytes", "512MiB")
    with running(OURS, Path(model), same_blas=True, extra=extra) as started:
        yield started.url


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.clients.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clients", nargs="*", help=f"which: {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--venvs", type=Path, required=True, help="folder for the clients' environments")
    parser.add_argument("--url", help="URL of a running server (default: start one)")
    parser.add_argument("--model", default="demo", help="model to serve, or name of the running server's model")
    parser.add_argument("--write", action="store_true", help="put the table into docs/connect.md")
    args = parser.parse_args()
    unknown = set(args.clients) - set(CLIENTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}")
    results = []
    with server(args.url, args.model) as url:
        for name in args.clients or CLIENTS:
            result = try_client(CLIENTS[name], args.venvs.resolve(), url, args.model)
            results.append(result)
            for attempt in result.attempts:
                print(f"{name} {result.version}: {attempt.what}: {attempt.error or 'ok'}", file=sys.stderr, flush=True)
    print(table(results))
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(results)), encoding="utf-8")
    return 1 if any(attempt.error for result in results for attempt in result.attempts) else 0


if __name__ == "__main__":
    sys.exit(main())

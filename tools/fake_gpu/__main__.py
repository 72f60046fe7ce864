"""Command line: ``python -m tools.fake_gpu report`` and ``python -m tools.fake_gpu host``."""

from __future__ import annotations

import argparse
import sys

from . import FakeGpuError, install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fake_gpu", description="Run engines on a modelled GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="show the parts of a decode step's time, and whether the device waits")
    host = commands.add_parser("host", help="show the CPU time of a decode step: built, replayed, in mlx-lm")
    gpu, problem = None, ""
    try:
        gpu = install()
    except FakeGpuError as error:
        problem = str(error)
    # Imported here, because they load MLX, which must find the fake GPU.
    from . import host as of_host
    from . import report as reporting

    reporting.add_arguments(report)
    of_host.add_arguments(host)
    args = parser.parse_args()  # --help works without the fake GPU
    if gpu is None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return (of_host if args.command == "host" else reporting).run(gpu, args)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: ``python -m tools.fake_gpu report``."""

from __future__ import annotations

import argparse
import sys

from . import FakeGpuError, install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fake_gpu", description="Engines on a GPU that is a model.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="where a decode step's time goes, and whether the device waits")
    host = commands.add_parser("host", help="what a decode step costs its thread: built, replayed, and in mlx-lm")
    try:
        gpu = install()
    except FakeGpuError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # They load MLX, which must find the fake GPU.
    from . import host as of_host
    from . import report as reporting

    reporting.add_arguments(report)
    of_host.add_arguments(host)
    args = parser.parse_args()
    return (of_host if args.command == "host" else reporting).run(gpu, args)


if __name__ == "__main__":
    sys.exit(main())

"""Program of a rank (:mod:`tests.support.rank_work`). Sets up the BLAS first."""

from __future__ import annotations

import sys

from metal_engine.device.blas.load import load_optimized_blas

if __name__ == "__main__":
    load_optimized_blas()
    from tests.support.rank_work import run_cases

    run_cases(sys.argv[1], sys.argv[2], int(sys.argv[3]))

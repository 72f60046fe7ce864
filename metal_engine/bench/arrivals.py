"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds after the start at which each request is due, [num_requests] float64, the first at 0.

    Times between requests follow a gamma distribution of shape ``burstiness`` whose mean is ``1 / rate``: with shape
    1 a Poisson process; its coefficient of variation is ``burstiness ** -0.5``.

    Args:
        rate: requests a second; infinity for all at once.
    """
    if math.isinf(rate):
        return np.zeros(num_requests)
    # Not the generator that draws prompts: these stay the same when the rate changes.
    rng = np.random.default_rng([seed, 1])
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), num_requests - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])

"""The float64 references for recurrent kernels agree with mlx-lm's layers, segment by segment."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import ssm_update

from metal_engine.doctor.references.recurrence import relative_errors
from tools.fixtures.recurrent_step import ConvolutionStep, GatedDeltaStep, SSMStep
from tools.metal_sim.recurrence_mutants import LENGTHS, READS


@pytest.fixture(autouse=True)
def uncompiled():
    """Disable MLX's compiler: for a few small arrays, compiling takes longer than computing."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("vector_gate", [False, True])
def test_gated_delta(vector_gate):
    step = GatedDeltaStep.make(LENGTHS, READS, vector_gate=vector_gate)
    y, new_states = step.reference()
    for i, (rows, read) in enumerate(step.segments.each()):
        if rows.start == rows.stop:
            continue
        arrays = (array[rows][None] for array in (step.q, step.k, step.v, step.g, step.beta))
        theirs, state = gated_delta_ops(*arrays, None if read < 0 else step.states[read][None])
        assert relative_errors(theirs[0], y[rows]).max() <= 1e-5
        assert relative_errors(state, new_states[i : i + 1]).max() <= 1e-5


def test_ssm_update():
    step = SSMStep.make(LENGTHS, READS)
    y, new_states = step.reference()
    # mlx-lm applies a softplus to its dt.
    before_softplus = mx.log(mx.exp(step.dt) - 1)
    for i, (rows, read) in enumerate(step.segments.each()):
        if rows.start == rows.stop:
            continue
        x, B, C, dt = (array[rows][None] for array in (step.x, step.B, step.C, before_softplus))
        state = None if read < 0 else step.states[read][None]
        theirs, state = ssm_update(x, step.A_log, B, C, step.D, dt, mx.zeros_like(step.D), state, (0.0, float("inf")))
        assert relative_errors(theirs[0], y[rows]).max() <= 2e-5
        assert relative_errors(state, new_states[i : i + 1]).max() <= 2e-5


@pytest.mark.parametrize("bias, silu", [(False, False), (True, True)])
def test_convolution(bias, silu):
    """Compare with ``nn.Conv1d`` over the state and the inputs, as in mlx-lm's layers."""
    step = ConvolutionStep.make(LENGTHS, READS, bias=bias, silu=silu)
    channels, kernel_size = step.weight.shape
    conv = nn.Conv1d(channels, channels, kernel_size, groups=channels, bias=bias)
    conv.weight = step.weight[..., None]
    if bias:
        conv.bias = step.bias
    out, new_states = step.reference()
    for i, (rows, read) in enumerate(step.segments.each()):
        before = mx.zeros((kernel_size - 1, channels)) if read < 0 else step.states[read]
        inputs = mx.concatenate([before, step.x[rows]])
        np.testing.assert_array_equal(np.array(inputs[1 - kernel_size :]), new_states[i])
        if rows.start < rows.stop:
            theirs = conv(inputs[None])[0]
            assert relative_errors(nn.silu(theirs) if silu else theirs, out[rows]).max() <= 1e-5

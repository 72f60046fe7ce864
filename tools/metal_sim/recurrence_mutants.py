"""Changes the kernels of recurrent layers in one place at a time and tests whether the checks detect it.

``python -m tools.metal_sim.recurrence_mutants`` runs all mutants; a number runs that one. A mutant counts as caught
when a step in the simulator raises, differs from the float64 reference, or does not read
and write each state exactly once.
"""

from __future__ import annotations

import sys

import mlx.core as mx

from metal_engine.doctor.references.recurrence import TOLERANCE, relative_errors
from metal_engine.recurrence.metal import MetalRecurrence
from tools.fixtures.recurrent_step import ConvolutionStep, GatedDeltaStep, SSMStep
from tools.metal_sim import MetalSimError, record_launches
from tools.metal_sim.errors import CheckError
from tools.metal_sim.mutants import Mutant, factory_of, run_mutants

DELTA, SSM, CONVOLUTION = "gated_delta", "ssm_update", "short_convolution"
KERNEL_OF = {GatedDeltaStep: DELTA, SSMStep: SSM, ConvolutionStep: CONVOLUTION}
MUTANTS = (
    # the rule
    Mutant(DELTA, ": decay;", ": 1.0f;"),
    Mutant(DELTA, "? g[gates_at + uint(column)]", "? 1.0f"),
    Mutant(DELTA, "gates_at + uint(column)", "gates_at + uint(first_column)"),
    Mutant(DELTA, "wanted - held", "wanted"),
    Mutant(DELTA, " * float(beta[v_at])", ""),
    Mutant(DELTA, "state[i] += float(k[k_at + column]) * delta;", ""),
    Mutant(DELTA, "float(k[k_at + column]) * delta", "float(q[k_at + column]) * delta"),
    Mutant(DELTA, "float(q[k_at + column])", "float(k[k_at + column])"),
    Mutant(DELTA, "sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;", ""),
    # heads, rows and columns
    Mutant(DELTA, "v_head / (Hv / Hk)", "v_head % Hk"),
    Mutant(DELTA, "beta[v_at]", "beta[ulong(t) * Hv]"),
    Mutant(DELTA, ": g[v_at]", ": g[ulong(t) * Hv]"),
    Mutant(DELTA, "v[v_at * Dv + row]", "v[v_at * Dv]"),
    Mutant(DELTA, "int(thread_position_in_grid.z) % Hv", "0"),
    Mutant(DELTA, "lane / LANES;", "lane % LANES;"),
    Mutant(DELTA, "lane % LANES * 4;", "lane % LANES;"),
    Mutant(DELTA, "mask = 1", "mask = 2", which=0),
    Mutant(DELTA, "mask = 1", "mask = 2", which=1),
    Mutant(DELTA, "mask < LANES", "mask * 2 < LANES", which=0),
    Mutant(DELTA, "mask < LANES", "mask <= LANES", which=1),
    Mutant(DELTA, "row < Dv", "true"),
    Mutant(DELTA, "if (row_exists && lane", "if (lane"),
    Mutant(DELTA, "if (row_exists) {", "{"),
    Mutant(DELTA, "lane % LANES == 0", "true"),
    Mutant(DELTA, "lane % LANES == 0", "lane % LANES == 1", equivalent="all lanes of a row hold the same"),
    Mutant(DELTA, "state[i] = row_exists && read", "state[i] = read"),
    # segments and states
    Mutant(DELTA, "reads[segment]", "reads[max(segment, 1) - 1]"),
    Mutant(DELTA, "reads[segment]", "segment"),
    Mutant(DELTA, "read >= 0 ?", "read > 0 ?"),
    Mutant(DELTA, "read >= 0 ?", "read > 99 ?"),
    Mutant(DELTA, "read >= 0 ?", "true ?"),
    Mutant(DELTA, "(ulong(max(read, 0)) * Hv + v_head)", "(ulong(max(read, 0)) * Hv)"),
    Mutant(DELTA, "t < end", "t < end - 1"),
    Mutant(DELTA, "t < end", "t <= end"),
    Mutant(DELTA, "int t = cu_seqlens[segment]", "int t = cu_seqlens[segment] + 1"),
    Mutant(DELTA, "int t = cu_seqlens[segment]", "int t = 0"),
    Mutant(DELTA, "(ulong(segment) * Hv + v_head)", "(ulong(max(read, 0)) * Hv + v_head)"),
    # Mamba2's rule and heads
    Mutant(SSM, "state[i] * decay", "state[i]"),
    Mutant(SSM, "rate * step", "rate"),
    Mutant(SSM, "-precise::exp(float(A_log", "precise::exp(float(A_log"),
    Mutant(SSM, "-precise::exp(float(A_log[head]))", "-float(A_log[head])"),
    Mutant(SSM, "A_log[head]", "A_log[0]"),
    Mutant(SSM, "input * step", "input"),
    Mutant(SSM, " + input * skip", ""),
    Mutant(SSM, "D[head]", "D[group]"),
    Mutant(SSM, "dt[head_at]", "dt[ulong(t) * H]"),
    Mutant(SSM, "head / (H / G)", "head % G"),
    Mutant(SSM, "float(B[group_at", "float(C[group_at"),
    Mutant(SSM, "float(C[group_at", "float(B[group_at"),
    Mutant(SSM, "x[head_at * Dh + row]", "x[head_at * Dh]"),
    Mutant(SSM, "mask < LANES", "mask * 2 < LANES"),
    Mutant(SSM, "row < Dh", "true"),
    Mutant(SSM, "if (row_exists && lane", "if (lane"),
    Mutant(SSM, "state[i] = row_exists && read", "state[i] = read"),
    # Mamba2's segments and states
    Mutant(SSM, "reads[segment]", "reads[max(segment, 1) - 1]"),
    Mutant(SSM, "read >= 0 ?", "read > 0 ?"),
    Mutant(SSM, "read >= 0 ?", "true ?"),
    Mutant(SSM, "t < end", "t < end - 1"),
    Mutant(SSM, "int t = cu_seqlens[segment]", "int t = cu_seqlens[segment] + 1"),
    Mutant(SSM, "(ulong(segment) * H + head)", "(ulong(max(read, 0)) * H + head)"),
    # the convolution
    Mutant(CONVOLUTION, "taps[j] * inputs[i + j]", "taps[K - 1 - j] * inputs[i + j]"),
    Mutant(CONVOLUTION, "taps[j] * inputs[i + j]", "taps[j] * inputs[j]"),
    Mutant(CONVOLUTION, "channel * K + j", "j * channels + channel"),
    Mutant(CONVOLUTION, "? float(bias[channel])", "? 0.0f"),
    Mutant(CONVOLUTION, "HAS_BIAS ?", "true ?"),
    Mutant(CONVOLUTION, "SILU ?", "true ?"),
    Mutant(CONVOLUTION, "SILU ?", "false ?"),
    Mutant(CONVOLUTION, "1.0f + precise", "precise"),
    # tiles
    Mutant(CONVOLUTION, "+ middle <= tile", "+ middle < tile"),
    Mutant(CONVOLUTION, "/ TILE + middle", "/ TILE"),
    Mutant(CONVOLUTION, "after - segment > 1", "after - segment > 2"),
    Mutant(CONVOLUTION, "i < TILE;", "i < TILE - 1;"),
    Mutant(CONVOLUTION, "begin + i < length", "begin + i < length - 1"),
    Mutant(CONVOLUTION, "begin + i < length", "begin + i <= length"),
    Mutant(CONVOLUTION, "begin == 0 || begin < length", "begin < length"),
    Mutant(CONVOLUTION, "begin == 0 || begin < length", "true"),
    Mutant(CONVOLUTION, "x[ulong(first + row)", "x[ulong(row)"),
    Mutant(CONVOLUTION, "row >= 0", "row >= -1"),
    Mutant(CONVOLUTION, "row >= 0", "row > 0"),
    Mutant(CONVOLUTION, "row < length", "row <= length"),
    Mutant(CONVOLUTION, "row < length", "row < length - 1"),
    # the convolution's states
    Mutant(CONVOLUTION, "reads[segment]", "reads[max(segment, 1) - 1]"),
    Mutant(CONVOLUTION, "read < 0 ?", "read <= 0 ?"),
    Mutant(CONVOLUTION, "read < 0 ?", "true ?"),
    Mutant(CONVOLUTION, "read < 0 ? 0.0f : float(states[(ulong(read)", "float(states[(ulong(max(read, 0))"),
    Mutant(CONVOLUTION, "(K - 1 + row)", "(K - 2 + row)"),
    Mutant(CONVOLUTION, "(K - 1 + row)", "(-1 - row)"),
    Mutant(CONVOLUTION, "inputs[rows + j]", "inputs[rows + j - 1]"),
    Mutant(CONVOLUTION, "inputs[rows + j]", "inputs[rows + j + 1]"),
    Mutant(CONVOLUTION, "inputs[rows + j]", "inputs[rows + K - 2 - j]"),
    Mutant(CONVOLUTION, "rows <= TILE", "rows < TILE"),
    Mutant(CONVOLUTION, "int rows = 0", "int rows = 1"),
    Mutant(CONVOLUTION, "begin + rows == length", "begin + rows >= length"),
    Mutant(CONVOLUTION, "ulong(segment) *", "ulong(max(read, 0)) *"),
)

# Fresh prompts, chunks and decodes, and one segment without rows. Two states are read
# by two segments each, and one state by no segment.
LENGTHS, READS = (1, 9, 17, 1, 0, 8, 2, 3), (2, -1, 0, 0, 3, -1, -1, 2)
Step = GatedDeltaStep | SSMStep | ConvolutionStep
CASES: tuple[Step, ...] = (
    GatedDeltaStep.make(LENGTHS, READS),
    GatedDeltaStep.make(LENGTHS, READS, heads=(1, 3), dims=(160, 5), vector_gate=True, dtype=mx.float16),
    SSMStep.make(LENGTHS, READS),
    SSMStep.make(LENGTHS, READS, heads=(1, 3), dims=(160, 5), dtype=mx.bfloat16),
    ConvolutionStep.make(LENGTHS, READS),
    ConvolutionStep.make(LENGTHS, READS, kernel_size=8, bias=False, silu=False, dtype=mx.bfloat16),
)


def run_case(recurrence: MetalRecurrence, case: Step) -> str | None:
    """Run a case. Return a description of the first error; None if the results are right."""
    try:
        with record_launches() as launches:
            out, new_states = case.run(recurrence)
    except (MetalSimError, CheckError) as error:
        return str(error)
    expected_out, expected_states = case.reference()
    worst = relative_errors(out, expected_out).max()
    if not worst <= TOLERANCE[out.dtype]:
        return f"relative error {worst:.2g} in a row"
    # A convolution's states are unchanged inputs. A recurrent state is float32 for inputs of every type.
    worst = relative_errors(new_states, expected_states).max()
    if not worst <= (0 if isinstance(case, ConvolutionStep) else TOLERANCE[mx.float32]):
        return f"relative error {worst:.2g} in a new state"
    (launch,) = launches
    continued = sum(read >= 0 for _, read in case.segments.each())
    if launch.buffers["states"].read != continued * case.states[0].nbytes:
        return "reads more or less than each state once"
    if sum(b.written for b in launch.buffers.values() if b.kind == "output") != out.nbytes + new_states.nbytes:
        return "writes more or less than each output once"
    return None


def caught(mutant: Mutant | None) -> str | None:
    """Return the check's message if the mutant was caught, or None."""
    recurrence = MetalRecurrence(factory_of(mutant))
    for case in CASES:
        if (mutant is None or mutant.kernel == KERNEL_OF[type(case)]) and (found := run_case(recurrence, case)):
            return found
    return None


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))

"""Undefined values that loops carry."""

from __future__ import annotations

from tests.tools.metal_sim.test_agx import variant_of
from tools.metal_sim.undef import undef_in, undef_phis

# One condition guards the writes and the reads of `held`. LLVM still carries the array through the loop.
SOURCE = """
uint t = thread_position_in_threadgroup.x;
float sum = 0;
for (uint k = 0; k < uint(x[t]); ++k) {
  float held[4];
  if (x[k] > 1) {
    for (int i = 0; i < 4; ++i) held[i] = x[k + i];
  } ELSE
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (x[k] > 1) {
    for (int i = 0; i < 4; ++i) sum += held[i] * held[3 - i];
  }
}
y[t] = sum;
"""
OTHERWISE = "else { for (int i = 0; i < 4; ++i) held[i] = 0; }"


def test_an_array_that_one_branch_sets_is_found_by_name() -> None:
    found = undef_in(variant_of(SOURCE.replace("ELSE", ""), "carries"))
    assert set(found) == {"held"} and found["held"] >= 4


def test_an_array_that_both_branches_set_is_not() -> None:
    assert undef_in(variant_of(SOURCE.replace("ELSE", OTHERWISE), "sets")) == {}


IR = """
define spir_kernel void @kernel(i32 %n) {
  br label %head

head:                                             ; preds = %body, %0
  %good = phi float [ 0.0, %0 ], [ %next, %body ]
  %old.sroa.0.0 = phi half [ undef, %0 ], [ %old.sroa.0.1, %body ]
  %new12 = phi <2 x half> [ poison, %0 ], [ %v, %body ]
  %partly = phi <2 x half> [ <half undef, half 0xH0000>, %0 ], [ %v, %body ]
  switch i32 %n, label %end [
    i32 0, label %body
    i32 1, label %"other way"
  ]

"other way":                                      ; preds = %head
  br label %body

body:                                             ; preds = %"other way", %head
  %joined = phi float [ undef, %head ], [ %good, %"other way" ]
  br i1 %c, label %head, label %end

end:                                              ; preds = %body, %head
  ret void
}
"""


def test_only_phis_at_the_heads_of_loops_count() -> None:
    assert [(phi.function, phi.variable) for phi in undef_phis(IR)] == [("kernel", "old"), ("kernel", "new")]

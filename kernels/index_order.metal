// The order of scores in index_select.metal.

// An unsigned integer of the order of a score. Both zeros have the same integer.
METAL_FUNC uint ordered_bits(float score) {
  const uint bits = as_type<uint>(score);
  return score >= 0.0f ? bits | 0x80000000u : ~bits;
}

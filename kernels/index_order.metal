// The order of scores in index_select.metal.

// Returns an unsigned integer with the same order as the scores. 0 and -0 have the same integer.
METAL_FUNC uint ordered_bits(float score) {
  const uint bits = as_type<uint>(score);
  return score >= 0.0f ? bits | 0x80000000u : ~bits;
}

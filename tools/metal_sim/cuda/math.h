// Functions without an instruction on NVIDIA GPUs, or with an instruction that is less accurate than Metal allows. The
// build fails for functions that have neither an instruction nor a definition here.
#pragma once

#ifdef __NVPTX__
METAL_FUNC float ms_ex2(float x) { return __nvvm_ex2_approx_f(x); }
METAL_FUNC float ms_lg2(float x) { return __nvvm_lg2_approx_f(x); }
#else
METAL_FUNC float ms_ex2(float x) { return __builtin_exp2f(x); }
METAL_FUNC float ms_lg2(float x) { return __builtin_log2f(x); }
#endif

METAL_FUNC float ms_exp(float x) {
  const float whole = __builtin_rintf(x * 1.44269504f);
  // The remainder of x log2(e), with a correction for the rounding of the constant.
  const float rest = __builtin_fmaf(x, 1.44269504f, -whole) + x * 1.925963033e-8f;
  return x != x ? x : ms_ex2(rest) * ms_ex2(whole);
}
METAL_FUNC float ms_log(float x) { return ms_lg2(x) * 0.693147181f; }
METAL_FUNC float ms_tanh(float x) {
  const float size = __builtin_fabsf(x), s = x * x;
  if (size < 0.25f) {
    return x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
  }
  return __builtin_copysignf(1.0f - 2.0f / (ms_exp(2.0f * (size > 20.0f ? 20.0f : size)) + 1.0f), x);
}

#define __builtin_exp2f(x) ms_ex2(x)
#define __builtin_log2f(x) ms_lg2(x)
#define __builtin_expf(x) ms_exp(x)
#define __builtin_logf(x) ms_log(x)
#define __builtin_tanhf(x) ms_tanh(x)

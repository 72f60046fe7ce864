// Functions that an Apple GPU computes with its exp2 and log2 instructions. OpenCL calls these instructions by name.
#pragma once

float native_exp2(float) __attribute__((const));
float native_log2(float) __attribute__((const));
float native_sin(float) __attribute__((const));
float native_cos(float) __attribute__((const));

METAL_FUNC float ms_exp(float x) { return native_exp2(x * 1.44269504f); }
METAL_FUNC float ms_log(float x) { return native_log2(x) * 0.693147181f; }
METAL_FUNC float ms_tanh(float x) { return 1.0f - 2.0f / (ms_exp(2.0f * (x > 20.0f ? 20.0f : x)) + 1.0f); }

#define __builtin_exp2f(x) native_exp2(x)
#define __builtin_log2f(x) native_log2(x)
#define __builtin_expf(x) ms_exp(x)
#define __builtin_logf(x) ms_log(x)
#define __builtin_tanhf(x) ms_tanh(x)
#define __builtin_cosf(x) native_cos(x)
#define __builtin_sinf(x) native_sin(x)

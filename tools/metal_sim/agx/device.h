#pragma once
#include <stdint.h>

extern uint32_t agx_generation;  // of the GPU: 13 for M1, 14 for M2

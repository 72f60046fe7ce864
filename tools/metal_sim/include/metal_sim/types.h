// Scalar and vector types with Metal's names and sizes.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;

#define MS_VECTORS(T)                                    \
  typedef T T##2 __attribute__((ext_vector_type(2)));    \
  typedef T T##3 __attribute__((ext_vector_type(3)));    \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MS_VECTORS(char)
MS_VECTORS(uchar)
MS_VECTORS(short)
MS_VECTORS(ushort)
MS_VECTORS(int)
MS_VECTORS(uint)
MS_VECTORS(long)
MS_VECTORS(ulong)
MS_VECTORS(half)
MS_VECTORS(float)
#undef MS_VECTORS

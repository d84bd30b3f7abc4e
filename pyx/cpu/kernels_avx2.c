/* The kernels for AVX2 + FMA + F16C.
 * The target is set here, not on the command line: nothing else may use these instructions. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "simd_avx2.h"
#define SET avx2
#include "kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kernels_avx2_absent; /* an empty file is not C */
#endif

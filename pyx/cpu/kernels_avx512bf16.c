/* The kernels for AVX-512 F + BW + DQ + VL + BF16 + VBMI + VNNI.
 * The target is set here, not on the command line: nothing else may use these instructions. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,avx2,fma,f16c")
#endif
#define V16_BF16
#include "simd_avx512.h"
#define SET avx512bf16
#include "kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kernels_avx512bf16_absent; /* an empty file is not C */
#endif

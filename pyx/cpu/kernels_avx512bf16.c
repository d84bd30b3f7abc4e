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

/* Sums of 1, a product of upper halves and one of lower halves: 2^-24 and 2^-24, 2^-24 and 1.5 · 2^-24. */
int avx512bf16_in_order(void)
{
    __m512i pairs = _mm512_setr4_epi32(0x33803380, 0x338033c0, 0x33803380, 0x338033c0);
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    v16i_hide(&pairs); /* the processor's answer, not the compiler's */
    float sum[16];
    v16_store(sum, _mm512_dpbf16_ps(v16_set1(1), (__m512bh)pairs, (__m512bh)ones));
    return sum[0] == 1 && sum[1] == 1 + 0x1p-23f;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int kernels_avx512bf16_absent; /* an empty file is not C */
#endif

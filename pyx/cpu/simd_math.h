/* Functions built from v16 operations alone: the same bits on every instruction set. */
#pragma once

/* 2^(b − 127) for an e8m0 byte; 0 gives the subnormal 2^-127 */
static inline float e8m0(uint8_t b)
{
    uint32_t bits = b ? (uint32_t)b << 23 : 0x00400000u;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}

#ifndef V16_POWER
/* x · 2^n of x near one, rounded once; n whole, of −150 to 128, or NaN */
static inline v16 v16_power(v16 x, v16 n)
{
    /* 2^n in two halves, since n may be below −126 or above 127 */
    v16 half = v16_round(v16_mul(n, v16_set1(0.5f)));
    v16i bias = v16i_set1(127);
    v16 first = v16i_float(v16i_shl(v16i_add(v16_to_int(half), bias), 23));
    v16 second = v16i_float(v16i_shl(v16i_add(v16_to_int(v16_sub(n, half)), bias), 23));
    return v16_mul(v16_mul(x, first), second);
}
#endif

/* e^x to about 1 ulp. e^-inf = 0, large x gives inf, NaN stays NaN; subnormal results are rounded once. */
static inline v16 v16_exp(v16 x)
{
    x = v16_max(v16_set1(-104.0f), v16_min(v16_set1(89.0f), x));
    v16 n = v16_round(v16_mul(x, v16_set1(0x1.715476p+0f)));
    v16 r = v16_fma(n, v16_set1(-0x1.62e4p-1f), x); /* ln 2 in two parts, n · the first exact */
    r = v16_fma(n, v16_set1(-0x1.7f7d1cp-20f), r);
    v16 p = v16_set1(0x1.6850e4p-10f);
    p = v16_fma(p, r, v16_set1(0x1.123bccp-7f));
    p = v16_fma(p, r, v16_set1(0x1.555b98p-5f));
    p = v16_fma(p, r, v16_set1(0x1.55548ep-3f));
    p = v16_fma(p, r, v16_set1(0x1.fffff8p-2f));
    p = v16_fma(p, r, v16_set1(1.0f));
    p = v16_fma(p, r, v16_set1(1.0f));
    return v16_power(p, n);
}

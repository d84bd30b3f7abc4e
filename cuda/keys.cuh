// Stored keys: e4m3 codes with a scale per 64 for the dims before the rotated ones, bf16 for those.
//
// A key's values have at most 8 significant bits and no tiny exponents, so bf16 holds all of them exactly.
#pragma once
#include "numeric.cuh"

#define KEY_BLOCK 64  // codes per scale
#define KEY_UNIT 8    // dims that a thread decodes at a time

// codes [n, plain], scales [n, blocks], rope [n, rope_dim]; wide: whole units, at addresses that allow wide loads.
struct KeyCache {
    const u8* codes;
    const u8* scales;
    const u16* rope;
    int plain, rope_dim, blocks;
    bool wide;
};

__device__ __forceinline__ KeyCache key_cache(const u8* codes, const u8* scales, const u16* rope, int dim, int rope_dim) {
    const int plain = dim - rope_dim;
    const bool wide = plain % KEY_UNIT == 0 && rope_dim % KEY_UNIT == 0 && (u64)codes % 8 == 0 && (u64)rope % 16 == 0;
    return {codes, scales, rope, plain, rope_dim, (plain + KEY_BLOCK - 1) / KEY_BLOCK, wide};
}

// Two codes under one scale as bf16 bits, the first in the low half.
__device__ __forceinline__ u32 key_pair(u32 first, u32 second, float scale) {
    return __float_as_uint(e4m3_value(first) * scale) >> 16 | (__float_as_uint(e4m3_value(second) * scale) & 0xffff0000u);
}

// Dim d of the key at a place as bf16 bits; 0 beyond the last.
__device__ __forceinline__ u32 key_dim(const KeyCache& c, i64 place, int d) {
    if (d < c.plain)
        return key_pair(c.codes[place * c.plain + d], 0, e8m0_value(c.scales[place * c.blocks + d / KEY_BLOCK])) & 0xffff;
    return d < c.plain + c.rope_dim ? c.rope[place * c.rope_dim + d - c.plain] : 0;
}

// Dims [8u, 8u + 8) of the key at a place as bf16, zeros beyond the last.
__device__ __forceinline__ uint4 key_unit(const KeyCache& c, i64 place, int u) {
    const int d = KEY_UNIT * u;
    if (!c.wide)
        return make_uint4(key_dim(c, place, d) | key_dim(c, place, d + 1) << 16, key_dim(c, place, d + 2) | key_dim(c, place, d + 3) << 16,
                          key_dim(c, place, d + 4) | key_dim(c, place, d + 5) << 16, key_dim(c, place, d + 6) | key_dim(c, place, d + 7) << 16);
    if (d >= c.plain + c.rope_dim) return make_uint4(0, 0, 0, 0);
    if (d >= c.plain) return *(const uint4*)(c.rope + place * c.rope_dim + d - c.plain);
    const uint2 code = *(const uint2*)(c.codes + place * c.plain + d);
    const float scale = e8m0_value(c.scales[place * c.blocks + d / KEY_BLOCK]);
    return make_uint4(key_pair(code.x & 255, code.x >> 8 & 255, scale), key_pair(code.x >> 16 & 255, code.x >> 24, scale),
                      key_pair(code.y & 255, code.y >> 8 & 255, scale), key_pair(code.y >> 16 & 255, code.y >> 24, scale));
}

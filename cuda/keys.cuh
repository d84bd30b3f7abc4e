// Stored keys: e4m3 codes with a scale per 64 for the dims before the rotated ones, bf16 for those.
#pragma once
#include "numeric.cuh"

#define KEY_BLOCK 64  // codes per scale

// codes [n, plain], scales [n, blocks], rope [n, rope_dim]; wide: 16 codes at a time, at addresses that allow it.
struct KeyCache {
    const u8* codes;
    const u8* scales;
    const u16* rope;
    int plain, rope_dim, blocks;
    bool wide;
};

__device__ __forceinline__ KeyCache key_cache(const u8* codes, const u8* scales, const u16* rope, int dim, int rope_dim) {
    const int plain = dim - rope_dim;
    return {codes, scales, rope, plain, rope_dim, (plain + KEY_BLOCK - 1) / KEY_BLOCK, plain % 16 == 0 && (u64)codes % 16 == 0};
}

// Dim d of the key at a place.
__device__ __forceinline__ float key_dim(const KeyCache& c, i64 place, int d) {
    if (d >= c.plain) return bf16_value(c.rope[place * c.rope_dim + d - c.plain]);
    return e4m3_value(c.codes[place * c.plain + d]) * e8m0_value(c.scales[place * c.blocks + d / KEY_BLOCK]);
}

// Two words of four codes → four pairs of fp16, word i: code i of `low` in its low half, of `high` in the other; times
// E4M3_RAISE they are the codes' values. Not the NaN codes, which stored keys do not have: their blocks' scale is NaN.
__device__ __forceinline__ void key_pairs(u32 low, u32 high, u32* pair) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 at = __byte_perm(low, high, i << 4 | (4 + i) << 12);  // bytes 1 and 3: the codes; 0 and 2: not used
        pair[i] = (at & 0x7f007f00u) >> 1 | (at & 0x80008000u);
    }
}

// Rows times packed weights on tensor cores, with one order of every sum whatever the number of rows.
//
//   out[e, n] = Σ_k x[row(e), k] · w[n, k]         w fp8 (e4m3, a scale per 128 × 128) or fp4 (e2m1, a scale per 32)
//
// K is cut into `slices` equal ones, a slice into `parts` (a power of two, by the slice's width alone), a part into blocks
// of 128 in ascending order. Of a block (fp8) or a group of 32 (fp4) the tensor cores sum products of the codes, from 0;
// this sum times the row's scale times the weight's scale, all exact, is added to the part, rounded once. The parts of a
// slice are added in ascending order, the slices as a binary tree. Weights are the 16-side, rows the 8-side of an mma.
//
// Packed rows (pack_block writes them): K padded with zeros to blocks of 128, per block 16 chunks of 16 bytes, chunk c
// the fp16 values of k = 8c .. 8c+7 in the order 0 4 1 5 2 6 3 7 (that of fp8_pairs and e2m1_pairs), and one scale.
// What 11 bits of an input do not hold is in a second piece, 2^-11 of its numbers; a block that needs it has a negative
// scale. Inputs rounded to e4m3 never do. Where a neighbour needs it, zeros are added: no bit changes.
#pragma once
#include "mma.cuh"

#define PRODUCT_THREADS 256
#define PRODUCT_WARPS 8
#define BLOCK 128        // inputs per scale of x
#define CHUNKS 16        // of 16 bytes per packed block
#define WIDE_ROWS 64     // rows (entries) of a wide product's tile
#define LOW_PIECE 0x1p-11f

// Binary tree over 2^i values given in order: add(s, value) for s = 0 .. 2^i − 1; the last returns the sum.
struct Tree {
    float one, two, four;
    __device__ __forceinline__ float add(int s, float value) {
        if (!(s & 1)) return one = value;
        value = one + value;
        if (!(s & 2)) return two = value;
        value = two + value;
        if (!(s & 4)) return four = value;
        return four + value;
    }
};

// ---------------------------------------------------------------------- rows
// Four values of a block in a warp → their place among the packed: lane l gives k = 8 (l / 2) + 2 (l % 2) + {0, 4, 1, 5}.
// x_high, x_low: the block's 16 chunks; x_low null: no second piece is written, as rounded inputs have none.
__device__ __forceinline__ void pack_block(float v[4], bool rounded, uint4* x_high, uint4* x_low, float* x_scale) {
    const int lane = threadIdx.x & 31;
    u32 amax = 0, high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) amax = max(amax, magnitude_bits(v[i]));
    amax = warp_max_bits(amax);
    float scale;
    u32 more = 0;
    if (rounded) {
        const u32 byte = e4m3_scale(amax);
        const float inverse = e8m0_inverse(byte);
        scale = e8m0_value(byte) * 0x1p-6f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 code;
            high[i] = fp16_bits(round_e4m3(v[i] * inverse, &code) * 0x1p6f);
            low[i] = 0;
        }
    } else {
        const u32 own = amax >> 23, exponent = own > 15 ? own : 15; // the largest goes to [2^14, 2^15)
        const bool finite = exponent < 255;
        scale = as_float(finite ? (exponent - 14) << 23 : 0x7fc00000u);
        const float inverse = as_float(finite ? (268 - exponent) << 23 : 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float value = finite ? v[i] * inverse : 0.0f;
            high[i] = fp16_bits(value);
            low[i] = fp16_bits((value - fp16_value(high[i])) * 0x1p11f);
            more |= low[i] & 0x7fff;
        }
        if (__any_sync(FULL_MASK, more != 0)) scale = -scale;
    }
    ((uint2*)x_high)[lane] = make_uint2(high[0] | high[1] << 16, high[2] | high[3] << 16);
    if (x_low) ((uint2*)x_low)[lane] = make_uint2(low[0] | low[1] << 16, low[2] | low[3] << 16);
    if (lane == 0) *x_scale = scale;
}

// ---------------------------------------------------------------------- what a product works on
struct Product {
    const u8 *weight, *scale;     // of this block's expert or linear: row 0 of its outputs
    const uint4 *x_high, *x_low;  // [rows of x, blocks, CHUNKS]
    const float* x_scale;         // [rows of x, blocks]
    int n, first;                 // outputs; where they begin among the rows of `weight`
    int stride, blocks;           // bytes of a weight row, a multiple of 16; blocks of K
    int slices, parts;
    float* out;                   // out[e · out_row + s · out_slice + i]; out_slice 0: the tree's sum over the slices
    i64 out_row, out_slice;
};

// A lane's weights of one block, rows g and g + 8 of 16. fp8: w[2h], w[2h + 1] 16 codes of either half of the block, from 16t on.
// fp4: w[h].xy, w[h].zw 16 codes of groups 0 or 1 and 2 or 3, of the four lanes' 64 codes in a row those from 16t on.
template <bool FP4> struct Held {
    uint4 w[FP4 ? 2 : 4];
    u32 scale[2];
};

template <bool FP4> struct WeightRows {
    const u8 *row[2], *scale[2];
    int stride;

    __device__ __forceinline__ WeightRows(const Product& p, int n) : stride(p.stride) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int own = n + lane / 4 + 8 * h, at = p.first + (own < p.n ? own : p.n - 1);
            row[h] = p.weight + (i64)at * stride + lane % 4 * (FP4 ? 8 : 16);
            scale[h] = FP4 ? p.scale + (i64)at * (stride / 16) : p.scale + (i64)(at / BLOCK) * p.blocks;
        }
    }

    // 16 bytes (fp8) or 8 (fp4) of a row from `at` on, of 64 or 32 that the four lanes take; zeros beyond its end.
    __device__ __forceinline__ uint4 codes(int h, int at) const {
        return at + (threadIdx.x & 3) * 16 < stride ? __ldg((const uint4*)(row[h] + at)) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ uint2 half_codes(int h, int at) const {
        return at + (threadIdx.x & 3) * 8 < stride ? __ldg((const uint2*)(row[h] + at)) : make_uint2(0, 0);
    }

    __device__ __forceinline__ void load(Held<FP4>& held, int block) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!FP4) {
                held.w[2 * h] = codes(h, BLOCK * block);
                held.w[2 * h + 1] = codes(h, BLOCK * block + 64);
                held.scale[h] = scale[h][block];
                continue;
            }
            const uint2 one = half_codes(h, 64 * block), two = half_codes(h, 64 * block + 32);
            held.w[h] = make_uint4(one.x, one.y, two.x, two.y);
            if (stride % 64 == 0) {
                held.scale[h] = __ldg((const u32*)scale[h] + block);
            } else { // the last block is short
                held.scale[h] = 0;
                for (int i = 0; i < 4 && 4 * block + i < stride / 16; i++) held.scale[h] |= (u32)scale[h][4 * block + i] << 8 * i;
            }
        }
    }
};

// fp4: lanes 0 and 1 of four hold one group's words 0 1 and 2 3, lanes 2 and 3 the next group's. Then all four hold one word of
// either group: lane t word 2 (t % 2) + t / 2, the first group's in `one`.
__device__ __forceinline__ void spread(u32& one, u32& two) {
    const bool upper = threadIdx.x & 2;
    const u32 got = __shfl_xor_sync(FULL_MASK, upper ? one : two, 2);
    one = upper ? got : one;
    two = upper ? two : got;
}

__device__ __forceinline__ u32 word_of(const uint4& w, int i) { return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w; }

// One block times 8 · TILES rows, of which `active` tiles have any, added to part[tile][mma's d].
// chunk(tile, piece, c): this lane's chunk c of row g of a tile; scale(tile, i): that of row 2t + i of it.
template <bool FP4, int TILES, class Chunk, class Scale>
__device__ __forceinline__ void add_block(float part[TILES][4], Held<FP4>& held, int active, Chunk chunk, Scale scale) {
    const int t = threadIdx.x & 3;
    if (FP4)
#pragma unroll
        for (int h = 0; h < 2; h++) spread(held.w[h].x, held.w[h].y), spread(held.w[h].z, held.w[h].w);
    float xs[TILES][2];
    bool more = false;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float s = n < active ? scale(n, i) : 0.0f;
            more |= s < 0;
            xs[n][i] = fabsf(s) * (FP4 ? E2M1_RAISE : FP8_RAISE);
        }
#pragma unroll 1
    for (int piece = 0; piece < 2; piece++) {
        float sum[TILES][4] = {};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            u32 one[4], two[4];
            if (FP4) {
                e2m1_pairs(word_of(held.w[0], c), one);
                e2m1_pairs(word_of(held.w[1], c), two);
            } else {
                fp8_pairs(word_of(held.w[c / 2], c % 2 * 2), word_of(held.w[c / 2], c % 2 * 2 + 1), one);
                fp8_pairs(word_of(held.w[2 + c / 2], c % 2 * 2), word_of(held.w[2 + c / 2], c % 2 * 2 + 1), two);
            }
            const u32 a[2][4] = {{one[0], two[0], one[1], two[1]}, {one[2], two[2], one[3], two[3]}};
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                if (n >= active) continue;
                const uint4 x = chunk(n, piece, FP4 ? 4 * c + 2 * (t % 2) + t / 2 : c / 2 * 8 + 2 * t + c % 2);
                const u32 b[2][2] = {{x.x, x.y}, {x.z, x.w}};
                mma_fp16(sum[n], a[0], b[0]);
                mma_fp16(sum[n], a[1], b[1]);
                if (!FP4 && c < 3) continue;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float ws = weight_scale(held.scale[i / 2], FP4 ? c : 0);
                    part[n][i] = fmaf(sum[n][i] * xs[n][i % 2], ws, part[n][i]);
                    sum[n][i] = 0;
                }
            }
        }
        if (!__any_sync(FULL_MASK, more)) break;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) xs[n][i] *= LOW_PIECE;
    }
}

// Blocks of part `leaf` (slice leaf / parts): [begin, end).
__device__ __forceinline__ int part_begin(const Product& p, int leaf) {
    const int width = p.blocks / p.slices;
    return leaf / p.parts * width + leaf % p.parts * width / p.parts;
}
__device__ __forceinline__ int part_end(const Product& p, int leaf) {
    const int width = p.blocks / p.slices;
    return leaf / p.parts * width + (leaf % p.parts + 1) * width / p.parts;
}

// ---------------------------------------------------------------------- few rows: the block's warps share out the parts
// 16 · (8 / lanes) outputs from 16 · (8 / lanes) · blockIdx.x on, lanes = min(8, parts of K); up to 8 · TILES entries,
// whose rows of x are x_row[entry − entry0] (shared memory, −1: none). sums: parts of K × 8 / lanes × 8 · TILES × 16.
template <bool FP4, int TILES>
__device__ void product_split(const Product& p, const int* x_row, int entry0, int count, float* sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
    const int leaves = p.slices * p.parts, lanes = leaves < PRODUCT_WARPS ? leaves : PRODUCT_WARPS;
    const int tiles = PRODUCT_WARPS / lanes, tile = warp / lanes, active = (count + 7) / 8;
    const int n0 = 16 * tiles * blockIdx.x;
    const WeightRows<FP4> rows(p, n0 + 16 * tile);
    i64 x_at[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) x_at[n] = x_row[8 * n + g] < 0 ? -1 : (i64)x_row[8 * n + g] * p.blocks;
    constexpr int AHEAD = FP4 ? 3 : 2; // blocks of weights on their way
    for (int leaf = warp % lanes; leaf < leaves; leaf += lanes) {
        const int begin = part_begin(p, leaf), end = part_end(p, leaf);
        float part[TILES][4] = {};
        Held<FP4> held[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (begin + i < end) rows.load(held[i], begin + i);
        for (int base = begin; base < end; base += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int block = base + i;
                if (block >= end) break;
                add_block<FP4, TILES>(
                    part, held[i], active,
                    [&](int n, int piece, int c) {
                        if (x_at[n] < 0) return make_uint4(0, 0, 0, 0);
                        return __ldg((piece ? p.x_low : p.x_high) + (x_at[n] + block) * CHUNKS + c);
                    },
                    [&](int n, int j) {
                        const int row = x_row[8 * n + 2 * t + j];
                        return row < 0 ? 0.0f : __ldg(p.x_scale + (i64)row * p.blocks + block);
                    });
                if (block + AHEAD < end) rows.load(held[i], block + AHEAD);
            }
        }
        float* to = sums + (tile * leaves + leaf) * TILES * 128;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) to[(8 * n + 2 * t + i % 2) * 16 + g + i / 2 * 8] = part[n][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tiles * TILES * 128; i += PRODUCT_THREADS) {
        const int own = i / (TILES * 128), entry = i / 16 % (8 * TILES), n = n0 + 16 * own + i % 16;
        if (entry >= count || n >= p.n) continue;
        const float* from = sums + own * leaves * TILES * 128 + i % (TILES * 128);
        float* to = p.out + (entry0 + entry) * p.out_row + n;
        Tree tree;
        float total = 0;
        for (int s = 0; s < p.slices; s++) {
            float sum = from[s * p.parts * TILES * 128];
            for (int j = 1; j < p.parts; j++) sum += from[(s * p.parts + j) * TILES * 128];
            if (p.out_slice) to[s * p.out_slice] = sum;
            else total = tree.add(s, sum);
        }
        if (!p.out_slice) *to = total;
    }
}

// ---------------------------------------------------------------------- many rows: the block's warps share out the outputs
// Outputs [128 · blockIdx.x, + 128) of one slice for up to WIDE_ROWS entries. Shared memory: x_row as above;
// chunks [2, WIDE_ROWS, CHUNKS], where chunk c of row r lies at c ^ (r & 1) · 5 so that eight lanes meet eight banks; scales
// [2, WIDE_ROWS]. A row that is not there is zeros.
__device__ __forceinline__ void copy_rows(const Product& p, const int* x_row, int block, uint4* chunks, float* scales) {
    for (int i = threadIdx.x; i < WIDE_ROWS * CHUNKS; i += PRODUCT_THREADS) {
        const int r = i / CHUNKS, c = i % CHUNKS, row = x_row[r];
        if (row >= 0) copy16(chunks + r * CHUNKS + (c ^ (r & 1) * 5), p.x_high + ((i64)row * p.blocks + block) * CHUNKS + c);
    }
    if (threadIdx.x < WIDE_ROWS) {
        const int row = x_row[threadIdx.x];
        scales[threadIdx.x] = row < 0 ? 0.0f : __ldg(p.x_scale + (i64)row * p.blocks + block);
    }
    copy_commit();
}

template <bool FP4>
__device__ void product_wide(const Product& p, const int* x_row, int entry0, int count, int slice, uint4* chunks, float* scales) {
    constexpr int TILES = WIDE_ROWS / 8, ROOM = WIDE_ROWS * CHUNKS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
    const int n0 = 128 * blockIdx.x + 16 * warp, active = (count + 7) / 8;
    const WeightRows<FP4> rows(p, n0);
    for (int i = threadIdx.x; i < 2 * ROOM; i += PRODUCT_THREADS)
        if (x_row[i / CHUNKS % WIDE_ROWS] < 0) chunks[i] = make_uint4(0, 0, 0, 0);
    float total[TILES][4] = {}, part[TILES][4] = {};
    const int first = part_begin(p, slice * p.parts), last = part_end(p, slice * p.parts + p.parts - 1);
    int leaf = slice * p.parts, end = part_end(p, leaf);
    Held<FP4> held, next;
    rows.load(next, first);
    copy_rows(p, x_row, first, chunks, scales);
    for (int block = first; block < last; block++) {
        const int now = (block - first) & 1;
        held = next;
        if (block + 1 < last) {
            rows.load(next, block + 1);
            copy_rows(p, x_row, block + 1, chunks + (1 - now) * ROOM, scales + (1 - now) * WIDE_ROWS);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        const uint4* here = chunks + now * ROOM + g * CHUNKS;
        const float* scale = scales + now * WIDE_ROWS + 2 * t;
        add_block<FP4, TILES>(
            part, held, active,
            [&](int n, int piece, int c) {
                if (!piece) return here[n * 8 * CHUNKS + (c ^ (g & 1) * 5)];
                const int row = x_row[8 * n + g];
                return row < 0 ? make_uint4(0, 0, 0, 0) : __ldg(p.x_low + ((i64)row * p.blocks + block) * CHUNKS + c);
            },
            [&](int n, int j) { return scale[8 * n + j]; });
        __syncthreads();
        if (block + 1 < end) continue;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total[n][i] = leaf % p.parts ? total[n][i] + part[n][i] : part[n][i];
                part[n][i] = 0;
            }
        if (block + 1 < last) end = part_end(p, ++leaf);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int entry = 8 * n + 2 * t + i % 2, at = n0 + g + i / 2 * 8;
            if (entry < count && at < p.n) p.out[(entry0 + entry) * p.out_row + slice * p.out_slice + at] = total[n][i];
        }
}

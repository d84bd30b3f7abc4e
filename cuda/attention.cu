// variants: GROUPS=2
// variants: GROUPS=8
// Sparse attention over stored keys, with a sink; the value is the key.
//
//   o_h = Σ_i e^(s_hi) k_i / (Σ_i e^(s_hi) + e^(sink_h)),  s_hi = (q_h · k_i) · D^-½
//
// The keys that are present are taken in the order of their places, in tiles of TILE. A tile's maximum, sum and weighted
// keys come from that tile alone; tiles are joined in ascending order by `join`. So it does not matter to any bit whether
// one block goes through all tiles of a row (attend_rows), or blocks take a tile each (attend_tiles) and attend_merge
// joins them; nor how many absent places a row was padded with.
//
// Products run on tensor cores, 16 heads · 8 keys or 8 dims, in groups of 64 dims: a key's codes under one scale, and its
// rotated dims as the last group. Codes are exact in fp16; rotated dims are too, divided by the power of two of the key's
// largest (but for what lies 2^-16 below it). A query and a weight go in as two fp16 numbers, the rounded one and the
// rest, under a power of two: 22 bits or more of the largest of its group. Groups' sums are added in ascending order.
//
// T rows, H heads of `dim` dims, n keys in a cache. Every pointer's alignment is that of its type, but for the fragments':
// a multiple of 16 bytes.
#include "keys.cuh"
#include "mma.cuh"
#include "reduce.cuh"

#ifndef GROUPS
#define GROUPS 8  // of 64 dims: those of the codes and one of rotated dims
#endif
#define TILE 32                              // keys
#define CODED (GROUPS - 1)                   // groups of codes
#define CODE_ROW (64 * CODED + 16)           // bytes of a key's codes in shared memory; 16 keep its readers on different banks
#define ROPE_ROW 72                          // fp16 numbers of a key's rotated dims in shared memory
#define SCORE_ROW 40                         // floats of a head's scores in shared memory
#define ATTEND_THREADS 128
#define OWN ((GROUPS + 3) / 4)               // groups of a warp where it sums keys
#define FRAGMENTS (GROUPS * 4 * 2 * 32)      // uint4 of 16 heads' queries: [GROUPS, 4 steps, 2, 32 lanes]

// ---------------------------------------------------------------------- what attention starts from
#define LIST_THREADS 256

// Exclusive sum over a block of LIST_THREADS and, in *total, the sum. warps: LIST_THREADS / 32 ints of shared memory.
__device__ __forceinline__ int count_before(int mine, int* warps, int* total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int below = __shfl_up_sync(FULL_MASK, upto, d);
        if (lane >= d) upto += below;
    }
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < LIST_THREADS / 32; w++) {
        if (w < warp) before += warps[w];
        all += warps[w];
    }
    __syncthreads();
    *total = all;
    return before + upto - mine;
}

// The present ones of places [n], in order → list from `base` on; returns their number.
__device__ __forceinline__ int list_present(const int* places, int n, int* list, int base, int* warps) {
    const int share = (n + LIST_THREADS - 1) / LIST_THREADS, first = min((int)threadIdx.x * share, n), last = min(first + share, n);
    int mine = 0, total;
    for (int i = first; i < last; i++) mine += places[i] >= 0;
    int at = base + count_before(mine, warps, &total);
    for (int i = first; i < last; i++)
        if (places[i] >= 0) list[at++] = places[i];
    return total;
}

// Where dim d of a group is in a fragment: its word (step, register) and half. Lane column t has dims 16 t .. 16 t + 15
// of a group; word i of its first eight holds dims i and i + 4, as key_pairs gives them, and so do the second eight.
struct Spot {
    int column, step, part, half;
};
__device__ __forceinline__ Spot spot_of(int d) {
    const int word = d % 16 / 8 * 4 + d % 4;
    return {d / 16, word / 2, word % 2, d % 8 / 4};
}

// Dim d of group g as a dim of the head, −1 where there is none; plain = dims before the rotated ones.
__device__ __forceinline__ int real_dim(int g, int d, int plain, int dim) {
    const int at = g < CODED ? 64 * g + d : plain + d;
    return at < (g < CODED ? plain : dim) ? at : -1;
}

// The power of two of a group's largest value as float bits, from its bits; NaN for a value that is not finite.
__device__ __forceinline__ float scale_for(u32 most) {
    return most >= 0x7f800000u ? e8m0_value(255) : as_float(min(max(most & 0x7f800000u, 1u << 23), 253u << 23));
}

// 1 / scale_for(..).
__device__ __forceinline__ float inverse_of(float scale) { return as_float((254u << 23) - as_bits(scale)); }

// 16 heads of q from `first` on, one group each warp: their fragments and scales [GROUPS, 16].
__device__ __forceinline__ void split_queries(const float* q, int first, int H, int dim, int plain, u16* fragments, float* scales) {
    const int lane = threadIdx.x & 31;
    for (int pair = threadIdx.x / 32; pair < 16 * GROUPS; pair += LIST_THREADS / 32) {
        const int h = pair % 16, g = pair / 16;
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int d = real_dim(g, lane + 32 * i, plain, dim);
            x[i] = d >= 0 && first + h < H ? q[(i64)(first + h) * dim + d] : 0.0f;
        }
        const float scale = scale_for(warp_max_bits(max(magnitude_bits(x[0]), magnitude_bits(x[1]))));
        if (lane == 0) scales[pair] = scale;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Spot spot = spot_of(lane + 32 * i);
            const float y = scale == scale ? x[i] * inverse_of(scale) : 0.0f;
            const u32 high = fp16_bits(y), low = fp16_bits(y - fp16_value(high));
            const int word = (((g * 4 + spot.step) * 2) * 32 + h % 8 * 4 + spot.column) * 4 + 2 * spot.part + h / 8;
            fragments[2 * word + spot.half] = (u16)high;
            fragments[2 * (word + 128) + spot.half] = (u16)low;
        }
    }
}

// q [T, H, dim]; places0 [T, n0], places1 [T, n1] (−1: absent) → list [T, n0 + n1], and counts [T, 2]: keys of the first
// part, of both; fragments [T, ⌈H / 16⌉, FRAGMENTS] uint4 and scales [T, ⌈H / 16⌉, GROUPS, 16] of the queries. Blocks of
// LIST_THREADS: (row, 0) for its list, (row, 1 ..) for 16 heads.
extern "C" __global__ void __launch_bounds__(LIST_THREADS)
attend_prepare(const float* q, const int* places0, int n0, const int* places1, int n1, int* list, int* counts, u32* fragments,
               float* scales, int H, int dim, int rope_dim) {
    __shared__ int warps[LIST_THREADS / 32];
    const i64 t = blockIdx.x;
    if (blockIdx.y == 0) {
        int* out = list + t * (n0 + n1);
        const int first = list_present(places0 + t * n0, n0, out, 0, warps);
        const int second = list_present(places1 + t * n1, n1, out, first, warps);
        if (threadIdx.x == 0) counts[2 * t] = first, counts[2 * t + 1] = first + second;
        return;
    }
    const int block = blockIdx.y - 1;
    const i64 at = t * (gridDim.y - 1) + block;
    split_queries(q + t * H * dim, 16 * block, H, dim, dim - rope_dim, (u16*)(fragments + at * FRAGMENTS * 4), scales + at * GROUPS * 16);
}

// ---------------------------------------------------------------------- joining tiles
// What a head has seen so far: its largest score, and Σ e^(s − top) over the keys.
struct Seen {
    float top, sum;
};

// Take a tile in: what was summed before counts `keep` times, what the tile summed `add` times.
__device__ __forceinline__ void join(Seen& seen, Seen tile, float& keep, float& add) {
    const float top = fmaxf(seen.top, tile.top);
    keep = exp_value(seen.top - top);
    add = exp_value(tile.top - top);
    seen.sum = fmaf(tile.sum, add, seen.sum * keep);
    seen.top = top;
}
__device__ __forceinline__ float joined(float value, float tile, float keep, float add) { return fmaf(tile, add, value * keep); }

// The weighted keys times this are the head's output. Without a key: top −inf, so 0.
__device__ __forceinline__ float share_of_keys(Seen seen, float sink) {
    const float top = fmaxf(seen.top, sink), e = exp_value(seen.top - top);
    return e / (seen.sum * e + exp_value(sink - top));
}

// ---------------------------------------------------------------------- one tile
// A block's shared memory.
struct Shared {
    uint4* query;        // [FRAGMENTS]
    float* query_scale;  // [GROUPS, 16]
    float* key_scale;    // [GROUPS, TILE]: what a fragment's values are to be multiplied by; 0 for keys that are not there
    float* score;        // [16, SCORE_ROW]: scores, then weights
    float* seen;         // [6, 16]: the row's top and sum, the tile's, what each counts when they are joined
    u8* codes;           // [TILE, CODE_ROW]
    u16* rope;           // [TILE, ROPE_ROW]: fp16, in the order of fragments
};
#define SHARED_BYTES (FRAGMENTS * 16 + (GROUPS * 16 + GROUPS * TILE + 16 * SCORE_ROW + 96) * 4 + TILE * (CODE_ROW + 2 * ROPE_ROW))

__device__ __forceinline__ Shared shared_of(uint4* shared) {
    float* query_scale = (float*)(shared + FRAGMENTS);
    float* key_scale = query_scale + GROUPS * 16;
    float* score = key_scale + GROUPS * TILE;
    float* seen = score + 16 * SCORE_ROW;
    u8* codes = (u8*)(seen + 96);
    return {shared, query_scale, key_scale, score, seen, codes, (u16*)(codes + TILE * CODE_ROW)};
}

// One row's keys: list [total], of which `first` are of cache0.
struct Keys {
    const int* list;
    KeyCache cache0, cache1;
    int first, total;
};

// A row's queries into shared memory.
__device__ __forceinline__ void load_queries(const Shared& s, const u32* fragments, const float* scales, i64 at) {
    for (int i = threadIdx.x; i < FRAGMENTS; i += ATTEND_THREADS) s.query[i] = ((const uint4*)fragments)[at * FRAGMENTS + i];
    for (int i = threadIdx.x; i < GROUPS * 16; i += ATTEND_THREADS) s.query_scale[i] = scales[at * GROUPS * 16 + i];
}

// Key i of the tile from its place; one warp. Its codes may come later: see load_tile.
__device__ __forceinline__ void load_key(const Shared& s, const KeyCache& c, i64 place, int i) {
    const int lane = threadIdx.x & 31;
    const u8* codes = c.codes + place * c.plain;
    uint4* unit = (uint4*)(s.codes + i * CODE_ROW + 16 * lane);
    if (lane < 4 * CODED) {
        if (c.wide && 16 * lane < c.plain)
            copy16(unit, codes + 16 * lane);
        else {
            u32 word[4] = {0, 0, 0, 0};
#pragma unroll
            for (int b = 0; b < 16; b++)
                if (16 * lane + b < c.plain) word[b / 4] |= (u32)codes[16 * lane + b] << 8 * (b % 4);
            *unit = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    float x[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int d = lane + 32 * r;
        x[r] = d < c.rope_dim ? bf16_value(c.rope[place * c.rope_dim + d]) : 0.0f;
    }
    const float scale = scale_for(warp_max_bits(max(magnitude_bits(x[0]), magnitude_bits(x[1]))));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int d = lane + 32 * r;
        s.rope[i * ROPE_ROW + d / 8 * 8 + d % 4 * 2 + d % 8 / 4] = (u16)fp16_bits(scale == scale ? x[r] * inverse_of(scale) : 0.0f);
    }
    if (lane < CODED) s.key_scale[lane * TILE + i] = lane < c.blocks ? e8m0_value(c.scales[place * c.blocks + lane]) * E4M3_RAISE : 0.0f;
    if (lane == CODED) s.key_scale[lane * TILE + i] = scale;
}

// Tile `tile` of the row into shared memory, zeros where its keys end; returns how many there are. All threads.
__device__ __forceinline__ int load_tile(const Shared& s, const Keys& keys, int tile) {
    const int lane = threadIdx.x & 31, count = min(TILE, keys.total - tile * TILE);
    for (int i = threadIdx.x / 32; i < TILE; i += ATTEND_THREADS / 32) {
        const int at = tile * TILE + i;
        if (i >= count) {
            if (lane < 4 * CODED) *(uint4*)(s.codes + i * CODE_ROW + 16 * lane) = make_uint4(0, 0, 0, 0);
            s.rope[i * ROPE_ROW + lane] = s.rope[i * ROPE_ROW + 32 + lane] = 0;
            if (lane < GROUPS) s.key_scale[lane * TILE + i] = 0.0f;
        } else if (at < keys.first)
            load_key(s, keys.cache0, keys.list[at], i);
        else
            load_key(s, keys.cache1, keys.list[at], i);
    }
    copy_commit();
    copy_wait<0>();
    return count;
}

// Warp w: the scores of 16 heads and keys 8 w .. 8 w + 7, times `scale`.
__device__ __forceinline__ void score_tile(const Shared& s, int count, float scale) {
    const int lane = threadIdx.x & 31, row = lane / 4, column = lane & 3, first = threadIdx.x / 32 * 8;
    if (first >= count) return;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 key[8];
        if (g < CODED) {
            const uint4 codes = *(const uint4*)(s.codes + (first + row) * CODE_ROW + 64 * g + 16 * column);
            key_pairs(codes.x, codes.y, key);
            key_pairs(codes.z, codes.w, key + 4);
        } else {
            const uint4* at = (const uint4*)(s.rope + (first + row) * ROPE_ROW + 16 * column);
            const uint4 one = at[0], two = at[1];
            key[0] = one.x, key[1] = one.y, key[2] = one.z, key[3] = one.w;
            key[4] = two.x, key[5] = two.y, key[6] = two.z, key[7] = two.w;
        }
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int low = 0; low < 2; low++) {
                const uint4 a = s.query[((g * 4 + step) * 2 + low) * 32 + lane];
                const u32 query[4] = {a.x, a.y, a.z, a.w};
                mma_fp16(c, query, key + 2 * step);
            }
        const float upper = s.query_scale[g * 16 + row], lower = s.query_scale[g * 16 + row + 8];
        const float even = s.key_scale[g * TILE + first + 2 * column], odd = s.key_scale[g * TILE + first + 2 * column + 1];
        sum[0] = fmaf(c[0] * upper, even, sum[0]), sum[1] = fmaf(c[1] * upper, odd, sum[1]);
        sum[2] = fmaf(c[2] * lower, even, sum[2]), sum[3] = fmaf(c[3] * lower, odd, sum[3]);
    }
    float* out = s.score + row * SCORE_ROW + first + 2 * column;
    out[0] = sum[0] * scale, out[1] = sum[1] * scale;
    out[8 * SCORE_ROW] = sum[2] * scale, out[8 * SCORE_ROW + 1] = sum[3] * scale;
}

// Scores → weights e^(s − top), 0 where there is no key; the tile's top and sum of each head. Each warp does 4 heads;
// lane 0 also joins the tile to what the row has seen.
__device__ __forceinline__ void weigh_tile(const Shared& s, int count) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = threadIdx.x / 32; h < 16; h += ATTEND_THREADS / 32) {
        const float score = lane < count ? s.score[h * SCORE_ROW + lane] : -infinity();
        const float top = warp_max(score), weight = lane < count ? exp_value(score - top) : 0.0f, sum = warp_sum(weight);
        s.score[h * SCORE_ROW + lane] = weight;
        if (lane == 0) {
            Seen row = {s.seen[h], s.seen[16 + h]};
            join(row, {top, sum}, s.seen[64 + h], s.seen[80 + h]);
            s.seen[h] = row.top, s.seen[16 + h] = row.sum;
            s.seen[32 + h] = top, s.seen[48 + h] = sum;
        }
    }
}

// The weighted keys of group g of the tile: lane column t gets dims 16 t .. 16 t + 15 of heads `row` and `row + 8` (row =
// lane / 4): out[j][0 .. 3] = dims 16 t + j and 16 t + 8 + j of the first, and of the second.
__device__ __forceinline__ void sum_group(const Shared& s, int g, int count, float (&out)[8][4]) {
    const int lane = threadIdx.x & 31, row = lane / 4, column = lane & 3;
    const float most = as_float(warp_max_bits(as_bits(s.key_scale[g * TILE + lane]))), inverse = 1.0f / most;
#pragma unroll
    for (int j = 0; j < 8; j++) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < 2; step++) {
        if (16 * step >= count) break;
        u32 high[4], low[4], key[2][8];
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int k = 16 * step + 8 * part + 2 * column;  // and k + 1
            const float even = s.key_scale[g * TILE + k] * inverse, odd = s.key_scale[g * TILE + k + 1] * inverse;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* weight = s.score + (row + 8 * half) * SCORE_ROW + k;
                const float x = weight[0] * even, y = weight[1] * odd;
                const u32 pair = fp16_pair(x, y);
                high[2 * part + half] = pair;
                low[2 * part + half] = fp16_pair(x - fp16_low(pair), y - fp16_high(pair));
            }
            if (g < CODED) {
                const uint2 one = *(const uint2*)(s.codes + k * CODE_ROW + 64 * g + 8 * row);
                const uint2 two = *(const uint2*)(s.codes + (k + 1) * CODE_ROW + 64 * g + 8 * row);
                key_pairs(one.x, two.x, key[part]);
                key_pairs(one.y, two.y, key[part] + 4);
            } else {
                const uint4 one = *(const uint4*)(s.rope + k * ROPE_ROW + 8 * row), two = *(const uint4*)(s.rope + (k + 1) * ROPE_ROW + 8 * row);
                const u32 a[4] = {one.x, one.y, one.z, one.w}, b[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    key[part][j] = __byte_perm(a[j], b[j], 0x5410), key[part][4 + j] = __byte_perm(a[j], b[j], 0x7632);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 both[2] = {key[0][j], key[1][j]};
            mma_fp16(out[j], high, both);
            mma_fp16(out[j], low, both);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[j][i] *= most;
}

// ---------------------------------------------------------------------- attention
// Value i of out[j] (sum_group): the head among 16, and the dim of the head or −1.
__device__ __forceinline__ int head_of(int i) { return (threadIdx.x & 31) / 4 + 8 * (i / 2); }
__device__ __forceinline__ int dim_of(int g, int j, int i, int plain, int dim) {
    return real_dim(g, 16 * (threadIdx.x & 3) + 8 * (i & 1) + j, plain, dim);
}

// list [T, width], counts [T, 2], fragments and scales (attend_prepare); for each part codes [n, dim − rope_dim], their scales
// [n, ⌈(dim − rope_dim) / 64⌉] and rope [n, rope_dim]; sink [H]; scale: dim^-½ → out [T, H, dim].
// A block of ATTEND_THREADS for a row and 16 of its heads; SHARED_BYTES of shared memory.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 3)
attend_rows(const int* list, const int* counts, const u32* fragments, const float* scales, const u8* codes0, const u8* scales0,
            const u16* rope0, const u8* codes1, const u8* scales1, const u16* rope1, const float* sink, float* out, int H,
            int dim, int rope_dim, int width, float scale) {
    extern __shared__ __align__(16) uint4 shared[];
    const Shared s = shared_of(shared);
    const i64 t = blockIdx.x;
    const Keys keys = {list + t * width, key_cache(codes0, scales0, rope0, dim, rope_dim),
                       key_cache(codes1, scales1, rope1, dim, rope_dim), counts[2 * t], counts[2 * t + 1]};
    const int warp = threadIdx.x / 32, first = 16 * blockIdx.y, plain = dim - rope_dim;
    float sum[OWN][8][4];
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum[o][j][0] = sum[o][j][1] = sum[o][j][2] = sum[o][j][3] = 0.0f;
    load_queries(s, fragments, scales, t * gridDim.y + blockIdx.y);
    if (threadIdx.x < 16) s.seen[threadIdx.x] = -infinity(), s.seen[16 + threadIdx.x] = 0.0f;
    for (int tile = 0; tile * TILE < keys.total; tile++) {
        const int count = load_tile(s, keys, tile);
        __syncthreads();
        score_tile(s, count, scale);
        __syncthreads();
        weigh_tile(s, count);
        __syncthreads();
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            if (warp + 4 * o >= GROUPS) break;
            float alone[8][4];
            sum_group(s, warp + 4 * o, count, alone);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float keep = s.seen[64 + head_of(i)], add = s.seen[80 + head_of(i)];
#pragma unroll
                for (int j = 0; j < 8; j++) sum[o][j][i] = joined(sum[o][j][i], alone[j][i], keep, add);
            }
        }
        __syncthreads();
    }
    __syncthreads();
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = head_of(i), g = warp + 4 * o;
            if (g >= GROUPS || first + h >= H) continue;
            const float share = share_of_keys({s.seen[h], s.seen[16 + h]}, sink[first + h]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int d = dim_of(g, j, i, plain, dim);
                if (d >= 0) out[(t * H + first + h) * dim + d] = sum[o][j][i] * share;
            }
        }
}

// As attend_rows, but a block takes one tile and leaves it by itself: seen [T, H, tiles, 2], part [T, H, tiles, dim].
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 3)
attend_tiles(const int* list, const int* counts, const u32* fragments, const float* scales, const u8* codes0, const u8* scales0,
             const u16* rope0, const u8* codes1, const u8* scales1, const u16* rope1, float* seen, float* part, int H, int dim,
             int rope_dim, int width, float scale) {
    extern __shared__ __align__(16) uint4 shared[];
    const Shared s = shared_of(shared);
    const i64 t = blockIdx.z;
    const int tile = blockIdx.x, tiles = gridDim.x, warp = threadIdx.x / 32, first = 16 * blockIdx.y, plain = dim - rope_dim;
    const Keys keys = {list + t * width, key_cache(codes0, scales0, rope0, dim, rope_dim),
                       key_cache(codes1, scales1, rope1, dim, rope_dim), counts[2 * t], counts[2 * t + 1]};
    if (tile * TILE >= keys.total) return;
    load_queries(s, fragments, scales, t * gridDim.y + blockIdx.y);
    if (threadIdx.x < 16) s.seen[threadIdx.x] = -infinity(), s.seen[16 + threadIdx.x] = 0.0f;
    const int count = load_tile(s, keys, tile);
    __syncthreads();
    score_tile(s, count, scale);
    __syncthreads();
    weigh_tile(s, count);
    __syncthreads();
    if (threadIdx.x < 32) {
        const int h = threadIdx.x / 2;
        if (first + h < H) seen[((t * H + first + h) * tiles + tile) * 2 + (threadIdx.x & 1)] = s.seen[32 + 16 * (threadIdx.x & 1) + h];
    }
    for (int g = warp; g < GROUPS; g += 4) {
        float alone[8][4];
        sum_group(s, g, count, alone);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int h = first + head_of(i), d = dim_of(g, j, i, plain, dim);
                if (h < H && d >= 0) part[((t * H + h) * tiles + tile) * dim + d] = alone[j][i];
            }
    }
}

// seen, part (attend_tiles), sink [H], counts [T, 2] → out [T, H, dim]. A block of 128 threads for a head of a row.
extern "C" __global__ void __launch_bounds__(128)
attend_merge(const float* seen, const float* part, const float* sink, const int* counts, float* out, int H, int dim, int tiles) {
    const i64 head = blockIdx.x;
    const int total = counts[2 * (head / H) + 1];
    Seen all = {-infinity(), 0.0f};
    float sum[GROUPS / 2 + 1];
#pragma unroll
    for (int j = 0; j < GROUPS / 2 + 1; j++) sum[j] = 0.0f;
    for (int tile = 0; tile * TILE < total; tile++) {
        const i64 at = head * tiles + tile;
        float keep, add;
        join(all, {seen[2 * at], seen[2 * at + 1]}, keep, add);
#pragma unroll
        for (int j = 0; j < GROUPS / 2 + 1; j++) {
            const int d = threadIdx.x + 128 * j;
            if (d < dim) sum[j] = joined(sum[j], part[at * dim + d], keep, add);
        }
    }
    const float share = share_of_keys(all, sink[head % H]);
#pragma unroll
    for (int j = 0; j < GROUPS / 2 + 1; j++) {
        const int d = threadIdx.x + 128 * j;
        if (d < dim) out[head * dim + d] = sum[j] * share;
    }
}

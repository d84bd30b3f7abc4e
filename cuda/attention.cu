// variants: CHUNKS=1
// variants: CHUNKS=2
// Sparse attention over stored keys, with a sink; the value is the key.
//
//   o_h = Σ_i e^(s_hi) k_i / (Σ_i e^(s_hi) + e^(sink_h)),  s_hi = (q_h · k_i) · D^-½
//
// The keys that are present are taken in the order of their places, in tiles of TILE. A tile's maximum, sum and weighted
// keys come from that tile alone; tiles are joined in ascending order by `join`. So it does not matter to any bit whether
// one block goes through all tiles of a row (attend_rows), or blocks take a tile each (attend_tiles) and attend_merge
// joins them; nor how many absent places a row was padded with. Keys are shared by all heads of a block: decoded once,
// exactly, to bf16.
//
// T rows, H heads of `dim` dims, n keys in a cache. Every pointer's alignment is that of its type.
#include "keys.cuh"
#include "reduce.cuh"

// ---------------------------------------------------------------------- which keys a row sees
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

// places0 [T, n0], places1 [T, n1] (−1: absent) → list [T, n0 + n1], and counts [T, 2]: keys of the first part, of both.
// A block of LIST_THREADS a row.
extern "C" __global__ void __launch_bounds__(LIST_THREADS)
attend_list(const int* places0, int n0, const int* places1, int n1, int* list, int* counts) {
    __shared__ int warps[LIST_THREADS / 32];
    const i64 t = blockIdx.x;
    int* out = list + t * (n0 + n1);
    const int first = list_present(places0 + t * n0, n0, out, 0, warps);
    const int second = list_present(places1 + t * n1, n1, out, first, warps);
    if (threadIdx.x == 0) counts[2 * t] = first, counts[2 * t + 1] = first + second;
}

// ---------------------------------------------------------------------- attention
#ifndef CHUNKS
#define CHUNKS 2  // of 256 dims, as many as hold a head
#endif
#define TILE 32                // keys
#define WIDTH (256 * CHUNKS)   // dims of a key in shared memory, zeros beyond D
#define HEADS 2                // of a warp
#define PART (8 * CHUNKS)      // dims of a lane: 8 of every 256
#define ATTEND_THREADS 256     // at most; fewer where there are fewer heads

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

__device__ __forceinline__ void unpack(uint4 w, float* k) {
    k[0] = bf16_value(w.x & 0xffff), k[1] = __uint_as_float(w.x & 0xffff0000u);
    k[2] = bf16_value(w.y & 0xffff), k[3] = __uint_as_float(w.y & 0xffff0000u);
    k[4] = bf16_value(w.z & 0xffff), k[5] = __uint_as_float(w.z & 0xffff0000u);
    k[6] = bf16_value(w.w & 0xffff), k[7] = __uint_as_float(w.w & 0xffff0000u);
}

// One row's keys and a warp's heads. keys: shared, bf16 [TILE, WIDTH]; weights: shared, this warp's [HEADS, TILE].
struct Work {
    u16* keys;
    float* weights;
    const int* list;  // [total]
    KeyCache cache0, cache1;
    int first, total;  // keys of part 0, of both
    float scale;
};

// Tile `tile` of the row into shared memory; all threads of the block.
__device__ __forceinline__ int load_tile(const Work& w, int tile) {
    const int count = min(TILE, w.total - tile * TILE), warps = blockDim.x / 32;
    for (int i = threadIdx.x / 32; i < count; i += warps) {
        const int at = tile * TILE + i;
        const i64 place = w.list[at];
        for (int u = threadIdx.x & 31; u < WIDTH / KEY_UNIT; u += 32)
            *(uint4*)(w.keys + i * WIDTH + KEY_UNIT * u) =
                at < w.first ? key_unit(w.cache0, place, u) : key_unit(w.cache1, place, u);
    }
    return count;
}

// Sums over the lanes of 16 values each: lane l gets value l / 2, and so does its neighbour. Lanes 2N apart share the
// work on 2N values: each keeps half of them and gives the other half away.
template <int N = 8> __device__ __forceinline__ float sum_16(float (&v)[16], int lane) {
    const bool upper = lane & 2 * N;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float give = upper ? v[i] : v[i + N], keep = upper ? v[i + N] : v[i];
        v[i] = keep + __shfl_xor_sync(FULL_MASK, give, 2 * N);
    }
    if constexpr (N > 1) return sum_16<N / 2>(v, lane);
    return v[0];
}

// The tile's scores of HEADS heads, q [HEADS, PART] a lane: lane l gets those of key 16 · (l mod 2) + l / 2.
__device__ __forceinline__ void tile_scores(const Work& w, const float (&q)[HEADS][PART], int count, float (&score)[HEADS]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float v[HEADS][16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) v[h][i] = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (16 * half + i >= count) break;
                float k[8];
                unpack(*(const uint4*)(w.keys + (16 * half + i) * WIDTH + 256 * c + 8 * lane), k);
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int h = 0; h < HEADS; h++) v[h][i] = fmaf(q[h][8 * c + j], k[j], v[h][i]);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float sum = sum_16(v[h], lane);
            if (half == 0) score[h] = sum;
            else {
                const bool odd = lane & 1;
                const float give = odd ? score[h] : sum, keep = odd ? sum : score[h];
                score[h] = keep + __shfl_xor_sync(FULL_MASK, give, 1);
            }
        }
    }
}

// One tile by itself: seen [HEADS] and out [HEADS, PART] of its `count` keys.
__device__ __forceinline__ void tile_alone(const Work& w, const float (&q)[HEADS][PART], int count, Seen (&seen)[HEADS],
                                           float (&out)[HEADS][PART]) {
    const int lane = threadIdx.x & 31, key = 16 * (lane & 1) + lane / 2;
    float score[HEADS];
    tile_scores(w, q, count, score);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float s = key < count ? score[h] * w.scale : -infinity();
        seen[h].top = warp_max(s);
        const float p = key < count ? exp_value(s - seen[h].top) : 0.0f;
        seen[h].sum = warp_sum(p);
        w.weights[h * TILE + key] = p;
#pragma unroll
        for (int j = 0; j < PART; j++) out[h][j] = 0.0f;
    }
    __syncwarp(FULL_MASK);
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float k[8];
            unpack(*(const uint4*)(w.keys + i * WIDTH + 256 * c + 8 * lane), k);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float p = w.weights[h * TILE + i];
#pragma unroll
                for (int j = 0; j < 8; j++) out[h][8 * c + j] = fmaf(p, k[j], out[h][8 * c + j]);
            }
        }
}

// A row's work, and the block's shared memory: WIDTH · TILE bf16, then HEADS · TILE floats a warp.
__device__ __forceinline__ Work work_of(u16* shared, i64 t, const int* list, const int* counts, KeyCache cache0, KeyCache cache1,
                                        int width, float scale) {
    float* weights = (float*)(shared + TILE * WIDTH) + threadIdx.x / 32 * HEADS * TILE;
    return {shared, weights, list + t * width, cache0, cache1, counts[2 * t], counts[2 * t + 1], scale};
}

// A lane's part of the queries of heads first .. first + HEADS − 1 of one row [H, dim]; zeros beyond.
__device__ __forceinline__ void load_queries(const float* row, int first, int H, int dim, float (&q)[HEADS][PART]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int j = 0; j < PART; j++) {
            const int d = j / 8 * 256 + 8 * lane + j % 8;
            q[h][j] = first + h < H && d < dim ? row[(i64)(first + h) * dim + d] : 0.0f;
        }
}

// q [T, H, dim], sink [H], list [T, width] and counts [T, 2] (attend_list), a cache for each part → out [T, H, dim].
// A block of up to ATTEND_THREADS (one warp for HEADS heads) for a row and its heads.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 1)
attend_rows(const float* q, const float* sink, const int* list, const int* counts, const u8* codes0, const u8* scales0,
            const u16* rope0, const u8* codes1, const u8* scales1, const u16* rope1, float* out, int H, int dim, int rope_dim,
            int width, float scale) {
    extern __shared__ __align__(16) u16 shared[];
    const i64 t = blockIdx.x;
    const Work w = work_of(shared, t, list, counts, key_cache(codes0, scales0, rope0, dim, rope_dim),
                           key_cache(codes1, scales1, rope1, dim, rope_dim), width, scale);
    const int lane = threadIdx.x & 31, first = HEADS * (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32);
    float queries[HEADS][PART], sum[HEADS][PART];
    Seen seen[HEADS];
    load_queries(q + t * H * dim, first, H, dim, queries);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        seen[h] = {-infinity(), 0.0f};
#pragma unroll
        for (int j = 0; j < PART; j++) sum[h][j] = 0.0f;
    }
    for (int tile = 0; tile * TILE < w.total; tile++) {
        const int count = load_tile(w, tile);
        __syncthreads();
        if (first < H) {
            Seen alone[HEADS];
            float part[HEADS][PART], keep, add;
            tile_alone(w, queries, count, alone, part);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                join(seen[h], alone[h], keep, add);
#pragma unroll
                for (int j = 0; j < PART; j++) sum[h][j] = joined(sum[h][j], part[h][j], keep, add);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (first + h >= H) continue;
        const float share = share_of_keys(seen[h], sink[first + h]);
#pragma unroll
        for (int j = 0; j < PART; j++) {
            const int d = j / 8 * 256 + 8 * lane + j % 8;
            if (d < dim) out[(t * H + first + h) * dim + d] = sum[h][j] * share;
        }
    }
}

// As attend_rows, but a block takes one tile and leaves it by itself: seen [T, H, tiles, 2], part [T, H, tiles, dim].
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, 1)
attend_tiles(const float* q, const int* list, const int* counts, const u8* codes0, const u8* scales0, const u16* rope0,
             const u8* codes1, const u8* scales1, const u16* rope1, float* seen, float* part, int H, int dim, int rope_dim,
             int width, float scale) {
    extern __shared__ __align__(16) u16 shared[];
    const i64 t = blockIdx.z;
    const int tile = blockIdx.x, tiles = gridDim.x;
    const Work w = work_of(shared, t, list, counts, key_cache(codes0, scales0, rope0, dim, rope_dim),
                           key_cache(codes1, scales1, rope1, dim, rope_dim), width, scale);
    if (tile * TILE >= w.total) return;
    const int lane = threadIdx.x & 31, first = HEADS * (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32);
    float queries[HEADS][PART], alone_part[HEADS][PART];
    Seen alone[HEADS];
    load_queries(q + t * H * dim, first, H, dim, queries);
    const int count = load_tile(w, tile);
    __syncthreads();
    if (first >= H) return;
    tile_alone(w, queries, count, alone, alone_part);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (first + h >= H) continue;
        const i64 at = (t * H + first + h) * tiles + tile;
        if (lane == 0) seen[2 * at] = alone[h].top, seen[2 * at + 1] = alone[h].sum;
#pragma unroll
        for (int j = 0; j < PART; j++) {
            const int d = j / 8 * 256 + 8 * lane + j % 8;
            if (d < dim) part[at * dim + d] = alone_part[h][j];
        }
    }
}

// seen, part (attend_tiles), sink [H], counts [T, 2] → out [T, H, dim]. A block of 128 threads for a head of a row.
extern "C" __global__ void __launch_bounds__(128)
attend_merge(const float* seen, const float* part, const float* sink, const int* counts, float* out, int H, int dim, int tiles) {
    const i64 head = blockIdx.x;
    const int total = counts[2 * (head / H) + 1];
    Seen all = {-infinity(), 0.0f};
    float sum[PART / 4];
#pragma unroll
    for (int j = 0; j < PART / 4; j++) sum[j] = 0.0f;
    for (int tile = 0; tile * TILE < total; tile++) {
        const i64 at = head * tiles + tile;
        float keep, add;
        join(all, {seen[2 * at], seen[2 * at + 1]}, keep, add);
#pragma unroll
        for (int j = 0; j < PART / 4; j++) {
            const int d = threadIdx.x + 128 * j;
            if (d < dim) sum[j] = joined(sum[j], part[at * dim + d], keep, add);
        }
    }
    const float share = share_of_keys(all, sink[head % H]);
#pragma unroll
    for (int j = 0; j < PART / 4; j++) {
        const int d = threadIdx.x + 128 * j;
        if (d < dim) out[head * dim + d] = sum[j] * share;
    }
}

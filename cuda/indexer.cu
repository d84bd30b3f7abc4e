// variants: GROUPS=4
// variants: GROUPS=2
// The indexer: rotated e2m1 queries and keys, scores, and the choice of the best entries.
//
//   index_query    q_h → rotate, Hadamard (Sylvester order, · DIM^-½), e2m1 per 32, decoded;  encode_index: keys, without rotation
//   index_scores   score_j = Σ_h w_h · DIM^-½ · H^-½ · max(0, q_h · k_j)
//   index_choose   the k largest, by the radix of their bits; −0 = 0, equal ones: lower j
//
// Within a group of 32 the products of two e2m1 vectors add up exactly, on tensor cores too. Per head the groups' sums,
// times their two scales, are added in ascending order; heads h, h + 8 of every 16 in ascending order, and then the
// eight sums so made as a tree.
//
// T rows, H heads, DIM = 32 · GROUPS dims of an index key. Rotation and Hadamard run in double: their sums are exact or nearly.
#include "numeric.cuh"
#include "rope.cuh"
#include "mma.cuh"

#ifndef GROUPS
#define GROUPS 4
#endif
#define DIM (32 * GROUPS)

// ---------------------------------------------------------------------- queries and keys
// A warp's vector, lane l has x_l, x_(32 + l), ... → its Hadamard rotation, times scale, to float32.
__device__ __forceinline__ void hadamard(double (&x)[GROUPS], double scale, float (&y)[GROUPS]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 1; half < GROUPS; half <<= 1)
#pragma unroll
        for (int r = 0; r < GROUPS; r++)
            if (!(r & half)) {
                const double sum = x[r] + x[r + half];
                x[r + half] = x[r] - x[r + half];
                x[r] = sum;
            }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
#pragma unroll
        for (int r = 0; r < GROUPS; r++) {
            const double other = __shfl_xor_sync(FULL_MASK, x[r], d);
            x[r] = lane & d ? other - x[r] : x[r] + other;
        }
#pragma unroll
    for (int r = 0; r < GROUPS; r++) y[r] = (float)(x[r] * scale);
}

// q [T, H, DIM] (heads = T · H), cosine, sine [T, pairs] → out [T, H, DIM]. One warp a head.
extern "C" __global__ void index_query(const float* q, const float* cosine, const float* sine, float* out, i64 heads, int H, int pairs,
                                       double scale) {
    const i64 head = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= heads) return;
    const int lane = threadIdx.x & 31, plain = DIM - 2 * pairs;
    const i64 angles = head / H * pairs;
    double x[GROUPS];
    float y[GROUPS];
#pragma unroll
    for (int r = 0; r < GROUPS; r++) {
        const int d = 32 * r + lane;
        double even = (double)q[head * DIM + (d & ~1)], odd = (double)q[head * DIM + (d | 1)];
        if (d >= plain) turn(even, odd, cosine[angles + (d - plain) / 2], sine[angles + (d - plain) / 2]);
        x[r] = (double)(float)(lane & 1 ? odd : even);
    }
    hadamard(x, scale, y);
#pragma unroll
    for (int r = 0; r < GROUPS; r++) {
        const u32 byte = e2m1_scale(warp_max_bits(magnitude_bits(y[r])));
        u32 code;
        out[head * DIM + 32 * r + lane] = round_e2m1(y[r] * e8m0_inverse(byte), &code) * e8m0_value(byte);
    }
}

// k [n, DIM] → codes [., DIM / 2], scales [., DIM / 32] at places where [n]. One warp a key.
extern "C" __global__ void encode_index(const float* k, const int* where, u8* codes, u8* scales, int n, double scale) {
    const i64 i = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= n) return;
    const int lane = threadIdx.x & 31;
    const i64 place = where[i];
    double x[GROUPS];
    float y[GROUPS];
#pragma unroll
    for (int r = 0; r < GROUPS; r++) x[r] = (double)k[i * DIM + 32 * r + lane];
    hadamard(x, scale, y);
#pragma unroll
    for (int r = 0; r < GROUPS; r++) {
        const u32 byte = e2m1_scale(warp_max_bits(magnitude_bits(y[r])));
        u32 code;
        round_e2m1(y[r] * e8m0_inverse(byte), &code);
        const u32 next = __shfl_down_sync(FULL_MASK, code, 1);
        if (!(lane & 1)) codes[place * (DIM / 2) + 16 * r + lane / 2] = (u8)(code | next << 4);
        if (lane == 0) scales[place * GROUPS + r] = (u8)byte;
    }
}

// The index keys at places where [n] → out [n, DIM]. One thread a dim.
extern "C" __global__ void decode_index(const u8* codes, const u8* scales, const int* where, float* out, int n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (i64)n * DIM) return;
    const i64 place = where[i / DIM];
    const int d = (int)(i % DIM);
    out[i] = e2m1_value(codes[place * (DIM / 2) + d / 2] >> 4 * (d & 1) & 15) * e8m0_value(scales[place * GROUPS + d / 32]);
}

// ---------------------------------------------------------------------- scores
#define SCORE_THREADS 128
#define SPAN 4                                   // groups of 8 entries that a warp scores at a time
#define SCORED (SCORE_THREADS / 32 * 8 * SPAN)   // entries that a block does

// The query of one row in shared memory, for heads in tiles of 16.
struct Query {
    uint4* fragment;  // [tiles, GROUPS, 2, 32]: the two A fragments of a group, a lane's four registers side by side
    float* scale;     // [16 · tiles, GROUPS]: what a fragment's values and a key's raised codes are to be multiplied by
    float* weight;    // [16 · tiles]
};

// q [H, DIM], w [H] → shared memory; heads beyond H are zeros. A group's values, divided by the power of two of the largest,
// are exact in fp16 if they are e2m1 values under one scale. All threads of the block; ends with a barrier.
__device__ __forceinline__ void load_query(const Query& to, const float* q, const float* w, int H, int tiles, float factor) {
    for (int i = threadIdx.x; i < 16 * tiles * GROUPS; i += SCORE_THREADS) {
        const int h = i / GROUPS;
        u32 most = 0;
        if (h < H)
            for (int d = 0; d < 32; d++) most = max(most, magnitude_bits(q[(i64)i * 32 + d]));
        const int exponent = min(max((int)(most >> 23), 1), 240);
        to.scale[i] = most >= 0x7f800000u ? e8m0_value(255) : as_float((u32)(exponent + 14) << 23);  // 14: E2M1_RAISE
    }
    for (int h = threadIdx.x; h < 16 * tiles; h += SCORE_THREADS) to.weight[h] = h < H ? w[h] * factor : 0.0f;
    __syncthreads();
    u32* words = (u32*)to.fragment;
    for (int i = threadIdx.x; i < tiles * GROUPS * 256; i += SCORE_THREADS) {
        // word i: register `part` of lane `lane` in fragment `step` of a group
        const int part = i & 3, lane = i >> 2 & 31, step = i >> 7 & 1, group = i / 256 % GROUPS, tile = i / (256 * GROUPS);
        const int h = 16 * tile + lane / 4 + 8 * (part & 1), d = 32 * group + 8 * (lane & 3) + 2 * step + (part >> 1);
        const float scale = to.scale[h * GROUPS + group];
        const float inverse = E2M1_RAISE / scale;
        const bool there = h < H && scale == scale;
        const u32 low = there ? fp16_bits(q[(i64)h * DIM + d] * inverse) : 0, high = there ? fp16_bits(q[(i64)h * DIM + d + 4] * inverse) : 0;
        words[i] = low | high << 16;
    }
    __syncthreads();
}

__device__ __forceinline__ u32 load_codes(const u8* at, bool wide) {
    return wide ? *(const u32*)at : at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

// q [T, H, DIM], w [T, H]; codes [., DIM / 2], scales [., GROUPS]; slots, visible [T]; pages [., slot_pages]: entry j of slot s
// lies at pages[s, j div page_entries] · page_entries + j mod page_entries → scores [T, stride] of the visible entries; a
// row with at most k gets none. A block takes SCORED entries of row blockIdx.y and goes on gridDim.x · SCORED further.
// Shared memory: as in Query, tiles = ⌈H / 16⌉. factor: DIM^-½ · H^-½.
extern "C" __global__ void __launch_bounds__(SCORE_THREADS, 2)
index_scores(const float* q, const float* w, const u8* codes, const u8* scales, const int* slots, const int* visible,
             const int* pages, float* scores, int H, int slot_pages, int page_entries, int k, i64 stride, float factor) {
    extern __shared__ __align__(16) uint4 shared[];
    const i64 t = blockIdx.y;
    const int n = visible[t], lane = threadIdx.x & 31, row = lane / 4, column = lane & 3, tiles = (H + 15) / 16;
    if (n <= k || (int)blockIdx.x * SCORED >= n) return;
    float* after = (float*)(shared + tiles * GROUPS * 64);
    const Query query = {shared, after, after + 16 * tiles * GROUPS};
    load_query(query, q + t * H * DIM, w + t * H, H, tiles, factor);
    const int* page = pages + (i64)slots[t] * slot_pages;
    const bool wide = (u64)codes % 4 == 0;
    for (int start = blockIdx.x * SCORED + threadIdx.x / 32 * 8 * SPAN; start < n; start += gridDim.x * SCORED) {
        u32 pair[SPAN][GROUPS][4];
        float scale[SPAN][GROUPS][2], score[SPAN][2];  // of the two entries whose sums this lane gets
#pragma unroll
        for (int s = 0; s < SPAN; s++) {
            const int j = min(start + 8 * s + row, n - 1);
            const i64 place = (i64)page[j / page_entries] * page_entries + j % page_entries;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                e2m1_pairs(load_codes(codes + place * (DIM / 2) + 16 * g + 4 * column, wide), pair[s][g]);
                const float own = e8m0_value(scales[place * GROUPS + g]);
                scale[s][g][0] = __shfl_sync(FULL_MASK, own, 8 * column);
                scale[s][g][1] = __shfl_sync(FULL_MASK, own, 8 * column + 4);
            }
            score[s][0] = score[s][1] = 0.0f;
        }
        for (int tile = 0; tile < tiles; tile++) {
            float dot[SPAN][4];
#pragma unroll
            for (int s = 0; s < SPAN; s++) dot[s][0] = dot[s][1] = dot[s][2] = dot[s][3] = 0.0f;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const uint4 a = query.fragment[(tile * GROUPS + g) * 64 + lane], b = query.fragment[(tile * GROUPS + g) * 64 + 32 + lane];
                const u32 first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
                const float upper = query.scale[(16 * tile + row) * GROUPS + g], lower = query.scale[(16 * tile + row + 8) * GROUPS + g];
#pragma unroll
                for (int s = 0; s < SPAN; s++) {
                    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    mma_fp16(c, first, pair[s][g]);
                    mma_fp16(c, second, pair[s][g] + 2);
                    dot[s][0] = fmaf(c[0] * upper, scale[s][g][0], dot[s][0]);
                    dot[s][1] = fmaf(c[1] * upper, scale[s][g][1], dot[s][1]);
                    dot[s][2] = fmaf(c[2] * lower, scale[s][g][0], dot[s][2]);
                    dot[s][3] = fmaf(c[3] * lower, scale[s][g][1], dot[s][3]);
                }
            }
            const float w0 = query.weight[16 * tile + row], w1 = query.weight[16 * tile + row + 8];
#pragma unroll
            for (int s = 0; s < SPAN; s++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    score[s][e] = fmaf(w0, dot[s][e] < 0 ? 0.0f : dot[s][e], score[s][e]);
                    score[s][e] = fmaf(w1, dot[s][e + 2] < 0 ? 0.0f : dot[s][e + 2], score[s][e]);
                }
        }
#pragma unroll
        for (int s = 0; s < SPAN; s++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float sum = score[s][e];
#pragma unroll
                for (int d = 16; d >= 4; d >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, d);
                const int j = start + 8 * s + 2 * column + e;
                if (row == 0 && j < n) scores[t * stride + j] = sum;
            }
    }
}

// ---------------------------------------------------------------------- choice
#define BINS 2048  // of a digit of 11 bits; three digits make 32
#define BATCH 8    // entries that a thread counts at a time
#define ITEMS 8    // entries in a row that a thread looks at when it writes

// A float's bits, so that unsigned order is the floats' order; −0 as 0.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = as_bits(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Lanes' counts, lane 31's first: the lane at which `left` of them are reached, and of them how many are left for it.
__device__ __forceinline__ int find_lane(int count, int& left) {
    const int lane = threadIdx.x & 31;
    int upto = count;  // with the lanes above
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int above = __shfl_down_sync(FULL_MASK, upto, d);
        if (lane + d < 32) upto += above;
    }
    const int own = left - (upto - count);
    const int who = __ffs(__ballot_sync(FULL_MASK, own > 0 && own <= count)) - 1;
    left = __shfl_sync(FULL_MASK, own, who);
    return who;
}

// counts [BINS]: how many of some keys have a digit. One warp finds the digit at which, from the top, `need` of them are
// reached → found[0], how many of those with just this digit are needed → found[1], and how many there are → found[2].
__device__ __forceinline__ void find_digit(const int* counts, int need, int* found) {
    const int lane = threadIdx.x & 31, own = BINS / 32;
    int sum = 0;
#pragma unroll 16
    for (int i = 0; i < own; i++) sum += counts[lane * own + ((i + lane) & (own - 1))];  // each lane another bank
    const int first = find_lane(sum, need) * own, two = first + 2 * lane;
    int digit = first + 2 * find_lane(counts[two] + counts[two + 1], need) + 1;
    if (need > counts[digit]) need -= counts[digit--];
    if (lane == 0) found[0] = digit, found[1] = need, found[2] = counts[digit];
}

// scores [T, stride], visible [T] → chosen [T, k]: the k best of a row's visible entries, ascending; all of them, then −1,
// where there are no more than k. One block a row.
extern "C" __global__ void __launch_bounds__(1024, 1)
index_choose(const float* scores, const int* visible, int* chosen, int k, i64 stride) {
    __shared__ int counts[BINS];
    __shared__ int found[3];
    __shared__ int above[32];
    __shared__ int equal[32];
    const i64 t = blockIdx.x;
    const int n = visible[t], lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const float* score = scores + t * stride;
    int* out = chosen + t * k;
    if (n <= k) {
        for (int i = threadIdx.x; i < k; i += blockDim.x) out[i] = i < n ? i : -1;
        return;
    }
    // `need` of the keys that begin with `prefix` are wanted, and all above; done when that is all of them
    u32 prefix = 0, mask = 0;
    int need = k, there = n;
    for (int shift = 21; need && need != there; shift = shift > 10 ? shift - 11 : 0) {
        const u32 digits = shift ? BINS - 1 : 1023;
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) counts[i] = 0;
        __syncthreads();
        for (int start = threadIdx.x; start < n; start += blockDim.x * BATCH) {
            u32 key[BATCH];  // all loads on their way before the first is waited for
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int j = start + i * blockDim.x;
                key[i] = ordered(j < n ? score[j] : 0.0f);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (start + (int)(i * blockDim.x) < n && (key[i] & mask) == prefix) atomicAdd(&counts[key[i] >> shift & digits], 1);
        }
        __syncthreads();
        if (warp == 0) find_digit(counts, need, found);
        __syncthreads();
        prefix |= (u32)found[0] << shift;
        mask |= digits << shift;
        need = found[1], there = found[2];
        __syncthreads();
        if (!shift) break;
    }
    int passed = 0, matched = 0;  // entries above the prefix, and at it, before those in work
    for (int start = 0; start < n && passed + min(matched, need) < k; start += blockDim.x * ITEMS) {
        const int first = start + threadIdx.x * ITEMS;
        int more = 0, same = 0;
        u32 kind = 0;  // two bits an entry
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const u32 head = first + i < n ? ordered(score[first + i]) & mask : 0;
            const bool is_more = first + i < n && head > prefix, is_same = first + i < n && head == prefix;
            more += is_more, same += is_same;
            kind |= (is_more ? 1u : is_same ? 2u : 0u) << 2 * i;
        }
        int both = more | same << 16;  // at most 32 · ITEMS each
        const int mine = both;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int below = __shfl_up_sync(FULL_MASK, both, d);
            if (lane >= d) both += below;
        }
        if (lane == 31) above[warp] = both & 0xffff, equal[warp] = both >> 16;
        __syncthreads();
        int before = passed + ((both - mine) & 0xffff), ties = matched + ((both - mine) >> 16);
        for (int i = 0; i < warps; i++) {
            if (i < warp) before += above[i], ties += equal[i];
            passed += above[i], matched += equal[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const u32 what = kind >> 2 * i & 3;
            if (what == 1 || (what == 2 && ties < need)) out[before + min(ties, need)] = first + i;
            before += what == 1, ties += what == 2;
        }
    }
}

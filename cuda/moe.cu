// Experts: routing, what a forward needs of which expert, activation, and the sum over a row's experts.
//
//   gate      score = sqrt(softplus(logit)); the k best of score + bias; weight = score / Σ score · scale
//   experts   y[t] = Σ_s tree ( Σ_j w2[ids[t, j]] · q(a[t, j])  +  w2[shared] · q(a[t, k]) )   per slice s of the inner dimension
//             a[t, j] = silu(min(g, limit)) · clamp(u, ±limit) · weight[t, j],   g = w1 · q(x[t]), u = w3 · q(x[t])
//
// The products are those of linear.cu, over entries: (row, choice) pairs sorted by expert, rows ascending, then every row
// once more for the shared expert. Each expert's weights are read once per tile of entries. q rounds to e4m3 per block of 128.
#include "product.cuh"

#define PLAN_THREADS 512
#define GATE_THREADS 128

// ---------------------------------------------------------------------- routing
// logits [T, experts]; bias [experts] or null; fixed [vocab, k] int64 or null: the choice by token, tokens [T] → ids [T, k]
// ascending, weights [T, k]. Equal scores: the lower id. A NaN counts as −∞. A block per row; k ≤ 32. Shared: 2 · experts floats.
extern "C" __global__ void __launch_bounds__(GATE_THREADS)
gate(const float* logits, const float* bias, const i64* fixed, const int* tokens, int* ids, float* weights, int experts, int k,
     float scale) {
    extern __shared__ float scores[];
    __shared__ int chosen[32];
    float* keys = scores + experts;
    const int lane = threadIdx.x;
    const i64 t = blockIdx.x;
    for (int e = threadIdx.x; e < experts; e += GATE_THREADS) {
        const float score = sqrtf(softplus(logits[t * experts + e])), key = bias ? score + bias[e] : score;
        scores[e] = score;
        keys[e] = key == key ? key : -infinity();
    }
    __syncthreads();
    if (lane >= 32) return;
    int own = lane < k && fixed ? (int)fixed[(i64)tokens[t] * k + lane] : experts;
    for (int i = 0; i < k && !fixed; i++) {
        float best = -infinity();
        int id = experts;
        for (int e = lane; e < experts; e += 32) // a NaN marks what has been chosen
            if (keys[e] > best || (id == experts && keys[e] == best)) best = keys[e], id = e;
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            const float other = __shfl_xor_sync(FULL_MASK, best, d);
            const int other_id = __shfl_xor_sync(FULL_MASK, id, d);
            if (other > best || (other == best && other_id < id)) best = other, id = other_id;
        }
        if (lane == i) own = id;
        if (lane == 0) keys[id] = as_float(0x7fc00000u);
        __syncwarp();
    }
    int place = 0;
    for (int i = 0; i < k; i++) {
        const int other = __shfl_sync(FULL_MASK, own, i);
        place += other < own || (other == own && i < lane);
    }
    if (lane < k) chosen[place] = own;
    __syncwarp();
    if (lane >= k) return;
    float sum = 0, score = 0;
    for (int i = 0; i < k; i++) {
        const int e = chosen[i];
        const float other = e >= 0 && e < experts ? scores[e] : as_float(0x7fc00000u); // a table may name no expert
        sum += other;
        if (i == lane) score = other;
    }
    ids[t * k + lane] = chosen[lane];
    weights[t * k + lane] = score / sum * scale;
}

// ids [T, k], weights [T, k] → entries: rows [T (k + 1)] (each one's row of x), factor [T (k + 1)] (its weight; 1 for the
// shared expert), place [T, k] (where a choice went; −1: no such expert), and tiles (expert, first entry, entries ≤ height), tile_count
// of them, by ascending expert. One block. Shared: 2 · experts ints.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
plan(const int* ids, const float* weights, int* rows, float* factor, int* place, int* tiles, int* tile_count, int T, int k,
     int experts, int height) {
    extern __shared__ int counts[];
    int* tile_of = counts + experts;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, choices = T * k;
    for (int i = threadIdx.x; i < choices; i += PLAN_THREADS)
        if (ids[i] < 0 || ids[i] >= experts) place[i] = -1;
    for (int t = threadIdx.x; t < T; t += PLAN_THREADS) rows[choices + t] = t, factor[choices + t] = 1.0f;
    for (int e = warp; e < experts; e += PLAN_THREADS / 32) {
        int count = 0;
        for (int i = 0; i < choices; i += 32) count += __popc(__ballot_sync(FULL_MASK, i + lane < choices && ids[i + lane] == e));
        if (lane == 0) counts[e] = count;
    }
    __syncthreads();
    if (warp == 0) { // counts → first entry, tile_of → first tile
        int entries = 0, made = 0;
        for (int base = 0; base < experts; base += 32) {
            const int e = base + lane, count = e < experts ? counts[e] : 0, own = (count + height - 1) / height;
            int upto = count, tiles_upto = own;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const int other = __shfl_up_sync(FULL_MASK, upto, d), other_tiles = __shfl_up_sync(FULL_MASK, tiles_upto, d);
                if (lane >= d) upto += other, tiles_upto += other_tiles;
            }
            if (e < experts) counts[e] = entries + upto - count, tile_of[e] = made + tiles_upto - own;
            entries += __shfl_sync(FULL_MASK, upto, 31);
            made += __shfl_sync(FULL_MASK, tiles_upto, 31);
        }
        if (lane == 0) *tile_count = made;
    }
    __syncthreads();
    for (int e = warp; e < experts; e += PLAN_THREADS / 32) {
        const int first = counts[e];
        int at = first;
        for (int i = 0; i < choices; i += 32) {
            const bool here = i + lane < choices && ids[i + lane] == e;
            const u32 all = __ballot_sync(FULL_MASK, here);
            if (here) {
                const int entry = at + __popc(all & ((1u << lane) - 1));
                rows[entry] = (i + lane) / k, factor[entry] = weights[i + lane], place[i + lane] = entry;
            }
            at += __popc(all);
        }
        for (int i = lane; i < (at - first + height - 1) / height; i += 32) {
            int* tile = tiles + 3 * (tile_of[e] + i);
            tile[0] = e, tile[1] = first + height * i, tile[2] = min(height, at - first - height * i);
        }
    }
}

// ---------------------------------------------------------------------- activation
// limit 0: no clamp. A NaN stays.
__device__ __forceinline__ float activation(float g, float u, float weight, float limit) {
    if (limit) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
    }
    return g * sigmoid(g) * u * weight;
}

// g, u, y [rows, n]; weight [rows] or null.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
swiglu(const float* g, const float* u, const float* weight, float* y, int rows, int n, float limit) {
    const i64 i = (i64)blockIdx.x * PRODUCT_THREADS + threadIdx.x;
    if (i < (i64)rows * n) y[i] = activation(g[i], u[i], weight ? weight[i / n] : 1.0f, limit);
}

// products [2, entries, inner] (g, then u), factor [entries] → the rounded activation as packed rows: x_high [entries, blocks,
// 128] fp16, x_scale [entries, blocks], blocks = ceil(inner / 128). A warp per block of 128.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
activate(const float* products, const float* factor, int entries, int inner, int blocks, float limit, void* x_high,
         float* x_scale) {
    const int lane = threadIdx.x & 31;
    const i64 at = (i64)blockIdx.x * PRODUCT_WARPS + (threadIdx.x >> 5), entry = at / blocks;
    if (entry >= entries) return;
    const int k = (int)(at % blocks) * BLOCK + lane / 2 * 8 + lane % 2 * 2;
    const float *g = products + entry * inner, *u = g + (i64)entries * inner;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int own = k + i / 2 + i % 2 * 4;
        v[i] = own < inner ? activation(g[own], u[own], factor[entry], limit) : 0.0f;
    }
    pack_block(v, true, (uint4*)x_high + at * CHUNKS, nullptr, x_scale + at);
}

// ---------------------------------------------------------------------- the sum over experts
// z [T (k + 1), slices, width]: what each entry adds to outputs first .. first + width − 1; place [T, k] → y [T, d]. Per
// slice the experts in ascending order of the choices, the shared one last; slices as a binary tree. A choice of no expert gives NaN.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
combine(const float* z, const int* place, float* y, int T, int k, int slices, int width, int first, int d) {
    const int i = blockIdx.x * PRODUCT_THREADS + threadIdx.x;
    const i64 t = blockIdx.y, entry = (i64)slices * width;
    if (i >= width) return;
    Tree tree;
    float total = 0;
    for (int s = 0; s < slices; s++) {
        const float* from = z + (i64)s * width + i;
        float sum = 0;
        for (int j = 0; j < k; j++) {
            const int own = place[t * k + j];
            sum += own < 0 ? as_float(0x7fc00000u) : from[own * entry];
        }
        total = tree.add(s, sum + from[((i64)T * k + t) * entry]);
    }
    y[t * d + first + i] = total;
}

// The same in several calls: what the entries of z that there are add to sums [.., lanes, slices, d], rows where [T]. lanes 1: choices in
// order, the shared expert last; more: each has its own. shared: whether z holds the shared expert's entries.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
add_parts(const float* z, const int* place, const int* where, float* sums, int T, int k, int lanes, int slices, int width,
          int first, int d, int shared) {
    const int i = blockIdx.x * PRODUCT_THREADS + threadIdx.x;
    const i64 t = blockIdx.y, entry = (i64)slices * width;
    if (i >= width) return;
    for (int s = 0; s < slices; s++) {
        const float* from = z + (i64)s * width + i;
        float* to = sums + ((i64)where[t] * lanes * slices + s) * d + first + i;
        for (int j = 0; j < k + shared; j++) {
            const i64 own = j < k ? place[t * k + j] : (i64)T * k + t;
            if (own >= 0) to[lanes > 1 ? (i64)j * slices * d : 0] += from[own * entry];
        }
    }
}

// sums [T, lanes, slices, d] → y [T, d]: lanes in order, then slices as a binary tree.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
add_lanes(const float* sums, float* y, int lanes, int slices, int d) {
    const int i = blockIdx.x * PRODUCT_THREADS + threadIdx.x;
    const i64 t = blockIdx.y;
    if (i >= d) return;
    Tree tree;
    float total = 0;
    for (int s = 0; s < slices; s++) {
        float sum = 0;
        for (int lane = 0; lane < lanes; lane++) sum += sums[((t * lanes + lane) * slices + s) * d + i];
        total = tree.add(s, sum);
    }
    y[t * d + i] = total;
}

// Linears.
//
//   y[t, z, n] = Σ_k x[t, z, k] · w[z, n, k]     z: groups (wo_a); 1 for plain linears
//
// Packed weights (fp8, fp4): pack_rows, then a product_* kernel; product.cuh has the order of sums. The same kernels
// multiply the experts of moe.cu, whose weights are found through a table and whose rows through a list.
// bf16 and float32 weights: dense_*, fused multiply-adds. Lane l of a warp adds k = 8l .. 8l+7, 256 + 8l .., ascending, then the
// lanes are added at distances 16, 8, 4, 2, 1; slices as a binary tree.
#include "product.cuh"

// x float32 [rows, K] → x_high, x_low [rows, blocks, 128] fp16, x_scale [rows, blocks]; blocks = ceil(K / 128). rounded: to
// e4m3 first, and x_low may be null. A warp per block.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
pack_rows(const float* x, int rows, int K, int blocks, int rounded, void* x_high, void* x_low, float* x_scale) {
    const int lane = threadIdx.x & 31;
    const i64 at = (i64)blockIdx.x * PRODUCT_WARPS + (threadIdx.x >> 5), row = at / blocks;
    if (row >= rows) return;
    const int k = (int)(at % blocks) * BLOCK + lane / 2 * 8 + lane % 2 * 2;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int own = k + i / 2 + i % 2 * 4;
        v[i] = own < K ? x[row * K + own] : 0.0f;
    }
    pack_block(v, rounded, (uint4*)x_high + at * CHUNKS, x_low ? (uint4*)x_low + at * CHUNKS : nullptr, x_scale + at);
}

// codes [rows, bytes] at any address → out [rows, stride], zeros beyond `bytes`: what the products need is a multiple of 16.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
pad_rows(const u8* codes, u8* out, i64 rows, int bytes, int stride) {
    const i64 i = (i64)blockIdx.x * PRODUCT_THREADS + threadIdx.x, row = i / stride;
    const int at = (int)(i % stride);
    if (row < rows) out[i] = at < bytes ? codes[row * bytes + at] : 0;
}

// ---------------------------------------------------------------------- packed weights
// Grid: outputs; tiles of rows; z (wide: z · slices + slice). Entry e of z is row rows[e] of x, or e · x_step + z · x_z
// where rows is null. Tiles (expert, first entry, entries), tile_count of them; where tiles is null, tile i is the entries
// from `begin` + height · i up to `end`, of `expert`. Weights: those given, z · n rows on; or, where there is a table
// int64 [experts, 3, 2] of the addresses of codes and scales, those of the tile's expert, matrix `member` + 2 z.
// out[e · out_row + z · out_z + s · out_slice + i]: sums of the slices s, or of all (out_slice 0, split kernels only).
// stride: bytes of a weight row. weight fp8 [N, stride], scale [ceil(N / 128), blocks]; fp4 [N, stride], [N, stride / 16].
#define PARAMETERS                                                                                                     \
    const u8 *weight, const u8 *scale, const i64 *table, int expert, int member, const void *x_high, const void *x_low, \
        const float *x_scale, const int *rows, int x_step, int x_z, const int *tiles, const int *tile_count, int begin, \
        int end, int n, int first, int stride, int blocks, int slices, int parts, float *out, i64 out_row, i64 out_z,   \
        i64 out_slice
#define ARGUMENTS                                                                                                      \
    weight, scale, table, expert, member, x_high, x_low, x_scale, rows, x_step, x_z, tiles, tile_count, begin, end, n,  \
        first, stride, blocks, slices, parts, out, out_row, out_z, out_slice

// This block's product, the rows of x of its `height` entries (x_row), the first entry and how many; false: none.
__device__ __forceinline__ bool find_work(PARAMETERS, int height, int z, Product& p, int* x_row, int& entry, int& count) {
    if (tiles) {
        if (blockIdx.y >= *tile_count) return false;
        expert = tiles[3 * blockIdx.y], entry = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
    } else {
        entry = begin + height * blockIdx.y;
        count = min(height, end - entry);
    }
    for (int i = threadIdx.x; i < height; i += PRODUCT_THREADS)
        x_row[i] = i >= count ? -1 : rows ? rows[entry + i] : (entry + i) * x_step + z * x_z;
    if (table) {
        const i64* own = table + (expert * 3 + member + 2 * z) * 2;
        p.weight = (const u8*)own[0], p.scale = (const u8*)own[1], p.first = first;
    } else {
        p.weight = weight, p.scale = scale, p.first = first + z * n;
    }
    p.x_high = (const uint4*)x_high, p.x_low = (const uint4*)x_low, p.x_scale = x_scale;
    p.n = n, p.stride = stride, p.blocks = blocks, p.slices = slices, p.parts = parts;
    p.out = out + z * out_z, p.out_row = out_row, p.out_slice = out_slice;
    __syncthreads();
    return true;
}

template <bool FP4, int TILES> __device__ __forceinline__ void split(PARAMETERS, float* sums) {
    __shared__ int x_row[8 * TILES];
    Product p;
    int entry, count;
    if (find_work(ARGUMENTS, 8 * TILES, blockIdx.z, p, x_row, entry, count))
        product_split<FP4, TILES>(p, x_row, entry, count, sums);
}

template <bool FP4> __device__ __forceinline__ void wide(PARAMETERS) {
    __shared__ int x_row[WIDE_ROWS];
    __shared__ uint4 chunks[2 * WIDE_ROWS * CHUNKS];
    __shared__ float scales[2 * WIDE_ROWS];
    Product p;
    int entry, count;
    if (find_work(ARGUMENTS, WIDE_ROWS, blockIdx.z / slices, p, x_row, entry, count))
        product_wide<FP4>(p, x_row, entry, count, blockIdx.z % slices, chunks, scales);
}

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS) product_fp8_8(PARAMETERS) {
    extern __shared__ float sums[];
    split<false, 1>(ARGUMENTS, sums);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_fp8_32(PARAMETERS) {
    extern __shared__ float sums[];
    split<false, 4>(ARGUMENTS, sums);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_fp8_64(PARAMETERS) { wide<false>(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS) product_fp4_8(PARAMETERS) {
    extern __shared__ float sums[];
    split<true, 1>(ARGUMENTS, sums);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_fp4_32(PARAMETERS) {
    extern __shared__ float sums[];
    split<true, 4>(ARGUMENTS, sums);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_fp4_64(PARAMETERS) { wide<true>(ARGUMENTS); }

// y [count] = the tree's sum over part [slices, count].
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS) add_slices(const float* part, float* y, i64 count, int slices) {
    const i64 i = (i64)blockIdx.x * PRODUCT_THREADS + threadIdx.x;
    if (i >= count) return;
    Tree tree;
    float sum = 0;
    for (int s = 0; s < slices; s++) sum = tree.add(s, part[s * count + i]);
    y[i] = sum;
}

// ---------------------------------------------------------------------- bf16 and float32 weights
#define DENSE_OUTPUTS 4 // of a warp

// Sums over the lanes of each of COUNT values: lane l gets that of value l / (32 / COUNT). Every value is added at
// distances 16, 8, 4, 2, 1 of lanes; while a lane holds several it gives half of them away.
template <int COUNT> __device__ __forceinline__ float sum_lanes(float* v) {
    const int lane = threadIdx.x & 31;
    int held = COUNT;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        if (held == 1) {
            v[0] += __shfl_xor_sync(FULL_MASK, v[0], d);
            continue;
        }
        held /= 2;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            if (i >= held) break;
            const float give = lane & d ? v[i] : v[i + held], keep = lane & d ? v[i + held] : v[i];
            v[i] = keep + __shfl_xor_sync(FULL_MASK, give, d);
        }
    }
    return v[0];
}

// Values k .. k+7 of a row of K; 0 beyond it. wide: K and the row's address allow wide loads.
template <bool BF16> __device__ __forceinline__ void load8(float v[8], const void* row, int k, int K, bool wide) {
    if (wide && k < K) {
        const uint4 a = __ldg((const uint4*)((const u8*)row + (i64)k * (BF16 ? 2 : 4)));
        if (BF16) {
            const u32 pair[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int i = 0; i < 4; i++) v[2 * i] = bf16_value(pair[i]), v[2 * i + 1] = as_float(pair[i] & 0xffff0000u);
        } else {
            const uint4 b = __ldg((const uint4*)((const float*)row + k + 4));
            v[0] = as_float(a.x), v[1] = as_float(a.y), v[2] = as_float(a.z), v[3] = as_float(a.w);
            v[4] = as_float(b.x), v[5] = as_float(b.y), v[6] = as_float(b.z), v[7] = as_float(b.w);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = k + i >= K ? 0.0f : BF16 ? bf16_value(((const u16*)row)[k + i]) : ((const float*)row)[k + i];
}

// x float32 [T, groups, K], w [groups, n, K] → y [T, groups, n]. A warp: 4 outputs of ROWS rows of a group.
template <bool BF16, int ROWS>
__device__ __forceinline__ void dense(const float* x, const void* w, float* y, int T, int n, int K, int slices) {
    constexpr int SIZE = BF16 ? 2 : 4;
    const int lane = threadIdx.x & 31, n0 = (blockIdx.x * PRODUCT_WARPS + (threadIdx.x >> 5)) * DENSE_OUTPUTS;
    const int groups = gridDim.z, z = blockIdx.z, t0 = blockIdx.y * ROWS, rows = min(ROWS, T - t0), width = K / slices;
    if (n0 >= n) return;
    const bool wide_w = K % 8 == 0 && width % 8 == 0 && (u64)w % 16 == 0;
    const bool wide_x = K % 8 == 0 && width % 8 == 0 && (u64)x % 16 == 0;
    Tree tree;
    float total = 0;
    for (int s = 0; s < slices; s++) {
        float sum[DENSE_OUTPUTS * ROWS] = {};
        for (int k = 8 * lane; k < width; k += 256) {
            float wv[DENSE_OUTPUTS][8];
#pragma unroll
            for (int i = 0; i < DENSE_OUTPUTS; i++) {
                const i64 row = z * (i64)n + min(n0 + i, n - 1);
                load8<BF16>(wv[i], (const u8*)w + (row * K + s * width) * SIZE, k, width, wide_w);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                float xv[8];
                load8<false>(xv, x + ((i64)(t0 + r) * groups + z) * K + s * width, k, width, wide_x);
#pragma unroll
                for (int i = 0; i < DENSE_OUTPUTS; i++)
#pragma unroll
                    for (int j = 0; j < 8; j++) sum[r * DENSE_OUTPUTS + i] = fmaf(xv[j], wv[i][j], sum[r * DENSE_OUTPUTS + i]);
            }
        }
        total = tree.add(s, sum_lanes<DENSE_OUTPUTS * ROWS>(sum));
    }
    constexpr int SHARE = 32 / (DENSE_OUTPUTS * ROWS); // lanes that hold the same sum
    const int r = lane / SHARE / DENSE_OUTPUTS, own = n0 + lane / SHARE % DENSE_OUTPUTS;
    if (lane % SHARE == 0 && r < rows && own < n) y[((i64)(t0 + r) * groups + z) * n + own] = total;
}

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
dense_bf16_1(const float* x, const u16* w, float* y, int T, int n, int K, int slices) {
    dense<true, 1>(x, w, y, T, n, K, slices);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1)
dense_bf16_8(const float* x, const u16* w, float* y, int T, int n, int K, int slices) {
    dense<true, 8>(x, w, y, T, n, K, slices);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
dense_f32_1(const float* x, const float* w, float* y, int T, int n, int K, int slices) {
    dense<false, 1>(x, w, y, T, n, K, slices);
}
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1)
dense_f32_8(const float* x, const float* w, float* y, int T, int n, int K, int slices) {
    dense<false, 8>(x, w, y, T, n, K, slices);
}

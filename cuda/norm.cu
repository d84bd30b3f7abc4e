// Norms and hyper-connections (m streams of d channels; f = the m·d values of a row's streams in a row).
//
//   rmsnorm        y[t, i] = x[t, i] · r · w[i],  r = 1 / sqrt(Σ_i x[t, i]² / K + eps)
//   hc_mixes       partial[t, c, o] = Σ over chunk c of fn[o, i] · f[i];  partial[t, c, O] = Σ over chunk c of f[i]²
//   hc_combine     mix_o = (Σ_c partial[t, c, o]) / sqrt(Σ_c partial[t, c, O] / (m·d) + norm_eps)
//                  pre_j  = sigmoid(mix_j · scale_0 + base_j) + eps
//                  post_j = 2 · sigmoid(mix_{m+j} · scale_1 + base_{m+j})
//                  comb   = Sinkhorn of softmax over k of (mix_{2m+jm+k} · scale_2 + base) + eps
//                  u[t]   = Σ_j pre_j h_j, and then rmsnorm where a norm weight is given
//   hc_post        out[t, k] = post_k · y[t] + Σ_j comb_jk h[t, j]
//   mean_streams   y[t] = Σ_j h[t, j] / m
#include "numeric.cuh"
#include "reduce.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define MAX_STREAMS 16
#define HC_CHUNK 1024 // values of f that a block of hc_mixes sums over: fixed, so that no order depends on anything else

// One block a row. x, y [T, K]; w [K].
extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm(const float* x, const float* w, float* y, int K, float eps) {
    __shared__ float scratch[WARPS];
    const float* row = x + (i64)blockIdx.x * K;
    float* out = y + (i64)blockIdx.x * K;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < K; i += THREADS) sum = fmaf(row[i], row[i], sum);
    sum = block_sum<WARPS>(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)K + eps);
    for (int i = threadIdx.x; i < K; i += THREADS) out[i] = row[i] * r * w[i];
}

// One block a chunk of a row: grid (chunks, T), chunks = ceil(width / HC_CHUNK). A warp takes outputs in turn.
// h [T, width], width = m·d; fn [outputs, width]; partial [T, chunks, outputs + 1].
extern "C" __global__ void __launch_bounds__(THREADS)
hc_mixes(const float* h, const float* fn, float* partial, int width, int outputs) {
    __shared__ float f[HC_CHUNK];
    const int lane = threadIdx.x & 31, start = blockIdx.x * HC_CHUNK, n = min(HC_CHUNK, width - start);
    const float* row = h + (i64)blockIdx.y * width + start;
    for (int i = threadIdx.x; i < n; i += THREADS) f[i] = row[i];
    __syncthreads();
    float* out = partial + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * (outputs + 1);
    for (int o = threadIdx.x >> 5; o <= outputs; o += WARPS) {
        const float* weight = fn + (i64)o * width + start;
        float sum = 0.0f;
        for (int i = lane; i < n; i += 32) sum = fmaf(f[i], o < outputs ? weight[i] : f[i], sum);
        sum = warp_sum(sum);
        if (lane == 0) out[o] = sum;
    }
}

// c [m, m] /= its sums along the columns k (rows = true) or along the rows j, + eps. By one warp; lane l sums line l.
__device__ __forceinline__ void divide_lines(float* c, int m, float eps, bool rows) {
    const int lane = threadIdx.x & 31, step = rows ? 1 : m, first = rows ? lane * m : lane;
    if (lane < m) {
        float sum = c[first];
        for (int i = 1; i < m; i++) sum += c[first + i * step];
        sum += eps;
        for (int i = 0; i < m; i++) c[first + i * step] /= sum;
    }
    __syncwarp();
}

// comb [m, m], logits on entry: softmax of every row, + eps, then columns and rows normalised in turn. By one warp.
__device__ void sinkhorn(float* c, int m, int iterations, float eps) {
    const int lane = threadIdx.x & 31;
    if (lane < m) {
        float top = c[lane * m];
        for (int k = 1; k < m; k++) top = fmaxf(top, c[lane * m + k]);
        for (int k = 0; k < m; k++) c[lane * m + k] = exp_value(c[lane * m + k] - top);
    }
    __syncwarp();
    divide_lines(c, m, 0.0f, true);
    for (int i = lane; i < m * m; i += 32) c[i] += eps;
    __syncwarp();
    divide_lines(c, m, eps, false);
    for (int round = 1; round < iterations; round++) {
        divide_lines(c, m, eps, true);
        divide_lines(c, m, eps, false);
    }
}

// One block a row. partial [T, chunks, outputs + 1]; base [outputs]; scale [3], of a head [1]; h [T, m, d];
// post [T, m] and comb [T, m, m], both null for a head (outputs = m); norm [d] or null; u [T, d].
extern "C" __global__ void __launch_bounds__(THREADS, 4)
hc_combine(const float* partial, const float* base, const float* scale, const float* h, float* post, float* comb,
           const float* norm, float* u, int chunks, int outputs, int m, int d, int iterations, float eps,
           float mix_eps, float norm_eps) {
    __shared__ float mix[(2 + MAX_STREAMS) * MAX_STREAMS + 1];
    __shared__ float scratch[WARPS];
    const i64 t = blockIdx.x;
    const int lane = threadIdx.x & 31;
    for (int o = threadIdx.x; o <= outputs; o += THREADS) {
        const float* part = partial + t * chunks * (outputs + 1) + o;
        float sum = part[0];
        for (int c = 1; c < chunks; c++) sum += part[c * (outputs + 1)];
        mix[o] = sum;
    }
    __syncthreads();
    const float r = 1.0f / sqrtf(mix[outputs] / (float)(m * d) + mix_eps);
    for (int o = threadIdx.x; o < outputs; o += THREADS) {
        const float x = mix[o] * r * scale[o < m ? 0 : o < 2 * m ? 1 : 2] + base[o];
        mix[o] = o < m ? sigmoid(x) + eps : o < 2 * m ? 2.0f * sigmoid(x) : x;
    }
    __syncthreads();
    if (comb && threadIdx.x < 32) {
        sinkhorn(mix + 2 * m, m, iterations, eps);
        for (int j = lane; j < m; j += 32) post[t * m + j] = mix[m + j];
        for (int i = lane; i < m * m; i += 32) comb[t * m * m + i] = mix[2 * m + i];
    }
    const float* row = h + t * m * d;
    float square = 0.0f;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float sum = mix[0] * row[i];
        for (int j = 1; j < m; j++) sum = fmaf(mix[j], row[(i64)j * d + i], sum);
        u[t * d + i] = sum;
        square = fmaf(sum, sum, square);
    }
    if (!norm) return; // the whole block
    square = block_sum<WARPS>(square, scratch);
    const float q = 1.0f / sqrtf(square / (float)d + norm_eps);
    for (int i = threadIdx.x; i < d; i += THREADS) u[t * d + i] = u[t * d + i] * q * norm[i];
}

// grid (ceil(d / THREADS), T). y [T, d]; h, out [T, m, d]; post [T, m]; comb [T, m, m].
extern "C" __global__ void __launch_bounds__(THREADS)
hc_post(const float* y, const float* h, const float* post, const float* comb, float* out, int m, int d) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    const i64 t = blockIdx.y;
    if (i >= d) return;
    const float *row = h + t * m * d + i, *gate = post + t * m, *c = comb + t * m * m;
    const float own = y[t * d + i];
    for (int k = 0; k < m; k++) {
        float sum = gate[k] * own;
        for (int j = 0; j < m; j++) sum = fmaf(c[j * m + k], row[(i64)j * d], sum);
        out[(t * m + k) * d + i] = sum;
    }
}

// grid (ceil(d / THREADS), T). h [T, m, d]; y [T, d].
extern "C" __global__ void __launch_bounds__(THREADS)
mean_streams(const float* h, float* y, int m, int d) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    const i64 t = blockIdx.y;
    if (i >= d) return;
    float sum = h[t * m * d + i];
    for (int j = 1; j < m; j++) sum += h[(t * m + j) * d + i];
    y[t * d + i] = sum / (float)m;
}

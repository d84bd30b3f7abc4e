// Norms.
//
//   rmsnorm   y[t, i] = x[t, i] · rsqrt(Σ_i x[t, i]² / K + eps) · w[i]
#include "reduce.cuh"

#define NORM_THREADS 256

// One block of NORM_THREADS a row. x, y [T, K]; w [K].
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
rmsnorm(const float* x, const float* w, float* y, int K, float eps) {
    __shared__ float scratch[NORM_THREADS / 32];
    const float* row = x + (i64)blockIdx.x * K;
    float* out = y + (i64)blockIdx.x * K;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < K; i += NORM_THREADS) sum = fmaf(row[i], row[i], sum);
    sum = block_sum<NORM_THREADS / 32>(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)K + eps);
    for (int i = threadIdx.x; i < K; i += NORM_THREADS) out[i] = row[i] * r * w[i];
}

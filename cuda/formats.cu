// Activation quantisation and what has no family of its own: embedding rows, the test for NaN and infinity.
//
//   act_quant   per block of 128 of a row: s = 2^ceil(log2(max(amax, 1e-4) · fl(1/448))), y = e4m3(x / s) · s
#include "numeric.cuh"

#define QUANT_WARPS 8

// One warp a block of 128, QUANT_WARPS blocks of a row side by side: grid (ceil(blocks / QUANT_WARPS), T).
// x, y float32 [T, K]; the last block of a row may be short.
extern "C" __global__ void __launch_bounds__(32 * QUANT_WARPS)
act_quant(const float* x, float* y, int K) {
    const int lane = threadIdx.x & 31, start = (blockIdx.x * QUANT_WARPS + (threadIdx.x >> 5)) * 128;
    if (start >= K) return; // a whole warp, and no barrier follows
    const i64 row = (i64)blockIdx.y * K;
    float value[4];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = start + 32 * i + lane;
        value[i] = k < K ? x[row + k] : 0.0f;
        most = max(most, magnitude_bits(value[i]));
    }
    const u32 byte = e4m3_scale(warp_max_bits(most));
    const float inverse = e8m0_inverse(byte), scale = e8m0_value(byte);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = start + 32 * i + lane;
        u32 code;
        if (k < K) y[row + k] = round_e4m3(value[i] * inverse, &code) * scale;
    }
}

// out[t, s, i] = table[tokens[t], i] for every stream s: grid (ceil(d / 256), T).
// table bf16 bits [vocab, d]; tokens [T]; out float32 [T, streams, d].
extern "C" __global__ void __launch_bounds__(256)
embed(const u16* table, const int* tokens, float* out, int d, int streams) {
    const int i = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y;
    if (i >= d) return;
    const float value = bf16_value(table[(i64)tokens[t] * d + i]);
    for (int s = 0; s < streams; s++) out[((i64)t * streams + s) * d + i] = value;
}

// *found |= 1 where one of x [n] is NaN or infinite: grid (ceil(n / 1024)).
extern "C" __global__ void __launch_bounds__(256)
find_nonfinite(const float* x, int* found, i64 n) {
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const i64 at = (i64)blockIdx.x * 1024 + 256 * i + threadIdx.x;
        bad |= at < n && magnitude_bits(x[at]) >= 0x7f800000u;
    }
    if (__any_sync(FULL_MASK, bad) && (threadIdx.x & 31) == 0) atomicOr(found, 1);
}

// Rotation, the query's norm, and stored keys.
//
//   rope_angles   cos, sin of fl32(position · θ)
//   rotate        the last dims of every head turned by ±angle
//   query         q_h · rsqrt(mean(q_h²) + eps), then rotated
//   encode_keys   k as it is: e4m3 per 64, and bf16 for the last R dims
//   store_keys    k = rotate(kv · rsqrt(mean(kv²) + eps) · w), then as encode_keys
//
// T rows, H heads of `dim` dims, R = rope_dim, n keys. Every pointer's alignment is that of its type.
#include "keys.cuh"
#include "reduce.cuh"
#include "rope.cuh"

// ---------------------------------------------------------------------- rotation
// positions [T], theta [pairs] → cosine, sine [T, pairs]. One thread a pair.
extern "C" __global__ void rope_angles(const int* positions, const float* theta, float* cosine, float* sine, int T, int pairs) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (i64)T * pairs) return;
    const double angle = (double)((float)positions[i / pairs] * theta[i % pairs]);
    cosine[i] = (float)cos(angle);
    sine[i] = (float)sin(angle);
}

// x [T, H, dim] in place; cosine, sine [T, pairs]; direction 1 or −1. One thread a pair.
extern "C" __global__ void rotate(float* x, const float* cosine, const float* sine, int T, int H, int dim, int pairs, float direction) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (i64)T * H * pairs) return;
    const i64 head = i / pairs, angle = head / H * pairs + i % pairs;
    float* at = x + (head + 1) * dim - 2 * pairs + 2 * (i % pairs);
    turn(at[0], at[1], cosine[angle], sine[angle] * direction);
}

// 1 / sqrt(mean(x²) + eps) of x [dim], by one warp.
__device__ __forceinline__ float inverse_rms(const float* x, int dim, float eps) {
    float sum = 0.0f;
    for (int d = threadIdx.x & 31; d < dim; d += 32) sum = fmaf(x[d], x[d], sum);
    return 1.0f / sqrtf(warp_sum(sum) / (float)dim + eps);
}

// x [T, H, dim] in place; cosine, sine [T, pairs]. One warp a head of a row.
extern "C" __global__ void query(float* x, const float* cosine, const float* sine, int T, int H, int dim, int pairs, float eps) {
    const i64 head = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= (i64)T * H) return;
    const int lane = threadIdx.x & 31, plain = dim - 2 * pairs;
    const i64 angle = head / H * pairs;
    float* row = x + head * dim;
    const float r = inverse_rms(row, dim, eps);
    for (int d = lane; d < plain; d += 32) row[d] *= r;
    for (int i = lane; i < pairs; i += 32) {
        float even = row[plain + 2 * i] * r, odd = row[plain + 2 * i + 1] * r;
        turn(even, odd, cosine[angle + i], sine[angle + i]);
        row[plain + 2 * i] = even;
        row[plain + 2 * i + 1] = odd;
    }
}

// ---------------------------------------------------------------------- stored keys
// One warp stores one key; NORMED: k is normed (norm [dim]) and rotated (cosine, sine [pairs]) on the way.
template <bool NORMED> __device__ __forceinline__ void store_key(
    const float* k, const float* norm, const float* cosine, const float* sine, u8* codes, u8* scales, u16* rope, i64 place,
    int dim, int rope_dim, int pairs, float eps) {
    const int lane = threadIdx.x & 31, plain = dim - rope_dim, blocks = (plain + KEY_BLOCK - 1) / KEY_BLOCK;
    const float r = NORMED ? inverse_rms(k, dim, eps) : 1.0f;
    const int turned = dim - 2 * pairs;  // the first dim that is rotated
    // dim d as it is stored; its partner in the pair is read again, which is cheaper than keeping it
    auto value = [&](int d) {
        if (!NORMED) return k[d];
        if (d < turned) return k[d] * r * norm[d];
        const int even = d - ((d - turned) & 1), i = (d - turned) / 2;
        float a = k[even] * r * norm[even], b = k[even + 1] * r * norm[even + 1];
        turn(a, b, cosine[i], sine[i]);
        return d == even ? a : b;
    };
    for (int b = 0; b < blocks; b++) {
        const int d = b * KEY_BLOCK + 2 * lane;
        const float x = d < plain ? value(d) : 0.0f, y = d + 1 < plain ? value(d + 1) : 0.0f;
        const u32 byte = e4m3_scale(warp_max_bits(max(magnitude_bits(x), magnitude_bits(y))));
        u32 first, second;
        round_e4m3(x * e8m0_inverse(byte), &first);
        round_e4m3(y * e8m0_inverse(byte), &second);
        if (d < plain) codes[place * plain + d] = (u8)first;
        if (d + 1 < plain) codes[place * plain + d + 1] = (u8)second;
        if (lane == 0) scales[place * blocks + b] = (u8)byte;
    }
    for (int d = lane; d < rope_dim; d += 32) rope[place * rope_dim + d] = bf16_bits(value(plain + d));
}

// k [n, dim] → the cache's places where [n]: codes [., dim − rope_dim], scales [., ⌈(dim − rope_dim) / 64⌉], rope [., rope_dim].
extern "C" __global__ void encode_keys(const float* k, const int* where, u8* codes, u8* scales, u16* rope, int n, int dim, int rope_dim) {
    const i64 i = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i < n) store_key<false>(k + i * dim, 0, 0, 0, codes, scales, rope, where[i], dim, rope_dim, 0, 0.0f);
}

// kv [n, dim], norm [dim], cosine, sine [n, pairs] → the same places of a cache.
extern "C" __global__ void store_keys(const float* kv, const float* norm, const float* cosine, const float* sine, const int* where,
                                      u8* codes, u8* scales, u16* rope, int n, int dim, int rope_dim, int pairs, float eps) {
    const i64 i = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= n) return;
    store_key<true>(kv + i * dim, norm, cosine + i * pairs, sine + i * pairs, codes, scales, rope, where[i], dim, rope_dim, pairs, eps);
}

// The keys at places where [n] → out [n, dim]. One thread a dim.
extern "C" __global__ void decode_keys(const u8* codes, const u8* scales, const u16* rope, const int* where, float* out, int n,
                                       int dim, int rope_dim) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (i64)n * dim) return;
    const KeyCache cache = key_cache(codes, scales, rope, dim, rope_dim);
    out[i] = key_dim(cache, where[i / dim], (int)(i % dim));
}

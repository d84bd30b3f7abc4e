// Sums over the threads of a warp or a block in an order fixed by the block's size alone.
#pragma once
#include "types.cuh"

// Every lane gets the sum over the warp: a butterfly over distances 16, 8, 4, 2, 1. It is commutative in each step, so
// all lanes get the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(FULL_MASK, x, d);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, d));
    return x;
}

// Every thread gets the sum over a block of WARPS warps: warp sums, then a butterfly over them. `scratch`: WARPS floats
// of shared memory, free again when this returns.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int lane = threadIdx.x & 31;
    x = warp_sum(x);
    if (lane == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warp_sum(lane < WARPS ? scratch[lane] : 0.0f);
    __syncthreads();
    return x;
}

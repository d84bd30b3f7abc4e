// What a greedy choice needs of the logits (a bf16 linear, linear.cu): the best token and by how much it leads.
//
//   id[t] = argmax_v logits[t, v], the lower v where equal;   lead[t] = the largest logit − the second largest
#include "types.cuh"

#define HEAD_THREADS 1024
#define HEAD_WARPS (HEAD_THREADS / 32)
#define HEAD_BATCH 8 // loads of a thread on their way before the first is waited for

// The two best of all that a thread has seen: `id` belongs to the first. A NaN is never best.
struct Best {
    float first, second;
    int id;

    __device__ __forceinline__ void add(float value, int at, float next) {
        if (value > first || (value == first && at < id)) {
            second = next > first ? next : first;
            first = value, id = at;
        } else {
            second = value > second ? value : second;
        }
    }
};

// logits [T, vocab] → id [T], lead [T]: infinity where vocab is 1, NaN where a logit is not finite. A block per row.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS) head_best(const float* logits, int* id, float* lead, int vocab) {
    __shared__ float first[HEAD_WARPS];
    __shared__ float second[HEAD_WARPS];
    __shared__ int ids[HEAD_WARPS];
    const float* row = logits + (i64)blockIdx.x * vocab;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Best best = {-infinity(), -infinity(), vocab};
    bool finite = true;
    for (int start = threadIdx.x; start < vocab; start += HEAD_THREADS * HEAD_BATCH) {
        float value[HEAD_BATCH];
#pragma unroll
        for (int i = 0; i < HEAD_BATCH; i++) {
            const int v = start + i * HEAD_THREADS;
            value[i] = v < vocab ? row[v] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < HEAD_BATCH; i++) {
            const int v = start + i * HEAD_THREADS;
            finite = finite && value[i] - value[i] == 0.0f;
            if (v < vocab) best.add(value[i] == value[i] ? value[i] : -infinity(), v, -infinity());
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        best.add(__shfl_xor_sync(FULL_MASK, best.first, d), __shfl_xor_sync(FULL_MASK, best.id, d),
                 __shfl_xor_sync(FULL_MASK, best.second, d));
    if (lane == 0) first[warp] = best.first, second[warp] = best.second, ids[warp] = best.id;
    const bool odd = __syncthreads_or(!finite);
    if (threadIdx.x) return;
    for (int w = 1; w < HEAD_WARPS; w++) best.add(first[w], ids[w], second[w]);
    id[blockIdx.x] = best.id;
    lead[blockIdx.x] = odd ? __uint_as_float(0x7fc00000u) : best.first - best.second;
}

// What greedy decoding needs of the logits (a bf16 linear, linear.cu): the best token and by how much it leads.
//
//   id[t] = argmax_v logits[t, v], the lower v where equal;   margin[t] = the largest logit − the second largest
#include "types.cuh"

#define HEAD_THREADS 512

// The two best of all that a thread has seen: `id` belongs to the first. NaN counts as −∞.
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

// logits [T, vocab] → id [T], margin [T] (infinity where vocab is 1). A block per row.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS) head_best(const float* logits, int* id, float* margin, int vocab) {
    __shared__ float first[HEAD_THREADS / 32];
    __shared__ float second[HEAD_THREADS / 32];
    __shared__ int ids[HEAD_THREADS / 32];
    const float* row = logits + (i64)blockIdx.x * vocab;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Best best = {-infinity(), -infinity(), vocab};
    for (int v = threadIdx.x; v < vocab; v += HEAD_THREADS) best.add(row[v] == row[v] ? row[v] : -infinity(), v, -infinity());
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        best.add(__shfl_xor_sync(FULL_MASK, best.first, d), __shfl_xor_sync(FULL_MASK, best.id, d),
                 __shfl_xor_sync(FULL_MASK, best.second, d));
    if (lane == 0) first[warp] = best.first, second[warp] = best.second, ids[warp] = best.id;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < HEAD_THREADS / 32; w++) best.add(first[w], ids[w], second[w]);
    id[blockIdx.x] = best.id;
    margin[blockIdx.x] = best.first - best.second;
}

// The compressor: rows kept in a ring, completed entries pooled from it.
//
//   compress_store   ring_kv[where] = kv,  ring_gate[where] = gate + ape[position mod ratio]
//   compress_pool    e_c = Σ_r softmax_r(gate_rc) · kv_rc  per channel c, over the entry's rows r in ascending position
//
// T rows, n entries, D channels of an entry, width = channels of a row: 2 D with ratio 4, else D.
#include "numeric.cuh"

// kv, gate [T, width], ape [ratio, width], positions, where [T] → ring_kv, ring_gate [., width]. One thread a channel.
extern "C" __global__ void compress_store(const float* kv, const float* gate, const float* ape, const int* positions, const int* where,
                                          float* ring_kv, float* ring_gate, int T, int width, int ratio) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (i64)T * width) return;
    const i64 row = i / width, channel = i % width, at = (i64)where[row] * width + channel;
    ring_kv[at] = kv[i];
    ring_gate[at] = gate[i] + ape[(i64)(positions[row] % ratio) * width + channel];
}

// slots, entries [n] → out [n, D]. Position p of slot s lies at ring place s · capacity + p mod capacity. Entry j has the
// positions j · ratio .. j · ratio + ratio − 1; with ratio 4 also the 4 before, of which the first D channels count, and
// of its own the last D; before entry 0 there is nothing. One thread a channel of an entry.
extern "C" __global__ void compress_pool(const float* ring_kv, const float* ring_gate, const int* slots, const int* entries, float* out,
                                         int n, int D, int ratio, int capacity) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (i64)n * D) return;
    const int channel = (int)(i % D), width = ratio == 4 ? 2 * D : D;
    const i64 slot = (i64)slots[i / D] * capacity, start = (i64)entries[i / D] * ratio;
    const i64 first = ratio == 4 && start > 0 ? start - ratio : start;
    auto place = [&](i64 p) { return (slot + p % capacity) * width + channel + (ratio == 4 && p >= start ? D : 0); };
    float top = -infinity();
    for (i64 p = first; p < start + ratio; p++) top = fmaxf(top, ring_gate[place(p)]);
    float total = 0.0f, sum = 0.0f;
    for (i64 p = first; p < start + ratio; p++) {
        const i64 at = place(p);
        const float weight = exp_value(ring_gate[at] - top);
        total += weight;
        sum = fmaf(weight, ring_kv[at], sum);
    }
    out[i] = sum / total;
}

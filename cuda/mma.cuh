// All inline PTX of the project, each function beside its twin for the tests' emulation.
//
//   mma_fp16     D[16, 8] = A[16, 16] · B[16, 8] + D, A and B fp16, D float32; products are exact, sums float32
//   fp16_pair    two float32 rounded to fp16, the first in the low half; fp16_low, fp16_high: back again, exact
//   fp8_pairs    8 e4m3 codes → fp16, as e4m3_pairs, by the card's own conversion (sm_89+)
//   copy16       16 bytes from global to shared memory, behind the program's back where the card can (sm_80+)
//
// Fragments, lane = 4 g + t (PTX manual, mma.m16n8k16 and m16n8k8): words of two fp16, low half first
//   a[0] A[g][2t, 2t+1]   a[1] A[g+8][2t, 2t+1]   a[2] A[g][2t+8, 2t+9]   a[3] A[g+8][2t+8, 2t+9]
//   b[0] B[2t, 2t+1][g]   b[1] B[2t+8, 2t+9][g]
//   d[0] D[g][2t]   d[1] D[g][2t+1]   d[2] D[g+8][2t]   d[3] D[g+8][2t+1]
// sm_75 has m16n8k8 only: a[0], a[1], b[0] first, then a[2], a[3], b[1].
#pragma once
#include "numeric.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && !defined(DSV4_MMA_K8)
#define DSV4_MMA_K8
#endif

#ifdef DSV4_EMULATED

// K of 8 or 16 inputs; the sum of a D and its products is rounded once.
template <int K> __device__ void mma_step(float d[4], const u32* a, const u32* b) {
    struct Given { u32 a[K / 4], b[K / 8]; float d[4]; } given;
    struct Made { float d[4]; };
    for (int i = 0; i < K / 4; i++) given.a[i] = a[i];
    for (int i = 0; i < K / 8; i++) given.b[i] = b[i];
    for (int i = 0; i < 4; i++) given.d[i] = d[i];
    const Made made = EMU_WARP(Made, given, [](const Given* in, Made* out) {
        float left[16][K], right[8][K];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < K / 4; i++)
                for (int h = 0; h < 2; h++) {
                    const int g = lane / 4, k = lane % 4 * 2 + h + i / 2 * 8;
                    left[g + i % 2 * 8][k] = fp16_value(in[lane].a[i] >> 16 * h & 0xffff);
                    if (i % 2 == 0) right[g][k] = fp16_value(in[lane].b[i / 2] >> 16 * h & 0xffff);
                }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const float *l = left[lane / 4 + i / 2 * 8], *r = right[lane % 4 * 2 + i % 2];
                double sum = in[lane].d[i];
                for (int k = 0; k < K; k++) sum += (double)l[k] * r[k];
                out[lane].d[i] = (float)sum;
            }
    });
    for (int i = 0; i < 4; i++) d[i] = made.d[i];
}

__device__ __forceinline__ void mma_fp16(float d[4], const u32 a[4], const u32 b[2]) {
#ifdef DSV4_MMA_K8
    mma_step<8>(d, a, b);
    mma_step<8>(d, a + 2, b + 1);
#else
    mma_step<16>(d, a, b);
#endif
}

__device__ __forceinline__ u32 fp16_pair(float low, float high) { return fp16_bits(low) | fp16_bits(high) << 16; }
__device__ __forceinline__ float fp16_low(u32 pair) { return fp16_value(pair & 0xffff); }
__device__ __forceinline__ float fp16_high(u32 pair) { return fp16_value(pair >> 16); }

// FP8_RAISE times these is the codes' values.
#define FP8_RAISE E4M3_RAISE
__device__ __forceinline__ void fp8_pairs(u32 low, u32 high, u32 pair[4]) { e4m3_pairs(low, high, pair); }

__device__ __forceinline__ void copy16(void* shared, const void* global) { emu::copy_later(shared, global, 16); }
__device__ __forceinline__ void copy_commit() { emu::copy_commit(); }
template <int NEWEST> __device__ __forceinline__ void copy_wait() { emu::copy_wait(NEWEST); }

#else

__device__ __forceinline__ void mma_fp16(float d[4], const u32 a[4], const u32 b[2]) {
#ifdef DSV4_MMA_K8
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ __forceinline__ u32 fp16_pair(float low, float high) {
    u32 pair;
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(pair) : "f"(low), "f"(high));
    return pair;
}
__device__ __forceinline__ float fp16_low(u32 pair) {
    float x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(x) : "r"(pair));
    return x;
}
__device__ __forceinline__ float fp16_high(u32 pair) {
    float x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(pair));
    return x;
}

#if __CUDA_ARCH__ >= 890
#define FP8_RAISE 1.0f
__device__ __forceinline__ void fp8_pairs(u32 low, u32 high, u32 pair[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) { // bytes: codes i, i + 4, i + 1, i + 5
        const u32 codes = __byte_perm(low, high, i ? 0x7362 : 0x5140);
        asm("{.reg .b16 one, two; mov.b32 {one, two}, %2; cvt.rn.f16x2.e4m3x2 %0, one; cvt.rn.f16x2.e4m3x2 %1, two;}"
            : "=r"(pair[i]), "=r"(pair[i + 1])
            : "r"(codes));
    }
}
#else
#define FP8_RAISE E4M3_RAISE
__device__ __forceinline__ void fp8_pairs(u32 low, u32 high, u32 pair[4]) { e4m3_pairs(low, high, pair); }
#endif

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all but the NEWEST committed groups are there.
template <int NEWEST> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}
#else
__device__ __forceinline__ void copy16(void* shared, const void* global) { *(uint4*)shared = *(const uint4*)global; }
__device__ __forceinline__ void copy_commit() {}
template <int NEWEST> __device__ __forceinline__ void copy_wait() {}
#endif

#endif

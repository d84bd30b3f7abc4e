// The CUDA names that our kernels use, for g++. What is not here does not exist on all supported cards, or must not be
// used (float atomics, fast-math intrinsics, __activemask).
#pragma once
#include "fibers.h"

#define DSV4_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline __attribute__((always_inline))
#undef __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

#define threadIdx (emu::here->thread)
#define blockIdx (emu::here->block_index)
#define blockDim (emu::here->block)
#define gridDim (emu::here->grid)
constexpr int warpSize = 32;

// ---------------------------------------------------------------------- vectors
#define EMU_VECTOR(T, name, n2, n4) \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; }; \
    struct alignas(n4) name##4 { T x, y, z, w; }; \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(unsigned, uint, 8, 16)
EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(unsigned short, ushort, 4, 8)
#undef EMU_VECTOR

// ---------------------------------------------------------------------- barriers, shuffles, votes
#define __syncthreads() ((void)emu::sync_block(EMU_SITE))
#define __syncthreads_count(p) ((int)emu::sync_block(EMU_SITE, (p) ? 1 : 0))
#define __syncthreads_or(p) (emu::sync_block(EMU_SITE, (p) ? 1 : 0) != 0)
#define __syncwarp(...) emu::sync_warp(EMU_SITE __VA_OPT__(,) __VA_ARGS__)
#define __shfl_sync(mask, v, ...) emu::shuffle<0>(EMU_SITE, mask, v, __VA_ARGS__)
#define __shfl_up_sync(mask, v, ...) emu::shuffle<1>(EMU_SITE, mask, v, __VA_ARGS__)
#define __shfl_down_sync(mask, v, ...) emu::shuffle<2>(EMU_SITE, mask, v, __VA_ARGS__)
#define __shfl_xor_sync(mask, v, ...) emu::shuffle<3>(EMU_SITE, mask, v, __VA_ARGS__)
#define __ballot_sync(mask, p) emu::ballot(EMU_SITE, mask, (p) ? 1u : 0u)
#define __any_sync(mask, p) (emu::ballot(EMU_SITE, mask, (p) ? 1u : 0u) != 0)
#define __all_sync(mask, p) (emu::ballot(EMU_SITE, mask, (p) ? 0u : 1u) == 0)
// All 32 lanes meet: f(const In in[32], Out out[32]) runs once. For the CPU twins in mma.cuh.
#define EMU_WARP(Out, in, ...) emu::meet<Out>(0xffffffffu, EMU_SITE, in, __VA_ARGS__)

namespace emu {
inline void sync_warp(int site, unsigned mask = 0xffffffffu) {
    meet<char>(mask, site, char(0), [](const char*, char* out) { memset(out, 0, 32); });
}

template <int MODE, class T> T shuffle(int site, unsigned mask, T value, int by, int width = 32) {
    if (width < 1 || width > 32 || (width & (width - 1))) fail("shuffle: expected a width of 1 .. 32, a power of two; found %d", width);
    const int me = lane(), base = me & ~(width - 1);
    int from = MODE == 0 ? base + (by & (width - 1)) : MODE == 1 ? me - by : MODE == 2 ? me + by : me ^ by;
    if (from < (MODE == 3 ? 0 : base) || from >= base + width) from = me;
    if (!(mask >> from & 1)) fail("shuffle: lane %d reads lane %d, which is not in the mask %08x", me, from, mask);
    struct Given { T value; int from; };
    return meet<T>(mask, site, Given{value, from}, [mask](const Given* in, T* out) {
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) out[l] = in[in[l].from].value;
    });
}

inline unsigned ballot(int site, unsigned mask, unsigned vote) {
    return meet<unsigned>(mask, site, vote, [mask](const unsigned* in, unsigned* out) {
        unsigned all = 0;
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) all |= in[l] << l;
        for (int l = 0; l < 32; l++) out[l] = all;
    });
}
}  // namespace emu

static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}

// ---------------------------------------------------------------------- integer atomics
template <class T> T atomicAdd(T* p, T v) {
    static_assert(std::is_integral_v<T>, "no float atomics: their order is not fixed");
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
static inline int atomicAdd(int* p, unsigned v) { return __atomic_fetch_add(p, (int)v, __ATOMIC_RELAXED); }
template <class T> T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
template <class T> T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T* p, T expected, T v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicMax(T* p, T v) {
    static_assert(std::is_integral_v<T>);
    T seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen < v && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return seen;
}
template <class T> T atomicMin(T* p, T v) {
    static_assert(std::is_integral_v<T>);
    T seen = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (seen > v && !__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return seen;
}

// ---------------------------------------------------------------------- numbers
template <class T, class F> static inline T emu_bits(F x) {
    static_assert(sizeof(T) == sizeof(F));
    T y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static inline float fdividef(float a, float b) { return a / b; }
static inline int __float2int_rn(float a) { return (int)rintf(a); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = s >> (4 * i) & 15;
        unsigned byte = both >> (8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << (8 * i);
    }
    return out;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
template <class T> static inline T __ldg(const T* p) { return *p; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

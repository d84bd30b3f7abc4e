// Execution of CUDA kernels on a CPU: every thread of a block is a fiber, a block runs on one OS thread.
//
// A fiber runs until it has to wait for others (barrier, shuffle, vote), so that a missing barrier shows: whoever runs
// first sees what the others have not written yet, and shared memory starts as NaN (all bits set).
//
// Here: what a kernel's text needs. fibers.cpp is compiled once, and linked to every kernel file.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace emu {

constexpr size_t WIDEST = 64;  // bytes a lane may hand to a warp's exchange

// A barrier or warp operation in the source: a number of its own, and its line.
#define EMU_SITE (__COUNTER__ * 100000 + __LINE__)
inline int line(int site) { return site % 100000; }

struct Place {  // of the thread that runs
    dim3 thread, block_index, block, grid;
    unsigned index;  // within its block
};
#define EMU_HIDDEN __attribute__((visibility("hidden")))
extern EMU_HIDDEN thread_local Place* here __attribute__((tls_model("initial-exec")));

// End this launch with an error; the thread never goes on.
[[noreturn]] EMU_HIDDEN void fail(const char* format, ...);

inline unsigned lane() { return here->index & 31; }

// ---------------------------------------------------------------------- shared memory
EMU_HIDDEN void* shared_variable(int id, size_t bytes);
EMU_HIDDEN void* dynamic_shared();

// A static __shared__ variable, number `id` in its file: made by the first thread of the block that comes by.
template <class T> T& shared(int id) { return *(T*)shared_variable(id, sizeof(T)); }

// ---------------------------------------------------------------------- barriers and warps
EMU_HIDDEN unsigned sync_block(int site, unsigned value = 0);

using Bytes = unsigned char[WIDEST];
using Work = void (*)(const void* f, unsigned mask, const Bytes* in, Bytes* out);
EMU_HIDDEN void meet_bytes(unsigned mask, int site, const void* in, size_t in_bytes, void* out, size_t out_bytes, Work work,
                           const void* f);

// All lanes of `mask` hand in a value; f(in[32], out[32]) runs once, when all have come; each gets its out.
template <class Out, class In, class F> Out meet(unsigned mask, int site, const In& in, const F& f) {
    static_assert(sizeof(In) <= WIDEST && sizeof(Out) <= WIDEST);
    Out out;
    meet_bytes(mask, site, &in, sizeof(In), &out, sizeof(Out), [](const void* f, unsigned mask, const Bytes* in, Bytes* out) {
        In ins[32];
        Out outs[32];
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) memcpy(&ins[l], in[l], sizeof(In));
        (*(const F*)f)(ins, outs);
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) memcpy(out[l], &outs[l], sizeof(Out));
    }, &f);
    return out;
}

// ---------------------------------------------------------------------- cp.async: copies happen as late as the waits allow (forward order) or at once
EMU_HIDDEN void copy_later(void* to, const void* from, size_t bytes);
EMU_HIDDEN void copy_commit();
EMU_HIDDEN void copy_wait(unsigned newest);  // all but the `newest` committed groups are there afterwards

// ---------------------------------------------------------------------- launches
// geometry: grid, block. order: 0 forward, 1 reverse, else shuffled by that seed. → an error text (free it) or nullptr.
EMU_HIDDEN char* launch(const unsigned* geometry, size_t shared, unsigned order, unsigned threads, void (*call)(void**),
                        void** args);

template <class T> const char* kind() {
    if constexpr (std::is_pointer_v<T>) {
        using P = std::remove_const_t<std::remove_pointer_t<T>>;
        if constexpr (std::is_same_v<P, void>) return "p*";
        else if constexpr (std::is_floating_point_v<P>) return sizeof(P) == 4 ? "pf4" : "pf8";
        else if constexpr (std::is_integral_v<P>) return sizeof(P) == 1 ? (std::is_signed_v<P> ? "pi1" : "pu1")
                : sizeof(P) == 2 ? (std::is_signed_v<P> ? "pi2" : "pu2")
                : sizeof(P) == 4 ? (std::is_signed_v<P> ? "pi4" : "pu4") : (std::is_signed_v<P> ? "pi8" : "pu8");
        else return "p*";
    } else if constexpr (std::is_floating_point_v<T>) return sizeof(T) == 4 ? "f4" : "f8";
    else {
        static_assert(std::is_integral_v<T>, "kernel parameters are pointers and numbers");
        return sizeof(T) == 4 ? (std::is_signed_v<T> ? "i4" : "u4") : sizeof(T) == 8 ? (std::is_signed_v<T> ? "i8" : "u8")
               : sizeof(T) == 2 ? "i2" : "i1";
    }
}

template <auto K> struct Kernel;
template <class... A, void (*K)(A...)> struct Kernel<K> {
    template <size_t... I> static void spread(void** args, std::index_sequence<I...>) { K(*(std::decay_t<A>*)args[I]...); }
    static void call(void** args) { spread(args, std::index_sequence_for<A...>()); }
    static const char* signature() {
        static char text[8 * sizeof...(A) + 1];
        text[0] = 0;
        ((strcat(text, kind<A>()), strcat(text, " ")), ...);
        return text;
    }
};

}  // namespace emu

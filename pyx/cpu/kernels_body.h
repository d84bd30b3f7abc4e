/* What each kernels_<set>.c compiles: the bodies and the table. SET names the instruction set. */
#include "kernels.h"
#include "simd_math.h"

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define FN(name) JOIN(name, SET)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

#include "quant.h"
#include "gemm.h"
#include "linear.h"
#include "moe.h"
#include "rows.h"
#include "multiply.h"

const struct kernels JOIN(kernels, SET) = {
    .name = TEXT(SET),
    .linear = {FN(linear)},
    .swiglu = {FN(swiglu)},
    .moe = {FN(moe_inputs), FN(moe_inners), FN(moe)},
    .moe_end = {FN(moe_end)},
    .multiply_bytes = {FN(multiply_bytes)},
    .quads = FN(quads),
#ifdef V16_BF16
    .plain = &kernels_avx512,
    .takes_pairs = 1,
#endif
#define ROW_KERNEL(name, ...) .name = {__VA_ARGS__},
#include "rows_kernels.h"
#undef ROW_KERNEL
};

/* Which instruction set runs: the widest that the processor has, or the one that was asked for. */
#include "kernels.h"
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>

static int has_f16c(void) /* which clang's __builtin_cpu_supports does not know */
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static int has(const char *isa)
{
    if (!strcmp(isa, "scalar")) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (!strcmp(isa, "avx2")) return avx2;
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(isa, "avx512")) return avx512;
    if (!strcmp(isa, "avx512bf16"))
        return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
               __builtin_cpu_supports("avx512vnni") && avx512bf16_in_order();
#endif
    return 0;
}

const struct kernels *kernels_find(const char *isa)
{
    static const struct kernels *const tables[] = {
#if defined(__x86_64__)
        &kernels_avx512bf16, &kernels_avx512, &kernels_avx2,
#endif
        &kernels_scalar,
    };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if ((!isa || !strcmp(isa, tables[i]->name)) && has(tables[i]->name)) return tables[i];
    return NULL;
}

/* Linears over packed weights. */
static void FN(deinterleave)(const float *x, float *y, int64_t n)
{
    for (int64_t k = 0; k < n; k += 32) {
        v16 even, odd;
        v16_deinterleave(x + k, &even, &odd);
        v16_store(y + k, even);
        v16_store(y + k + 16, odd);
    }
}

static void FN(linear)(void *args, int tid, int n)
{
    (void)args, (void)tid, (void)n;
}

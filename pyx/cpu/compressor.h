/* Compressor: rows kept with their gates, and entries pooled from them. */
#pragma once

static void FN(compress_store)(void *args, int tid, int n)
{
    const struct compress_store_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const float *gate = a->gate + t * a->width, *ape = a->ape + (int64_t)(a->positions[t] % a->ratio) * a->width;
        float *ring = a->ring_gate + (int64_t)a->where[t] * a->width;
        memcpy(a->ring_kv + (int64_t)a->where[t] * a->width, a->kv + t * a->width, 4 * (size_t)a->width);
        for (int i = 0; i < a->width; i += 16) {
            int left = a->width - i;
            store_some(ring + i, v16_add(load_some(gate + i, left), load_some(ape + i, left)), left);
        }
    }
}

/* Floats before the kv and gate that position p of entry j's pool gives to channel 0. */
static inline int64_t pooled_at(const struct compress_pool_args *a, int64_t row, int32_t p)
{
    int overlap = a->ratio == 4, own = p >= a->entries[row] * a->ratio;
    int64_t place = (int64_t)a->slots[row] * a->capacity + p % a->capacity;
    return place * a->dim * (overlap ? 2 : 1) + (overlap && own ? a->dim : 0);
}

static void FN(compress_pool)(void *args, int tid, int n)
{
    const struct compress_pool_args *a = args;
    int64_t from, to, groups = (a->dim + 15) / 16;
    team_share(a->rows * groups, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t row = unit / groups;
        int32_t blocks = a->ratio == 4 && a->entries[row] ? 2 : 1;
        int32_t last = (a->entries[row] + 1) * a->ratio, first = last - blocks * a->ratio;
        int start = (int)(unit % groups) * 16, left = a->dim - start;
        v16 top = v16_set1(-INFINITY), sum = v16_zero(), pooled = v16_zero();
        for (int32_t p = first; p < last; p++)
            top = v16_max(top, load_some(a->ring_gate + pooled_at(a, row, p) + start, left));
        for (int32_t p = first; p < last; p++) {
            int64_t at = pooled_at(a, row, p) + start;
            v16 e = v16_exp(v16_sub(load_some(a->ring_gate + at, left), top));
            sum = v16_add(sum, e);
            pooled = v16_fma(e, load_some(a->ring_kv + at, left), pooled);
        }
        store_some(a->out + row * a->dim + start, v16_div(pooled, sum), left);
    }
}

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

static void FN(compress_pool)(void *args, int tid, int n)
{
    const struct compress_pool_args *a = args;
    const int64_t groups = (a->dim + 15) / 16, width = (int64_t)a->blocks * a->dim;
    int64_t from, to;
    team_share(a->rows * groups, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        const int64_t row = unit / groups;
        const int start = (int)(unit % groups) * 16, left = a->dim - start;
        const int32_t first = a->entries[row] * a->ratio, older = first ? (a->blocks - 1) * a->ratio : 0;
        const int64_t slot = (int64_t)a->slots[row] * a->capacity * width + start;
        const int64_t end = slot + a->capacity * width, begin = slot + (first - older) % a->capacity * width;
        v16 top = v16_set1(-INFINITY), sum = v16_zero(), pooled = v16_zero();
        for (int pass = 0; pass < 2; pass++) {
            int64_t at = begin;
            for (int i = -older; i < a->ratio; i++) { /* an entry's own positions give their rows' last dims */
                const int64_t from_here = at + (i < 0 ? 0 : width - a->dim);
                const v16 gate = load_some(a->ring_gate + from_here, left);
                if (pass) {
                    const v16 e = v16_exp(v16_sub(gate, top));
                    sum = v16_add(sum, e);
                    pooled = v16_fma(e, load_some(a->ring_kv + from_here, left), pooled);
                } else {
                    top = v16_max(top, gate);
                }
                at = at + width < end ? at + width : slot;
            }
        }
        store_some(a->out + row * a->dim + start, v16_div(pooled, sum), left);
    }
}

/* The largest of each row of logits, and its lead over the second. */
#pragma once

enum { BEST_BLOCK = 1024 }; /* logits; so many are looked through again for the place of the largest */

static void best_row(const float *x, int n, int32_t *id, float *lead)
{
    v16 first = v16_set1(-INFINITY), second = first; /* by lane */
    float top = -INFINITY, next = -INFINITY, largest = 0;
    int start = 0;
    for (int block = 0; block < n; block += BEST_BLOCK) {
        const int end = n - block < BEST_BLOCK ? n : block + BEST_BLOCK;
        for (int i = block; i < end; i += 16) {
            v16 v;
            if (end - i < 16) {
                float lane[16];
                v16_store(lane, v16_set1(-INFINITY));
                memcpy(lane, x + i, sizeof(float) * (size_t)(end - i));
                v = v16_load(lane);
            } else {
                v = v16_load(x + i);
            }
            second = v16_max(second, v16_min(first, v));
            first = v16_max(first, v);
        }
        const float most = largest_of(x + block, end - block), best = v16_hmax(first);
        largest = most > largest ? most : largest;
        if (best > top) top = best, start = block;
    }
    *id = 0;
    *lead = NAN;
    if (!(largest < INFINITY)) return;
    while (x[start] != top) start++;
    float lane[32];
    v16_store(lane, first);
    v16_store(lane + 16, second);
    top = -INFINITY;
    for (int l = 0; l < 32; l++) {
        if (lane[l] >= top) next = top, top = lane[l];
        else if (lane[l] > next) next = lane[l];
    }
    *id = start;
    *lead = top - next;
}

static void FN(best)(void *args, int tid, int n)
{
    const struct best_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) best_row(a->logits + t * a->vocab, a->vocab, a->ids + t, a->lead + t);
}

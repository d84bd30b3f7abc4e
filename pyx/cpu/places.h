/* Where positions and entries lie in caches. */
#pragma once

static void FN(ring_places)(void *args, int tid, int n)
{
    const struct ring_places_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const int32_t first = a->positions[t] - a->span + 1, base = a->slots[t] * a->capacity;
        int32_t *out = a->out + t * a->span, at = (first < 0 ? 0 : first) % a->capacity;
        for (int i = 0; i < a->span; i++) {
            out[i] = first + i < 0 ? -1 : base + at;
            if (first + i >= 0 && ++at == a->capacity) at = 0;
        }
    }
}

static void FN(visible_places)(void *args, int tid, int n)
{
    const struct visible_places_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const int32_t *pages = a->pages + (int64_t)a->slots[t] * a->slot_pages;
        int32_t *out = a->out + t * a->count;
        for (int j = 0; j < a->count; j++) out[j] = j < a->visible[t] ? (int32_t)entry_place(pages, a->page_entries, j) : -1;
    }
}

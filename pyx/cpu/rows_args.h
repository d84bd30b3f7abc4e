/* Argument structs of the row kernels. What an op computes, its names and shapes: dsv4/ops/__init__.py.
 *
 * Work is cut over outputs only, so that results do not depend on the number of threads.
 */
#pragma once
#include <stdint.h>

enum { MAX_STREAMS = 16 };

struct rope { const float *cos, *sin; int pairs; }; /* [rows, pairs] */

struct key_cache { uint8_t *codes, *scales; uint16_t *rope; int dim, rope_dim; };

struct index_cache { uint8_t *codes, *scales; int dim; };

struct embed_args { const uint16_t *table; const int32_t *tokens; float *out; int rows, dim, streams; };

struct act_quant_args { const float *x; float *out; int rows, dim; };

struct rmsnorm_args { const float *x, *w; float *out; int rows, dim; float eps; };

/* hc_pre, hc_pre_norm (norm given) and hc_head (comb NULL); scratch: rows · ((2 + m) m + 1) floats */
struct hc_pre_args {
    const float *h, *fn, *base, *scale, *norm;
    float *u, *post, *comb, *scratch;
    int rows, streams, dim, iterations;
    float eps, mix_eps, norm_eps; /* of the gates, of the mix's mean square, of the norm */
};

struct hc_post_args { const float *y, *h, *post, *comb; float *out; int rows, streams, dim; };

struct mean_args { const float *h; float *out; int rows, streams, dim; };

struct angles_args { const int32_t *positions; const float *theta; float *cos, *sin; int rows, pairs; };

/* rotate; and query where normed, with eps */
struct rotate_args { float *x; struct rope rope; int rows, heads, dim, inverse, normed; float eps; };

/* encode_keys; and store_keys where norm is given, which rotates too. scratch: rows · dim floats, or NULL */
struct encode_keys_args {
    const float *k, *norm;
    struct rope rope;
    struct key_cache cache;
    const int32_t *where;
    float *scratch;
    int rows;
    float eps;
};

struct decode_keys_args { struct key_cache cache; const int32_t *where; float *out; int rows; };

enum { MAX_PARTS = 8, TILE = 32, MANY_KEYS = 8 * TILE }; /* keys whose softmax is in step, and in work at a time */
enum { NEAR_KEYS = 256 << 10 };     /* bytes of decoded keys that stay in a core's own cache */
struct attend_part { struct key_cache cache; const int32_t *places; int count; };
struct attend_args {
    const float *q, *sink;
    float *out, *scratch; /* scratch: per thread attend_scratch() floats, where a pointer may lie */
    struct attend_part parts[MAX_PARTS];
    int part_count, rows, heads, dim;
    int places; /* of a row, in all parts */
    int slots;  /* decoded keys that a thread holds: attend_slots() */
};
static inline int key_stride(int dim) { return (dim + 15) / 16 * 16; }
/* All keys of a row, where they stay near: those of the next rows that are the same are used again. With 2 TILE more
 * than one row takes, by some rows. Otherwise a tile. */
static inline int attend_slots(int rows, int places, int dim)
{
    const int slots = places + 2 * TILE;
    return rows > 1 && 4ll * slots * key_stride(dim) <= NEAR_KEYS ? slots : TILE;
}
/* room for a row's places: a tile's at least, and sixteen more that are looked at */
static inline int64_t row_places(const struct attend_args *a) { return (a->places + TILE + 15) / 16 * 16 + 16; }
static inline int64_t attend_scratch(const struct attend_args *a)
{
    const int64_t lists = row_places(a) * (3 + 2 * (int64_t)sizeof(float *) / 4);
    return (int64_t)(a->slots + a->heads) * key_stride(a->dim) + 4 * MANY_KEYS + lists + (2 * a->heads + 15) / 16 * 16;
}

struct compress_store_args {
    const float *kv, *gate, *ape;
    const int32_t *positions, *where;
    float *ring_kv, *ring_gate;
    int rows, width, ratio;
};

struct compress_pool_args {
    const float *ring_kv, *ring_gate;
    const int32_t *slots, *entries;
    float *out;
    int rows, dim, ratio, capacity;
    int blocks; /* of `ratio` positions that an entry pools: its own, or the one before too */
};

/* index_query (out given) and encode_index (cache given); no rotation where rope.pairs is 0; dim 2^i >= 32 */
struct index_quant_args {
    const float *x;
    struct rope rope;
    float *out, *scratch; /* scratch: per thread 2 · dim floats */
    struct index_cache cache;
    const int32_t *where;
    int rows, heads, dim;
};

struct decode_index_args { struct index_cache cache; const int32_t *where; float *out; int rows; };

struct index_select_args {
    const float *q, *w;
    struct index_cache cache;
    const int32_t *slots, *visible, *pages;
    int32_t *out;
    float *scratch, *scores; /* scratch: per thread select_scratch() floats */
    int rows, heads, slot_pages, page_entries, k;
    int score_stride; /* at least the largest visible; scores: that per thread, or per row where by_entries */
    int by_entries;   /* one row's entries are cut over the threads, not the rows */
};
/* numbers held for a choice of k: enough that narrowing them is rare */
static inline int choice_room(int k) { return 4 * ((k + 15) / 16 * 16) + 64; }
static inline int64_t select_scratch(int heads, int dim, int k)
{
    const int64_t scores = (int64_t)(TILE + heads) * dim, choice = 2 * choice_room(k);
    return scores > choice ? scores : choice;
}

struct entry_places_args {
    const int32_t *entries, *slots, *pages;
    int32_t *out;
    int rows, count, slot_pages, page_entries;
};

struct ring_places_args { const int32_t *slots, *positions; int32_t *out; int rows, span, capacity; };

struct visible_places_args {
    const int32_t *visible, *slots, *pages;
    int32_t *out;
    int rows, count, slot_pages, page_entries;
};

struct best_args { const float *logits; int32_t *ids; float *lead; int rows, vocab; };

struct gate_args {
    const float *logits, *bias;
    const int64_t *fixed;
    const int32_t *tokens;
    int32_t *ids;
    float *weights, *scratch; /* scratch: rows · (experts + k) floats */
    int rows, experts, k;
    float scale;
};

struct nonfinite_args { const float *x; int64_t count; int found; };

/* The row kernels: everything but linears and experts. One job per op; its arguments are one struct.
 *
 * A job is called as job(args, tid, n) on each of n threads and cuts its own work over outputs, so that results do
 * not depend on n. What an op computes is said once, in dsv4/ops/__init__.py; names and shapes follow it.
 */
#pragma once
#include <stdint.h>

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

enum { MAX_PARTS = 8 };
struct attend_part { struct key_cache cache; const int32_t *places; int count; };
struct attend_args {
    const float *q, *sink;
    float *out, *scratch; /* scratch: per thread attend_scratch() floats */
    struct attend_part parts[MAX_PARTS];
    int part_count, rows, heads, dim;
};

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
};

/* index_query (out given) and encode_index (cache given); no rotation where rope.pairs is 0 */
struct index_quant_args {
    const float *x;
    struct rope rope;
    float *out, *scratch; /* scratch: per thread dim floats */
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
    float *scratch, *scores; /* scratch: per thread select_scratch() floats; scores: score_rows · score_stride */
    int rows, heads, slot_pages, page_entries, k;
    int score_stride, by_entries; /* by_entries: one row's entries are cut over the threads, not the rows */
};

struct entry_places_args { const int32_t *entries, *slots, *pages; int32_t *out; int rows, count, slot_pages, page_entries; };

struct gate_args {
    const float *logits, *bias;
    const int64_t *fixed;
    const int32_t *tokens;
    int32_t *ids;
    float *weights, *scratch; /* scratch: rows · experts floats */
    int rows, experts, k;
    float scale;
};

struct nonfinite_args { const float *x; int64_t count; int found; };

typedef void row_job(void *args, int tid, int n);

struct row_jobs {
    row_job *embed, *act_quant, *rmsnorm, *hc_pre, *hc_post, *mean_streams, *rope_angles, *rotate, *encode_keys,
        *decode_keys, *attend, *compress_store, *compress_pool, *index_quant, *decode_index, *index_select,
        *entry_places, *gate, *nonfinite;
};

extern const struct row_jobs row_jobs_scalar, row_jobs_avx2, row_jobs_avx512;

# The row kernels' argument structs: pyx/cpu/rows_args.h.

cdef extern from "kernels.h" nogil:
    struct rope:
        const float *cos
        const float *sin
        int pairs

    struct key_cache:
        uint8_t *codes
        uint8_t *scales
        uint16_t *rope
        int dim, rope_dim

    struct index_cache:
        uint8_t *codes
        uint8_t *scales
        int dim

    struct embed_args:
        const uint16_t *table
        const int32_t *tokens
        float *out
        int rows, dim, streams

    struct act_quant_args:
        const float *x
        float *out
        int rows, dim

    struct rmsnorm_args:
        const float *x
        const float *w
        float *out
        int rows, dim
        float eps

    struct hc_pre_args:
        const float *h
        const float *fn
        const float *base
        const float *scale
        const float *norm
        float *u
        float *post
        float *comb
        float *scratch
        int rows, streams, dim, iterations
        float eps, mix_eps, norm_eps

    struct hc_post_args:
        const float *y
        const float *h
        const float *post
        const float *comb
        float *out
        int rows, streams, dim

    struct mean_args:
        const float *h
        float *out
        int rows, streams, dim

    struct angles_args:
        const int32_t *positions
        const float *theta
        float *cos
        float *sin
        int rows, pairs

    struct rotate_args:
        float *x
        rope rope
        int rows, heads, dim, inverse, normed
        float eps

    struct encode_keys_args:
        const float *k
        const float *norm
        rope rope
        key_cache cache
        const int32_t *where
        float *scratch
        int rows
        float eps

    struct decode_keys_args:
        key_cache cache
        const int32_t *where
        float *out
        int rows

    enum:
        MAX_PARTS
        MAX_STREAMS

    struct attend_part:
        key_cache cache
        const int32_t *places
        int count

    struct attend_args:
        const float *q
        const float *sink
        float *out
        float *scratch
        attend_part *parts
        int part_count, rows, heads, dim, places, slots

    int64_t attend_scratch(const attend_args *a)
    int attend_slots(int rows, int places, int dim)

    struct compress_store_args:
        const float *kv
        const float *gate
        const float *ape
        const int32_t *positions
        const int32_t *where
        float *ring_kv
        float *ring_gate
        int rows, width, ratio

    struct compress_pool_args:
        const float *ring_kv
        const float *ring_gate
        const int32_t *slots
        const int32_t *entries
        float *out
        int rows, dim, ratio, capacity, blocks

    struct index_quant_args:
        const float *x
        rope rope
        float *out
        float *scratch
        index_cache cache
        const int32_t *where
        int rows, heads, dim

    struct decode_index_args:
        index_cache cache
        const int32_t *where
        float *out
        int rows

    struct index_select_args:
        const float *q
        const float *w
        index_cache cache
        const int32_t *slots
        const int32_t *visible
        const int32_t *pages
        int32_t *out
        float *scratch
        float *scores
        int rows, heads, slot_pages, page_entries, k, score_stride, by_entries

    int64_t select_scratch(int heads, int dim, int k)

    struct entry_places_args:
        const int32_t *entries
        const int32_t *slots
        const int32_t *pages
        int32_t *out
        int rows, count, slot_pages, page_entries

    struct ring_places_args:
        const int32_t *slots
        const int32_t *positions
        int32_t *out
        int rows, span, capacity

    struct visible_places_args:
        const int32_t *visible
        const int32_t *slots
        const int32_t *pages
        int32_t *out
        int rows, count, slot_pages, page_entries

    struct best_args:
        const float *logits
        int32_t *ids
        float *lead
        int rows, vocab

    struct gate_args:
        const float *logits
        const float *bias
        const int64_t *fixed
        const int32_t *tokens
        int32_t *ids
        float *weights
        float *scratch
        int rows, experts, k
        float scale

    struct nonfinite_args:
        const float *x
        int64_t count
        int found

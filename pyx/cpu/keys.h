/* Stored keys: e4m3 codes with a scale per 64 for the dims before the rotated ones, bf16 for those. */
#pragma once

static inline int key_blocks(const struct key_cache *c) { return (c->dim - c->rope_dim + KEY_BLOCK - 1) / KEY_BLOCK; }

static inline void encode_key(const float *k, const struct key_cache *c, int64_t place)
{
    int plain = c->dim - c->rope_dim, blocks = key_blocks(c);
    uint8_t *codes = c->codes + place * plain, *scales = c->scales + place * blocks;
    for (int b = 0; b < blocks; b++) {
        int start = b * KEY_BLOCK;
        scales[b] = encode_block_e4m3(k + start, codes + start, plain - start < KEY_BLOCK ? plain - start : KEY_BLOCK);
    }
    encode_bf16(k + plain, c->rope + place * c->rope_dim, c->rope_dim);
}

static inline void decode_key(const struct key_cache *c, int64_t place, float *k)
{
    int plain = c->dim - c->rope_dim, blocks = key_blocks(c);
    const uint8_t *codes = c->codes + place * plain, *scales = c->scales + place * blocks;
    for (int b = 0; b < blocks; b++) {
        int start = b * KEY_BLOCK;
        decode_block_e4m3(codes + start, scales[b], k + start, plain - start < KEY_BLOCK ? plain - start : KEY_BLOCK);
    }
    decode_bf16(c->rope + place * c->rope_dim, k + plain, c->rope_dim);
}

static void FN(encode_keys)(void *args, int tid, int n)
{
    const struct encode_keys_args *a = args;
    int64_t from, to;
    int dim = a->cache.dim, pairs = a->rope.pairs;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const float *k = a->k + t * dim;
        if (a->norm) {
            float *row = a->scratch + t * dim;
            scale_row(k, inverse_rms(k, dim, a->eps), a->norm, row, dim);
            rotate_pairs(row + dim - 2 * pairs, a->rope.cos + t * pairs, a->rope.sin + t * pairs, pairs, 1.0f);
            k = row;
        }
        encode_key(k, &a->cache, a->where[t]);
    }
}

static void FN(decode_keys)(void *args, int tid, int n)
{
    const struct decode_keys_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) decode_key(&a->cache, a->where[t], a->out + t * a->cache.dim);
}

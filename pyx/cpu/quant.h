/* Rounding to e4m3 and e2m1 under power-of-two scales, to bf16, and the way back. dsv4/formats.py defines them. */
#pragma once

enum { E4M3_BLOCK = 128, KEY_BLOCK = 64, E2M1_BLOCK = 32 };

static inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* Sixteen values under one scale, rounded to nearest even at `mantissa` bits, down to the binade 2^min_exponent.
 * Returns codes with the sign at `sign_bit`; *value is what they stand for, scale not applied. */
static inline v16i round_small(v16 x, const float largest, const int min_exponent, const int mantissa,
                               const int sign_bit, v16 *value)
{
    v16i bits = v16_bits(x), sign = v16i_and(bits, v16i_set1(INT32_MIN));
    v16 mag = v16_min(v16_abs(x), v16_set1(largest)); /* NaN becomes the largest; its scale is NaN */
    v16i exponent = v16i_max(v16i_and(v16_bits(mag), v16i_set1(0x7f800000)), v16i_set1((127 + min_exponent) << 23));
    /* adding 2^(23 − mantissa) times its binade leaves the count of steps in a value's lowest bits */
    v16 magic = v16i_float(v16i_add(exponent, v16i_set1((23 - mantissa) << 23)));
    v16 sum = v16_add(mag, magic);
    *value = v16i_float(v16i_or(v16_bits(v16_sub(sum, magic)), sign));
    v16i steps = v16i_and(v16_bits(sum), v16i_set1((4 << mantissa) - 1));
    v16i binade = v16i_sub(v16i_shr(exponent, 23), v16i_set1(127 + min_exponent));
    v16i code = v16i_add(v16i_shl(binade, mantissa), steps);
    return v16i_or(code, v16i_shr(sign, 31 - sign_bit));
}

static inline v16i round_e4m3(v16 x, v16 *value) { return round_small(x, 448.0f, -6, 3, 7, value); }
static inline v16i round_e2m1(v16 x, v16 *value) { return round_small(x, 6.0f, 0, 1, 3, value); }

/* The e8m0 byte of 2^ceil(log2(max(amax, smallest) · c)); 255, NaN, where amax is not finite. */
static inline int scale_byte(float amax, float smallest, float c)
{
    uint32_t bits = as_bits((amax > smallest ? amax : smallest) * c);
    return (int)(bits >> 23) + ((bits & 0x7fffff) != 0);
}
static inline float scale_of(int byte) { return byte == 255 ? NAN : e8m0((uint8_t)byte); }
static inline float inverse_of(int byte) { return byte == 255 ? NAN : as_float((uint32_t)(254 - byte) << 23); }

static inline v16 load_some(const float *p, int n) { return n >= 16 ? v16_load(p) : v16_load_n(p, n); }
static inline void store_some(float *p, v16 x, int n) { if (n >= 16) v16_store(p, x); else v16_store_n(p, x, n); }

/* Largest magnitude of n floats; infinity where one is NaN. */
static inline float largest_of(const float *x, int n)
{
    v16i most = v16i_set1(0);
    for (int i = 0; i < n; i += 16) most = v16i_max(most, v16_bits(v16_abs(load_some(x + i, n - i))));
    v16 lanes = v16i_float(most), inf = v16_set1(INFINITY);
    return v16_hmax(v16_min(lanes, inf)); /* NaN becomes infinity */
}

static inline int e4m3_scale(const float *x, int n)
{
    return scale_byte(largest_of(x, n), 1e-4f, (float)(1.0 / 448.0));
}
static inline int e2m1_scale(const float *x, int n)
{
    return scale_byte(largest_of(x, n), 0x1.8p-124f, (float)(1.0 / 6.0));
}

/* x [n] as one block: rounded and decoded again. */
static inline void quant_block_e4m3(const float *x, float *y, int n)
{
    int byte = e4m3_scale(x, n);
    v16 scale = v16_set1(scale_of(byte)), inverse = v16_set1(inverse_of(byte));
    for (int i = 0; i < n; i += 16) {
        v16 value;
        round_e4m3(v16_mul(load_some(x + i, n - i), inverse), &value);
        store_some(y + i, v16_mul(value, scale), n - i);
    }
}

/* x [n] as one block → codes and the scale's byte. */
static inline uint8_t encode_block_e4m3(const float *x, uint8_t *codes, int n)
{
    int byte = e4m3_scale(x, n);
    v16 inverse = v16_set1(inverse_of(byte));
    for (int i = 0; i < n; i += 16) {
        v16 value;
        v16i code = round_e4m3(v16_mul(load_some(x + i, n - i), inverse), &value);
        uint8_t part[16];
        v16i_store_u8(part, code);
        memcpy(codes + i, part, (size_t)(n - i < 16 ? n - i : 16));
    }
    return (uint8_t)byte;
}

/* codes that encode_block_e4m3 made: not the NaN codes, whose place the scale takes. */
static inline void decode_block_e4m3(const uint8_t *codes, uint8_t byte, float *y, int n)
{
    v16 scale = v16_set1(scale_of(byte)), raw = v16_set1(256.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_mul(v16_mul(v16_e4m3_raw(codes + i), raw), scale));
    if (i == n) return;
    uint8_t rest[16] = {0};
    memcpy(rest, codes + i, (size_t)(n - i));
    v16_store_n(y + i, v16_mul(v16_mul(v16_e4m3_raw(rest), raw), scale), n - i);
}

/* x [32] → y, rounded and decoded, and where codes is not NULL the 16 bytes of codes. Returns the scale's byte. */
static inline uint8_t quant_block_e2m1(const float *x, float *y, uint8_t *codes)
{
    int byte = e2m1_scale(x, E2M1_BLOCK);
    v16 scale = v16_set1(scale_of(byte)), inverse = v16_set1(inverse_of(byte));
    uint8_t code[E2M1_BLOCK];
    for (int i = 0; i < E2M1_BLOCK; i += 16) {
        v16 value;
        v16i_store_u8(code + i, round_e2m1(v16_mul(v16_load(x + i), inverse), &value));
        v16_store(y + i, v16_mul(value, scale));
    }
    for (int i = 0; codes && i < E2M1_BLOCK / 2; i++) codes[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
    return (uint8_t)byte;
}

/* float32 → bf16, to nearest even; NaN stays NaN. */
static inline void encode_bf16(const float *x, uint16_t *y, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t bits = as_bits(x[i]), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        y[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
    }
}

static inline void decode_bf16(const uint16_t *x, float *y, int n)
{
    int i = 0;
    for (; i + 16 <= n; i += 16) v16_store(y + i, v16_bf16(x + i));
    for (; i < n; i++) y[i] = as_float((uint32_t)x[i] << 16);
}

/* ------------------------------------------------------------------ jobs */
static void FN(act_quant)(void *args, int tid, int n)
{
    const struct act_quant_args *a = args;
    int64_t blocks = (a->dim + E4M3_BLOCK - 1) / E4M3_BLOCK, from, to;
    team_share(a->rows * blocks, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int start = (int)(unit % blocks) * E4M3_BLOCK;
        int64_t at = unit / blocks * a->dim + start;
        quant_block_e4m3(a->x + at, a->out + at, a->dim - start < E4M3_BLOCK ? a->dim - start : E4M3_BLOCK);
    }
}

static void FN(embed)(void *args, int tid, int n)
{
    const struct embed_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        float *row = a->out + t * a->streams * a->dim;
        decode_bf16(a->table + (int64_t)a->tokens[t] * a->dim, row, a->dim);
        for (int j = 1; j < a->streams; j++) memcpy(row + (int64_t)j * a->dim, row, 4 * (size_t)a->dim);
    }
}

static void FN(nonfinite)(void *args, int tid, int n)
{
    struct nonfinite_args *a = args;
    (void)tid, (void)n;
    for (int64_t i = 0; i < a->count && !a->found; i += 4096) {
        int64_t end = a->count - i < 4096 ? a->count : i + 4096;
        uint32_t found = 0;
        for (int64_t j = i; j < end; j++) found |= (as_bits(a->x[j]) & 0x7f800000) == 0x7f800000;
        a->found = (int)found;
    }
}

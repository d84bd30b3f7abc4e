/* Hyper-connections: mixing the m streams into a sub-layer's input, and its output back into them. */
#pragma once

enum { HC_ROWS = DOT_ROWS, HC_OUTPUTS = DOT_B, HC_LANES = 16 }; /* of fn · f that are one thread's at a time */

/* Rows of fn: a head has only the m of pre. */
static inline int hc_outputs(const struct hc_pre_args *a)
{
    return a->comb ? (2 + a->streams) * a->streams : a->streams;
}

INLINE void hc_block(const float *f, const float *fn, int width, int count, float *out, int64_t ldo, const int rows)
{
    const float *b[HC_OUTPUTS];
    for (int j = 0; j < count; j++) b[j] = fn + (int64_t)j * width;
    if (count == HC_OUTPUTS) dot_block(f, width, b, width, out, ldo, rows, HC_OUTPUTS);
    else
        for (int j = 0; j < count; j++) dot_block(f, width, b + j, width, out + j, ldo, rows, 1);
}

static void hc_rows(const float *f, const float *fn, int width, int count, float *out, int64_t ldo, int rows)
{
    switch (rows) {
#if V16_ROWS == 4
    case 6: hc_block(f, fn, width, count, out, ldo, 6); return;
    case 5: hc_block(f, fn, width, count, out, ldo, 5); return;
    case 4: hc_block(f, fn, width, count, out, ldo, 4); return;
    case 3: hc_block(f, fn, width, count, out, ldo, 3); return;
#endif
    case 2: hc_block(f, fn, width, count, out, ldo, 2); return;
    default: hc_block(f, fn, width, count, out, ldo, 1); return;
    }
}

/* hc_pre's first phase: fn · f of every row and 1 / rms(f), into scratch [rows, outputs] and after it [rows]. */
static void FN(hc_mixes)(void *args, int tid, int n)
{
    const struct hc_pre_args *a = args;
    int outputs = hc_outputs(a), width = a->streams * a->dim, groups = (outputs + HC_OUTPUTS - 1) / HC_OUTPUTS;
    int64_t from, to, blocks = (a->rows + HC_ROWS - 1) / HC_ROWS;
    team_share(blocks * groups, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t t = unit / groups * HC_ROWS;
        int o = (int)(unit % groups) * HC_OUTPUTS, rows = a->rows - t < HC_ROWS ? (int)(a->rows - t) : HC_ROWS;
        int count = outputs - o < HC_OUTPUTS ? outputs - o : HC_OUTPUTS;
        const float *f = a->h + t * width;
        if (!o) inverse_rms_of(f, width, rows, a->mix_eps, a->scratch + (int64_t)a->rows * outputs + t);
        hc_rows(f, a->fn + (int64_t)o * width, width, count, a->scratch + t * outputs + o, outputs, rows);
    }
}

static inline void sigmoids(float *x, int n)
{
    const v16 one = v16_set1(1.0f);
    for (int i = 0; i < n; i += 16) {
        v16 e = v16_exp(v16_sub(v16_zero(), load_some(x + i, n - i)));
        store_some(x + i, v16_div(one, v16_add(one, e)), n - i);
    }
}

/* c [m, m, W], W matrices side by side: every row j divided by its sum over k, + eps. */
INLINE void divide_rows(float *c, float eps, const int m, const int W)
{
    for (int j = 0; j < m; j++) {
        float sum[HC_LANES], *row = c + j * m * W;
        for (int w = 0; w < W; w++) sum[w] = row[w];
        for (int k = 1; k < m; k++)
            for (int w = 0; w < W; w++) sum[w] += row[k * W + w];
        for (int w = 0; w < W; w++) sum[w] += eps;
        for (int k = 0; k < m; k++)
            for (int w = 0; w < W; w++) row[k * W + w] /= sum[w];
    }
}

/* Every column k divided by its sum over j, + eps. */
INLINE void divide_columns(float *c, float eps, const int m, const int W)
{
    float sum[MAX_STREAMS * HC_LANES];
    for (int i = 0; i < m * W; i++) sum[i] = c[i];
    for (int j = 1; j < m; j++)
        for (int i = 0; i < m * W; i++) sum[i] += c[j * m * W + i];
    for (int i = 0; i < m * W; i++) sum[i] += eps;
    for (int j = 0; j < m; j++)
        for (int i = 0; i < m * W; i++) c[j * m * W + i] /= sum[i];
}

/* c [m, m, W]: softmax over the columns k of each row j, + eps, then columns and rows normalised in turn. */
INLINE void sinkhorn(float *c, int iterations, float eps, const int m, const int W)
{
    for (int j = 0; j < m; j++) {
        float top[HC_LANES], *row = c + j * m * W;
        for (int w = 0; w < W; w++) top[w] = row[w];
        for (int k = 1; k < m; k++)
            for (int w = 0; w < W; w++) top[w] = row[k * W + w] > top[w] ? row[k * W + w] : top[w];
        for (int k = 0; k < m; k++)
            for (int w = 0; w < W; w++) row[k * W + w] -= top[w];
    }
    for (int i = 0; i < m * m * W; i += 16) store_some(c + i, v16_exp(load_some(c + i, m * m * W - i)), m * m * W - i);
    divide_rows(c, 0, m, W);
    for (int i = 0; i < m * m * W; i++) c[i] += eps;
    divide_columns(c, eps, m, W);
    for (int round = 1; round < iterations; round++) {
        divide_rows(c, eps, m, W);
        divide_columns(c, eps, m, W);
    }
}

/* Gates of up to W rows from t on, which lie side by side in the lanes: pre [W, m], and post and comb of the args. */
INLINE void hc_gates(const struct hc_pre_args *a, int64_t t, int count, float *pre, const int m, const int W)
{
    int outputs = hc_outputs(a);
    float v[(2 + MAX_STREAMS) * MAX_STREAMS * HC_LANES];
    for (int i = 0; i < outputs; i++) {
        float scale = a->scale[i < m ? 0 : i < 2 * m ? 1 : 2], base = a->base[i];
        for (int w = 0; w < W; w++) {
            int64_t row = t + (w < count ? w : 0);
            v[i * W + w] = a->scratch[row * outputs + i] * a->scratch[(int64_t)a->rows * outputs + row] * scale + base;
        }
    }
    sigmoids(v, (a->comb ? 2 * m : m) * W);
    for (int w = 0; w < count; w++)
        for (int j = 0; j < m; j++) pre[w * m + j] = v[j * W + w] + a->eps;
    if (!a->comb) return;
    for (int w = 0; w < count; w++)
        for (int j = 0; j < m; j++) a->post[(t + w) * m + j] = 2.0f * v[(m + j) * W + w];
    sinkhorn(v + 2 * m * W, a->iterations, a->eps, m, W);
    for (int w = 0; w < count; w++)
        for (int i = 0; i < m * m; i++) a->comb[(t + w) * m * m + i] = v[(2 * m + i) * W + w];
}

/* u = Σ_j pre_j h_j, then the norm where there is one. */
static void hc_combine(const struct hc_pre_args *a, int64_t t, const float *pre)
{
    int m = a->streams, dim = a->dim;
    const float *h = a->h + t * m * dim;
    float *u = a->u + t * dim;
    for (int i = 0; i < dim; i += 16) {
        v16 sum = v16_mul(v16_set1(pre[0]), load_some(h + i, dim - i));
        for (int j = 1; j < m; j++)
            sum = v16_fma(v16_set1(pre[j]), load_some(h + (int64_t)j * dim + i, dim - i), sum);
        store_some(u + i, sum, dim - i);
    }
    if (a->norm) scale_row(u, inverse_rms(u, dim, a->norm_eps), a->norm, u, dim);
}

static void hc_gates_any(const struct hc_pre_args *a, int64_t t, int count, float *pre)
{
    int m = a->streams;
    if (m == 4 && count == 1) hc_gates(a, t, 1, pre, 4, 1); /* the usual number of streams, unrolled */
    else if (m == 4 && count <= 4) hc_gates(a, t, count, pre, 4, 4);
    else if (m == 4 && count <= 8) hc_gates(a, t, count, pre, 4, 8);
    else if (m == 4) hc_gates(a, t, count, pre, 4, HC_LANES);
    else hc_gates(a, t, count, pre, m, HC_LANES);
}

static void FN(hc_pre)(void *args, int tid, int n)
{
    const struct hc_pre_args *a = args;
    int64_t from, to;
    float pre[HC_LANES * MAX_STREAMS];
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to;) {
        int count = to - t < HC_LANES ? (int)(to - t) : HC_LANES;
        hc_gates_any(a, t, count, pre);
        for (int w = 0; w < count; w++) hc_combine(a, t + w, pre + w * a->streams);
        t += count;
    }
}

/* out_k = post_k y + Σ_j comb_jk h_j of one row in dims start .. end − 1; held: the factors fit in registers */
INLINE void hc_post_row(const struct hc_post_args *a, int64_t t, int start, int end, const int m, const int held)
{
    int dim = a->dim;
    const float *h = a->h + t * m * dim, *y = a->y + t * dim, *post = a->post + t * m, *comb = a->comb + t * m * m;
    float *out = a->out + t * m * dim;
    v16 p[4], c[16], x[MAX_STREAMS];
    for (int k = 0; held && k < m; k++) p[k] = v16_set1(post[k]);
    for (int i = 0; held && i < m * m; i++) c[i] = v16_set1(comb[i]);
    for (int i = start; i < end; i += 16) {
        v16 from = load_some(y + i, end - i);
        for (int j = 0; j < m; j++) x[j] = load_some(h + (int64_t)j * dim + i, end - i);
        for (int k = 0; k < m; k++) {
            v16 sum = v16_mul(held ? p[k] : v16_set1(post[k]), from);
            for (int j = 0; j < m; j++) sum = v16_fma(held ? c[j * m + k] : v16_set1(comb[j * m + k]), x[j], sum);
            store_some(out + (int64_t)k * dim + i, sum, end - i);
        }
    }
}

static void FN(hc_post)(void *args, int tid, int n)
{
    const struct hc_post_args *a = args;
    int64_t from, to, blocks = (a->dim + CHUNK - 1) / CHUNK;
    team_share(a->rows * blocks, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t t = unit / blocks;
        int start = (int)(unit % blocks) * CHUNK, end = a->dim - start < CHUNK ? a->dim : start + CHUNK;
        if (a->streams == 4) hc_post_row(a, t, start, end, 4, 1); /* the usual number, unrolled */
        else hc_post_row(a, t, start, end, a->streams, 0);
    }
}

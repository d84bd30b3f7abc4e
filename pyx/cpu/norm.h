/* RMS norms. */
#pragma once

/* 1 / sqrt(mean(x²) + eps) */
static inline float inverse_rms(const float *x, int n, float eps)
{
    return 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
}

/* The same of rows <= DOT_ROWS rows, one after the other. */
static inline void inverse_rms_of(const float *x, int n, int rows, float eps, float *out)
{
    sums_of_squares(x, n, rows, out);
    for (int i = 0; i < rows; i++) out[i] = 1.0f / sqrtf(out[i] / (float)n + eps);
}

/* y = x · r · w; w NULL: x · r. y may be x. */
static inline void scale_row(const float *x, float r, const float *w, float *y, int n)
{
    v16 factor = v16_set1(r);
    for (int i = 0; i < n; i += 16) {
        v16 v = v16_mul(load_some(x + i, n - i), factor);
        store_some(y + i, w ? v16_mul(v, load_some(w + i, n - i)) : v, n - i);
    }
}

static void FN(rmsnorm)(void *args, int tid, int n)
{
    const struct rmsnorm_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const float *x = a->x + t * a->dim;
        scale_row(x, inverse_rms(x, a->dim, a->eps), a->w, a->out + t * a->dim, a->dim);
    }
}

static void FN(mean_streams)(void *args, int tid, int n)
{
    const struct mean_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++)
        for (int i = 0; i < a->dim; i += 16) {
            const float *h = a->h + t * a->streams * a->dim + i;
            v16 sum = load_some(h, a->dim - i);
            for (int j = 1; j < a->streams; j++) sum = v16_add(sum, load_some(h + (int64_t)j * a->dim, a->dim - i));
            store_some(a->out + t * a->dim + i, v16_div(sum, v16_set1((float)a->streams)), a->dim - i);
        }
}

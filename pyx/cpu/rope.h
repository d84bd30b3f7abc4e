/* Rotary embedding: angles, and turning adjacent pairs by them. */
#pragma once

/* sin and cos of x, |x| < 2^20, in double with an error far below a float's: x less its multiple of π/2 (π/2 in two
 * parts, the first short enough for exact products), then the Taylor-like polynomials of fdlibm on [−π/4, π/4]. */
static inline void sin_cos(float angle, float *sin_out, float *cos_out)
{
    const double magic = 0x1.8p52; /* adding it rounds to an integer, left in the low bits */
    double x = (double)angle, shifted = x * 0x1.45f306dc9c883p-1 + magic, n = shifted - magic;
    int64_t quadrant;
    memcpy(&quadrant, &shifted, 8);
    double r = (x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34, z = r * r;
    double s = 1.58969099521155010221e-10;
    s = s * z + -2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z + -1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z + -1.66666666666666324348e-01;
    s = r + r * z * s;
    double c = -1.13596475577881948265e-11;
    c = c * z + 2.08757232129817482790e-09;
    c = c * z + -2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z + -1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    c = 1.0 - 0.5 * z + z * z * c;
    double sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
    *sin_out = (float)(quadrant & 2 ? -sine : sine);
    *cos_out = (float)((quadrant + 1) & 2 ? -cosine : cosine);
}

static void FN(rope_angles)(void *args, int tid, int n)
{
    const struct angles_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        float position = (float)a->positions[t];
        float *restrict sines = a->sin + t * a->pairs, *restrict cosines = a->cos + t * a->pairs;
        for (int i = 0; i < a->pairs; i++) sin_cos(position * a->theta[i], sines + i, cosines + i);
    }
}

/* x [2 · pairs] in place; direction −1: by the negative angles */
static inline void rotate_pairs(float *restrict x, const float *restrict cos, const float *restrict sin, int pairs,
                                float direction)
{
    int i = 0;
    for (; i + 16 <= pairs; i += 16) {
        v16 even, odd, c = v16_load(cos + i), s = v16_mul(v16_load(sin + i), v16_set1(direction));
        v16_deinterleave(x + 2 * i, &even, &odd);
        v16_interleave(v16_sub(v16_mul(even, c), v16_mul(odd, s)), v16_add(v16_mul(even, s), v16_mul(odd, c)), x + 2 * i);
    }
    for (; i < pairs; i++) {
        float even = x[2 * i], odd = x[2 * i + 1], s = sin[i] * direction;
        x[2 * i] = even * cos[i] - odd * s;
        x[2 * i + 1] = even * s + odd * cos[i];
    }
}

static void FN(rotate)(void *args, int tid, int n)
{
    const struct rotate_args *a = args;
    int64_t from, to;
    int pairs = a->rope.pairs;
    team_share((int64_t)a->rows * a->heads, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t t = unit / a->heads;
        float *x = a->x + unit * a->dim;
        if (a->normed) scale_row(x, inverse_rms(x, a->dim, a->eps), NULL, x, a->dim);
        rotate_pairs(x + a->dim - 2 * pairs, a->rope.cos + t * pairs, a->rope.sin + t * pairs, pairs,
                     a->inverse ? -1.0f : 1.0f);
    }
}

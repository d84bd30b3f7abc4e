/* Routing from the gate's logits. */
#pragma once

enum { GATE_LANES = 16 }; /* logits side by side */

/* log(1 + e^x), linear above 20, of GATE_LANES logits, in double: t = e^-|x| by its Taylor polynomial on
 * [−ln 2 / 2, ln 2 / 2], then log(1 + t) = 2 atanh(z), z = t / (2 + t) <= 1/3, by its series: errors below 1e-12. */
static inline void softplus(const float *restrict logit, float *restrict y)
{
    static const double inverse_factorial[] = {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040,
                                               1.0 / 40320, 1.0 / 362880, 1.0 / 3628800};
    const double magic = 0x1.8p52; /* adding it rounds to an integer, left in the low bits */
    double t[GATE_LANES], sum[GATE_LANES]; /* sum: first the part above 0 */
    for (int l = 0; l < GATE_LANES; l++) {
        double x = (double)logit[l], a = x < 0 ? -x : x;
        a = a < 700 ? a : 700; /* keeps 2^n a normal number; far below, the result is 0 anyway */
        double shifted = -a * 0x1.71547652b82fep+0 + magic, n = shifted - magic;
        double r = -a - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33, e = inverse_factorial[10];
#pragma GCC unroll 10
        for (int i = 9; i >= 0; i--) e = e * r + inverse_factorial[i];
        uint64_t bits;
        memcpy(&bits, &shifted, 8);
        bits = (bits + 1023) << 52;
        double power;
        memcpy(&power, &bits, 8);
        t[l] = e * power;
        sum[l] = x < 0 ? 0 : x;
    }
    for (int l = 0; l < GATE_LANES; l++) {
        double z = t[l] / (2 + t[l]), square = z * z, series = 1.0 / 25;
#pragma GCC unroll 12
        for (int i = 23; i >= 1; i -= 2) series = series * square + 1.0 / i;
        sum[l] += 2 * z * series;
    }
    for (int l = 0; l < GATE_LANES; l++) y[l] = (float)((double)logit[l] > 20 ? (double)logit[l] : sum[l]);
}

/* y = sqrt(softplus(logit)) */
static void gate_scores(const float *logit, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i += GATE_LANES) {
        const int live = n - i < GATE_LANES ? (int)(n - i) : GATE_LANES;
        float some[GATE_LANES] = {0}, to[GATE_LANES];
        memcpy(some, logit + i, sizeof(float) * (size_t)live);
        softplus(some, to);
        for (int l = 0; l < GATE_LANES; l++) to[l] = sqrtf(to[l]);
        memcpy(y + i, to, sizeof(float) * (size_t)live);
    }
}

/* The k experts of largest score + bias: best first, the lower id where equal; NaN counts as −∞. keys: k floats. */
static void top_experts(const float *score, const float *bias, int experts, int k, float *keys, int32_t *ids)
{
    int count = 0;
    for (int e = 0; e < experts; e++) {
        float key = bias ? score[e] + bias[e] : score[e];
        key = key == key ? key : -INFINITY;
        if (count == k && !(key > keys[k - 1])) continue;
        int i = count < k ? count++ : k - 1;
        for (; i > 0 && key > keys[i - 1]; i--) {
            keys[i] = keys[i - 1];
            ids[i] = ids[i - 1];
        }
        keys[i] = key;
        ids[i] = e;
    }
}

static void sort_ascending(int32_t *x, int n)
{
    for (int i = 1; i < n; i++) {
        int32_t v = x[i];
        int j = i;
        for (; j > 0 && x[j - 1] > v; j--) x[j] = x[j - 1];
        x[j] = v;
    }
}

static void FN(gate)(void *args, int tid, int n)
{
    const struct gate_args *a = args;
    int64_t from, to;
    int k = a->k;
    team_share(a->rows, tid, n, &from, &to);
    float *scores = a->scratch; /* [rows, experts], then keys [rows, k] */
    gate_scores(a->logits + from * a->experts, scores + from * a->experts, (to - from) * a->experts);
    for (int64_t t = from; t < to; t++) {
        const float *score = scores + t * a->experts;
        float *keys = scores + (int64_t)a->rows * a->experts + t * k, sum = 0;
        int32_t *ids = a->ids + t * k;
        if (a->fixed)
            for (int i = 0; i < k; i++) ids[i] = (int32_t)a->fixed[(int64_t)a->tokens[t] * k + i];
        else
            top_experts(score, a->bias, a->experts, k, keys, ids);
        sort_ascending(ids, k);
        for (int i = 0; i < k; i++) sum += score[ids[i]];
        for (int i = 0; i < k; i++) a->weights[t * k + i] = score[ids[i]] / sum * a->scale;
    }
}

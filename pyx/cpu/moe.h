/* The experts of one layer.
 *
 * expert(x, w): g = w1 x, u = w3 x, a = silu(min(g, limit)) · clamp(u, ±limit) · w, then w2 a; x and a rounded to e4m3
 * per 128 before each linear. y[slice] = Σ over a row's experts in ascending id, the shared one last; the slices of
 * w2's inner dimension are added as a binary tree. The sums of a row may be made in several calls (moe_args.sums).
 */

/* silu(min(g, limit)) · clamp(u, ±limit) · weight; limit 0: no clamp */
static void FN(swiglu_row)(const float *g, const float *u, float weight, float limit, float *y, int64_t n)
{
    const v16 high = v16_set1(limit), low = v16_set1(-limit), one = v16_set1(1.0f), w = v16_set1(weight);
    for (int64_t i = 0; i < n; i += 16) {
        const int live = n - i < 16 ? (int)(n - i) : 16;
        v16 a = v16_load_n(g + i, live), b = v16_load_n(u + i, live);
        if (limit > 0) { /* the value stands second, so that a NaN stays one */
            a = v16_min(high, a);
            b = v16_max(low, v16_min(high, b));
        }
        v16 silu = v16_div(a, v16_add(one, v16_exp(v16_sub(v16_zero(), a))));
        v16_store_n(y + i, v16_mul(v16_mul(silu, b), w), live);
    }
}

static void FN(swiglu)(void *args, int tid, int n)
{
    const struct swiglu_args *a = args;
    int64_t first, last;
    team_share(a->rows, tid, n, &first, &last);
    for (int64_t t = first; t < last; t++)
        FN(swiglu_row)(a->g + t * a->n, a->u + t * a->n, a->weight ? a->weight[t] : 1, a->limit, a->y + t * a->n, a->n);
}

#define TO_64(n) (((n) + 63) / 64 * 64)

/* How inputs lie: floats; as FP4 linears want them; as FP8 linears of many rows do (gemm_pair_tiles.h). */
enum FN(order) { FN(IN_FLOATS), FN(FOR_FP4), FN(FOR_FP8) };

static enum FN(order) FN(moe_order)(const struct matrix *w, int rows, int slices)
{
    if (w->format == FORMAT_FP4) return FN(FOR_FP4);
#ifdef V16_BF16
    if (FN(tile_pays)(w, rows) && FN(fp8_fits)(w, slices)) return FN(FOR_FP8);
#endif
    (void)rows, (void)slices;
    return FN(IN_FLOATS);
}

/* Rounded inputs of an FP4 linear, `at` elements into an array of them: 64s of x, the last filled up with zeros. */
static void FN(pack)(struct moe_args *a, const float *x, void *to, int64_t at, int len)
{
#ifdef V16_BF16
    uint16_t *y = (uint16_t *)to + at;
    for (int k = 0; k < len; k += 64)
        for (int half = 0; half < 64; half += 32) {
            v16 even = v16_zero(), odd = v16_zero();
            if (k + half < len) v16_deinterleave(x + k + half, &even, &odd);
            v16i_store_u16(y + k + half / 2, v16i_shr(v16_bits(even), 16));
            v16i_store_u16(y + k + half / 2 + 32, v16i_shr(v16_bits(odd), 16));
        }
    if (largest_of(x, len) > 0x1p100f) a->wide = 1; /* not exact any more: gemm_pairs.h */
#else
    (void)a;
    FN(quads)(x, (float *)to + at, 1, len);
#endif
}

/* As strip; x in the order that moe_order says, its rows `stride` elements each. */
static void FN(moe_strip)(const struct matrix *w, const struct route *route, int64_t n0, int nn, enum FN(order) order,
                          const void *x, int64_t stride, const int32_t *row, int rows, int slices, float *sums)
{
    const float *each[BLOCK];
#ifdef V16_BF16
    if (order != FN(IN_FLOATS)) {
        const uint16_t *pairs[BLOCK];
        for (int r = 0; r < rows; r++) pairs[r] = (const uint16_t *)x + (row ? row[r] : r) * stride;
        if (FN(tile_pays)(w, rows) && FN(strip_tiles)(w, route, n0, nn, pairs, rows, slices, sums, STRIP, rows * STRIP)) return;
        FN(strip_pairs)(w, route, n0, nn, pairs, rows, slices, sums);
        return;
    }
#endif
    (void)order;
    for (int r = 0; r < rows; r++) each[r] = (const float *)x + (row ? row[r] : r) * stride;
    FN(strip)(w, route, n0, nn, each, rows, slices, sums);
}

static void FN(moe_inputs)(void *args, int tid, int n)
{
    struct moe_args *a = args;
    const int64_t blocks = (a->d + E4M3_BLOCK - 1) / E4M3_BLOCK;
    int64_t first, last;
    team_share(a->rows * blocks, tid, n, &first, &last);
    for (int64_t job = first; job < last; job++) {
        const int64_t k = job % blocks * E4M3_BLOCK, at = job / blocks * a->d + k;
        const int len = (int)(a->d - k < E4M3_BLOCK ? a->d - k : E4M3_BLOCK);
        quant_block_e4m3(a->x + at, a->plain + at, len);
        if (a->packed) FN(pack)(a, a->plain + at, a->packed, job / blocks * TO_64(a->d) + k, len);
#ifdef V16_BF16
        if (len == E4M3_BLOCK && a->rows > FEW_PAIRS)
            FN(fp8_pairs)(a->plain + at, a->pairs + job / blocks * TO_64(a->d) + k, len);
#endif
    }
}

/* The activations of one expert for 128 inner values (`block`), all its rows. `after`: what the thread does next. */
static void FN(moe_inner)(struct moe_args *a, int64_t use, int64_t block, struct route after)
{
    const struct matrix *w1 = a->matrices + 3 * (int64_t)a->expert[use], *w2 = w1 + 1, *w3 = w1 + 2;
    const int64_t k = block * E4M3_BLOCK;
    const int width = (int)(a->inner - k < E4M3_BLOCK ? a->inner - k : E4M3_BLOCK);
    const void *const inputs[] = {a->plain, a->packed, a->pairs};
    const int64_t strides[] = {a->d, TO_64(a->d), TO_64(a->d)};
    float sums[BLOCK * STRIP], gates[2][BLOCK][E4M3_BLOCK];
    for (int64_t e = a->first[use]; e < a->first[use + 1]; e += BLOCK) {
        const int rows = (int)(a->first[use + 1] - e < BLOCK ? a->first[use + 1] - e : BLOCK);
        for (int which = 0; which < 2; which++) {
            const struct matrix *w = which ? w3 : w1;
            /* a row that chooses one expert twice gives it more rows than there are, maybe without pairs */
            const enum FN(order) order = FN(moe_order)(w, rows < a->rows ? rows : (int)a->rows, 1);
            struct route route = which ? after : (struct route){0, k, w3};
            route.end = k + width;
            for (int c = 0; c < width; c += STRIP) {
                const int nn = width - c < STRIP ? width - c : STRIP;
                FN(moe_strip)(w, &route, k + c, nn, order, inputs[order], strides[order], a->row + e, rows, 1, sums);
                for (int r = 0; r < rows; r++) v16_store(&gates[which][r][c], v16_load(sums + r * STRIP));
            }
        }
        const enum FN(order) order = FN(moe_order)(w2, rows, a->slices);
        for (int r = 0; r < rows; r++) {
            float act[E4M3_BLOCK], *out = a->act + e * TO_64(a->inner);
            const int64_t at = r * TO_64(a->inner) + k;
            FN(swiglu_row)(gates[0][r], gates[1][r], a->weight[e + r], a->limit, act, width);
            quant_block_e4m3(act, order == FN(IN_FLOATS) ? out + at : act, width);
            if (order == FN(FOR_FP4)) FN(pack)(a, act, out, at, width);
#ifdef V16_BF16
            if (order == FN(FOR_FP8)) FN(fp8_pairs)(act, (uint16_t *)out + at, width);
#endif
        }
    }
}

/* Outputs n0 .. n0+width−1 of all parts: what they begin with, [slices][parts][MOE_WIDTH]. */
static void FN(moe_begin)(const struct moe_args *a, int64_t n0, int width, float *totals)
{
    if (!a->sums) memset(totals, 0, sizeof(float) * (size_t)(a->slices * a->parts * MOE_WIDTH));
    for (int64_t p = 0; a->sums && p < a->parts; p++)
        for (int s = 0; s < a->slices; s++)
            memcpy(totals + (s * a->parts + p) * MOE_WIDTH, a->sums + (a->place[p] * a->slices + s) * a->d + n0,
                   sizeof(float) * (size_t)width);
}

/* What moe_outputs came to: on to the next call, or the result. */
static void FN(moe_store)(const struct moe_args *a, int64_t n0, int width, const float *totals)
{
    for (int64_t p = 0; p < a->parts; p++) {
        for (int s = 0; a->sums && s < a->slices; s++)
            memcpy(a->sums + (a->place[p] * a->slices + s) * a->d + n0, totals + (s * a->parts + p) * MOE_WIDTH,
                   sizeof(float) * (size_t)width);
        for (int c = 0; !a->sums && c < width; c += STRIP)
            v16_store_n(a->y + p * a->d + n0 + c, FN(tree)(totals + p * MOE_WIDTH + c, a->parts * MOE_WIDTH, a->slices),
                        width - c < STRIP ? width - c : STRIP);
    }
}

/* Outputs n0 .. n0+width−1 (width <= MOE_WIDTH) of all parts; totals [slices][parts][MOE_WIDTH]. The thread goes on at
 * output `after` of the first expert. */
static void FN(moe_outputs)(const struct moe_args *a, int64_t n0, int width, int64_t after, float *totals)
{
    float sums[MAX_SLICES * BLOCK * STRIP];
    FN(moe_begin)(a, n0, width, totals);
    for (int64_t use = 0; use < a->uses; use++) {
        const struct matrix *w2 = a->matrices + 3 * (int64_t)a->expert[use] + 1;
        const int64_t following = a->expert[use + 1 < a->uses ? use + 1 : 0];
        const struct route route = {n0 + width, use + 1 < a->uses ? n0 : after, a->matrices + 3 * following + 1};
        for (int64_t e = a->first[use]; e < a->first[use + 1]; e += BLOCK) {
            const int rows = (int)(a->first[use + 1] - e < BLOCK ? a->first[use + 1] - e : BLOCK);
            const int64_t stride = TO_64(a->inner);
            const enum FN(order) order = FN(moe_order)(w2, rows, a->slices);
            for (int c0 = 0; c0 < width; c0 += STRIP) {
                const int nn = width - c0 < STRIP ? width - c0 : STRIP;
                FN(moe_strip)(w2, &route, n0 + c0, nn, order, a->act + e * stride, stride, NULL, rows, a->slices, sums);
                for (int s = 0; s < a->slices; s++)
                    for (int r = 0; r < rows; r++) {
                        float *total = totals + (s * a->parts + a->part[e + r]) * MOE_WIDTH + c0;
                        const v16 more = v16_load_n(sums + (s * rows + r) * STRIP, nn);
                        v16_store_n(total, v16_add(v16_load_n(total, nn), more), nn);
                    }
            }
        }
    }
    FN(moe_store)(a, n0, width, totals);
}

/* Threads take jobs in turn. Where weights come from memory, each takes one ahead of what it does, to know which to fetch;
 * where they are near, that would only leave a job to who has one when another thread has none. */
static void FN(moe_inners)(void *args, int tid, int n)
{
    struct moe_args *a = args;
    const int64_t blocks = (a->inner + E4M3_BLOCK - 1) / E4M3_BLOCK, jobs = a->uses * blocks;
    const int near = a->matrices->n * a->matrices->weight_stride <= NEAR;
    (void)tid, (void)n;
    for (int64_t next, job = atomic_fetch_add(&a->next_inner, 1); job < jobs; job = next) {
        next = near ? jobs : atomic_fetch_add(&a->next_inner, 1);
        struct route after = {0, next % blocks * E4M3_BLOCK, NULL};
        if (next < jobs) after.next = a->matrices + 3 * (int64_t)a->expert[a->order[next / blocks]];
        FN(moe_inner)(a, a->order[job / blocks], job % blocks, after);
        if (near) next = atomic_fetch_add(&a->next_inner, 1);
    }
}

static void FN(moe)(void *args, int tid, int n)
{
    struct moe_args *a = args;
    const int64_t spans = (a->d + MOE_WIDTH - 1) / MOE_WIDTH;
    float *totals = a->totals + (int64_t)tid * a->slices * a->parts * MOE_WIDTH;
    (void)n;
    if (a->wide) return; /* before any sum: the other kernel makes them all */
    for (int64_t next, job = atomic_fetch_add(&a->next_output, 1); job < spans; job = next) {
        next = atomic_fetch_add(&a->next_output, 1);
        const int64_t n0 = job * MOE_WIDTH, rest = a->d - n0;
        FN(moe_outputs)(a, n0, (int)(rest < MOE_WIDTH ? rest : MOE_WIDTH), next * MOE_WIDTH, totals);
    }
}

static void FN(moe_end)(void *args, int tid, int n)
{
    const struct moe_end_args *a = args;
    const int64_t spans = (a->d + MOE_WIDTH - 1) / MOE_WIDTH;
    float totals[MAX_SLICES * MOE_WIDTH];
    int64_t first, last;
    team_share(a->rows * spans, tid, n, &first, &last);
    for (int64_t job = first; job < last; job++) {
        const int64_t t = job / spans, n0 = job % spans * MOE_WIDTH;
        const int width = (int)(a->d - n0 < MOE_WIDTH ? a->d - n0 : MOE_WIDTH);
        memset(totals, 0, sizeof totals);
        for (int64_t i = 0; i < a->lanes * a->slices; i++) {
            const float *from = a->sums + (t * a->lanes * a->slices + i) * a->d + n0;
            float *total = totals + i % a->slices * MOE_WIDTH;
            for (int c = 0; c < width; c++) total[c] += from[c];
        }
        for (int c = 0; c < width; c += STRIP)
            v16_store_n(a->y + t * a->d + n0 + c, FN(tree)(totals + c, MOE_WIDTH, a->slices),
                        width - c < STRIP ? width - c : STRIP);
    }
}

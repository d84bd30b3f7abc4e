/* Linears: who computes what, of which form of inputs. The sums are those of gemm.h. */

/* What a job reads of a block of rows: floats or, where all of them are such numbers, pairs (gemm_pair_tiles.h). */
struct FN(block) {
    const float *x[BLOCK];
    const uint16_t *pairs[BLOCK];
    int rows, paired;
};

#ifdef V16_BF16
/* Whether FP8 inputs may become pairs: of rows enough; grouped ones are not rounded. */
static int FN(pairs_fit)(const struct linear_args *a)
{
    return a->pairs && a->rows > FEW_PAIRS && a->groups == 1 && FN(fp8_fits)(a->w, a->slices);
}
#endif

/* The inputs of a group of `rows` rows from t0 on. `room`: of this thread, [rows][w->k] for pairs; NULL: none. */
static void FN(linear_inputs)(const struct linear_args *a, int64_t t0, int rows, int64_t group, uint16_t *room,
                              struct FN(block) *block)
{
    block->rows = rows;
    block->paired = room != NULL;
    for (int r = 0; r < rows; r++) block->x[r] = a->x + ((t0 + r) * a->groups + group) * a->stride;
#ifdef V16_BF16
    if (rows <= FEW_PAIRS) block->paired = 0;
    for (int r = 0; r < rows && block->paired; r++) {
        block->pairs[r] = room + r * a->w->k;
        block->paired = FN(fp8_pairs)(block->x[r], room + r * a->w->k, a->w->k);
    }
#endif
}

/* As strip, of inputs of either form, to sums [slice][row][width], `apart` floats from slice to slice. Whether it could:
 * floats of few rows, or FP4, are left to strip. */
static int FN(linear_tile)(const struct matrix *w, const struct route *route, int64_t n0, int nn,
                           const struct FN(block) *block, int slices, float *sums, int64_t width, int64_t apart)
{
#ifdef V16_BF16
    if (block->paired)
        return FN(strip_tiles)(w, route, n0, nn, block->pairs, block->rows, slices, sums, width, apart);
#endif
    if (!FN(tile_fits)(w, block->rows, slices)) return 0;
    FN(strip_tile)(w, route, n0, nn, block->x, block->rows, slices, sums, width, apart);
    return 1;
}

/* One strip of a group's outputs for a block of rows from t0 on. */
static void FN(linear_strip)(const struct linear_args *a, const struct route *route, int64_t t0,
                             const struct FN(block) *block, int64_t group, int64_t strip)
{
    const struct matrix *w = a->w;
    const int64_t width = w->n / a->groups, n0 = group * width + strip * STRIP;
    const int nn = (int)(width - strip * STRIP < STRIP ? width - strip * STRIP : STRIP), rows = block->rows;
    float *y = a->y + t0 * w->n + n0;
    /* one sum each, or two: no tree */
    if (a->slices <= 2 && w->k / a->slices <= CHUNK && nn % 4 == 0 &&
        FN(linear_tile)(w, route, n0, nn, block, a->slices, y, w->n, 0))
        return;
    float sums[MAX_SLICES * BLOCK * STRIP];
    if (!FN(linear_tile)(w, route, n0, nn, block, a->slices, sums, STRIP, rows * STRIP))
        FN(strip)(w, route, n0, nn, block->x, rows, a->slices, sums);
    for (int r = 0; r < rows; r++)
        v16_store_n(y + r * w->n, FN(tree)(sums + r * STRIP, rows * STRIP, a->slices), nn);
}

static void FN(linear)(void *args, int tid, int n)
{
    const struct linear_args *a = args;
    const struct matrix *w = a->w;
    const int64_t width = w->n / a->groups, strips = (width + STRIP - 1) / STRIP;
    const int64_t blocks = (a->rows + BLOCK - 1) / BLOCK;
    struct route route = {w->n, 0, NULL};
    struct FN(block) block;
    int64_t first, last;
    uint16_t *room = NULL;
#ifdef V16_BF16
    if (FN(pairs_fit)(a)) room = a->pairs + tid * (a->rows < BLOCK ? a->rows : BLOCK) * w->k;
#endif
    if (a->rows >= ROWS_EACH * n && w->n * w->weight_stride <= NEAR) {
        team_share(a->rows, tid, n, &first, &last);
        for (int64_t t0 = first; t0 < last; t0 += BLOCK)
            for (int64_t group = 0; group < a->groups; group++) {
                FN(linear_inputs)(a, t0, (int)(last - t0 < BLOCK ? last - t0 : BLOCK), group, room, &block);
                for (int64_t strip = 0; strip < strips; strip++) FN(linear_strip)(a, &route, t0, &block, group, strip);
            }
        return;
    }
    team_share(a->groups * strips * blocks, tid, n, &first, &last);
    if (blocks == 1) route.end = (last - 1) / strips * width + ((last - 1) % strips + 1) * STRIP;
    for (int64_t job = first; job < last; job++) {
        /* all strips of a block of rows in turn: its inputs stay in the cache */
        const int64_t t0 = job / strips / a->groups * BLOCK, group = job / strips % a->groups;
        const int rows = (int)(a->rows - t0 < BLOCK ? a->rows - t0 : BLOCK);
        if (job == first || job % strips == 0) FN(linear_inputs)(a, t0, rows, group, room, &block);
        FN(linear_strip)(a, &route, t0, &block, group, job % strips);
    }
}

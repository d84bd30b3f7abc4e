/* The k best of many scores: those above the k-th best so far are held, and narrowed to k when their room is full. */
#pragma once

enum { FEW_KEYS = 128 };

/* keys: integers in the order of the scores; entries ascend */
struct choice {
    int32_t *key, *entry;
    int held;
};

/* A float's bits so that the order of integers is the floats' order; −0 as 0. */
static inline v16i ordered(v16 x)
{
    const v16i bits = v16_bits(v16_add(x, v16_zero()));
    const v16i flip = v16i_and(v16i_sub(v16i_set1(0), v16i_shr(bits, 31)), v16i_set1(INT32_MAX));
    return v16i_sub(v16i_or(bits, flip), v16i_and(bits, flip));
}

/* Of the 16 keys from i on, which are held. */
static inline uint32_t held_keys(const struct choice *c, int i)
{
    return c->held - i < 16 ? (1u << (c->held - i)) - 1 : 0xffff;
}

static inline int keys_above(const struct choice *c, int32_t bound)
{
    int count = 0;
    for (int i = 0; i < c->held; i += 16)
        count += __builtin_popcount(v16i_above(v16i_load(c->key + i), v16i_set1(bound)) & held_keys(c, i));
    return count;
}

/* narrow where few keys are held: finds the k-th best bit by bit, looking at sixteen keys at once. */
static int32_t narrow_few(struct choice *c, int k)
{
    int32_t bound = INT32_MIN, least = INT32_MAX; /* at least k keys, `reached`, are not below the bound */
    int reached = c->held, at = 0;
    for (uint32_t bit = 1u << 31; bit && reached != k; bit >>= 1) {
        const int32_t next = (int32_t)((uint32_t)bound + bit);
        const int count = keys_above(c, next - 1);
        bound = count >= k ? next : bound;
        reached = count >= k ? count : reached;
    }
    int equal = reached == k ? k : k - keys_above(c, bound); /* of those at the bound, so many stay */
    for (int i = 0; i < c->held; i += 16) {
        const v16i key = v16i_load(c->key + i), entry = v16i_load(c->entry + i), edge = v16i_set1(bound);
        const uint32_t above = v16i_above(key, edge) & held_keys(c, i);
        uint32_t same = held_keys(c, i) & ~above & ~v16i_above(edge, key);
        while (__builtin_popcount(same) > equal) same ^= 1u << (31 - __builtin_clz(same));
        equal -= __builtin_popcount(same);
        v16i_pack(c->key + at, key, above | same); /* at <= i: what is overwritten has been read */
        v16i_pack(c->entry + at, entry, above | same);
        at += __builtin_popcount(above | same);
    }
    for (int j = 0; j < k; j++) least = c->key[j] < least ? c->key[j] : least;
    c->held = k;
    return least;
}

/* Keep the k best; of equal ones the first. Finds the k-th best byte by byte → it. */
static int32_t narrow(struct choice *c, int k)
{
    if (c->held <= FEW_KEYS) return narrow_few(c, k);
    uint32_t prefix = 0, mask = 0;
    int32_t need = k, last = 0, least = INT32_MAX, at = 0;
    /* `need` of the keys that begin with `prefix` are wanted; done when that is all of them */
    for (int shift = 24; shift >= 0 && need != last; shift -= 8) {
        int32_t count[256] = {0}, digit = 255;
        for (int j = 0; j < c->held; j++) {
            const uint32_t key = (uint32_t)c->key[j] ^ 0x80000000u;
            if ((key & mask) == prefix) count[key >> shift & 255]++;
        }
        for (; need > count[digit]; digit--) need -= count[digit];
        last = count[digit];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (int j = 0; at < k; j++) {
        const uint32_t head = ((uint32_t)c->key[j] ^ 0x80000000u) & mask;
        if (head < prefix || (head == prefix && need-- <= 0)) continue;
        least = c->key[j] < least ? c->key[j] : least;
        c->key[at] = c->key[j];
        c->entry[at++] = c->entry[j];
    }
    c->held = k;
    return least;
}

/* The k best of n > k scores, ascending; equal ones: lower j. room: 2 · choice_room(k) numbers. */
static void choose(const float *score, int64_t n, int k, int32_t *room, int32_t *out)
{
    static const float first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int most = choice_room(k) - 16; /* held where a turn begins, which writes 16 more */
    const v16i lanes = v16_to_int(v16_load(first));
    struct choice c = {.key = room, .entry = room + choice_room(k)};
    v16i least = v16i_set1(0);
    int narrowed = 0;
    for (int64_t j = 0; j < n; j += 16) {
        const v16i key = ordered(load_some(score + j, n - j < 16 ? (int)(n - j) : 16));
        const uint32_t there = n - j < 16 ? (1u << (n - j)) - 1 : 0xffff;
        const uint32_t above = narrowed ? v16i_above(key, least) & there : there;
        if (above) {
            v16i_pack(c.key + c.held, key, above);
            v16i_pack(c.entry + c.held, v16i_add(lanes, v16i_set1((int32_t)j)), above);
            c.held += __builtin_popcount(above);
        }
        if (c.held > most) {
            least = v16i_set1(narrow(&c, k));
            narrowed = 1;
        }
    }
    narrow(&c, k);
    memcpy(out, c.entry, 4 * (size_t)k);
}

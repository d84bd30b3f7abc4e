# Everything that is not a linear or an expert. Rows, dims and places are as in dsv4/ops/__init__.py; that places,
# slots and tokens lie inside their arrays is the caller's business.

include "rows_args.pxi"

cdef object int32 = np.int32
cdef dict KINDS = {c"f": "float32", c"i": "int32", c"l": "int64", c"H": "uint16", c"B": "uint8"}


# ---------------------------------------------------------------------- arrays by pointer
cdef struct Array:  # what a call needs of one; the caller's reference keeps the memory in place
    void *data
    Py_ssize_t[3] shape  # of the last dimension count given to `look`, the first of them holding all before


cdef int look(Array *a, array, char kind, int ndim, bint writable=False) except -1:
    """Pointer and shape of a C-contiguous array of `ndim` dimensions (0: any, shape[0] its size)."""
    cdef Py_buffer view
    cdef int i
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
    cdef bint fits = view.format[0] == kind or (kind == c"l" and view.format[0] == c"q")
    fits = fits and (ndim == 0 or view.ndim == ndim)
    if fits:
        a.data = view.buf
        for i in range(ndim):
            a.shape[i] = view.shape[i]
        if ndim == 0:
            a.shape[0] = view.len // view.itemsize
    PyBuffer_Release(&view)
    if not fits:
        raise InputError(f"expected {KINDS[kind]} of {ndim or 'any'} dimensions, found {array.dtype} {array.shape}")
    return 0


cdef void *take(array, char kind, Py_ssize_t count, bint writable=False) except NULL:
    """Pointer to a C-contiguous array of `count` values."""
    cdef Array a
    look(&a, array, kind, 0, writable)
    if a.shape[0] != count:
        raise InputError(f"expected {count} values of {KINDS[kind]}, found {array.dtype} {array.shape}")
    return a.data


cdef int look_rope(rope *r, pair, Py_ssize_t rows) except -1:
    cdef Array cos
    look(&cos, pair[0], c"f", 2)
    if cos.shape[0] != rows:
        raise InputError(f"rope: expected angles of {rows} rows, found {cos.shape[0]}")
    r.pairs = cos.shape[1]
    r.cos, r.sin = <float *>cos.data, <float *>take(pair[1], c"f", rows * cos.shape[1])
    return 0


cdef int look_keys(key_cache *c, cache, bint writable=False) except -1:
    cdef Array codes, scales, tail
    look(&codes, cache[0], c"B", 2, writable)
    look(&scales, cache[1], c"B", 2, writable)
    look(&tail, cache[2], c"H", 2, writable)
    if (codes.shape[0] != scales.shape[0] or codes.shape[0] != tail.shape[0]
            or scales.shape[1] != (codes.shape[1] + 63) // 64):
        raise InputError(
            f"key cache: expected codes [n, D], scales [n, D/64], rope [n, R]; found {[a.shape for a in cache]}"
        )
    c.codes, c.scales, c.rope = <uint8_t *>codes.data, <uint8_t *>scales.data, <uint16_t *>tail.data
    c.dim, c.rope_dim = codes.shape[1] + tail.shape[1], tail.shape[1]
    return 0


cdef int look_index(index_cache *c, cache, bint writable=False) except -1:
    cdef Array codes, scales
    look(&codes, cache[0], c"B", 2, writable)
    look(&scales, cache[1], c"B", 2, writable)
    cdef Py_ssize_t dim = 2 * codes.shape[1]
    if codes.shape[0] != scales.shape[0] or dim < 32 or dim & (dim - 1) or scales.shape[1] != dim // 32:
        raise InputError(
            "index cache: expected codes [n, Di/2], scales [n, Di/32] with Di a power of two from 32; "
            f"found {[a.shape for a in cache]}"
        )
    c.codes, c.scales, c.dim = <uint8_t *>codes.data, <uint8_t *>scales.data, dim
    return 0


# ---------------------------------------------------------------------- rows in, rows out
def embed(Team team, table, tokens, int streams):
    """Ops.embed."""
    cdef embed_args a
    cdef Array t, n
    look(&t, table, c"H", 2)
    look(&n, tokens, c"i", 1)
    a.table, a.tokens = <uint16_t *>t.data, <int32_t *>n.data
    a.rows, a.dim, a.streams = n.shape[0], t.shape[1], streams
    out = lines((a.rows, streams, a.dim))
    a.out = <float *>take(out, c"f", <Py_ssize_t>a.rows * streams * a.dim, True)
    team.run(team.kernels.embed, &a, team.share(4.0 * a.rows * streams * a.dim))
    return out


def act_quant(Team team, x):
    """Ops.act_quant."""
    cdef act_quant_args a
    cdef Array xs
    look(&xs, x, c"f", 2)
    a.x, a.rows, a.dim = <float *>xs.data, xs.shape[0], xs.shape[1]
    out = lines((a.rows, a.dim))
    a.out = <float *>take(out, c"f", xs.shape[0] * xs.shape[1], True)
    team.run(team.kernels.act_quant, &a, team.share(10.0 * a.rows * a.dim))
    return out


def rmsnorm(Team team, x, w, float eps):
    """Ops.rmsnorm."""
    cdef rmsnorm_args a
    cdef Array xs
    look(&xs, x, c"f", 2)
    a.x, a.rows, a.dim, a.eps = <float *>xs.data, xs.shape[0], xs.shape[1], eps
    a.w = <float *>take(w, c"f", a.dim)
    out = lines((a.rows, a.dim))
    a.out = <float *>take(out, c"f", xs.shape[0] * xs.shape[1], True)
    team.run(team.kernels.rmsnorm, &a, team.share(5.0 * a.rows * a.dim))
    return out


def has_nonfinite(Team team, x):
    """Ops.has_nonfinite."""
    cdef nonfinite_args a
    cdef Array xs
    look(&xs, x, c"f", 0)
    a.x, a.count, a.found = <float *>xs.data, xs.shape[0], 0
    team.run(team.kernels.nonfinite, &a, 1)
    return bool(a.found)


# ---------------------------------------------------------------------- hyper-connections
def hc_pre(Team team, h, hc, norm, float norm_eps, bint head):
    """Ops.hc_pre and hc_pre_norm → (u, post, comb); head: Ops.hc_head → u. norm None: none."""
    cdef hc_pre_args a
    cdef Array hs
    cdef Matrix fn = hc.fn
    look(&hs, h, c"f", 3)
    a.rows, a.streams, a.dim = hs.shape[0], hs.shape[1], hs.shape[2]
    cdef int outputs = a.streams if head else (2 + a.streams) * a.streams
    cdef bint fits = fn.m.format == FORMAT_F32 and fn.m.n == outputs and fn.m.k == a.streams * a.dim
    fits = fits and fn.m.weight_stride == 4 * fn.m.k
    if not fits or not 1 <= a.streams <= MAX_STREAMS:
        raise InputError(
            f"hyper-connection: expected fn f32 [{outputs}, {a.streams * a.dim}] and 1 to {MAX_STREAMS} streams, "
            f"found {fn.fmt} {fn.shape}"
        )
    a.h, a.fn = <float *>hs.data, <float *>fn.m.weight
    a.base, a.scale = <float *>take(hc.base, c"f", outputs), <float *>take(hc.scale, c"f", 1 if head else 3)
    a.eps, a.mix_eps, a.norm_eps, a.iterations = hc.eps, hc.norm_eps, norm_eps, hc.iterations
    a.norm = NULL if norm is None else <float *>take(norm, c"f", a.dim)
    u = lines((a.rows, a.dim))
    cdef Memory scratch = Memory(<int64_t>4 * a.rows * (outputs + 1))
    a.u = <float *>take(u, c"f", hs.shape[0] * hs.shape[2], True)
    a.scratch = <float *>scratch.start
    a.post = a.comb = NULL
    post = comb = None
    if not head:
        post, comb = lines((a.rows, a.streams)), lines((a.rows, a.streams, a.streams))
        a.post = <float *>take(post, c"f", <Py_ssize_t>a.rows * a.streams, True)
        a.comb = <float *>take(comb, c"f", <Py_ssize_t>a.rows * a.streams * a.streams, True)
    team.run(team.kernels.hc_pre, &a, team.share((outputs + 4.0) / 3 * a.rows * a.streams * a.dim))
    return u if head else (u, post, comb)


def hc_post(Team team, y, h, post, comb):
    """Ops.hc_post."""
    cdef hc_post_args a
    cdef Array hs
    look(&hs, h, c"f", 3)
    a.h, a.rows, a.streams, a.dim = <float *>hs.data, hs.shape[0], hs.shape[1], hs.shape[2]
    if a.streams > MAX_STREAMS:
        raise InputError(f"hyper-connection: expected at most {MAX_STREAMS} streams, found {a.streams}")
    a.y = <float *>take(y, c"f", hs.shape[0] * hs.shape[2])
    a.post = <float *>take(post, c"f", hs.shape[0] * hs.shape[1])
    a.comb = <float *>take(comb, c"f", hs.shape[0] * hs.shape[1] * hs.shape[1])
    out = lines((a.rows, a.streams, a.dim))
    a.out = <float *>take(out, c"f", hs.shape[0] * hs.shape[1] * hs.shape[2], True)
    team.run(team.kernels.hc_post, &a, team.share(4.0 * a.rows * a.streams * a.dim))
    return out


def mean_streams(Team team, h):
    """Ops.mean_streams."""
    cdef mean_args a
    cdef Array hs
    look(&hs, h, c"f", 3)
    a.h, a.rows, a.streams, a.dim = <float *>hs.data, hs.shape[0], hs.shape[1], hs.shape[2]
    out = lines((a.rows, a.dim))
    a.out = <float *>take(out, c"f", hs.shape[0] * hs.shape[2], True)
    team.run(team.kernels.mean_streams, &a, team.share(4.0 * a.rows * a.streams * a.dim))
    return out


# ---------------------------------------------------------------------- attention
def rope_angles(Team team, positions, theta):
    """Ops.rope_angles → (cos, sin)."""
    cdef angles_args a
    cdef Array ps, ts
    look(&ps, positions, c"i", 1)
    look(&ts, theta, c"f", 1)
    a.positions, a.theta, a.rows, a.pairs = <int32_t *>ps.data, <float *>ts.data, ps.shape[0], ts.shape[0]
    cos, sin = lines((a.rows, a.pairs)), lines((a.rows, a.pairs))
    a.cos = <float *>take(cos, c"f", ps.shape[0] * ts.shape[0], True)
    a.sin = <float *>take(sin, c"f", ps.shape[0] * ts.shape[0], True)
    team.run(team.kernels.rope_angles, &a, team.share(40.0 * a.rows * a.pairs))
    return cos, sin


def rotate(Team team, x, angles, bint inverse, bint normed, float eps):
    """Ops.rotate, or where normed Ops.query: in place."""
    cdef rotate_args a
    cdef Array xs
    look(&xs, x, c"f", 3, True)
    look_rope(&a.rope, angles, xs.shape[0])
    a.x, a.rows, a.heads, a.dim = <float *>xs.data, xs.shape[0], xs.shape[1], xs.shape[2]
    a.inverse, a.normed, a.eps = inverse, normed, eps
    if 2 * a.rope.pairs > a.dim:
        raise InputError(f"rope: expected at most {a.dim} rotated dims, found {2 * a.rope.pairs}")
    team.run(team.kernels.rotate, &a, team.share(10.0 * a.rows * a.heads * (a.dim if normed else 2 * a.rope.pairs)))
    return x


def encode_keys(Team team, k, norm, angles, cache, where, float eps):
    """Ops.encode_keys, or with a norm and angles Ops.store_keys."""
    cdef encode_keys_args a
    cdef Array ks
    look(&ks, k, c"f", 2)
    look_keys(&a.cache, cache, True)
    a.k, a.rows, a.eps = <float *>ks.data, ks.shape[0], eps
    if ks.shape[1] != a.cache.dim:
        raise InputError(f"keys: expected {a.cache.dim} dims as in the cache, found {ks.shape[1]}")
    a.where = <int32_t *>take(where, c"i", a.rows)
    a.norm, a.scratch = NULL, NULL
    cdef Memory scratch
    if norm is not None:
        scratch = Memory(4 * ks.shape[0] * ks.shape[1])
        a.scratch = <float *>scratch.start
        a.norm = <float *>take(norm, c"f", ks.shape[1])
        look_rope(&a.rope, angles, ks.shape[0])
        if 2 * a.rope.pairs > a.cache.dim:
            raise InputError(f"rope: expected at most {a.cache.dim} rotated dims, found {2 * a.rope.pairs}")
    team.run(team.kernels.encode_keys, &a, team.share(20.0 * a.rows * a.cache.dim))


def decode_keys(Team team, cache, where):
    """Ops.decode_keys."""
    cdef decode_keys_args a
    cdef Array ws
    look_keys(&a.cache, cache)
    look(&ws, where, c"i", 1)
    a.where, a.rows = <int32_t *>ws.data, ws.shape[0]
    out = lines((a.rows, a.cache.dim))
    a.out = <float *>take(out, c"f", <Py_ssize_t>a.rows * a.cache.dim, True)
    team.run(team.kernels.decode_keys, &a, team.share(8.0 * a.rows * a.cache.dim))
    return out


def attend(Team team, q, sink, list parts):
    """Ops.attend."""
    cdef attend_args a
    cdef Array qs, ps
    cdef int i, threads
    look(&qs, q, c"f", 3)
    a.q, a.rows, a.heads, a.dim = <float *>qs.data, qs.shape[0], qs.shape[1], qs.shape[2]
    a.sink = <float *>take(sink, c"f", a.heads)
    a.part_count, a.places = len(parts), 0
    if a.part_count > MAX_PARTS:
        raise InputError(f"attend: expected at most {MAX_PARTS} parts, found {a.part_count}")
    for i in range(a.part_count):
        cache, places = parts[i]
        look_keys(&a.parts[i].cache, cache)
        look(&ps, places, c"i", 2)
        if a.parts[i].cache.dim != a.dim or ps.shape[0] != a.rows:
            raise InputError(
                f"attend: expected keys of {a.dim} dims and places of {a.rows} rows, "
                f"found {a.parts[i].cache.dim} and {ps.shape[0]}"
            )
        a.parts[i].places, a.parts[i].count = <int32_t *>ps.data, ps.shape[1]
        a.places += a.parts[i].count
    out = lines((a.rows, a.heads, a.dim))
    a.out = <float *>take(out, c"f", qs.shape[0] * qs.shape[1] * qs.shape[2], True)
    a.slots = attend_slots(a.rows, a.places, a.dim)
    threads = team.share(2.0 * a.rows * a.heads * a.places * a.dim)
    cdef Memory scratch = Memory(4 * threads * attend_scratch(&a))
    a.scratch = <float *>scratch.start
    team.run(team.kernels.attend, &a, threads)
    return out


# ---------------------------------------------------------------------- compressor
def compress_store(Team team, kv, gate, ape, positions, ring, where):
    """Ops.compress_store."""
    cdef compress_store_args a
    cdef Array ks, apes, ring_kv
    look(&ks, kv, c"f", 2)
    look(&apes, ape, c"f", 2)
    look(&ring_kv, ring[0], c"f", 2, True)
    a.rows, a.width, a.ratio = ks.shape[0], ks.shape[1], apes.shape[0]
    if apes.shape[1] != a.width or ring_kv.shape[1] != a.width:
        raise InputError(
            f"compressor: expected rows of {a.width}, found {apes.shape[1]} in ape, {ring_kv.shape[1]} in the ring"
        )
    a.kv, a.ape, a.ring_kv = <float *>ks.data, <float *>apes.data, <float *>ring_kv.data
    a.gate = <float *>take(gate, c"f", ks.shape[0] * ks.shape[1])
    a.ring_gate = <float *>take(ring[1], c"f", ring_kv.shape[0] * ring_kv.shape[1], True)
    a.positions, a.where = <int32_t *>take(positions, c"i", a.rows), <int32_t *>take(where, c"i", a.rows)
    team.run(team.kernels.compress_store, &a, team.share(18.0 * a.rows * a.width))


def compress_pool(Team team, ring, slots, entries, int ratio, int capacity):
    """Ops.compress_pool."""
    cdef compress_pool_args a
    cdef Array ring_kv, es
    look(&ring_kv, ring[0], c"f", 2)
    look(&es, entries, c"i", 1)
    a.ring_kv, a.ring_gate = <float *>ring_kv.data, <float *>take(ring[1], c"f", ring_kv.shape[0] * ring_kv.shape[1])
    a.slots, a.entries = <int32_t *>take(slots, c"i", es.shape[0]), <int32_t *>es.data
    a.blocks = pooled_blocks(ratio)
    a.rows, a.dim, a.ratio, a.capacity = es.shape[0], ring_kv.shape[1] // a.blocks, ratio, capacity
    out = lines((a.rows, a.dim))
    a.out = <float *>take(out, c"f", <Py_ssize_t>a.rows * a.dim, True)
    team.run(team.kernels.compress_pool, &a, team.share(30.0 * a.rows * a.dim * ratio * a.blocks))
    return out


# ---------------------------------------------------------------------- indexer
cdef int index_quant(Team team, index_quant_args *a) except -1:
    if a.dim < 32 or a.dim & (a.dim - 1) or 2 * a.rope.pairs > a.dim:
        raise InputError(
            f"indexer: expected a head size of 2^i, from 32 and the {2 * a.rope.pairs} rotated dims; found {a.dim}"
        )
    cdef int threads = team.share(40.0 * a.rows * a.heads * a.dim)
    cdef Memory scratch = Memory(8 * threads * a.dim)
    a.scratch = <float *>scratch.start
    return team.run(team.kernels.index_quant, a, threads)


def index_query(Team team, q, angles):
    """Ops.index_query."""
    cdef index_quant_args a
    cdef Array qs
    look(&qs, q, c"f", 3)
    look_rope(&a.rope, angles, qs.shape[0])
    a.x, a.rows, a.heads, a.dim = <float *>qs.data, qs.shape[0], qs.shape[1], qs.shape[2]
    out = lines((a.rows, a.heads, a.dim))
    a.out = <float *>take(out, c"f", qs.shape[0] * qs.shape[1] * qs.shape[2], True)
    index_quant(team, &a)
    return out


def encode_index(Team team, k, cache, where):
    """Ops.encode_index."""
    cdef index_quant_args a
    cdef Array ks
    look(&ks, k, c"f", 2)
    look_index(&a.cache, cache, True)
    if ks.shape[1] != a.cache.dim:
        raise InputError(f"index keys: expected {a.cache.dim} dims as in the cache, found {ks.shape[1]}")
    a.x, a.rows, a.heads, a.dim = <float *>ks.data, ks.shape[0], 1, ks.shape[1]
    a.out, a.rope.pairs = NULL, 0
    a.where = <int32_t *>take(where, c"i", a.rows)
    index_quant(team, &a)


def decode_index(Team team, cache, where):
    """Ops.decode_index."""
    cdef decode_index_args a
    cdef Array ws
    look_index(&a.cache, cache)
    look(&ws, where, c"i", 1)
    a.where, a.rows = <int32_t *>ws.data, ws.shape[0]
    out = lines((a.rows, a.cache.dim))
    a.out = <float *>take(out, c"f", <Py_ssize_t>a.rows * a.cache.dim, True)
    team.run(team.kernels.decode_index, &a, team.share(20.0 * a.rows * a.cache.dim))
    return out


def index_select(Team team, q, w, cache, slots, visible, pages, int page_entries, int k):
    """Ops.index_select."""
    cdef index_select_args a
    cdef Array qs, ps
    cdef int32_t most = 0
    cdef int64_t t, scored = 0
    cdef int threads
    look(&qs, q, c"f", 3)
    look(&ps, pages, c"i", 2)
    look_index(&a.cache, cache)
    a.q, a.rows, a.heads, a.k = <float *>qs.data, qs.shape[0], qs.shape[1], k
    a.w = <float *>take(w, c"f", qs.shape[0] * qs.shape[1])
    a.slots, a.visible = <int32_t *>take(slots, c"i", a.rows), <int32_t *>take(visible, c"i", a.rows)
    a.pages, a.slot_pages, a.page_entries = <int32_t *>ps.data, ps.shape[1], page_entries
    for t in range(a.rows):
        most = max(most, a.visible[t])
        scored += a.visible[t] if a.visible[t] > k else 0
    if qs.shape[2] != a.cache.dim or most > ps.shape[1] * page_entries:
        raise InputError(
            f"indexer: expected queries of {a.cache.dim} dims and at most {ps.shape[1] * page_entries} entries, "
            f"found {qs.shape[2]} and {most}"
        )
    out = empty((a.rows, k), int32)
    a.out = <int32_t *>take(out, c"i", qs.shape[0] * k, True)
    threads = team.share(<double>scored * a.heads * a.cache.dim)
    a.by_entries, a.score_stride = threads > 1 and a.rows < 4 * threads, (most + 15) // 16 * 16
    cdef Memory scratch = Memory(4 * threads * select_scratch(a.heads, a.cache.dim, a.k))
    cdef Memory scores = Memory(<int64_t>4 * a.score_stride * (a.rows if a.by_entries else threads))
    a.scratch, a.scores = <float *>scratch.start, <float *>scores.start
    team.run(team.kernels.index_select, &a, threads)
    return out


def entry_places(Team team, entries, slots, pages, int page_entries):
    """Ops.entry_places."""
    cdef entry_places_args a
    cdef Array es, ps
    look(&es, entries, c"i", 2)
    look(&ps, pages, c"i", 2)
    a.entries, a.pages, a.slots = <int32_t *>es.data, <int32_t *>ps.data, <int32_t *>take(slots, c"i", es.shape[0])
    a.rows, a.count, a.slot_pages, a.page_entries = es.shape[0], es.shape[1], ps.shape[1], page_entries
    out = empty((a.rows, a.count), int32)
    a.out = <int32_t *>take(out, c"i", es.shape[0] * es.shape[1], True)
    team.run(team.kernels.entry_places, &a, team.share(40.0 * a.rows * a.count))
    return out


def ring_places(Team team, slots, positions, int span, int capacity):
    """Ops.ring_places."""
    cdef ring_places_args a
    cdef Array ps
    look(&ps, positions, c"i", 1)
    a.positions, a.rows, a.span, a.capacity = <int32_t *>ps.data, ps.shape[0], span, capacity
    a.slots = <int32_t *>take(slots, c"i", ps.shape[0])
    if span < 0 or capacity < 1:
        raise InputError(f"places: expected a span from 0 and a capacity from 1, found {span} and {capacity}")
    out = empty((a.rows, span), int32)
    a.out = <int32_t *>take(out, c"i", ps.shape[0] * span, True)
    team.run(team.kernels.ring_places, &a, team.share(4.0 * a.rows * span))
    return out


def visible_places(Team team, visible, int n, slots, pages, int page_entries):
    """Ops.visible_places."""
    cdef visible_places_args a
    cdef Array vs, ps
    look(&vs, visible, c"i", 1)
    look(&ps, pages, c"i", 2)
    a.visible, a.pages, a.slots = <int32_t *>vs.data, <int32_t *>ps.data, <int32_t *>take(slots, c"i", vs.shape[0])
    a.rows, a.count, a.slot_pages, a.page_entries = vs.shape[0], n, ps.shape[1], page_entries
    out = empty((a.rows, n), int32)
    a.out = <int32_t *>take(out, c"i", vs.shape[0] * n, True)
    team.run(team.kernels.visible_places, &a, team.share(40.0 * a.rows * n))
    return out


# ---------------------------------------------------------------------- results
def best(Team team, logits):
    """Ops.best → (ids, lead)."""
    cdef best_args a
    cdef Array ls
    look(&ls, logits, c"f", 2)
    a.logits, a.rows, a.vocab = <float *>ls.data, ls.shape[0], ls.shape[1]
    ids, lead = empty(a.rows, int32), empty(a.rows, float32)
    a.ids, a.lead = <int32_t *>take(ids, c"i", a.rows, True), <float *>take(lead, c"f", a.rows, True)
    team.run(team.kernels.best, &a, team.share(<double>ls.shape[0] * ls.shape[1]))
    return ids, lead


# ---------------------------------------------------------------------- experts
def gate(Team team, x, Matrix w, bias, fixed, tokens, int k, float scale):
    """Ops.gate → (ids, weights)."""
    cdef gate_args a
    cdef Array ls, fs
    logits = linear(team, x, w)
    look(&ls, logits, c"f", 2)
    a.logits, a.rows, a.experts, a.k, a.scale = <float *>ls.data, ls.shape[0], ls.shape[1], k, scale
    if not 1 <= k <= a.experts:
        raise InputError(f"gate: expected 1 to {a.experts} experts per token, found {k}")
    a.bias = NULL if bias is None else <float *>take(bias, c"f", a.experts)
    a.fixed, a.tokens = NULL, NULL
    if fixed is not None:
        look(&fs, fixed, c"l", 2)
        if fs.shape[1] != k:
            raise InputError(f"gate: expected {k} fixed experts per token, found {fs.shape[1]}")
        a.fixed, a.tokens = <int64_t *>fs.data, <int32_t *>take(tokens, c"i", a.rows)
    ids, weights = empty((a.rows, k), int32), lines((a.rows, k))
    cdef Memory scratch = Memory(4 * ls.shape[0] * (a.experts + k))
    a.ids = <int32_t *>take(ids, c"i", ls.shape[0] * k, True)
    a.weights = <float *>take(weights, c"f", ls.shape[0] * k, True)
    a.scratch = <float *>scratch.start
    team.run(team.kernels.gate, &a, team.share(350.0 * a.rows * a.experts))
    return ids, weights

// The fibers, barriers, warps and blocks of fibers.h.
#include "fibers.h"
#include "switch.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_POISON(p, n) __asan_poison_memory_region(p, n)
#define EMU_UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define EMU_POISON(p, n) ((void)0)
#define EMU_UNPOISON(p, n) ((void)0)
#endif
#if defined(EMU_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_write_range(void* at, unsigned long bytes);
#endif

namespace emu {

constexpr size_t SHARED_LIMIT = 64 << 10;  // static + dynamic shared memory of a block on the smallest supported card
constexpr size_t GAP = 64;  // poisoned bytes between shared variables
constexpr size_t ARENA = 2 * SHARED_LIMIT;

enum class State : unsigned char { ready, barrier, exchange, done };

// ---------------------------------------------------------------------- what runs
struct Fiber {
    Stack stack;
    char* memory = nullptr;
    Place place;
    State state = State::done;
    int site = 0;          // where it waits
    unsigned answer = 0;   // of a voting barrier
    struct Copy { void* to; const void* from; size_t bytes; unsigned group; };
    std::vector<Copy> copies;  // cp.async not yet waited for
    unsigned group = 0;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
#endif
#if defined(EMU_TSAN)
    void* tsan = nullptr;
#endif
};

// Lanes of a warp that meet: each hands in some bytes, the last to come works out everybody's result.
struct Exchange {
    unsigned mask = 0, arrived = 0, left = 0;
    int site = 0;
    bool done = false;
    alignas(16) Bytes in[32], out[32];
    char* token = nullptr;
};

struct Warp {
    std::vector<Exchange> exchanges = std::vector<Exchange>(33);  // one more than lanes could hold open
    uint64_t held = 0;  // which are not free
};

struct Variable { int id; size_t bytes; void* at; };

struct Launch {
    dim3 grid, block;
    size_t shared = 0;
    void (*call)(void**) = nullptr;
    void** args = nullptr;
    std::vector<unsigned> order;
    unsigned group = 32;  // fibers that go as far as they can before the next ones: a warp, or all in turn
    bool early = false;  // cp.async copies at once, instead of as late as it may
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    std::string error;
};

struct Worker {  // an OS thread's block
    Launch* launch = nullptr;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Variable> variables;
    char* arena = nullptr;
    size_t used = 0, counted = 0;
    dim3 block_index;
    Fiber* now = nullptr;
    Stack scheduler;
    unsigned finished = 0;
    size_t turn = 0, end = 0;  // place in the order of the fiber that runs, and where its group ends
    char *tokens = nullptr;  // addresses that stand for synchronisations, one each
    size_t token = 0;
    char* gate = nullptr;  // of the block's next barrier
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    const void* bottom = nullptr;
    size_t size = 0;
#endif
#if defined(EMU_TSAN)
    void* tsan = nullptr;
#endif
};

thread_local Place* here = nullptr;
static thread_local Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

// Go on with the next fiber of the order that can run, or with the scheduler behind the last one.
static void to_next(bool last = false) {
    Worker& w = *worker;
    Fiber& f = *w.now;
#if !defined(__SANITIZE_ADDRESS__) && !defined(EMU_TSAN)
    const std::vector<unsigned>& order = w.launch->order;
    while (!w.launch->failed && ++w.turn < w.end) {
        Fiber& next = w.fibers[order[w.turn]];
        if (next.state != State::ready) continue;
        w.now = &next, here = &next.place;
        return swap(f.stack, next.stack);
    }
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &f.fake, w.bottom, w.size);
#endif
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(w.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    swap(f.stack, w.scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f.fake, &w.bottom, &w.size);
#endif
}

static void record(Launch& launch, const std::string& what) {
    std::lock_guard<std::mutex> hold(launch.lock);
    if (!launch.failed) launch.error = what;
    launch.failed = true;
}

static std::string where() {
    Worker& w = *worker;
    char text[120];
    snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u)", w.block_index.x, w.block_index.y,
             w.block_index.z, w.now->place.thread.x, w.now->place.thread.y, w.now->place.thread.z);
    return text;
}

void fail(const char* format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    record(*worker->launch, where() + ": " + text);
    for (;;) to_next();
}

static void wait_as(State state, int site) {
    Fiber& f = *worker->now;
    f.state = state, f.site = site;
    to_next();
}

static char* new_token() {  // of the current worker
#if defined(EMU_TSAN)
    return worker->tokens + 8 * (2 + worker->token++ % ((1 << 20) - 2));
#else
    return nullptr;
#endif
}
static void arrive(char* token) {
#if defined(EMU_TSAN)
    __tsan_release(token);
#endif
    (void)token;
}
static void written(void* at, size_t bytes) {
#if defined(EMU_TSAN)
    __tsan_write_range(at, bytes);
#endif
    (void)at, (void)bytes;
}
static void leave(char* token) {
#if defined(EMU_TSAN)
    __tsan_acquire(token);
#endif
    (void)token;
}

// ---------------------------------------------------------------------- shared memory
static void* grow(size_t bytes) {
    Worker& w = *worker;
    size_t start = (w.used + GAP + 127) / 128 * 128;
    w.counted += (bytes + 15) / 16 * 16;
    if (w.counted > SHARED_LIMIT || start + bytes > ARENA)
        fail("shared memory: expected at most %zu bytes a block (sm_75), found %zu", SHARED_LIMIT, w.counted);
    w.used = start + bytes;
    EMU_UNPOISON(w.arena + start, bytes);
    memset(w.arena + start, 0xFF, bytes);
    return w.arena + start;
}

void* shared_variable(int id, size_t bytes) {
    for (Variable& v : worker->variables)
        if (v.id == id && v.bytes == bytes) return v.at;
    void* at = grow(bytes);
    worker->variables.push_back({id, bytes, at});
    return at;
}

void* dynamic_shared() {
    for (Variable& v : worker->variables)
        if (v.id == -1) return v.at;
    void* at = grow(worker->launch->shared);
    worker->variables.push_back({-1, 0, at});
    return at;
}

// ---------------------------------------------------------------------- warps
void meet_bytes(unsigned mask, int site, const void* in, size_t in_bytes, void* out, size_t out_bytes, Work work, const void* f) {
    Worker& w = *worker;
    Fiber& me = *w.now;
    const unsigned bit = 1u << lane(), first = me.place.index & ~31u;
    Warp& warp = w.warps[me.place.index / 32];
    if (!(mask & bit)) fail("warp operation in line %d: lane %u is not in its own mask %08x", line(site), lane(), mask);
    Exchange* e = nullptr;
    for (uint64_t left = warp.held; left; left &= left - 1) {
        Exchange& x = warp.exchanges[__builtin_ctzll(left)];
        if (!x.done && (x.mask & bit)) e = &x;
    }
    if (e && (e->mask != mask || e->site != site))
        fail("warp operation in line %d with mask %08x, while lanes of it wait in line %d with mask %08x", line(site),
             mask, line(e->site), e->mask);
    if (!e) {
        for (unsigned l = 0; l < 32; l++)
            if ((mask >> l & 1) && w.fibers[first + l].state == State::done)
                fail("warp operation in line %d: lane %u of its mask %08x has ended", line(site), l, mask);
        const int number = __builtin_ctzll(~warp.held);
        if (number >= 33) fail("warp operation in line %d: too many at once", line(site));
        e = &warp.exchanges[number];
        warp.held |= 1ull << number;
        e->mask = mask, e->arrived = 0, e->left = mask, e->site = site, e->done = false, e->token = new_token();
    }
    memcpy(e->in[lane()], in, in_bytes);
    arrive(e->token);
    e->arrived |= bit;
    if (e->arrived == mask) {
        leave(e->token);
        work(f, mask, e->in, e->out);
        e->done = true;
        for (unsigned l = 0; l < 32; l++)
            if ((mask & ~bit) >> l & 1) w.fibers[first + l].state = State::ready;
    } else {
        wait_as(State::exchange, site);
    }
    leave(e->token);
    memcpy(out, e->out[lane()], out_bytes);
    e->left &= ~bit;
    if (!e->left) warp.held &= ~(1ull << (e - warp.exchanges.data()));
}

// ---------------------------------------------------------------------- blocks
unsigned sync_block(int site, unsigned value) {
    Worker& w = *worker;
    w.now->answer = value;
    char* token = w.gate;
    arrive(token);
    wait_as(State::barrier, site);
    leave(token);
    return w.now->answer;
}

void copy_later(void* to, const void* from, size_t bytes) {
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) fail("cp.async: expected addresses aligned to %zu", bytes);
    Fiber& f = *worker->now;
    if (worker->launch->early) memcpy(to, from, bytes);
    f.copies.push_back({to, from, bytes, f.group});
}
void copy_commit() { worker->now->group++; }
void copy_wait(unsigned newest) {
    Fiber& f = *worker->now;
    size_t kept = 0;
    for (Fiber::Copy& c : f.copies)
        if (c.group + newest >= f.group) f.copies[kept++] = c;
        else {
            if (!worker->launch->early) memcpy(c.to, c.from, c.bytes);
            written(c.to, c.bytes);
        }
    f.copies.resize(kept);
}

static void fiber_main() {
    Worker& w = *worker;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &w.bottom, &w.size);
#endif
    leave(w.tokens + 8);  // earlier blocks, whose stacks and shared memory are taken over; not this one's other threads
    w.launch->call(w.launch->args);
    Fiber& f = *w.now;
    if (!f.copies.empty()) fail("cp.async: %zu copies never waited for", f.copies.size());
    f.state = State::done;
    w.finished++;
    arrive(w.tokens);
    for (;;) to_next(true);
}

static void run(Worker& w, Fiber& f) {
    w.now = &f, here = &f.place;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&w.fake, f.memory, STACK);
#endif
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(f.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    swap(w.scheduler, f.stack);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(w.fake, nullptr, nullptr);
#endif
}

// Nothing can run: a barrier that all have reached opens; anything else is an error.
static void open_barrier(Worker& w, unsigned threads) {
    const Fiber* first = nullptr;
    for (unsigned i = 0; i < threads; i++)
        if (w.fibers[i].state == State::barrier) first = first ? first : &w.fibers[i];
    for (unsigned i = 0; i < threads; i++) {
        Fiber& f = w.fibers[i];
        w.now = &f;
        if (f.state == State::barrier && f.site == first->site) continue;
        const char* does = f.state == State::done ? "has ended" : f.state == State::exchange ? "waits in a warp operation" : "waits at another barrier";
        char text[160];
        snprintf(text, sizeof text, ": %s (line %d)%s", does, line(f.site), first ? ", while others wait at a barrier" : " for lanes that never come");
        record(*w.launch, where() + text);
        return;
    }
    unsigned sum = 0;
    for (unsigned i = 0; i < threads; i++) sum += w.fibers[i].answer;
    for (unsigned i = 0; i < threads; i++) w.fibers[i].answer = sum, w.fibers[i].state = State::ready;
    w.gate = new_token();
}

// Once through the fibers of a group that can run; whether there was one.
static bool run_group(Worker& w, unsigned first, unsigned end) {
    bool ran = false;
    w.end = end;
    for (w.turn = first; w.turn < end && !w.launch->failed; w.turn++) {
        Fiber& f = w.fibers[w.launch->order[w.turn]];
        if (f.state != State::ready) continue;
        run(w, f);
        ran = true;
    }
    return ran;
}

static void run_block(Worker& w) {
    Launch& launch = *w.launch;
    const unsigned threads = launch.order.size();
    w.variables.clear();
    w.used = w.counted = 0;
    w.finished = 0;
    w.gate = new_token();
    leave(w.tokens);
    arrive(w.tokens + 8);
    EMU_POISON(w.arena, ARENA);
    for (unsigned i = 0; i < threads; i++) {
        Fiber& f = w.fibers[i];
        f.place.index = i, f.place.block_index = w.block_index;
        f.place.block = launch.block, f.place.grid = launch.grid;
        f.place.thread = {i % launch.block.x, i / launch.block.x % launch.block.y, i / launch.block.x / launch.block.y};
        f.state = State::ready, f.group = 0;
        f.copies.clear();
        EMU_UNPOISON(f.memory, STACK);
        prepare(f.stack, f.memory, i % 61 * 320, fiber_main);
#if defined(EMU_TSAN)
        if (!f.tsan) f.tsan = __tsan_create_fiber(0);
#endif
    }
    for (Warp& warp : w.warps) warp.held = 0;
    while (w.finished < threads && !launch.failed) {
        bool ran = false;
        for (unsigned first = 0; first < threads; first += launch.group)
            while (run_group(w, first, first + launch.group)) {
                if (launch.failed) return;
                ran = true;
            }
        if (!ran) open_barrier(w, threads);
    }
}

// ---------------------------------------------------------------------- launches
struct Idle {  // workers between launches, with their stacks
    std::mutex lock;
    std::vector<Worker*> workers;
};
static Idle& idle() {
    static Idle* all = new Idle;
    return *all;
}

static Worker* take_worker(unsigned threads) {
    Worker* w = nullptr;
    {
        std::lock_guard<std::mutex> hold(idle().lock);
        if (!idle().workers.empty()) w = idle().workers.back(), idle().workers.pop_back();
    }
    auto map = [](size_t bytes) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) abort();
        return (char*)at;
    };
    if (!w) {
        w = new Worker;
        w->arena = map(ARENA);
        w->tokens = map(8 << 20);
    }
    while (w->fibers.size() < threads) {
        w->fibers.emplace_back();
        w->fibers.back().memory = map(STACK);
    }
    while (w->warps.size() * 32 < threads) w->warps.emplace_back();
    return w;
}

static void work(Launch& launch) {
    Worker* w = take_worker(launch.order.size());
    w->launch = &launch;
#if defined(EMU_TSAN)
    w->tsan = __tsan_get_current_fiber();
#endif
    worker = w;
    arrive(w->tokens);
    const size_t blocks = (size_t)launch.grid.x * launch.grid.y * launch.grid.z;
    for (size_t b; !launch.failed && (b = launch.next++) < blocks;) {
        w->block_index = {unsigned(b % launch.grid.x), unsigned(b / launch.grid.x % launch.grid.y),
                          unsigned(b / launch.grid.x / launch.grid.y)};
        run_block(*w);
    }
    leave(w->tokens);  // whoever launched this sees what all threads wrote
    worker = nullptr;
    std::lock_guard<std::mutex> hold(idle().lock);
    idle().workers.push_back(w);
}

char* launch(const unsigned* geometry, size_t shared, unsigned order, unsigned threads, void (*call)(void**),
                    void** args) {
    Launch job;
    job.grid = {geometry[0], geometry[1], geometry[2]};
    job.block = {geometry[3], geometry[4], geometry[5]};
    job.shared = shared, job.call = call, job.args = args, job.early = order > 0;
    const size_t size = (size_t)job.block.x * job.block.y * job.block.z;
    const size_t blocks = (size_t)job.grid.x * job.grid.y * job.grid.z;
    job.order.resize(size);
    std::iota(job.order.begin(), job.order.end(), 0u);
    if (order == 1) std::reverse(job.order.begin(), job.order.end());
    if (order > 1) {
        std::mt19937 random(order);
        for (size_t i = size - 1; i > 0; i--) std::swap(job.order[i], job.order[random() % (i + 1)]);
        job.group = size;
    }
    std::vector<std::thread> others;
    for (size_t t = 1; t < std::min<size_t>(threads, blocks); t++) others.emplace_back([&] { work(job); });
    work(job);
    for (auto& t : others) t.join();
    return job.failed ? strdup(job.error.c_str()) : nullptr;
}

}  // namespace emu

// ---------------------------------------------------------------------- checks that need no sanitizer runtime
// Kernels are built with -fsanitize=alignment,bounds; the handlers are ours, so that an error ends the launch only.
#if defined(EMU_OWN_CHECKS)
struct Source { const char* file; unsigned line, column; };
extern "C" {
EMU_HIDDEN void __ubsan_handle_type_mismatch_v1(Source* at, void* address) {
    emu::fail("%s:%u: misaligned or null address %p", at->file, at->line, address);
}
EMU_HIDDEN void __ubsan_handle_out_of_bounds(Source* at, void* index) {
    emu::fail("%s:%u: index %ld outside of the array", at->file, at->line, (long)index);
}
}
#endif

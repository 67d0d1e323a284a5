// Runs the threads of a GPU kernel on one CPU core, as fibers. For tests only; C++17, g++ or clang.
//
// * Every thread of a block is a fiber; blocks run one after another.
// * Barriers and warp collectives are exact rendezvous: threads that wait at different places, that
//   returned early, or that never come are reported with source lines, as an error and not an abort.
// * kvk_order() permutes the order in which threads run between two rendezvous: a result that depends
//   on it is a data race.
// * Shared memory is NaN when a block begins: no GPU promises zeros.
// * KVK_TSAN, for kernels built with -fsanitize=thread: fibers are switched without a happens-before
//   edge; only a barrier or a collective makes one, so a missing barrier is a reported race. KVK_ASAN,
//   for -fsanitize=address: bounds of global and shared memory are checked. This file itself is built
//   without either: what it reads and writes of a fiber is no access of a kernel.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#include <sys/mman.h>
#ifdef KVK_TSAN
#include <sanitizer/tsan_interface.h>
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif
#ifdef KVK_ASAN
#include <sanitizer/common_interface_defs.h>
#define ASAN(...) __VA_ARGS__
#else
#define ASAN(...)
#endif
#if defined(__x86_64__) && !defined(KVK_UCONTEXT)
#define KVK_ASM 1
#else
#include <ucontext.h>
#endif

extern "C" { int kvk_lid, kvk_group[3]; }

namespace {
enum Order { ASCENDING, DESCENDING, SHUFFLED, WARPS };
enum State : uint8_t { READY, AT_BLOCK, AT_WARP, DONE };
const char *const NAMES[] = {"ready", "at a barrier", "at a warp collective", "returned"};
constexpr size_t STACK = 256 << 10;
constexpr int LARGEST = 64;  // bytes that a lane can post in one collective

struct Fiber {
    State state;
    int line;
    unsigned warp_turn, block_turn;
    // Two slots: who posts next cannot overwrite what a slower lane still reads.
    alignas(16) unsigned char slot[2][LARGEST];
    char *stack;
#ifdef KVK_ASM
    void *sp;
#else
    ucontext_t context;
#endif
    TSAN(void *tsan = nullptr;)
    ASAN(void *fake;)
};
typedef void (*Entry)(void **);

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<int> order;
    std::vector<char> warp_tags;
    char barrier_tags[2], block_tag;
    int current = -1, lanes = 32, order_kind = 0;
    unsigned order_seed = 0;
    Entry entry = nullptr;
    void **params = nullptr;
    std::string failure;
#ifdef KVK_ASM
    void *main_sp = nullptr;
#else
    ucontext_t main_context;
#endif
    TSAN(void *main_tsan = nullptr;)
    ASAN(void *main_fake = nullptr; const void *main_bottom = nullptr; size_t main_size = 0;)
};
Machine M;
}  // namespace

#ifdef KVK_ASM
extern "C" void kvk_switch(void **save, void *load);
asm(R"(
.text
.globl kvk_switch
.type kvk_switch,@function
kvk_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi); movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size kvk_switch,.-kvk_switch
)");
#endif

namespace {
void leave(Fiber &f, bool last = false) {
    (void)last;
    ASAN(__sanitizer_start_switch_fiber(last ? nullptr : &f.fake, M.main_bottom, M.main_size);)
    TSAN(__tsan_switch_to_fiber(M.main_tsan, 1);)  // 1: no happens-before edge
#ifdef KVK_ASM
    kvk_switch(&f.sp, M.main_sp);
#else
    swapcontext(&f.context, &M.main_context);
#endif
    ASAN(__sanitizer_finish_switch_fiber(f.fake, &M.main_bottom, &M.main_size);)
}

void enter(int i) {
    Fiber &f = M.fibers[i];
    M.current = kvk_lid = i;
    ASAN(__sanitizer_start_switch_fiber(&M.main_fake, f.stack, STACK);)
    TSAN(__tsan_switch_to_fiber(f.tsan, 1);)
#ifdef KVK_ASM
    kvk_switch(&M.main_sp, f.sp);
#else
    swapcontext(&M.main_context, &f.context);
#endif
    ASAN(__sanitizer_finish_switch_fiber(M.main_fake, nullptr, nullptr);)
}

void begin() {
    ASAN(__sanitizer_finish_switch_fiber(nullptr, &M.main_bottom, &M.main_size);)
    TSAN(__tsan_acquire(&M.block_tag);)  // shared memory is used again: blocks follow one another
    M.entry(M.params);
    TSAN(__tsan_release(&M.block_tag);)
    Fiber &f = M.fibers[M.current];
    f.state = DONE;
    leave(f, true);
    abort();
}

void fail(const char *what) {
    char text[256];
    snprintf(text, sizeof text, "%s in block (%d, %d, %d)", what, kvk_group[0], kvk_group[1], kvk_group[2]);
    M.failure = text;
    int state = -1, line = -1;
    for (size_t i = 0; i < M.fibers.size(); i++) {
        const Fiber &f = M.fibers[i];
        if (f.state == state && f.line == line) continue;
        snprintf(text, sizeof text, "; from thread %zu on %s, line %d", i, NAMES[f.state], f.line);
        M.failure += text;
        state = f.state, line = f.line;
    }
}

// A sanitizer's fibers cost more than a block: they serve many, and end with a failed one.
void forget_fibers() {
    TSAN(for (auto &f : M.fibers) if (f.tsan) __tsan_destroy_fiber(f.tsan), f.tsan = nullptr;)
}

void arrange(int n) {
    if ((int)M.fibers.size() != n) {
        forget_fibers();
        for (auto &f : M.fibers) munmap(f.stack, STACK);
        M.fibers.assign(n, Fiber{});
        for (auto &f : M.fibers) {
            int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            f.stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        }
    }
    M.warp_tags.assign((n + M.lanes - 1) / M.lanes * 2, 0);
    M.order.resize(n);
    for (int i = 0; i < n; i++) M.order[i] = M.order_kind == DESCENDING ? n - 1 - i : i;
    unsigned r = M.order_seed * 2654435761u + 1;
    for (int i = n - 1; i > 0 && M.order_kind == SHUFFLED; i--) {
        r ^= r << 13, r ^= r >> 17, r ^= r << 5;
        std::swap(M.order[i], M.order[r % (i + 1)]);
    }
}

void start_fiber(int i) {
    Fiber &f = M.fibers[i];
    f.state = READY, f.warp_turn = f.block_turn = 0, f.line = 0;
#ifdef KVK_ASM
    void **sp = (void **)(f.stack + STACK - 64);
    *--sp = nullptr;
    *--sp = (void *)begin;
    for (int k = 0; k < 6; k++) *--sp = nullptr;
    f.sp = sp;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
    makecontext(&f.context, begin, 0);
#endif
    TSAN(if (!f.tsan) f.tsan = __tsan_create_fiber(0);)
}

bool warp_is_here(int i) {
    const int first = i / M.lanes * M.lanes;
    if (first + M.lanes > (int)M.fibers.size()) return false;
    for (int l = first; l < first + M.lanes; l++) {
        const Fiber &g = M.fibers[l];
        const bool here = g.state == AT_WARP && g.warp_turn == M.fibers[i].warp_turn;
        if (!here && g.warp_turn <= M.fibers[i].warp_turn) return false;
    }
    return true;
}

void run_block(char *shared, char *shared_end) {
    const int n = (int)M.fibers.size();
    for (volatile char *p = shared; p < shared_end; p++) *p = (char)0xff;
    TSAN(M.main_tsan = __tsan_get_current_fiber(); __tsan_release(&M.block_tag);)
    for (int i = 0; i < n; i++) start_fiber(i);
    int alive = n;
    while (alive && M.failure.empty()) {
        bool moved = false;
        int waiting = 0;
        auto run = [&](int i) {
            Fiber &f = M.fibers[i];
            if (f.state == AT_WARP && warp_is_here(i)) f.state = READY;
            if (f.state != READY) return false;
            enter(i);
            alive -= f.state == DONE;
            return moved = true;
        };
        if (M.order_kind == WARPS) {
            // Collectives of one warp hold no other one up: each runs on to where the block must meet.
            for (int first = 0; first < n; first += M.lanes)
                for (bool on = true; on;) {
                    on = false;
                    for (int i = first; i < std::min(n, first + M.lanes); i++) on |= run(i);
                }
        } else {
            for (int i : M.order) run(i);
        }
        for (auto &f : M.fibers) waiting += f.state == AT_BLOCK;
        if (waiting && waiting == alive) {
            if (alive != n) fail("a barrier after some threads returned");
            for (auto &f : M.fibers)
                if (f.line != M.fibers[0].line && M.failure.empty()) fail("threads wait at different barriers");
            for (auto &f : M.fibers) f.state = READY;
            moved = true;
        }
        if (!moved && alive && M.failure.empty()) fail("some threads never come to a barrier or collective");
    }
    TSAN(__tsan_acquire(&M.block_tag);)
    if (!M.failure.empty()) forget_fibers();
}
}  // namespace

extern "C" {
void kvk_barrier(int line) {
    Fiber &f = M.fibers[M.current];
    f.line = line;
    TSAN(__tsan_release(&M.barrier_tags[f.block_turn & 1]);)
    f.state = AT_BLOCK;
    leave(f);
    TSAN(__tsan_acquire(&M.barrier_tags[f.block_turn & 1]);)
    f.block_turn++;
}

void kvk_warp_sync(int line) {
    const int i = M.current;
    Fiber &f = M.fibers[i];
    f.line = line;
    TSAN(__tsan_release(&M.warp_tags[i / M.lanes * 2 + (f.warp_turn & 1)]);)
    f.state = AT_WARP;
    leave(f);
    TSAN(__tsan_acquire(&M.warp_tags[i / M.lanes * 2 + (f.warp_turn & 1)]);)
    f.warp_turn++;
}

// Post ``nbytes`` and read what lane ``source`` of the same 32 posted.
void kvk_exchange(const void *in, void *out, int nbytes, int source, int line) {
    const int i = M.current;
    Fiber &f = M.fibers[i];
    const unsigned turn = f.warp_turn & 1;
    memcpy(f.slot[turn], in, nbytes);
    kvk_warp_sync(line);
    memcpy(out, M.fibers[i / 32 * 32 + source].slot[turn], nbytes);
}

// Post ``nbytes``, then read the posts of all 32 lanes (what emulated matrix instructions need).
void kvk_gather(const void *in, void *out, int nbytes, int line) {
    const int i = M.current;
    Fiber &f = M.fibers[i];
    const unsigned turn = f.warp_turn & 1;
    memcpy(f.slot[turn], in, nbytes);
    kvk_warp_sync(line);
    for (int l = 0; l < 32; l++)
        memcpy((char *)out + l * nbytes, M.fibers[i / 32 * 32 + l].slot[turn], nbytes);
}

// kind: an Order, SHUFFLED with ``seed``; lanes: 32 or 64.
void kvk_order(int kind, unsigned seed, int lanes) {
    M.order_kind = kind, M.order_seed = seed, M.lanes = lanes;
    arrange((int)M.fibers.size());
}

// Run a grid; null, or what went wrong (valid until the next launch).
const char *kvk_launch(Entry entry, void **params, const int *grid, int threads, char *shared, char *shared_end) {
    M.entry = entry, M.params = params, M.failure.clear();
    if ((int)M.fibers.size() != threads) arrange(threads);
    for (int z = 0; z < grid[2]; z++)
        for (int y = 0; y < grid[1]; y++)
            for (int x = 0; x < grid[0]; x++) {
                kvk_group[0] = x, kvk_group[1] = y, kvk_group[2] = z;
                run_block(shared, shared_end);
                if (!M.failure.empty()) return M.failure.c_str();
            }
    return nullptr;
}
}

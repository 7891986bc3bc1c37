// Runs the kernels' CUDA C++ on the CPU: one block at a time, its threads as fibers that meet at
// barriers.
//
// The emulator checks arithmetic, indices, launch configurations, that all threads reach each
// barrier, and accesses beyond an allocation. EMULATED_GPU_ORDER=1 runs the threads of a block from
// the last to the first: a kernel whose results change has a race. The emulator does not detect
// every race between barriers, and does not reproduce the GPU's rounding of expf and similar
// functions, or its speed.
#pragma once
#define EMULATED
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <sys/mman.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

namespace emulator {
struct Dim {
    unsigned x = 1, y = 1, z = 1;
    unsigned count() const { return x * y * z; }
};
constexpr unsigned WARP = 32, MAX_THREADS = 1024;
// Stacks of 64 KiB exactly would compete for the same lines of the CPU's caches.
constexpr size_t STACK = (64 << 10) + 5 * 64, GUARD = 64; // bytes

[[noreturn]] inline void stop(const char* what) {
    fprintf(stderr, "emulated GPU: %s\n", what);
    abort();
}

// A barrier at which some threads of a block wait for each other.
struct Barrier {
    unsigned arrived = 0;
    uint64_t generation = 0; // how often the barrier opened
};

// An asynchronous copy to shared memory that is not complete.
struct Copy {
    uint8_t* to;
    const uint8_t* from;
    size_t bytes;
    bool is_valid; // otherwise the copy writes zeros
    unsigned group;
};

// Saves the registers that a call preserves on the stack, stores the stack pointer in `*from`, and
// continues the fiber whose stack pointer is `to`. swapcontext would also save the signal mask,
// with a system call that takes longer than most kernels need between two barriers.
extern "C" void emulator_switch_stack(void** from, void* to);
#if defined(__x86_64__)
constexpr size_t SAVED_WORDS = 7; // six registers and the return address
constexpr size_t RETURN_WORD = 6;
asm(R"(
.local emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
#elif defined(__aarch64__)
constexpr size_t SAVED_WORDS = 20; // x19 to x30 and d8 to d15
constexpr size_t RETURN_WORD = 11; // x30
asm(R"(
.local emulator_switch_stack
.type emulator_switch_stack, %function
emulator_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the emulated GPU has no stack switch for this CPU architecture"
#endif

// Returns the stack pointer of a fiber that will begin with a call of `entry`.
inline void* prepare_stack(uint8_t* stack, size_t bytes, void (*entry)()) {
    // At its entry a function of x86-64 expects a stack pointer 8 bytes below a multiple of 16.
    void** top = (void**)(stack + bytes) - 2;
    void** saved = top - SAVED_WORDS + (SAVED_WORDS % 2);
    memset(saved, 0, SAVED_WORDS * sizeof *saved);
    saved[RETURN_WORD] = (void*)entry;
    return saved;
}

struct Fiber {
    void* stack = nullptr; // the stack pointer while the fiber does not run
    bool live = false;
    unsigned thread = 0;
    // The barrier at which the fiber waits, or null; how often it had opened before; and the
    // arguments of Block::wait.
    const Barrier* barrier = nullptr;
    uint64_t generation = 0;
    unsigned count = 0;
    const unsigned* ended = nullptr;

    bool can_run() const { return live && (!barrier || barrier->generation != generation || barrier->arrived + *ended >= count); }
};

struct Block {
    Dim threads, at, grid;
    std::vector<uint8_t> shared;
    std::function<void()> body;
    unsigned thread_count = 0, next = 0, finished = 0, current = 0;
    Dim index; // of the current thread
    unsigned finished_in_warp[WARP] = {};
    Barrier block_barrier, warp_barriers[WARP];
    uint64_t lanes[2][MAX_THREADS]; // values that a warp exchanges, see `exchange_buffer`
    std::vector<Copy> copies[MAX_THREADS]; // by thread, in the order in which they were started
    unsigned groups[MAX_THREADS] = {};     // number of groups that each thread committed
    std::vector<Fiber> fibers;
    Fiber* running = nullptr;
    void* scheduler = nullptr; // the stack pointer of the scheduler while a fiber runs
    // The fibers `pass_begin` to `pass_end` are a warp, each of which runs once in a pass if it can.
    // `pass_next` is the number of the next turn, which counts from the end if `backwards`.
    size_t pass_begin = 0, pass_next = 0, pass_end = 0;
    uint64_t progress = 0;
    bool backwards = false;
    uint8_t* stacks = nullptr;

    // Returns the stack pointer of the next fiber of the pass that can run, which will be running, or
    // that of the scheduler. A fiber thus switches to the next one directly.
    void* continue_pass() {
        while (pass_next < pass_end) {
            size_t turn = pass_next++;
            Fiber& fiber = fibers[backwards ? pass_begin + pass_end - 1 - turn : turn];
            if (!fiber.can_run()) continue;
            running = &fiber;
            return fiber.stack;
        }
        return scheduler;
    }
    void yield() {
        Fiber* self = running;
        void* to = continue_pass();
        emulator_switch_stack(&self->stack, to);
        set_current(self->thread);
    }
    void set_current(unsigned thread) {
        current = thread;
        unsigned x = threads.x, y = threads.y;
        if (y * threads.z == 1) index = {thread, 0, 0};
        else index = {thread % x, thread / x % y, thread / (x * y)};
    }
    // Waits until all `count` threads have arrived at the barrier, except threads that have ended.
    void wait(Barrier& barrier, unsigned count, const unsigned& ended) {
        uint64_t generation = barrier.generation;
        progress++;
        if (++barrier.arrived + ended >= count) {
            barrier.arrived = 0;
            barrier.generation++;
            return;
        }
        while (barrier.generation == generation) {
            if (barrier.arrived + ended >= count) {
                barrier.arrived = 0;
                barrier.generation++;
                return;
            }
            running->barrier = &barrier, running->generation = generation, running->count = count, running->ended = &ended;
            yield();
            running->barrier = nullptr;
        }
    }
    void sync() { wait(block_barrier, thread_count, finished); }
    void sync_warp() {
        unsigned warp = current / WARP;
        unsigned count = std::min(WARP, thread_count - warp * WARP);
        wait(warp_barriers[warp], count, finished_in_warp[warp]);
    }
    void run_threads() {
        while (next < thread_count) {
            unsigned turn = next++;
            running->thread = backwards ? thread_count - 1 - turn : turn;
            set_current(running->thread);
            body();
            if (!copies[running->thread].empty()) stop("a thread ended before its asynchronous copies completed");
            finished++;
            finished_in_warp[running->thread / WARP]++;
            progress++;
        }
        Fiber* self = running;
        self->live = false;
        void* to = continue_pass();
        emulator_switch_stack(&self->stack, to);
        stop("a thread continued after its end");
    }
    static void enter();
    void start(size_t i) {
        fibers[i].live = true;
        fibers[i].barrier = nullptr;
        fibers[i].stack = prepare_stack(stacks + i * STACK, STACK, &Block::enter);
        running = &fibers[i];
        emulator_switch_stack(&scheduler, running->stack);
    }
    // Number of the buffer for values that the threads of the current warp exchange at their next
    // barrier. Two buffers in turn make a barrier after the exchange unnecessary: a thread cannot
    // write to a buffer again before all threads have passed the barrier in between, and have read.
    unsigned exchange_buffer() const { return warp_barriers[current / WARP].generation % 2; }
    // Runs a warp as far as possible before another warp runs. Work that no barrier of the block
    // orders thus happens as early or as late as possible.
    void run_warp(size_t begin, size_t end) {
        for (uint64_t before = progress - 1; progress != before;) {
            before = progress;
            pass_begin = pass_next = begin, pass_end = end;
            void* to = continue_pass();
            if (to != scheduler) emulator_switch_stack(&scheduler, to);
        }
    }
    void run() {
        next = finished = 0;
        memset(finished_in_warp, 0, sizeof finished_in_warp);
        block_barrier = Barrier();
        for (auto& barrier : warp_barriers) barrier = Barrier();
        for (auto& committed : groups) committed = 0;
        fibers.resize(thread_count);
        size_t begun = 0;
        while (finished < thread_count) {
            uint64_t before = progress;
            for (size_t warp = 0; warp < begun; warp += WARP) run_warp(warp, std::min(begun, warp + WARP));
            while (next < thread_count) {
                size_t begin = begun;
                do {
                    start(begun++);
                } while (next < thread_count && begun % WARP != 0);
                run_warp(begin, begun);
            }
            if (progress == before) stop("threads wait at different barriers");
        }
    }
};

inline Block block;
inline void Block::enter() { block.run_threads(); }

// Runs every block of a grid, one after the other. Shared memory is initialized with NaN.
inline void launch(Dim grid, Dim threads, size_t shared, const std::function<void()>& body) {
    if (!block.stacks) {
        void* at = mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) stop("no memory for the stacks");
        block.stacks = (uint8_t*)at;
    }
    const char* order = getenv("EMULATED_GPU_ORDER");
    block.backwards = order && *order == '1';
    block.grid = grid;
    block.threads = threads;
    block.thread_count = threads.count();
    block.body = body;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                block.at = {x, y, z};
                block.shared.assign(shared + GUARD, 0xff);
                block.run();
                for (size_t i = 0; i < GUARD; i++)
                    if (block.shared[shared + i] != 0xff) stop("a kernel wrote beyond its shared memory");
            }
}

template <class T> T shuffle(T x, unsigned from) {
    static_assert(sizeof(T) <= 8);
    unsigned self = block.current;
    uint64_t* lanes = block.lanes[block.exchange_buffer()];
    memcpy(&lanes[self], &x, sizeof x);
    block.sync_warp();
    memcpy(&x, &lanes[self / WARP * WARP + from % WARP], sizeof x);
    return x;
}
} // namespace emulator

#define threadIdx (emulator::block.index)
#define blockIdx (emulator::block.at)
#define blockDim (emulator::block.threads)
#define gridDim (emulator::block.grid)
#define DYNAMIC_SHARED(name) float* name = (float*)emulator::block.shared.data()

static inline void __syncthreads() { emulator::block.sync(); }
static inline void __syncwarp() { emulator::block.sync_warp(); }
template <class T> T __shfl_xor_sync(unsigned, T x, int other) {
    return emulator::shuffle(x, emulator::block.current % emulator::WARP ^ (unsigned)other);
}
template <class T> T __shfl_sync(unsigned, T x, int from) { return emulator::shuffle(x, (unsigned)from); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int __reduce_min_sync(unsigned mask, int x) {
    for (int other = 16; other > 0; other >>= 1) x = min(x, __shfl_xor_sync(mask, x, other));
    return x;
}
static inline int __reduce_max_sync(unsigned mask, int x) { return ~__reduce_min_sync(mask, ~x); }
static inline int __any_sync(unsigned mask, int x) { return __reduce_max_sync(mask, x != 0); }
static inline int __all_sync(unsigned mask, int x) { return __reduce_min_sync(mask, x != 0); }

static inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
#define __expf(x) expf(x)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

static inline float from_f16(unsigned short h) {
    unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    float x;
    if (exponent == 0) x = ldexpf((float)mantissa, -24);
    else if (exponent == 31) x = __int_as_float((int)(0x7f800000u | mantissa << 13));
    else x = __int_as_float((int)((exponent + 112) << 23 | mantissa << 13));
    return __int_as_float((int)((unsigned)__float_as_int(x) | sign));
}
// Rounds x to the nearest IEEE half-precision number, ties to even, and returns its bits.
static inline unsigned short to_f16(float x) {
    unsigned bits = (unsigned)__float_as_int(x), sign = bits >> 16 & 0x8000;
    float size = fabsf(x);
    if (std::isnan(x)) return (unsigned short)(sign | 0x7e00);
    if (size >= 65520.0f) return (unsigned short)(sign | 0x7c00);
    if (size < 6.103515625e-5f) return (unsigned short)(sign | (unsigned)nearbyintf(ldexpf(size, 24)));
    unsigned magnitude = bits & 0x7fffffff;
    unsigned rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (unsigned short)(sign | ((rounded >> 13) - (112 << 10)));
}

// --- asynchronous copies -------------------------------------------------------------------------

namespace emulator {
inline void expect_shared(const void* at, size_t bytes, const char* what) {
    const uint8_t *begin = block.shared.data(), *from = (const uint8_t*)at;
    if ((uintptr_t)at % bytes) stop(what);
    if (from < begin || from + bytes > begin + block.shared.size() - GUARD) stop("an address is outside of shared memory");
}
// Starts an asynchronous copy. Until the copy completes, its target holds neither the old content
// nor the new.
inline void copy(void* to, const void* from, size_t bytes, bool is_valid) {
    expect_shared(to, bytes, "the target of a copy is not aligned");
    if ((uintptr_t)from % bytes) stop("the source of a copy is not aligned");
    memset(to, 0xff, bytes);
    unsigned self = block.current;
    block.copies[self].push_back({(uint8_t*)to, (const uint8_t*)from, bytes, is_valid, block.groups[self]});
}
} // namespace emulator

static inline void copy_16_bytes_async(void* to, const void* from, bool is_valid) { emulator::copy(to, from, 16, is_valid); }
static inline void copy_4_bytes_async(void* to, const void* from, bool is_valid) { emulator::copy(to, from, 4, is_valid); }
static inline void commit_copies() { emulator::block.groups[emulator::block.current]++; }
// Completes all committed groups of copies except the latest `Open`. A GPU may complete them
// earlier; here they complete as late as possible.
template <int Open> void await_copies() {
    unsigned self = emulator::block.current, committed = emulator::block.groups[self];
    auto& copies = emulator::block.copies[self];
    size_t completed = 0;
    for (; completed < copies.size() && copies[completed].group + Open < committed; completed++) {
        const emulator::Copy& copy = copies[completed];
        if (copy.is_valid) memcpy(copy.to, copy.from, copy.bytes);
        else memset(copy.to, 0, copy.bytes);
    }
    copies.erase(copies.begin(), copies.begin() + (std::ptrdiff_t)completed);
}

// --- tensor cores: instructions of a whole warp ---------------------------------------------------

// Returns one of the two 16-bit values of a register.
template <bool is_f16> float value_of_register(unsigned bits, int which) {
    unsigned half = which ? bits >> 16 : bits & 0xffff;
    return is_f16 ? from_f16((unsigned short)half) : __int_as_float((int)(half << 16));
}

// The operands and sums of a warp's matrix multiplication.
struct MatrixMultiplication {
    float left[16][16], right[16][8], sums[16][8];
    bool is_finished;
    // Adds the products to each sum in the order of k.
    void run() {
        for (unsigned row = 0; row < 16; row++) {
            typedef float Row __attribute__((vector_size(32)));
            Row sum, right_row;
            memcpy(&sum, sums[row], sizeof sum);
            for (unsigned k = 0; k < 16; k++) {
                memcpy(&right_row, right[k], sizeof right_row);
                sum += left[row][k] * right_row;
            }
            memcpy(sums[row], &sum, sizeof sum);
        }
        is_finished = true;
    }
};

template <bool is_f16> void mma_16x8x16_of(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    static MatrixMultiplication by_warp[2][emulator::MAX_THREADS / 32];
    unsigned self = emulator::block.current, group = self % 32 / 4, lane_in_group = self % 4;
    MatrixMultiplication& all = by_warp[emulator::block.exchange_buffer()][self / 32];
    float* sums[2] = {&all.sums[group][2 * lane_in_group], &all.sums[group + 8][2 * lane_in_group]};
#pragma GCC unroll 2
    for (unsigned which = 0; which < 2; which++) {
        unsigned k = 2 * lane_in_group + which;
#pragma GCC unroll 4
        for (unsigned i = 0; i < 4; i++) {
            all.left[group + 8 * (i % 2)][k + 8 * (i / 2)] = value_of_register<is_f16>(a[i], (int)which);
            sums[i / 2][i % 2] = c[i];
        }
        all.right[k][group] = value_of_register<is_f16>(b0, (int)which);
        all.right[k + 8][group] = value_of_register<is_f16>(b1, (int)which);
    }
    all.is_finished = false;
    emulator::block.sync_warp();
    if (!all.is_finished) all.run(); // the first lane that continues multiplies for the whole warp
    for (unsigned i = 0; i < 4; i++) c[i] = sums[i / 2][i % 2];
}
static inline void mma_16x8x16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_16x8x16_of<false>(c, a, b0, b1); }
static inline void mma_16x8x16_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_16x8x16_of<true>(c, a, b0, b1); }

// Exchanges the row addresses of a warp's four matrices, and returns them by lane. Bank conflicts
// between rows of a matrix are slow on a GPU. Here they are an error.
static inline const unsigned short** exchange_row_addresses(const unsigned short* row) {
    static const unsigned short* buffers[2][emulator::MAX_THREADS];
    auto& rows = buffers[emulator::block.exchange_buffer()];
    unsigned self = emulator::block.current, warp = self / 32 * 32;
    emulator::expect_shared(row, 16, "a row of a matrix is not aligned");
    rows[self] = row;
    emulator::block.sync_warp();
    unsigned banks = 0;
    for (unsigned i = 0; i < 8; i++) banks |= 1u << (uintptr_t)rows[self / 8 * 8 + i] / 16 % 8;
    if (banks != 0xff) emulator::stop("rows of a matrix have a bank conflict");
    return rows + warp;
}
static inline void ldmatrix_x4(unsigned (&x)[4], const unsigned short* row) {
    const unsigned short** rows = exchange_row_addresses(row);
    unsigned lane = emulator::block.current % 32;
    for (unsigned i = 0; i < 4; i++) memcpy(&x[i], rows[8 * i + lane / 4] + 2 * (lane % 4), 4);
    emulator::block.sync_warp(); // all lanes read before one of them continues
}
static inline void ldmatrix_x4_transposed(unsigned (&x)[4], const unsigned short* row) {
    const unsigned short** rows = exchange_row_addresses(row);
    unsigned lane = emulator::block.current % 32;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned short** two = rows + 8 * i + 2 * (lane % 4);
        x[i] = (unsigned)two[0][lane / 4] | (unsigned)two[1][lane / 4] << 16;
    }
    emulator::block.sync_warp(); // all lanes read before one of them continues
}

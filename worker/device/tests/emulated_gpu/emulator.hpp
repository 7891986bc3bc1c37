// Runs the kernels' CUDA C++ on the CPU: one block at a time, its threads as fibers that meet at
// barriers.
//
// It checks arithmetic, indices, launch configurations, that all threads reach each barrier, and
// accesses beyond an allocation. EMULATED_GPU_ORDER=1 runs the threads of a block from the last to
// the first: a kernel whose results change has a race. It does not detect every race between
// barriers, and does not reproduce the GPU's rounding of expf and similar functions, or its speed.
#pragma once
#define EMULATED
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

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
constexpr size_t STACK = 64 << 10, GUARD = 64; // bytes

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

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool started = false, live = false;
    unsigned thread = 0;
};

struct Block {
    Dim threads, at, grid;
    std::vector<uint8_t> shared;
    std::function<void()> body;
    unsigned next = 0, finished = 0, current = 0;
    unsigned finished_in_warp[WARP] = {};
    Barrier block_barrier, warp_barriers[WARP];
    uint64_t lanes[MAX_THREADS];
    std::vector<Copy> copies[MAX_THREADS]; // by thread, in the order in which they were started
    unsigned groups[MAX_THREADS] = {};     // number of groups that each thread committed
    std::vector<Fiber> fibers;
    Fiber* running = nullptr;
    jmp_buf scheduler;
    uint64_t progress = 0;
    bool backwards = false;
    uint8_t* stacks = nullptr;

    void yield() {
        Fiber* self = running;
        if (!_setjmp(self->at)) _longjmp(scheduler, 1);
        current = self->thread;
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
            yield();
        }
    }
    void sync() { wait(block_barrier, threads.count(), finished); }
    void sync_warp() {
        unsigned warp = current / WARP;
        unsigned count = std::min(WARP, threads.count() - warp * WARP);
        wait(warp_barriers[warp], count, finished_in_warp[warp]);
    }
    void run_threads() {
        while (next < threads.count()) {
            unsigned index = next++;
            running->thread = current = backwards ? threads.count() - 1 - index : index;
            body();
            if (!copies[running->thread].empty()) stop("a thread ended before its asynchronous copies completed");
            finished++;
            finished_in_warp[running->thread / WARP]++;
            progress++;
        }
        running->live = false;
        _longjmp(scheduler, 1);
    }
    static void enter();
    void resume(size_t i) {
        Fiber& fiber = fibers[i];
        running = &fiber;
        if (_setjmp(scheduler)) return;
        if (fiber.started) _longjmp(fiber.at, 1);
        fiber.started = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks + i * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, &Block::enter, 0);
        setcontext(&fiber.start);
    }
    // Runs a warp as far as possible before another warp runs. Work that no barrier of the block
    // orders thus happens as early or as late as possible.
    void run_warp(size_t begin, size_t end) {
        for (uint64_t before = progress - 1; progress != before;) {
            before = progress;
            for (size_t i = begin; i < end; i++) {
                size_t fiber = backwards ? begin + end - 1 - i : i;
                if (fibers[fiber].live) resume(fiber);
            }
        }
    }
    void run() {
        next = finished = 0;
        memset(finished_in_warp, 0, sizeof finished_in_warp);
        block_barrier = Barrier();
        for (auto& barrier : warp_barriers) barrier = Barrier();
        for (auto& committed : groups) committed = 0;
        fibers.resize(threads.count());
        size_t begun = 0;
        while (finished < threads.count()) {
            uint64_t before = progress;
            for (size_t warp = 0; warp < begun; warp += WARP) run_warp(warp, std::min(begun, warp + WARP));
            while (next < threads.count()) {
                size_t begin = begun;
                do {
                    Fiber& fiber = fibers[begun];
                    fiber.started = false;
                    fiber.live = true;
                    resume(begun++);
                } while (next < threads.count() && begun % WARP != 0);
                run_warp(begin, begun);
            }
            if (progress == before) stop("threads wait at different barriers");
        }
    }
};

inline Block block;
inline void Block::enter() { block.run_threads(); }

inline Dim thread_index() {
    unsigned t = block.current, x = block.threads.x, y = block.threads.y;
    return {t % x, t / x % y, t / (x * y)};
}

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
    memcpy(&block.lanes[self], &x, sizeof x);
    block.sync_warp();
    memcpy(&x, &block.lanes[self / WARP * WARP + from % WARP], sizeof x);
    block.sync_warp();
    return x;
}
} // namespace emulator

#define threadIdx (emulator::thread_index())
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

// Returns one of the two bf16 values of a register.
static inline float bf16_of_register(unsigned bits, int which) { return __int_as_float((int)((which ? bits >> 16 : bits & 0xffff) << 16)); }

static inline void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    static unsigned operands[emulator::MAX_THREADS][6]; // by thread: four registers of a, two of b
    unsigned self = emulator::block.current, warp = self / 32 * 32, group = self % 32 / 4, lane_in_group = self % 4;
    memcpy(operands[self], a, 16);
    operands[self][4] = b0, operands[self][5] = b1;
    emulator::block.sync_warp();
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = group + 8 * (i / 2), column = 2 * lane_in_group + i % 2;
        for (unsigned k = 0; k < 16; k++) {
            unsigned thread_a = warp + row % 8 * 4 + k % 8 / 2, thread_b = warp + column * 4 + k % 8 / 2;
            c[i] += bf16_of_register(operands[thread_a][row / 8 + 2 * (k / 8)], k % 2) * bf16_of_register(operands[thread_b][4 + k / 8], k % 2);
        }
    }
    emulator::block.sync_warp();
}

// Exchanges the row addresses of a warp's four matrices, and returns them by lane. Bank conflicts
// between rows of a matrix are slow on a GPU. Here they are an error.
static inline const unsigned short** exchange_row_addresses(const unsigned short* row) {
    static const unsigned short* rows[emulator::MAX_THREADS];
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
    emulator::block.sync_warp();
}
static inline void ldmatrix_x4_transposed(unsigned (&x)[4], const unsigned short* row) {
    const unsigned short** rows = exchange_row_addresses(row);
    unsigned lane = emulator::block.current % 32;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned short** two = rows + 8 * i + 2 * (lane % 4);
        x[i] = (unsigned)two[0][lane / 4] | (unsigned)two[1][lane / 4] << 16;
    }
    emulator::block.sync_warp();
}

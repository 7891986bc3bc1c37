// Instructions of warpgroups (four warps): matrix products on tensor cores (`wgmma`), and the
// barriers by which warps hand over data in shared memory (`mbarrier`, `bar.arrive`).
//
// Products complete as late as allowed. Each warp computes its 16 of the 64 rows. Errors are
// accesses to the registers of a product before it is complete, registers that were accessed
// without a wgmma fence before a product, operands in shared memory that were written without a
// proxy fence, and warps of a warpgroup that execute different instructions.
#pragma once
#include "arithmetic.hpp"
#include "warp.hpp"

namespace ptx {
// Records that a warp of a warpgroup executes an instruction that all four warps must execute.
inline void expect_in_step(Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ALL || w.live != ALL) stop("an instruction of a warpgroup needs whole warps: " + i.text);
    auto& steps = w.block->warpgroup_steps[w.number / 4];
    uint32_t at = (uint32_t)(&i - w.kernel->code.data());
    if (w.steps == steps.size()) steps.push_back(at);
    if (steps[w.steps++] != at) stop("warps of a warpgroup execute different instructions: " + i.text);
}
inline void wgmma_fence(Warp& w, const Instruction& i, uint32_t lanes) {
    expect_in_step(w, i, lanes);
    w.fences++;
}
inline void commit_products(Warp& w, const Instruction& i, uint32_t lanes) {
    expect_in_step(w, i, lanes);
    w.product_groups++;
}

// The operands of a product m64nNk16: N/2 sums per lane, the left operand (a descriptor or four
// registers), the descriptor of the right operand, whether the result is added to the sums, the
// signs, and which operands are transposed.
struct ProductOperands {
    int sums, left, right, add;
    bool left_in_shared, left_transposed, right_transposed;
};
inline ProductOperands product_operands(Warp& w, const Instruction& i) {
    auto immediate = [&](int n) { return w.get<int32_t>(i.slots[n], 0); };
    int sums = atoi(i.text.c_str() + i.text.find(".m64n") + 5) / 2, rest = i.count - sums;
    bool shared = rest == 7; // two descriptors, the predicate, two signs, two transpositions
    if (!shared && rest != 9) stop("unknown operands of wgmma: " + i.text);
    ProductOperands o = {sums, sums, shared ? sums + 1 : sums + 4, shared ? sums + 2 : sums + 5, shared, false, false};
    if (immediate(o.add + 1) != 1 || immediate(o.add + 2) != 1) stop("unsupported signs of wgmma: " + i.text);
    o.left_transposed = shared && immediate(o.add + 3);
    o.right_transposed = immediate(i.count - 1) != 0;
    return o;
}

// Ordinary instructions must not access registers of products in progress.
inline void Warp::note_access(const Instruction& i) {
    for (int n = 0; n < i.count; n++) {
        int s = i.slots[n];
        if (in_progress[(size_t)s]) stop("a register of a product in progress is accessed: " + i.text);
        accessed[(size_t)s] = fences;
    }
}
// Returns the element at (row, k) of an operand in shared memory. The layout is that of the
// 128-byte swizzle: 8 rows of 128 bytes, whose 16-byte vectors are permuted by the row. Without
// transposition (k contiguous), the stride leads from 8 rows to the next. With it (rows
// contiguous), the stride leads from 8 values of k to the next, and the leading offset from 64 rows
// to the next.
struct SharedOperand {
    uint32_t start, leading, stride;
    bool transposed;
    SharedOperand(uint64_t descriptor, bool transposed, const Instruction& i)
        : start((uint32_t)(descriptor & 0x3fff) << 4), leading((uint32_t)(descriptor >> 16 & 0x3fff) << 4), stride((uint32_t)(descriptor >> 32 & 0x3fff) << 4),
          transposed(transposed) {
        if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) stop("only a swizzle of 128 bytes without an offset is supported: " + i.text);
        if (stride % 1024 || (transposed && leading % 1024)) stop("the parts of an operand are not aligned to the swizzle: " + i.text);
        if (start % 1024 >= 128 || (transposed && start % 1024)) stop("an operand does not begin in the first row of a swizzle: " + i.text);
    }
    uint32_t address(int row, int k) const {
        uint32_t at = transposed ? start + (uint32_t)(row / 64) * leading + (uint32_t)(k / 8) * stride + (uint32_t)(k % 8 * 128 + row % 64 * 2)
                                 : start + (uint32_t)(row / 8) * stride + (uint32_t)(row % 8 * 128 + k * 2);
        return at ^ (at >> 7 & 7) << 4;
    }
    float load(Warp& w, int row, int k) const {
        uint16_t bits;
        memcpy(&bits, w.block->shared.data() + address(row, k), 2);
        return bf16_to_float(bits);
    }
    // Checks the reads of `rows` rows from `first` on.
    void check(Warp& w, int first, int rows, const Instruction& i) const {
        for (int r = first; r < first + rows; r += transposed ? 8 : 1)
            for (int k = 0; k < 16; k += transposed ? 1 : 8) w.block->shadow.read_by_proxy(w.number, address(r, k), 16, i.text);
    }
};
// Checks the reads of a product. Tensor cores may read at any time between its begin and its end,
// so this is called at both.
inline void check_shared_operands(Warp& w, const PendingProduct& product, const ProductOperands& o) {
    const Instruction& i = *product.instruction;
    SharedOperand(product.right, o.right_transposed, i).check(w, 0, 2 * o.sums, i);
    if (o.left_in_shared) SharedOperand(product.left, o.left_transposed, i).check(w, (int)(w.number % 4) * 16, 16, i);
}
inline void begin_product(Warp& w, const Instruction& i, uint32_t lanes) {
    expect_in_step(w, i, lanes);
    ProductOperands o = product_operands(w, i);
    auto begin = [&](int slot, uint8_t use) {
        uint8_t& now = w.in_progress[(size_t)slot];
        if (now && now != use) stop("a register of a product in progress is used by another one: " + i.text);
        if (!now && w.accessed[(size_t)slot] == w.fences) stop("a register was accessed without a wgmma fence: " + i.text);
        now = use;
    };
    for (int n = 0; n < o.sums; n++) begin(i.slots[n], 2);
    if (!o.left_in_shared)
        for (int n = 0; n < 4; n++) begin(i.slots[o.left + n], 1);
    PendingProduct product = {&i, w.product_groups, w.get<uint64_t>(i.slots[o.left], 0), w.get<uint64_t>(i.slots[o.right], 0), (w.reg(i.slots[o.add])[0] & 1) != 0};
    check_shared_operands(w, product, o);
    w.products.push_back(product);
}
inline void complete_product(Warp& w, const PendingProduct& product) {
    const Instruction& i = *product.instruction;
    ProductOperands o = product_operands(w, i);
    int columns = 2 * o.sums, first = (int)(w.number % 4) * 16;
    std::vector<float> b((size_t)columns * 16);
    float a[16][16];
    check_shared_operands(w, product, o);
    SharedOperand right(product.right, o.right_transposed, i);
    for (int c = 0; c < columns; c++)
        for (int k = 0; k < 16; k++) b[(size_t)(c * 16 + k)] = right.load(w, c, k);
    if (o.left_in_shared) {
        SharedOperand left(product.left, o.left_transposed, i);
        for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++) a[r][k] = left.load(w, first + r, k);
    } else {
        for (int l = 0; l < 32; l++)
            for (int n = 0; n < 4; n++) {
                uint32_t two = w.get<uint32_t>(i.slots[o.left + n], l);
                for (int h = 0; h < 2; h++) a[l / 4 + 8 * (n % 2)][2 * (l % 4) + h + 8 * (n / 2)] = bf16_to_float(h ? two >> 16 : two & 0xffff);
            }
    }
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < o.sums; n++) {
            int row = l / 4 + 8 * (n / 2 % 2), column = 8 * (n / 4) + 2 * (l % 4) + n % 2;
            float sum = product.adds ? w.get<float>(i.slots[n], l) : 0.0f;
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[(size_t)(column * 16 + k)];
            w.set<float>(i.slots[n], l, sum);
        }
}
// wgmma.wait_group: completes all groups of products except the latest ones.
inline void await_products(Warp& w, const Instruction& i, uint32_t lanes) {
    expect_in_step(w, i, lanes);
    uint32_t open = w.get<uint32_t>(i.slots[0], 0);
    size_t completed = 0;
    for (; completed < w.products.size() && w.products[completed].group + open < w.product_groups; completed++) complete_product(w, w.products[completed]);
    w.products.erase(w.products.begin(), w.products.begin() + (std::ptrdiff_t)completed);
    std::fill(w.in_progress.begin(), w.in_progress.end(), 0);
    for (const PendingProduct& product : w.products) {
        const Instruction& pending = *product.instruction;
        ProductOperands o = product_operands(w, pending);
        for (int n = 0; n < o.sums; n++) w.in_progress[(size_t)pending.slots[n]] = 2;
        if (!o.left_in_shared)
            for (int n = 0; n < 4; n++) w.in_progress[(size_t)pending.slots[o.left + n]] = 1;
    }
}
// setmaxnreg: changes the number of registers of a warpgroup's threads.
inline void set_registers(Warp& w, const Instruction& i, uint32_t lanes) {
    expect_in_step(w, i, lanes);
    uint32_t registers = w.get<uint32_t>(i.slots[0], 0);
    if (registers < 24 || registers > 256 || registers % 8) stop("an invalid number of registers: " + i.text);
}

// --- barriers ---------------------------------------------------------------------------------------

inline MemoryBarrier& find_memory_barrier(Warp& w, const Instruction& i, int l) {
    uint32_t at = (uint32_t)(w.get<uint32_t>(i.base, l) + i.offset);
    auto found = w.block->memory_barriers.find(at);
    if (found == w.block->memory_barriers.end()) stop("an mbarrier was not initialized: " + i.text);
    w.block->shadow.read(w.thread(l), at, 8, i.text); // after the initialization
    return found->second;
}
inline void init_memory_barrier(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t at = (uint32_t)(w.get<uint32_t>(i.base, l) + i.offset), count = w.get<uint32_t>(i.slots[0], l);
        if (at % 8 || !count) stop("an invalid mbarrier: " + i.text);
        w.block->shadow.write(w.thread(l), at, 8, i.text);
        if (!w.block->memory_barriers.insert({at, MemoryBarrier{count, count}}).second) stop("an mbarrier is initialized twice: " + i.text);
    });
}
inline void arrive_at_memory_barrier(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        MemoryBarrier& barrier = find_memory_barrier(w, i, l);
        w.block->shadow.release(w.number, barrier.arriving);
        if (--barrier.pending) return;
        barrier.pending = barrier.expected;
        barrier.phase++;
        barrier.completed = barrier.arriving;
        w.block->progress++;
    });
}
// mbarrier.try_wait.parity: whether the phase with this parity has completed. If not, other warps
// run before the next instruction.
inline void try_memory_barrier(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        MemoryBarrier& barrier = find_memory_barrier(w, i, l);
        bool completed = (barrier.phase & 1) != (w.get<uint32_t>(i.slots[1], l) & 1);
        w.set<uint32_t>(i.slots[0], l, completed);
        w.gives_way |= !completed;
        if (completed) w.block->shadow.acquire(w.number, barrier.completed);
    });
}
inline void arrive_only(Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ALL) stop("an arrival at a named barrier needs a whole warp: " + i.text);
    arrive_at_named_barrier(w, i, w.get<uint32_t>(i.slots[0], 0), w.get<uint32_t>(i.slots[1], 0), false);
}
inline void proxy_fence(Warp& w, const Instruction&, uint32_t) { w.block->shadow.proxy_fence(w.number); }
} // namespace ptx

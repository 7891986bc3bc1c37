// Runs a block of PTX instructions (ptx.hpp) on the CPU, warp by warp. Lanes at the same
// instruction run together. Diverged lanes continue from the earliest instruction, so that they
// reconverge where the compiler allows it. Collective instructions (shuffles, votes, tensor cores)
// wait for their lanes. Errors are lanes that never arrive, addresses that are misaligned or
// outside of an allocation, and races in shared memory (shadow_memory.hpp).
//
// EMULATED_GPU_COUNTS=1: each launch prints the number of its warps' instructions and the bytes of
// GPU memory that they accessed.
#pragma once
#include "ptx.hpp"
#include "shadow_memory.hpp"
#include <algorithm>
#include <cmath>

namespace ptx {
struct Block;

// An asynchronous copy to shared memory that is not complete. Bytes from `taken` on are zeros.
struct PendingCopy {
    uint32_t to;
    const uint8_t* from;
    uint32_t bytes, taken, group;
};

// A product of a warpgroup that is not complete (warpgroup.hpp).
struct PendingProduct {
    const Instruction* instruction;
    uint32_t group;
    uint64_t left, right; // descriptors of operands in shared memory
    bool adds;            // to the sums; otherwise it replaces them
};

// An mbarrier in shared memory.
struct MemoryBarrier {
    uint32_t expected, pending; // arrivals of a phase, and those still missing
    uint32_t phase = 0;
    Clock arriving, completed; // of the current phase, and of the last one
};

// A named barrier (`bar`), at which some warps wait and others only arrive.
struct NamedBarrier {
    uint32_t arrived = 0, expected = 0;
    std::vector<Warp*> waiting;
    Clock arriving;
};

typedef uint64_t Lanes[32];
struct Warp {
    Block* block = nullptr;
    const Kernel* kernel = nullptr;
    uint32_t number = 0, existing = ALL; // the lanes that exist
    // Lanes that have not ended, that wait at a barrier of the block, and that wait for other
    // lanes.
    uint32_t live = 0, at_barrier = 0, waiting = 0;
    uint32_t pc[32];
    std::vector<uint64_t> registers; // by slot, then lane
    std::vector<uint8_t> local;
    std::vector<PendingCopy> copies[32];
    uint32_t groups[32];
    bool gives_way = false;  // other warps must run before a condition for which it waits can become true
    bool has_arrived = false; // at the barrier at which its lanes wait
    // Products of the warpgroup that are in progress, and the number of groups committed. Registers
    // of products in progress, by slot: 1 for a left operand, 2 for a sum.
    std::vector<PendingProduct> products;
    uint32_t product_groups = 0, fences = 0, steps = 0;
    std::vector<uint8_t> in_progress;
    std::vector<uint32_t> accessed; // by slot: number of wgmma fences before the last ordinary access

    void note_access(const Instruction& i);
    Lanes& reg(int slot) { return *(Lanes*)&registers[(size_t)slot * 32]; }
    template <class T> T get(int slot, int lane) {
        T x;
        memcpy(&x, &reg(slot)[lane], sizeof x);
        return x;
    }
    template <class T> void set(int slot, int lane, T x) {
        uint64_t bits = 0;
        memcpy(&bits, &x, sizeof x);
        reg(slot)[lane] = bits;
    }
    uint32_t thread(int lane) const { return number * 32 + (uint32_t)lane; }
    uint32_t enabled_lanes(const Instruction& i, uint32_t lanes) {
        if (i.guard < 0) return lanes;
        const uint64_t* guard = reg(i.guard);
        uint32_t enabled = 0;
        for (int l = 0; l < 32; l++) enabled |= (uint32_t)(guard[l] & 1) << l;
        if (i.negated) enabled = ~enabled;
        return enabled & lanes;
    }
    void advance();
    uint32_t run_until_divergence(uint32_t at, uint32_t lanes, uint32_t others);
};

struct Block {
    const Kernel* kernel;
    const std::vector<uint8_t>* parameters;
    std::vector<uint8_t> shared; // from address 0
    std::vector<Warp> warps;
    ShadowMemory shadow;
    std::map<uint32_t, MemoryBarrier> memory_barriers; // by address
    NamedBarrier named_barriers[16];
    std::vector<uint32_t> warpgroup_steps[8]; // instructions that each warpgroup executed together
    uint64_t progress = 0;                    // number of barriers that opened, and of warps that ended
    bool (*is_accessible)(uint64_t at, size_t bytes); // GPU memory
    uint64_t instructions = 0, bytes = 0; // instructions of warps; bytes of GPU memory that they accessed
};

// Reads a register as a T, and returns a register that contains x.
template <class T> inline T from_register(uint64_t bits) {
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
template <class T> inline uint64_t to_register(T x) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    return bits;
}

// Runs lanes that are at the same instruction until they diverge, meet other lanes, wait or end.
// Returns the lanes that continue.
inline uint32_t Warp::run_until_divergence(uint32_t at, uint32_t lanes, uint32_t others) {
    uint32_t next = ALL; // the next instruction at which other lanes are
    each_lane(others, [&](int l) { next = std::min(next, pc[l] > at ? pc[l] : next); });
    auto set_pc = [&](uint32_t which, uint32_t target) { each_lane(which, [&](int l) { pc[l] = target; }); };
    for (;;) {
        const Instruction& i = kernel->code[at];
        uint32_t m = enabled_lanes(i, lanes);
        block->instructions++;
        if (kernel->uses_warpgroups && m && !i.is_product) note_access(i);
        switch (i.kind) {
        case InstructionKind::PLAIN:
            if (m) i.run(*this, i, m);
            at++;
            if (gives_way) {
                set_pc(lanes, at);
                return lanes;
            }
            break;
        case InstructionKind::BRANCH:
            set_pc(m, i.target);
            set_pc(lanes & ~m, at + 1);
            if (others || (m && m != lanes)) return lanes;
            at = m ? i.target : at + 1;
            break;
        case InstructionKind::EXIT:
            set_pc(lanes, at + 1);
            each_lane(m, [&](int l) {
                if (!copies[l].empty()) stop("a thread ended before its asynchronous copies completed");
            });
            if (m && !products.empty()) stop("a thread ended before its products completed");
            live &= ~m;
            if (!live) block->progress++;
            return lanes & ~m;
        case InstructionKind::BARRIER:
            set_pc(lanes, at + 1);
            at_barrier |= m;
            return lanes;
        case InstructionKind::COLLECTIVE: {
            set_pc(lanes & ~m, at + 1);
            set_pc(m, at);
            uint32_t members = existing & (i.members < 0 ? ALL : get<uint32_t>(i.members, m ? __builtin_ctz(m) : 0)), arrived = m;
            each_lane(waiting, [&](int l) { arrived |= pc[l] == at ? 1u << l : 0; });
            if (!m) {
                at++;
                break;
            }
            if ((members & ~live) != 0) stop("a collective instruction includes lanes that ended: " + i.text);
            waiting |= m;
            if ((members & ~arrived) != 0) return lanes;
            waiting &= ~arrived;
            i.run(*this, i, arrived);
            set_pc(arrived, at + 1);
            if (arrived != lanes || others) return lanes;
            at++;
            break;
        }
        }
        if (at == next) {
            set_pc(lanes, at);
            return lanes;
        }
    }
}

// Runs the warp until every lane has ended or waits at a barrier of the block.
inline void Warp::advance() {
    gives_way = false;
    while (!gives_way) {
        uint32_t able = live & ~at_barrier & ~waiting, first = ALL, lanes = 0;
        if (!able) {
            if (waiting) stop("lanes wait for lanes of their warp that never arrive: " + kernel->code[pc[__builtin_ctz(waiting)]].text);
            each_lane(at_barrier, [&](int l) {
                if (pc[l] != pc[__builtin_ctz(at_barrier)]) stop("lanes of a warp wait at different barriers: " + kernel->code[pc[l] - 1].text);
            });
            return;
        }
        each_lane(able, [&](int l) { first = std::min(first, pc[l]); });
        each_lane(able, [&](int l) { lanes |= pc[l] == first ? 1u << l : 0; });
        run_until_divergence(first, lanes, able & ~lanes);
    }
}

// A warp arrives at a named barrier, and waits there if `waits`. The barrier opens when `expected`
// threads have arrived.
inline void arrive_at_named_barrier(Warp& w, const Instruction& i, uint32_t number, uint32_t expected, bool waits) {
    if (number >= 16 || expected % 32 || !expected || w.live != ALL) stop("an invalid named barrier: " + i.text);
    NamedBarrier& barrier = w.block->named_barriers[number];
    if (barrier.arrived && barrier.expected != expected) stop("warps disagree about the threads of a barrier: " + i.text);
    barrier.expected = expected;
    w.block->shadow.release(w.number, barrier.arriving);
    if (waits) barrier.waiting.push_back(&w);
    barrier.arrived += 32;
    if (barrier.arrived < expected) return;
    for (Warp* waiting : barrier.waiting) {
        w.block->shadow.acquire(waiting->number, barrier.arriving);
        waiting->at_barrier = 0, waiting->has_arrived = false;
    }
    barrier = NamedBarrier();
    w.block->progress++;
}

// Runs every block of a grid, one after the other.
class Grid {
  public:
    Grid(const Kernel& kernel, const std::vector<uint8_t>& parameters, const unsigned (&grid)[3], const unsigned (&threads)[3], uint32_t dynamic,
         bool (*is_accessible)(uint64_t, size_t))
        : threads(threads), grid(grid) {
        block.kernel = &kernel;
        block.parameters = &parameters;
        block.is_accessible = is_accessible;
        if (threads[0] * threads[1] * threads[2] > kernel.max_threads) stop(kernel.name + " was not compiled for this many threads");
        end = kernel.static_end + dynamic;
        unsigned count = threads[0] * threads[1] * threads[2];
        block.warps.resize((count + 31) / 32);
        if (block.warps.size() > MAX_WARPS) stop("a block has at most 1024 threads");
        for (uint32_t w = 0; w < block.warps.size(); w++) prepare(block.warps[w], w, count);
    }
    void run(bool backwards) {
        unsigned at[3];
        for (at[2] = 0; at[2] < grid[2]; at[2]++)
            for (at[1] = 0; at[1] < grid[1]; at[1]++)
                for (at[0] = 0; at[0] < grid[0]; at[0]++) run_block(at, backwards);
        if (getenv("EMULATED_GPU_COUNTS"))
            fprintf(stderr, "%s: %llu warp instructions, %llu bytes of GPU memory\n", block.kernel->name.c_str(),
                    (unsigned long long)block.instructions, (unsigned long long)block.bytes);
    }

  private:
    Block block;
    const unsigned (&threads)[3];
    const unsigned (&grid)[3];
    uint32_t end;

    void prepare(Warp& w, uint32_t number, unsigned count) {
        w.block = &block;
        w.kernel = block.kernel;
        w.number = number;
        w.existing = count - number * 32 >= 32 ? ALL : (1u << (count - number * 32)) - 1;
        w.registers.assign((size_t)block.kernel->slots * 32, 0);
        w.local.assign((size_t)block.kernel->local_bytes * 32, 0xff);
        for (auto& [slot, value] : block.kernel->constants)
            for (int l = 0; l < 32; l++) w.reg(slot)[l] = value;
        for (int l = 0; l < 32; l++) {
            unsigned t = w.thread(l);
            uint64_t thread_index[3] = {t % threads[0], t / threads[0] % threads[1], t / threads[0] / threads[1]};
            for (int d = 0; d < 3; d++) w.reg(d)[l] = thread_index[d], w.reg(3 + d)[l] = threads[d], w.reg(9 + d)[l] = grid[d];
            w.reg(12)[l] = (uint64_t)l;
        }
    }
    // Shared memory is initialized with NaN.
    void run_block(const unsigned (&at)[3], bool backwards) {
        block.shared.assign(end, 0xff);
        block.shadow.begin(*block.kernel, end, (uint32_t)block.warps.size());
        block.memory_barriers.clear();
        for (NamedBarrier& barrier : block.named_barriers) barrier = NamedBarrier();
        for (auto& steps : block.warpgroup_steps) steps.clear();
        for (Warp& w : block.warps) {
            w.live = w.existing, w.at_barrier = w.waiting = 0;
            memset(w.pc, 0, sizeof w.pc);
            memset(w.groups, 0, sizeof w.groups);
            w.has_arrived = false;
            w.product_groups = w.fences = w.steps = 0;
            w.in_progress.assign((size_t)block.kernel->slots, 0);
            w.accessed.assign((size_t)block.kernel->slots, 0);
            for (int d = 0; d < 3; d++)
                for (int l = 0; l < 32; l++) w.reg(6 + d)[l] = at[d];
        }
        uint64_t before = block.progress;
        for (int idle = 0; idle < MAX_IDLE_ROUNDS; idle++) {
            size_t n = block.warps.size(), live = 0, waiting = 0;
            for (size_t i = 0; i < n; i++) {
                Warp& w = block.warps[backwards ? n - 1 - i : i];
                if (w.live && !w.at_barrier) w.advance();
                if (w.live && w.at_barrier == w.live && !w.has_arrived) arrive(w);
            }
            for (Warp& w : block.warps) live += w.live != 0, waiting += w.live && w.at_barrier == w.live && is_block_barrier(w);
            if (!live) break;
            if (live == waiting) open_block_barrier();
            if (block.progress != before) idle = -1;
            before = block.progress;
            if (idle == MAX_IDLE_ROUNDS - 1) stop("warps wait for barriers that never open: " + describe_waiting());
        }
        for (size_t w = 0; w < block.warps.size(); w++)
            if (block.warps[w].steps != block.warpgroup_steps[w / 4].size()) stop("a warp executed fewer instructions of its warpgroup than another warp");
    }
    // Rounds over all warps in which no barrier opens and no warp ends, before that is an error. A
    // warp may need several, because it gives way each time that it looks at an mbarrier.
    static constexpr int MAX_IDLE_ROUNDS = 8;

    static const Instruction& barrier_of(const Warp& w) { return w.kernel->code[w.pc[__builtin_ctz(w.live)] - 1]; }
    // Whether a warp waits at a barrier of all threads of the block.
    static bool is_block_barrier(const Warp& w) { return barrier_of(w).count == 1; }
    void arrive(Warp& w) {
        w.has_arrived = true;
        if (is_block_barrier(w)) return;
        const Instruction& i = barrier_of(w);
        int lane = __builtin_ctz(w.live);
        arrive_at_named_barrier(w, i, w.get<uint32_t>(i.slots[0], lane), w.get<uint32_t>(i.slots[1], lane), true);
    }
    void open_block_barrier() {
        Clock all;
        for (Warp& w : block.warps) block.shadow.release(w.number, all);
        for (Warp& w : block.warps) block.shadow.acquire(w.number, all), w.at_barrier = 0, w.has_arrived = false;
        block.progress++;
    }
    std::string describe_waiting() const {
        std::string all;
        for (const Warp& w : block.warps)
            if (w.live) all += " [warp " + std::to_string(w.number) + ": " + w.kernel->code[w.pc[__builtin_ctz(w.live)] - 1].text.substr(0, 100) + "]";
        return all;
    }
};
} // namespace ptx

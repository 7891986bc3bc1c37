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
constexpr uint32_t ALL = 0xffffffffu;
struct Block;

// An asynchronous copy to shared memory that is not complete. Bytes from `taken` on are zeros.
struct PendingCopy {
    uint32_t to;
    const uint8_t* from;
    uint32_t bytes, taken, group;
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
        uint32_t enabled = 0;
        for (int l = 0; l < 32; l++) enabled |= (uint32_t)((reg(i.guard)[l] & 1) != (uint64_t)i.negated) << l;
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
    bool (*is_accessible)(uint64_t at, size_t bytes); // GPU memory
    uint64_t instructions = 0, bytes = 0; // instructions of warps; bytes of GPU memory that they accessed
};

template <class F> inline void each_lane(uint32_t lanes, F f) {
    if (lanes == ALL) {
        for (int l = 0; l < 32; l++) f(l);
        return;
    }
    for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
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
        switch (i.kind) {
        case InstructionKind::PLAIN:
            if (m) i.run(*this, i, m);
            at++;
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
            live &= ~m;
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
    for (;;) {
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
        block.shadow.begin(*block.kernel, end);
        for (Warp& w : block.warps) {
            w.live = w.existing, w.at_barrier = w.waiting = 0;
            memset(w.pc, 0, sizeof w.pc);
            memset(w.groups, 0, sizeof w.groups);
            for (int d = 0; d < 3; d++)
                for (int l = 0; l < 32; l++) w.reg(6 + d)[l] = at[d];
        }
        for (bool is_running = true; is_running;) {
            is_running = false;
            size_t n = block.warps.size();
            for (size_t i = 0; i < n; i++) {
                Warp& w = block.warps[backwards ? n - 1 - i : i];
                w.advance();
                is_running |= w.live != 0;
            }
            // Now every live lane waits at the barrier, so it opens.
            for (Warp& w : block.warps) w.at_barrier = 0;
            block.shadow.block_barrier();
        }
    }
};
} // namespace ptx

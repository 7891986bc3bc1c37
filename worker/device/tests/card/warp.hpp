// A block of PTX instructions (ptx.hpp) on the CPU: warp by warp, the lanes of a warp together wherever they are at one place. Lanes
// that are apart go on from the first place in the text, so they meet where the compiler let them. What runs together on a card
// (shuffles, votes, tensor cores) waits for its lanes; that they never come is an error, as are addresses that aren't aligned or
// nobody's, and races in shared memory (shadow.hpp).
//
// CARD_COUNTS=1: each launch says how many instructions its warps ran and how many bytes they moved. On a card both take their time.
#pragma once
#include "ptx.hpp"
#include "shadow.hpp"
#include <algorithm>
#include <cmath>

namespace ptx {
constexpr uint32_t ALL = 0xffffffffu;
struct Block;

// A copy to shared memory that was begun and hasn't landed.
struct Begun {
    uint32_t to;
    const uint8_t* from;
    uint32_t bytes, taken, group;
};

typedef uint64_t Lanes[32];
struct Warp {
    Block* block = nullptr;
    const Kernel* kernel = nullptr;
    uint32_t number = 0, exist = ALL; // lanes that there are
    uint32_t live = 0, met = 0, waiting = 0; // lanes: not ended; at a barrier of the block; for others of the warp
    uint32_t pc[32];
    std::vector<uint64_t> registers; // slot by slot, 32 lanes each
    std::vector<uint8_t> local;
    std::vector<Begun> copies[32];
    uint32_t groups[32];

    Lanes& of(int slot) { return *(Lanes*)&registers[(size_t)slot * 32]; }
    template <class T> T get(int slot, int lane) {
        T x;
        memcpy(&x, &of(slot)[lane], sizeof x);
        return x;
    }
    template <class T> void set(int slot, int lane, T x) {
        uint64_t bits = 0;
        memcpy(&bits, &x, sizeof x);
        of(slot)[lane] = bits;
    }
    uint32_t thread(int lane) const { return number * 32 + (uint32_t)lane; }
    uint32_t guarded(const Instruction& i, uint32_t lanes) {
        if (i.guard < 0) return lanes;
        uint32_t yes = 0;
        for (int l = 0; l < 32; l++) yes |= (uint32_t)((of(i.guard)[l] & 1) != (uint64_t)i.negated) << l;
        return yes & lanes;
    }
    void advance();
    uint32_t straight(uint32_t at, uint32_t lanes, uint32_t others);
};

struct Block {
    const Kernel* kernel;
    const std::vector<uint8_t>* parameters;
    std::vector<uint8_t> shared; // from address 0
    std::vector<Warp> warps;
    Shadow shadow;
    bool (*is_there)(uint64_t at, size_t bytes); // memory of the card
    uint64_t instructions = 0, bytes = 0; // of warps; from and to the card's memory
};

template <class F> inline void each_lane(uint32_t lanes, F f) {
    if (lanes == ALL) {
        for (int l = 0; l < 32; l++) f(l);
        return;
    }
    for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}

// Runs lanes that are at one place until they part, meet others, wait or end; those that go on.
inline uint32_t Warp::straight(uint32_t at, uint32_t lanes, uint32_t others) {
    uint32_t next = ALL; // where others wait for company
    each_lane(others, [&](int l) { next = std::min(next, pc[l] > at ? pc[l] : next); });
    auto stay = [&](uint32_t which, uint32_t where) { each_lane(which, [&](int l) { pc[l] = where; }); };
    for (;;) {
        const Instruction& i = kernel->code[at];
        uint32_t m = guarded(i, lanes);
        block->instructions++;
        switch (i.kind) {
        case Kind::PLAIN:
            if (m) i.run(*this, i, m);
            at++;
            break;
        case Kind::BRANCH:
            stay(m, i.target);
            stay(lanes & ~m, at + 1);
            if (others || (m && m != lanes)) return lanes;
            at = m ? i.target : at + 1;
            break;
        case Kind::EXIT:
            stay(lanes, at + 1);
            each_lane(m, [&](int l) {
                if (!copies[l].empty()) stop("a thread ended before its copies were there");
            });
            live &= ~m;
            return lanes & ~m;
        case Kind::BARRIER:
            stay(lanes, at + 1);
            met |= m;
            return lanes;
        case Kind::TOGETHER: {
            stay(lanes & ~m, at + 1);
            stay(m, at);
            uint32_t members = exist & (i.members < 0 ? ALL : get<uint32_t>(i.members, m ? __builtin_ctz(m) : 0)), here = m;
            each_lane(waiting, [&](int l) { here |= pc[l] == at ? 1u << l : 0; });
            if (!m) {
                at++;
                break;
            }
            if ((members & ~live) != 0) stop("lanes that ended are waited for: " + i.text);
            waiting |= m;
            if ((members & ~here) != 0) return lanes;
            waiting &= ~here;
            i.run(*this, i, here);
            stay(here, at + 1);
            if (here != lanes || others) return lanes;
            at++;
            break;
        }
        }
        if (at == next) {
            stay(lanes, at);
            return lanes;
        }
    }
}

// Until every lane has ended or waits at a barrier of the block.
inline void Warp::advance() {
    for (;;) {
        uint32_t able = live & ~met & ~waiting, first = ALL, lanes = 0;
        if (!able) {
            if (waiting) stop("lanes wait for others of their warp that never come: " + kernel->code[pc[__builtin_ctz(waiting)]].text);
            each_lane(met, [&](int l) {
                if (pc[l] != pc[__builtin_ctz(met)]) stop("lanes of a warp wait at different barriers: " + kernel->code[pc[l] - 1].text);
            });
            return;
        }
        each_lane(able, [&](int l) { first = std::min(first, pc[l]); });
        each_lane(able, [&](int l) { lanes |= pc[l] == first ? 1u << l : 0; });
        straight(first, lanes, able & ~lanes);
    }
}

// Every block of a grid, one after the other.
class Grid {
  public:
    Grid(const Kernel& kernel, const std::vector<uint8_t>& parameters, const unsigned (&grid)[3], const unsigned (&threads)[3], uint32_t dynamic,
         bool (*is_there)(uint64_t, size_t))
        : threads(threads), grid(grid) {
        block.kernel = &kernel;
        block.parameters = &parameters;
        block.is_there = is_there;
        if (threads[0] * threads[1] * threads[2] > kernel.most_threads) stop(kernel.name + " wasn't compiled for so many threads");
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
        if (getenv("CARD_COUNTS"))
            fprintf(stderr, "%s: %llu instructions of warps, %llu bytes of the card's memory\n", block.kernel->name.c_str(),
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
        w.exist = count - number * 32 >= 32 ? ALL : (1u << (count - number * 32)) - 1;
        w.registers.assign((size_t)block.kernel->slots * 32, 0);
        w.local.assign((size_t)block.kernel->local_bytes * 32, 0xff);
        for (auto& [slot, value] : block.kernel->constants)
            for (int l = 0; l < 32; l++) w.of(slot)[l] = value;
        for (int l = 0; l < 32; l++) {
            unsigned t = w.thread(l);
            uint64_t of_thread[3] = {t % threads[0], t / threads[0] % threads[1], t / threads[0] / threads[1]};
            for (int d = 0; d < 3; d++) w.of(d)[l] = of_thread[d], w.of(3 + d)[l] = threads[d], w.of(9 + d)[l] = grid[d];
            w.of(12)[l] = (uint64_t)l;
        }
    }
    // Shared memory begins as numbers that are none.
    void run_block(const unsigned (&at)[3], bool backwards) {
        block.shared.assign(end, 0xff);
        block.shadow.begin(*block.kernel, end);
        for (Warp& w : block.warps) {
            w.live = w.exist, w.met = w.waiting = 0;
            memset(w.pc, 0, sizeof w.pc);
            memset(w.groups, 0, sizeof w.groups);
            for (int d = 0; d < 3; d++)
                for (int l = 0; l < 32; l++) w.of(6 + d)[l] = at[d];
        }
        for (bool some = true; some;) {
            some = false;
            size_t n = block.warps.size();
            for (size_t i = 0; i < n; i++) {
                Warp& w = block.warps[backwards ? n - 1 - i : i];
                w.advance();
                some |= w.live != 0;
            }
            // The barrier opens when everybody who lives is there: they all are, or advance would have gone on.
            for (Warp& w : block.warps) w.met = 0;
            block.shadow.block_met();
        }
    }
};
} // namespace ptx

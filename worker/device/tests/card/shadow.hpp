// What a block's threads did to its shared memory since they last met: who wrote, who read, which copies are under way. Two accesses of
// two threads, one of them a write, with neither a barrier of the block nor (in a warp) a barrier of the warp between them, are an
// error, whatever order they happened in.
#pragma once
#include "ptx.hpp"

namespace ptx {
class Shadow {
  public:
    // Of a block's first access: nothing happened yet. Bytes between static variables may not be touched.
    void begin(const Kernel& kernel, uint32_t end) {
        shift = kernel.finest / 2; // of 1, 2, 4
        bound = end;
        epoch = 1;
        for (auto& met : warps) met = 1;
        places.assign((end >> shift) + 1, Place());
        for (uint32_t at = RESERVED; at < kernel.static_end; at += 1 << shift) places[at >> shift].forbidden = true;
        for (const Range& v : kernel.variables)
            for (uint32_t at = v.begin; at < v.end; at += 1 << shift) places[at >> shift].forbidden = false;
    }
    void block_met() { epoch++; }
    void warp_met(uint32_t warp) { warps[warp]++; }

    void read(uint32_t thread, uint64_t at, uint32_t bytes, const std::string& text) {
        check(at, bytes, text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            Place& p = places[i];
            if (p.copying) clash("reads what is being copied", thread, p.writer, text);
            if (p.written == epoch && !ordered(p.writer, thread, p.written_in_warp)) clash("reads what was written", thread, p.writer, text);
            note_reader(p, thread);
        }
    }
    void write(uint32_t thread, uint64_t at, uint32_t bytes, const std::string& text, bool copying = false) {
        check(at, bytes, text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            Place& p = places[i];
            if (p.copying) clash("writes where a copy is under way", thread, p.writer, text);
            if (p.written == epoch && !ordered(p.writer, thread, p.written_in_warp)) clash("writes what was written", thread, p.writer, text);
            if (p.read == epoch && !all_readers_before(p, thread)) clash("writes what was read", thread, p.reader, text);
            note_writer(p, thread);
            p.copying = copying;
        }
    }
    // A copy's bytes are there: as if its thread had written them now.
    void landed(uint32_t thread, uint64_t at, uint32_t bytes) {
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            places[i].copying = false;
            note_writer(places[i], thread);
        }
    }

  private:
    static constexpr uint16_t NONE = 0xffff, SEVERAL = 0xfffe; // of several warps
    struct Place {
        uint32_t written = 0, read = 0;                     // when the block had met so often
        uint32_t written_in_warp = 0, read_in_warp = 0;     // and the thread's warp
        uint16_t writer = NONE, reader = NONE;              // of several readers of one warp the first
        bool several = false;                               // readers of one warp
        bool copying = false, forbidden = false;
    };
    int shift = 1;
    uint64_t bound = 0;
    uint32_t epoch = 1;
    uint32_t warps[33];
    std::vector<Place> places;

    bool ordered(uint32_t before, uint32_t thread, uint32_t met) const {
        return before == thread || (before / 32 == thread / 32 && met < warps[thread / 32]);
    }
    bool all_readers_before(const Place& p, uint32_t thread) const {
        if (p.reader == SEVERAL) return false;
        if (p.several) return p.reader / 32u == thread / 32 && p.read_in_warp < warps[thread / 32];
        return ordered(p.reader, thread, p.read_in_warp);
    }
    void note_reader(Place& p, uint32_t thread) {
        bool others = p.read == epoch && p.reader != thread;
        if (others && (p.reader == SEVERAL || p.reader / 32u != thread / 32)) p.reader = SEVERAL;
        else {
            p.several = others && (p.several || p.read_in_warp == warps[thread / 32]);
            p.reader = (uint16_t)thread;
        }
        p.read = epoch;
        p.read_in_warp = warps[thread / 32];
    }
    void note_writer(Place& p, uint32_t thread) {
        p.written = epoch;
        p.written_in_warp = warps[thread / 32];
        p.writer = (uint16_t)thread;
    }
    void check(uint64_t at, uint32_t bytes, const std::string& text) const {
        if (at < RESERVED || at + bytes > bound) stop("an address isn't in the block's shared memory: " + text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++)
            if (places[i].forbidden) stop("an address is beyond its array in shared memory: " + text);
    }
    [[noreturn]] static void clash(const char* what, uint32_t thread, uint32_t other, const std::string& text) {
        std::string by = other == SEVERAL ? "threads of other warps" : "thread " + std::to_string(other);
        stop("a race in shared memory: thread " + std::to_string(thread) + " " + what + " by " + by + ", and no barrier lies between: " + text);
    }
};
} // namespace ptx

// Detects races in shared memory. Shadow memory stores the last writer and reader of each location,
// and whether an asynchronous copy is in progress. Two accesses by different threads, one of them a
// write, are an error unless a barrier separates them: a barrier of the block, or, within a warp, a
// barrier of the warp. The order in which they happened does not matter.
#pragma once
#include "ptx.hpp"

namespace ptx {
class ShadowMemory {
  public:
    // Resets the state for a block. The gaps between static variables must not be accessed.
    void begin(const Kernel& kernel, uint32_t end) {
        shift = kernel.smallest_shared_access / 2; // log2 of 1, 2 or 4
        bound = end;
        epoch = 1;
        for (auto& barriers : warps) barriers = 1;
        locations.assign((end >> shift) + 1, Location());
        for (uint32_t at = RESERVED; at < kernel.static_end; at += 1 << shift) locations[at >> shift].forbidden = true;
        for (const Range& v : kernel.variables)
            for (uint32_t at = v.begin; at < v.end; at += 1 << shift) locations[at >> shift].forbidden = false;
    }
    void block_barrier() { epoch++; }
    void warp_barrier(uint32_t warp) { warps[warp]++; }

    void read(uint32_t thread, uint64_t at, uint32_t bytes, const std::string& text) {
        check(at, bytes, text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            Location& p = locations[i];
            if (p.forbidden) stop("an address is beyond its array in shared memory: " + text);
            if (p.copying) report_race("reads the target of a copy in progress", thread, p.writer, text);
            if (p.written == epoch && !ordered(p.writer, thread, p.written_in_warp)) report_race("reads what was written", thread, p.writer, text);
            note_reader(p, thread);
        }
    }
    void write(uint32_t thread, uint64_t at, uint32_t bytes, const std::string& text, bool copying = false) {
        check(at, bytes, text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            Location& p = locations[i];
            if (p.forbidden) stop("an address is beyond its array in shared memory: " + text);
            if (p.copying) report_race("writes the target of a copy in progress", thread, p.writer, text);
            if (p.written == epoch && !ordered(p.writer, thread, p.written_in_warp)) report_race("writes what was written", thread, p.writer, text);
            if (p.read == epoch && !all_readers_before(p, thread)) report_race("writes what was read", thread, p.reader, text);
            note_writer(p, thread);
            p.copying = copying;
        }
    }
    // Marks an asynchronous copy as complete, as if its thread had written the bytes now.
    void complete_copy(uint32_t thread, uint64_t at, uint32_t bytes) {
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            locations[i].copying = false;
            note_writer(locations[i], thread);
        }
    }

  private:
    static constexpr uint16_t NONE = 0xffff, SEVERAL = 0xfffe; // readers of several warps
    struct Location {
        uint32_t written = 0, read = 0;                 // number of block barriers before the last access
        uint32_t written_in_warp = 0, read_in_warp = 0; // number of barriers of the thread's warp before it
        uint16_t writer = NONE, reader = NONE;          // of several readers of one warp, the first
        bool several = false;                           // several readers of one warp
        bool copying = false, forbidden = false;
    };
    int shift = 1;
    uint64_t bound = 0;
    uint32_t epoch = 1;
    uint32_t warps[33];
    std::vector<Location> locations;

    bool ordered(uint32_t earlier, uint32_t thread, uint32_t barriers) const {
        return earlier == thread || (earlier / 32 == thread / 32 && barriers < warps[thread / 32]);
    }
    bool all_readers_before(const Location& p, uint32_t thread) const {
        if (p.reader == SEVERAL) return false;
        if (p.several) return p.reader / 32u == thread / 32 && p.read_in_warp < warps[thread / 32];
        return ordered(p.reader, thread, p.read_in_warp);
    }
    void note_reader(Location& p, uint32_t thread) {
        bool others = p.read == epoch && p.reader != thread;
        if (others && (p.reader == SEVERAL || p.reader / 32u != thread / 32)) p.reader = SEVERAL;
        else {
            p.several = others && (p.several || p.read_in_warp == warps[thread / 32]);
            p.reader = (uint16_t)thread;
        }
        p.read = epoch;
        p.read_in_warp = warps[thread / 32];
    }
    void note_writer(Location& p, uint32_t thread) {
        p.written = epoch;
        p.written_in_warp = warps[thread / 32];
        p.writer = (uint16_t)thread;
    }
    void check(uint64_t at, uint32_t bytes, const std::string& text) const {
        if (at < RESERVED || at + bytes > bound) stop("an address is outside of the block's shared memory: " + text);
    }
    [[noreturn]] static void report_race(const char* what, uint32_t thread, uint32_t other, const std::string& text) {
        std::string by = other == SEVERAL ? "threads of other warps" : "thread " + std::to_string(other);
        stop("a race in shared memory: thread " + std::to_string(thread) + " " + what + " by " + by + " without a barrier in between: " + text);
    }
};
} // namespace ptx

// Detects races in shared memory. Shadow memory stores the last writer and the readers of each
// location, and whether an asynchronous copy is in progress. Two accesses by different threads, one
// of them a write, are an error unless a barrier separates them: a barrier of the block, a named
// barrier or an mbarrier, or, within a warp, a barrier of the warp. The order in which they
// happened does not matter.
//
// Warps are ordered by vector clocks. Tensor cores read shared memory through another path than
// ordinary instructions (the async proxy), so that they also need a proxy fence after the write.
#pragma once
#include "lanes.hpp"
#include "ptx.hpp"

namespace ptx {
constexpr uint32_t MAX_WARPS = 32;
// What a warp knows of the others: by warp, the number of the last period of its work whose
// accesses happened before, and of the last one whose writes are also visible to the async proxy.
struct Clock {
    uint32_t seen[MAX_WARPS] = {}, fenced[MAX_WARPS] = {};
    void join(const Clock& other) {
        for (uint32_t w = 0; w < MAX_WARPS; w++) seen[w] = std::max(seen[w], other.seen[w]), fenced[w] = std::max(fenced[w], other.fenced[w]);
    }
};

class ShadowMemory {
  public:
    // Resets the state for a block. The gaps between static variables must not be accessed.
    void begin(const Kernel& kernel, uint32_t end, uint32_t count) {
        shift = kernel.smallest_shared_access / 2; // log2 of 1, 2 or 4
        bound = end;
        warp_count = count;
        for (auto& barriers : warps) barriers = 1;
        for (auto& period : periods) period = 1;
        for (auto& clock : clocks) clock = Clock();
        last_stamp = 0;
        for (auto& stamp : stamps) stamp = ++last_stamp;
        locations.assign((end >> shift) + 1, Location());
        reads.assign(locations.size() * count, 0);
        for (uint32_t at = RESERVED; at < kernel.static_end; at += 1 << shift) locations[at >> shift].forbidden = true;
        for (const Range& v : kernel.variables)
            for (uint32_t at = v.begin; at < v.end; at += 1 << shift) locations[at >> shift].forbidden = false;
    }
    void warp_barrier(uint32_t warp) { warps[warp]++, stamps[warp] = ++last_stamp; }
    // A warp's work so far happens before the work of those that acquire `barrier`.
    void release(uint32_t warp, Clock& barrier) {
        clocks[warp].seen[warp] = periods[warp]++;
        stamps[warp] = ++last_stamp;
        barrier.join(clocks[warp]);
    }
    void acquire(uint32_t warp, const Clock& barrier) {
        clocks[warp].join(barrier);
        warp_barrier(warp);
    }
    // What the warp has written and knows of becomes visible to the async proxy.
    void proxy_fence(uint32_t warp) {
        Clock& clock = clocks[warp];
        clock.seen[warp] = periods[warp]++;
        stamps[warp] = ++last_stamp;
        memcpy(clock.fenced, clock.seen, sizeof clock.fenced);
    }
    // A read by tensor cores on behalf of a warp.
    void read_by_proxy(uint32_t warp, uint64_t at, uint32_t bytes, const std::string& text) {
        check(at, bytes, text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            Location& p = locations[i];
            if (p.forbidden) stop("an address is beyond its array in shared memory: " + text);
            if (p.writer == NONE) stop("tensor cores read what was never written: " + text);
            if (p.copying) report_race("reads the target of a copy in progress", warp * 32, p.writer, text);
            uint32_t from = p.writer / 32u;
            if (from != warp && clocks[warp].seen[from] < p.written) report_race("reads what was written", warp * 32, p.writer, text);
            if (clocks[warp].fenced[from] < p.written) stop("tensor cores read what was written without a proxy fence: " + text);
            // as if several lanes read it
            p.reader = (uint16_t)(warp * 32 + 1);
            p.read_in_warp = warps[warp];
            p.several = true;
            reads[i * warp_count + warp] = periods[warp];
        }
    }

    void read(uint32_t thread, uint64_t at, uint32_t bytes, const std::string& text) {
        check(at, bytes, text);
        read_locations(Reader(*this, thread / 32), at, bytes, thread, text);
    }
    // Reads by some lanes of a warp, each at the address `at[lane]`. Equals a `read` for each lane.
    void read_by_lanes(uint32_t warp, uint32_t lanes, const uint64_t (&at)[32], uint32_t bytes, const std::string& text) {
        auto [begin, end] = span_of_lanes(lanes, at, bytes);
        for (uint64_t outermost : {begin, end - bytes}) check(outermost, bytes, text);
        Reader reader(*this, warp);
        if (bytes >> shift <= 1) {
            each_lane(lanes, [&](int l) { read_location(reader, at[l] >> shift, warp * 32 + (uint32_t)l, text); });
        } else {
            each_lane(lanes, [&](int l) { read_locations(reader, at[l], bytes, warp * 32 + (uint32_t)l, text); });
        }
    }
    // A read by several lanes of a warp, all at the same address.
    void read_by_several_lanes(uint32_t warp, uint64_t at, uint32_t bytes, const std::string& text) {
        check(at, bytes, text);
        Reader reader(*this, warp);
        for (uint32_t lane = 0; lane < 2; lane++) read_locations(reader, at, bytes, warp * 32 + lane, text);
    }
    void write(uint32_t thread, uint64_t at, uint32_t bytes, const std::string& text, bool copying = false) {
        check(at, bytes, text);
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) {
            Location& p = locations[i];
            if (p.forbidden) stop("an address is beyond its array in shared memory: " + text);
            if (p.copying) report_race("writes the target of a copy in progress", thread, p.writer, text);
            if (p.writer != NONE && !ordered(p.writer, p.written, thread, p.written_in_warp)) report_race("writes what was written", thread, p.writer, text);
            expect_readers_before(i, thread, text);
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
    static constexpr uint16_t NONE = 0xffff;
    struct Location {
        uint32_t written = 0;                           // period of the writer's warp
        uint32_t written_in_warp = 0, read_in_warp = 0; // number of barriers of the thread's warp before the access
        uint16_t writer = NONE, reader = NONE;          // the last ones
        uint32_t verified = 0;                          // stamp of the warp of which every lane may read the location; 0 after a write
        bool several = false;                           // several readers of the reader's warp since its last barrier
        bool copying = false, forbidden = false;
    };
    int shift = 1;
    uint64_t bound = 0;
    uint32_t warp_count = 0;
    uint32_t warps[MAX_WARPS];   // number of barriers of each warp so far
    uint32_t periods[MAX_WARPS]; // number of the current period of each warp
    // By warp: changes whenever `warps` or `periods` changes, and differs from the stamps of other
    // warps. A read of a location that several lanes have read with the same stamp has no effect.
    uint32_t stamps[MAX_WARPS], last_stamp = 0;
    Clock clocks[MAX_WARPS];
    std::vector<Location> locations;
    std::vector<uint32_t> reads; // by location and warp: the period of the warp's last read

    bool ordered(uint32_t earlier, uint32_t period, uint32_t thread, uint32_t barriers) const {
        uint32_t from = earlier / 32, warp = thread / 32;
        return from == warp ? earlier == thread || barriers < warps[warp] : clocks[warp].seen[from] >= period;
    }
    // What a read needs of a warp's state.
    struct Reader {
        Location* locations;
        uint32_t* reads;
        const uint32_t* seen;
        uint32_t warp, count, barriers, period, stamp;
        Reader(ShadowMemory& m, uint32_t warp)
            : locations(m.locations.data()), reads(m.reads.data() + warp), seen(m.clocks[warp].seen), warp(warp), count(m.warp_count), barriers(m.warps[warp]),
              period(m.periods[warp]), stamp(m.stamps[warp]) {}
    };
    void read_locations(const Reader& r, uint64_t at, uint32_t bytes, uint32_t thread, const std::string& text) const {
        for (uint64_t i = at >> shift, end = (at + bytes - 1) >> shift; i <= end; i++) read_location(r, i, thread, text);
    }
    static void read_location(const Reader& r, uint64_t i, uint32_t thread, const std::string& text) {
        if (r.locations[i].verified != r.stamp) note_reader(r, i, thread, text);
    }
    static void note_reader(const Reader& r, uint64_t i, uint32_t thread, const std::string& text) {
        Location& p = r.locations[i];
        if (p.forbidden | p.copying) reject_read(p, thread, text);
        if (p.writer != NONE) {
            uint32_t from = p.writer / 32u;
            bool is_ordered = from == r.warp ? p.writer == thread || p.written_in_warp < r.barriers : r.seen[from] >= p.written;
            if (!is_ordered) report_race("reads what was written", thread, p.writer, text);
        }
        // NONE belongs to no warp
        bool same_period = p.reader / 32u == r.warp && p.read_in_warp == r.barriers;
        p.several = same_period && (p.several | (p.reader != thread));
        p.reader = (uint16_t)thread;
        p.read_in_warp = r.barriers;
        r.reads[i * r.count] = r.period;
        if (p.several) p.verified = r.stamp;
    }
    [[noreturn]] static void reject_read(const Location& p, uint32_t thread, const std::string& text) {
        if (p.forbidden) stop("an address is beyond its array in shared memory: " + text);
        report_race("reads the target of a copy in progress", thread, p.writer, text);
    }
    void expect_readers_before(uint64_t i, uint32_t thread, const std::string& text) {
        const Location& p = locations[i];
        if (p.reader == NONE) return;
        for (uint32_t w = 0; w < warp_count; w++)
            if (w != thread / 32 && reads[i * warp_count + w] > clocks[thread / 32].seen[w]) report_race("writes what was read", thread, w * 32, text);
        if (p.reader / 32u != thread / 32 || p.read_in_warp < warps[thread / 32]) return;
        if (p.several || p.reader != thread) report_race("writes what was read", thread, p.reader, text);
    }
    void note_writer(Location& p, uint32_t thread) {
        p.written = periods[thread / 32];
        p.written_in_warp = warps[thread / 32];
        p.writer = (uint16_t)thread;
        p.verified = 0;
    }
    void check(uint64_t at, uint32_t bytes, const std::string& text) const {
        if (at < RESERVED || at + bytes > bound) stop("an address is outside of the block's shared memory: " + text);
    }
    [[noreturn]] static void report_race(const char* what, uint32_t thread, uint32_t other, const std::string& text) {
        stop("a race in shared memory: thread " + std::to_string(thread) + " " + what + " by thread " + std::to_string(other) + " without a barrier in between: " + text);
    }
};
} // namespace ptx

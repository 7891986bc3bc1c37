// The virtual clock of the emulated driver; included by libcuda.cpp.
//
// With EMULATED_GPU_TIMELINE=h200 (or h100), no work is executed: memory is address space without
// content, copies to the host deliver zeros, and each piece of work only takes the time that
// costs.hpp estimates. The calls come from the real program, so their order, the streams, the
// events and the waits are those of a real run.
//
// Each thread of the host and each stream has a clock. A call advances the clock of its thread.
// Work starts when its stream has completed the previous work, and LAUNCH_LATENCY after its call.
// Waits and events advance the clock that waits. A thread that uses an event also continues no
// earlier than the thread that recorded it, which orders the threads of a program.
//
// Other ranks are not simulated. Collectives start as soon as this rank reaches them.
#pragma once
#include "costs.hpp"

// Virtual time of the calling thread in ns. Negative before its first call.
static thread_local double thread_ns = -1;

struct Timeline final : Clock {
    struct Interval {
        double start, end;
    };
    // Times since the last reset, in ns.
    std::map<std::string, double> spent;
    std::vector<Interval> main_work, collectives;
    double begin_ns = 0, latest_ns = 0;
    size_t peak_bytes = 0;
    Stream* main_stream = nullptr;

    double now() const { return std::max(thread_ns, 0.0); }
    // Advances the clock of the calling thread to the time `ns`, if that is later.
    void advance_to(double ns) {
        LOCKED;
        thread_ns = std::max(now(), ns);
        latest_ns = std::max(latest_ns, thread_ns);
    }
    void spend_on_host(double ns) override { advance_to(now() + ns); }
    void run(Stream* stream, const char* kind, double ns) override {
        LOCKED;
        double start = std::max(stream->end_ns, now() + costs::LAUNCH_LATENCY);
        bool is_main = stream == main_stream;
        if (is_main) spent["main:idle for the host"] += start - stream->end_ns;
        spent[(is_main ? "main:" : "side:") + std::string(kind)] += ns;
        stream->end_ns = start + ns;
        if (is_main) main_work.push_back({start, stream->end_ns});
        else if (!strcmp(kind, "collectives")) collectives.push_back({start, stream->end_ns});
    }
    // Enqueues a copy between the host and the GPU. The host waits for a copy to memory that is not
    // pinned.
    void copy_to_or_from_host(void* stream, size_t bytes, bool is_pinned) {
        enqueue_timed(stream, "copies to and from the host", costs::COPY_CALL, costs::pcie_ns((double)bytes));
        if (is_pinned) return;
        calls_["pageableCopy"]++;
        wait_on_host(((Stream*)stream)->end_ns);
    }
    void record(Event& event, Stream* stream) {
        spend_on_host(costs::EVENT_CALL);
        LOCKED;
        event.nanoseconds = (long)std::max(stream->end_ns, now());
        event.host_nanoseconds = (long)now();
        event.reached = ++event.recorded;
    }
    void make_stream_wait(Stream* stream, const Event& event) {
        spend_on_host(costs::EVENT_CALL);
        advance_to((double)event.host_nanoseconds);
        LOCKED;
        double wait = (double)event.nanoseconds - stream->end_ns;
        if (wait <= 0) return;
        if (stream == main_stream) spent["main:idle for events"] += wait;
        stream->end_ns += wait;
    }
    // Makes the calling thread wait until the time `ns`.
    void wait_on_host(double ns) {
        LOCKED;
        spent["host waits"] += 1;
        spent["host waits, ns"] += std::max(0.0, ns - now());
        advance_to(ns);
    }
    // Returns whether the calling thread sees the event as reached. A thread that only queries has
    // the latest time of all threads.
    bool is_reached(const Event& event) {
        LOCKED;
        if (thread_ns >= 0) spend_on_host(costs::QUERY_CALL);
        return (double)event.nanoseconds <= (thread_ns < 0 ? latest_ns : thread_ns);
    }
    // Starts the measurement at the time of the calling thread. All streams must be idle.
    void reset(const std::set<Stream*>& streams) {
        LOCKED;
        spent.clear(), main_work.clear(), collectives.clear();
        begin_ns = now();
        for (Stream* s : streams) s->end_ns = begin_ns;
    }
    // Returns the time in which both the main stream and a collective work.
    double overlap() {
        LOCKED;
        double sum = 0;
        size_t next = 0;
        for (const Interval& c : collectives) {
            while (next < main_work.size() && main_work[next].end <= c.start) next++;
            for (size_t i = next; i < main_work.size() && main_work[i].start < c.end; i++)
                sum += std::min(c.end, main_work[i].end) - std::max(c.start, main_work[i].start);
        }
        return sum;
    }
};

// The timeline, or null if work is executed.
static Timeline* timeline() {
    static Timeline* const known = [] {
        const char* gpu = getenv("EMULATED_GPU_TIMELINE");
        if (!gpu || !*gpu) return (Timeline*)nullptr;
        if (!costs::select_gpu(gpu)) emulator::stop("EMULATED_GPU_TIMELINE names an unknown GPU");
        return new Timeline;
    }();
    return known;
}

// Functions for tests. Names: "step" is the time since the last reset until the calling thread,
// "main" until the end of the main stream's work, "overlap" the time of collectives next to work of
// the main stream. Other names are those of Timeline::spent.
extern "C" __attribute__((visibility("default"))) double emulatedGpuTimeline(const char* name) {
    Timeline* t = timeline();
    if (!t) return NAN;
    std::string which(name);
    if (which == "step") return t->now() - t->begin_ns;
    if (which == "main") return t->main_stream->end_ns - t->begin_ns;
    if (which == "overlap") return t->overlap();
    if (which == "peak bytes") return (double)t->peak_bytes;
    LOCKED;
    return t->spent[which];
}
// Lists the kinds of work of the main stream and of the others since the last reset, one per line.
extern "C" __attribute__((visibility("default"))) const char* emulatedGpuTimelineNames() {
    static std::string names;
    LOCKED;
    names.clear();
    for (auto& [name, ns] : timeline()->spent) names += name + "\n";
    return names.c_str();
}
extern "C" __attribute__((visibility("default"))) void emulatedGpuSpendOnHost(double ns) { timeline()->spend_on_host(ns); }

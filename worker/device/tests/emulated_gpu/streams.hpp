// Streams and events of the emulated GPU, for all of its libraries and for the NCCL stub.
//
// By default work runs when it is enqueued. With EMULATED_GPU_LAG each stream has a separate
// thread, as on a GPU, and some streams wait before each piece of work, so that work that is not
// ordered by events overtakes them.
//
// EMULATED_GPU_LAG=main:100: the main stream of a GPU waits 100 µs before each piece of work.
// EMULATED_GPU_LAG=side:1000: every other stream waits 1000 µs.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

struct Stream;
// A captured piece of work: one node of a graph.
struct Node {
    std::function<void()> work;
    bool is_kernel = false;
    Stream* stream = nullptr; // that captured the work
};

// The virtual clock of the emulated GPU, for all of its libraries (timeline.hpp).
struct Clock {
    // Advances the clock of the calling thread.
    virtual void spend_on_host(double ns) = 0;
    // Adds work of the given kind and duration to the end of a stream.
    virtual void run(Stream* stream, const char* kind, double ns) = 0;
};

struct Stream {
    // Number of pieces of work that another library runs for this stream if it has no thread. Later
    // work waits for them.
    std::atomic<int> pending{0};
    bool threaded = false;
    unsigned lag = 0;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue; // the first one is running
    bool ends = false;
    std::thread thread;
    // While the stream is capturing: the recorded work, and whether a call made the capture
    // invalid.
    std::shared_ptr<std::vector<std::shared_ptr<Node>>> capture;
    bool invalid = false;
    // Takes GPU memory outside the pool, for other libraries. Returns false if there is not enough.
    bool (*take_library_memory)(size_t) = nullptr;
    // The virtual clock, or null if work is executed. With a clock, work only takes time.
    Clock* clock = nullptr;
    double end_ns = 0; // virtual time at which all work of the stream is complete

    void push(std::function<void()> work) {
        std::lock_guard<std::mutex> held(lock);
        queue.push_back(std::move(work));
        changed.notify_all();
    }
    // Blocks until all work of the stream is complete.
    void finish() {
        while (pending > 0) usleep(20);
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return queue.empty(); });
    }
    void run() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            changed.wait(held, [&] { return ends || !queue.empty(); });
            if (queue.empty()) break;
            std::function<void()>& work = queue.front(); // other threads only append
            held.unlock();
            if (lag) usleep(lag);
            work();
            held.lock();
            queue.pop_front();
            changed.notify_all();
        }
    }
};

static inline void* new_stream(bool side) {
    Stream* s = new Stream;
    const char* lag = getenv("EMULATED_GPU_LAG");
    if (!lag) return s;
    const char* kind = side ? "side:" : "main:";
    if (!strncmp(lag, kind, 5)) s->lag = (unsigned)atoi(lag + 5);
    s->threaded = true;
    s->thread = std::thread([s] { s->run(); });
    return s;
}
// Destroys a stream after all its work is complete, so that the library may be closed afterwards.
static inline void destroy_stream(void* stream) {
    Stream* s = (Stream*)stream;
    if (s->threaded) {
        {
            std::lock_guard<std::mutex> held(s->lock);
            s->ends = true;
            s->changed.notify_all();
        }
        s->thread.join();
    }
    delete s;
}
// Invalidates the capture of a capturing stream because of a call that cannot be captured. Returns
// false if the stream is not capturing.
static inline bool invalidate_capture(void* stream) {
    Stream* s = (Stream*)stream;
    if (!s || !s->capture) return false;
    return s->invalid = true;
}
// Enqueues `work`. It runs immediately unless the stream has a thread or is capturing.
static inline void enqueue(void* stream, std::function<void()> work) {
    Stream* s = (Stream*)stream;
    if (s && s->capture) return s->capture->push_back(std::make_shared<Node>(Node{std::move(work), false, s}));
    if (s && s->threaded) return s->push(std::move(work));
    while (s && s->pending > 0) usleep(20);
    work();
}

// Enqueues work that only takes time, `host_ns` for the calling thread and `ns` on the GPU.
static inline void enqueue_timed(void* stream, const char* kind, double host_ns, double ns) {
    Stream* s = (Stream*)stream;
    s->clock->spend_on_host(host_ns);
    enqueue(stream, [=] { s->clock->run(s, kind, ns); });
}

// An event: the number of times that it was recorded, and how many of these records were reached.
struct Event {
    std::atomic<long> recorded{0}, reached{0};
    std::atomic<long> nanoseconds{0}; // time at which it was reached last
    std::atomic<long> host_nanoseconds{0}; // with a virtual clock: time at which it was recorded last
    void wait(long turn) {
        while (reached < turn) usleep(5);
    }
};
typedef std::shared_ptr<Event> SharedEvent; // waiting streams keep it alive after its handle is destroyed

static inline void record(SharedEvent event, void* stream) {
    long turn = ++event->recorded;
    enqueue(stream, [event, turn] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->nanoseconds = now.tv_sec * 1000000000l + now.tv_nsec;
        event->reached = turn;
    });
}
static inline void wait_event(void* stream, SharedEvent event) {
    long turn = event->recorded;
    enqueue(stream, [event, turn] { event->wait(turn); });
}

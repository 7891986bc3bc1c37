// Streams and events of the emulated card, for all of its libraries (and the stand-in for NCCL).
//
// Work is done when it is asked for, unless CARD_LAG says otherwise: then each stream has a thread of its own, as on a card, and
// one kind of streams waits before each work, so that whatever doesn't wait for it in the card's own way goes ahead of it.
//
// CARD_LAG=main:100 the first stream of a card waits 100 µs before each work; side:1000 every other stream does.
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

// A piece of captured work.
struct Node {
    std::function<void()> work;
    bool is_kernel = false;
};

struct Stream {
    // Works that another library has put here where there is no thread, and not done: what comes behind them waits.
    std::atomic<int> pending{0};
    bool threaded = false;
    unsigned lag = 0;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> works; // the first is being done
    bool ends = false;
    std::thread thread;
    // While the stream is capturing: what it was asked for, none of which is done; and whether that was something forbidden.
    std::shared_ptr<std::vector<std::shared_ptr<Node>>> capture;
    bool invalid = false;

    void put(std::function<void()> work) {
        std::lock_guard<std::mutex> held(lock);
        works.push_back(std::move(work));
        changed.notify_all();
    }
    // Returns when everything is done.
    void finish() {
        while (pending > 0) usleep(20);
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return works.empty(); });
    }
    void run() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            changed.wait(held, [&] { return ends || !works.empty(); });
            if (works.empty()) break;
            std::function<void()>& work = works.front(); // others only add behind it
            held.unlock();
            if (lag) usleep(lag);
            work();
            held.lock();
            works.pop_front();
            changed.notify_all();
        }
    }
};

static inline void* new_stream(bool side) {
    Stream* s = new Stream;
    const char* said = getenv("CARD_LAG");
    if (!said) return s;
    const char* kind = side ? "side:" : "main:";
    if (!strncmp(said, kind, 5)) s->lag = (unsigned)atoi(said + 5);
    s->threaded = true;
    s->thread = std::thread([s] { s->run(); });
    return s;
}
// What was asked for is done first; the library may be closed after this.
static inline void end_stream(void* stream) {
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
// Is this stream capturing? Then what it can't capture is an error, and the end of it.
static inline bool spoils(void* stream) {
    Stream* s = (Stream*)stream;
    if (!s || !s->capture) return false;
    return s->invalid = true;
}
// Does `work` in its turn: at once, unless the stream has a thread or is capturing.
static inline void in_turn(void* stream, std::function<void()> work) {
    Stream* s = (Stream*)stream;
    if (s && s->capture) return s->capture->push_back(std::make_shared<Node>(Node{std::move(work)}));
    if (s && s->threaded) return s->put(std::move(work));
    while (s && s->pending > 0) usleep(20);
    work();
}

// How often an event was recorded, and how many of these records a stream has reached.
struct Event {
    std::atomic<long> recorded{0}, reached{0};
    std::atomic<long> nanoseconds{0}; // when it was reached last
    void wait(long turn) {
        while (reached < turn) usleep(5);
    }
};
typedef std::shared_ptr<Event> SharedEvent; // what waits for it outlives its handle

static inline void record(SharedEvent event, void* stream) {
    long turn = ++event->recorded;
    in_turn(stream, [event, turn] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->nanoseconds = now.tv_sec * 1000000000l + now.tv_nsec;
        event->reached = turn;
    });
}
static inline void follow(void* stream, SharedEvent event) {
    long turn = event->recorded;
    in_turn(stream, [event, turn] { event->wait(turn); });
}

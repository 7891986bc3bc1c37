// An emulated NCCL: its ranks are threads of one process, and its device memory is host memory. A
// collective runs, with real sums, when the last rank has enqueued it. Streams are those of the
// emulated GPU. fakeFault injects faults.
#include "streams.hpp"
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { NO_FAULT = 0, NO_ID = 1, NEVER_JOINS = 2, FAILS_LATER = 3, REJECTS_CALLS = 4, NEVER_DONE = 5 };

struct Id {
    char bytes[128];
};
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min, max;
    const char* net;
    int split, traffic_class; // the last is padding before 2.26
};
static_assert(sizeof(Config) == 48);
enum Kind { GATHER, SCATTER, REDUCE, BROADCAST, SEND, RECV };
struct Part {
    Kind kind;
    const void* send;
    void* recv;
    size_t count;
    int type, op, peer;
};
struct Work {
    std::vector<Part> parts;
    Stream* stream;
    bool arrived; // the stream has reached this work
    bool ended = false;

    void end() {
        ended = true;
        if (!stream->threaded) stream->pending--;
    }
};
struct Group;
struct Comm {
    std::shared_ptr<Group> group;
    int rank;
    bool aborted = false;
    int error = SUCCESS;
    std::vector<Work> works; // in the order of the calls
};
struct Group {
    int world;
    std::vector<Comm*> ranks;
    size_t done = 0;
    bool complete() const {
        for (Comm* c : ranks)
            if (!c) return false;
        return true;
    }
};

static std::mutex lock_;
static std::map<std::string, std::shared_ptr<Group>> groups;
static int fault = NO_FAULT, fault_rank = -1;
static std::atomic<int> live{0};
thread_local bool grouping = false;
thread_local std::vector<Part> recorded;
thread_local Comm* recorded_comm = nullptr;
thread_local Stream* recorded_stream = nullptr;
#define LOCKED std::lock_guard<std::mutex> guard(lock_)

API fakeFault(int which, int rank) {
    LOCKED;
    fault = which, fault_rank = rank;
    return SUCCESS;
}
// Number of communicators that were not aborted.
API fakeLive() { return live; }
extern "C" __attribute__((visibility("default"))) void* fakeStream() { return new Stream; }
API fakePending(void* stream) { return ((Stream*)stream)->pending; }

API ncclGetVersion(int* version) {
    const char* configured = getenv("FAKE_NCCL_VERSION");
    *version = configured ? atoi(configured) : 22703;
    return SUCCESS;
}
API ncclGetUniqueId(Id* id) {
    static int next = 0;
    LOCKED;
    if (fault == NO_ID) return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    strcpy(id->bytes, ("group " + std::to_string(++next)).c_str());
    return SUCCESS;
}
extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int code) {
    return code == REMOTE_ERROR ? "remote process exited or there was a network error"
           : code == INVALID_USAGE ? "invalid usage" : code == INVALID_ARGUMENT ? "invalid argument" : "unhandled system error";
}
extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(Comm*) { return fault ? "injected" : ""; }

API ncclCommInitRankConfig(Comm** comm, int world, Id id, int rank, Config* config) {
    LOCKED;
    if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0) return INVALID_ARGUMENT;
    for (int undefined : {config->cga, config->min, config->max, config->split, config->traffic_class})
        if (undefined != INT_MIN) return INVALID_ARGUMENT;
    auto& group = groups[id.bytes];
    if (!group) {
        group = std::make_shared<Group>();
        group->world = world;
        group->ranks.resize((size_t)world);
    }
    if (group->world != world || rank < 0 || rank >= world || group->ranks[(size_t)rank]) return INVALID_ARGUMENT;
    Comm* c = new Comm;
    c->group = group, c->rank = rank;
    if (!(fault == NEVER_JOINS && fault_rank == rank)) group->ranks[(size_t)rank] = c;
    live++;
    *comm = c;
    return IN_PROGRESS;
}
API ncclCommGetAsyncError(Comm* c, int* state) {
    LOCKED;
    *state = c->error ? c->error : c->group->complete() ? SUCCESS : IN_PROGRESS;
    if (fault == FAILS_LATER && fault_rank == c->rank && !c->works.empty()) *state = REMOTE_ERROR;
    return SUCCESS;
}
API ncclCommAbort(Comm* c) {
    LOCKED;
    if (c->aborted) abort(); // a second abort would be a use after free
    c->aborted = true;
    for (Work& work : c->works)
        if (!work.ended) work.end();
    live--;
    return SUCCESS; // not freed, because peers still read it
}

// --- enqueued work ------------------------------------------------------------------------------

static size_t size_of(int type) { return type == 1 ? 1 : type == 7 ? 4 : 2; }

static bool same_call(const Part& a, const Part& b) { return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op; }

// Sums in rank order.
static void sum(float* to, const std::vector<const Part*>& parts, size_t first, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float total = 0;
        for (const Part* p : parts) total += ((const float*)p->send)[first + i];
        to[i] = parts[0]->op == 4 ? total / (float)parts.size() : total;
    }
}

static bool collective(std::vector<const Part*> parts) {
    const Part& one = *parts[0];
    for (const Part* p : parts)
        if (!same_call(one, *p) || (one.kind == BROADCAST && one.peer != p->peer)) return false;
    size_t bytes = one.count * size_of(one.type), world = parts.size();
    std::vector<std::vector<char>> out(world);
    for (size_t r = 0; r < world; r++) {
        if (one.kind == GATHER)
            for (const Part* p : parts) out[r].insert(out[r].end(), (const char*)p->send, (const char*)p->send + bytes);
        if (one.kind == BROADCAST) out[r].assign((const char*)parts[(size_t)one.peer]->send, (const char*)parts[(size_t)one.peer]->send + bytes);
        if (one.kind == SCATTER || one.kind == REDUCE) {
            if (one.type != 7) return false;
            out[r].resize(bytes);
            sum((float*)out[r].data(), parts, one.kind == SCATTER ? r * one.count : 0, one.count);
        }
    }
    for (size_t r = 0; r < world; r++) memcpy(parts[r]->recv, out[r].data(), out[r].size());
    return true;
}

static bool point_to_point(Group& g, size_t at) {
    for (size_t to = 0; to < g.ranks.size(); to++)
        for (size_t from = 0; from < g.ranks.size(); from++) {
            std::vector<const Part*> sends, recvs;
            for (auto& p : g.ranks[from]->works[at].parts)
                if (p.kind == SEND && p.peer == (int)to) sends.push_back(&p);
            for (auto& p : g.ranks[to]->works[at].parts)
                if (p.kind == RECV && p.peer == (int)from) recvs.push_back(&p);
            if (sends.size() != recvs.size()) return false;
            for (size_t i = 0; i < sends.size(); i++) {
                if (sends[i]->count != recvs[i]->count || sends[i]->type != recvs[i]->type) return false;
                memcpy(recvs[i]->recv, sends[i]->send, sends[i]->count * size_of(sends[i]->type));
            }
        }
    return true;
}

// Runs the work that every rank has enqueued.
static void advance(Group& g) {
    if (!g.complete()) return;
    for (;;) {
        for (Comm* c : g.ranks)
            if (c->works.size() <= g.done || !c->works[g.done].arrived || c->aborted) return;
        std::vector<const Part*> first;
        for (Comm* c : g.ranks)
            if (!c->works[g.done].parts.empty()) first.push_back(&c->works[g.done].parts[0]);
        bool is_collective = first.size() == g.ranks.size() && first[0]->kind < SEND;
        bool is_valid = is_collective ? collective(first) : point_to_point(g, g.done);
        for (Comm* c : g.ranks) {
            Work& work = c->works[g.done];
            if (!is_valid) c->error = INVALID_USAGE;
            else if (!(fault == NEVER_DONE)) work.end();
        }
        if (!is_valid) return;
        g.done++;
    }
}

// A stream has reached some work, which begins when the streams of all ranks have reached it. Later
// work of the stream waits.
static void arrive(Comm* c, size_t at) {
    {
        LOCKED;
        c->works[at].arrived = true;
        advance(*c->group);
    }
    for (;; usleep(20)) {
        LOCKED;
        if (c->works[at].ended) return;
    }
}

static int enqueue(Comm* c, std::vector<Part> parts, Stream* stream) {
    LOCKED;
    if (fault == REJECTS_CALLS && fault_rank == c->rank) return SYSTEM_ERROR;
    if (c->aborted || !c->group->complete()) return INVALID_USAGE;
    size_t at = c->works.size();
    c->works.push_back({std::move(parts), stream, !stream->threaded});
    if (stream->threaded) {
        stream->push([c, at] { arrive(c, at); });
    } else {
        stream->pending++;
        advance(*c->group);
    }
    return SUCCESS;
}
static int record(Comm* c, Part part, Stream* stream) {
    if (!grouping) return enqueue(c, {part}, stream);
    recorded.push_back(part);
    recorded_comm = c, recorded_stream = stream;
    return SUCCESS;
}

API ncclGroupStart() {
    grouping = true;
    return SUCCESS;
}
API ncclGroupEnd() {
    grouping = false;
    std::vector<Part> parts;
    parts.swap(recorded);
    Comm* c = recorded_comm;
    recorded_comm = nullptr;
    return c ? enqueue(c, parts, recorded_stream) : SUCCESS;
}
API ncclAllGather(const void* send, void* recv, size_t count, int type, Comm* c, Stream* s) { return record(c, {GATHER, send, recv, count, type, 0, 0}, s); }
API ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, Comm* c, Stream* s) { return record(c, {SCATTER, send, recv, count, type, op, 0}, s); }
API ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, Comm* c, Stream* s) { return record(c, {REDUCE, send, recv, count, type, op, 0}, s); }
API ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, Comm* c, Stream* s) { return record(c, {BROADCAST, send, recv, count, type, 0, root}, s); }
API ncclSend(const void* send, size_t count, int type, int peer, Comm* c, Stream* s) { return record(c, {SEND, send, nullptr, count, type, 0, peer}, s); }
API ncclRecv(void* recv, size_t count, int type, int peer, Comm* c, Stream* s) { return record(c, {RECV, nullptr, recv, count, type, 0, peer}, s); }

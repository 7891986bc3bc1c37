// An emulated NCCL: its ranks are threads of one process, and its device memory is host memory. A
// collective runs, with real sums, when the last rank has enqueued it. Streams are those of the
// emulated GPU. fakeFault injects faults.
//
// With a virtual clock (EMULATED_GPU_TIMELINE), the process has one rank of a group, of which the
// other ranks do not exist. Collectives then only take time. EMULATED_GPU_HOST_RANKS=8: number of
// ranks per host.
#include "costs.hpp"
#include "streams.hpp"
#include <algorithm>
#include <chrono>
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
// Status codes that the emulated NCCL returns, with the values of nccl.h.
enum {
    SUCCESS = 0,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7
};
// Faults that fakeFault injects.
enum {
    NO_FAULT = 0,
    ID_FAILS = 1,
    NEVER_JOINS = 2,
    FAILS_LATER = 3,
    REJECTS_CALLS = 4,
    NEVER_DONE = 5,
    HANGS_AND_FAILS_LATER = 6 // work never ends, and the communicator fails after FAILURE_DELAY
};

struct UniqueId {
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
enum CallKind { GATHER, REDUCE_SCATTER, SEND, RECV };
// One recorded call of NCCL with its arguments: a collective, a send or a receive.
struct RecordedCall {
    CallKind kind;
    const void* send;
    void* recv;
    size_t count;
    int type, peer;
};
// The calls that one rank enqueued together, between ncclGroupStart and ncclGroupEnd or as a single
// call.
struct Work {
    std::vector<RecordedCall> parts;
    Stream* stream;
    bool arrived; // the stream has reached this work
    bool ended = false;
    std::chrono::steady_clock::time_point enqueued = std::chrono::steady_clock::now();

    void end() {
        ended = true;
        if (!stream->threaded) stream->pending--;
    }
};
// Returns whether the emulated GPU has a virtual clock.
static bool is_virtual() { return getenv("EMULATED_GPU_TIMELINE") != nullptr; }
struct Group;
// The communicator of one rank.
struct Comm {
    std::shared_ptr<Group> group;
    int rank;
    bool aborted = false;
    int error = SUCCESS;
    int polls_in_progress = 0; // how many polls report that the last call is in progress
    std::vector<Work> works; // in the order of the calls
    size_t done = 0;         // number of works that ran
};
// The ranks that joined with one unique id.
struct Group {
    int world;
    std::vector<Comm*> ranks;
    bool is_complete() const {
        if (is_virtual()) return true;
        for (Comm* c : ranks)
            if (!c) return false;
        return true;
    }
};

// As in NCCL 2.23 and later, a call of a non-blocking communicator is in progress when it returns.
// The number of polls until it is complete.
static const int POLLS_IN_PROGRESS = 2;
static const std::chrono::milliseconds FAILURE_DELAY{50};
static std::mutex lock_;
static std::map<std::string, std::shared_ptr<Group>> groups;
static int fault = NO_FAULT, fault_rank = -1;
// Number of all-gathers and reduce-scatters, and number of bytes that ranks sent to other ranks and
// to ranks of other hosts, since the process started.
static std::atomic<long long> gathers{0}, reduce_scatters{0}, sent_bytes{0}, sent_bytes_between_hosts{0};
static std::atomic<int> live_communicators{0}; // communicators that were not aborted
thread_local bool grouping = false;
thread_local std::vector<RecordedCall> recorded;
thread_local Comm* recorded_comm = nullptr;
thread_local Stream* recorded_stream = nullptr;
#define LOCKED std::lock_guard<std::mutex> guard(lock_)

// Injects a fault into one rank.
API fakeFault(int which, int rank) {
    LOCKED;
    fault = which, fault_rank = rank;
    return SUCCESS;
}
// Returns how many all-gathers or reduce-scatters the ranks called, or how many bytes they sent to
// other ranks.
extern "C" __attribute__((visibility("default"))) long long fakeReduceScatters() { return reduce_scatters; }
extern "C" __attribute__((visibility("default"))) long long fakeGathers() { return gathers; }
extern "C" __attribute__((visibility("default"))) long long fakeSentBytes() { return sent_bytes; }
// Returns how many bytes the ranks sent to ranks of other hosts.
extern "C" __attribute__((visibility("default"))) long long fakeSentBytesBetweenHosts() { return sent_bytes_between_hosts; }
// Returns the number of communicators that were not aborted.
API fakeLive() { return live_communicators; }
extern "C" __attribute__((visibility("default"))) void* fakeStream() { return new Stream; }
// Returns how many works that were enqueued on the stream have not ended.
API fakePending(void* stream) { return ((Stream*)stream)->pending; }

API ncclGetVersion(int* version) {
    const char* configured = getenv("FAKE_NCCL_VERSION");
    *version = configured ? atoi(configured) : 22703;
    return SUCCESS;
}
API ncclGetUniqueId(UniqueId* id) {
    static int next = 0;
    LOCKED;
    if (fault == ID_FAILS) return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    strcpy(id->bytes, ("group " + std::to_string(++next)).c_str());
    return SUCCESS;
}
extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int code) {
    return code == REMOTE_ERROR       ? "remote process exited or there was a network error"
           : code == INVALID_USAGE    ? "invalid usage"
           : code == INVALID_ARGUMENT ? "invalid argument"
                                      : "unhandled system error";
}
extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(Comm*) {
    return fault ? "injected" : "";
}

API ncclCommInitRankConfig(Comm** comm, int world, UniqueId id, int rank, Config* config) {
    LOCKED;
    if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0)
        return INVALID_ARGUMENT;
    for (int undefined :
         {config->cga, config->min, config->max, config->split, config->traffic_class})
        if (undefined != INT_MIN) return INVALID_ARGUMENT;
    auto& group = groups[id.bytes];
    if (!group) {
        group = std::make_shared<Group>();
        group->world = world;
        group->ranks.resize((size_t)world);
    }
    if (group->world != world || rank < 0 || rank >= world || group->ranks[(size_t)rank])
        return INVALID_ARGUMENT;
    Comm* c = new Comm;
    c->group = group, c->rank = rank;
    if (!(fault == NEVER_JOINS && fault_rank == rank)) group->ranks[(size_t)rank] = c;
    live_communicators++;
    *comm = c;
    return IN_PROGRESS;
}
API ncclCommGetAsyncError(Comm* c, int* state) {
    LOCKED;
    bool is_busy = !c->group->is_complete() || c->polls_in_progress > 0;
    if (c->polls_in_progress > 0) c->polls_in_progress--;
    *state = c->error ? c->error : is_busy ? IN_PROGRESS : SUCCESS;
    if (fault == FAILS_LATER && fault_rank == c->rank && !c->works.empty()) *state = REMOTE_ERROR;
    if (fault == HANGS_AND_FAILS_LATER && fault_rank == c->rank && !c->works.empty() &&
        std::chrono::steady_clock::now() - c->works.back().enqueued > FAILURE_DELAY)
        *state = REMOTE_ERROR;
    return SUCCESS;
}
API ncclCommAbort(Comm* c) {
    LOCKED;
    if (c->aborted) abort(); // a second abort would be a use after free
    c->aborted = true;
    for (Work& work : c->works)
        if (!work.ended) work.end();
    live_communicators--;
    return SUCCESS; // not freed, because peers still read it
}

// --- enqueued work ------------------------------------------------------------------------------

// Returns the size in bytes of an element of the given ncclDataType_t.
static size_t element_size(int type) { return type == 1 ? 1 : type == 7 ? 4 : 2; }

// Runs one all-gather with the calls of all ranks. Returns whether the calls match.
static bool run_all_gather(const std::vector<const RecordedCall*>& parts) {
    const RecordedCall& one = *parts[0];
    size_t bytes = one.count * element_size(one.type);
    std::vector<char> gathered;
    for (const RecordedCall* p : parts) {
        if (p->kind != GATHER || p->count != one.count || p->type != one.type) return false;
        gathered.insert(gathered.end(), (const char*)p->send, (const char*)p->send + bytes);
    }
    for (const RecordedCall* p : parts) memcpy(p->recv, gathered.data(), gathered.size());
    return true;
}

// Runs one reduce-scatter of f32 elements with the calls of all ranks. As in NCCL, the order of a
// sum depends on the number of ranks: each part is summed around the ring, beginning with the rank
// after its receiver. Returns whether the calls match.
static bool run_reduce_scatter(const std::vector<const RecordedCall*>& parts) {
    const RecordedCall& one = *parts[0];
    size_t world = parts.size(), count = one.count;
    std::vector<std::vector<float>> sums(world, std::vector<float>(count));
    for (const RecordedCall* p : parts)
        if (p->kind != REDUCE_SCATTER || p->count != count || p->type != 7) return false;
    for (size_t to = 0; to < world; to++)
        for (size_t step = 1; step <= world; step++) {
            const float* from = (const float*)parts[(to + step) % world]->send + to * count;
            for (size_t i = 0; i < count; i++) sums[to][i] += from[i];
        }
    for (size_t to = 0; to < world; to++) memcpy(parts[to]->recv, sums[to].data(), count * 4);
    return true;
}

// The ranks that take part in the same work.
typedef std::vector<Comm*> Ranks;
// Returns the next work of a rank, or null if the rank has not enqueued it or its stream has not
// reached it.
static Work* next_work(Comm* c) {
    bool is_ready = c->works.size() > c->done && c->works[c->done].arrived && !c->aborted;
    return is_ready ? &c->works[c->done] : nullptr;
}

// Runs the sends and receives of `ranks`. Returns whether each send matches a receive.
static bool run_point_to_point(const Ranks& ranks) {
    for (Comm* to : ranks)
        for (Comm* from : ranks) {
            std::vector<const RecordedCall*> sends, recvs;
            for (auto& p : next_work(from)->parts)
                if (p.kind == SEND && p.peer == to->rank) sends.push_back(&p);
            for (auto& p : next_work(to)->parts)
                if (p.kind == RECV && p.peer == from->rank) recvs.push_back(&p);
            if (sends.size() != recvs.size()) return false;
            for (size_t i = 0; i < sends.size(); i++) {
                const RecordedCall &send = *sends[i], &recv = *recvs[i];
                if (send.count != recv.count || send.type != recv.type) return false;
                memcpy(recv.recv, send.send, send.count * element_size(send.type));
            }
        }
    return true;
}

// Returns the ranks with which a rank exchanges data, directly or through other ranks, in their next
// work. Returns no rank if one of them is not ready to exchange data.
static Ranks find_exchanging_ranks(const Group& g, Comm* first) {
    Ranks found{first};
    for (size_t i = 0; i < found.size(); i++) {
        Work* work = next_work(found[i]);
        if (!work || work->parts[0].kind < SEND) return {};
        for (const RecordedCall& part : work->parts) {
            Comm* peer = g.ranks[(size_t)part.peer];
            Work* theirs = next_work(peer);
            auto is_mine = [&](const RecordedCall& p) { return p.kind >= SEND && p.peer == found[i]->rank; };
            // the peer may have another exchange before
            if (!theirs || std::none_of(theirs->parts.begin(), theirs->parts.end(), is_mine)) return {};
            if (std::find(found.begin(), found.end(), peer) == found.end()) found.push_back(peer);
        }
    }
    return found;
}

// Runs the next work of `ranks`. Returns whether their calls match.
static bool run_work(const Ranks& ranks) {
    std::vector<const RecordedCall*> first;
    for (Comm* c : ranks) first.push_back(&next_work(c)->parts[0]);
    bool is_valid = first[0]->kind >= SEND    ? run_point_to_point(ranks)
                    : first[0]->kind == GATHER ? run_all_gather(first)
                                               : run_reduce_scatter(first);
    for (Comm* c : ranks) {
        if (!is_valid) c->error = INVALID_USAGE;
        else if (fault != NEVER_DONE && fault != HANGS_AND_FAILS_LATER) next_work(c)->end();
        if (is_valid) c->done++;
    }
    return is_valid;
}

// Runs works in the order of each rank. A collective needs all ranks, and sends and receives need
// the ranks between which they are.
static void run_ready_work(Group& g) {
    if (!g.is_complete()) return;
    for (bool progressed = true; progressed;) {
        progressed = false;
        size_t ready = 0, collectives = 0;
        for (Comm* c : g.ranks) {
            Work* work = next_work(c);
            ready += work != nullptr;
            collectives += work && work->parts[0].kind < SEND;
        }
        if (collectives == g.ranks.size()) {
            if (!run_work(g.ranks)) return;
            progressed = true;
            continue;
        }
        for (Comm* c : g.ranks) {
            Ranks ranks = find_exchanging_ranks(g, c);
            if (ranks.empty()) continue;
            if (!run_work(ranks)) return;
            progressed = true;
        }
        if (!progressed && ready == g.ranks.size()) // the ranks called different functions
            for (Comm* c : g.ranks) c->error = INVALID_USAGE;
    }
}

// Marks the work `at` as reached by the rank's stream. The work begins when the streams of its
// ranks have reached it. Blocks the stream until the work has ended.
static void run_on_stream(Comm* c, size_t at) {
    {
        LOCKED;
        c->works[at].arrived = true;
        run_ready_work(*c->group);
    }
    for (;; usleep(20)) {
        LOCKED;
        if (c->works[at].ended) return;
    }
}

static int count_ranks_per_host() {
    const char* configured = getenv("EMULATED_GPU_HOST_RANKS");
    return configured ? atoi(configured) : 8;
}
// Estimates how long the GPU works on the calls of one NCCL group.
static double estimate_ns(const Comm& c, const std::vector<RecordedCall>& parts) {
    int world = c.group->world, ranks_per_host = count_ranks_per_host();
    double ns = 0, bytes = 0, bytes_between_hosts = 0;
    for (const RecordedCall& part : parts) {
        double size = (double)(part.count * element_size(part.type));
        if (part.kind < SEND) ns += costs::ring_ns(size * world, world, ranks_per_host);
        if (part.kind != SEND || part.peer == c.rank) continue;
        (part.peer / ranks_per_host == c.rank / ranks_per_host ? bytes : bytes_between_hosts) += size;
    }
    return ns > 0 ? ns : costs::exchange_ns(bytes, bytes_between_hosts);
}

// Enqueues the calls of one NCCL group on a stream as one work. Returns a status code.
static int enqueue(Comm* c, std::vector<RecordedCall> parts, Stream* stream) {
    LOCKED;
    if (fault == REJECTS_CALLS && fault_rank == c->rank) return SYSTEM_ERROR;
    // no call is allowed before the previous one is complete
    if (c->aborted || !c->group->is_complete() || c->polls_in_progress > 0) return INVALID_USAGE;
    for (const RecordedCall& part : parts) {
        if (part.kind == GATHER) gathers++;
        if (part.kind == REDUCE_SCATTER) reduce_scatters++;
        if (part.kind != SEND || part.peer == c->rank) continue;
        long long bytes = (long long)(part.count * element_size(part.type));
        sent_bytes += bytes;
        if (part.peer / count_ranks_per_host() != c->rank / count_ranks_per_host()) sent_bytes_between_hosts += bytes;
    }
    if (stream->clock) {
        enqueue_timed(stream, "collectives", costs::NCCL_CALL, estimate_ns(*c, parts));
        return SUCCESS;
    }
    size_t at = c->works.size();
    c->works.push_back({std::move(parts), stream, !stream->threaded});
    if (stream->threaded) {
        stream->push([c, at] { run_on_stream(c, at); });
    } else {
        stream->pending++;
        run_ready_work(*c->group);
    }
    c->polls_in_progress = POLLS_IN_PROGRESS;
    return IN_PROGRESS;
}
// Records a call if it is made between ncclGroupStart and ncclGroupEnd; otherwise enqueues the call
// at once.
static int record_or_enqueue(Comm* c, RecordedCall part, Stream* stream) {
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
    std::vector<RecordedCall> parts;
    parts.swap(recorded);
    Comm* c = recorded_comm;
    recorded_comm = nullptr;
    return c ? enqueue(c, parts, recorded_stream) : SUCCESS;
}
API ncclAllGather(const void* send, void* recv, size_t count, int type, Comm* c, Stream* s) {
    return record_or_enqueue(c, {GATHER, send, recv, count, type, 0}, s);
}
// The operation 0 is the sum.
API ncclReduceScatter(const void* send, void* recv, size_t count, int type, int operation, Comm* c, Stream* s) {
    if (operation != 0) return INVALID_ARGUMENT;
    return record_or_enqueue(c, {REDUCE_SCATTER, send, recv, count, type, 0}, s);
}
API ncclSend(const void* send, size_t count, int type, int peer, Comm* c, Stream* s) {
    return record_or_enqueue(c, {SEND, send, nullptr, count, type, peer}, s);
}
API ncclRecv(void* recv, size_t count, int type, int peer, Comm* c, Stream* s) {
    return record_or_enqueue(c, {RECV, nullptr, recv, count, type, peer}, s);
}

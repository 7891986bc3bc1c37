// A CUDA driver for the emulated GPU.
//
// GPU memory is host memory. Each allocation is filled with NaN and followed by an inaccessible
// page. Work runs when it is enqueued, or later (streams.hpp). Kernels run as C++ (emulator.hpp),
// or, if the image is PTX, as the compiler's instructions (ptx.hpp).
//
// EMULATED_GPU_VERSION=13000: the result of cuDriverGetVersion. EMULATED_GPU_COUNT=1: number of
// GPUs. EMULATED_GPU_MEMORY: bytes of GPU memory. EMULATED_GPU_CAPABILITY=89: compute capability
// (sm_89). EMULATED_GPU_POOLS=0: a GPU without memory pools. EMULATED_GPU_LIBRARY_BYTES: bytes of
// GPU memory that the first loaded module, and the first matmul, take outside the pool.
// EMULATED_GPU_FAILS=name:n: the n-th call of a function (from 1) fails with
// CUDA_ERROR_LAUNCH_FAILED. EMULATED_GPU_KERNEL_FAULT=kernel:fault: each launch of a kernel has a
// fault, see inject_fault. EMULATED_GPU_IDLE_LOADING=1: loading a module waits for all work, as
// NVIDIA's driver may do. EMULATED_GPU_TIMELINE=h200: work only takes virtual time (timeline.hpp).
#include "emulator.hpp"
#include "streams.hpp"
#include <algorithm>
#include <csignal>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unistd.h>
#include <utility>
#include "common.cuh"
#include "kernels.inc"
#include "ptx.hpp"

#define API extern "C" __attribute__((visibility("default"))) int
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_ISOLATION = 905
};

static std::recursive_mutex lock_;
#define LOCKED std::lock_guard<std::recursive_mutex> held(lock_)
#define MAY_FAIL(name) do { if (fails(name)) return LAUNCH_FAILED; } while (0)

// Rejects a call that cannot be captured. After that, the capture rejects every call.
#define FORBID_IN_CAPTURE(stream) do { if (invalidate_capture(stream)) return CAPTURE_UNSUPPORTED; } while (0)
#define REQUIRE_VALID_CAPTURE(stream) do { if (((Stream*)(stream))->capture && ((Stream*)(stream))->invalid) return CAPTURE_INVALIDATED; } while (0)

// Number of calls of each function that enqueues work, which `emulatedGpuCalls` returns for tests:
// emulatedGpuCalls("cuLaunchKernel").
static std::map<std::string, long> calls_;
#define COUNT_CALL(name) do { LOCKED; calls_[name]++; } while (0)
extern "C" __attribute__((visibility("default"))) long emulatedGpuCalls(const char* name) {
    LOCKED;
    return calls_[name];
}

static long setting(const char* name, long default_value) {
    const char* value = getenv(name);
    return value && *value ? strtol(value, nullptr, 10) : default_value;
}

static bool fails(const char* name) {
    static std::map<std::string, long> calls;
    const char* value = getenv("EMULATED_GPU_FAILS");
    if (!value) return false;
    std::string rule(value);
    size_t colon = rule.find(':');
    if (rule.substr(0, colon) != name) return false;
    return ++calls[name] == strtol(rule.c_str() + colon + 1, nullptr, 10);
}

// The error of a kernel that has failed. As on a GPU, every later call in this process returns it.
static std::atomic<int> sticky_error{0};
#define CHECK_STICKY do { if (int error = sticky_error) return error; } while (0)
// True if this thread has a current context, which most calls need.
static thread_local bool has_context = false;
#define CHECK_CONTEXT do { if (!has_context) return INVALID_CONTEXT; } while (0)
// True while a kernel runs that never ends. Later work does not run, and calls that wait never
// return.
static std::atomic<bool> is_hung{false};
static void wait_while_hung() {
    while (is_hung) pause();
}

// Returns a function that runs `body` under the driver's lock.
static std::function<void()> with_lock(std::function<void()> body) {
    return [body = std::move(body)] {
        LOCKED;
        body();
    };
}
// Enqueues work on GPU memory, which runs under the driver's lock.
static void enqueue_locked(void* stream, std::function<void()> body) {
    if (!is_hung && !sticky_error) enqueue(stream, with_lock(std::move(body)));
}

#include "timeline.hpp"

// --- memory ---------------------------------------------------------------------------------------

struct Allocation {
    uint8_t* map;
    size_t mapped, bytes;
};
static std::map<uintptr_t, Allocation> allocations;
static size_t allocated = 0;
// Sizes of freed blocks that the pool keeps. The pool reuses them only for requests of exactly the
// same size, which is the worst that a pool may do.
static std::multiset<size_t> pooled;
static size_t pooled_bytes = 0;

static size_t gpu_memory() { return (size_t)setting("EMULATED_GPU_MEMORY", timeline() ? 1l << 40 : 8l << 30); }

// Returns true if the range is within one allocation.
static bool is_allocated(uintptr_t at, size_t bytes) {
    auto next = allocations.upper_bound(at);
    if (next == allocations.begin()) return false;
    auto& [start, a] = *std::prev(next);
    return at + bytes <= start + a.bytes;
}

// Ranges of GPU memory that the running work may access: address and size.
static std::map<uintptr_t, size_t> mapped;
static bool is_accessible(uint64_t at, size_t bytes) {
    static thread_local std::pair<uintptr_t, size_t> last;
    auto inside = [&] { return at >= last.first && at + bytes <= last.first + last.second; };
    if (inside() && mapped.count(last.first)) return true;
    auto next = mapped.upper_bound(at);
    if (next == mapped.begin()) return false;
    last = *std::prev(next);
    return inside();
}

static bool has_pools() { return setting("EMULATED_GPU_POOLS", 1); }

// Takes memory for a library, outside the pool, until the process ends. Returns false if there is
// not enough.
static bool take_library_memory(size_t bytes) {
    LOCKED;
    if (allocated + pooled_bytes + bytes > gpu_memory()) return false;
    allocated += bytes;
    return true;
}

// Maps new GPU memory. The lock is held.
static int map_memory(uintptr_t* out, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    if (allocated + pooled_bytes + bytes > gpu_memory()) return OUT_OF_MEMORY;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page;
    int access = timeline() ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* map = mmap(nullptr, size + page, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect((uint8_t*)map + size, page, PROT_NONE);
    if (!timeline()) memset(map, 0xff, size);
    uintptr_t at = (uintptr_t)map + (size - (bytes + 15) / 16 * 16);
    allocations[at] = {(uint8_t*)map, size + page, bytes};
    mapped[at] = bytes;
    allocated += bytes;
    if (timeline()) timeline()->peak_bytes = std::max(timeline()->peak_bytes, allocated);
    *out = at;
    return SUCCESS;
}
API cuMemAllocAsync(uintptr_t* out, size_t bytes, void* stream) {
    COUNT_CALL("cuMemAllocAsync");
    CHECK_CONTEXT;
    CHECK_STICKY;
    FORBID_IN_CAPTURE(stream);
    LOCKED;
    MAY_FAIL("cuMemAllocAsync");
    if (!has_pools()) return NOT_SUPPORTED;
    if (timeline()) timeline()->spend_on_host(costs::MEMORY_CALL);
    if (auto same = pooled.find(bytes); same != pooled.end()) {
        pooled.erase(same);
        pooled_bytes -= bytes;
    }
    return map_memory(out, bytes);
}
API cuMemAlloc_v2(uintptr_t* out, size_t bytes) {
    CHECK_CONTEXT;
    LOCKED;
    int result = map_memory(out, bytes);
    if (result == SUCCESS) calls_["cuMemAlloc"]++;
    return result;
}
// Frees memory immediately. Work that still uses it then accesses unmapped memory.
API cuMemFree_v2(uintptr_t at) {
    COUNT_CALL("cuMemFree");
    CHECK_CONTEXT;
    LOCKED;
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID_VALUE;
    Allocation freed = found->second;
    allocations.erase(found);
    mapped.erase(at);
    allocated -= freed.bytes;
    munmap(freed.map, freed.mapped);
    return SUCCESS;
}
// Frees memory by unmapping it in the stream's order. Work of another stream that is not ordered
// after it then accesses unmapped memory.
API cuMemFreeAsync(uintptr_t at, void* stream) {
    COUNT_CALL("cuMemFreeAsync");
    CHECK_CONTEXT;
    CHECK_STICKY;
    FORBID_IN_CAPTURE(stream);
    Allocation freed;
    {
        LOCKED;
        auto found = allocations.find(at);
        if (found == allocations.end()) return INVALID_VALUE;
        freed = found->second;
        allocations.erase(found);
    }
    if (timeline()) timeline()->spend_on_host(costs::MEMORY_CALL);
    enqueue_locked(stream, [freed, at] {
        mapped.erase(at);
        allocated -= freed.bytes;
        pooled.insert(freed.bytes);
        pooled_bytes += freed.bytes;
        munmap(freed.map, freed.mapped);
    });
    return SUCCESS;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    CHECK_STICKY;
    LOCKED;
    *total = gpu_memory();
    *free = *total - allocated - pooled_bytes;
    return SUCCESS;
}
static std::map<uintptr_t, size_t> pinned;
static bool is_pinned(const void* at) {
    auto next = pinned.upper_bound((uintptr_t)at);
    return next != pinned.begin() && (uintptr_t)at < std::prev(next)->first + std::prev(next)->second;
}
API cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    COUNT_CALL("cuMemHostAlloc");
    CHECK_CONTEXT;
    LOCKED;
    if (posix_memalign(out, 4096, bytes ? bytes : 1)) return OUT_OF_MEMORY;
    if (timeline()) memset(*out, 0, bytes); // copies do not write it
    pinned[(uintptr_t)*out] = bytes ? bytes : 1;
    return SUCCESS;
}
API cuMemFreeHost(void* at) {
    LOCKED;
    if (!pinned.erase((uintptr_t)at)) return INVALID_VALUE;
    free(at);
    return SUCCESS;
}
// Copies from the host to GPU memory. Unpinned host memory is copied before the call returns,
// pinned memory when the copy runs.
API cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
    COUNT_CALL("cuMemcpyHtoDAsync");
    CHECK_CONTEXT;
    CHECK_STICKY;
    FORBID_IN_CAPTURE(stream); // a GPU would read the host's memory at each launch
    std::vector<uint8_t> snapshot;
    {
        LOCKED;
        MAY_FAIL("cuMemcpyHtoDAsync");
        if (!is_allocated(to, bytes)) return INVALID_VALUE;
        if (timeline()) return timeline()->copy_to_or_from_host(stream, bytes, is_pinned(from)), SUCCESS;
        if (!is_pinned(from)) {
            calls_["pageableCopy"]++;
            snapshot.assign((const uint8_t*)from, (const uint8_t*)from + bytes);
        }
    }
    enqueue_locked(stream, [=, snapshot = std::move(snapshot)] { memcpy((void*)to, snapshot.empty() ? from : snapshot.data(), bytes); });
    return SUCCESS;
}
API cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
    COUNT_CALL("cuMemcpyDtoHAsync");
    CHECK_CONTEXT;
    CHECK_STICKY;
    FORBID_IN_CAPTURE(stream);
    bool is_async;
    {
        LOCKED;
        MAY_FAIL("cuMemcpyDtoHAsync");
        if (!is_allocated(from, bytes)) return INVALID_VALUE;
        is_async = is_pinned(to);
        if (timeline()) {
            if (!is_async) memset(to, 0, bytes);
            return timeline()->copy_to_or_from_host(stream, bytes, is_async), SUCCESS;
        }
        if (!is_async) calls_["pageableCopy"]++;
    }
    enqueue_locked(stream, [=] { memcpy(to, (void*)from, bytes); });
    if (!is_async) {
        wait_while_hung();
        ((Stream*)stream)->finish();
        CHECK_STICKY;
    }
    return SUCCESS;
}
API cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
    COUNT_CALL("cuMemcpyDtoDAsync");
    CHECK_CONTEXT;
    CHECK_STICKY;
    REQUIRE_VALID_CAPTURE(stream);
    {
        LOCKED;
        if (!is_allocated(to, bytes) || !is_allocated(from, bytes)) return INVALID_VALUE;
        if (to < from + bytes && from < to + bytes && bytes) return INVALID_VALUE; // undefined on a GPU
    }
    if (timeline()) return enqueue_timed(stream, "copies", costs::COPY_CALL, costs::transfer_ns(2.0 * (double)bytes)), SUCCESS;
    enqueue_locked(stream, [=] { memcpy((void*)to, (void*)from, bytes); });
    return SUCCESS;
}
API cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, void* stream) {
    COUNT_CALL("cuMemsetD8Async");
    CHECK_CONTEXT;
    CHECK_STICKY;
    REQUIRE_VALID_CAPTURE(stream);
    {
        LOCKED;
        if (!is_allocated(to, bytes)) return INVALID_VALUE;
    }
    if (timeline()) return enqueue_timed(stream, "copies", costs::FILL_CALL, costs::transfer_ns((double)bytes)), SUCCESS;
    enqueue_locked(stream, [=] { memset((void*)to, value, bytes); });
    return SUCCESS;
}

// --- the GPU, streams and events -------------------------------------------------------------------

API cuInit(unsigned) { return setting("EMULATED_GPU_COUNT", 1) > 0 ? SUCCESS : NO_DEVICE; }
API cuDriverGetVersion(int* version) {
    *version = (int)setting("EMULATED_GPU_VERSION", 13000);
    return SUCCESS;
}
API cuDeviceGetCount(int* count) {
    *count = (int)setting("EMULATED_GPU_COUNT", 1);
    return SUCCESS;
}
API cuDeviceGet(int* device, int index) {
    *device = index;
    return index < setting("EMULATED_GPU_COUNT", 1) ? SUCCESS : 101;
}
API cuDeviceGetName(char* name, int size, int) {
    snprintf(name, (size_t)size, "Emulated GPU");
    return SUCCESS;
}
API cuDeviceGetPCIBusId(char* id, int size, int) {
    snprintf(id, (size_t)size, "00000000:0F:00.0");
    return SUCCESS;
}
API cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = gpu_memory();
    return SUCCESS;
}
// Returns the compute capability times 10: Hopper if kernels are interpreted as PTX, and Ada if
// they run as C++, because the kernels for Hopper have no C++ form.
static int compute_capability() {
    static const int known = [] {
        Dl_info here;
        dladdr((void*)cuInit, &here);
        std::string path(here.dli_fname), directory = path.substr(0, path.rfind('/')) + "/nvrtc";
        return access(directory.c_str(), F_OK) ? 89 : 90;
    }();
    return (int)setting("EMULATED_GPU_CAPABILITY", timeline() ? 90 : known);
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 16: *value = timeline() ? costs::gpu.multiprocessors : 4; break;
    case 38: *value = timeline() ? (int)costs::gpu.l2_cache : 256 << 10; break; // so small that the heads of a test do not all fit
    case 75: *value = compute_capability() / 10; break;
    case 76: *value = compute_capability() % 10; break;
    case 97: *value = 227 << 10; break;   // shared memory per block, opted in
    case 115: *value = has_pools(); break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
// Set if this thread has opened the context but no stream. The first stream is the main stream.
static thread_local bool opens_main_stream = false;
API cuDevicePrimaryCtxRetain(void** context, int) {
    static int context_;
    opens_main_stream = true;
    *context = &context_;
    return SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxSetCurrent(void* context) {
    has_context = context;
    return SUCCESS;
}
API cuDeviceGetDefaultMemPool(void** pool, int) {
    static int pool_;
    *pool = &pool_;
    return SUCCESS;
}
API cuMemPoolTrimTo(void*, size_t least) {
    LOCKED;
    if (least || !has_pools()) return INVALID_VALUE;
    pooled.clear();
    pooled_bytes = 0;
    return SUCCESS;
}
// Accepts an unlimited release threshold, and turning off waits between streams for reuse.
API cuMemPoolSetAttribute(void*, int attribute, void* value) {
    if (!has_pools()) return INVALID_VALUE;
    return attribute == 4 || (attribute == 3 && !*(int*)value) ? SUCCESS : INVALID_VALUE;
}
static std::set<Stream*> streams;
static void* open_stream() {
    bool is_main = std::exchange(opens_main_stream, false);
    Stream* s = (Stream*)new_stream(!is_main);
    s->take_library_memory = take_library_memory;
    LOCKED;
    s->clock = timeline();
    if (timeline() && is_main) timeline()->main_stream = s;
    streams.insert(s);
    return s;
}
API cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
    CHECK_CONTEXT;
    if (priority < -5 || priority > 0) return INVALID_VALUE;
    *stream = open_stream();
    return SUCCESS;
}
// Waits for all streams. A stream must not be capturing.
static int wait_for_all_streams() {
    std::set<Stream*> open;
    {
        LOCKED;
        open = streams;
    }
    for (Stream* s : open) {
        FORBID_IN_CAPTURE(s);
        if (timeline()) timeline()->wait_on_host(s->end_ns);
        s->finish();
    }
    return SUCCESS;
}
API cuCtxSynchronize() {
    COUNT_CALL("cuCtxSynchronize");
    CHECK_CONTEXT;
    return wait_for_all_streams();
}
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return SUCCESS;
}
API cuStreamDestroy_v2(void* stream) {
    {
        LOCKED;
        streams.erase((Stream*)stream);
    }
    destroy_stream(stream);
    return SUCCESS;
}
API cuStreamSynchronize(void* stream) {
    COUNT_CALL("cuStreamSynchronize");
    FORBID_IN_CAPTURE(stream);
    if (timeline()) timeline()->wait_on_host(((Stream*)stream)->end_ns);
    wait_while_hung();
    ((Stream*)stream)->finish();
    CHECK_STICKY;
    LOCKED;
    MAY_FAIL("cuStreamSynchronize");
    return SUCCESS;
}
API cuEventCreate(void** event, unsigned) {
    CHECK_CONTEXT;
    *event = new SharedEvent(new Event);
    return SUCCESS;
}
API cuEventDestroy_v2(void* event) {
    delete (SharedEvent*)event;
    return SUCCESS;
}
API cuEventRecord(void* event, void* stream) {
    CHECK_CONTEXT;
    CHECK_STICKY;
    FORBID_IN_CAPTURE(stream); // a GPU would make it an event of the capture, which cannot be waited for
    if (timeline()) timeline()->record(**(SharedEvent*)event, (Stream*)stream);
    else record(*(SharedEvent*)event, stream);
    return SUCCESS;
}
API cuEventSynchronize(void* event) {
    COUNT_CALL("cuEventSynchronize");
    SharedEvent shared = *(SharedEvent*)event;
    if (timeline()) timeline()->wait_on_host((double)shared->nanoseconds);
    wait_while_hung();
    shared->wait(shared->recorded);
    CHECK_STICKY;
    return SUCCESS;
}
API cuEventQuery(void* event) {
    CHECK_STICKY;
    if (is_hung) return NOT_READY;
    Event& e = **(SharedEvent*)event;
    if (timeline()) return timeline()->is_reached(e) ? SUCCESS : NOT_READY;
    return e.reached == e.recorded ? SUCCESS : NOT_READY;
}
API cuEventElapsedTime(float* ms, void* from, void* to) {
    if (cuEventQuery(from) || cuEventQuery(to)) return NOT_READY;
    *ms = (float)((double)((*(SharedEvent*)to)->nanoseconds - (*(SharedEvent*)from)->nanoseconds) * 1e-6);
    return SUCCESS;
}
API cuStreamWaitEvent(void* stream, void* event, unsigned) {
    if (invalidate_capture(stream)) return CAPTURE_ISOLATION;
    if (timeline()) timeline()->make_stream_wait((Stream*)stream, **(SharedEvent*)event);
    else wait_event(stream, *(SharedEvent*)event);
    return SUCCESS;
}
API cuGetErrorName(int code, const char** name) {
    switch (code) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    case CAPTURE_UNSUPPORTED: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
    case CAPTURE_INVALIDATED: *name = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
API cuGetErrorString(int code, const char** text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : "an error of the emulated GPU";
    return SUCCESS;
}

// --- kernels --------------------------------------------------------------------------------------

// Launch configuration of a kernel: blocks, threads per block, and bytes of shared memory per
// block.
struct Shape {
    unsigned grid[3], threads[3], shared;
};
struct Kernel {
    std::function<std::function<void(const Shape&)>(void**)> bind; // copies the arguments
    long shared = 48 << 10;
    std::string name;
};

template <class... A, size_t... I> static std::function<void()> bind_arguments(void (*f)(A...), void** arguments, std::index_sequence<I...>) {
    std::tuple<std::remove_const_t<A>...> copies(*(std::remove_const_t<A>*)arguments[I]...);
    return [=] { std::apply(f, copies); };
}
template <class... A> static Kernel kernel(void (*f)(A...)) {
    return {[f](void** arguments) {
        return [body = bind_arguments(f, arguments, std::index_sequence_for<A...>())](const Shape& s) {
            emulator::launch({s.grid[0], s.grid[1], s.grid[2]}, {s.threads[0], s.threads[1], s.threads[2]}, s.shared, body);
        };
    }};
}
static Kernel kernel(const ptx::Kernel& k) {
    return {[&k](void** arguments) {
        std::vector<uint8_t> parameters(k.parameter_bytes);
        for (size_t i = 0; i < k.parameters.size(); i++) {
            auto [begin, end] = k.parameters[i];
            memcpy(&parameters[begin], arguments[i], end - begin);
        }
        return [&k, parameters](const Shape& s) {
            const char* order = getenv("EMULATED_GPU_ORDER");
            ptx::run_grid(k, parameters, s.grid, s.threads, s.shared, is_accessible, order && *order == '1');
        };
    }};
}
static Kernel named(Kernel kernel, const std::string& name) {
    kernel.name = name;
    return kernel;
}
#define ENTRY(file, name) {#file "/" #name, named(kernel(file::name), #name)},
static const std::map<std::string, Kernel> sources = {KERNELS(ENTRY)};

struct Module {
    ptx::Module ptx;
    std::map<std::string, Kernel> kernels;
};

// Loads an image. An image is the output of the emulated compiler ("EMULATED file") or PTX.
API cuModuleLoadData(void** module, const void* image) {
    if (setting("EMULATED_GPU_IDLE_LOADING", 0))
        if (int error = wait_for_all_streams()) return error;
    LOCKED;
    MAY_FAIL("cuModuleLoadData");
    CHECK_CONTEXT;
    CHECK_STICKY;
    static bool loaded = false;
    if (!loaded) loaded = take_library_memory((size_t)setting("EMULATED_GPU_LIBRARY_BYTES", 0));
    if (!loaded) return OUT_OF_MEMORY;
    const char* text = (const char*)image;
    Module* m = new Module;
    *module = m;
    if (!strncmp(text, "EMULATED ", 9)) {
        std::string prefix = std::string(text + 9) + "/";
        for (auto& [name, k] : sources)
            if (!name.compare(0, prefix.size(), prefix)) m->kernels[name.substr(prefix.size())] = k;
    } else if (strstr(text, ".version")) {
        m->ptx = ptx::parse_module(text);
        for (auto& [name, k] : m->ptx.kernels) m->kernels[name] = named(kernel(k), name);
    } else {
        return INVALID_IMAGE;
    }
    return SUCCESS;
}
API cuModuleUnload(void* module) {
    delete (Module*)module;
    return SUCCESS;
}
API cuModuleGetFunction(void** function, void* module, const char* name) {
    auto& kernels = ((Module*)module)->kernels;
    auto found = kernels.find(name);
    if (found == kernels.end() && timeline()) { // a kernel without a C++ form takes time, too
        found = kernels.emplace(name, Kernel{}).first;
        found->second.name = name;
    }
    if (found == kernels.end()) return NOT_FOUND;
    *function = &found->second;
    return SUCCESS;
}
// The static shared memory that every kernel appears to have.
static const int STATIC_SHARED = 1024;
API cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8 || value > (227 << 10) - STATIC_SHARED) return INVALID_VALUE;
    ((Kernel*)function)->shared = value;
    return SUCCESS;
}
// The resources of a kernel, which the emulator does not know: every kernel uses 64 registers of a
// multiprocessor with 64 Ki registers, static shared memory, and no local memory.
API cuFuncGetAttribute(int* value, int attribute, void*) {
    switch (attribute) {
    case 0: *value = 1024; break; // threads per block
    case 1: *value = STATIC_SHARED; break;
    case 3: *value = 0; break;    // local memory
    case 4: *value = 64; break;   // registers
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t shared) {
    if (threads < 1 || threads > 1024 || shared > 227 << 10) return INVALID_VALUE;
    *blocks = std::min(1024 / threads, shared ? (int)((227 << 10) / shared) : 32);
    return SUCCESS;
}
// Returns a launch with copies of its arguments, or null if a GPU would reject the launch.
static std::function<void()> bind_launch(Kernel* k, const Shape& s, void** arguments, Stream* stream) {
    auto [gx, gy, gz] = s.grid;
    auto [bx, by, bz] = s.threads;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || bx * by * bz > 1024 || s.shared > k->shared) return nullptr;
    if (timeline()) {
        costs::Work work = costs::kernel_work(k->name, s.grid, s.threads, arguments);
        return [=] { timeline()->run(stream, work.kind, work.ns); };
    }
    return [=, body = k->bind(arguments)] { body(s); };
}
// Applies the fault of EMULATED_GPU_KERNEL_FAULT to a launch of its kernel. The faults:
// hang: the kernel never ends.
// illegal: the kernel accesses an illegal address.
// wrong: the kernel changes the first elements of its first tensor after its end.
// crash: the process gets SIGSEGV.
// exit: the process ends with exit code 0.
// noise: the library prints lines to stdout, one of them without an end of line.
static std::function<void()> inject_fault(Kernel* k, void** arguments, std::function<void()> body) {
    const char* rule = getenv("EMULATED_GPU_KERNEL_FAULT");
    if (!rule || strncmp(rule, (k->name + ":").c_str(), k->name.size() + 1)) return body;
    std::string fault = rule + k->name.size() + 1;
    if (fault == "hang") return [] { is_hung = true; };
    if (fault == "illegal") return [] { sticky_error = ILLEGAL_ADDRESS; };
    if (fault == "wrong") {
        uintptr_t at = *(uintptr_t*)arguments[0];
        return [=, body = std::move(body)] {
            body();
            if (is_allocated(at, 4)) *(uint16_t*)at = *((uint16_t*)at + 1) = 0x4170; // 15 as bf16
        };
    }
    if (fault == "crash") raise(SIGSEGV);
    if (fault == "exit") _exit(0);
    if (fault == "noise") {
        printf("a library's warning\n\xff\xfe\ngpu-check-message {\"message\": \"unknown\"}\nno end of line");
        fflush(stdout);
    }
    return body;
}
API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream,
                   void** arguments, void**) {
    Kernel* k = (Kernel*)function;
    COUNT_CALL("cuLaunchKernel");
    CHECK_CONTEXT;
    CHECK_STICKY;
    REQUIRE_VALID_CAPTURE(stream);
    {
        LOCKED;
        MAY_FAIL("cuLaunchKernel");
    }
    std::function<void()> body = bind_launch(k, {{gx, gy, gz}, {bx, by, bz}, shared}, arguments, (Stream*)stream);
    if (!body) return INVALID_VALUE;
    if (timeline()) timeline()->spend_on_host(costs::LAUNCH_CALL);
    enqueue_locked(stream, inject_fault(k, arguments, std::move(body)));
    if (((Stream*)stream)->capture) ((Stream*)stream)->capture->back()->is_kernel = true;
    if (setting("CUDA_LAUNCH_BLOCKING", 0) && !((Stream*)stream)->capture) return cuStreamSynchronize(stream);
    return SUCCESS;
}

#include "graphs.hpp"
// Starts the measurement of the virtual clock. All streams must be idle.
extern "C" __attribute__((visibility("default"))) void emulatedGpuResetTimeline() {
    LOCKED;
    timeline()->reset(streams);
    timeline()->peak_bytes = allocated;
}

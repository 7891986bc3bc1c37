// cuDNN for the emulated GPU: executes the operations of a graph one after the other, each by its
// definition.
//
// It accepts any graph of known operations. It rejects missing attributes, shapes that do not
// match, and tensors without an address. Tensors in memory are accessed by their strides; virtual
// tensors are rounded to their type.
//
// EMULATED_GPU_CUDNN=91900: the result of cudnnGetVersion.
// EMULATED_GPU_FAILS: the name of a function that fails, `cuDNN has no plan` or `cuDNN is wrong`.
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include "emulator.hpp"
#include "streams.hpp"
#include "common.cuh"

#define API extern "C" __attribute__((visibility("default"))) int
enum { SUCCESS = 0, NOT_INITIALIZED = 1001, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
// CUDNN_BACKEND_…_DESCRIPTOR.
enum {
    POINTWISE = 0, CONFIG = 3, HEURISTICS = 4, PLAN = 5, POINTWISE_OPERATION = 13, GRAPH = 15, PACK = 16, TENSOR = 17, MATMUL = 18,
    MATMUL_OPERATION = 19, REDUCTION = 21, REDUCTION_OPERATION = 22, RESHAPE_OPERATION = 31
};
// CUDNN_TYPE_…: types of attributes.
enum { OF_HANDLE = 0, OF_DATA = 1, OF_BOOL = 2, OF_INT64 = 3, OF_POINTER = 6, OF_HEURISTICS = 8, OF_POINTWISE = 14, OF_DESC = 15, OF_REDUCTION = 18 };
// CUDNN_DATA_…: types of tensors.
enum { FLOAT = 0, INT32 = 4, BFLOAT16 = 9, BOOLEAN = 11 };

struct Desc {
    int kind = 0;
    bool finished = false;
    std::map<int, std::vector<uint8_t>> values;
    std::map<int, std::vector<std::shared_ptr<Desc>>> parts;

    template <typename T> T one(int attribute) const {
        T value;
        memcpy(&value, values.at(attribute).data(), sizeof value);
        return value;
    }
    template <typename T> std::vector<T> all(int attribute) const {
        std::vector<T> value(values.at(attribute).size() / sizeof(T));
        memcpy(value.data(), values.at(attribute).data(), value.size() * sizeof(T));
        return value;
    }
    const Desc& part(int attribute) const { return *parts.at(attribute)[0]; }
};
// A descriptor's handle. A descriptor keeps the ones that it refers to.
typedef std::shared_ptr<Desc> SharedDesc;

static thread_local std::string last_error;
static int fail(int code, const char* reason) {
    last_error = reason;
    return code;
}
#define NEED(condition) \
    if (!(condition)) return fail(BAD_PARAM, #condition)

struct Handle {
    void* stream = nullptr;
};

extern "C" __attribute__((visibility("default"))) size_t cudnnGetVersion() {
    const char* version = getenv("EMULATED_GPU_CUDNN");
    return version ? strtoul(version, nullptr, 10) : 91900;
}
extern "C" __attribute__((visibility("default"))) const char* cudnnGetErrorString(int code) {
    return code == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : code == BAD_PARAM ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS";
}
extern "C" __attribute__((visibility("default"))) void cudnnGetLastErrorString(char* message, size_t size) {
    if (size) snprintf(message, size, "%s", last_error.c_str());
    last_error.clear();
}
static bool fails(const char* function) {
    const char* value = getenv("EMULATED_GPU_FAILS");
    return value && !strcmp(value, function);
}
API cudnnCreate(void** handle) {
    if (fails("cudnnCreate")) return fail(NOT_INITIALIZED, "requested by EMULATED_GPU_FAILS");
    *handle = new Handle;
    return SUCCESS;
}
API cudnnDestroy(void* handle) {
    delete (Handle*)handle;
    return SUCCESS;
}
API cudnnSetStream(void* handle, void* stream) {
    ((Handle*)handle)->stream = stream;
    return SUCCESS;
}
API cudnnBackendCreateDescriptor(int kind, void** desc) {
    static const std::set<int> known = {POINTWISE, CONFIG, HEURISTICS, PLAN, POINTWISE_OPERATION, GRAPH, PACK, TENSOR, MATMUL,
                                        MATMUL_OPERATION, REDUCTION, REDUCTION_OPERATION, RESHAPE_OPERATION};
    if (!known.count(kind)) return fail(NOT_SUPPORTED, "unknown kind of descriptor");
    SharedDesc created = std::make_shared<Desc>();
    created->kind = kind;
    *desc = new SharedDesc(created);
    return SUCCESS;
}
API cudnnBackendDestroyDescriptor(void* desc) {
    delete (SharedDesc*)desc;
    return SUCCESS;
}

// Bytes of a value of an attribute type.
static size_t size_of(int type) {
    switch (type) {
    case OF_BOOL: return 1;
    case OF_DATA: case OF_HEURISTICS: case OF_POINTWISE: case OF_REDUCTION: return 4;
    case OF_HANDLE: case OF_INT64: case OF_POINTER: case OF_DESC: return 8;
    default: return 0;
    }
}
// The type of an attribute's values.
static int type_of(int attribute) {
    switch (attribute) {
    case 0: return OF_POINTWISE;
    case 1: case 901: case 1500: case 1601: return OF_DATA;
    case 9: case 902: case 903: case 900: case 906: case 1000: return OF_INT64;
    case 200: return OF_HEURISTICS;
    case 400: case 800: return OF_HANDLE;
    case 907: case 908: return OF_BOOL;
    case 1001: case 1003: return OF_POINTER;
    case 1600: return OF_REDUCTION;
    default: return OF_DESC;
    }
}
API cudnnBackendSetAttribute(void* desc, int attribute, int type, int64_t count, const void* values) {
    Desc& d = **(SharedDesc*)desc;
    NEED(!d.finished);
    NEED(count > 0 && type_of(attribute) == type && size_of(type));
    if (type == OF_DESC) {
        std::vector<SharedDesc> parts;
        for (int64_t i = 0; i < count; i++) parts.push_back(*((SharedDesc**)values)[i]);
        for (SharedDesc& part : parts) NEED(part->finished);
        d.parts[attribute] = parts;
    } else {
        const uint8_t* bytes = (const uint8_t*)values;
        d.values[attribute].assign(bytes, bytes + count * size_of(type));
    }
    return SUCCESS;
}

// --- tensors --------------------------------------------------------------------------------------

typedef std::array<int64_t, 4> Four;
struct Shape {
    int type;
    Four dims, strides;
    int64_t id, alignment;
    bool is_virtual, by_value;
    int64_t count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
    int64_t offset(Four at) const { return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3]; }
    int64_t bytes() const { return type == BFLOAT16 ? 2 : 4; }
};
static Shape shape(const Desc& d) {
    Shape s;
    s.type = d.one<int>(901), s.id = d.one<int64_t>(906), s.alignment = d.one<int64_t>(900);
    s.is_virtual = d.one<bool>(907), s.by_value = d.one<bool>(908);
    for (int i = 0; i < 4; i++) s.dims[i] = d.all<int64_t>(902)[i], s.strides[i] = d.all<int64_t>(903)[i];
    return s;
}
static float rounded(int type, float x) {
    return type == BFLOAT16 ? from_bf16(to_bf16(x)) : type == INT32 ? (float)(int)x : type == BOOLEAN ? (float)(x != 0) : x;
}
template <typename F> static void each(Four dims, F f) {
    int64_t n = 0;
    Four at;
    for (at[0] = 0; at[0] < dims[0]; at[0]++)
        for (at[1] = 0; at[1] < dims[1]; at[1]++)
            for (at[2] = 0; at[2] < dims[2]; at[2]++)
                for (at[3] = 0; at[3] < dims[3]; at[3]++) f(at, n++);
}

// One execution of a graph: addresses of tensors, scalars, and contents of virtual tensors.
struct Execution {
    std::map<int64_t, void*> memory;
    std::map<int64_t, float> scalars;
    std::map<int64_t, std::vector<float>> virtuals;

    // A tensor's elements in the order of their indices.
    std::vector<float> read(const Shape& s) {
        if (s.is_virtual) return virtuals.at(s.id);
        if (s.by_value) return {scalars.at(s.id)};
        std::vector<float> all(s.count());
        uint8_t* at = (uint8_t*)memory.at(s.id);
        each(s.dims, [&](Four i, int64_t n) {
            uint8_t* where = at + s.offset(i) * s.bytes();
            all[n] = s.type == BFLOAT16 ? from_bf16(*(uint16_t*)where) : *(float*)where;
        });
        return all;
    }
    void write(const Shape& s, const std::vector<float>& all) {
        if (s.is_virtual) {
            std::vector<float>& to = virtuals[s.id];
            to = all;
            for (float& x : to) x = rounded(s.type, x);
            return;
        }
        uint8_t* at = (uint8_t*)memory.at(s.id);
        each(s.dims, [&](Four i, int64_t n) {
            uint8_t* where = at + s.offset(i) * s.bytes();
            if (s.type == BFLOAT16) *(uint16_t*)where = to_bf16(all[n]);
            else *(float*)where = all[n];
        });
    }
};

// --- operations -----------------------------------------------------------------------------------

static float applied(int mode, float x, float b, float t) {
    switch (mode) {
    case 0: return x + b;
    case 1: return x * b;
    case 6: return x / b;
    case 9: return x - b;
    case 13: return expf(x);
    case 15: return logf(x);
    case 21: return x;
    case 302: return x > b;
    case 303: return x >= b;
    default: return t != 0 ? x : b; // 601
    }
}
static bool is_mode(int mode) {
    static const std::set<int> modes = {0, 1, 6, 9, 13, 15, 21, 302, 303, 501, 601};
    return modes.count(mode);
}
static bool is_unary(int mode) { return mode == 13 || mode == 15 || mode == 21 || mode == 501; }

static void pointwise(Execution& execution, const Desc& d) {
    Shape x = shape(d.part(751)), y = shape(d.part(753));
    int mode = d.part(750).one<int>(0);
    std::vector<float> from = execution.read(x), to(y.count()), other, which;
    Shape b = x;
    if (!is_unary(mode)) b = shape(d.part(752)), other = execution.read(b);
    if (mode == 601) which = execution.read(shape(d.part(758)));
    int64_t axis = mode == 501 ? d.part(750).one<int64_t>(9) : 0;
    each(y.dims, [&](Four at, int64_t n) {
        int64_t m = 0;
        for (int i = 0; i < 4; i++) m = m * b.dims[i] + (b.dims[i] == 1 ? 0 : at[i]);
        to[n] = mode == 501 ? (float)at[axis] : applied(mode, from[n], other.empty() ? 0 : other[m], which.empty() ? 0 : which[n]);
    });
    execution.write(y, to);
}
// Several heads of a share a head of b. A result of fp32 in memory is a sum over blocks: it is
// added to.
static void matmul(Execution& execution, const Desc& d) {
    Shape a = shape(d.part(1520)), b = shape(d.part(1521)), c = shape(d.part(1522));
    std::vector<float> x = execution.read(a), y = execution.read(b), z(c.count());
    if (!c.is_virtual && c.type == FLOAT) z = execution.read(c);
    int64_t depth = a.dims[3], columns = b.dims[3], share = a.dims[1] / b.dims[1];
    each(c.dims, [&](Four at, int64_t n) {
        const float* row = &x[((at[0] * a.dims[1] + at[1]) * a.dims[2] + at[2]) * depth];
        const float* column = &y[(at[0] * b.dims[1] + at[1] / share) * depth * columns + at[3]];
        double sum = 0;
        for (int64_t k = 0; k < depth; k++) sum += (double)row[k] * column[k * columns];
        z[n] += (float)sum;
    });
    execution.write(c, z);
}
static void reduction(Execution& execution, const Desc& d) {
    Shape x = shape(d.part(1610)), y = shape(d.part(1611));
    bool most = d.part(1612).one<int>(1600) == 3;
    std::vector<float> from = execution.read(x), to(y.count(), most ? -INFINITY : 0.0f);
    each(x.dims, [&](Four at, int64_t n) {
        int64_t m = 0;
        for (int i = 0; i < 4; i++) m = m * y.dims[i] + at[i] / (x.dims[i] / y.dims[i]);
        to[m] = most ? fmaxf(to[m], from[n]) : to[m] + from[n];
    });
    execution.write(y, to);
}
// Reinterprets the memory of x with the dimensions and strides of y.
static void reshape(Execution& execution, const Desc& d) {
    Shape x = shape(d.part(2200)), y = shape(d.part(2201));
    std::vector<float> from = execution.read(x), to(y.count());
    std::map<int64_t, float> at_offset;
    each(x.dims, [&](Four at, int64_t n) { at_offset[x.offset(at)] = from[n]; });
    each(y.dims, [&](Four at, int64_t n) { to[n] = at_offset.at(y.offset(at)); });
    execution.write(y, to);
}
static void operation(Execution& execution, const Desc& d) {
    if (d.kind == POINTWISE_OPERATION) pointwise(execution, d);
    else if (d.kind == MATMUL_OPERATION) matmul(execution, d);
    else if (d.kind == REDUCTION_OPERATION) reduction(execution, d);
    else reshape(execution, d);
}

// --- validation -----------------------------------------------------------------------------------

static bool has(const Desc& d, std::initializer_list<int> attributes) {
    for (int attribute : attributes)
        if (!d.values.count(attribute) && !d.parts.count(attribute)) return false;
    return true;
}
static bool fits(Four b, Four y) {
    for (int i = 0; i < 4; i++)
        if (b[i] != 1 && b[i] != y[i]) return false;
    return true;
}
static int check_operation(Desc& d) {
    if (d.kind == POINTWISE_OPERATION) {
        NEED(has(d, {750, 751, 753}));
        int mode = d.part(750).one<int>(0);
        NEED(is_unary(mode) ? !has(d, {752}) : has(d, {752}));
        NEED((mode == 601) == has(d, {758}));
        NEED(shape(d.part(751)).dims == shape(d.part(753)).dims);
        NEED(!has(d, {752}) || fits(shape(d.part(752)).dims, shape(d.part(753)).dims));
    } else if (d.kind == MATMUL_OPERATION) {
        NEED(has(d, {1520, 1521, 1522, 1523}));
        Four a = shape(d.part(1520)).dims, b = shape(d.part(1521)).dims, c = shape(d.part(1522)).dims;
        NEED(a[0] == b[0] && a[0] == c[0] && a[1] == c[1] && a[1] % b[1] == 0 && a[2] == c[2] && a[3] == b[2] && b[3] == c[3]);
    } else if (d.kind == REDUCTION_OPERATION) {
        NEED(has(d, {1610, 1611, 1612}));
        Four x = shape(d.part(1610)).dims, y = shape(d.part(1611)).dims;
        for (int i = 0; i < 4; i++) NEED(x[i] % y[i] == 0);
    } else {
        NEED(has(d, {2200, 2201}) && shape(d.part(2200)).count() == shape(d.part(2201)).count());
    }
    return SUCCESS;
}
static std::vector<Shape> tensors(const Desc& graph) {
    std::vector<Shape> all;
    for (const SharedDesc& one : graph.parts.at(801))
        for (const auto& part : one->parts)
            if (part.second[0]->kind == TENSOR) all.push_back(shape(*part.second[0]));
    return all;
}
static int check_tensor(Desc& d) {
    NEED(has(d, {900, 901, 902, 903, 906, 907, 908}));
    NEED(d.all<int64_t>(902).size() == 4 && d.all<int64_t>(903).size() == 4);
    Shape s = shape(d);
    for (int64_t dim : s.dims) NEED(dim > 0);
    NEED(!s.by_value || (!s.is_virtual && s.count() == 1 && s.type == FLOAT));
    return SUCCESS;
}
static int check_graph(Desc& d) {
    NEED(has(d, {800, 801}));
    return fails("cuDNN has no plan") ? fail(NOT_SUPPORTED, "requested by EMULATED_GPU_FAILS") : SUCCESS;
}
API cudnnBackendFinalize(void* desc) {
    Desc& d = **(SharedDesc*)desc;
    NEED(!d.finished);
    int code = SUCCESS;
    switch (d.kind) {
    case POINTWISE: NEED(has(d, {0, 1}) && is_mode(d.one<int>(0)) && (d.one<int>(0) != 501 || has(d, {9}))); break;
    case MATMUL: NEED(has(d, {1500})); break;
    case REDUCTION: NEED(has(d, {1600, 1601}) && (d.one<int>(1600) == 0 || d.one<int>(1600) == 3)); break;
    case TENSOR: code = check_tensor(d); break;
    case POINTWISE_OPERATION: case MATMUL_OPERATION: case REDUCTION_OPERATION: case RESHAPE_OPERATION: code = check_operation(d); break;
    case GRAPH: code = check_graph(d); break;
    case HEURISTICS: NEED(has(d, {200, 201}) && d.one<int>(200) == 3); break;
    case PLAN:
        NEED(has(d, {400, 401}));
        if (d.part(401).one<int64_t>(1301) == 2) return fail(NOT_SUPPORTED, "this engine does not support the graph");
        break;
    case PACK: NEED(has(d, {1000, 1001, 1003}) && d.all<int64_t>(1000).size() == d.all<void*>(1001).size()); break;
    default: return fail(BAD_PARAM, "this kind of descriptor cannot be finalized");
    }
    d.finished = code == SUCCESS;
    return code;
}

// The heuristics suggest three engines: a slow one, a fast one, and one that fails.
API cudnnBackendGetAttribute(void* desc, int attribute, int type, int64_t count, int64_t* returned, void* values) {
    Desc& d = **(SharedDesc*)desc;
    NEED(d.finished);
    if (d.kind == PLAN && attribute == 402 && type == OF_INT64 && count == 1) {
        *returned = 1;
        *(int64_t*)values = 4096;
        return SUCCESS;
    }
    NEED(d.kind == HEURISTICS && attribute == 202 && type == OF_DESC);
    *returned = count < 3 ? count : 3;
    for (int64_t i = 0; i < *returned; i++) {
        SharedDesc& config = *((SharedDesc**)values)[i];
        NEED(config->kind == CONFIG);
        config->values[1301].assign((uint8_t*)&i, (uint8_t*)&i + sizeof i);
        config->parts[300] = {d.parts[201][0]};
        config->finished = true;
    }
    return SUCCESS;
}

// Changes one element of the last operation's result.
static void corrupt(Execution& execution, const Desc& d) {
    Shape y = shape(d.part(d.kind == MATMUL_OPERATION ? 1522 : 753));
    std::vector<float> all = execution.read(y);
    all[all.size() / 2] += 1;
    execution.write(y, all);
}

// How often cudnnBackendExecute was called.
static std::atomic<long> calls_{0};
extern "C" __attribute__((visibility("default"))) long emulatedGpuCalls(const char*) { return calls_; }

API cudnnBackendExecute(void* handle, void* plan, void* pack) {
    calls_++;
    if (fails("cudnnBackendExecute")) return fail(EXECUTION_FAILED, "requested by EMULATED_GPU_FAILS");
    const Desc &p = **(SharedDesc*)plan, &v = **(SharedDesc*)pack;
    NEED(p.kind == PLAN && p.finished && v.kind == PACK && v.finished);
    void* stream = ((Handle*)handle)->stream;
    SharedDesc graph = p.part(401).parts.at(300)[0];
    bool slow = p.part(401).one<int64_t>(1301) == 0;
    std::vector<int64_t> ids = v.all<int64_t>(1000);
    std::vector<void*> pointers = v.all<void*>(1001);
    void* workspace = v.one<void*>(1003);
    NEED(workspace);
    bool wrong = fails("cuDNN is wrong");
    Execution execution;
    for (size_t i = 0; i < ids.size(); i++) execution.memory[ids[i]] = pointers[i];
    NEED(execution.memory.size() == ids.size());
    for (const Shape& s : tensors(*graph)) {
        if (s.is_virtual) continue;
        NEED(execution.memory.count(s.id) && (uintptr_t)execution.memory[s.id] % (s.by_value ? 4 : s.alignment) == 0);
        if (s.by_value) execution.scalars[s.id] = *(float*)execution.memory[s.id];
    }
    enqueue(stream, [=]() mutable {
        if (slow) usleep(3000);
        memset(workspace, 0xff, 4096);
        for (const SharedDesc& one : graph->parts.at(801)) operation(execution, *one);
        if (wrong) corrupt(execution, *graph->parts.at(801).back());
    });
    return SUCCESS;
}

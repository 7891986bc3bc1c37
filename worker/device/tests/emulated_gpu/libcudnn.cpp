// cuDNN for the emulated GPU: executes the operations of a graph one after the other, each by its
// definition.
//
// The library accepts any graph of known operations, and rejects missing attributes, shapes that do
// not match, and tensors without an address. Tensors in memory are accessed by their strides;
// virtual tensors are rounded to their type.
//
// Attributes have the numbers of cudnnBackendAttributeName_t, pointwise modes those of
// cudnnPointwiseMode_t.
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
// Kinds of descriptors, with the values of CUDNN_BACKEND_…_DESCRIPTOR.
enum {
    POINTWISE = 0, CONFIG = 3, HEURISTICS = 4, PLAN = 5, POINTWISE_OPERATION = 13, GRAPH = 15, VARIANT_PACK = 16, TENSOR = 17, MATMUL = 18,
    MATMUL_OPERATION = 19, REDUCTION = 21, REDUCTION_OPERATION = 22, RESHAPE_OPERATION = 31
};
// CUDNN_TYPE_…: types of attributes.
enum { TYPE_HANDLE = 0, TYPE_DATA = 1, TYPE_BOOL = 2, TYPE_INT64 = 3, TYPE_POINTER = 6, TYPE_HEURISTICS = 8, TYPE_POINTWISE = 14, TYPE_DESC = 15, TYPE_REDUCTION = 18 };
// CUDNN_DATA_…: types of tensors.
enum { FLOAT = 0, INT32 = 4, BFLOAT16 = 9, BOOLEAN = 11 };

struct Desc {
    int kind = 0;
    bool finished = false;
    std::map<int, std::vector<uint8_t>> values;
    std::map<int, std::vector<std::shared_ptr<Desc>>> parts;

    template <typename T> T value_of(int attribute) const {
        T value;
        memcpy(&value, values.at(attribute).data(), sizeof value);
        return value;
    }
    template <typename T> std::vector<T> values_of(int attribute) const {
        std::vector<T> value(values.at(attribute).size() / sizeof(T));
        memcpy(value.data(), values.at(attribute).data(), value.size() * sizeof(T));
        return value;
    }
    const Desc& part(int attribute) const { return *parts.at(attribute)[0]; }
};
// A descriptor's handle. A descriptor keeps the descriptors alive that its attributes name.
typedef std::shared_ptr<Desc> SharedDesc;

static thread_local std::string last_error;
static int fail(int code, const char* reason) {
    last_error = reason;
    return code;
}
#define REQUIRE(condition) \
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
    static const std::set<int> known = {POINTWISE, CONFIG, HEURISTICS, PLAN, POINTWISE_OPERATION, GRAPH, VARIANT_PACK, TENSOR, MATMUL,
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

// Returns the number of bytes of a value of an attribute type, or 0 for an unknown type.
static size_t attribute_type_bytes(int type) {
    switch (type) {
    case TYPE_BOOL: return 1;
    case TYPE_DATA: case TYPE_HEURISTICS: case TYPE_POINTWISE: case TYPE_REDUCTION: return 4;
    case TYPE_HANDLE: case TYPE_INT64: case TYPE_POINTER: case TYPE_DESC: return 8;
    default: return 0;
    }
}
// Returns the type of an attribute's values.
static int attribute_type(int attribute) {
    switch (attribute) {
    case 0: return TYPE_POINTWISE;
    case 1: case 901: case 1500: case 1601: return TYPE_DATA;
    case 9: case 902: case 903: case 900: case 906: case 1000: return TYPE_INT64;
    case 200: return TYPE_HEURISTICS;
    case 400: case 800: return TYPE_HANDLE;
    case 907: case 908: return TYPE_BOOL;
    case 1001: case 1003: return TYPE_POINTER;
    case 1600: return TYPE_REDUCTION;
    default: return TYPE_DESC;
    }
}
API cudnnBackendSetAttribute(void* desc, int attribute, int type, int64_t count, const void* values) {
    Desc& d = **(SharedDesc*)desc;
    REQUIRE(!d.finished);
    REQUIRE(count > 0 && attribute_type(attribute) == type && attribute_type_bytes(type));
    if (type == TYPE_DESC) {
        std::vector<SharedDesc> parts;
        for (int64_t i = 0; i < count; i++) parts.push_back(*((SharedDesc**)values)[i]);
        for (SharedDesc& part : parts) REQUIRE(part->finished);
        d.parts[attribute] = parts;
    } else {
        const uint8_t* bytes = (const uint8_t*)values;
        d.values[attribute].assign(bytes, bytes + count * attribute_type_bytes(type));
    }
    return SUCCESS;
}

// --- tensors --------------------------------------------------------------------------------------

typedef std::array<int64_t, 4> Dims;
struct Shape {
    int type;
    Dims dims, strides;
    int64_t id, alignment;
    bool is_virtual, by_value;
    int64_t count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
    int64_t offset(Dims at) const { return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3]; }
    int64_t bytes() const { return type == BFLOAT16 ? 2 : 4; }
};
static Shape shape(const Desc& d) {
    Shape s;
    s.type = d.value_of<int>(901), s.id = d.value_of<int64_t>(906), s.alignment = d.value_of<int64_t>(900);
    s.is_virtual = d.value_of<bool>(907), s.by_value = d.value_of<bool>(908);
    for (int i = 0; i < 4; i++) s.dims[i] = d.values_of<int64_t>(902)[i], s.strides[i] = d.values_of<int64_t>(903)[i];
    return s;
}
static float round_to_type(int type, float x) {
    return type == BFLOAT16 ? from_bf16(to_bf16(x)) : type == INT32 ? (float)(int)x : type == BOOLEAN ? (float)(x != 0) : x;
}
template <typename F> static void each(Dims dims, F f) {
    int64_t n = 0;
    Dims at;
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

    // Returns a tensor's elements in the order of their indices.
    std::vector<float> read(const Shape& s) {
        if (s.is_virtual) return virtuals.at(s.id);
        if (s.by_value) return {scalars.at(s.id)};
        std::vector<float> elements(s.count());
        uint8_t* at = (uint8_t*)memory.at(s.id);
        each(s.dims, [&](Dims i, int64_t n) {
            uint8_t* address = at + s.offset(i) * s.bytes();
            elements[n] = s.type == BFLOAT16 ? from_bf16(*(uint16_t*)address) : *(float*)address;
        });
        return elements;
    }
    void write(const Shape& s, const std::vector<float>& elements) {
        if (s.is_virtual) {
            std::vector<float>& to = virtuals[s.id];
            to = elements;
            for (float& x : to) x = round_to_type(s.type, x);
            return;
        }
        uint8_t* at = (uint8_t*)memory.at(s.id);
        each(s.dims, [&](Dims i, int64_t n) {
            uint8_t* address = at + s.offset(i) * s.bytes();
            if (s.type == BFLOAT16) *(uint16_t*)address = to_bf16(elements[n]);
            else *(float*)address = elements[n];
        });
    }
};

// --- operations -----------------------------------------------------------------------------------

static float apply_pointwise(int mode, float x, float b, float t) {
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

static void execute_pointwise(Execution& execution, const Desc& d) {
    Shape x = shape(d.part(751)), y = shape(d.part(753));
    int mode = d.part(750).value_of<int>(0);
    std::vector<float> from = execution.read(x), to(y.count()), other, which;
    Shape b = x;
    if (!is_unary(mode)) b = shape(d.part(752)), other = execution.read(b);
    if (mode == 601) which = execution.read(shape(d.part(758)));
    int64_t axis = mode == 501 ? d.part(750).value_of<int64_t>(9) : 0;
    each(y.dims, [&](Dims at, int64_t n) {
        int64_t m = 0;
        for (int i = 0; i < 4; i++) m = m * b.dims[i] + (b.dims[i] == 1 ? 0 : at[i]);
        to[n] = mode == 501 ? (float)at[axis] : apply_pointwise(mode, from[n], other.empty() ? 0 : other[m], which.empty() ? 0 : which[n]);
    });
    execution.write(y, to);
}
// Executes a matmul. Several heads of a may share a head of b. A result of fp32 in memory is a sum
// over blocks, to which the matmul is added.
static void execute_matmul(Execution& execution, const Desc& d) {
    Shape a = shape(d.part(1520)), b = shape(d.part(1521)), c = shape(d.part(1522));
    std::vector<float> x = execution.read(a), y = execution.read(b), z(c.count());
    if (!c.is_virtual && c.type == FLOAT) z = execution.read(c);
    int64_t depth = a.dims[3], columns = b.dims[3], share = a.dims[1] / b.dims[1];
    each(c.dims, [&](Dims at, int64_t n) {
        const float* row = &x[((at[0] * a.dims[1] + at[1]) * a.dims[2] + at[2]) * depth];
        const float* column = &y[(at[0] * b.dims[1] + at[1] / share) * depth * columns + at[3]];
        double sum = 0;
        for (int64_t k = 0; k < depth; k++) sum += (double)row[k] * column[k * columns];
        z[n] += (float)sum;
    });
    execution.write(c, z);
}
static void execute_reduction(Execution& execution, const Desc& d) {
    Shape x = shape(d.part(1610)), y = shape(d.part(1611));
    bool most = d.part(1612).value_of<int>(1600) == 3;
    std::vector<float> from = execution.read(x), to(y.count(), most ? -INFINITY : 0.0f);
    each(x.dims, [&](Dims at, int64_t n) {
        int64_t m = 0;
        for (int i = 0; i < 4; i++) m = m * y.dims[i] + at[i] / (x.dims[i] / y.dims[i]);
        to[m] = most ? fmaxf(to[m], from[n]) : to[m] + from[n];
    });
    execution.write(y, to);
}
// Executes a reshape: reinterprets the memory of x with the dimensions and strides of y.
static void execute_reshape(Execution& execution, const Desc& d) {
    Shape x = shape(d.part(2200)), y = shape(d.part(2201));
    std::vector<float> from = execution.read(x), to(y.count());
    std::map<int64_t, float> at_offset;
    each(x.dims, [&](Dims at, int64_t n) { at_offset[x.offset(at)] = from[n]; });
    each(y.dims, [&](Dims at, int64_t n) { to[n] = at_offset.at(y.offset(at)); });
    execution.write(y, to);
}
static void execute_operation(Execution& execution, const Desc& d) {
    if (d.kind == POINTWISE_OPERATION) execute_pointwise(execution, d);
    else if (d.kind == MATMUL_OPERATION) execute_matmul(execution, d);
    else if (d.kind == REDUCTION_OPERATION) execute_reduction(execution, d);
    else execute_reshape(execution, d);
}

// --- validation -----------------------------------------------------------------------------------

static bool has(const Desc& d, std::initializer_list<int> attributes) {
    for (int attribute : attributes)
        if (!d.values.count(attribute) && !d.parts.count(attribute)) return false;
    return true;
}
static bool fits(Dims b, Dims y) {
    for (int i = 0; i < 4; i++)
        if (b[i] != 1 && b[i] != y[i]) return false;
    return true;
}
static int check_operation(Desc& d) {
    if (d.kind == POINTWISE_OPERATION) {
        REQUIRE(has(d, {750, 751, 753}));
        int mode = d.part(750).value_of<int>(0);
        REQUIRE(is_unary(mode) ? !has(d, {752}) : has(d, {752}));
        REQUIRE((mode == 601) == has(d, {758}));
        REQUIRE(shape(d.part(751)).dims == shape(d.part(753)).dims);
        REQUIRE(!has(d, {752}) || fits(shape(d.part(752)).dims, shape(d.part(753)).dims));
    } else if (d.kind == MATMUL_OPERATION) {
        REQUIRE(has(d, {1520, 1521, 1522, 1523}));
        Dims a = shape(d.part(1520)).dims, b = shape(d.part(1521)).dims, c = shape(d.part(1522)).dims;
        REQUIRE(a[0] == b[0] && a[0] == c[0] && a[1] == c[1] && a[1] % b[1] == 0 && a[2] == c[2] && a[3] == b[2] && b[3] == c[3]);
    } else if (d.kind == REDUCTION_OPERATION) {
        REQUIRE(has(d, {1610, 1611, 1612}));
        Dims x = shape(d.part(1610)).dims, y = shape(d.part(1611)).dims;
        for (int i = 0; i < 4; i++) REQUIRE(x[i] % y[i] == 0);
    } else {
        REQUIRE(has(d, {2200, 2201}) && shape(d.part(2200)).count() == shape(d.part(2201)).count());
    }
    return SUCCESS;
}
static std::vector<Shape> graph_tensors(const Desc& graph) {
    std::vector<Shape> shapes;
    for (const SharedDesc& op : graph.parts.at(801))
        for (const auto& part : op->parts)
            if (part.second[0]->kind == TENSOR) shapes.push_back(shape(*part.second[0]));
    return shapes;
}
static int check_tensor(Desc& d) {
    REQUIRE(has(d, {900, 901, 902, 903, 906, 907, 908}));
    REQUIRE(d.values_of<int64_t>(902).size() == 4 && d.values_of<int64_t>(903).size() == 4);
    Shape s = shape(d);
    for (int64_t dim : s.dims) REQUIRE(dim > 0);
    REQUIRE(!s.by_value || (!s.is_virtual && s.count() == 1 && s.type == FLOAT));
    return SUCCESS;
}
static int check_graph(Desc& d) {
    REQUIRE(has(d, {800, 801}));
    return fails("cuDNN has no plan") ? fail(NOT_SUPPORTED, "requested by EMULATED_GPU_FAILS") : SUCCESS;
}
API cudnnBackendFinalize(void* desc) {
    Desc& d = **(SharedDesc*)desc;
    REQUIRE(!d.finished);
    int code = SUCCESS;
    switch (d.kind) {
    case POINTWISE: REQUIRE(has(d, {0, 1}) && is_mode(d.value_of<int>(0)) && (d.value_of<int>(0) != 501 || has(d, {9}))); break;
    case MATMUL: REQUIRE(has(d, {1500})); break;
    case REDUCTION: REQUIRE(has(d, {1600, 1601}) && (d.value_of<int>(1600) == 0 || d.value_of<int>(1600) == 3)); break;
    case TENSOR: code = check_tensor(d); break;
    case POINTWISE_OPERATION: case MATMUL_OPERATION: case REDUCTION_OPERATION: case RESHAPE_OPERATION: code = check_operation(d); break;
    case GRAPH: code = check_graph(d); break;
    case HEURISTICS: REQUIRE(has(d, {200, 201}) && d.value_of<int>(200) == 3); break;
    case PLAN:
        REQUIRE(has(d, {400, 401}));
        if (d.part(401).value_of<int64_t>(1301) == 2) return fail(NOT_SUPPORTED, "this engine does not support the graph");
        break;
    case VARIANT_PACK: REQUIRE(has(d, {1000, 1001, 1003}) && d.values_of<int64_t>(1000).size() == d.values_of<void*>(1001).size()); break;
    default: return fail(BAD_PARAM, "this kind of descriptor cannot be finalized");
    }
    d.finished = code == SUCCESS;
    return code;
}

// Reads an attribute of a descriptor. The heuristics suggest three engines: a slow one, a fast one,
// and one that fails.
API cudnnBackendGetAttribute(void* desc, int attribute, int type, int64_t count, int64_t* returned, void* values) {
    Desc& d = **(SharedDesc*)desc;
    REQUIRE(d.finished);
    if (d.kind == PLAN && attribute == 402 && type == TYPE_INT64 && count == 1) {
        *returned = 1;
        *(int64_t*)values = 4096;
        return SUCCESS;
    }
    REQUIRE(d.kind == HEURISTICS && attribute == 202 && type == TYPE_DESC);
    *returned = count < 3 ? count : 3;
    for (int64_t i = 0; i < *returned; i++) {
        SharedDesc& config = *((SharedDesc**)values)[i];
        REQUIRE(config->kind == CONFIG);
        config->values[1301].assign((uint8_t*)&i, (uint8_t*)&i + sizeof i);
        config->parts[300] = {d.parts[201][0]};
        config->finished = true;
    }
    return SUCCESS;
}

// Changes one element of the last operation's result, for tests of wrong results.
static void corrupt(Execution& execution, const Desc& d) {
    Shape y = shape(d.part(d.kind == MATMUL_OPERATION ? 1522 : 753));
    std::vector<float> elements = execution.read(y);
    elements[elements.size() / 2] += 1;
    execution.write(y, elements);
}

// Number of calls of cudnnBackendExecute, which `emulatedGpuCalls` returns for tests.
static std::atomic<long> calls_{0};
extern "C" __attribute__((visibility("default"))) long emulatedGpuCalls(const char*) { return calls_; }

API cudnnBackendExecute(void* handle, void* plan, void* variant_pack) {
    calls_++;
    if (fails("cudnnBackendExecute")) return fail(EXECUTION_FAILED, "requested by EMULATED_GPU_FAILS");
    const Desc &p = **(SharedDesc*)plan, &v = **(SharedDesc*)variant_pack;
    REQUIRE(p.kind == PLAN && p.finished && v.kind == VARIANT_PACK && v.finished);
    void* stream = ((Handle*)handle)->stream;
    SharedDesc graph = p.part(401).parts.at(300)[0];
    bool slow = p.part(401).value_of<int64_t>(1301) == 0;
    std::vector<int64_t> ids = v.values_of<int64_t>(1000);
    std::vector<void*> pointers = v.values_of<void*>(1001);
    void* workspace = v.value_of<void*>(1003);
    REQUIRE(workspace);
    bool wrong = fails("cuDNN is wrong");
    Execution execution;
    for (size_t i = 0; i < ids.size(); i++) execution.memory[ids[i]] = pointers[i];
    REQUIRE(execution.memory.size() == ids.size());
    for (const Shape& s : graph_tensors(*graph)) {
        if (s.is_virtual) continue;
        REQUIRE(execution.memory.count(s.id) && (uintptr_t)execution.memory[s.id] % (s.by_value ? 4 : s.alignment) == 0);
        if (s.by_value) execution.scalars[s.id] = *(float*)execution.memory[s.id];
    }
    enqueue(stream, [=]() mutable {
        if (slow) usleep(3000);
        memset(workspace, 0xff, 4096);
        for (const SharedDesc& op : graph->parts.at(801)) execute_operation(execution, *op);
        if (wrong) corrupt(execution, *graph->parts.at(801).back());
    });
    return SUCCESS;
}

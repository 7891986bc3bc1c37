// cuBLASLt for the emulated GPU: D = alpha·op(A)·op(B) + beta·C with epilogues, column-major,
// computed in f64 and rounded once.
#include <cstddef>
#include <unistd.h>
#include "emulator.hpp"
#include "streams.hpp"
#include "common.cuh"
#include "costs.hpp"

#define API extern "C" __attribute__((visibility("default"))) int
enum { SUCCESS = 0, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, E4M3 = 28, E5M2 = 29 };
// Epilogues: a bias, GELU of the sum with a bias, its derivative at `aux`, and sums of an operand.
enum { DEFAULT = 1, BIAS = 4, GELU_AUX_BIAS = 164, DGELU = 192, BGRADA = 256, BGRADB = 512 };

struct Desc {
    int compute, scale, transa = 0, transb = 0;
    unsigned epilogue = DEFAULT;
    const void* bias = nullptr;                         // in GPU memory; BGRADA and BGRADB write it
    const void* aux = nullptr;                          // in GPU memory; GELU_AUX_BIAS writes it
    int64_t aux_ld = 0;
    const float *scale_a = nullptr, *scale_b = nullptr; // in GPU memory
};
struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t align[4] = {256, 256, 256, 256};
};
struct Algo {
    uint64_t data[8];
};
enum { SLOW = 0, FAST = 1, UNSUPPORTED = 2 };
struct Result {
    Algo algo;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130100; }
API cublasLtCreate(void** handle) {
    *handle = malloc(1);
    return SUCCESS;
}
API cublasLtDestroy(void* handle) {
    free(handle);
    return SUCCESS;
}
API cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
    Desc* d = new Desc;
    d->compute = compute, d->scale = scale;
    *desc = d;
    return compute == 68 && scale == R_32F ? SUCCESS : NOT_SUPPORTED;
}
API cublasLtMatmulDescDestroy(void* desc) {
    delete (Desc*)desc;
    return SUCCESS;
}
API cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
    Desc* d = (Desc*)desc;
    if (attribute == 3 && bytes == 4) memcpy(&d->transa, value, 4);
    else if (attribute == 4 && bytes == 4) memcpy(&d->transb, value, 4);
    else if (attribute == 7 && bytes == 4) memcpy(&d->epilogue, value, 4);
    else if (attribute == 8 && bytes == 8) memcpy(&d->bias, value, 8);
    else if (attribute == 11 && bytes == 8) memcpy(&d->aux, value, 8);
    else if (attribute == 12 && bytes == 8) memcpy(&d->aux_ld, value, 8);
    else if (attribute == 17 && bytes == 8) memcpy(&d->scale_a, value, 8);
    else if (attribute == 18 && bytes == 8) memcpy(&d->scale_b, value, 8);
    else return INVALID_VALUE;
    return SUCCESS;
}
API cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    if (!rows || !cols || ld < (int64_t)rows) return INVALID_VALUE;
    *layout = new Layout{type, rows, cols, ld};
    return SUCCESS;
}
API cublasLtMatrixLayoutDestroy(void* layout) {
    delete (Layout*)layout;
    return SUCCESS;
}
API cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference;
    return SUCCESS;
}
API cublasLtMatmulPreferenceDestroy(void* preference) {
    delete (Preference*)preference;
    return SUCCESS;
}
API cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
    Preference* p = (Preference*)preference;
    if (attribute == 1 && bytes == 8) memcpy(&p->workspace, value, 8);
    else if (attribute >= 5 && attribute <= 8 && bytes == 4) memcpy(&p->align[attribute - 5], value, 4);
    else return INVALID_VALUE;
    return SUCCESS;
}

static bool is_fp8(const Layout* x) { return x->type == E4M3 || x->type == E5M2; }

// Returns true if the library's conditions for fp8 are met: at least one operand is E4M3, both are
// contiguous along the sum, and all rows are multiples of 16 bytes.
static bool fits_fp8(const Desc* d, const Layout* a, const Layout* b, const Layout* c) {
    bool types = is_fp8(a) && is_fp8(b) && (a->type == E4M3 || b->type == E4M3) && (c->type == R_16BF || c->type == R_32F);
    uint64_t size = c->type == R_32F ? 4 : 2;
    bool whole = a->rows % 16 == 0 && a->cols % 16 == 0 && a->ld % 16 == 0 && b->ld % 16 == 0 && c->ld * size % 16 == 0;
    return types && whole && d->transa && !d->transb;
}

// Returns true if the library's conditions for the epilogue are met. The input of GELU has the type
// of the 16-bit operands and of the result, and columns of a multiple of eight elements. Sums that
// are a bias gradient are supported for the layouts of weight gradients, and for more than one
// term.
static bool fits_epilogue(const Desc* d, const Layout* a, const Layout* c, uint64_t depth) {
    bool has_bias = d->bias && (uintptr_t)d->bias % 16 == 0;
    bool has_aux = d->aux && (uintptr_t)d->aux % 16 == 0 && d->aux_ld % 8 == 0 && d->aux_ld >= (int64_t)c->rows;
    bool has_gelu = has_aux && (a->type == R_16F || a->type == R_16BF) && c->type == a->type;
    switch (d->epilogue) {
    case DEFAULT: return true;
    case BIAS: return has_bias;
    case GELU_AUX_BIAS: return has_bias && has_gelu;
    case DGELU: return has_gelu && depth > 1;
    case BGRADA: return has_bias && !d->transa && depth > 1;
    case BGRADB: return has_bias && d->transb && depth > 1;
    default: return false;
    }
}

static bool fits(const Desc* d, const Layout* a, const Layout* b, const Layout* c) {
    uint64_t m = d->transa ? a->cols : a->rows, k = d->transa ? a->rows : a->cols;
    uint64_t n = d->transb ? b->rows : b->cols, k2 = d->transb ? b->cols : b->rows;
    bool types = a->type == b->type && (c->type == a->type || c->type == R_32F);
    if (is_fp8(a) || is_fp8(b)) types = fits_fp8(d, a, b, c);
    return k == k2 && c->rows == m && c->cols == n && types && fits_epilogue(d, a, c, k);
}

// Returns true if the library has no algorithm for the matmul. With BLAS_LACKS=odd or invalid there
// is no algorithm with an epilogue, and none for 16-bit operands whose rows are not aligned to 16
// bytes.
static bool is_lacking(const Desc* desc, const Layout* a, const Layout* b, const Preference* p) {
    const char* value = getenv("BLAS_LACKS");
    if (!value || (strcmp(value, "odd") && strcmp(value, "invalid"))) return false;
    bool odd = p->align[0] < 16 || p->align[1] < 16 || a->ld % 8 || b->ld % 8;
    return desc->epilogue != DEFAULT || (a->type != R_32F && odd);
}

// Numbers of calls of cublasLtMatmul and of the heuristic, which `emulatedGpuCalls` returns for
// tests.
static std::atomic<long> calls_{0}, heuristics_{0};
extern "C" __attribute__((visibility("default"))) long emulatedGpuCalls(const char* name) {
    return strcmp(name, "cublasLtMatmulAlgoGetHeuristic") ? calls_ : heuristics_;
}

// Suggests algorithms. Each stores the alignment that it was requested for. For fp8 the alignment
// is at least 16 bytes.
API cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void* b, void* c, void* d, void* preference, int requested,
                                   Result* results, int* count) {
    heuristics_++;
    *count = 0;
    if (requested < 1) return INVALID_VALUE;
    if (!fits((Desc*)desc, (Layout*)a, (Layout*)b, (Layout*)c) || !fits((Desc*)desc, (Layout*)a, (Layout*)b, (Layout*)d)) return NOT_SUPPORTED;
    if (is_lacking((Desc*)desc, (Layout*)a, (Layout*)b, (Preference*)preference)) return strcmp(getenv("BLAS_LACKS"), "odd") ? INVALID_VALUE : NOT_SUPPORTED;
    for (uint32_t alignment : ((Preference*)preference)->align)
        if (is_fp8((Layout*)a) && alignment < 16) return NOT_SUPPORTED;
    // For more than two requested algorithms there are three: a slow one, a fast one, and one that
    // fails.
    *count = requested < 3 ? 1 : 3;
    memset(results, 0, sizeof *results * *count);
    for (int one = 0; one < *count; one++) {
        for (int i = 0; i < 4; i++) results[one].algo.data[i] = ((Preference*)preference)->align[i];
        results[one].algo.data[4] = 0x616c676f;
        results[one].algo.data[5] = requested < 3 ? FAST : one;
        results[one].workspace = 4096;
    }
    return SUCCESS;
}

// Reports the attributes of an algorithm: its number, and 1 for each other one.
API cublasLtMatmulAlgoConfigGetAttribute(const Algo* algo, int attribute, void* value, size_t bytes, size_t* written) {
    uint32_t number = attribute ? 1 : (uint32_t)algo->data[5];
    if (attribute > 8 || bytes != (attribute < 7 ? 4u : 2u)) return INVALID_VALUE;
    memcpy(value, &number, *written = bytes);
    return SUCCESS;
}

// Checks an algorithm for other sizes. With BLAS_LACKS=checked, algorithms fit no other sizes.
API cublasLtMatmulAlgoCheck(void*, void* desc, void* a, void* b, void* c, void* d, const Algo* algo, Result* result) {
    memset(result, 0, sizeof *result);
    const char* lacks = getenv("BLAS_LACKS");
    bool fit = fits((Desc*)desc, (Layout*)a, (Layout*)b, (Layout*)c) && fits((Desc*)desc, (Layout*)a, (Layout*)b, (Layout*)d);
    if (!fit || algo->data[4] != 0x616c676f || (lacks && !strcmp(lacks, "checked"))) return result->state = NOT_SUPPORTED;
    result->algo = *algo;
    result->workspace = 4096;
    return SUCCESS;
}

static Tensor tensor(const void* at, const Layout* layout) {
    return {(void*)at, layout->type == R_32F ? F32 : layout->type == R_16BF ? BF16 : layout->type == R_16F ? F16 : layout->type};
}

// Returns the number of an fp8 code by the definition of its format.
static double from_fp8(uint8_t code, bool e4m3) {
    int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, exponent = (code & 0x7f) >> mantissa, m = code & ((1 << mantissa) - 1);
    double size;
    if (e4m3 ? (code & 0x7f) == 0x7f : exponent == 31 && m) size = NAN;
    else if (!e4m3 && exponent == 31) size = INFINITY;
    else size = exponent ? ldexp((1 << mantissa) + m, exponent - bias - mantissa) : ldexp(m, 1 - bias - mantissa);
    return code & 0x80 ? -size : size;
}

static double element(Tensor x, int64_t i) {
    if (x.type == E4M3 || x.type == E5M2) return from_fp8(((const uint8_t*)x.at)[i], x.type == E4M3);
    return load(x, i);
}

// Returns an operand's elements, with the elements of one sum next to each other. `contiguous` is
// true if they are stored in this order.
static std::vector<double> operand_terms(Layout l, bool contiguous, Tensor x) {
    uint64_t depth = contiguous ? l.rows : l.cols, count = contiguous ? l.cols : l.rows;
    std::vector<double> terms(depth * count);
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < depth; k++) terms[i * depth + k] = element(x, (int64_t)(contiguous ? i * l.ld + k : k * l.ld + i));
    return terms;
}

// GELU in its tanh approximation, and its derivative.
static double gelu(double x) { return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) {
    double t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

// Applies the epilogue to the element (i, j) of the result.
static double apply_epilogue(const Desc& desc, int type, double x, uint64_t i, uint64_t j) {
    Tensor bias = {(void*)desc.bias, type}, aux = {(void*)desc.aux, type};
    int64_t at = (int64_t)j * desc.aux_ld + (int64_t)i;
    if (desc.epilogue == BIAS || desc.epilogue == GELU_AUX_BIAS) x += load(bias, (int64_t)i);
    if (desc.epilogue == GELU_AUX_BIAS) {
        store(aux, at, (float)x);
        return gelu(x);
    }
    return desc.epilogue == DGELU ? x * gelu_slope(load(aux, at)) : x;
}

// Stores the sum of the `depth` terms of each element of an operand, the gradient of a bias.
static void store_sums(Tensor sums, const std::vector<double>& terms, uint64_t depth) {
    for (uint64_t i = 0; i * depth < terms.size(); i++) {
        double sum = 0;
        for (uint64_t k = 0; k < depth; k++) sum += terms[i * depth + k];
        store(sums, (int64_t)i, (float)sum);
    }
}

static void multiply(Desc desc, Layout la, Layout lb, Layout lc, Layout ld, Tensor x, Tensor y, Tensor old, Tensor z, float alpha, float beta) {
    uint64_t depth = desc.transa ? la.rows : la.cols;
    double scaled = (double)alpha * (desc.scale_a ? *desc.scale_a : 1) * (desc.scale_b ? *desc.scale_b : 1);
    std::vector<double> a = operand_terms(la, desc.transa, x), b = operand_terms(lb, !desc.transb, y);
    for (uint64_t j = 0; j < ld.cols; j++)
        for (uint64_t i = 0; i < ld.rows; i++) {
            double sum = 0;
            for (uint64_t k = 0; k < depth; k++) sum += a[i * depth + k] * b[j * depth + k];
            int64_t to = (int64_t)(j * ld.ld + i);
            double result = scaled * sum + (beta != 0 ? beta * (double)load(old, (int64_t)(j * lc.ld + i)) : 0.0);
            store(z, to, (float)apply_epilogue(desc, z.type, result, i, j));
        }
    if (desc.epilogue == BGRADA) store_sums({(void*)desc.bias, z.type}, a, depth);
    if (desc.epilogue == BGRADB) store_sums({(void*)desc.bias, z.type}, b, depth);
}

API cublasLtMatmul(void*, void* desc, const float* alpha, const void* A, void* a, const void* B, void* b, const float* beta, const void* C,
                   void* c, void* D, void* d, const Algo* algo, void* workspace, size_t bytes, void* stream) {
    calls_++;
    if (stream && ((Stream*)stream)->capture && ((Stream*)stream)->invalid) return 14; // CUBLAS_STATUS_INTERNAL_ERROR
    const char* fails = getenv("EMULATED_GPU_FAILS"); // "captured matmul": a matmul that cannot be captured
    if (fails && !strcmp(fails, "captured matmul") && invalidate_capture(stream)) return NOT_SUPPORTED;
    static bool loaded = false; // the library loads its kernels at the first call
    const char* bytes_taken = getenv("EMULATED_GPU_LIBRARY_BYTES");
    if (!loaded && bytes_taken && stream && !((Stream*)stream)->take_library_memory((size_t)atol(bytes_taken))) return ALLOC_FAILED;
    loaded = true;
    const Desc settings = *(Desc*)desc;
    const Layout la = *(Layout*)a, lb = *(Layout*)b, lc = *(Layout*)c, ld = *(Layout*)d;
    const void* at[4] = {A, B, C, D};
    if (!fits(&settings, &la, &lb, &lc) || !algo || algo->data[4] != 0x616c676f || !workspace || bytes < 4096) return INVALID_VALUE;
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)at[i] % algo->data[i]) return INVALID_VALUE;
    if (algo->data[5] == UNSUPPORTED) return NOT_SUPPORTED;
    if (stream && ((Stream*)stream)->clock) {
        const char* gpu = getenv("EMULATED_GPU_TIMELINE");
        if (!gpu || !costs::select_gpu(gpu)) return INVALID_VALUE;
        auto size = [](const Layout& l) { return l.type == R_32F ? 4.0 : is_fp8(&l) ? 1.0 : 2.0; };
        double depth = (double)(settings.transa ? la.rows : la.cols);
        double ns = costs::matmul_ns((double)ld.rows, (double)ld.cols, depth, size(la), size(ld), *beta != 0);
        if (settings.aux) ns += costs::gelu_epilogue_ns((double)ld.rows * (double)ld.cols, size(ld), settings.epilogue == DGELU);
        if (settings.epilogue == BGRADA) ns += costs::sums_epilogue_ns((double)ld.rows * depth * size(la));
        if (settings.epilogue == BGRADB) ns += costs::sums_epilogue_ns((double)ld.cols * depth * size(lb));
        enqueue_timed(stream, "matmuls", costs::MATMUL_CALL, ns);
        return SUCCESS;
    }
    Tensor x = tensor(A, &la), y = tensor(B, &lb), z = tensor(D, &ld), old = tensor(C, &lc);
    bool slow = algo->data[5] == SLOW;
    enqueue(stream, [=, alpha = *alpha, beta = *beta] {
        if (slow) usleep(3000);
        memset(workspace, 0xff, 4096);
        multiply(settings, la, lb, lc, ld, x, y, old, z, alpha, beta);
    });
    return SUCCESS;
}
extern "C" __attribute__((visibility("default"))) const char* cublasLtGetStatusString(int code) {
    return code == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : code == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS";
}

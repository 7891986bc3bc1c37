// RMSNorm and LayerNorm of rows, optionally after a residual add, RMSNorm of heads, bias, and sums
// over the rows of a matrix.
//
// One block per row, or for rows of at most 256 elements (heads) one warp per row and several rows
// per block. Kernels whose names contain `_bf16` keep a row in registers, up to CACHED_VECTORS
// vectors of eight elements per thread. The general kernels (CACHED_VECTORS is 0) read the row
// again. Both give the same bits: fused multiply-adds are written explicitly, and the compiler is
// prevented from fusing others. The template parameters TYPE and DX_TYPE are those of `load_8` in
// common.cuh.
#include "common.cuh"

// Returns the index of the row that this thread works on.
DEVICE i64 row_of_thread() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }

// Returns the sum of x over the threads that work on one row.
DEVICE float sum_over_row_threads(float x) { return blockDim.x == 32 ? warp_sum(x) : block_sum(x); }
DEVICE float mean_from_sum(float sum, i64 d) { return __fdividef(sum, (float)d); }

// Loops over a thread's vectors of a row. n is the index of the vector, and j its first element.
#define VECTORS_OF_ROW(n, j, d) \
    _Pragma("unroll (CACHED_VECTORS ? CACHED_VECTORS : 1)") for (int n = 0, j = 8 * (int)threadIdx.x; (CACHED_VECTORS == 0 || n < CACHED_VECTORS) && j < (int)(d); n++, j += 8 * (int)blockDim.x)
// The vectors of a row that a thread keeps in registers.
template <int CACHED_VECTORS> struct RowCache {
    float vectors[CACHED_VECTORS ? CACHED_VECTORS : 1][8];
    DEVICE_METHOD float (&operator[](int n))[8] { return vectors[CACHED_VECTORS ? n : 0]; }
};

// Loads elements of x to v. If there is a delta, it is first added to x in memory, and v is the sum
// rounded to the type of x.
template <int TYPE> DEVICE void load_and_add(float (&v)[8], Tensor x, Tensor delta, i64 i, i64 left) {
    load_8<TYPE>(v, x, i, left);
    if (!delta.at) return;
    float increment[8];
    load_8<TYPE>(increment, delta, i, left);
    FOR_EIGHT(k) v[k] += increment[k];
    store_8_and_round<TYPE>(x, i, left, v);
}

template <int TYPE, int CACHED_VECTORS> DEVICE void rmsnorm_forward_row(Tensor y, float* rstd, Tensor x, Tensor delta, Tensor w, i64 rows, i64 d, float eps) {
    i64 row = row_of_thread() * d;
    if (row_of_thread() >= rows) return;
    float sum = 0;
    RowCache<CACHED_VECTORS> v;
    VECTORS_OF_ROW(n, j, d) {
        load_and_add<TYPE>(v[n], x, delta, row + j, d - j);
        FOR_EIGHT(k) sum = fmaf(v[n][k], v[n][k], sum);
    }
    float factor = rsqrtf(mean_from_sum(sum_over_row_threads(sum), d) + eps);
    if (threadIdx.x == 0) rstd[row_of_thread()] = factor;
    VECTORS_OF_ROW(n, j, d) {
        float weight[8];
        if (CACHED_VECTORS == 0) load_8<TYPE>(v[n], x, row + j, d - j);
        load_8<TYPE>(weight, w, j, d - j);
        FOR_EIGHT(k) v[n][k] *= factor * weight[k];
        store_8<TYPE>(y, row + j, d - j, v[n]);
    }
}
#define RMS_FORWARD Tensor y, float *rstd, Tensor x, Tensor delta, Tensor w, i64 rows, i64 d, float eps
KERNEL rmsnorm_forward(RMS_FORWARD) { rmsnorm_forward_row<ANY, 0>(y, rstd, x, delta, w, rows, d, eps); }
KERNEL rmsnorm_forward_bf16(RMS_FORWARD) { rmsnorm_forward_row<BF16, 1>(y, rstd, x, delta, w, rows, d, eps); }
KERNEL rmsnorm_forward_bf16_long(RMS_FORWARD) { rmsnorm_forward_row<BF16, 4>(y, rstd, x, delta, w, rows, d, eps); }

// Layout of `count` rows of `d` elements in a tensor. If the rows are heads, each row of the tensor
// has `stride` elements and contains `heads_per_row` heads from column `first` on. Otherwise
// `heads_per_row` is 1 and `stride` is d.
struct RowLayout {
    i64 count, d, heads_per_row, stride, first;
};
// Returns the index of a row's first element in the tensor.
DEVICE i64 find_row_start(RowLayout r, i64 row) {
    if (r.heads_per_row == 1) return row * r.stride + r.first;
    u32 group = (u32)row / (u32)r.heads_per_row;
    return group * r.stride + r.first + ((u32)row - group * (u32)r.heads_per_row) * r.d;
}

// Computes the gradient of RMSNorm with respect to x, for one row. dy and dx may be the same
// memory. If `add`, the gradient is added to dx.
template <int TYPE, int DX_TYPE, int CACHED_VECTORS> DEVICE void rmsnorm_backward_row(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* rstd, RowLayout at, i64 add) {
    if (row_of_thread() >= at.count) return;
    i64 row = row_of_thread() * at.d, strided = find_row_start(at, row_of_thread());
    float factor = rstd[row_of_thread()], projection = 0;
    RowCache<CACHED_VECTORS> g, v;
    VECTORS_OF_ROW(n, j, at.d) {
        float weight[8];
        load_8<TYPE>(g[n], dy, strided + j, at.d - j);
        load_8<TYPE>(weight, w, j, at.d - j);
        load_8<TYPE>(v[n], x, row + j, at.d - j);
        FOR_EIGHT(k) {
            g[n][k] = __fmul_rn(g[n][k], weight[k]);
            projection = fmaf(g[n][k], v[n][k], projection);
        }
    }
    projection = mean_from_sum(sum_over_row_threads(projection) * factor * factor, at.d);
    VECTORS_OF_ROW(n, j, at.d) {
        if (CACHED_VECTORS == 0) {
            float weight[8];
            load_8<TYPE>(g[n], dy, strided + j, at.d - j);
            load_8<TYPE>(weight, w, j, at.d - j);
            load_8<TYPE>(v[n], x, row + j, at.d - j);
            FOR_EIGHT(k) g[n][k] = __fmul_rn(g[n][k], weight[k]);
        }
        FOR_EIGHT(k) g[n][k] = factor * fmaf(-v[n][k], projection, g[n][k]);
        if (add) {
            load_8<DX_TYPE>(v[n], dx, strided + j, at.d - j);
            FOR_EIGHT(k) g[n][k] = __fadd_rn(v[n][k], g[n][k]);
        }
        store_8<DX_TYPE>(dx, strided + j, at.d - j, g[n]);
    }
}
#define RMS_BACKWARD Tensor dx, Tensor dy, Tensor x, Tensor w, const float *rstd, RowLayout at, i64 add
KERNEL rmsnorm_backward(RMS_BACKWARD) { rmsnorm_backward_row<ANY, ANY, 0>(dx, dy, x, w, rstd, at, add); }
KERNEL rmsnorm_backward_bf16(RMS_BACKWARD) { rmsnorm_backward_row<BF16, F32, 1>(dx, dy, x, w, rstd, at, add); }
KERNEL rmsnorm_backward_bf16_long(RMS_BACKWARD) { rmsnorm_backward_row<BF16, F32, 4>(dx, dy, x, w, rstd, at, add); }
KERNEL rmsnorm_heads_backward_bf16(RMS_BACKWARD) { rmsnorm_backward_row<BF16, BF16, 1>(dx, dy, x, w, rstd, at, add); }

// Computes RMSNorm of one head in place on x. The input is saved to raw.
template <int TYPE, int CACHED_VECTORS> DEVICE void rmsnorm_heads_forward_row(Tensor x, Tensor raw, float* rstd, Tensor w, RowLayout at, float eps) {
    if (row_of_thread() >= at.count) return;
    i64 row = row_of_thread() * at.d, strided = find_row_start(at, row_of_thread());
    float sum = 0;
    RowCache<CACHED_VECTORS> v;
    VECTORS_OF_ROW(n, j, at.d) {
        load_8<TYPE>(v[n], x, strided + j, at.d - j);
        store_8<TYPE>(raw, row + j, at.d - j, v[n]);
        FOR_EIGHT(k) sum = fmaf(v[n][k], v[n][k], sum);
    }
    float factor = rsqrtf(mean_from_sum(sum_over_row_threads(sum), at.d) + eps);
    if (threadIdx.x == 0) rstd[row_of_thread()] = factor;
    VECTORS_OF_ROW(n, j, at.d) {
        float weight[8];
        if (CACHED_VECTORS == 0) load_8<TYPE>(v[n], raw, row + j, at.d - j);
        load_8<TYPE>(weight, w, j, at.d - j);
        FOR_EIGHT(k) v[n][k] *= factor * weight[k];
        store_8<TYPE>(x, strided + j, at.d - j, v[n]);
    }
}
#define RMS_HEADS_FORWARD Tensor x, Tensor raw, float *rstd, Tensor w, RowLayout at, float eps
KERNEL rmsnorm_heads_forward(RMS_HEADS_FORWARD) { rmsnorm_heads_forward_row<ANY, 0>(x, raw, rstd, w, at, eps); }
KERNEL rmsnorm_heads_forward_bf16(RMS_HEADS_FORWARD) { rmsnorm_heads_forward_row<BF16, 1>(x, raw, rstd, w, at, eps); }

template <int TYPE, int CACHED_VECTORS>
DEVICE void layernorm_forward_row(Tensor y, float* stats, Tensor x, Tensor delta, Tensor w, Tensor b, i64 rows, i64 d, float eps) {
    i64 row = row_of_thread() * d;
    if (row_of_thread() >= rows) return;
    float sum = 0, square = 0;
    RowCache<CACHED_VECTORS> v;
    VECTORS_OF_ROW(n, j, d) {
        load_and_add<TYPE>(v[n], x, delta, row + j, d - j);
        FOR_EIGHT(k) sum += v[n][k];
    }
    float mean = mean_from_sum(sum_over_row_threads(sum), d);
    VECTORS_OF_ROW(n, j, d) {
        if (CACHED_VECTORS == 0) load_8<TYPE>(v[n], x, row + j, d - j);
        FOR_EIGHT(k) {
            float deviation = TYPE != ANY || k < d - j ? v[n][k] - mean : 0.0f;
            square = fmaf(deviation, deviation, square);
        }
    }
    float factor = rsqrtf(mean_from_sum(sum_over_row_threads(square), d) + eps);
    if (threadIdx.x == 0) {
        stats[2 * row_of_thread()] = mean;
        stats[2 * row_of_thread() + 1] = factor;
    }
    VECTORS_OF_ROW(n, j, d) {
        float weight[8], bias[8];
        if (CACHED_VECTORS == 0) load_8<TYPE>(v[n], x, row + j, d - j);
        load_8<TYPE>(weight, w, j, d - j);
        load_8<TYPE>(bias, b, j, d - j);
        FOR_EIGHT(k) v[n][k] = fmaf((v[n][k] - mean) * factor, weight[k], bias[k]);
        store_8<TYPE>(y, row + j, d - j, v[n]);
    }
}
#define LAYER_FORWARD Tensor y, float *stats, Tensor x, Tensor delta, Tensor w, Tensor b, i64 rows, i64 d, float eps
KERNEL layernorm_forward(LAYER_FORWARD) { layernorm_forward_row<ANY, 0>(y, stats, x, delta, w, b, rows, d, eps); }
KERNEL layernorm_forward_bf16(LAYER_FORWARD) { layernorm_forward_row<BF16, 1>(y, stats, x, delta, w, b, rows, d, eps); }
KERNEL layernorm_forward_bf16_long(LAYER_FORWARD) { layernorm_forward_row<BF16, 4>(y, stats, x, delta, w, b, rows, d, eps); }

template <int TYPE, int DX_TYPE, int CACHED_VECTORS>
DEVICE void layernorm_backward_row(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* stats, i64 rows, i64 d, i64 add) {
    i64 row = row_of_thread() * d;
    if (row_of_thread() >= rows) return;
    float mean = stats[2 * row_of_thread()], factor = stats[2 * row_of_thread() + 1];
    float mean_gradient = 0, projection = 0;
    RowCache<CACHED_VECTORS> g, v; // the gradient with respect to the normalized x, and the normalized x
    VECTORS_OF_ROW(n, j, d) {
        float weight[8];
        load_8<TYPE>(g[n], dy, row + j, d - j);
        load_8<TYPE>(weight, w, j, d - j);
        load_8<TYPE>(v[n], x, row + j, d - j);
        FOR_EIGHT(k) {
            g[n][k] = __fmul_rn(g[n][k], weight[k]);
            v[n][k] = (v[n][k] - mean) * factor;
            mean_gradient += g[n][k];
            projection = fmaf(g[n][k], v[n][k], projection);
        }
    }
    mean_gradient = mean_from_sum(sum_over_row_threads(mean_gradient), d);
    projection = mean_from_sum(sum_over_row_threads(projection), d);
    VECTORS_OF_ROW(n, j, d) {
        if (CACHED_VECTORS == 0) {
            float weight[8];
            load_8<TYPE>(g[n], dy, row + j, d - j);
            load_8<TYPE>(weight, w, j, d - j);
            load_8<TYPE>(v[n], x, row + j, d - j);
            FOR_EIGHT(k) g[n][k] = __fmul_rn(g[n][k], weight[k]), v[n][k] = (v[n][k] - mean) * factor;
        }
        FOR_EIGHT(k) g[n][k] = factor * fmaf(-v[n][k], projection, g[n][k] - mean_gradient);
        if (add) {
            load_8<DX_TYPE>(v[n], dx, row + j, d - j);
            FOR_EIGHT(k) g[n][k] = __fadd_rn(v[n][k], g[n][k]);
        }
        store_8<DX_TYPE>(dx, row + j, d - j, g[n]);
    }
}
#define LAYER_BACKWARD Tensor dx, Tensor dy, Tensor x, Tensor w, const float *stats, i64 rows, i64 d, i64 add
KERNEL layernorm_backward(LAYER_BACKWARD) { layernorm_backward_row<ANY, ANY, 0>(dx, dy, x, w, stats, rows, d, add); }
KERNEL layernorm_backward_bf16(LAYER_BACKWARD) { layernorm_backward_row<BF16, F32, 1>(dx, dy, x, w, stats, rows, d, add); }
KERNEL layernorm_backward_bf16_long(LAYER_BACKWARD) { layernorm_backward_row<BF16, F32, 4>(dx, dy, x, w, stats, rows, d, add); }

// --- gradients of weights: sums over rows, in two steps of fixed shape -------------------------------------------

#define ROWS_PER_PARTIAL_SUM 64
#define COLUMNS_PER_BLOCK 256 // of a block of 32 × 8 threads
enum { FACTOR_ONE = 0, FACTOR_RMSNORM = 1, FACTOR_LAYERNORM = 2 };

// Computes sums[chunk, d] = Σ dy · factor, where the factor is 1 or the normalized x. A block of 32
// × 8 threads sums ROWS_PER_PARTIAL_SUM rows of COLUMNS_PER_BLOCK columns.
template <int TYPE> DEVICE void sum_chunk_rows(float* sums, Tensor dy, Tensor x, const float* stats, const RowLayout& at, i64 factor_kind) {
    __shared__ float parts[8][COLUMNS_PER_BLOCK];
    i64 j = (i64)blockIdx.y * COLUMNS_PER_BLOCK + 8 * threadIdx.x;
    int first = (int)blockIdx.x * ROWS_PER_PARTIAL_SUM, end = (int)(first + ROWS_PER_PARTIAL_SUM < at.count ? first + ROWS_PER_PARTIAL_SUM : at.count);
    float sum[8] = {};
    for (int row = first + (int)threadIdx.y; j < at.d && row < end; row += 8) {
        float g[8], v[8];
        load_8<TYPE>(g, dy, find_row_start(at, row) + j, at.d - j);
        if (factor_kind != FACTOR_ONE) {
            load_8<TYPE>(v, x, row * at.d + j, at.d - j);
            float mean = factor_kind == FACTOR_LAYERNORM ? stats[2 * row] : 0.0f;
            float factor = factor_kind == FACTOR_LAYERNORM ? stats[2 * row + 1] : stats[row];
            FOR_EIGHT(k) g[k] = __fmul_rn(g[k], (v[k] - mean) * factor);
        }
        FOR_EIGHT(k) sum[k] += g[k];
    }
    FOR_EIGHT(k) parts[threadIdx.y][32 * k + threadIdx.x] = sum[k];
    __syncthreads();
    // Thread y sums column 8·x + y over all y, so that the threads of a warp read consecutive
    // words.
    float total = parts[0][32 * threadIdx.y + threadIdx.x];
    for (int y = 1; y < 8; y++) total += parts[y][32 * threadIdx.y + threadIdx.x];
    if (j + threadIdx.y < at.d) sums[(i64)blockIdx.x * at.d + j + threadIdx.y] = total;
}
KERNEL sum_rows(float* sums, Tensor dy, Tensor x, const float* stats, RowLayout at, i64 factor_kind) { sum_chunk_rows<ANY>(sums, dy, x, stats, at, factor_kind); }
KERNEL sum_rows_bf16(float* sums, Tensor dy, Tensor x, const float* stats, RowLayout at, i64 factor_kind) { sum_chunk_rows<BF16>(sums, dy, x, stats, at, factor_kind); }

// Adds out[d] += Σ sums[chunk, d]. A block of 32 × 32 threads sums 32 columns: thread y sums every
// 32nd chunk, then the results are summed in the order of y.
WIDE_KERNEL add_partial_sums(float* out, const float* sums, i64 chunks, i64 d) {
    __shared__ float parts[32][32];
    i64 j = (i64)blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    for (i64 chunk = threadIdx.y; j < d && chunk < chunks; chunk += 32) sum += sums[chunk * d + j];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || j >= d) return;
    for (int y = 1; y < 32; y++) sum += parts[y][threadIdx.x];
    out[j] += sum;
}

// Adds a bias to each row: y[m, n] += bias[n]. One block per row.
KERNEL bias_forward(Tensor y, Tensor bias, i64 n) {
    i64 row = (i64)blockIdx.x * n;
    FOR_EACH_ROW_VECTOR(j, n) {
        float v[8], b[8];
        load_8(v, y, row + j, n - j);
        load_8(b, bias, j, n - j);
        FOR_EIGHT(k) v[k] += b[k];
        store_8(y, row + j, n - j, v);
    }
}

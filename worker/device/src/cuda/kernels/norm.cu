// RMSNorm and LayerNorm of rows, optionally after a residual add; RMSNorm of heads; sums over the
// rows of a matrix.
//
// One block per row, or for rows of at most 256 elements (heads) one warp per row and several rows
// per block. A kernel `_bf16` keeps a row in registers, up to KEEP vectors of eight elements per
// thread; the general one (KEEP 0) reads it again. Both give the same bits: fused multiply-adds are
// written explicitly, and where the compiler could fuse others it is prevented from doing so.
#include "common.cuh"

DEVICE i64 this_row() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }

// The sum over the threads of a row.
DEVICE float row_sum(float x) { return blockDim.x == 32 ? warp_sum(x) : block_sum(x); }
DEVICE float mean_from_sum(float sum, i64 d) { return __fdividef(sum, (float)d); }

// Loops over a thread's vectors of a row: index of the vector, and its first element.
#define VECTORS_OF_ROW(n, j, d) \
    _Pragma("unroll (KEEP ? KEEP : 1)") for (int n = 0, j = 8 * (int)threadIdx.x; (KEEP == 0 || n < KEEP) && j < (int)(d); n++, j += 8 * (int)blockDim.x)
// The vectors of a row that a thread keeps in registers.
template <int KEEP> struct RowCache {
    float vectors[KEEP ? KEEP : 1][8];
    DEVICE_METHOD float (&operator[](int n))[8] { return vectors[KEEP ? n : 0]; }
};

// Loads elements of x. If there is a delta, it is added to x first, and v is x rounded to its type.
template <int X> DEVICE void load_and_add(float (&v)[8], Tensor x, Tensor delta, i64 i, i64 left) {
    load_eight<X>(v, x, i, left);
    if (!delta.at) return;
    float increment[8];
    load_eight<X>(increment, delta, i, left);
    EIGHT(k) v[k] += increment[k];
    store_rounded<X>(x, i, left, v);
}

template <int X, int KEEP> DEVICE void rms_forward(Tensor y, float* rstd, Tensor x, Tensor delta, Tensor w, i64 rows, i64 d, float eps) {
    i64 row = this_row() * d;
    if (this_row() >= rows) return;
    float sum = 0;
    RowCache<KEEP> v;
    VECTORS_OF_ROW(n, j, d) {
        load_and_add<X>(v[n], x, delta, row + j, d - j);
        EIGHT(k) sum = fmaf(v[n][k], v[n][k], sum);
    }
    float factor = rsqrtf(mean_from_sum(row_sum(sum), d) + eps);
    if (threadIdx.x == 0) rstd[this_row()] = factor;
    VECTORS_OF_ROW(n, j, d) {
        float weight[8];
        if (KEEP == 0) load_eight<X>(v[n], x, row + j, d - j);
        load_eight<X>(weight, w, j, d - j);
        EIGHT(k) v[n][k] *= factor * weight[k];
        store_eight<X>(y, row + j, d - j, v[n]);
    }
}
#define RMS_FORWARD Tensor y, float *rstd, Tensor x, Tensor delta, Tensor w, i64 rows, i64 d, float eps
KERNEL rmsnorm_forward(RMS_FORWARD) { rms_forward<ANY, 0>(y, rstd, x, delta, w, rows, d, eps); }
KERNEL rmsnorm_forward_bf16(RMS_FORWARD) { rms_forward<BF16, 1>(y, rstd, x, delta, w, rows, d, eps); }
KERNEL rmsnorm_forward_bf16_long(RMS_FORWARD) { rms_forward<BF16, 4>(y, rstd, x, delta, w, rows, d, eps); }

// Rows of `d` elements. They are heads: `per` of them in each row of `stride` elements, from column
// `first` on. For ordinary rows `per` is 1 and `stride` is d.
struct Rows {
    i64 count, d, per, stride, first;
};
DEVICE i64 row_start(Rows r, i64 row) {
    if (r.per == 1) return row * r.stride + r.first;
    u32 group = (u32)row / (u32)r.per;
    return group * r.stride + r.first + ((u32)row - group * (u32)r.per) * r.d;
}

// The gradient of RMSNorm with respect to x, for one row. dy and dx may be the same memory.
template <int X, int DX, int KEEP> DEVICE void rms_backward(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* rstd, Rows at, i64 add) {
    if (this_row() >= at.count) return;
    i64 row = this_row() * at.d, strided = row_start(at, this_row());
    float factor = rstd[this_row()], projection = 0;
    RowCache<KEEP> g, v;
    VECTORS_OF_ROW(n, j, at.d) {
        float weight[8];
        load_eight<X>(g[n], dy, strided + j, at.d - j);
        load_eight<X>(weight, w, j, at.d - j);
        load_eight<X>(v[n], x, row + j, at.d - j);
        EIGHT(k) {
            g[n][k] = __fmul_rn(g[n][k], weight[k]);
            projection = fmaf(g[n][k], v[n][k], projection);
        }
    }
    projection = mean_from_sum(row_sum(projection) * factor * factor, at.d);
    VECTORS_OF_ROW(n, j, at.d) {
        if (KEEP == 0) {
            float weight[8];
            load_eight<X>(g[n], dy, strided + j, at.d - j);
            load_eight<X>(weight, w, j, at.d - j);
            load_eight<X>(v[n], x, row + j, at.d - j);
            EIGHT(k) g[n][k] = __fmul_rn(g[n][k], weight[k]);
        }
        EIGHT(k) g[n][k] = factor * fmaf(-v[n][k], projection, g[n][k]);
        if (add) {
            load_eight<DX>(v[n], dx, strided + j, at.d - j);
            EIGHT(k) g[n][k] = __fadd_rn(v[n][k], g[n][k]);
        }
        store_eight<DX>(dx, strided + j, at.d - j, g[n]);
    }
}
#define RMS_BACKWARD Tensor dx, Tensor dy, Tensor x, Tensor w, const float *rstd, Rows at, i64 add
KERNEL rmsnorm_backward(RMS_BACKWARD) { rms_backward<ANY, ANY, 0>(dx, dy, x, w, rstd, at, add); }
KERNEL rmsnorm_backward_bf16(RMS_BACKWARD) { rms_backward<BF16, F32, 1>(dx, dy, x, w, rstd, at, add); }
KERNEL rmsnorm_backward_bf16_long(RMS_BACKWARD) { rms_backward<BF16, F32, 4>(dx, dy, x, w, rstd, at, add); }
KERNEL rmsnorm_heads_backward_bf16(RMS_BACKWARD) { rms_backward<BF16, BF16, 1>(dx, dy, x, w, rstd, at, add); }

// RMSNorm of heads, in place on x. The input is saved to raw.
template <int X, int KEEP> DEVICE void rms_heads_forward(Tensor x, Tensor raw, float* rstd, Tensor w, Rows at, float eps) {
    if (this_row() >= at.count) return;
    i64 row = this_row() * at.d, strided = row_start(at, this_row());
    float sum = 0;
    RowCache<KEEP> v;
    VECTORS_OF_ROW(n, j, at.d) {
        load_eight<X>(v[n], x, strided + j, at.d - j);
        store_eight<X>(raw, row + j, at.d - j, v[n]);
        EIGHT(k) sum = fmaf(v[n][k], v[n][k], sum);
    }
    float factor = rsqrtf(mean_from_sum(row_sum(sum), at.d) + eps);
    if (threadIdx.x == 0) rstd[this_row()] = factor;
    VECTORS_OF_ROW(n, j, at.d) {
        float weight[8];
        if (KEEP == 0) load_eight<X>(v[n], raw, row + j, at.d - j);
        load_eight<X>(weight, w, j, at.d - j);
        EIGHT(k) v[n][k] *= factor * weight[k];
        store_eight<X>(x, strided + j, at.d - j, v[n]);
    }
}
#define RMS_HEADS_FORWARD Tensor x, Tensor raw, float *rstd, Tensor w, Rows at, float eps
KERNEL rmsnorm_heads_forward(RMS_HEADS_FORWARD) { rms_heads_forward<ANY, 0>(x, raw, rstd, w, at, eps); }
KERNEL rmsnorm_heads_forward_bf16(RMS_HEADS_FORWARD) { rms_heads_forward<BF16, 1>(x, raw, rstd, w, at, eps); }

template <int X, int KEEP>
DEVICE void layer_forward(Tensor y, float* stats, Tensor x, Tensor delta, Tensor w, Tensor b, i64 rows, i64 d, float eps) {
    i64 row = this_row() * d;
    if (this_row() >= rows) return;
    float sum = 0, square = 0;
    RowCache<KEEP> v;
    VECTORS_OF_ROW(n, j, d) {
        load_and_add<X>(v[n], x, delta, row + j, d - j);
        EIGHT(k) sum += v[n][k];
    }
    float mean = mean_from_sum(row_sum(sum), d);
    VECTORS_OF_ROW(n, j, d) {
        if (KEEP == 0) load_eight<X>(v[n], x, row + j, d - j);
        EIGHT(k) {
            float deviation = X != ANY || k < d - j ? v[n][k] - mean : 0.0f;
            square = fmaf(deviation, deviation, square);
        }
    }
    float factor = rsqrtf(mean_from_sum(row_sum(square), d) + eps);
    if (threadIdx.x == 0) {
        stats[2 * this_row()] = mean;
        stats[2 * this_row() + 1] = factor;
    }
    VECTORS_OF_ROW(n, j, d) {
        float weight[8], bias[8];
        if (KEEP == 0) load_eight<X>(v[n], x, row + j, d - j);
        load_eight<X>(weight, w, j, d - j);
        load_eight<X>(bias, b, j, d - j);
        EIGHT(k) v[n][k] = fmaf((v[n][k] - mean) * factor, weight[k], bias[k]);
        store_eight<X>(y, row + j, d - j, v[n]);
    }
}
#define LAYER_FORWARD Tensor y, float *stats, Tensor x, Tensor delta, Tensor w, Tensor b, i64 rows, i64 d, float eps
KERNEL layernorm_forward(LAYER_FORWARD) { layer_forward<ANY, 0>(y, stats, x, delta, w, b, rows, d, eps); }
KERNEL layernorm_forward_bf16(LAYER_FORWARD) { layer_forward<BF16, 1>(y, stats, x, delta, w, b, rows, d, eps); }
KERNEL layernorm_forward_bf16_long(LAYER_FORWARD) { layer_forward<BF16, 4>(y, stats, x, delta, w, b, rows, d, eps); }

template <int X, int DX, int KEEP>
DEVICE void layer_backward(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* stats, i64 rows, i64 d, i64 add) {
    i64 row = this_row() * d;
    if (this_row() >= rows) return;
    float mean = stats[2 * this_row()], factor = stats[2 * this_row() + 1];
    float mean_gradient = 0, projection = 0;
    RowCache<KEEP> g, v; // the gradient with respect to the normalized x, and the normalized x
    VECTORS_OF_ROW(n, j, d) {
        float weight[8];
        load_eight<X>(g[n], dy, row + j, d - j);
        load_eight<X>(weight, w, j, d - j);
        load_eight<X>(v[n], x, row + j, d - j);
        EIGHT(k) {
            g[n][k] = __fmul_rn(g[n][k], weight[k]);
            v[n][k] = (v[n][k] - mean) * factor;
            mean_gradient += g[n][k];
            projection = fmaf(g[n][k], v[n][k], projection);
        }
    }
    mean_gradient = mean_from_sum(row_sum(mean_gradient), d);
    projection = mean_from_sum(row_sum(projection), d);
    VECTORS_OF_ROW(n, j, d) {
        if (KEEP == 0) {
            float weight[8];
            load_eight<X>(g[n], dy, row + j, d - j);
            load_eight<X>(weight, w, j, d - j);
            load_eight<X>(v[n], x, row + j, d - j);
            EIGHT(k) g[n][k] = __fmul_rn(g[n][k], weight[k]), v[n][k] = (v[n][k] - mean) * factor;
        }
        EIGHT(k) g[n][k] = factor * fmaf(-v[n][k], projection, g[n][k] - mean_gradient);
        if (add) {
            load_eight<DX>(v[n], dx, row + j, d - j);
            EIGHT(k) g[n][k] = __fadd_rn(v[n][k], g[n][k]);
        }
        store_eight<DX>(dx, row + j, d - j, g[n]);
    }
}
#define LAYER_BACKWARD Tensor dx, Tensor dy, Tensor x, Tensor w, const float *stats, i64 rows, i64 d, i64 add
KERNEL layernorm_backward(LAYER_BACKWARD) { layer_backward<ANY, ANY, 0>(dx, dy, x, w, stats, rows, d, add); }
KERNEL layernorm_backward_bf16(LAYER_BACKWARD) { layer_backward<BF16, F32, 1>(dx, dy, x, w, stats, rows, d, add); }
KERNEL layernorm_backward_bf16_long(LAYER_BACKWARD) { layer_backward<BF16, F32, 4>(dx, dy, x, w, stats, rows, d, add); }

// --- gradients of weights: sums over rows, in two steps of fixed shape -------------------------------------------

#define SUM_ROWS 64
#define COLUMNS 256 // of a block of 32 × 8 threads
enum { PLAIN = 0, OF_RMSNORM = 1, OF_LAYERNORM = 2 };

// sums[chunk, d] = Σ dy · factor, where the factor is 1 or the normalized x. A block of 32 × 8
// threads sums SUM_ROWS rows of COLUMNS columns.
template <int X> DEVICE void sum_rows_impl(float* sums, Tensor dy, Tensor x, const float* stats, const Rows& at, i64 factor_kind) {
    __shared__ float parts[8][COLUMNS];
    i64 j = (i64)blockIdx.y * COLUMNS + 8 * threadIdx.x;
    int first = (int)blockIdx.x * SUM_ROWS, end = (int)(first + SUM_ROWS < at.count ? first + SUM_ROWS : at.count);
    float sum[8] = {};
    for (int row = first + (int)threadIdx.y; j < at.d && row < end; row += 8) {
        float g[8], v[8];
        load_eight<X>(g, dy, row_start(at, row) + j, at.d - j);
        if (factor_kind != PLAIN) {
            load_eight<X>(v, x, row * at.d + j, at.d - j);
            float mean = factor_kind == OF_LAYERNORM ? stats[2 * row] : 0.0f;
            float factor = factor_kind == OF_LAYERNORM ? stats[2 * row + 1] : stats[row];
            EIGHT(k) g[k] = __fmul_rn(g[k], (v[k] - mean) * factor);
        }
        EIGHT(k) sum[k] += g[k];
    }
    EIGHT(k) parts[threadIdx.y][32 * k + threadIdx.x] = sum[k];
    __syncthreads();
    // Thread y sums column 8·x + y over all y, so that the threads of a warp read consecutive
    // words.
    float total = parts[0][32 * threadIdx.y + threadIdx.x];
    for (int y = 1; y < 8; y++) total += parts[y][32 * threadIdx.y + threadIdx.x];
    if (j + threadIdx.y < at.d) sums[(i64)blockIdx.x * at.d + j + threadIdx.y] = total;
}
KERNEL sum_rows(float* sums, Tensor dy, Tensor x, const float* stats, Rows at, i64 factor_kind) { sum_rows_impl<ANY>(sums, dy, x, stats, at, factor_kind); }
KERNEL sum_rows_bf16(float* sums, Tensor dy, Tensor x, const float* stats, Rows at, i64 factor_kind) { sum_rows_impl<BF16>(sums, dy, x, stats, at, factor_kind); }

// out[d] += Σ sums[chunk, d]. A block of 32 × 32 threads sums 32 columns: thread y sums every 32nd
// chunk, then the results are summed in the order of y.
WIDE_KERNEL add_sums(float* out, const float* sums, i64 chunks, i64 d) {
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

// y[m, n] += bias[n]. One block per row.
KERNEL bias_forward(Tensor y, Tensor bias, i64 n) {
    i64 row = (i64)blockIdx.x * n;
    EIGHTS_OF_ROW(j, n) {
        float v[8], b[8];
        load_eight(v, y, row + j, n - j);
        load_eight(b, bias, j, n - j);
        EIGHT(k) v[k] += b[k];
        store_eight(y, row + j, n - j, v);
    }
}

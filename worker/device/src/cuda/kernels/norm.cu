// RMSNorm and LayerNorm, alone, after a residual add, and of each head; sums over the rows of a matrix.
//
// A block per row; of rows with at most 256 elements (heads) a warp each, several to a block.
#include "common.cuh"

DEVICE i64 this_row() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }

// The sum over the threads of a row.
DEVICE float row_sum(float x) { return blockDim.x == 32 ? warp_sum(x) : block_sum(x); }

// Elements of x, to which delta is added before, as it is kept (rounded to x's type), where delta is given.
DEVICE void added(float (&v)[8], Tensor x, Tensor delta, i64 i, i64 left) {
    load_eight(v, x, i, left);
    if (!delta.at) return;
    float by[8];
    load_eight(by, delta, i, left);
    EIGHT(k) v[k] += by[k];
    store_eight(x, i, left, v);
    load_eight(v, x, i, left);
}

KERNEL rmsnorm_forward(Tensor y, float* rstd, Tensor x, Tensor delta, Tensor w, i64 rows, i64 d, float eps) {
    i64 row = this_row() * d;
    if (this_row() >= rows) return;
    float sum = 0;
    EIGHTS_OF_ROW(j, d) {
        float v[8];
        added(v, x, delta, row + j, d - j);
        EIGHT(k) sum += v[k] * v[k];
    }
    float factor = 1.0f / sqrtf(row_sum(sum) / (float)d + eps);
    if (threadIdx.x == 0) rstd[this_row()] = factor;
    EIGHTS_OF_ROW(j, d) {
        float v[8], weight[8];
        load_eight(v, x, row + j, d - j);
        load_eight(weight, w, j, d - j);
        EIGHT(k) v[k] = v[k] * factor * weight[k];
        store_eight(y, row + j, d - j, v);
    }
}

// Rows of `d` that lie in groups of `per` inside rows of `stride`, from column `first` on: heads. Plain rows: per 1, stride d.
struct Rows {
    i64 count, d, per, stride, first;
};
DEVICE i64 row_start(Rows r, i64 row) { return row / r.per * r.stride + r.first + row % r.per * r.d; }

// The gradient by x of a row of RMSNorm; dy and dx may be the same memory.
KERNEL rmsnorm_backward(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* rstd, Rows at, i64 add) {
    if (this_row() >= at.count) return;
    i64 row = this_row() * at.d, given = row_start(at, this_row());
    float factor = rstd[this_row()], along = 0;
    EIGHTS_OF_ROW(j, at.d) {
        float g[8], weight[8], v[8];
        load_eight(g, dy, given + j, at.d - j);
        load_eight(weight, w, j, at.d - j);
        load_eight(v, x, row + j, at.d - j);
        EIGHT(k) along += g[k] * weight[k] * v[k];
    }
    along = row_sum(along) * factor * factor / (float)at.d;
    EIGHTS_OF_ROW(j, at.d) {
        float g[8], weight[8], v[8];
        load_eight(g, dy, given + j, at.d - j);
        load_eight(weight, w, j, at.d - j);
        load_eight(v, x, row + j, at.d - j);
        EIGHT(k) g[k] = factor * (g[k] * weight[k] - v[k] * along);
        if (add) {
            load_eight(v, dx, given + j, at.d - j);
            EIGHT(k) g[k] = v[k] + g[k];
        }
        store_eight(dx, given + j, at.d - j, g);
    }
}

// In place on x; what the heads were goes to raw.
KERNEL rmsnorm_heads_forward(Tensor x, Tensor raw, float* rstd, Tensor w, Rows at, float eps) {
    if (this_row() >= at.count) return;
    i64 row = this_row() * at.d, given = row_start(at, this_row());
    float sum = 0;
    EIGHTS_OF_ROW(j, at.d) {
        float v[8];
        load_eight(v, x, given + j, at.d - j);
        store_eight(raw, row + j, at.d - j, v);
        EIGHT(k) sum += v[k] * v[k];
    }
    float factor = 1.0f / sqrtf(row_sum(sum) / (float)at.d + eps);
    if (threadIdx.x == 0) rstd[this_row()] = factor;
    EIGHTS_OF_ROW(j, at.d) {
        float v[8], weight[8];
        load_eight(v, raw, row + j, at.d - j);
        load_eight(weight, w, j, at.d - j);
        EIGHT(k) v[k] = v[k] * factor * weight[k];
        store_eight(x, given + j, at.d - j, v);
    }
}

KERNEL layernorm_forward(Tensor y, float* stats, Tensor x, Tensor delta, Tensor w, Tensor b, i64 rows, i64 d, float eps) {
    i64 row = this_row() * d;
    if (this_row() >= rows) return;
    float sum = 0;
    EIGHTS_OF_ROW(j, d) {
        float v[8];
        added(v, x, delta, row + j, d - j);
        EIGHT(k) sum += v[k];
    }
    float mean = row_sum(sum) / (float)d, square = 0;
    EIGHTS_OF_ROW(j, d) {
        float v[8];
        load_eight(v, x, row + j, d - j);
        EIGHT(k) square += k < d - j ? (v[k] - mean) * (v[k] - mean) : 0.0f;
    }
    float factor = 1.0f / sqrtf(row_sum(square) / (float)d + eps);
    if (threadIdx.x == 0) {
        stats[2 * this_row()] = mean;
        stats[2 * this_row() + 1] = factor;
    }
    EIGHTS_OF_ROW(j, d) {
        float v[8], weight[8], bias[8];
        load_eight(v, x, row + j, d - j);
        load_eight(weight, w, j, d - j);
        load_eight(bias, b, j, d - j);
        EIGHT(k) v[k] = (v[k] - mean) * factor * weight[k] + bias[k];
        store_eight(y, row + j, d - j, v);
    }
}

KERNEL layernorm_backward(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* stats, i64 rows, i64 d, i64 add) {
    i64 row = this_row() * d;
    if (this_row() >= rows) return;
    float mean = stats[2 * this_row()], factor = stats[2 * this_row() + 1];
    float along_one = 0, along_x = 0;
    EIGHTS_OF_ROW(j, d) {
        float g[8], weight[8], v[8];
        load_eight(g, dy, row + j, d - j);
        load_eight(weight, w, j, d - j);
        load_eight(v, x, row + j, d - j);
        EIGHT(k) {
            along_one += g[k] * weight[k];
            along_x += g[k] * weight[k] * (v[k] - mean) * factor;
        }
    }
    along_one = row_sum(along_one) / (float)d;
    along_x = row_sum(along_x) / (float)d;
    EIGHTS_OF_ROW(j, d) {
        float g[8], weight[8], v[8];
        load_eight(g, dy, row + j, d - j);
        load_eight(weight, w, j, d - j);
        load_eight(v, x, row + j, d - j);
        EIGHT(k) g[k] = factor * (g[k] * weight[k] - along_one - (v[k] - mean) * factor * along_x);
        if (add) {
            load_eight(v, dx, row + j, d - j);
            EIGHT(k) g[k] = v[k] + g[k];
        }
        store_eight(dx, row + j, d - j, g);
    }
}

// --- gradients of weights: sums over rows, in two steps of fixed shape --------------------------------------------------

#define SUM_ROWS 64
#define COLUMNS 256 // of a block of 32 × 8 threads
enum { PLAIN = 0, OF_RMSNORM = 1, OF_LAYERNORM = 2 };

// Blocks of 32 × 8 threads, one for COLUMNS columns of SUM_ROWS rows: sums[chunk, d] = Σ dy · (1, or the normed x).
KERNEL sum_rows(float* sums, Tensor dy, Tensor x, const float* stats, Rows at, i64 what) {
    __shared__ float parts[8][COLUMNS];
    i64 j = (i64)blockIdx.y * COLUMNS + 8 * threadIdx.x, first = (i64)blockIdx.x * SUM_ROWS;
    i64 end = first + SUM_ROWS < at.count ? first + SUM_ROWS : at.count;
    float sum[8] = {};
    for (i64 row = first + threadIdx.y; j < at.d && row < end; row += 8) {
        float g[8], v[8];
        load_eight(g, dy, row_start(at, row) + j, at.d - j);
        if (what != PLAIN) {
            load_eight(v, x, row * at.d + j, at.d - j);
            float mean = what == OF_LAYERNORM ? stats[2 * row] : 0.0f;
            float factor = what == OF_LAYERNORM ? stats[2 * row + 1] : stats[row];
            EIGHT(k) g[k] *= (v[k] - mean) * factor;
        }
        EIGHT(k) sum[k] += g[k];
    }
    EIGHT(k) parts[threadIdx.y][32 * k + threadIdx.x] = sum[k];
    __syncthreads();
    // Thread y adds up what column 8·x + y of all y's has: all of a warp's threads read side by side.
    float total = parts[0][32 * threadIdx.y + threadIdx.x];
    for (int y = 1; y < 8; y++) total += parts[y][32 * threadIdx.y + threadIdx.x];
    if (j + threadIdx.y < at.d) sums[(i64)blockIdx.x * at.d + j + threadIdx.y] = total;
}

// out[d] += Σ sums[chunk, d]. Blocks of 32 × 32 threads, one for 32 columns: thread y has every 32nd chunk, then y in order.
KERNEL add_sums(float* out, const float* sums, i64 chunks, i64 d) {
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

// y[m, n] += bias[n], a block per row
KERNEL bias_forward(Tensor y, Tensor bias, i64 n) {
    i64 row = (i64)blockIdx.x * n;
    EIGHTS_OF_ROW(j, n) {
        float v[8], by[8];
        load_eight(v, y, row + j, n - j);
        load_eight(by, bias, j, n - j);
        EIGHT(k) v[k] += by[k];
        store_eight(y, row + j, n - j, v);
    }
}

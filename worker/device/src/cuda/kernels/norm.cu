// RMSNorm and LayerNorm, alone, after a residual add, and of each head; sums over the rows of a matrix. One block per row.
#include "common.cuh"

// `x += delta` as it is kept (rounded to x's type), where delta is given.
DEVICE float added(Tensor x, Tensor delta, i64 i) {
    if (!delta.at) return load(x, i);
    store(x, i, load(x, i) + load(delta, i));
    return load(x, i);
}

KERNEL rmsnorm_forward(Tensor y, float* rstd, Tensor x, Tensor delta, Tensor w, i64 d, float eps) {
    i64 row = (i64)blockIdx.x * d;
    float sum = 0;
    EACH_OF_ROW(j, d) {
        float v = added(x, delta, row + j);
        sum += v * v;
    }
    float factor = 1.0f / sqrtf(block_sum(sum) / (float)d + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = factor;
    EACH_OF_ROW(j, d) store(y, row + j, load(x, row + j) * factor * load(w, j));
}

// Rows of `d` that lie in groups of `per` inside rows of `stride`, from column `first` on: heads. Plain rows: per 1, stride d.
struct Rows {
    i64 d, per, stride, first;
};
DEVICE i64 row_start(Rows r, i64 row) { return row / r.per * r.stride + r.first + row % r.per * r.d; }

// The gradient by x of a row of RMSNorm; dy and dx may be the same memory.
KERNEL rmsnorm_backward(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* rstd, Rows at, i64 add) {
    i64 row = (i64)blockIdx.x * at.d, given = row_start(at, blockIdx.x);
    float factor = rstd[blockIdx.x], along = 0;
    EACH_OF_ROW(j, at.d) along += load(dy, given + j) * load(w, j) * load(x, row + j);
    along = block_sum(along) * factor * factor / (float)at.d;
    EACH_OF_ROW(j, at.d) {
        float v = factor * (load(dy, given + j) * load(w, j) - load(x, row + j) * along);
        store(dx, given + j, add ? load(dx, given + j) + v : v);
    }
}

// In place on x; what the heads were goes to raw.
KERNEL rmsnorm_heads_forward(Tensor x, Tensor raw, float* rstd, Tensor w, Rows at, float eps) {
    i64 row = (i64)blockIdx.x * at.d, given = row_start(at, blockIdx.x);
    float sum = 0;
    EACH_OF_ROW(j, at.d) {
        float v = load(x, given + j);
        store(raw, row + j, v);
        sum += v * v;
    }
    float factor = 1.0f / sqrtf(block_sum(sum) / (float)at.d + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = factor;
    EACH_OF_ROW(j, at.d) store(x, given + j, load(raw, row + j) * factor * load(w, j));
}

KERNEL layernorm_forward(Tensor y, float* stats, Tensor x, Tensor delta, Tensor w, Tensor b, i64 d, float eps) {
    i64 row = (i64)blockIdx.x * d;
    float sum = 0;
    EACH_OF_ROW(j, d) sum += added(x, delta, row + j);
    float mean = block_sum(sum) / (float)d, square = 0;
    EACH_OF_ROW(j, d) {
        float centred = load(x, row + j) - mean;
        square += centred * centred;
    }
    float factor = 1.0f / sqrtf(block_sum(square) / (float)d + eps);
    if (threadIdx.x == 0) {
        stats[2 * (i64)blockIdx.x] = mean;
        stats[2 * (i64)blockIdx.x + 1] = factor;
    }
    EACH_OF_ROW(j, d) store(y, row + j, (load(x, row + j) - mean) * factor * load(w, j) + load(b, j));
}

KERNEL layernorm_backward(Tensor dx, Tensor dy, Tensor x, Tensor w, const float* stats, i64 d, i64 add) {
    i64 row = (i64)blockIdx.x * d;
    float mean = stats[2 * (i64)blockIdx.x], factor = stats[2 * (i64)blockIdx.x + 1];
    float along_one = 0, along_x = 0;
    EACH_OF_ROW(j, d) {
        float g = load(dy, row + j) * load(w, j);
        along_one += g;
        along_x += g * (load(x, row + j) - mean) * factor;
    }
    along_one = block_sum(along_one) / (float)d;
    along_x = block_sum(along_x) / (float)d;
    EACH_OF_ROW(j, d) {
        float normed = (load(x, row + j) - mean) * factor;
        float v = factor * (load(dy, row + j) * load(w, j) - along_one - normed * along_x);
        store(dx, row + j, add ? load(dx, row + j) + v : v);
    }
}

// --- gradients of weights: sums over rows, in two steps of fixed shape --------------------------------------------------

#define SUM_ROWS 64
enum { PLAIN = 0, OF_RMSNORM = 1, OF_LAYERNORM = 2 };

// Blocks of 32 × 8 threads, one for 32 columns of SUM_ROWS rows: sums[chunk, d] = Σ dy · (1, or the normed x).
KERNEL sum_rows(float* sums, Tensor dy, Tensor x, const float* stats, i64 rows, Rows at, i64 what) {
    __shared__ float parts[8][33];
    i64 j = (i64)blockIdx.x * 32 + threadIdx.x, first = (i64)blockIdx.y * SUM_ROWS;
    i64 end = first + SUM_ROWS < rows ? first + SUM_ROWS : rows;
    float sum = 0;
    if (j < at.d) {
        for (i64 row = first + threadIdx.y; row < end; row += 8) {
            float v = load(dy, row_start(at, row) + j);
            if (what == OF_RMSNORM) v *= load(x, row * at.d + j) * stats[row];
            if (what == OF_LAYERNORM) v *= (load(x, row * at.d + j) - stats[2 * row]) * stats[2 * row + 1];
            sum += v;
        }
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && j < at.d) {
        for (int y = 1; y < 8; y++) sum += parts[y][threadIdx.x];
        sums[(i64)blockIdx.y * at.d + j] = sum;
    }
}

// out[d] += Σ sums[chunk, d], in order.
KERNEL add_sums(float* out, const float* sums, i64 chunks, i64 d) {
    EACH(j, d) {
        float sum = 0;
        for (i64 chunk = 0; chunk < chunks; chunk++) sum += sums[chunk * d + j];
        out[j] += sum;
    }
}

// y[m, n] += bias[n], a block per row
KERNEL bias_forward(Tensor y, Tensor bias, i64 n) {
    i64 row = (i64)blockIdx.x * n;
    EACH_OF_ROW(j, n) store(y, row + j, load(y, row + j) + load(bias, j));
}

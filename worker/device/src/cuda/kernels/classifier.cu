// Cross-entropy loss of a chunk of rows of logits, and the gradient of the logits. One block per
// row.
#include "common.cuh"

#define IGNORE_LABEL 0xffffffffu

// Applies the softcap to a logit if IS_CAPPED.
template <bool IS_CAPPED> DEVICE float softcap_logit(float logit, float cap) { return IS_CAPPED ? cap * tanhf(logit / cap) : logit; }

// Loads logits j..j + 8 of a row, after the softcap. Rows are aligned to 16 bytes and padded to
// multiples of eight; padding becomes −∞.
template <bool IS_CAPPED> DEVICE void load_logits(float (&x)[8], const float* row, int j, int v, float cap) {
    load_8<F32>(x, f32_tensor(row), j, 8);
    FOR_EIGHT(k) x[k] = softcap_logit<IS_CAPPED>(x[k], cap);
    if (j + 8 <= v) return;
    FOR_EIGHT(k) if (j + k >= v) x[k] = NEGATIVE_INFINITY;
}
// Returns eˣ, as exact as the GPU's approximation of 2ˣ.
DEVICE float exp_approx(float x) { return exp2_approx(x * LOG2E); }

// Returns a row's largest logit, and writes Σ e^(logit − largest) to `total`, in f64. Each thread
// computes both for its logits in one pass. Then the threads' results are combined.
template <bool IS_CAPPED> DEVICE float compute_row_softmax(double& total, const float* row, int v, float cap) {
    float largest = NEGATIVE_INFINITY;
    double sum = 0;
    FOR_EACH_ROW_VECTOR(j, v) {
        float x[8], part = 0, above = largest;
        load_logits<IS_CAPPED>(x, row, j, v, cap);
        FOR_EIGHT(k) above = fmaxf(above, x[k]);
        if (above != largest) {
            sum *= (double)expf(largest - above);
            largest = above;
        }
        float pivot = largest == NEGATIVE_INFINITY ? 0.0f : largest;
        FOR_EIGHT(k) part += exp_approx(x[k] - pivot);
        sum += (double)part;
    }
    float above = block_max(largest);
    total = block_sum(sum == 0 ? 0.0 : sum * (double)expf(largest - above));
    return above;
}

// Overwrites the beginning of the row with the gradient of its logits. `share` is 1 / Σ e^(logit −
// largest), and `factor` multiplies the gradient. The gradient of padding, up to `columns`, is 0.
template <bool IS_CAPPED> DEVICE void write_logit_gradients(Tensor to, const float* row, int v, int columns, u32 label, float cap, float largest, float share, float factor) {
    for (int first = 0; first < columns; first += 8 * (int)blockDim.x) {
        int j = first + 8 * (int)threadIdx.x, label_index = (int)label - j;
        float x[8];
        if (j < columns) load_logits<IS_CAPPED>(x, row, j, v, cap);
        __syncthreads(); // 16-bit gradients overwrite logits that another thread has just read
        if (j >= columns) continue;
        FOR_EIGHT(k) {
            float slope = IS_CAPPED ? 1.0f - (x[k] / cap) * (x[k] / cap) : 1.0f;
            float d = exp_approx(x[k] - largest) * share - (k == label_index ? 1.0f : 0.0f);
            x[k] = d * (IS_CAPPED ? slope * factor : factor);
        }
        if (j + 8 > v) {
            FOR_EIGHT(k) if (j + k >= v) x[k] = 0.0f;
        }
        store_aligned_8(to, j, x);
    }
}

// Implements the kernels `cross_entropy` and `cross_entropy_softcapped` for one row.
template <bool IS_CAPPED>
DEVICE void compute_cross_entropy(float* loss, float* logits, const u32* labels, i64 v, i64 columns, i64 stride, i64 gradient_type, float cap, float factor) {
    float* row = logits + (i64)blockIdx.x * stride;
    Tensor dlogits = {row, gradient_type};
    u32 label = labels[blockIdx.x];
    if (label == IGNORE_LABEL) {
        float zeros[8] = {};
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        if (gradient_type >= 0) FOR_EACH_ROW_VECTOR(j, columns) store_aligned_8(dlogits, j, zeros);
        return;
    }
    double total;
    float largest = compute_row_softmax<IS_CAPPED>(total, row, (int)v, cap);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = (float)(log(total) + (double)largest - (double)softcap_logit<IS_CAPPED>(row[label], cap));
    }
    if (gradient_type < 0) return;
    __syncthreads(); // the label's logit is overwritten below
    write_logit_gradients<IS_CAPPED>(dlogits, row, (int)v, (int)columns, label, cap, largest, (float)(1.0 / total), factor);
}

// Computes loss[row] of rows of v logits, which are padded to `columns` logits in the matmuls and to
// `stride` logits in memory. If `gradient_type` is not negative, it is the type of the gradient
// times `factor`, which overwrites the beginning of each row. `cap` is the softcap, or 0.
#define CROSS_ENTROPY float *loss, float *logits, const u32 *labels, i64 v, i64 columns, i64 stride, i64 gradient_type, float cap, float factor
KERNEL cross_entropy(CROSS_ENTROPY) { compute_cross_entropy<false>(loss, logits, labels, v, columns, stride, gradient_type, cap, factor); }
KERNEL cross_entropy_softcapped(CROSS_ENTROPY) { compute_cross_entropy<true>(loss, logits, labels, v, columns, stride, gradient_type, cap, factor); }

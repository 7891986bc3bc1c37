// Cross-entropy of a chunk of rows of logits, and its gradient. One block per row.
#include "common.cuh"

#define IGNORE 0xffffffffu

template <bool IS_CAPPED> DEVICE float capped(float logit, float cap) { return IS_CAPPED ? cap * tanhf(logit / cap) : logit; }

// Loads logits j..j + 8 of a row, after the softcap. Rows are aligned to 16 bytes and padded to
// multiples of eight; padding becomes −∞.
template <bool IS_CAPPED> DEVICE void load_logits(float (&x)[8], const float* row, int j, int v, float cap) {
    load_eight<F32>(x, f32_tensor(row), j, 8);
    EIGHT(k) x[k] = capped<IS_CAPPED>(x[k], cap);
    if (j + 8 <= v) return;
    EIGHT(k) if (j + k >= v) x[k] = NEGATIVE_INFINITY;
}
DEVICE float power(float x) { return power_of_2(x * LOG2E); }

// A row's largest logit, and Σ e^(logit − largest) in f64. Each thread computes both for its logits
// in one pass, then they are combined.
template <bool IS_CAPPED> DEVICE float softmax_of_row(double& total, const float* row, int v, float cap) {
    float largest = NEGATIVE_INFINITY;
    double sum = 0;
    EIGHTS_OF_ROW(j, v) {
        float x[8], part = 0, above = largest;
        load_logits<IS_CAPPED>(x, row, j, v, cap);
        EIGHT(k) above = fmaxf(above, x[k]);
        if (above != largest) {
            sum *= (double)expf(largest - above);
            largest = above;
        }
        float pivot = largest == NEGATIVE_INFINITY ? 0.0f : largest;
        EIGHT(k) part += power(x[k] - pivot);
        sum += (double)part;
    }
    float above = block_max(largest);
    total = block_sum(sum == 0 ? 0.0 : sum * (double)expf(largest - above));
    return above;
}

// Overwrites the beginning of the row with the gradient of its logits.
template <bool IS_CAPPED> DEVICE void write_gradient(Tensor to, const float* row, int v, u32 label, float cap, float largest, float share, float factor) {
    for (int first = 0; first < v; first += 8 * (int)blockDim.x) {
        int j = first + 8 * (int)threadIdx.x, label_index = (int)label - j;
        float x[8];
        if (j < v) load_logits<IS_CAPPED>(x, row, j, v, cap);
        __syncthreads(); // 16-bit gradients overwrite logits that another thread has just read
        if (j >= v) continue;
        EIGHT(k) {
            float slope = IS_CAPPED ? 1.0f - (x[k] / cap) * (x[k] / cap) : 1.0f;
            float d = power(x[k] - largest) * share - (k == label_index ? 1.0f : 0.0f);
            x[k] = d * (IS_CAPPED ? slope * factor : factor);
        }
        store_aligned(to, j, x);
    }
}

template <bool IS_CAPPED>
DEVICE void cross_entropy_impl(float* loss, float* logits, const u32* labels, i64 v, i64 stride, i64 gradient_type, float cap, float factor) {
    float* row = logits + (i64)blockIdx.x * stride;
    Tensor dlogits = {row, gradient_type};
    u32 label = labels[blockIdx.x];
    if (label == IGNORE) {
        float zeros[8] = {};
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        if (gradient_type >= 0) EIGHTS_OF_ROW(j, v) store_aligned(dlogits, j, zeros);
        return;
    }
    double total;
    float largest = softmax_of_row<IS_CAPPED>(total, row, (int)v, cap);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = (float)(log(total) + (double)largest - (double)capped<IS_CAPPED>(row[label], cap));
    }
    if (gradient_type < 0) return;
    __syncthreads(); // the label's logit is overwritten below
    write_gradient<IS_CAPPED>(dlogits, row, (int)v, label, cap, largest, (float)(1.0 / total), factor);
}

// Computes loss[row] of rows of `stride` logits. If `gradient_type` is not negative, it is the type
// of the gradient times `factor`, which overwrites the beginning of each row. `cap` is the softcap,
// or 0.
#define CROSS_ENTROPY float *loss, float *logits, const u32 *labels, i64 v, i64 stride, i64 gradient_type, float cap, float factor
KERNEL cross_entropy(CROSS_ENTROPY) { cross_entropy_impl<false>(loss, logits, labels, v, stride, gradient_type, cap, factor); }
KERNEL cross_entropy_capped(CROSS_ENTROPY) { cross_entropy_impl<true>(loss, logits, labels, v, stride, gradient_type, cap, factor); }

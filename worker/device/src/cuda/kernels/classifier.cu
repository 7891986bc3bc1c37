// Cross-entropy of a chunk of rows whose logits exist. A block per row.
#include "common.cuh"

#define IGNORE 0xffffffffu

DEVICE float capped(float logit, float cap) { return cap > 0 ? cap * tanhf(logit / cap) : logit; }

// A row's largest logit, and Σ e^(logit − largest) in f64: each thread's own as it goes, then of all.
DEVICE float softmax_of_row(double& total, Tensor logits, i64 row, i64 v, float cap) {
    float most = NEGATIVE_INFINITY;
    double sum = 0;
    EIGHTS_OF_ROW(j, v) {
        float x[8], part = 0, above = most;
        load_eight(x, logits, row + j, v - j);
        EIGHT(k) {
            x[k] = k < v - j ? capped(x[k], cap) : NEGATIVE_INFINITY;
            above = fmaxf(above, x[k]);
        }
        float pivot = above == NEGATIVE_INFINITY ? 0.0f : above;
        EIGHT(k) part += expf(x[k] - pivot);
        sum = (most == above ? sum : sum * (double)expf(most - above)) + (double)part;
        most = above;
    }
    float above = block_max(most);
    total = block_sum(sum == 0 ? 0.0 : sum * (double)expf(most - above));
    return above;
}

// loss[row]; rows of `stride` logits. `over`: the type of the gradient times `factor`, which is written over the logits, a row over
// its own beginning; below 0: none. cap 0: none.
KERNEL cross_entropy(float* loss, float* logits, const u32* labels, i64 v, i64 stride, i64 over, float cap, float factor) {
    i64 row = (i64)blockIdx.x * stride, wide = 8 * (i64)blockDim.x;
    Tensor given = floats(logits), dlogits = {logits, over};
    i64 to = over == F32 ? row : 2 * row;
    u32 label = labels[blockIdx.x];
    if (label == IGNORE) {
        float none[8] = {};
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        if (over >= 0) EIGHTS_OF_ROW(j, v) store_eight(dlogits, to + j, v - j, none);
        return;
    }
    double total;
    float most = softmax_of_row(total, given, row, v, cap);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = (float)(log(total) + (double)most - (double)capped(logits[row + label], cap));
    }
    if (over < 0) return;
    float share = (float)(1.0 / total);
    __syncthreads(); // the label's logit is overwritten below
    for (i64 first = 0; first < v; first += wide) {
        i64 j = first + 8 * (i64)threadIdx.x;
        float x[8];
        if (j < v) load_eight(x, given, row + j, v - j);
        __syncthreads(); // gradients of 16 bits take the place of logits that another thread has just read
        if (j >= v) continue;
        EIGHT(k) {
            float logit = capped(x[k], cap);
            float d = expf(logit - most) * share - (j + k == label ? 1.0f : 0.0f);
            if (cap > 0) d *= 1.0f - (logit / cap) * (logit / cap);
            x[k] = d * factor;
        }
        store_eight(dlogits, to + j, v - j, x);
    }
}

// Cross-entropy of a chunk of rows whose logits exist. A block per row.
#include "common.cuh"

#define IGNORE 0xffffffffu

DEVICE float capped(float logit, float cap) { return cap > 0 ? cap * tanhf(logit / cap) : logit; }

// loss[row], and dlogits (of any type; may be the logits' own memory where both are f32) times `factor`; cap 0: none.
KERNEL cross_entropy(float* loss, Tensor dlogits, const float* logits, const u32* labels, i64 v, float cap, float factor) {
    i64 row = (i64)blockIdx.x * v;
    u32 label = labels[blockIdx.x];
    if (label == IGNORE) {
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        if (dlogits.at) EACH_OF_ROW(j, v) store(dlogits, row + j, 0);
        return;
    }
    float most = NEGATIVE_INFINITY;
    EACH_OF_ROW(j, v) most = fmaxf(most, capped(logits[row + j], cap));
    most = block_max(most);
    double total = 0;
    EACH_OF_ROW(j, v) total += expf(capped(logits[row + j], cap) - most);
    total = block_sum(total);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = (float)(log(total) + (double)most - (double)capped(logits[row + label], cap));
    }
    __syncthreads(); // the label's logit is overwritten below
    if (!dlogits.at) return;
    float share = (float)(1.0 / total);
    EACH_OF_ROW(j, v) {
        float logit = capped(logits[row + j], cap);
        float d = expf(logit - most) * share - (j == label ? 1.0f : 0.0f);
        if (cap > 0) d *= 1.0f - (logit / cap) * (logit / cap);
        store(dlogits, row + j, d * factor);
    }
}

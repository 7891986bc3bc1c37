// Kernels on rows: gathering and combining rows for experts, the embedding, and the router. A block
// processes one row, except in the router.
#include "common.cuh"

// Gathers rows: y[i, d] = x[rows[i], d]. This is also the forward pass of the embedding.
KERNEL gather_rows(Tensor y, Tensor x, const u32* rows, i64 d) {
    i64 from = (i64)rows[blockIdx.x] * d, to = (i64)blockIdx.x * d;
    FOR_EACH_ROW_VECTOR(j, d) {
        float v[8];
        load_8(v, x, from + j, d - j);
        store_8(y, to + j, d - j, v);
    }
}

// Adds dw[ids[k], d] += Σ dx[order[i], d] over i in starts[k]..starts[k + 1], in the order of i.
// One block per id.
KERNEL embedding_backward(Tensor dw, Tensor dx, const u32* ids, const u32* starts, const u32* order, i64 d) {
    u32 first = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    i64 to = (i64)ids[blockIdx.x] * d;
    FOR_EACH_ROW_VECTOR(j, d) {
        float sum[8];
        load_8(sum, dw, to + j, d - j);
        for (u32 i = first; i < end; i++) {
            float v[8];
            load_8(v, dx, (i64)order[i] * d + j, d - j);
            FOR_EIGHT(k) sum[k] += v[k];
        }
        store_8(dw, to + j, d - j, sum);
    }
}

// Computes weighted sums of rows: y[m, d] (=|+=) Σ_k weights[m, k]·x[indices[m, k], d], in the
// order of k. Without `weights` every weight is 1.
KERNEL combine_rows(Tensor y, Tensor x, Tensor weights, const u32* indices, i64 per_row, i64 d, i64 add) {
    i64 to = (i64)blockIdx.x * d, first = (i64)blockIdx.x * per_row;
    FOR_EACH_ROW_VECTOR(j, d) {
        float sum[8] = {};
        for (i64 p = first; p < first + per_row; p++) {
            float v[8], weight = weights.at ? load(weights, p) : 1.0f;
            load_8(v, x, (i64)indices[p] * d + j, d - j);
            FOR_EIGHT(k) sum[k] = weights.at ? fmaf(v[k], weight, sum[k]) : sum[k] + v[k];
        }
        if (add) {
            float old[8];
            load_8(old, y, to + j, d - j);
            FOR_EIGHT(k) sum[k] = old[k] + sum[k];
        }
        store_8(y, to + j, d - j, sum);
    }
}

// Computes the dot product of each pair of rows: out[m] = Σ_i a[m, i]·b[m, i].
KERNEL dot_rows(Tensor out, Tensor a, Tensor b, i64 d) {
    i64 row = (i64)blockIdx.x * d;
    float sum = 0;
    FOR_EACH_ROW_VECTOR(j, d) {
        float x[8], y[8];
        load_8(x, a, row + j, d - j);
        load_8(y, b, row + j, d - j);
        FOR_EIGHT(k) sum += x[k] * y[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) store(out, blockIdx.x, sum);
}

// Multiplies each row by its factor: x[m, d] *= factors[m].
KERNEL scale_rows(Tensor x, Tensor factors, i64 d) {
    i64 row = (i64)blockIdx.x * d;
    float factor = load(factors, blockIdx.x);
    FOR_EACH_ROW_VECTOR(j, d) {
        float v[8];
        load_8(v, x, row + j, d - j);
        FOR_EIGHT(k) v[k] *= factor;
        store_8(x, row + j, d - j, v);
    }
}

// --- the router: one warp per row ---------------------------------------------------------------------------

// Returns the expert with the largest probability among the experts that are not taken yet. Of
// equal probabilities the lowest index wins. NaN counts as the smallest number. Bit i of `taken`
// stands for the lane's expert 32·i + lane.
DEVICE u32 find_best_expert(const float* probs, i64 experts, u32 taken) {
    float best = NEGATIVE_INFINITY;
    u32 expert = 0xffffffffu;
    int turn = 0;
    for (i64 e = threadIdx.x; e < experts; e += 32, turn++) {
        if (taken >> turn & 1) continue;
        if (expert == 0xffffffffu || probs[e] > best) {
            best = probs[e] == probs[e] ? probs[e] : NEGATIVE_INFINITY;
            expert = (u32)e;
        }
    }
    for (int other = 16; other > 0; other >>= 1) {
        float b = __shfl_xor_sync(0xffffffffu, best, other);
        u32 w = __shfl_xor_sync(0xffffffffu, expert, other);
        if (w != 0xffffffffu && (expert == 0xffffffffu || b > best || (b == best && w < expert))) {
            best = b;
            expert = w;
        }
    }
    return expert;
}

// Selects the experts of each row: writes the softmax of the logits, its log-sum-exp, the chosen
// experts and their weights. There may be at most 1024 experts, because each lane stores in 32 bits
// which of its experts are taken.
KERNEL router_forward(float* probs, float* weights, float* lse, u32* chosen, Tensor logits, i64 experts, i64 per_token, i64 normalize) {
    i64 row = (i64)blockIdx.x * experts, first_choice = (i64)blockIdx.x * per_token;
    float largest = NEGATIVE_INFINITY;
    FOR_EACH_ROW_ELEMENT(e, experts) largest = fmaxf(largest, load(logits, row + e));
    largest = warp_max(largest);
    double total = 0;
    FOR_EACH_ROW_ELEMENT(e, experts) {
        float p = expf(load(logits, row + e) - largest);
        probs[row + e] = p;
        total += p;
    }
    total = warp_sum(total);
    float share = (float)(1.0 / total);
    FOR_EACH_ROW_ELEMENT(e, experts) probs[row + e] *= share;
    if (threadIdx.x == 0) lse[blockIdx.x] = (float)((double)largest + log(total));
    __syncwarp();
    u32 taken = 0;
    float sum = 0;
    for (i64 k = 0; k < per_token; k++) {
        u32 e = find_best_expert(probs + row, experts, taken);
        if ((e & 31) == threadIdx.x) taken |= 1u << (e >> 5);
        if (threadIdx.x == 0) chosen[first_choice + k] = e;
        sum += probs[row + e];
    }
    __syncwarp();
    for (i64 k = threadIdx.x; k < per_token; k += 32) {
        weights[first_choice + k] = probs[row + chosen[first_choice + k]] / (normalize ? sum : 1.0f);
    }
}

// Returns the gradient with respect to the probability of expert e. It comes from load balancing,
// and from the weight if the expert was chosen.
DEVICE float compute_probability_gradient(u32 e, const float* balance, const u32* chosen, const float* dweights, i64 per_token, float shared, float sum) {
    float d = balance[e];
    for (i64 k = 0; k < per_token; k++)
        if (chosen[k] == e) d += (dweights[k] - shared) / sum;
    return d;
}

// Computes the gradient of the router's logits. `twice_z` is twice the coefficient of the z-loss.
KERNEL router_backward(Tensor dlogits, const float* dweights, const float* probs, const float* lse, const u32* chosen,
                       const float* balance, i64 experts, i64 per_token, i64 normalize, float twice_z) {
    i64 row = (i64)blockIdx.x * experts;
    chosen += (i64)blockIdx.x * per_token;
    dweights += (i64)blockIdx.x * per_token;
    float sum = 1, shared = 0;
    if (normalize) {
        sum = 0;
        for (i64 k = 0; k < per_token; k++) sum += probs[row + chosen[k]];
        for (i64 k = 0; k < per_token; k++) shared += dweights[k] * (probs[row + chosen[k]] / sum);
    }
    float projection = 0;
    FOR_EACH_ROW_ELEMENT(e, experts)
        projection += compute_probability_gradient((u32)e, balance, chosen, dweights, per_token, shared, sum) * probs[row + e];
    projection = warp_sum(projection);
    FOR_EACH_ROW_ELEMENT(e, experts) {
        float d = compute_probability_gradient((u32)e, balance, chosen, dweights, per_token, shared, sum);
        store(dlogits, row + e, probs[row + e] * (d - projection + twice_z * lse[blockIdx.x]));
    }
}

// Causal grouped-query attention in f32, for all types and head dimensions. flash.cu is the fast
// variant for bf16.
//
// Memory is linear in t. There are no atomics, so sums have one fixed order. A block of 128 threads
// owns a tile of TILE queries (or keys) of one head, four threads per row. They share the row's
// scores, and each has every fourth element of the row's output. The tiles of the other side pass
// through shared memory one by one.
#include "common.cuh"
#include "attention.cuh"

#define TILE 32
#define THREADS_PER_ROW 4
#define MAX_HEAD_DIM 256

// Loads rows first..first+TILE of one head to shared memory as f32, with a stride of dim + 1. Rows
// beyond the sequence are zero.
DEVICE void load_tile(float* to, Tensor from, i64 sequence, i64 first, i64 stride, i64 column, Attention a) {
    for (i64 i = threadIdx.x; i < TILE * a.dim; i += blockDim.x) {
        i64 row = i / a.dim, j = i % a.dim;
        i64 at = first + row;
        to[row * (a.dim + 1) + j] = at < a.t ? load(from, (sequence * a.t + at) * stride + column + j) : 0.0f;
    }
}

// Returns the dot product of two rows in shared memory.
DEVICE float compute_dot_product(const float* a, const float* b, i64 dim) {
    float sum = 0;
    for (i64 j = 0; j < dim; j++) sum = fmaf(a[j], b[j], sum);
    return sum;
}

// Returns the first key to which any query of the tile attends. `first` is the tile's first query.
DEVICE i64 find_first_visible_key_of_tile(const u32* starts, i64 sequence, i64 first, Attention a) {
    i64 smallest = a.t;
    for (i64 q = first; q < first + TILE && q < a.t; q++) {
        i64 start = find_first_visible_key(starts, sequence, q, a);
        smallest = start < smallest ? start : smallest;
    }
    return smallest;
}

// Forward pass of attention: computes outputs and log-sum-exps. Grid: (tiles of queries, heads,
// sequences).
KERNEL attention_forward(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a) {
    DYNAMIC_SHARED(shared);
    i64 stride = a.dim + 1;
    float *qs = shared, *ks = qs + TILE * stride, *vs = ks + TILE * stride, *ps = vs + TILE * stride;
    i64 row = threadIdx.x / THREADS_PER_ROW, lane = threadIdx.x % THREADS_PER_ROW;
    i64 first = (i64)blockIdx.x * TILE, head = blockIdx.y, sequence = blockIdx.z;
    i64 kv = head / (a.heads / a.kv_heads), query = first + row;
    i64 start = find_first_visible_key(starts, sequence, query, a);
    load_tile(qs, qkv, sequence, first, qkv_row_width(a), head * a.dim, a);
    float largest = NEGATIVE_INFINITY, total = 0, out[MAX_HEAD_DIM / THREADS_PER_ROW];
    for (i64 c = 0; c < MAX_HEAD_DIM / THREADS_PER_ROW; c++) out[c] = 0;
    for (i64 key = find_first_visible_key_of_tile(starts, sequence, first, a) / TILE * TILE; key < first + TILE && key < a.t; key += TILE) {
        __syncthreads();
        load_tile(ks, qkv, sequence, key, qkv_row_width(a), (a.heads + kv) * a.dim, a);
        load_tile(vs, qkv, sequence, key, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
        __syncthreads();
        float s[TILE / THREADS_PER_ROW], above = largest;
        for (int i = 0; i < TILE / THREADS_PER_ROW; i++) {
            i64 j = lane + THREADS_PER_ROW * i;
            bool is_visible = key + j >= start && key + j <= query && query < a.t;
            s[i] = is_visible ? compute_softcapped_score(compute_dot_product(qs + row * stride, ks + j * stride, a.dim), a) : NEGATIVE_INFINITY;
            above = fmaxf(above, s[i]);
        }
        above = max_over_row_threads(above);
        float keep = above == NEGATIVE_INFINITY ? 1.0f : expf(largest - above), sum = 0;
        for (int i = 0; i < TILE / THREADS_PER_ROW; i++) {
            float p = s[i] == NEGATIVE_INFINITY ? 0.0f : expf(s[i] - above);
            sum += p;
            ps[row * (TILE + 1) + lane + THREADS_PER_ROW * i] = p * compute_dropout_factor(sequence, head, query, key + lane + THREADS_PER_ROW * i, a);
        }
        total = total * keep + sum_over_row_threads(sum);
        largest = above;
        __syncwarp();
        for (i64 c = 0; lane + THREADS_PER_ROW * c < a.dim; c++) {
            float v = out[c] * keep;
            for (int j = 0; j < TILE; j++) v = fmaf(ps[row * (TILE + 1) + j], vs[j * stride + lane + THREADS_PER_ROW * c], v);
            out[c] = v;
        }
    }
    if (query >= a.t) return;
    i64 at = ((sequence * a.t + query) * a.heads + head) * a.dim;
    for (i64 c = 0; lane + THREADS_PER_ROW * c < a.dim; c++) store(o, at + lane + THREADS_PER_ROW * c, out[c] / total);
    if (lane == 0) lse[(sequence * a.heads + head) * a.t + query] = largest + logf(total);
}

// Returns sum + a_low·b_low + a_high·b_high, where a and b are words of two bf16 values.
DEVICE float add_bf16_pair_products(float sum, u32 a, u32 b) {
    sum = fmaf(from_bf16((u16)a), from_bf16((u16)b), sum);
    return fmaf(from_bf16((u16)(a >> 16)), from_bf16((u16)(b >> 16)), sum);
}

// Computes dots[b, heads, t] = Σ do·o for the backward pass. Eight threads per query sum every
// eighth vector of 8 elements each. The order depends neither on the type nor on alignment. Grid:
// (tiles of 32 queries, heads, sequences).
KERNEL attention_delta(float* dots, Tensor d_o, Tensor o, Attention a) {
    i64 query = (i64)blockIdx.x * TILE + threadIdx.x / 8, head = blockIdx.y, sequence = blockIdx.z;
    i64 at = ((sequence * a.t + query) * a.heads + head) * a.dim;
    bool whole = d_o.type == BF16 && o.type == BF16 && a.dim % 8 == 0 && (((u64)d_o.at | (u64)o.at) & 15) == 0;
    float sum = 0;
    for (i64 j = threadIdx.x % 8 * 8; query < a.t && j < a.dim; j += 64) {
        if (whole) {
            uint4 x = *(const uint4*)((const u16*)d_o.at + at + j), y = *(const uint4*)((const u16*)o.at + at + j);
            sum = add_bf16_pair_products(add_bf16_pair_products(add_bf16_pair_products(add_bf16_pair_products(sum, x.x, y.x), x.y, y.y), x.z, y.z), x.w, y.w);
        } else {
            for (i64 k = j; k < j + 8 && k < a.dim; k++) sum = fmaf(load(d_o, at + k), load(o, at + k), sum);
        }
    }
    for (int other = 4; other > 0; other >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (threadIdx.x % 8 == 0 && query < a.t) dots[(sequence * a.heads + head) * a.t + query] = sum;
}

// Backward pass of attention: computes the gradient of the queries. Grid: (tiles of queries, heads,
// sequences).
KERNEL attention_backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts,
                            Attention a) {
    DYNAMIC_SHARED(shared);
    i64 stride = a.dim + 1;
    float *qs = shared, *gs = qs + TILE * stride, *ks = gs + TILE * stride, *vs = ks + TILE * stride;
    float* ds = vs + TILE * stride;
    i64 row = threadIdx.x / THREADS_PER_ROW, lane = threadIdx.x % THREADS_PER_ROW;
    i64 first = (i64)blockIdx.x * TILE, head = blockIdx.y, sequence = blockIdx.z;
    i64 kv = head / (a.heads / a.kv_heads), query = first + row;
    i64 start = find_first_visible_key(starts, sequence, query, a), stat = (sequence * a.heads + head) * a.t + query;
    load_tile(qs, qkv, sequence, first, qkv_row_width(a), head * a.dim, a);
    load_tile(gs, d_o, sequence, first, a.heads * a.dim, head * a.dim, a);
    float out[MAX_HEAD_DIM / THREADS_PER_ROW];
    for (i64 c = 0; c < MAX_HEAD_DIM / THREADS_PER_ROW; c++) out[c] = 0;
    for (i64 key = find_first_visible_key_of_tile(starts, sequence, first, a) / TILE * TILE; key < first + TILE && key < a.t; key += TILE) {
        __syncthreads();
        load_tile(ks, qkv, sequence, key, qkv_row_width(a), (a.heads + kv) * a.dim, a);
        load_tile(vs, qkv, sequence, key, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
        __syncthreads();
        for (int i = 0; i < TILE / THREADS_PER_ROW; i++) {
            i64 j = lane + THREADS_PER_ROW * i;
            float d = 0;
            if (key + j >= start && key + j <= query && query < a.t) {
                float s = compute_softcapped_score(compute_dot_product(qs + row * stride, ks + j * stride, a.dim), a);
                float dp = compute_dot_product(gs + row * stride, vs + j * stride, a.dim) * compute_dropout_factor(sequence, head, query, key + j, a);
                d = expf(s - lse[stat]) * (dp - dots[stat]) * softcap_slope_with_scale(s, a);
            }
            ds[row * (TILE + 1) + j] = d;
        }
        __syncwarp();
        for (i64 c = 0; lane + THREADS_PER_ROW * c < a.dim; c++) {
            float v = out[c];
            for (int j = 0; j < TILE; j++) v = fmaf(ds[row * (TILE + 1) + j], ks[j * stride + lane + THREADS_PER_ROW * c], v);
            out[c] = v;
        }
    }
    if (query >= a.t) return;
    i64 at = (sequence * a.t + query) * qkv_row_width(a) + head * a.dim;
    for (i64 c = 0; lane + THREADS_PER_ROW * c < a.dim; c++) store(dqkv, at + lane + THREADS_PER_ROW * c, out[c]);
}

// Backward pass of attention: computes the gradients of keys and values. Grid: (tiles of keys,
// kv_heads, sequences).
KERNEL attention_backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts,
                             Attention a) {
    DYNAMIC_SHARED(shared);
    i64 stride = a.dim + 1;
    float *ks = shared, *vs = ks + TILE * stride, *qs = vs + TILE * stride, *gs = qs + TILE * stride;
    float *ps = gs + TILE * stride, *ds = ps + TILE * (TILE + 1);
    i64 row = threadIdx.x / THREADS_PER_ROW, lane = threadIdx.x % THREADS_PER_ROW;
    i64 first = (i64)blockIdx.x * TILE, kv = blockIdx.y, sequence = blockIdx.z;
    i64 group = a.heads / a.kv_heads, key = first + row;
    load_tile(ks, qkv, sequence, first, qkv_row_width(a), (a.heads + kv) * a.dim, a);
    load_tile(vs, qkv, sequence, first, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    float dk[MAX_HEAD_DIM / THREADS_PER_ROW], dv[MAX_HEAD_DIM / THREADS_PER_ROW];
    for (i64 c = 0; c < MAX_HEAD_DIM / THREADS_PER_ROW; c++) dk[c] = dv[c] = 0;
    for (i64 head = kv * group; head < (kv + 1) * group; head++) {
        i64 stats = (sequence * a.heads + head) * a.t;
        for (i64 q = first; q < a.t; q += TILE) {
            if (find_first_visible_key_of_tile(starts, sequence, q, a) >= first + TILE) continue;
            __syncthreads();
            load_tile(qs, qkv, sequence, q, qkv_row_width(a), head * a.dim, a);
            load_tile(gs, d_o, sequence, q, a.heads * a.dim, head * a.dim, a);
            __syncthreads();
            for (int i = 0; i < TILE / THREADS_PER_ROW; i++) {
                i64 j = lane + THREADS_PER_ROW * i, query = q + j;
                float p = 0, d = 0;
                if (query < a.t && key <= query && key >= find_first_visible_key(starts, sequence, query, a)) {
                    float s = compute_softcapped_score(compute_dot_product(qs + j * stride, ks + row * stride, a.dim), a);
                    float factor = compute_dropout_factor(sequence, head, query, key, a);
                    float dp = compute_dot_product(gs + j * stride, vs + row * stride, a.dim) * factor;
                    p = expf(s - lse[stats + query]);
                    d = p * (dp - dots[stats + query]) * softcap_slope_with_scale(s, a);
                    p *= factor;
                }
                ps[row * (TILE + 1) + j] = p;
                ds[row * (TILE + 1) + j] = d;
            }
            __syncwarp();
            for (i64 c = 0; lane + THREADS_PER_ROW * c < a.dim; c++) {
                float k = dk[c], v = dv[c];
                for (int j = 0; j < TILE; j++) {
                    k = fmaf(ds[row * (TILE + 1) + j], qs[j * stride + lane + THREADS_PER_ROW * c], k);
                    v = fmaf(ps[row * (TILE + 1) + j], gs[j * stride + lane + THREADS_PER_ROW * c], v);
                }
                dk[c] = k;
                dv[c] = v;
            }
        }
    }
    if (key >= a.t) return;
    i64 at = (sequence * a.t + key) * qkv_row_width(a) + (a.heads + kv) * a.dim;
    for (i64 c = 0; lane + THREADS_PER_ROW * c < a.dim; c++) {
        store(dqkv, at + lane + THREADS_PER_ROW * c, dk[c]);
        store(dqkv, at + a.kv_heads * a.dim + lane + THREADS_PER_ROW * c, dv[c]);
    }
}

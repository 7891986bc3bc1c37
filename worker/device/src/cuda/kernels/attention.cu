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
#define LANES 4
#define MAX_HEAD_DIM 256

// Loads rows first..first+TILE of one head as f32 with a stride of dim + 1. Rows beyond the
// sequence are zero.
DEVICE void load_tile(float* to, Tensor from, i64 sequence, i64 first, i64 stride, i64 column, Attention a) {
    for (i64 i = threadIdx.x; i < TILE * a.dim; i += blockDim.x) {
        i64 row = i / a.dim, j = i % a.dim;
        i64 at = first + row;
        to[row * (a.dim + 1) + j] = at < a.t ? load(from, (sequence * a.t + at) * stride + column + j) : 0.0f;
    }
}

DEVICE float dot_rows(const float* a, const float* b, i64 dim) {
    float sum = 0;
    for (i64 j = 0; j < dim; j++) sum = fmaf(a[j], b[j], sum);
    return sum;
}

DEVICE i64 first_start(const u32* starts, i64 sequence, i64 first, Attention a) {
    i64 smallest = a.t;
    for (i64 q = first; q < first + TILE && q < a.t; q++) {
        i64 start = document_start(starts, sequence, q, a);
        smallest = start < smallest ? start : smallest;
    }
    return smallest;
}

// Grid: (tiles of queries, heads, sequences).
KERNEL attention_forward(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a) {
    DYNAMIC_SHARED(shared);
    i64 stride = a.dim + 1;
    float *qs = shared, *ks = qs + TILE * stride, *vs = ks + TILE * stride, *ps = vs + TILE * stride;
    i64 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    i64 first = (i64)blockIdx.x * TILE, head = blockIdx.y, sequence = blockIdx.z;
    i64 kv = head / (a.heads / a.kv_heads), query = first + row;
    i64 start = document_start(starts, sequence, query, a);
    load_tile(qs, qkv, sequence, first, row_width(a), head * a.dim, a);
    float largest = NEGATIVE_INFINITY, total = 0, out[MAX_HEAD_DIM / LANES];
    for (i64 c = 0; c < MAX_HEAD_DIM / LANES; c++) out[c] = 0;
    for (i64 key = first_start(starts, sequence, first, a) / TILE * TILE; key < first + TILE && key < a.t; key += TILE) {
        __syncthreads();
        load_tile(ks, qkv, sequence, key, row_width(a), (a.heads + kv) * a.dim, a);
        load_tile(vs, qkv, sequence, key, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
        __syncthreads();
        float s[TILE / LANES], above = largest;
        for (int i = 0; i < TILE / LANES; i++) {
            i64 j = lane + LANES * i;
            bool is_visible = key + j >= start && key + j <= query && query < a.t;
            s[i] = is_visible ? capped_score(dot_rows(qs + row * stride, ks + j * stride, a.dim), a) : NEGATIVE_INFINITY;
            above = fmaxf(above, s[i]);
        }
        above = row_max(above);
        float keep = above == NEGATIVE_INFINITY ? 1.0f : expf(largest - above), sum = 0;
        for (int i = 0; i < TILE / LANES; i++) {
            float p = s[i] == NEGATIVE_INFINITY ? 0.0f : expf(s[i] - above);
            sum += p;
            ps[row * (TILE + 1) + lane + LANES * i] = p * dropout_factor(sequence, head, query, key + lane + LANES * i, a);
        }
        total = total * keep + row_sum(sum);
        largest = above;
        __syncwarp();
        for (i64 c = 0; lane + LANES * c < a.dim; c++) {
            float v = out[c] * keep;
            for (int j = 0; j < TILE; j++) v = fmaf(ps[row * (TILE + 1) + j], vs[j * stride + lane + LANES * c], v);
            out[c] = v;
        }
    }
    if (query >= a.t) return;
    i64 at = ((sequence * a.t + query) * a.heads + head) * a.dim;
    for (i64 c = 0; lane + LANES * c < a.dim; c++) store(o, at + lane + LANES * c, out[c] / total);
    if (lane == 0) lse[(sequence * a.heads + head) * a.t + query] = largest + logf(total);
}

DEVICE float add_pair(float sum, u32 a, u32 b) {
    sum = fmaf(from_bf16((u16)a), from_bf16((u16)b), sum);
    return fmaf(from_bf16((u16)(a >> 16)), from_bf16((u16)(b >> 16)), sum);
}

// dots[b, heads, t] = Σ do·o. Eight threads per query sum every eighth vector of 8 elements each.
// The order depends neither on the type nor on alignment. Grid: (tiles of 32 queries, heads,
// sequences).
KERNEL attention_dots(float* dots, Tensor d_o, Tensor o, Attention a) {
    i64 query = (i64)blockIdx.x * TILE + threadIdx.x / 8, head = blockIdx.y, sequence = blockIdx.z;
    i64 at = ((sequence * a.t + query) * a.heads + head) * a.dim;
    bool whole = d_o.type == BF16 && o.type == BF16 && a.dim % 8 == 0 && (((u64)d_o.at | (u64)o.at) & 15) == 0;
    float sum = 0;
    for (i64 j = threadIdx.x % 8 * 8; query < a.t && j < a.dim; j += 64) {
        if (whole) {
            uint4 x = *(const uint4*)((const u16*)d_o.at + at + j), y = *(const uint4*)((const u16*)o.at + at + j);
            sum = add_pair(add_pair(add_pair(add_pair(sum, x.x, y.x), x.y, y.y), x.z, y.z), x.w, y.w);
        } else {
            for (i64 k = j; k < j + 8 && k < a.dim; k++) sum = fmaf(load(d_o, at + k), load(o, at + k), sum);
        }
    }
    for (int other = 4; other > 0; other >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (threadIdx.x % 8 == 0 && query < a.t) dots[(sequence * a.heads + head) * a.t + query] = sum;
}

// Grid: (tiles of queries, heads, sequences).
KERNEL attention_backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts,
                            Attention a) {
    DYNAMIC_SHARED(shared);
    i64 stride = a.dim + 1;
    float *qs = shared, *gs = qs + TILE * stride, *ks = gs + TILE * stride, *vs = ks + TILE * stride;
    float* ds = vs + TILE * stride;
    i64 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    i64 first = (i64)blockIdx.x * TILE, head = blockIdx.y, sequence = blockIdx.z;
    i64 kv = head / (a.heads / a.kv_heads), query = first + row;
    i64 start = document_start(starts, sequence, query, a), stat = (sequence * a.heads + head) * a.t + query;
    load_tile(qs, qkv, sequence, first, row_width(a), head * a.dim, a);
    load_tile(gs, d_o, sequence, first, a.heads * a.dim, head * a.dim, a);
    float out[MAX_HEAD_DIM / LANES];
    for (i64 c = 0; c < MAX_HEAD_DIM / LANES; c++) out[c] = 0;
    for (i64 key = first_start(starts, sequence, first, a) / TILE * TILE; key < first + TILE && key < a.t; key += TILE) {
        __syncthreads();
        load_tile(ks, qkv, sequence, key, row_width(a), (a.heads + kv) * a.dim, a);
        load_tile(vs, qkv, sequence, key, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
        __syncthreads();
        for (int i = 0; i < TILE / LANES; i++) {
            i64 j = lane + LANES * i;
            float d = 0;
            if (key + j >= start && key + j <= query && query < a.t) {
                float s = capped_score(dot_rows(qs + row * stride, ks + j * stride, a.dim), a);
                float dp = dot_rows(gs + row * stride, vs + j * stride, a.dim) * dropout_factor(sequence, head, query, key + j, a);
                d = expf(s - lse[stat]) * (dp - dots[stat]) * score_slope(s, a);
            }
            ds[row * (TILE + 1) + j] = d;
        }
        __syncwarp();
        for (i64 c = 0; lane + LANES * c < a.dim; c++) {
            float v = out[c];
            for (int j = 0; j < TILE; j++) v = fmaf(ds[row * (TILE + 1) + j], ks[j * stride + lane + LANES * c], v);
            out[c] = v;
        }
    }
    if (query >= a.t) return;
    i64 at = (sequence * a.t + query) * row_width(a) + head * a.dim;
    for (i64 c = 0; lane + LANES * c < a.dim; c++) store(dqkv, at + lane + LANES * c, out[c]);
}

// Grid: (tiles of keys, kv_heads, sequences).
KERNEL attention_backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts,
                             Attention a) {
    DYNAMIC_SHARED(shared);
    i64 stride = a.dim + 1;
    float *ks = shared, *vs = ks + TILE * stride, *qs = vs + TILE * stride, *gs = qs + TILE * stride;
    float *ps = gs + TILE * stride, *ds = ps + TILE * (TILE + 1);
    i64 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    i64 first = (i64)blockIdx.x * TILE, kv = blockIdx.y, sequence = blockIdx.z;
    i64 group = a.heads / a.kv_heads, key = first + row;
    load_tile(ks, qkv, sequence, first, row_width(a), (a.heads + kv) * a.dim, a);
    load_tile(vs, qkv, sequence, first, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    float dk[MAX_HEAD_DIM / LANES], dv[MAX_HEAD_DIM / LANES];
    for (i64 c = 0; c < MAX_HEAD_DIM / LANES; c++) dk[c] = dv[c] = 0;
    for (i64 head = kv * group; head < (kv + 1) * group; head++) {
        i64 stats = (sequence * a.heads + head) * a.t;
        for (i64 q = first; q < a.t; q += TILE) {
            if (first_start(starts, sequence, q, a) >= first + TILE) continue;
            __syncthreads();
            load_tile(qs, qkv, sequence, q, row_width(a), head * a.dim, a);
            load_tile(gs, d_o, sequence, q, a.heads * a.dim, head * a.dim, a);
            __syncthreads();
            for (int i = 0; i < TILE / LANES; i++) {
                i64 j = lane + LANES * i, query = q + j;
                float p = 0, d = 0;
                if (query < a.t && key <= query && key >= document_start(starts, sequence, query, a)) {
                    float s = capped_score(dot_rows(qs + j * stride, ks + row * stride, a.dim), a);
                    float factor = dropout_factor(sequence, head, query, key, a);
                    float dp = dot_rows(gs + j * stride, vs + row * stride, a.dim) * factor;
                    p = expf(s - lse[stats + query]);
                    d = p * (dp - dots[stats + query]) * score_slope(s, a);
                    p *= factor;
                }
                ps[row * (TILE + 1) + j] = p;
                ds[row * (TILE + 1) + j] = d;
            }
            __syncwarp();
            for (i64 c = 0; lane + LANES * c < a.dim; c++) {
                float k = dk[c], v = dv[c];
                for (int j = 0; j < TILE; j++) {
                    k = fmaf(ds[row * (TILE + 1) + j], qs[j * stride + lane + LANES * c], k);
                    v = fmaf(ps[row * (TILE + 1) + j], gs[j * stride + lane + LANES * c], v);
                }
                dk[c] = k;
                dv[c] = v;
            }
        }
    }
    if (key >= a.t) return;
    i64 at = (sequence * a.t + key) * row_width(a) + (a.heads + kv) * a.dim;
    for (i64 c = 0; lane + LANES * c < a.dim; c++) {
        store(dqkv, at + lane + LANES * c, dk[c]);
        store(dqkv, at + a.kv_heads * a.dim + lane + LANES * c, dv[c]);
    }
}

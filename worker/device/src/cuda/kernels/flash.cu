// Attention on tensor cores: bf16 in, products of 16 × 8 × 16 summed in f32, memory linear in t, no atomics.
//
// A block of four warps owns 64 rows (queries, or keys in the second backward), 16 per warp; the rows of the other side are
// walked in tiles through shared memory. D is the heads' size rounded up to 64 or 128; what is added counts as zero.
#include "common.cuh"
#include "attention.cuh"

#define WARPS 4
#define OWN (16 * WARPS)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

DEVICE u32 pack(float low, float high) { return (u32)to_bf16(low) | (u32)to_bf16(high) << 16; }

#ifndef EMULATED
// c[16, 8] += a[16, 16] · b[16, 8]
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Two 8 × 8 matrices, transposed; lanes 0 to 15 name their rows.
DEVICE void load_transposed(u32 (&b)[2], const u16* row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(at) : "memory");
}
DEVICE u32 pair(const u16* at) { return *(const u32*)at; }
#endif

// Where a lane's numbers lie: rows `group` and `group + 8`, columns `2·turn` and `2·turn + 1` of each 8.
DEVICE int group_of_lane() { return (int)(threadIdx.x & 31) >> 2; }
DEVICE int turn_of_lane() { return (int)(threadIdx.x & 3); }

// A tile's rows lie 8 elements apart more than they are long: no two lanes meet in a bank, and rows begin at 16 bytes.
template <int D> DEVICE constexpr int stride() { return D + 8; }

// Rows first..first+rows of a head; zeros behind the sequence and behind the head.
template <int D> DEVICE void load_rows(u16* to, Tensor from, i64 sequence, i64 first, int rows, i64 width, i64 column, Attention a) {
    const u16* source = (const u16*)from.at;
    bool whole = a.dim % 8 == 0 && width % 8 == 0 && ((u64)source & 15) == 0;
    for (int i = (int)threadIdx.x; i < rows * (D / 8); i += 32 * WARPS) {
        int row = i / (D / 8), j = i % (D / 8) * 8;
        u16* place = to + row * stride<D>() + j;
        i64 at = first + row, start = (sequence * a.t + at) * width + column + j;
        if (whole && at < a.t && j < a.dim) {
            *(uint4*)place = *(const uint4*)(source + start);
        } else {
            for (int k = 0; k < 8; k++) place[k] = at < a.t && j + k < a.dim ? source[start + k] : (u16)0;
        }
    }
}

// The 16 × 16 part at (row, column) of a tile, as a first operand.
template <int D> DEVICE void first_operand(u32 (&x)[4], const u16* tile, int row, int column) {
    const u16* at = tile + (row + group_of_lane()) * stride<D>() + column + 2 * turn_of_lane();
    x[0] = pair(at);
    x[1] = pair(at + 8 * stride<D>());
    x[2] = pair(at + 8);
    x[3] = pair(at + 8 * stride<D>() + 8);
}

// c[16, 8·N] += own rows · rows of the other tileᵀ
template <int D, int N> DEVICE void scores(float (&c)[N][4], const u16* own, int row, const u16* other) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        u32 x[4];
        first_operand<D>(x, own, row, k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u16* at = other + (8 * n + group_of_lane()) * stride<D>() + k + 2 * turn_of_lane();
            u32 y[2] = {pair(at), pair(at + 8)};
            multiply(c[n], x, y);
        }
    }
}

// out[16, D] += p[16, 8·N], rounded, · rows of the other tile
template <int D, int N> DEVICE void add_rows(float (&out)[D / 8][4], const float (&p)[N][4], const u16* other) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        u32 x[4] = {pack(p[k][0], p[k][1]), pack(p[k][2], p[k][3]), pack(p[k + 1][0], p[k + 1][1]), pack(p[k + 1][2], p[k + 1][3])};
        const u16* row = other + (8 * k + (int)(threadIdx.x & 15)) * stride<D>();
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            u32 y[2];
            load_transposed(y, row + 8 * n);
            multiply(out[n], x, y);
        }
    }
}

template <int N> DEVICE void zero(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
}

// Rows of a head of the result; what lies behind the sequence or the head is left.
template <int D> DEVICE void store_rows(Tensor to, const float (&x)[D / 8][4], const float (&factor)[2], i64 sequence, i64 first, i64 width, i64 column, Attention a) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 row = first + group_of_lane() + 8 * (i / 2);
            int j = 8 * n + 2 * turn_of_lane() + i % 2;
            if (row < a.t && j < a.dim) store(to, (sequence * a.t + row) * width + column + j, x[n][i] * factor[i / 2]);
        }
}

// Dropout of p[16, 8·N]: rows are queries, columns keys from `key` on, a multiple of 8·N. A lane's words are for every second 8 keys.
template <int N> DEVICE void drop_keys(float (&p)[N][4], i64 sequence, i64 head, const i64 (&query)[2], i64 key, const Attention& a) {
    if (a.keep == 0) return;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 first = key + 8 * n + 2 * turn_of_lane() + i % 2;
            u32 c[4];
            dropout_words(c, sequence, head, query[i / 2], first, a);
            int w = (int)(first / 16 % 4);
#pragma unroll
            for (int m = n; m < N; m += 2) p[m][i] *= kept_by(c, w + m / 2, a);
        }
}

#define TILE_F 64 // keys of a step of the forward
#define TILE_B 32 // rows of a step of the backward

// Where the first tile of keys begins that any of the block's queries sees.
DEVICE i64 first_key(const u32* starts, i64 sequence, i64 first, i64 tile, Attention a) {
    i64 least = a.t;
    for (i64 q = first; q < first + OWN && q < a.t; q++) {
        i64 start = start_of(starts, sequence, q, a);
        least = start < least ? start : least;
    }
    return least / tile * tile;
}

template <int D> DEVICE void forward(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a) {
    DYNAMIC_SHARED(shared);
    u16 *qs = (u16*)shared, *ks = qs + OWN * stride<D>(), *vs = ks + TILE_F * stride<D>();
    i64 first = (i64)blockIdx.x * OWN, head = blockIdx.y, sequence = blockIdx.z, kv = head / (a.heads / a.kv_heads);
    int row = 16 * (int)(threadIdx.x / 32);
    i64 query[2], start[2];
    for (int h = 0; h < 2; h++) {
        query[h] = first + row + group_of_lane() + 8 * h;
        start[h] = start_of(starts, sequence, query[h], a);
    }
    load_rows<D>(qs, qkv, sequence, first, OWN, row_width(a), head * a.dim, a);
    float out[D / 8][4], most[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {0, 0};
    zero(out);
    for (i64 key = first_key(starts, sequence, first, TILE_F, a); key < first + OWN && key < a.t; key += TILE_F) {
        __syncthreads();
        load_rows<D>(ks, qkv, sequence, key, TILE_F, row_width(a), (a.heads + kv) * a.dim, a);
        load_rows<D>(vs, qkv, sequence, key, TILE_F, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
        __syncthreads();
        float s[TILE_F / 8][4];
        zero(s);
        scores<D, TILE_F / 8>(s, qs, row, ks);
        float above[2] = {most[0], most[1]}, keep[2], sum[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < TILE_F / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 k = key + 8 * n + 2 * turn_of_lane() + i % 2;
                bool seen = k <= query[i / 2] && k >= start[i / 2] && query[i / 2] < a.t;
                s[n][i] = seen ? capped_score(s[n][i], a) * LOG2E : NEGATIVE_INFINITY;
                above[i / 2] = fmaxf(above[i / 2], s[n][i]);
            }
        for (int h = 0; h < 2; h++) {
            above[h] = row_max(above[h]);
            keep[h] = above[h] == NEGATIVE_INFINITY ? 1.0f : exp2f(most[h] - above[h]);
            most[h] = above[h];
        }
#pragma unroll
        for (int n = 0; n < TILE_F / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = s[n][i] == NEGATIVE_INFINITY ? 0.0f : exp2f(s[n][i] - above[i / 2]);
                sum[i / 2] += s[n][i];
            }
        for (int h = 0; h < 2; h++) total[h] = total[h] * keep[h] + row_sum(sum[h]);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) out[n][i] *= keep[i / 2];
        drop_keys(s, sequence, head, query, key, a);
        add_rows<D, TILE_F / 8>(out, s, vs);
    }
    float factor[2] = {1.0f / total[0], 1.0f / total[1]};
    store_rows<D>(o, out, factor, sequence, first + row, a.heads * a.dim, head * a.dim, a);
    for (int h = 0; h < 2; h++)
        if (turn_of_lane() == 0 && query[h] < a.t) lse[(sequence * a.heads + head) * a.t + query[h]] = most[h] * LN2 + logf(total[h]);
}

template <int D> DEVICE void backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, Attention a) {
    DYNAMIC_SHARED(shared);
    u16 *qs = (u16*)shared, *gs = qs + OWN * stride<D>(), *ks = gs + OWN * stride<D>(), *vs = ks + TILE_B * stride<D>();
    i64 first = (i64)blockIdx.x * OWN, head = blockIdx.y, sequence = blockIdx.z, kv = head / (a.heads / a.kv_heads);
    int row = 16 * (int)(threadIdx.x / 32);
    i64 query[2], start[2], stats = (sequence * a.heads + head) * a.t;
    float l[2], dot[2];
    for (int h = 0; h < 2; h++) {
        query[h] = first + row + group_of_lane() + 8 * h;
        start[h] = start_of(starts, sequence, query[h], a);
        l[h] = query[h] < a.t ? lse[stats + query[h]] * LOG2E : 0.0f;
        dot[h] = query[h] < a.t ? dots[stats + query[h]] : 0.0f;
    }
    load_rows<D>(qs, qkv, sequence, first, OWN, row_width(a), head * a.dim, a);
    load_rows<D>(gs, d_o, sequence, first, OWN, a.heads * a.dim, head * a.dim, a);
    float out[D / 8][4];
    zero(out);
    for (i64 key = first_key(starts, sequence, first, TILE_B, a); key < first + OWN && key < a.t; key += TILE_B) {
        __syncthreads();
        load_rows<D>(ks, qkv, sequence, key, TILE_B, row_width(a), (a.heads + kv) * a.dim, a);
        load_rows<D>(vs, qkv, sequence, key, TILE_B, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
        __syncthreads();
        float s[TILE_B / 8][4], d[TILE_B / 8][4];
        zero(s);
        zero(d);
        scores<D, TILE_B / 8>(s, qs, row, ks);
        scores<D, TILE_B / 8>(d, gs, row, vs);
        drop_keys(d, sequence, head, query, key, a);
#pragma unroll
        for (int n = 0; n < TILE_B / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 k = key + 8 * n + 2 * turn_of_lane() + i % 2;
                bool seen = k <= query[i / 2] && k >= start[i / 2] && query[i / 2] < a.t;
                float score = capped_score(s[n][i], a);
                d[n][i] = seen ? exp2f(score * LOG2E - l[i / 2]) * (d[n][i] - dot[i / 2]) * score_slope(score, a) : 0.0f;
            }
        add_rows<D, TILE_B / 8>(out, d, ks);
    }
    float one[2] = {1, 1};
    store_rows<D>(dqkv, out, one, sequence, first + row, row_width(a), head * a.dim, a);
}

// Rows are keys here, columns queries.
template <int D> DEVICE void backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, Attention a) {
    DYNAMIC_SHARED(shared);
    u16 *ks = (u16*)shared, *vs = ks + OWN * stride<D>(), *qs = vs + OWN * stride<D>(), *gs = qs + TILE_B * stride<D>();
    i64 first = (i64)blockIdx.x * OWN, kv = blockIdx.y, sequence = blockIdx.z, heads = a.heads / a.kv_heads;
    int row = 16 * (int)(threadIdx.x / 32);
    load_rows<D>(ks, qkv, sequence, first, OWN, row_width(a), (a.heads + kv) * a.dim, a);
    load_rows<D>(vs, qkv, sequence, first, OWN, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    float dk[D / 8][4], dv[D / 8][4];
    zero(dk);
    zero(dv);
    for (i64 head = kv * heads; head < (kv + 1) * heads; head++) {
        i64 stats = (sequence * a.heads + head) * a.t;
        for (i64 q = first; q < a.t; q += TILE_B) {
            __syncthreads();
            load_rows<D>(qs, qkv, sequence, q, TILE_B, row_width(a), head * a.dim, a);
            load_rows<D>(gs, d_o, sequence, q, TILE_B, a.heads * a.dim, head * a.dim, a);
            __syncthreads();
            float p[TILE_B / 8][4], d[TILE_B / 8][4];
            zero(p);
            zero(d);
            scores<D, TILE_B / 8>(p, ks, row, qs);
            scores<D, TILE_B / 8>(d, vs, row, gs);
#pragma unroll
            for (int n = 0; n < TILE_B / 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    i64 query = q + 8 * n + 2 * turn_of_lane() + j;
                    i64 start = start_of(starts, sequence, query, a);
                    float l = query < a.t ? lse[stats + query] * LOG2E : 0.0f, dot = query < a.t ? dots[stats + query] : 0.0f;
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        i64 key = first + row + group_of_lane() + 8 * h;
                        int i = 2 * h + j;
                        bool seen = query < a.t && key <= query && key >= start;
                        float score = capped_score(p[n][i], a);
                        float factor = kept(sequence, head, query, key, a);
                        p[n][i] = seen ? exp2f(score * LOG2E - l) : 0.0f;
                        d[n][i] = seen ? p[n][i] * (d[n][i] * factor - dot) * score_slope(score, a) : 0.0f;
                        p[n][i] *= factor;
                    }
                }
            add_rows<D, TILE_B / 8>(dv, p, gs);
            add_rows<D, TILE_B / 8>(dk, d, qs);
        }
    }
    float one[2] = {1, 1};
    store_rows<D>(dqkv, dk, one, sequence, first + row, row_width(a), (a.heads + kv) * a.dim, a);
    store_rows<D>(dqkv, dv, one, sequence, first + row, row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
}

// Grids: (64 queries, heads, sequences), and (64 keys, kv_heads, sequences) for the last.
KERNEL flash_forward_64(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a) {
    forward<64>(o, lse, qkv, starts, a);
}
KERNEL flash_forward_128(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a) {
    forward<128>(o, lse, qkv, starts, a);
}
KERNEL flash_backward_q_64(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, Attention a) {
    backward_q<64>(dqkv, d_o, qkv, lse, dots, starts, a);
}
KERNEL flash_backward_q_128(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, Attention a) {
    backward_q<128>(dqkv, d_o, qkv, lse, dots, starts, a);
}
KERNEL flash_backward_kv_64(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, Attention a) {
    backward_kv<64>(dqkv, d_o, qkv, lse, dots, starts, a);
}
KERNEL flash_backward_kv_128(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, Attention a) {
    backward_kv<128>(dqkv, d_o, qkv, lse, dots, starts, a);
}

// Attention on tensor cores (Dao, "FlashAttention-2", 2023). Inputs and outputs are bf16, 16 × 8 ×
// 16 matmuls are summed in f32, memory is linear in t, and there are no atomics.
//
// A block owns 128 rows of a head (queries, or keys in compute_backward_kv), and each warp owns
// 16·M of them. The rows of the other operand are processed in steps of STEP rows. Shared memory
// has two buffers: while one is used, the next step is copied to the other. A step is processed in
// chunks of CHUNK rows, as many as there are registers for. D is the head dimension rounded up to
// 64 or 128. PLAIN kernels support neither a softcap nor dropout.
#include "common.cuh"
#include "attention.cuh"
#include "blocks.cuh"
#include "tiles.cuh"

#define BLOCK_ROWS 128 // rows of a block

// Returns true if x is true in all lanes of the warp.
DEVICE bool warp_all(bool x) { return __all_sync(ALL_LANES, x); }

// Returns tanh(x) with an absolute error of about the precision of f32 at 1, which is sufficient
// for scores.
DEVICE float tanh_approx(float x) { return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * LOG2E * x)), 1.0f); }

// --- the rows of a block ------------------------------------------------------------------------------------

// State of a block that is stored in shared memory, to save registers for sums.
struct BlockState {
    BlockPosition at;
    int end;         // end of the rows of the other operand
    int group;       // heads that share keys
    i64 stats;       // offset of the first head's statistics in lse and dots
    HeadRows one, other; // the rows of the two tensors through which the block iterates
};

// A warp's 16·M queries. Rarely used values are in shared memory.
template <int M> struct WarpQueries {
    int from;                // the first query
    int min_start, max_start; // smallest and largest first key of the queries
    const int* starts;        // first keys of a lane's queries, every eighth
    // Returns true if any query may attend to one of the COUNT keys from `key` on.
    template <int COUNT> DEVICE_METHOD bool attend_to_any(int key) const { return key < from + 16 * M && key + COUNT > min_start; }
    // Returns true if each query attends to all of the COUNT keys from `key` on.
    template <int COUNT> DEVICE_METHOD bool attend_to_all(int key) const { return key + COUNT - 1 <= from && key >= max_start; }
    DEVICE_METHOD int query_of_lane(int j) const { return from + lane_group() + 8 * j; }
};

// Returns the queries of this warp. `starts` is in shared memory, with zeros beyond the sequence.
template <int M> DEVICE WarpQueries<M> make_warp_queries(const int* starts, int first, int t) {
    int from = first + 16 * M * warp_index(), query = lane_index() % (16 * M);
    starts += 16 * M * warp_index();
    int min_start = __reduce_min_sync(ALL_LANES, from + query < t ? starts[query] : t);
    int max_start = __reduce_max_sync(ALL_LANES, starts[query]);
    return {from, min_start, max_start, starts + lane_group()};
}

// Starts to copy the first keys of the block's queries to shared memory.
DEVICE void fetch_starts(int* to, const u32* starts, int first, int t) {
    int i = (int)threadIdx.x;
    if (i < BLOCK_ROWS) copy_4_bytes_async(to + i, starts + (first + i < t ? first + i : 0), first + i < t);
}

// Returns the first key to which any of the block's queries attends.
DEVICE int find_first_key(const u32* starts, int first, int t) {
    int smallest = t;
    for (int q = first + lane_index(); q < first + BLOCK_ROWS && q < t; q += 32) smallest = min(smallest, (int)starts[q]);
    return __reduce_min_sync(ALL_LANES, smallest);
}

// Replaces the elements of masked keys by `value`. Columns are keys from `key` on.
template <int M, int N> DEVICE void apply_mask(float (&x)[M][N][4], const WarpQueries<M>& q, int key, float value) {
#pragma unroll
    for (int j = 0; j < 2 * M; j++) {
        int column = key + 2 * lane_in_group(), from = q.starts[8 * j] - column, to = q.query_of_lane(j) - column;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& at = x[j / 2][n][j % 2 * 2 + i];
                at = 8 * n + i >= from && 8 * n + i <= to ? at : value;
            }
    }
}

// --- scores -------------------------------------------------------------------------------------------------

// Returns the factor that turns a score into an exponent of 2.
template <bool PLAIN> DEVICE float compute_exponent_factor(const Attention& a) { return (PLAIN || a.cap == 0 ? a.scale : 1.0f) * LOG2E; }

// Scales scores and applies the softcap, if there is one.
template <int M, int N> DEVICE void softcap_scores(float (&s)[M][N][4], const Attention& a) {
    if (a.cap == 0) return;
    float inner = a.scale / a.cap;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = a.cap * tanh_approx(s[m][n][i] * inner);
}

// Returns the derivative of a softcapped score with respect to scale · q·k.
DEVICE float compute_softcap_slope(float capped, float inverse_cap) { return 1.0f - (capped * inverse_cap) * (capped * inverse_cap); }

// Computes the dropout mask of a lane's probabilities, one bit each. Rows are queries, and columns
// are keys from `key` on. The mask is computed before the matmuls, while registers are available. A
// lane's random words are for every second group of 8 keys.
template <int M, int N> DEVICE void compute_dropout_mask_by_query(u32 (&mask)[2 * M], const BlockPosition& at, const WarpQueries<M>& q, int key, const Attention& a) {
#pragma unroll
    for (int j = 0; j < 2 * M; j++) {
        mask[j] = 0;
        if (a.keep == 0) continue;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int first = key + 8 * n + 2 * lane_in_group() + i;
                u32 c[4];
                compute_dropout_words(c, at.sequence, at.head, q.query_of_lane(j), first, a);
                int w = first / 16 % 4;
#pragma unroll
                for (int m = n; m < N; m += 2) mask[j] |= (u32)is_key_kept(c, w + m / 2, a) << (2 * m + i);
            }
    }
}

// Applies a dropout mask: sets dropped elements to 0 and scales the others.
template <int M, int N> DEVICE void apply_dropout(float (&p)[M][N][4], const u32 (&mask)[2 * M], const Attention& a) {
    if (a.keep == 0) return;
#pragma unroll
    for (int j = 0; j < 2 * M; j++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) p[j / 2][n][j % 2 * 2 + i] *= mask[j] >> (2 * n + i) & 1 ? a.keep : 0.0f;
}

// --- forward ------------------------------------------------------------------------------------------------

// State of the online softmax for each of a lane's rows: the largest score so far, and this lane's
// part of the sum of exponentials relative to the largest score.
template <int M> struct SoftmaxState {
    float largest[2 * M], total[2 * M];
};

// Updates the online softmax: replaces scores by exponentials relative to the rows' largest scores,
// and rescales earlier sums and outputs.
template <int D, int M, int N> DEVICE void update_online_softmax(float (&s)[M][N][4], float (&out)[M][D / 8][4], SoftmaxState<M>& r, float exponent) {
    float keep[2 * M];
    bool changed = false;
#pragma unroll
    for (int j = 0; j < 2 * M; j++) {
        float largest = r.largest[j], sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s[j / 2][n][j % 2 * 2], s[j / 2][n][j % 2 * 2 + 1]));
        largest = max_over_row_threads(largest);
        float base = largest == NEGATIVE_INFINITY ? 0.0f : largest * exponent; // all keys so far are masked
        keep[j] = exp2_approx(fmaf(r.largest[j], exponent, -base));
        changed |= r.largest[j] != largest;
        r.largest[j] = largest;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& at = s[j / 2][n][j % 2 * 2 + i];
                at = exp2_approx(fmaf(at, exponent, -base));
                sum += at;
            }
        r.total[j] = fmaf(r.total[j], keep[j], sum);
    }
    if (!__any_sync(ALL_LANES, changed)) return; // every factor is 1
#pragma unroll
    for (int j = 0; j < 2 * M; j++)
#pragma unroll
        for (int n = 0; n < D / 8; n++) out[j / 2][n][j % 2 * 2] *= keep[j], out[j / 2][n][j % 2 * 2 + 1] *= keep[j];
}

// Forward pass: computes the outputs of a block's queries and their log-sum-exps.
template <int D, bool PLAIN, int WARPS, int M, int STEP, int CHUNK, class OperandRows>
DEVICE void compute_forward(Tensor o, float* lse, Tensor qkv, const u32* starts, const Attention& a, const BlockOrder& order) {
    DYNAMIC_SHARED(shared);
    constexpr int THREADS = 32 * WARPS, N = CHUNK / 8, BUFFER = 2 * STEP * row_stride<D>(); // keys, then values
    u16 *tiles = (u16*)shared, *qs = tiles + (OperandRows::IN_SHARED ? 2 * BUFFER : 0), *warp_tile = qs + 16 * M * warp_index() * row_stride<D>();
    int* block_starts = (int*)(tiles + 2 * BUFFER + (OperandRows::IN_SHARED ? BLOCK_ROWS * row_stride<D>() : 0));
    BlockPosition at = find_position(order, blockIdx.x, true);
    int t = (int)a.t, first = at.tile * BLOCK_ROWS, end = min(first + BLOCK_ROWS, t), kv = at.head / (int)(a.heads / a.kv_heads);
    HeadRows k_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + kv) * a.dim, a);
    HeadRows v_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    starts += (i64)at.sequence * t;
    BlockState* state = (BlockState*)(block_starts + BLOCK_ROWS);
    if (threadIdx.x == 0) *state = {at, end, 0, ((i64)at.sequence * a.heads + at.head) * t, k_rows, v_rows};
    fetch_rows<D, BLOCK_ROWS, THREADS>(qs, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), at.head * a.dim, a), first);
    fetch_starts(block_starts, starts, first, t);
    int key = find_first_key(starts, first, t) / STEP * STEP;
    if (OperandRows::IN_SHARED) fetch_pair<D, STEP, THREADS>(tiles, k_rows, v_rows, key);
    commit_copies();
    await_copies<0>();
    __syncthreads();
    WarpQueries<M> q = make_warp_queries<M>(block_starts, first, t);
    OperandRows operand_rows;
    operand_rows.load(warp_tile);
    if (!OperandRows::IN_SHARED) {
        __syncthreads(); // from here on the buffers overwrite the block's own rows
        fetch_pair<D, STEP, THREADS>(tiles, k_rows, v_rows, key);
        commit_copies();
    }
    float out[M][D / 8][4], exponent = compute_exponent_factor<PLAIN>(a);
    set_to_zero(out);
    SoftmaxState<M> r;
    for (int j = 0; j < 2 * M; j++) r.largest[j] = NEGATIVE_INFINITY, r.total[j] = 0;
    for (int buffer = 0; key < state->end; key += STEP, buffer ^= 1) {
        await_copies<0>();
        __syncthreads(); // this buffer is complete, and no thread uses the other one any more
        if (key + STEP < state->end) fetch_pair<D, STEP, THREADS>(tiles + (buffer ^ 1) * BUFFER, state->one, state->other, key + STEP);
        commit_copies();
        const u16 *ks = tiles + buffer * BUFFER, *vs = ks + STEP * row_stride<D>();
#pragma unroll 1
        for (int c = 0; c < STEP; c += CHUNK) {
            if (!q.template attend_to_any<CHUNK>(key + c)) continue;
            u32 mask[2 * M];
            if (!PLAIN) compute_dropout_mask_by_query<M, N>(mask, state->at, q, key + c, a);
            float s[M][N][4];
            set_to_zero(s);
            add_product_with_transposed_tile<D>(s, operand_rows, ks + c * row_stride<D>());
            if (!PLAIN) softcap_scores(s, a);
            if (!q.template attend_to_all<CHUNK>(key + c)) apply_mask(s, q, key + c, NEGATIVE_INFINITY);
            update_online_softmax<D>(s, out, r, exponent);
            if (!PLAIN) apply_dropout(s, mask, a);
            add_product_with_tile<D>(out, s, vs + c * row_stride<D>());
        }
    }
    await_copies<0>();
    __syncthreads();
    at = state->at;
    float factor[2 * M];
#pragma unroll
    for (int j = 0; j < 2 * M; j++) {
        float total = sum_over_row_threads(r.total[j]);
        int query = q.query_of_lane(j);
        factor[j] = 1.0f / total;
        if (lane_in_group() == 0 && query < t) lse[state->stats + query] = r.largest[j] * exponent * LN2 + logf(total);
    }
    HeadRows o_rows = make_head_rows(o.at, at.sequence, a.heads * a.dim, at.head * a.dim, a);
    store_rows<D, M>(o_rows, q.from, warp_tile, out, factor);
}

// --- backward -----------------------------------------------------------------------------------------------

// Backward pass: computes dq = scale · Σ ds·k over keys, where ds = p (do·v − Σ do·o).
template <int D, bool PLAIN, int WARPS, int M, int STEP, int CHUNK>
DEVICE void compute_backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a,
                       const BlockOrder& order) {
    DYNAMIC_SHARED(shared);
    constexpr int THREADS = 32 * WARPS, N = CHUNK / 8, BUFFER = 2 * STEP * row_stride<D>(); // keys, then values
    u16 *tiles = (u16*)shared, *warp_tile = tiles + 16 * M * warp_index() * row_stride<D>();
    int* block_starts = (int*)(tiles + 2 * BUFFER);
    BlockPosition at = find_position(order, blockIdx.x, true);
    int t = (int)a.t, first = at.tile * BLOCK_ROWS, end = min(first + BLOCK_ROWS, t), kv = at.head / (int)(a.heads / a.kv_heads);
    HeadRows k_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + kv) * a.dim, a);
    HeadRows v_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    starts += (i64)at.sequence * t;
    BlockState* state = (BlockState*)(block_starts + BLOCK_ROWS);
    if (threadIdx.x == 0) *state = {at, end, 0, ((i64)at.sequence * a.heads + at.head) * t, k_rows, v_rows};
    fetch_rows<D, BLOCK_ROWS, THREADS>(tiles, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), at.head * a.dim, a), first);
    fetch_rows<D, BLOCK_ROWS, THREADS>(tiles + BUFFER, make_head_rows(d_o.at, at.sequence, a.heads * a.dim, at.head * a.dim, a), first);
    fetch_starts(block_starts, starts, first, t);
    commit_copies();
    int key = find_first_key(starts, first, t) / STEP * STEP;
    await_copies<0>();
    __syncthreads();
    WarpQueries<M> q = make_warp_queries<M>(block_starts, first, t);
    float l[2 * M], dot[2 * M], exponent = compute_exponent_factor<PLAIN>(a), inverse_cap = a.cap > 0 ? 1.0f / a.cap : 0.0f;
    i64 stats = state->stats;
#pragma unroll
    for (int j = 0; j < 2 * M; j++) {
        int query = q.query_of_lane(j);
        l[j] = query < t ? lse[stats + query] * LOG2E : 0.0f;
        dot[j] = query < t ? dots[stats + query] : 0.0f;
    }
    RegisterRows<D, M> qs, gs;
    qs.load(warp_tile);
    gs.load(warp_tile + BUFFER);
    __syncthreads(); // from here on the buffers overwrite the block's own rows
    fetch_pair<D, STEP, THREADS>(tiles, k_rows, v_rows, key);
    commit_copies();
    float out[M][D / 8][4];
    set_to_zero(out);
    for (int buffer = 0; key < state->end; key += STEP, buffer ^= 1) {
        await_copies<0>();
        __syncthreads(); // this buffer is complete, and no thread uses the other one any more
        if (key + STEP < state->end) fetch_pair<D, STEP, THREADS>(tiles + (buffer ^ 1) * BUFFER, state->one, state->other, key + STEP);
        commit_copies();
        const u16 *ks = tiles + buffer * BUFFER, *vs = ks + STEP * row_stride<D>();
#pragma unroll 1
        for (int c = 0; c < STEP; c += CHUNK) {
            if (!q.template attend_to_any<CHUNK>(key + c)) continue;
            u32 mask[2 * M];
            if (!PLAIN) compute_dropout_mask_by_query<M, N>(mask, state->at, q, key + c, a);
            float s[M][N][4], d[M][N][4];
            set_to_zero(s);
            set_to_zero(d);
            add_product_with_transposed_tile<D>(s, qs, ks + c * row_stride<D>());
            add_product_with_transposed_tile<D>(d, gs, vs + c * row_stride<D>());
            if (!PLAIN) softcap_scores(s, a), apply_dropout(d, mask, a);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float ds = d[m][n][i] - dot[2 * m + i / 2];
                        if (!PLAIN) ds *= compute_softcap_slope(s[m][n][i], inverse_cap);
                        d[m][n][i] = exp2_approx(fmaf(s[m][n][i], exponent, -l[2 * m + i / 2])) * ds;
                    }
            if (!q.template attend_to_all<CHUNK>(key + c)) apply_mask(d, q, key + c, 0.0f);
            add_product_with_tile<D>(out, d, ks + c * row_stride<D>());
        }
    }
    await_copies<0>();
    __syncthreads();
    float factor[2 * M];
    for (int j = 0; j < 2 * M; j++) factor[j] = a.scale;
    at = state->at;
    HeadRows dq_rows = make_head_rows(dqkv.at, at.sequence, qkv_row_width(a), at.head * a.dim, a);
    store_rows<D, M>(dq_rows, q.from, warp_tile, out, factor);
}

// Statistics (lse and dots) and first keys of the queries of a step, in shared memory.
template <int STEP> struct QueryStats {
    float lse[STEP], dots[STEP];
    int starts[STEP];
};

// Starts to copy the statistics of a step of queries to shared memory.
template <int STEP, int THREADS> DEVICE void fetch_query_stats(QueryStats<STEP>* to, const float* lse, const float* dots, const u32* starts, int first, int t) {
    for (int i = (int)threadIdx.x; i < 3 * STEP; i += THREADS) {
        int j = i % STEP;
        bool is_valid = first + j < t;
        const void* row = i < STEP ? (const void*)lse : i < 2 * STEP ? (const void*)dots : (const void*)starts;
        copy_4_bytes_async((u32*)to + i, (const u32*)row + (is_valid ? first + j : 0), is_valid);
    }
}

// Returns the index after the last query that attends to any key before `end`, among the queries
// that this warp's threads examine.
template <int THREADS> DEVICE int find_last_query(const u32* starts, int first, int end, int t) {
    int last = first;
    for (int q = first + (int)threadIdx.x; q < t; q += THREADS)
        if ((int)starts[q] < end) last = q + 1;
    return __reduce_max_sync(ALL_LANES, last);
}

// Starts to copy a step of compute_backward_kv: queries of one of the heads that share the keys,
// the gradients of their outputs, and their statistics.
template <int D, int STEP, int THREADS>
DEVICE void fetch_query_step(u16* tiles, QueryStats<STEP>* to, const BlockState& from, const float* lse, const float* dots, const u32* starts, int head,
                       int first) {
    HeadRows q = from.one, g = from.other;
    q.at += head * q.dim, g.at += head * g.dim;
    fetch_pair<D, STEP, THREADS>(tiles, q, g, first);
    i64 stats = from.stats + (i64)head * q.t;
    fetch_query_stats<STEP, THREADS>(to, lse + stats, dots + stats, starts + (i64)from.at.sequence * q.t, first, q.t);
}

// The first query and the first key of a lane in a chunk, and the statistics of the lane's queries.
struct ChunkPosition {
    int query, key;
    const float *lse, *dots; // from the lane's first query on
    const int* starts;
};

// Sets the elements of masked keys to zero. Rows are keys.
template <int M, int N> DEVICE void zero_masked_elements(float (&x)[M][N][4], const ChunkPosition& c) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int query = c.query + 8 * n + j - c.key, start = c.starts[8 * n + j] - c.key;
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& at = x[m][n][2 * h + j];
                    at = 16 * m + 8 * h <= query && 16 * m + 8 * h >= start ? at : 0.0f;
                }
        }
}

// Returns the dropout mask of a lane's probabilities, one bit each. Rows are keys.
template <int M, int N> DEVICE u32 compute_dropout_mask_by_key(const ChunkPosition& c, int sequence, int head, const Attention& a) {
    u32 mask = 0;
    static_assert(4 * M * N <= 32, "one bit per element");
#pragma unroll
    for (int i = 0; i < 4 * M * N; i++) {
        int query = c.query + 8 * (i / 2 % N) + i % 2, key = c.key + 8 * (i / (2 * N));
        mask |= (u32)(compute_dropout_factor(sequence, head, query, key, a) != 0) << i;
    }
    return mask;
}

// Replaces scores by probabilities, and do·v by the gradient with respect to scale · q·k.
template <bool PLAIN, int M, int N>
DEVICE void compute_probabilities_and_gradients(float (&p)[M][N][4], float (&d)[M][N][4], const ChunkPosition& c, u32 mask, float exponent, const Attention& a) {
    float inverse_cap = a.cap > 0 ? 1.0f / a.cap : 0.0f, keep = a.keep == 0 ? 1.0f : a.keep;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float l = c.lse[8 * n + j] * LOG2E, dot = c.dots[8 * n + j];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float &score = p[m][n][2 * h + j], &ds = d[m][n][2 * h + j];
                    float power = exp2_approx(fmaf(score, exponent, -l));
                    if (PLAIN) {
                        ds = power * (ds - dot);
                        score = power;
                    } else {
                        bool is_kept = mask >> (2 * N * (2 * m + h) + 2 * n + j) & 1;
                        float factor = is_kept ? keep : 0.0f;
                        ds = power * (ds * factor - dot) * compute_softcap_slope(score, inverse_cap);
                        score = power * factor;
                    }
                }
        }
}

// Backward pass: computes dv = Σ p·do and dk = scale · Σ ds·q over queries. Scores are transposed:
// rows are keys, and columns are queries.
template <int D, bool PLAIN, int WARPS, int M, int STEP, int CHUNK, class Values>
DEVICE void compute_backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a,
                        const BlockOrder& order) {
    DYNAMIC_SHARED(shared);
    constexpr int THREADS = 32 * WARPS, N = CHUNK / 8, BUFFER = 2 * STEP * row_stride<D>(); // queries, then gradients of outputs
    u16 *tiles = (u16*)shared, *warp_tile = tiles + 16 * M * warp_index() * row_stride<D>();
    u16* values = tiles + (Values::IN_SHARED ? 2 * BUFFER : BLOCK_ROWS * row_stride<D>());
    QueryStats<STEP>* stats = (QueryStats<STEP>*)(tiles + 2 * BUFFER + (Values::IN_SHARED ? BLOCK_ROWS * row_stride<D>() : 0));
    BlockState* state = (BlockState*)(stats + 2);
    BlockPosition at = find_position(order, blockIdx.x, false);
    int t = (int)a.t, first = at.tile * BLOCK_ROWS, group = (int)(a.heads / a.kv_heads), head = at.head * group;
    i64 k_column = (a.heads + at.head) * a.dim, v_column = k_column + a.kv_heads * a.dim;
    fetch_rows<D, BLOCK_ROWS, THREADS>(tiles, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), k_column, a), first);
    fetch_rows<D, BLOCK_ROWS, THREADS>(values, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), v_column, a), first);
    commit_copies();
    if (threadIdx.x == 0) {
        HeadRows q_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), head * a.dim, a);
        HeadRows g_rows = make_head_rows(d_o.at, at.sequence, a.heads * a.dim, head * a.dim, a);
        *state = {at, 0, group, ((i64)at.sequence * a.heads + head) * t, q_rows, g_rows};
    }
    int last = find_last_query<THREADS>(starts + (i64)at.sequence * t, first, first + BLOCK_ROWS, t);
    if (lane_index() == 0) stats->starts[warp_index()] = last;
    await_copies<0>();
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 0; w < WARPS; w++) state->end = max(state->end, stats->starts[w]);
    RegisterRows<D, M> ks;
    Values vs;
    ks.load(warp_tile);
    vs.load(values + (warp_tile - tiles));
    __syncthreads(); // from here on the buffers overwrite the block's own rows
    fetch_query_step<D, STEP, THREADS>(tiles, stats, *state, lse, dots, starts, 0, first);
    commit_copies();
    float dk[M][D / 8][4], dv[M][D / 8][4], exponent = compute_exponent_factor<PLAIN>(a);
    set_to_zero(dk);
    set_to_zero(dv);
    int operand_rows = first + 16 * M * warp_index(), q = first;
    head = 0;
    for (int buffer = 0; head < state->group; buffer ^= 1) {
        await_copies<0>();
        __syncthreads(); // this buffer is complete, and no thread uses the other one any more
        bool is_last = q + STEP >= state->end;
        int next = is_last ? state->at.tile * BLOCK_ROWS : q + STEP;
        if (head + is_last < state->group)
            fetch_query_step<D, STEP, THREADS>(tiles + (buffer ^ 1) * BUFFER, stats + (buffer ^ 1), *state, lse, dots, starts, head + is_last, next);
        commit_copies();
        const u16 *qs = tiles + buffer * BUFFER, *gs = qs + STEP * row_stride<D>();
        const QueryStats<STEP>& tile_stats = stats[buffer];
        bool is_masked = warp_all(tile_stats.starts[lane_index()] >= operand_rows + 16 * M && tile_stats.starts[lane_index() + STEP - 32] >= operand_rows + 16 * M);
        bool is_unmasked = warp_all(tile_stats.starts[lane_index()] <= operand_rows && tile_stats.starts[lane_index() + STEP - 32] <= operand_rows);
#pragma unroll 1
        for (int c = 0; c < STEP; c += CHUNK) {
            if (q + c + CHUNK <= operand_rows || q + c >= t || is_masked) continue;
            int column = c + 2 * lane_in_group();
            ChunkPosition chunk = {q + column, operand_rows + lane_group(), tile_stats.lse + column, tile_stats.dots + column, tile_stats.starts + column};
            u32 mask = PLAIN ? 0 : compute_dropout_mask_by_key<M, N>(chunk, state->at.sequence, state->at.head * state->group + head, a);
            float p[M][N][4], d[M][N][4];
            set_to_zero(p);
            set_to_zero(d);
            add_product_with_transposed_tile<D>(p, ks, qs + c * row_stride<D>());
            add_product_with_transposed_tile<D>(d, vs, gs + c * row_stride<D>());
            if (!PLAIN) softcap_scores(p, a);
            compute_probabilities_and_gradients<PLAIN>(p, d, chunk, mask, exponent, a);
            if (q + c < operand_rows + 16 * M - 1 || !is_unmasked) zero_masked_elements(p, chunk), zero_masked_elements(d, chunk);
            add_product_with_tile<D>(dv, p, gs + c * row_stride<D>());
            add_product_with_tile<D>(dk, d, qs + c * row_stride<D>());
        }
        q += STEP;
        if (q >= state->end) q = state->at.tile * BLOCK_ROWS, head++;
    }
    await_copies<0>();
    __syncthreads();
    at = state->at;
    k_column = (a.heads + at.head) * a.dim, v_column = k_column + a.kv_heads * a.dim;
    float one[2 * M], factor[2 * M];
    for (int j = 0; j < 2 * M; j++) one[j] = 1, factor[j] = a.scale;
    store_rows<D, M>(make_head_rows(dqkv.at, at.sequence, qkv_row_width(a), v_column, a), operand_rows, warp_tile, dv, one);
    store_rows<D, M>(make_head_rows(dqkv.at, at.sequence, qkv_row_width(a), k_column, a), operand_rows, warp_tile, dk, factor);
}

// --- kernels ------------------------------------------------------------------------------------------------

// The grid has one block per 128 queries (keys in the kernels `flash_backward_kv_…`) of each head
// of each sequence. Kernels whose names end in `_any` support a softcap and dropout.
#define BACKWARD_PARAMETERS Tensor dqkv, Tensor d_o, Tensor qkv, const float *lse, const float *dots, const u32 *starts, Attention a, BlockOrder order
#define BACKWARD_ARGUMENTS dqkv, d_o, qkv, lse, dots, starts, a, order

KERNEL flash_forward_64(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a, BlockOrder order) {
    compute_forward<64, true, 4, 2, 64, 64, RegisterRows<64, 2>>(o, lse, qkv, starts, a, order);
}
KERNEL flash_forward_64_any(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a, BlockOrder order) {
    compute_forward<64, false, 4, 2, 64, 32, RegisterRows<64, 2>>(o, lse, qkv, starts, a, order);
}
KERNEL flash_forward_128(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a, BlockOrder order) {
    compute_forward<128, true, 4, 2, 32, 32, SharedRows<128, 2>>(o, lse, qkv, starts, a, order);
}
KERNEL flash_forward_128_any(Tensor o, float* lse, Tensor qkv, const u32* starts, Attention a, BlockOrder order) {
    compute_forward<128, false, 8, 1, 64, 32, RegisterRows<128, 1>>(o, lse, qkv, starts, a, order);
}
KERNEL flash_backward_q_64(BACKWARD_PARAMETERS) { compute_backward_q<64, true, 4, 2, 64, 32>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_64_any(BACKWARD_PARAMETERS) { compute_backward_q<64, false, 4, 2, 64, 16>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_128(BACKWARD_PARAMETERS) { compute_backward_q<128, true, 8, 1, 64, 32>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_q_128_any(BACKWARD_PARAMETERS) { compute_backward_q<128, false, 8, 1, 64, 32>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_64(BACKWARD_PARAMETERS) { compute_backward_kv<64, true, 4, 2, 64, 16, SharedRows<64, 2>>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_64_any(BACKWARD_PARAMETERS) { compute_backward_kv<64, false, 8, 1, 64, 16, RegisterRows<64, 1>>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_128(BACKWARD_PARAMETERS) { compute_backward_kv<128, true, 8, 1, 64, 16, RegisterRows<128, 1>>(BACKWARD_ARGUMENTS); }
KERNEL flash_backward_kv_128_any(BACKWARD_PARAMETERS) { compute_backward_kv<128, false, 8, 1, 32, 16, SharedRows<128, 1>>(BACKWARD_ARGUMENTS); }

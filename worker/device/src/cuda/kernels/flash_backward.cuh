// The backward pass of attention on tensor cores (flash.cuh): computes the gradients of queries,
// keys and values. A source includes this file at most once.
#include "flash.cuh"

// Backward pass: computes dq = scale · Σ ds·k over keys, where ds = p (do·v − Σ do·o).
template <int D, bool PLAIN, int WARPS, int M, int STEP, int CHUNK, class OperandRows>
DEVICE void compute_backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a,
                       const BlockOrder& order) {
    DYNAMIC_SHARED(shared);
    constexpr int THREADS = 32 * WARPS, ROWS = 16 * M * WARPS, N = CHUNK / 8, BUFFER = 2 * STEP * row_stride<D>(); // keys, then values
    constexpr int OPERAND = OperandRows::IN_SHARED ? ROWS * row_stride<D>() : BUFFER; // from the queries to the gradients of outputs
    u16 *tiles = (u16*)shared, *queries = tiles + (OperandRows::IN_SHARED ? 2 * BUFFER : 0), *warp_tile = queries + 16 * M * warp_index() * row_stride<D>();
    int* block_starts = (int*)(tiles + 2 * BUFFER + (OperandRows::IN_SHARED ? 2 * OPERAND : 0));
    BlockPosition at = find_position(order, blockIdx.x, true);
    int t = (int)a.t, first = at.tile * ROWS, end = min(first + ROWS, t), kv = at.head / (int)(a.heads / a.kv_heads);
    HeadRows k_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + kv) * a.dim, a);
    HeadRows v_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    starts += (i64)at.sequence * t;
    BlockState* state = (BlockState*)(block_starts + ROWS);
    if (threadIdx.x == 0) *state = {at, end, 0, ((i64)at.sequence * a.heads + at.head) * t, k_rows, v_rows};
    fetch_rows<D, ROWS, THREADS>(queries, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), at.head * a.dim, a), first);
    fetch_rows<D, ROWS, THREADS>(queries + OPERAND, make_head_rows(d_o.at, at.sequence, a.heads * a.dim, at.head * a.dim, a), first);
    fetch_starts<ROWS>(block_starts, starts, first, t);
    commit_copies();
    int key = find_first_key<ROWS>(starts, first, t) / STEP * STEP;
    if (OperandRows::IN_SHARED) {
        fetch_pair<D, STEP, THREADS>(tiles, k_rows, v_rows, key);
        commit_copies();
    }
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
    OperandRows qs, gs;
    qs.load(warp_tile);
    gs.load(warp_tile + OPERAND);
    if (!OperandRows::IN_SHARED) {
        __syncthreads(); // from here on the buffers overwrite the block's own rows
        fetch_pair<D, STEP, THREADS>(tiles, k_rows, v_rows, key);
        commit_copies();
    }
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

// Which gradients a kernel computes. The registers of a thread do not suffice for both if heads
// have more than 128 elements.
enum Gradients { OF_KEYS_AND_VALUES, OF_KEYS, OF_VALUES };

// Backward pass: computes dv = Σ p·do and dk = scale · Σ ds·q over queries. Scores are transposed:
// rows are keys, and columns are queries.
template <int D, bool PLAIN, int WARPS, int M, int STEP, int CHUNK, class Keys, class Values, Gradients GRADIENTS = OF_KEYS_AND_VALUES>
DEVICE void compute_backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a,
                        const BlockOrder& order) {
    DYNAMIC_SHARED(shared);
    static_assert(Values::IN_SHARED || !Keys::IN_SHARED, "keys that stay in shared memory come after the buffers");
    constexpr bool NEEDS_VALUES = GRADIENTS != OF_VALUES;
    constexpr int THREADS = 32 * WARPS, ROWS = 16 * M * WARPS, N = CHUNK / 8, OPERAND = ROWS * row_stride<D>();
    constexpr int BUFFER = 2 * STEP * row_stride<D>(); // queries, then gradients of outputs
    constexpr int OPERANDS = (Keys::IN_SHARED ? OPERAND : 0) + (Values::IN_SHARED && NEEDS_VALUES ? OPERAND : 0);
    u16 *tiles = (u16*)shared, *warp_tile = tiles + 16 * M * warp_index() * row_stride<D>();
    u16* keys = tiles + (Keys::IN_SHARED ? 2 * BUFFER : 0);
    u16* values = tiles + (Values::IN_SHARED ? 2 * BUFFER + (Keys::IN_SHARED ? OPERAND : 0) : OPERAND);
    QueryStats<STEP>* stats = (QueryStats<STEP>*)(tiles + 2 * BUFFER + OPERANDS);
    BlockState* state = (BlockState*)(stats + 2);
    BlockPosition at = find_position(order, blockIdx.x, false);
    int t = (int)a.t, first = at.tile * ROWS, group = (int)(a.heads / a.kv_heads), head = at.head * group;
    i64 k_column = (a.heads + at.head) * a.dim, v_column = k_column + a.kv_heads * a.dim;
    fetch_rows<D, ROWS, THREADS>(keys, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), k_column, a), first);
    if (NEEDS_VALUES) fetch_rows<D, ROWS, THREADS>(values, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), v_column, a), first);
    commit_copies();
    if (threadIdx.x == 0) {
        HeadRows q_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), head * a.dim, a);
        HeadRows g_rows = make_head_rows(d_o.at, at.sequence, a.heads * a.dim, head * a.dim, a);
        *state = {at, 0, group, ((i64)at.sequence * a.heads + head) * t, q_rows, g_rows};
    }
    int last = find_last_query<THREADS>(starts + (i64)at.sequence * t, first, first + ROWS, t);
    if (lane_index() == 0) stats->starts[warp_index()] = last;
    await_copies<0>();
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 0; w < WARPS; w++) state->end = max(state->end, stats->starts[w]);
    Keys ks;
    Values vs;
    ks.load(keys + (warp_tile - tiles));
    if (NEEDS_VALUES) vs.load(values + (warp_tile - tiles));
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
        int next = is_last ? state->at.tile * ROWS : q + STEP;
        if (head + is_last < state->group)
            fetch_query_step<D, STEP, THREADS>(tiles + (buffer ^ 1) * BUFFER, stats + (buffer ^ 1), *state, lse, dots, starts, head + is_last, next);
        commit_copies();
        const u16 *qs = tiles + buffer * BUFFER, *gs = qs + STEP * row_stride<D>();
        const QueryStats<STEP>& tile_stats = stats[buffer];
        // the lanes examine the first and the last queries of the step
        int one = STEP < 32 ? lane_index() % STEP : lane_index(), other = STEP < 32 ? one : one + STEP - 32;
        bool is_masked = warp_all(tile_stats.starts[one] >= operand_rows + 16 * M && tile_stats.starts[other] >= operand_rows + 16 * M);
        bool is_unmasked = warp_all(tile_stats.starts[one] <= operand_rows && tile_stats.starts[other] <= operand_rows);
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
            if (NEEDS_VALUES) add_product_with_transposed_tile<D>(d, vs, gs + c * row_stride<D>());
            if (!PLAIN) softcap_scores(p, a);
            compute_probabilities_and_gradients<PLAIN>(p, d, chunk, mask, exponent, a);
            if (q + c < operand_rows + 16 * M - 1 || !is_unmasked) zero_masked_elements(p, chunk), zero_masked_elements(d, chunk);
            if (GRADIENTS != OF_KEYS) add_product_with_tile<D>(dv, p, gs + c * row_stride<D>());
            if (GRADIENTS != OF_VALUES) add_product_with_tile<D>(dk, d, qs + c * row_stride<D>());
        }
        q += STEP;
        if (q >= state->end) q = state->at.tile * ROWS, head++;
    }
    await_copies<0>();
    __syncthreads();
    at = state->at;
    k_column = (a.heads + at.head) * a.dim, v_column = k_column + a.kv_heads * a.dim;
    float one[2 * M], factor[2 * M];
    for (int j = 0; j < 2 * M; j++) one[j] = 1, factor[j] = a.scale;
    if (GRADIENTS != OF_KEYS) store_rows<D, M>(make_head_rows(dqkv.at, at.sequence, qkv_row_width(a), v_column, a), operand_rows, warp_tile, dv, one);
    if (GRADIENTS != OF_VALUES) store_rows<D, M>(make_head_rows(dqkv.at, at.sequence, qkv_row_width(a), k_column, a), operand_rows, warp_tile, dk, factor);
}

#define BACKWARD_PARAMETERS Tensor dqkv, Tensor d_o, Tensor qkv, const float *lse, const float *dots, const u32 *starts, Attention a, BlockOrder order
#define BACKWARD_ARGUMENTS dqkv, d_o, qkv, lse, dots, starts, a, order

// Runs the variant of the backward pass by queries for heads of up to D elements.
template <int D, bool PLAIN>
DEVICE void run_backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a,
                           const BlockOrder& order) {
    if constexpr (D == 64) compute_backward_q<64, PLAIN, 4, 2, 64, PLAIN ? 32 : 16, RegisterRows<64, 2>>(BACKWARD_ARGUMENTS);
    else if constexpr (D == 128) compute_backward_q<128, PLAIN, 8, 1, 64, 32, RegisterRows<128, 1>>(BACKWARD_ARGUMENTS);
    else compute_backward_q<256, PLAIN, 4, 1, 16, 16, SharedRows<256, 1>>(BACKWARD_ARGUMENTS);
}

// Runs the variant of the backward pass by keys for heads of up to D elements.
template <int D, bool PLAIN, Gradients GRADIENTS = OF_KEYS_AND_VALUES>
DEVICE void run_backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a,
                            const BlockOrder& order) {
    static_assert(D <= 128 || GRADIENTS != OF_KEYS_AND_VALUES, "a kernel computes one of both gradients of wide heads");
    if constexpr (D == 64 && PLAIN) compute_backward_kv<64, true, 4, 2, 64, 16, RegisterRows<64, 2>, SharedRows<64, 2>>(BACKWARD_ARGUMENTS);
    else if constexpr (D == 64) compute_backward_kv<64, false, 8, 1, 64, 16, RegisterRows<64, 1>, RegisterRows<64, 1>>(BACKWARD_ARGUMENTS);
    else if constexpr (D == 128 && PLAIN) compute_backward_kv<128, true, 8, 1, 64, 16, RegisterRows<128, 1>, RegisterRows<128, 1>>(BACKWARD_ARGUMENTS);
    else if constexpr (D == 128) compute_backward_kv<128, false, 8, 1, 32, 16, RegisterRows<128, 1>, SharedRows<128, 1>>(BACKWARD_ARGUMENTS);
    else compute_backward_kv<256, PLAIN, GRADIENTS == OF_KEYS ? 4 : 8, 1, 16, 16, SharedRows<256, 1>, SharedRows<256, 1>, GRADIENTS>(BACKWARD_ARGUMENTS);
}

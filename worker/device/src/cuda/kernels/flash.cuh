// Attention on tensor cores (Dao, "FlashAttention-2", 2023): common code, and the forward pass.
// Inputs and outputs are bf16 or f16, which ELEMENT selects. 16 × 8 × 16 matmuls are summed in f32,
// memory is linear in t, and there are no atomics. A source includes this file at most once.
//
// A block owns 16·M·WARPS rows of a head (queries, or keys in compute_backward_kv), and each warp
// owns 16·M of them. The rows of the other operand are processed in steps of STEP rows. Shared
// memory has two buffers: while one is used, the next step is copied to the other. A step is
// processed in chunks of CHUNK rows, as many as there are registers for. D is the head dimension
// rounded up to 64, 128 or 256. PLAIN kernels support neither a softcap nor dropout.
#include "attention.cuh"
#include "blocks.cuh"
#include "tiles.cuh"

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
template <int ROWS> DEVICE void fetch_starts(int* to, const u32* starts, int first, int t) {
    int i = (int)threadIdx.x;
    if (i < ROWS) copy_4_bytes_async(to + i, starts + (first + i < t ? first + i : 0), first + i < t);
}

// Returns the first key to which any of the block's queries attends.
template <int ROWS> DEVICE int find_first_key(const u32* starts, int first, int t) {
    int smallest = t;
    for (int q = first + lane_index(); q < first + ROWS && q < t; q += 32) smallest = min(smallest, (int)starts[q]);
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
    constexpr int THREADS = 32 * WARPS, ROWS = 16 * M * WARPS, N = CHUNK / 8, BUFFER = 2 * STEP * row_stride<D>(); // keys, then values
    u16 *tiles = (u16*)shared, *qs = tiles + (OperandRows::IN_SHARED ? 2 * BUFFER : 0), *warp_tile = qs + 16 * M * warp_index() * row_stride<D>();
    int* block_starts = (int*)(tiles + 2 * BUFFER + (OperandRows::IN_SHARED ? ROWS * row_stride<D>() : 0));
    BlockPosition at = find_position(order, blockIdx.x, true);
    int t = (int)a.t, first = at.tile * ROWS, end = min(first + ROWS, t), kv = at.head / (int)(a.heads / a.kv_heads);
    HeadRows k_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + kv) * a.dim, a);
    HeadRows v_rows = make_head_rows(qkv.at, at.sequence, qkv_row_width(a), (a.heads + a.kv_heads + kv) * a.dim, a);
    starts += (i64)at.sequence * t;
    BlockState* state = (BlockState*)(block_starts + ROWS);
    if (threadIdx.x == 0) *state = {at, end, 0, ((i64)at.sequence * a.heads + at.head) * t, k_rows, v_rows};
    fetch_rows<D, ROWS, THREADS>(qs, make_head_rows(qkv.at, at.sequence, qkv_row_width(a), at.head * a.dim, a), first);
    fetch_starts<ROWS>(block_starts, starts, first, t);
    int key = find_first_key<ROWS>(starts, first, t) / STEP * STEP;
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

#define FORWARD_PARAMETERS Tensor o, float *lse, Tensor qkv, const u32 *starts, Attention a, BlockOrder order
#define FORWARD_ARGUMENTS o, lse, qkv, starts, a, order

// Runs the variant of the forward pass for heads of up to D elements. attention.rs has the threads,
// the rows and the shared memory of each variant. A kernel uses at most 99 KiB of shared memory,
// because GPUs of compute capability 8.6 and 8.9 have no more.
template <int D, bool PLAIN> DEVICE void run_forward(Tensor o, float* lse, Tensor qkv, const u32* starts, const Attention& a, const BlockOrder& order) {
    if constexpr (D == 64) compute_forward<64, PLAIN, 4, 2, 64, PLAIN ? 64 : 32, RegisterRows<64, 2>>(FORWARD_ARGUMENTS);
    else if constexpr (D == 128 && PLAIN) compute_forward<128, true, 4, 2, 32, 32, SharedRows<128, 2>>(FORWARD_ARGUMENTS);
    else if constexpr (D == 128) compute_forward<128, false, 8, 1, 64, 32, RegisterRows<128, 1>>(FORWARD_ARGUMENTS);
    else compute_forward<256, PLAIN, 8, 1, 16, 16, SharedRows<256, 1>>(FORWARD_ARGUMENTS);
}

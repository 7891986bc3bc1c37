// Attention on the tensor cores of Hopper GPUs (sm_90a), for bf16 tensors with heads of 64 or 128
// elements whose rows are aligned to 16 bytes, without softcap and dropout. flash.cu computes all
// other attention on tensor cores. The order of all sums depends on the shape only.
#include "common.cuh"
#include "attention.cuh"
#include "blocks.cuh"
#include "hopper.cuh"
#include "flash_hopper.cuh"

// What the producer passes with a tile of queries: the range of keys, and the queries' first keys
// and statistics.
template <int ROWS> struct BlockInfo {
    int begin, end, unused[2];
    int starts[ROWS];
    float lse[ROWS], dots[ROWS];
};

// Divides the shared memory: the block's own tiles (OWNED tiles of ROWS rows), then the ring.
#define SETUP(ROWS_, OWNED)                                                                            \
    DYNAMIC_SHARED(raw);                                                                               \
    constexpr int ROWS = ROWS_;                                                                        \
    u32 base = (shared_address(raw) + 1023) & ~1023u;                                                  \
    char* generic = (char*)raw + (base - shared_address(raw));                                         \
    constexpr int OWN = (OWNED) * ROWS * D * 2, TILE = N * D * 2;                                      \
    u32 own = base, tiles = base + OWN;

// Initializes the barriers of the ring, and the one for "the block's own tiles are empty".
template <int SLOTS> DEVICE void init_barriers(u32 bars, int consumers) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) init_barrier(bars + 8 * i, 128), init_barrier(bars + 8 * (SLOTS + i), consumers);
        init_barrier(bars + 16 * SLOTS, consumers);
        fence_barrier_init();
    }
    __syncthreads();
}

// Updates the online softmax of a lane's two rows: replaces scores by exponentials relative to the
// rows' largest scores, and returns the factors `keep` of earlier sums.
template <int N> DEVICE void softmax(float (&s)[N][4], float (&largest)[2], float (&total)[2], float (&keep)[2], float e) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float m = largest[j];
#pragma unroll
        for (int n = 0; n < N; n++) m = fmaxf(m, fmaxf(s[n][2 * j], s[n][2 * j + 1]));
        m = max_over_row_threads(m);
        float b = m == NEGATIVE_INFINITY ? 0.0f : m * e, sum = 0;
        keep[j] = exp2_approx(fmaf(largest[j], e, -b));
        largest[j] = m;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& x = s[n][2 * j + i];
                x = exp2_approx(fmaf(x, e, -b));
                sum += x;
            }
        total[j] = fmaf(total[j], keep[j], sum);
    }
}
// Replaces the elements of masked keys by `value`. Columns are keys from `key` on.
template <int N> DEVICE void mask_rows(float (&s)[N][4], int key, const int (&starts)[2], int query, float value) {
    int column = key + 2 * (lane_index() & 3);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int from = starts[j] - column, to = query + 8 * j - column;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) s[n][2 * j + i] = 8 * n + i >= from && 8 * n + i <= to ? s[n][2 * j + i] : value;
    }
}

// Forward pass: computes the outputs of a tile of queries and their log-sum-exps. Each of WGS
// warpgroups owns 64 queries, and another one copies. Tiles of keys and values alternate in the
// ring, from the last keys to the first. The scores of the next keys are computed while those of
// the current ones are weighted. If PINGPONG, two warpgroups take turns: one computes the softmax
// while the other uses the tensor cores. LOW and HIGH are the registers of the copying and of the
// other warpgroups.
template <int D, int WGS, int N, int SLOTS, int LOW, int HIGH, bool PINGPONG>
DEVICE void compute_forward(Tensor o, float* lse, Tensor qkv, const u32* starts, const Attention& a, const BlockOrder& order) {
    SETUP(64 * WGS, 1)
    BlockInfo<ROWS>* info = (BlockInfo<ROWS>*)(generic + OWN + SLOTS * TILE);
    u32 bars = base + OWN + SLOTS * TILE + (u32)sizeof(BlockInfo<ROWS>);
    init_barriers<SLOTS>(bars, 4 * WGS);
    u32 own_empty = bars + 16 * SLOTS, total_blocks = (u32)(order.tiles * order.total_heads);
    int t = (int)a.t, group = (int)(a.heads / a.kv_heads), width = (int)qkv_row_width(a);
    int wg = (int)threadIdx.x / 128;
    if (wg == WGS) {
        decrease_registers<LOW>();
        Producer<SLOTS> p = {{bars, bars + 8 * SLOTS, 0, 0}, 0, 0};
        u32 own_parity = 1;
        u32 block;
        for (u32 round = 0; (block = find_tile(round)) < total_blocks; round++) {
            BlockPosition at = find_position(order, block, true);
            int first = at.tile * ROWS, kv = at.head / group, end = min(first + ROWS, t);
            const u16* row0 = (const u16*)qkv.at + (i64)at.sequence * t * width;
            Rows k = {row0 + (a.heads + kv) * D, width, t}, v = {row0 + (a.heads + a.kv_heads + kv) * D, width, t};
            const u32* s = starts + (i64)at.sequence * t;
            int smallest = t;
            for (int q = first + lane_index(); q < end; q += 32) smallest = min(smallest, (int)s[q]);
            int begin = __reduce_min_sync(ALL_LANES, smallest) / N * N;
            int key = (end - 1) / N * N;
            p.begin();
            fetch<D, N>(tiles + p.ring.slot * TILE, k, key);
            p.await(own_empty, own_parity);
            own_parity ^= 1;
            Rows q = {row0 + at.head * D, width, t};
            fetch<D, ROWS>(own, q, first);
            for (int i = (int)threadIdx.x & 127; i < ROWS; i += 128) copy_4_bytes_async(shared_address(info->starts + i), s + (first + i < t ? first + i : 0), first + i < t);
            if ((threadIdx.x & 127) == 0) info->begin = begin, info->end = key;
            p.end();
            p.begin();
            fetch<D, N>(tiles + p.ring.slot * TILE, v, key);
            p.end();
#pragma unroll 1
            for (key -= N; key >= begin; key -= N) {
                p.begin();
                fetch<D, N>(tiles + p.ring.slot * TILE, k, key);
                p.end();
                p.begin();
                fetch<D, N>(tiles + p.ring.slot * TILE, v, key);
                p.end();
            }
        }
        p.announce_all();
    } else {
        increase_registers<HIGH>();
        float e = a.scale * LOG2E;
        int slot = 0;
        u32 parity = 0, full = bars, empty = bars + 8 * SLOTS;
        int row = 64 * wg + 16 * ((int)threadIdx.x / 32 % 4);
        if (PINGPONG && wg == 1) arrive_at_named_barrier(2, 256);
        u32 block;
        for (u32 round = 0; (block = find_tile(round)) < total_blocks; round++) {
            await_phase(full + 8 * slot, parity);
            int first;
            { BlockPosition at = find_uniform_position(order, block, true); first = at.tile * ROWS; }
            int begin = info->begin, key = info->end, from = first + row, query = from + (lane_index() >> 2);
            int st[2] = {info->starts[row + (lane_index() >> 2)], info->starts[row + (lane_index() >> 2) + 8]};
            int max_start = __reduce_max_sync(ALL_LANES, max(st[0], st[1]));
            float out[D / 8][4], s[N / 8][4], largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {0, 0}, keep[2];
            u32 p[N / 16][4];
            u32 q_tile = own + 64 * wg * 128;
            if (PINGPONG) sync_named_barrier(2 + wg, 256);
            pin(s);
            fence_registers();
            start_scores<D, ROWS, N>(s, q_tile, tiles + slot * TILE);
            commit_matmuls();
            if (PINGPONG) arrive_at_named_barrier(3 - wg, 256);
            await_matmuls<0>();
            pin(s);
            release(empty + 8 * slot);
            if (key - N < begin) release(own_empty);
            if (key + N - 1 > from || key < max_start) mask_rows(s, key, st, query, NEGATIVE_INFINITY);
            softmax(s, largest, total, keep, e);
            pack_operand(p, s);
            bool add = false;
#pragma unroll 1
            for (key -= N; key >= begin; key -= N) {
                int v_slot = slot + 1; // SLOTS is even
                slot += 2;
                u32 v_parity = parity;
                if (slot == SLOTS) slot = 0, parity ^= 1;
                await_phase(full + 8 * slot, parity);
                if (PINGPONG) sync_named_barrier(2 + wg, 256);
                pin(s);
                fence_registers();
                start_scores<D, ROWS, N>(s, q_tile, tiles + slot * TILE);
                commit_matmuls();
                await_phase(full + 8 * v_slot, v_parity);
                start_weighted_sum<D, N>(out, p, tiles + v_slot * TILE, add);
                commit_matmuls();
                add = true;
                if (PINGPONG) arrive_at_named_barrier(3 - wg, 256);
                await_matmuls<1>();
                pin(s);
                release(empty + 8 * slot);
                if (key - N < begin) release(own_empty);
                if (key + N - 1 > from || key < max_start) mask_rows(s, key, st, query, NEGATIVE_INFINITY);
                softmax(s, largest, total, keep, e);
                await_matmuls<0>();
                pin(out);
                release(empty + 8 * v_slot);
                pack_operand(p, s);
#pragma unroll
                for (int n = 0; n < D / 8; n++) out[n][0] *= keep[0], out[n][1] *= keep[0], out[n][2] *= keep[1], out[n][3] *= keep[1];
            }
            await_phase(full + 8 * (slot + 1), parity);
            pin(out);
            fence_registers();
            start_weighted_sum<D, N>(out, p, tiles + (slot + 1) * TILE, add);
            commit_matmuls();
            BlockPosition at = find_uniform_position(order, block, true);
            float factor[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float sum = sum_over_row_threads(total[j]);
                factor[j] = 1.0f / sum;
                if ((lane_index() & 3) == 0 && query + 8 * j < t) lse[((i64)at.sequence * a.heads + at.head) * t + query + 8 * j] = largest[j] * e * LN2 + logf(sum);
            }
            await_matmuls<0>();
            pin(out);
            release(empty + 8 * (slot + 1));
            slot += 2;
            if (slot == SLOTS) slot = 0, parity ^= 1;
            store_rows<D>((u16*)o.at + ((i64)at.sequence * t * a.heads + at.head) * D, a.heads * D, from, t, out, factor[0], factor[1]);
        }
        if (PINGPONG && wg == 0) sync_named_barrier(2, 256);
    }
}

// Backward pass: computes dq = scale · Σ ds·k over keys, where ds = p (do·v − Σ do·o). Tiles of
// keys and values alternate in the ring.
template <int D, int WGS, int N, int SLOTS, int LOW, int HIGH>
DEVICE void compute_backward_q(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a, const BlockOrder& order) {
    SETUP(64 * WGS, 2)
    BlockInfo<ROWS>* info = (BlockInfo<ROWS>*)(generic + OWN + SLOTS * TILE);
    u32 bars = base + OWN + SLOTS * TILE + (u32)sizeof(BlockInfo<ROWS>);
    init_barriers<SLOTS>(bars, 4 * WGS);
    u32 own_empty = bars + 16 * SLOTS, total_blocks = (u32)(order.tiles * order.total_heads);
    int t = (int)a.t, group = (int)(a.heads / a.kv_heads), width = (int)qkv_row_width(a);
    int wg = (int)threadIdx.x / 128;
    if (wg == WGS) {
        decrease_registers<LOW>();
        Producer<SLOTS> p = {{bars, bars + 8 * SLOTS, 0, 0}, 0, 0};
        u32 own_parity = 1;
        u32 block;
        for (u32 round = 0; (block = find_tile(round)) < total_blocks; round++) {
            BlockPosition at = find_position(order, block, true);
            int first = at.tile * ROWS, kv = at.head / group, end = min(first + ROWS, t);
            const u16* row0 = (const u16*)qkv.at + (i64)at.sequence * t * width;
            Rows k = {row0 + (a.heads + kv) * D, width, t}, v = {row0 + (a.heads + a.kv_heads + kv) * D, width, t};
            const u32* s = starts + (i64)at.sequence * t;
            int smallest = t;
            for (int q = first + lane_index(); q < end; q += 32) smallest = min(smallest, (int)s[q]);
            int key = __reduce_min_sync(ALL_LANES, smallest) / N * N;
            p.begin();
            fetch<D, N>(tiles + p.ring.slot * TILE, k, key);
            p.await(own_empty, own_parity);
            own_parity ^= 1;
            Rows q = {row0 + at.head * D, width, t};
            fetch<D, ROWS>(own, q, first);
            Rows g = {(const u16*)d_o.at + ((i64)at.sequence * t * a.heads + at.head) * D, (int)a.heads * D, t};
            fetch<D, ROWS>(own + OWN / 2, g, first);
            i64 stat = ((i64)at.sequence * a.heads + at.head) * t;
            for (int i = (int)threadIdx.x & 127; i < ROWS; i += 128) {
                bool valid = first + i < t;
                int j = valid ? first + i : 0;
                copy_4_bytes_async(shared_address(info->starts + i), s + j, valid);
                copy_4_bytes_async(shared_address(info->lse + i), lse + stat + j, valid);
                copy_4_bytes_async(shared_address(info->dots + i), dots + stat + j, valid);
            }
            if ((threadIdx.x & 127) == 0) info->begin = key, info->end = end;
            p.end();
            p.begin();
            fetch<D, N>(tiles + p.ring.slot * TILE, v, key);
            p.end();
#pragma unroll 1
            for (key += N; key < end; key += N) {
                p.begin();
                fetch<D, N>(tiles + p.ring.slot * TILE, k, key);
                p.end();
                p.begin();
                fetch<D, N>(tiles + p.ring.slot * TILE, v, key);
                p.end();
            }
        }
        p.announce_all();
    } else {
        increase_registers<HIGH>();
        float e = a.scale * LOG2E;
        int slot = 0;
        u32 parity = 0, full = bars, empty = bars + 8 * SLOTS;
        int row = 64 * wg + 16 * ((int)threadIdx.x / 32 % 4);
        u32 block;
        for (u32 round = 0; (block = find_tile(round)) < total_blocks; round++) {
            await_phase(full + 8 * slot, parity);
            BlockPosition at = find_uniform_position(order, block, true);
            int from = at.tile * ROWS + row, query = from + (lane_index() >> 2), key = info->begin, end = info->end;
            int st[2];
            float l[2], dot[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int i = row + (lane_index() >> 2) + 8 * j;
                st[j] = info->starts[i], l[j] = info->lse[i] * LOG2E, dot[j] = info->dots[i];
            }
            int max_start = __reduce_max_sync(ALL_LANES, max(st[0], st[1]));
            float out[D / 8][4], s[N / 8][4], d[N / 8][4];
            u32 x[N / 16][4];
            bool add = false;
            int previous = -1;
#pragma unroll 1
            for (; key < end; key += N) {
                await_phase(full + 8 * slot, parity);
                pin(s);
                pin(d);
                fence_registers();
                start_scores<D, ROWS, N>(s, own + 64 * wg * 128, tiles + slot * TILE);
                commit_matmuls();
                await_phase(full + 8 * (slot + 1), parity);
                start_scores<D, ROWS, N>(d, own + OWN / 2 + 64 * wg * 128, tiles + (slot + 1) * TILE);
                commit_matmuls();
                await_matmuls<1>();
                pin(s);
                if (previous >= 0) release(empty + 8 * previous);
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[n][i] = exp2_approx(fmaf(s[n][i], e, -l[i / 2]));
                if (key + N - 1 > from || key < max_start) mask_rows(s, key, st, query, 0.0f);
                await_matmuls<0>();
                pin(d);
                release(empty + 8 * (slot + 1));
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) d[n][i] = s[n][i] * (d[n][i] - dot[i / 2]);
                pack_operand(x, d);
                pin(out);
                fence_registers();
                start_weighted_sum<D, N>(out, x, tiles + slot * TILE, add);
                commit_matmuls();
                add = true;
                previous = slot;
                slot += 2;
                if (slot == SLOTS) slot = 0, parity ^= 1;
            }
            release(own_empty);
            await_matmuls<0>();
            pin(out);
            release(empty + 8 * previous);
            store_rows<D>((u16*)dqkv.at + (i64)at.sequence * t * width + at.head * D, width, from, t, out, a.scale, a.scale);
        }
    }
}

// Statistics and first keys of the queries of a tile of the ring.
template <int N> struct QueryStats {
    float lse[N], dots[N];
    int starts[N];
};
// What the producer passes with a tile of keys: the range of queries. `last` is the end of the
// range that each of its warps found.
struct KeyInfo {
    int begin, end, last[4];
};
// Backward pass: computes dv = Σ p·do and dk = scale · Σ ds·q over queries. Scores are transposed:
// rows are keys, and columns are queries. Tiles of queries and of gradients of outputs alternate in
// the ring, head by head of those that share the keys. If ROUNDS, ds is computed from probabilities
// rounded to bf16, to save registers.
template <int D, int WGS, int N, int SLOTS, int LOW, int HIGH, bool ROUNDS>
DEVICE void compute_backward_kv(Tensor dqkv, Tensor d_o, Tensor qkv, const float* lse, const float* dots, const u32* starts, const Attention& a, const BlockOrder& order) {
    SETUP(64 * WGS, 2)
    QueryStats<N>* stats = (QueryStats<N>*)(generic + OWN + SLOTS * TILE);
    KeyInfo* info = (KeyInfo*)(stats + SLOTS / 2);
    u32 bars = shared_address(info) + 32;
    init_barriers<SLOTS>(bars, 4 * WGS);
    u32 own_empty = bars + 16 * SLOTS, total_blocks = (u32)(order.tiles * order.total_heads);
    int t = (int)a.t, group = (int)(a.heads / a.kv_heads), width = (int)qkv_row_width(a);
    int wg = (int)threadIdx.x / 128;
    if (wg == WGS) {
        decrease_registers<LOW>();
        Producer<SLOTS> p = {{bars, bars + 8 * SLOTS, 0, 0}, 0, 0};
        u32 own_parity = 1;
        int thread = (int)threadIdx.x & 127;
        u32 block;
        for (u32 round = 0; (block = find_tile(round)) < total_blocks; round++) {
            BlockPosition at = find_position(order, block, false);
            int first = at.tile * ROWS;
            const u16* row0 = (const u16*)qkv.at + (i64)at.sequence * t * width;
            const u32* s = starts + (i64)at.sequence * t;
            int end = t;
            if ((int)s[t - 1] >= first + ROWS) {
                int last = first;
                for (int q = first + thread; q < t; q += 128)
                    if ((int)s[q] < first + ROWS) last = q + 1;
                last = __reduce_max_sync(ALL_LANES, last);
                p.announce_all();
                sync_named_barrier(1, 128);
                if (lane_index() == 0) info->last[thread / 32] = last;
                sync_named_barrier(1, 128);
                end = max(max(info->last[0], info->last[1]), max(info->last[2], info->last[3]));
            }
            int begin = first / N * N;
            bool is_first = true;
#pragma unroll 1
            for (int h = 0; h < group; h++) {
                int head = at.head * group + h;
                Rows q = {row0 + head * D, width, t};
                Rows g = {(const u16*)d_o.at + ((i64)at.sequence * t * a.heads + head) * D, (int)a.heads * D, t};
                i64 stat = ((i64)at.sequence * a.heads + head) * t;
#pragma unroll 1
                for (int query = begin; query < end; query += N) {
                    p.begin();
                    fetch<D, N>(tiles + p.ring.slot * TILE, q, query);
                    if (thread < N) {
                        QueryStats<N>* to = stats + p.ring.slot / 2;
                        bool valid = query + thread < t;
                        int j = valid ? query + thread : 0;
                        copy_4_bytes_async(shared_address(to->lse + thread), lse + stat + j, valid);
                        copy_4_bytes_async(shared_address(to->dots + thread), dots + stat + j, valid);
                        copy_4_bytes_async(shared_address(to->starts + thread), s + j, valid);
                    }
                    if (is_first) {
                        p.await(own_empty, own_parity);
                        own_parity ^= 1;
                        Rows k = {row0 + (a.heads + at.head) * D, width, t}, v = {row0 + (a.heads + a.kv_heads + at.head) * D, width, t};
                        fetch<D, ROWS>(own, k, first);
                        fetch<D, ROWS>(own + OWN / 2, v, first);
                        if (thread == 0) info->begin = begin, info->end = end;
                        is_first = false;
                    }
                    p.end();
                    p.begin();
                    fetch<D, N>(tiles + p.ring.slot * TILE, g, query);
                    p.end();
                }
            }
        }
        p.announce_all();
    } else {
        increase_registers<HIGH>();
        float e = a.scale * LOG2E;
        int slot = 0;
        u32 parity = 0, full = bars, empty = bars + 8 * SLOTS;
        int row = 64 * wg + 16 * ((int)threadIdx.x / 32 % 4);
        u32 block;
        for (u32 round = 0; (block = find_tile(round)) < total_blocks; round++) {
            await_phase(full + 8 * slot, parity);
            int from;
            { BlockPosition at = find_uniform_position(order, block, false); from = at.tile * ROWS + row; }
            int begin = info->begin, end = info->end;
            float dk[D / 8][4], dv[D / 8][4], s[N / 8][4], d[N / 8][4];
            u32 x[N / 16][4];
            bool add = false;
            int query = begin, left = group;
#pragma unroll 1
            while (left > 0) {
                await_phase(full + 8 * slot, parity);
                pin(s);
                pin(d);
                fence_registers();
                start_scores<D, ROWS, N>(s, own + 64 * wg * 128, tiles + slot * TILE);
                commit_matmuls();
                await_phase(full + 8 * (slot + 1), parity);
                start_scores<D, ROWS, N>(d, own + OWN / 2 + 64 * wg * 128, tiles + (slot + 1) * TILE);
                commit_matmuls();
                const QueryStats<N>& st = stats[slot / 2];
                const float2* lses = (const float2*)(st.lse + 2 * (lane_index() & 3));
                const float2* dot = (const float2*)(st.dots + 2 * (lane_index() & 3));
                int max_start = 0;
#pragma unroll
                for (int i = 0; i < N; i += 32) max_start = max(max_start, st.starts[i + lane_index()]);
                max_start = __reduce_max_sync(ALL_LANES, max_start);
                await_matmuls<1>();
                pin(s);
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    float2 l = lses[4 * n];
                    l.x *= LOG2E, l.y *= LOG2E;
                    s[n][0] = exp2_approx(fmaf(s[n][0], e, -l.x));
                    s[n][1] = exp2_approx(fmaf(s[n][1], e, -l.y));
                    s[n][2] = exp2_approx(fmaf(s[n][2], e, -l.x));
                    s[n][3] = exp2_approx(fmaf(s[n][3], e, -l.y));
                }
                if (query < from + 15 || max_start > from || query + N > t) {
                    int key = from + (lane_index() >> 2);
#pragma unroll
                    for (int n = 0; n < N / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            int column = 8 * n + 2 * (lane_index() & 3) + i, q = query + column, start = st.starts[column];
                            bool valid = q < t;
                            if (!(valid && key <= q && key >= start)) s[n][i] = 0;
                            if (!(valid && key + 8 <= q && key + 8 >= start)) s[n][i + 2] = 0;
                        }
                }
                pack_operand(x, s);
                pin(dv);
                fence_registers();
                start_weighted_sum<D, N>(dv, x, tiles + (slot + 1) * TILE, add);
                commit_matmuls();
                await_matmuls<0>();
                pin(d);
                pin(dv);
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    float2 z = dot[4 * n];
                    float p[4] = {s[n][0], s[n][1], s[n][2], s[n][3]};
                    if (ROUNDS) split_bf16(p[0], p[1], x[n / 2][n % 2 * 2]), split_bf16(p[2], p[3], x[n / 2][n % 2 * 2 + 1]);
                    d[n][0] = p[0] * (d[n][0] - z.x);
                    d[n][1] = p[1] * (d[n][1] - z.y);
                    d[n][2] = p[2] * (d[n][2] - z.x);
                    d[n][3] = p[3] * (d[n][3] - z.y);
                }
                u32 y[N / 16][4];
                pack_operand(y, d);
                pin(dk);
                fence_registers();
                start_weighted_sum<D, N>(dk, y, tiles + slot * TILE, add);
                commit_matmuls();
                add = true;
                await_matmuls<0>();
                pin(dk);
                release(empty + 8 * slot), release(empty + 8 * (slot + 1));
                slot += 2;
                if (slot == SLOTS) slot = 0, parity ^= 1;
                query += N;
                if (query >= end) query = begin, left--;
            }
            release(own_empty);
            BlockPosition at = find_uniform_position(order, block, false);
            u16* to = (u16*)dqkv.at + (i64)at.sequence * t * width + (a.heads + at.head) * D;
            store_rows<D>(to, width, from, t, dk, a.scale, a.scale);
            store_rows<D>(to + a.kv_heads * D, width, from, t, dv, 1.0f, 1.0f);
        }
    }
}
// --- kernels ------------------------------------------------------------------------------------------------

// Kernels whose blocks have two or three warpgroups with rows, and one that copies.
#define TWO_GROUP_KERNEL extern "C" __global__ void __launch_bounds__(384, 1)
#define THREE_GROUP_KERNEL extern "C" __global__ void __launch_bounds__(512, 1)
#define SHAPE const __grid_constant__ Attention a, const __grid_constant__ BlockOrder order
#define FORWARD_PARAMETERS Tensor o, float *lse, Tensor qkv, const u32 *starts, SHAPE
#define BACKWARD_PARAMETERS Tensor dqkv, Tensor d_o, Tensor qkv, const float *lse, const float *dots, const u32 *starts, SHAPE
#define BACKWARD_ARGUMENTS dqkv, d_o, qkv, lse, dots, starts, a, order

TWO_GROUP_KERNEL hopper_forward_64(FORWARD_PARAMETERS) { compute_forward<64, 2, 128, 6, 40, 232, true>(o, lse, qkv, starts, a, order); }
TWO_GROUP_KERNEL hopper_forward_128(FORWARD_PARAMETERS) { compute_forward<128, 2, 128, 4, 40, 232, true>(o, lse, qkv, starts, a, order); }
TWO_GROUP_KERNEL hopper_backward_q_64(BACKWARD_PARAMETERS) { compute_backward_q<64, 2, 128, 6, 40, 232>(BACKWARD_ARGUMENTS); }
TWO_GROUP_KERNEL hopper_backward_q_128(BACKWARD_PARAMETERS) { compute_backward_q<128, 2, 64, 6, 40, 232>(BACKWARD_ARGUMENTS); }
THREE_GROUP_KERNEL hopper_backward_kv_64(BACKWARD_PARAMETERS) { compute_backward_kv<64, 3, 64, 6, 32, 160, true>(BACKWARD_ARGUMENTS); }
TWO_GROUP_KERNEL hopper_backward_kv_128(BACKWARD_PARAMETERS) { compute_backward_kv<128, 2, 64, 6, 24, 240, false>(BACKWARD_ARGUMENTS); }

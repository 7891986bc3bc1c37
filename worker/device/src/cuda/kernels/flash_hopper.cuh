// Common code of the attention kernels for Hopper GPUs (flash_hopper.cu): the order of tiles, the
// ring of tiles in shared memory, and matmuls of tiles. A source includes this file at most once.
// --- the order of tiles -----------------------------------------------------------------------------

// Returns the number of the tile that this block processes in a round. There may be fewer blocks
// than tiles. Tiles are sorted by their work, so the direction alternates.
DEVICE u32 find_tile(u32 round) { return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }

// Returns the position of a tile in registers that are uniform in a warp.
DEVICE BlockPosition find_uniform_position(const BlockOrder& o, u32 block, bool last_first) {
    BlockPosition p = find_position(o, block, last_first);
    return {__shfl_sync(ALL_LANES, p.tile, 0), __shfl_sync(ALL_LANES, p.head, 0), __shfl_sync(ALL_LANES, p.sequence, 0)};
}

// --- the ring of tiles ------------------------------------------------------------------------------

// A head's rows in one sequence: t rows with a stride of `width` elements.
struct Rows {
    const u16* at;
    int width, t;
};

// Starts to copy rows first..first+COUNT of a head to a tile. All 128 threads of a warpgroup call
// this.
template <int D, int COUNT> DEVICE void fetch(u32 tile, const Rows& from, int first) {
    constexpr int VECTORS = D / 8, AT_ONCE = 128 / VECTORS;
    int thread = (int)threadIdx.x & 127, j = thread % VECTORS, begin = thread / VECTORS, left = from.t - first - begin;
    u32 to = tile + (j / 8) * (COUNT * 128) + begin * 128 + (((j & 7) ^ (begin & 7)) << 4);
    const u16* source = from.at + (i64)(first + begin) * from.width + j * 8;
    i64 step = (i64)AT_ONCE * from.width;
    asm volatile("" : "+l"(source), "+r"(to), "+r"(left), "+l"(step)); // keeps addresses out of registers
#pragma unroll
    for (int row = 0; row < COUNT; row += AT_ONCE) {
        copy_16_bytes_async(to + row * 128, source, row < left);
        source += step;
        asm volatile("" : "+l"(source));
    }
}
// The position of a producer or consumer in the ring of tiles: the slot, and the parity of the
// number of times that the ring was filled before. Slot i has a barrier for "full" at `full` + 8·i
// and one for "empty" at `empty` + 8·i.
template <int SLOTS> struct Ring {
    u32 full, empty;
    int slot;
    u32 parity;
    DEVICE_METHOD void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// A thread of the warpgroup that fills the ring. Filled slots are announced when their copies have
// completed: at the latest when the thread would have to wait for an empty slot, because the slots
// may be empty only after the announcement.
template <int SLOTS> struct Producer {
    Ring<SLOTS> ring;
    int pending, oldest; // number of slots that are not announced, and the first of them
    DEVICE_METHOD void announce() {
        arrive_at_barrier(ring.full + 8 * oldest);
        if (++oldest == SLOTS) oldest = 0;
        pending--;
    }
    DEVICE_METHOD void announce_all() {
        if (pending == 0) return;
        await_copies<0>();
        fence_for_tensor_cores();
        while (pending > 0) announce();
    }
    DEVICE_METHOD void await(u32 barrier, u32 parity) {
        if (has_phase_completed(barrier, parity)) return;
        announce_all();
        await_phase(barrier, parity);
    }
    // Waits until the next slot is empty.
    DEVICE_METHOD void begin() { await(ring.empty + 8 * ring.slot, ring.parity ^ 1); }
    // Ends the copies to the slot. At most three slots are pending.
    DEVICE_METHOD void end() {
        commit_copies();
        pending++;
        ring.advance();
        if (pending < 3) return;
        await_copies<2>();
        fence_for_tensor_cores();
        announce();
    }
};

// --- matmuls and results ----------------------------------------------------------------------------

// Starts c[64, N] = rows · tileᵀ for the 64 rows at `a` of a tile of ROWS rows, and a tile of N
// rows.
template <int D, int ROWS, int N> DEVICE void start_scores(float (&c)[N / 8][4], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        start_matmul<0>(c, describe_operand(a + (k / 4) * (ROWS * 128) + (k % 4) * 32, 16), describe_operand(b + (k / 4) * (N * 128) + (k % 4) * 32, 16), k != 0);
}
// Starts c[64, D] = a[64, N] · tile[N, D], plus c if `add`.
template <int D, int N> DEVICE void start_weighted_sum(float (&c)[D / 8][4], const u32 (&a)[N / 16][4], u32 b, bool add) {
#pragma unroll
    for (int k = 0; k < N / 16; k++) start_matmul<1>(c, a[k], describe_operand(b + k * 2048, N * 128), add || k != 0);
}
// Rounds sums to bf16, as left operands of a matmul.
template <int N> DEVICE void pack_operand(u32 (&a)[N / 2][4], const float (&p)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);
}
// Exchanges `high` of lanes that are not `upper` with `low` of the lanes that are.
DEVICE void exchange(u32& low, u32& high, bool upper, int mask) {
    u32 sent = __shfl_xor_sync(ALL_LANES, upper ? low : high, mask);
    if (upper) low = sent;
    else high = sent;
}
// Writes a warp's 16 rows of results from row `first` on. Each row is multiplied by a factor. The
// four lanes of a row exchange their elements, so that each writes 16 bytes.
template <int D> DEVICE void store_rows(u16* to, i64 width, int first, int t, const float (&x)[D / 8][4], float f0, float f1) {
    int q = lane_index() & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first + 8 * h + (lane_index() >> 2);
        u16* at = to + (i64)row * width + q * 8;
        float f = h ? f1 : f0;
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = pack_bf16(x[4 * n + i][2 * h] * f, x[4 * n + i][2 * h + 1] * f);
            exchange(v[0], v[1], q & 1, 1);
            exchange(v[2], v[3], q & 1, 1);
            exchange(v[0], v[2], q & 2, 2);
            exchange(v[1], v[3], q & 2, 2);
            if (row < t) *(uint4*)(at + n * 32) = {v[0], v[1], v[2], v[3]};
        }
    }
}

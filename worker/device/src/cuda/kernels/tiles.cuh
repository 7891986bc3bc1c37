// Tiles of bf16 or f16 rows in shared memory: asynchronous copies to tiles, 16 × 8 × 16 matmuls of
// tiles, and copies of results to global memory through tiles. ELEMENT, which the including source
// defines, is the type of the elements: BF16 or F16.
//
// A tile's rows have D elements. The eight rows that `ldmatrix` reads together must begin in eight
// different groups of four banks. If D is at most 128, rows therefore have a stride of D + 8
// elements. Wider rows have a stride of D elements and are swizzled, because shared memory has no
// space for padding: vector i of row r (8 elements) is stored at the place of vector i ^ r % 8.
// Elements beyond the head or the sequence are zero. A source includes this file at most once.

// Returns whether the rows of a tile are swizzled.
template <int D> DEVICE constexpr bool is_swizzled() { return D > 128; }
// Returns the number of elements from row to row of a tile.
template <int D> DEVICE constexpr int row_stride() { return is_swizzled<D>() ? D : D + 8; }
// Returns where a row of a tile has the element `column`. `row` may differ from the number of the
// row by a multiple of 8.
template <int D> DEVICE int swizzle(int column, int row) { return is_swizzled<D>() ? column ^ (row & 7) * 8 : column; }

#ifndef EMULATED
// Adds the matmul c[16, 8] += a[16, 16] · b[16, 8] of bf16 numbers on tensor cores.
DEVICE void mma_16x8x16_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Adds the matmul c[16, 8] += a[16, 16] · b[16, 8] of f16 numbers on tensor cores.
DEVICE void mma_16x8x16_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
// Loads four 8 × 8 matrices. Lanes 8·i to 8·i + 7 pass the addresses of the rows of matrix i.
DEVICE void ldmatrix_x4(u32 (&x)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Loads four 8 × 8 matrices, each transposed.
DEVICE void ldmatrix_x4_transposed(u32 (&x)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Starts a copy of 16 bytes to shared memory. Unless `is_valid`, zeros are written instead, and
// `from` is not read but must be aligned.
DEVICE void copy_16_bytes_async(void* to, const void* from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(shared_address(to)), "l"(from), "r"(is_valid ? 16 : 0) : "memory");
}
// Starts a copy of 4 bytes to shared memory. Unless `is_valid`, zeros are written instead.
DEVICE void copy_4_bytes_async(void* to, const void* from, bool is_valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(shared_address(to)), "l"(from), "r"(is_valid ? 4 : 0) : "memory");
}
// Commits the thread's copies since the last call as a group.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits until at most `Open` of the thread's latest groups are incomplete. Other threads see the
// copies after the next barrier.
template <int Open> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(Open) : "memory"); }
#endif

// Adds the matmul c[16, 8] += a[16, 16] · b[16, 8] on tensor cores.
DEVICE void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (ELEMENT == F16) mma_16x8x16_f16(c, a, b0, b1);
    else mma_16x8x16_bf16(c, a, b0, b1);
}
// Rounds two numbers to elements and packs them into one word. In f16, numbers above 65504 become
// infinite.
DEVICE u32 pack_elements(float low, float high) { return ELEMENT == F16 ? pack_f16(low, high) : pack_bf16(low, high); }

// A lane has four elements of a 16 × 8 result: rows `lane_group` and `lane_group + 8`, columns
// `2·lane_in_group` and `2·lane_in_group + 1`.
DEVICE int lane_index() { return (int)(threadIdx.x & 31); }
DEVICE int warp_index() { return (int)(threadIdx.x >> 5); }
DEVICE int lane_group() { return lane_index() >> 2; }
DEVICE int lane_in_group() { return lane_index() & 3; }

// --- rows of a head, to shared memory and back --------------------------------------------------------------

// A head's rows in one sequence: t rows of dim elements with a stride of `width` elements.
struct HeadRows {
    u16* at;
    int width, t, dim;
    bool is_aligned; // rows are aligned and multiples of 16 bytes
};

// Returns the rows of a head that begins at `column` of rows of `width` elements.
DEVICE HeadRows make_head_rows(const void* at, i64 sequence, i64 width, i64 column, const Attention& a) {
    bool is_aligned = a.dim % 8 == 0 && ((u64)at & 15) == 0;
    return {(u16*)at + sequence * a.t * width + column, (int)width, (int)a.t, (int)a.dim, is_aligned};
}

// Starts to copy rows first..first+COUNT to a tile. The caller must commit the group. Unaligned
// rows are copied synchronously.
template <int D, int COUNT, int THREADS> DEVICE void fetch_rows(u16* tile, const HeadRows& from, int first) {
    constexpr int VECTORS = D / 8, AT_ONCE = THREADS / VECTORS;
    static_assert(COUNT % AT_ONCE == 0, "each thread copies the same number of vectors");
    static_assert(!is_swizzled<D>() || AT_ONCE % 4 == 0, "a thread's rows differ by multiples of 4");
    int j = (int)threadIdx.x % VECTORS * 8, begin = (int)threadIdx.x / VECTORS, left = from.t - first - begin;
    u16* to = tile + begin * row_stride<D>() + swizzle<D>(j, begin);
    u16* to_odd = tile + begin * row_stride<D>() + swizzle<D>(j, begin + 4); // for rows begin + 4, begin + 12, …
    const u16* source = from.at + (i64)(first + begin) * from.width + j;
    if (from.is_aligned) {
        if (j >= from.dim) left = 0;
#pragma unroll
        for (int row = 0; row < COUNT; row += AT_ONCE) {
            copy_16_bytes_async((is_swizzled<D>() && row & 4 ? to_odd : to) + row * row_stride<D>(), source, row < left);
            source += AT_ONCE * from.width;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < 8 * (COUNT / AT_ONCE); i++) {
            int row = i / 8 * AT_ONCE, k = i % 8;
            (is_swizzled<D>() && row & 4 ? to_odd : to)[row * row_stride<D>() + k] = row < left && j + k < from.dim ? source[(i64)row * from.width + k] : (u16)0;
        }
    }
}

// Starts to copy rows of two tensors into consecutive tiles.
template <int D, int COUNT, int THREADS> DEVICE void fetch_pair(u16* tiles, const HeadRows& one, const HeadRows& other, int first) {
    fetch_rows<D, COUNT, THREADS>(tiles, one, first);
    fetch_rows<D, COUNT, THREADS>(tiles + COUNT * row_stride<D>(), other, first);
}

// Writes a warp's results, each row times a factor, to the warp's 16·M rows of a tile.
template <int D, int M> DEVICE void write_results_to_tile(u16* tile, const float (&x)[M][D / 8][4], const float (&factor)[2 * M]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u16* row = tile + (16 * m + 8 * h + lane_group()) * row_stride<D>() + 2 * lane_in_group();
            float f = factor[2 * m + h];
#pragma unroll
            for (int n = 0; n < D / 8; n++) *(u32*)(row + swizzle<D>(8 * n, lane_group())) = pack_elements(x[m][n][2 * h] * f, x[m][n][2 * h + 1] * f);
        }
}

// Copies COUNT rows of a tile to global memory from row `first` on. Elements beyond the sequence or
// the head are skipped.
template <int D, int COUNT> DEVICE void copy_tile_to_global(const HeadRows& to, int first, const u16* tile) {
    constexpr int VECTORS = D / 8, AT_ONCE = 32 / VECTORS;
    int j = lane_index() % VECTORS * 8, begin = lane_index() / VECTORS;
#pragma unroll 4
    for (int row = begin; row < COUNT; row += AT_ONCE) {
        if (first + row >= to.t || j >= to.dim) continue;
        const u16* from = tile + row * row_stride<D>() + swizzle<D>(j, row);
        u16* target = to.at + (i64)(first + row) * to.width + j;
        if (to.is_aligned) {
            *(uint4*)target = *(const uint4*)from;
        } else {
            for (int k = 0; k < 8 && j + k < to.dim; k++) target[k] = from[k];
        }
    }
}

// Stores a warp's results through its rows of a tile, which no other warp uses any more.
template <int D, int M>
DEVICE void store_rows(const HeadRows& to, int first, u16* tile, const float (&x)[M][D / 8][4], const float (&factor)[2 * M]) {
    write_results_to_tile<D, M>(tile, x, factor);
    __syncwarp();
    copy_tile_to_global<D, 16 * M>(to, first, tile);
    __syncwarp();
}

// --- matmuls ------------------------------------------------------------------------------------------------

// The rows whose addresses a lane passes to `ldmatrix_x4` for the 16 × 16 blocks of a tile.
template <int D> struct LaneRows {
    const u16* at;
    int offset; // of the lane's row of the first block from `at`; 0 unless the tile is swizzled
    // Returns the lane's row of the block that begins at a row, a multiple of 8, and a column, a
    // multiple of 16.
    DEVICE_METHOD const u16* find(int row, int column) const {
        if (!is_swizzled<D>()) return at + row * row_stride<D>() + column;
        return at + (offset ^ (column & 63)) + (row * row_stride<D>() + (column & ~63)); // the constant is part of an instruction
    }
};
template <int D> DEVICE LaneRows<D> make_lane_rows(const u16* tile, int row, int column) {
    int offset = row * row_stride<D>() + swizzle<D>(column, row);
    if (is_swizzled<D>()) return {tile, offset};
    return {tile + offset, 0};
}
// Returns a lane's rows of blocks that are left operands or transposed right operands.
template <int D> DEVICE LaneRows<D> find_rows_by_columns(const u16* tile) { return make_lane_rows<D>(tile, lane_index() & 15, (lane_index() >> 4) * 8); }
// Returns a lane's rows of blocks that are right operands whose columns are the tile's rows.
template <int D> DEVICE LaneRows<D> find_rows_by_rows(const u16* tile) {
    return make_lane_rows<D>(tile, (lane_index() & 7) + (lane_index() >> 4) * 8, (lane_index() >> 3 & 1) * 8);
}

template <int M, int N> DEVICE void set_to_zero(float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
}

// A warp's 16·M rows as left operands, in registers.
template <int D, int M> struct RegisterRows {
    static constexpr bool IN_SHARED = false;
    u32 x[M][D / 16][4];
    DEVICE_METHOD void load(const u16* rows) {
        LaneRows<D> from = find_rows_by_columns<D>(rows);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int k = 0; k < D / 16; k++) ldmatrix_x4(x[m][k], from.find(16 * m, 16 * k));
    }
    DEVICE_METHOD void load_operand(u32 (&y)[4], int m, int k) const {
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = x[m][k][i];
    }
};
// A warp's 16·M rows as left operands, in shared memory, for kernels that have no registers left.
template <int D, int M> struct SharedRows {
    static constexpr bool IN_SHARED = true;
    LaneRows<D> tile;
    DEVICE_METHOD void load(const u16* rows) { tile = find_rows_by_columns<D>(rows); }
    DEVICE_METHOD void load_operand(u32 (&y)[4], int m, int k) const { ldmatrix_x4(y, tile.find(16 * m, 16 * k)); }
};

// Adds the matmul c[16·M, 8·N] += rows · (other tile)ᵀ.
template <int D, int M, int N, class OperandRows> DEVICE void add_product_with_transposed_tile(float (&c)[M][N][4], const OperandRows& rows, const u16* other) {
    LaneRows<D> columns = find_rows_by_rows<D>(other);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) rows.load_operand(x[m], m, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 y[4];
            ldmatrix_x4(y, columns.find(8 * n, 16 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(c[m][n], x[m], y[0], y[1]);
                mma_16x8x16(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// Adds the matmul out[16·M, D] += p[16·M, 8·N] · other tile. p is rounded to the type of the
// elements.
template <int D, int M, int N> DEVICE void add_product_with_tile(float (&out)[M][D / 8][4], const float (&p)[M][N][4], const u16* other) {
    LaneRows<D> rows = find_rows_by_columns<D>(other);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][i] = pack_elements(p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 y[4];
            ldmatrix_x4_transposed(y, rows.find(8 * k, 8 * n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(out[m][n], x[m], y[0], y[1]);
                mma_16x8x16(out[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

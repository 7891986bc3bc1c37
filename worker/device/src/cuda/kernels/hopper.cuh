// Instructions of Hopper GPUs (sm_90a): matmuls of warpgroups (four warps) on tensor cores
// (`wgmma`), barriers in shared memory (`mbarrier`), named barriers, and the number of registers
// per warpgroup. A source includes this file at most once.
//
// Operands of matmuls are tiles in shared memory with a swizzle of 128 bytes: a tile consists of
// blocks of 64 columns, a block has 128 bytes per row, and vector v of 16 bytes of row r is stored
// at position v ^ (r % 8). Tiles are aligned to 1024 bytes.

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
DEVICE int lane_index() { return (int)(threadIdx.x & 31); }

// --- copies to shared memory ------------------------------------------------------------------------

// Starts a copy of 16 bytes to shared memory. Unless `is_valid`, zeros are written instead, and
// `from` is not read but must be aligned.
DEVICE void copy_16_bytes_async(u32 to, const void* from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(is_valid ? 16 : 0) : "memory");
}
// Starts a copy of 4 bytes to shared memory. Unless `is_valid`, zeros are written instead.
DEVICE void copy_4_bytes_async(u32 to, const void* from, bool is_valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(to), "l"(from), "r"(is_valid ? 4 : 0) : "memory");
}
// Commits the thread's copies since the last call as a group.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits until at most `Open` of the thread's latest groups of copies are incomplete.
template <int Open> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(Open) : "memory"); }
// Makes the thread's completed writes to shared memory visible to tensor cores.
DEVICE void fence_for_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// --- barriers ---------------------------------------------------------------------------------------

DEVICE void init_barrier(u32 barrier, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory"); }
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
DEVICE void arrive_at_barrier(u32 barrier) { asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" : : "r"(barrier) : "memory"); }
// Returns true if the phase of the barrier with this parity has completed.
DEVICE bool has_phase_completed(u32 barrier, u32 parity) {
    u32 completed;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(completed) : "r"(barrier), "r"(parity) : "memory");
    return completed;
}
DEVICE void await_phase(u32 barrier, u32 parity) {
    while (!has_phase_completed(barrier, parity)) {}
}
// Arrives at a barrier on behalf of a warp.
DEVICE void release(u32 barrier) {
    __syncwarp();
    if (lane_index() == 0) arrive_at_barrier(barrier);
}
DEVICE void sync_named_barrier(int barrier, int threads) { asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory"); }
DEVICE void arrive_at_named_barrier(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory"); }

// --- matmuls ----------------------------------------------------------------------------------------

// Increases or decreases the number of registers of the warpgroup's threads.
template <int COUNT> DEVICE void increase_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT)); }
template <int COUNT> DEVICE void decrease_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT)); }

// Orders earlier accesses to registers before the following matmuls.
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
// Commits the matmuls since the last call as a group.
DEVICE void commit_matmuls() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
// Waits until at most `Open` of the latest groups of matmuls are incomplete.
template <int Open> DEVICE void await_matmuls() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Open) : "memory"); }

// Returns the descriptor of an operand in shared memory. `block_bytes` is the distance of blocks of
// 64 columns, which matters only for operands whose columns are the columns of the result.
DEVICE u64 describe_operand(u32 at, u32 block_bytes) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(block_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define SUMS_4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_16(n) SUMS_4(n), SUMS_4(n + 1), SUMS_4(n + 2), SUMS_4(n + 3)
#define SUMS_32 SUMS_16(0), SUMS_16(4)
#define SUMS_64 SUMS_32, SUMS_16(8), SUMS_16(12)
#define NUMBERS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64 NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Starts c[64, 64] = a[64, 16] · b[16, 64], plus c if `adds`. If TRANSPOSED is 0, the rows of b's
// tile are columns of b; if it is 1, they are rows of b. The operand a is in shared memory.
template <int TRANSPOSED> DEVICE void start_matmul(float (&c)[8][4], u64 a, u64 b, bool adds) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32
                 "}, %32, %33, p, 1, 1, 0, %35;}" : SUMS_32 : "l"(a), "l"(b), "r"((int)adds), "n"(TRANSPOSED));
}
// The same with the operand a in registers.
template <int TRANSPOSED> DEVICE void start_matmul(float (&c)[8][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NUMBERS_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
                 : SUMS_32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"(TRANSPOSED));
}
// Prevents the compiler from moving accesses to the sums of a matmul across this point.
DEVICE void pin(float (&c)[8][4]) { asm volatile("" : SUMS_32 : : "memory"); }
// Starts c[64, 128] = a[64, 16] · b[16, 128], plus c if `adds`. If TRANSPOSED is 0, the rows of b's
// tile are columns of b; if it is 1, they are rows of b. The operand a is in shared memory.
template <int TRANSPOSED> DEVICE void start_matmul(float (&c)[16][4], u64 a, u64 b, bool adds) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64
                 "}, %64, %65, p, 1, 1, 0, %67;}" : SUMS_64 : "l"(a), "l"(b), "r"((int)adds), "n"(TRANSPOSED));
}
// The same with the operand a in registers.
template <int TRANSPOSED> DEVICE void start_matmul(float (&c)[16][4], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
                 : SUMS_64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"(TRANSPOSED));
}
// Prevents the compiler from moving accesses to the sums of a matmul across this point.
DEVICE void pin(float (&c)[16][4]) { asm volatile("" : SUMS_64 : : "memory"); }

// What all kernels stand on: element types, sums over a warp and a block.
//
// No header of a toolkit is needed: the sources are compiled on machines that have the compiler's library alone. They also
// compile as C++ for the CPU (EMULATED), where the tests run them.
#pragma once
typedef long long i64;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef KERNEL
#define KERNEL extern "C" __global__ void
// Of blocks of up to 1024 threads: the compiler leaves registers for all of them. Others have at most 256.
#define WIDE_KERNEL extern "C" __global__ void __launch_bounds__(1024)
#endif
#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__

// Elements of a type that is known when the kernel runs; `at` is 0 for what isn't given.
struct Tensor {
    void* at;
    i64 type;
};
enum { F32 = 0, BF16 = 1, F16 = 2 };

#define NEGATIVE_INFINITY __int_as_float((int)0xff800000)

DEVICE float from_bf16(u16 h) { return __int_as_float((int)((u32)h << 16)); }

// The two halves of a word.
DEVICE void split_bf16(float& low, float& high, u32 both) {
    low = __int_as_float((int)(both << 16));
    high = __int_as_float((int)(both & 0xffff0000u));
}

// To the nearest, ties to even; what is no number stays none.
DEVICE u16 to_bf16(float x) {
    u32 bits = (u32)__float_as_int(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifndef EMULATED
DEVICE float from_f16(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
DEVICE u16 to_f16(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
// Two numbers in the two halves of a word.
DEVICE u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Shared memory whose size the launch says.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]
#else
DEVICE u32 two_bf16(float low, float high) { return (u32)to_bf16(low) | (u32)to_bf16(high) << 16; }
DEVICE float power_of_2(float x) { return exp2f(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }
#endif
#define LOG2E 1.4426950408889634f

DEVICE float load(Tensor x, i64 i) {
    if (x.type == F32) return ((const float*)x.at)[i];
    u16 h = ((const u16*)x.at)[i];
    return x.type == BF16 ? from_bf16(h) : from_f16(h);
}

DEVICE void store(Tensor y, i64 i, float x) {
    if (y.type == F32) ((float*)y.at)[i] = x;
    else ((u16*)y.at)[i] = y.type == BF16 ? to_bf16(x) : to_f16(x);
}

DEVICE Tensor floats(const float* at) { return {(void*)at, F32}; }

// --- eight elements of a thread, in accesses of 16 bytes where they lie so ------------------------------------------------
// Which thread has which elements depends on the shape alone, so sums keep their order wherever a tensor begins.

DEVICE bool in_one_piece(Tensor x, i64 i, i64 left) {
    return left >= 8 && ((u64)x.at + (u64)i * (x.type == F32 ? 4 : 2)) % 16 == 0;
}

// Elements i..i + 8, which lie in one piece.
DEVICE void load_whole(float (&v)[8], Tensor x, i64 i) {
    if (x.type == F32) {
        const float4* at = (const float4*)((const float*)x.at + i);
        float4 low = at[0], high = at[1];
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
        return;
    }
    uint4 all = *(const uint4*)((const u16*)x.at + i);
    u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (x.type == BF16) split_bf16(v[2 * k], v[2 * k + 1], words[k]);
        else v[2 * k] = from_f16((u16)words[k]), v[2 * k + 1] = from_f16((u16)(words[k] >> 16));
    }
}

// Of which `left` exist; the others are 0.
DEVICE void load_eight(float (&v)[8], Tensor x, i64 i, i64 left) {
    if (in_one_piece(x, i, left)) return load_whole(v, x, i);
    for (int k = 0; k < 8; k++) v[k] = k < left ? load(x, i + k) : 0.0f;
}

DEVICE void store_whole(Tensor y, i64 i, const float (&v)[8]) {
    if (y.type == F32) {
        float4* at = (float4*)((float*)y.at + i);
        at[0] = {v[0], v[1], v[2], v[3]};
        at[1] = {v[4], v[5], v[6], v[7]};
        return;
    }
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        words[k] = y.type == BF16 ? two_bf16(v[2 * k], v[2 * k + 1]) : (u32)to_f16(v[2 * k]) | (u32)to_f16(v[2 * k + 1]) << 16;
    *(uint4*)((u16*)y.at + i) = {words[0], words[1], words[2], words[3]};
}
DEVICE void store_eight(Tensor y, i64 i, i64 left, const float (&v)[8]) {
    if (in_one_piece(y, i, left)) return store_whole(y, i, v);
    for (int k = 0; k < 8; k++)
        if (k < left) store(y, i + k, v[k]);
}
#define EIGHT(k) _Pragma("unroll") for (int k = 0; k < 8; k++)

// The same where the compiler knows more: F32 or BF16 is the type of a tensor that lies at 16 bytes, whose rows are whole eights;
// ANY is anything. Which of its kernels an op takes, the host decides (`eights` in mod.rs): they give the same bits.
#define ANY -1
template <int TYPE> DEVICE void load_eight(float (&v)[8], Tensor x, i64 i, i64 left) {
    if (TYPE == ANY) return load_eight(v, x, i, left);
    Tensor known = {x.at, TYPE};
    load_whole(v, known, i);
}
template <int TYPE> DEVICE void store_eight(Tensor y, i64 i, i64 left, const float (&v)[8]) {
    if (TYPE == ANY) return store_eight(y, i, left, v);
    Tensor known = {y.at, TYPE};
    store_whole(known, i, v);
}
// v becomes what is kept of it.
template <int TYPE> DEVICE void store_rounded(Tensor y, i64 i, i64 left, float (&v)[8]) {
    if (TYPE != BF16) {
        store_eight<TYPE>(y, i, left, v);
        if (TYPE == ANY) load_eight(v, y, i, left);
        return;
    }
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        words[k] = two_bf16(v[2 * k], v[2 * k + 1]);
        split_bf16(v[2 * k], v[2 * k + 1], words[k]);
    }
    *(uint4*)((u16*)y.at + i) = {words[0], words[1], words[2], words[3]};
}

// Philox4x32-10: the four words of a block of a sample at a step (philox.rs).
DEVICE void random_words(u32 (&c)[4], const u32 (&key)[2], u64 block, u64 sample, u64 step) {
    u32 k0 = key[0], k1 = key[1];
    c[0] = (u32)block, c[1] = (u32)sample, c[2] = (u32)step;
    c[3] = (u32)(block >> 32) | (u32)(sample >> 32) << 11 | (u32)(step >> 32) << 22;
    for (int round = 0; round < 10; round++) {
        u64 p0 = (u64)c[0] * 0xD2511F53u, p1 = (u64)c[2] * 0xCD9E8D57u;
        u32 c1 = c[1], c3 = c[3];
        c[0] = (u32)(p1 >> 32) ^ c1 ^ k0;
        c[1] = (u32)p1;
        c[2] = (u32)(p0 >> 32) ^ c3 ^ k1;
        c[3] = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// Every element of a flat vector once, whatever the size of the launch.
#define EACH(i, n) \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)
// The same in eights.
#define EACH_EIGHT(i, n) \
    for (i64 i = 8 * ((i64)blockIdx.x * blockDim.x + threadIdx.x); i < (n); i += 8 * (i64)gridDim.x * blockDim.x)
// Every element of the block's row.
#define EACH_OF_ROW(j, d) for (i64 j = threadIdx.x; j < (d); j += blockDim.x)
// The same in eights.
#define EIGHTS_OF_ROW(j, d) for (int j = 8 * (int)threadIdx.x; j < (int)(d); j += 8 * (int)blockDim.x)

template <class T> DEVICE T warp_sum(T x) {
    for (int other = 16; other > 0; other >>= 1) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

DEVICE float warp_max(float x) {
    for (int other = 16; other > 0; other >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

// The sum over a block of whole warps, the same bits in every thread: lanes as a tree, then warps as one.
template <class T> DEVICE T block_sum(T x) {
    __shared__ T parts[32];
    x = warp_sum(x);
    __syncthreads(); // an earlier sum may still be read
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return warp_sum(lane < blockDim.x >> 5 ? parts[lane] : (T)0);
}

DEVICE float block_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return warp_max(lane < blockDim.x >> 5 ? parts[lane] : NEGATIVE_INFINITY);
}

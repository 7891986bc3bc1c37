// Common code of all kernels: element types, vectors of eight elements, sums over a warp and a
// block.
//
// The sources include no header of the CUDA toolkit, because they are compiled on machines that
// only have NVRTC. They also compile as C++ for the CPU (EMULATED), where the tests run them.
#pragma once
typedef long long i64;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef KERNEL
#define KERNEL extern "C" __global__ void
// Declares a kernel with blocks of up to 1024 threads. The compiler limits the registers of such a
// kernel. The blocks of other kernels have at most 256 threads.
#define WIDE_KERNEL extern "C" __global__ void __launch_bounds__(1024)
#endif
#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__

// A tensor whose type is known at run time. `at` is 0 for an absent tensor.
struct Tensor {
    void* at;
    i64 type;
};
enum { F32 = 0, BF16 = 1, F16 = 2 };

#define NEGATIVE_INFINITY __int_as_float((int)0xff800000)

DEVICE float from_bf16(u16 h) { return __int_as_float((int)((u32)h << 16)); }

// Splits the word `both` into its two bf16 values, as f32.
DEVICE void split_bf16(float& low, float& high, u32 both) {
    low = __int_as_float((int)(both << 16));
    high = __int_as_float((int)(both & 0xffff0000u));
}

// Rounds x to the nearest bf16 number, ties to even, and returns its bits. NaN stays NaN.
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
// Rounds two numbers to bf16 and packs them into one word.
DEVICE u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
// Rounds two numbers to f16 and packs them into one word.
DEVICE u32 pack_f16(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Declares the block's dynamic shared memory.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]
#else
DEVICE u32 pack_bf16(float low, float high) { return (u32)to_bf16(low) | (u32)to_bf16(high) << 16; }
DEVICE u32 pack_f16(float low, float high) { return (u32)to_f16(low) | (u32)to_f16(high) << 16; }
DEVICE float exp2_approx(float x) { return exp2f(x); }
DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
#endif
#define LOG2E 1.4426950408889634f

// Returns element i of x as f32.
DEVICE float load(Tensor x, i64 i) {
    if (x.type == F32) return ((const float*)x.at)[i];
    u16 h = ((const u16*)x.at)[i];
    return x.type == BF16 ? from_bf16(h) : from_f16(h);
}

// Rounds x to the type of y and writes it to element i of y.
DEVICE void store(Tensor y, i64 i, float x) {
    if (y.type == F32) ((float*)y.at)[i] = x;
    else ((u16*)y.at)[i] = y.type == BF16 ? to_bf16(x) : to_f16(x);
}

// Returns the tensor of f32 elements at an address.
DEVICE Tensor f32_tensor(const float* at) { return {(void*)at, F32}; }

// --- vectors of eight elements, accessed 16 bytes at a time if they are aligned ----------------------------------
// Which thread has which elements depends on the shape only, so the order of sums does not depend
// on alignment.

// Returns true if eight elements from element i on exist and are aligned to 16 bytes.
DEVICE bool is_aligned_8(Tensor x, i64 i, i64 remaining) {
    return remaining >= 8 && ((u64)x.at + (u64)i * (x.type == F32 ? 4 : 2)) % 16 == 0;
}

// Loads elements i..i + 8 of an aligned vector.
DEVICE void load_aligned_8(float (&v)[8], Tensor x, i64 i) {
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

// Loads elements i..i + 8, of which `remaining` exist; the others are 0.
DEVICE void load_8(float (&v)[8], Tensor x, i64 i, i64 remaining) {
    if (is_aligned_8(x, i, remaining)) return load_aligned_8(v, x, i);
    for (int k = 0; k < 8; k++) v[k] = k < remaining ? load(x, i + k) : 0.0f;
}

// Stores elements i..i + 8 of an aligned vector, rounded to its type.
DEVICE void store_aligned_8(Tensor y, i64 i, const float (&v)[8]) {
    if (y.type == F32) {
        float4* at = (float4*)((float*)y.at + i);
        at[0] = {v[0], v[1], v[2], v[3]};
        at[1] = {v[4], v[5], v[6], v[7]};
        return;
    }
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        words[k] = y.type == BF16 ? pack_bf16(v[2 * k], v[2 * k + 1]) : (u32)to_f16(v[2 * k]) | (u32)to_f16(v[2 * k + 1]) << 16;
    *(uint4*)((u16*)y.at + i) = {words[0], words[1], words[2], words[3]};
}
// Stores elements i..i + 8, of which `remaining` exist.
DEVICE void store_8(Tensor y, i64 i, i64 remaining, const float (&v)[8]) {
    if (is_aligned_8(y, i, remaining)) return store_aligned_8(y, i, v);
    for (int k = 0; k < 8; k++)
        if (k < remaining) store(y, i + k, v[k]);
}
// Loops over the eight elements of a vector.
#define FOR_EIGHT(k) _Pragma("unroll") for (int k = 0; k < 8; k++)

// Variants for a type that is known at compile time. F32 or BF16: the tensor has this type, is
// aligned to 16 bytes, and its rows are multiples of eight elements. ANY: no restriction. The host
// selects the kernel (`are_vectorizable` in tensor_arg.rs); the results are bit-equal.
#define ANY -1
template <int TYPE> DEVICE void load_8(float (&v)[8], Tensor x, i64 i, i64 remaining) {
    if (TYPE == ANY) return load_8(v, x, i, remaining);
    Tensor typed = {x.at, TYPE};
    load_aligned_8(v, typed, i);
}
template <int TYPE> DEVICE void store_8(Tensor y, i64 i, i64 remaining, const float (&v)[8]) {
    if (TYPE == ANY) return store_8(y, i, remaining, v);
    Tensor typed = {y.at, TYPE};
    store_aligned_8(typed, i, v);
}
// Stores v, and replaces v by its rounded values.
template <int TYPE> DEVICE void store_8_and_round(Tensor y, i64 i, i64 remaining, float (&v)[8]) {
    if (TYPE != BF16) {
        store_8<TYPE>(y, i, remaining, v);
        if (TYPE == ANY) load_8(v, y, i, remaining);
        return;
    }
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        words[k] = pack_bf16(v[2 * k], v[2 * k + 1]);
        split_bf16(v[2 * k], v[2 * k + 1], words[k]);
    }
    *(uint4*)((u16*)y.at + i) = {words[0], words[1], words[2], words[3]};
}

// Computes the four random words of a block of a sample at a step with Philox4x32-10. philox.rs
// implements the same function for the CPU.
DEVICE void compute_random_words(u32 (&c)[4], const u32 (&key)[2], u64 block, u64 sample, u64 step) {
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

// Loops over the elements of a vector. The threads of the grid share the elements.
#define FOR_EACH_ELEMENT(i, n) \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)
// Loops over a vector in steps of eight elements. The threads of the grid share the steps.
#define FOR_EACH_VECTOR(i, n) \
    for (i64 i = 8 * ((i64)blockIdx.x * blockDim.x + threadIdx.x); i < (n); i += 8 * (i64)gridDim.x * blockDim.x)
// Loops over the elements of a row. The threads of the block share the elements.
#define FOR_EACH_ROW_ELEMENT(j, d) for (i64 j = threadIdx.x; j < (d); j += blockDim.x)
// Loops over a row in steps of eight elements. The threads of the block share the steps.
#define FOR_EACH_ROW_VECTOR(j, d) for (int j = 8 * (int)threadIdx.x; j < (int)(d); j += 8 * (int)blockDim.x)

// Returns the sum of x over the lanes of a warp, bit-equal in every lane.
template <class T> DEVICE T warp_sum(T x) {
    for (int other = 16; other > 0; other >>= 1) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

// Returns the maximum of x over the lanes of a warp.
DEVICE float warp_max(float x) {
    for (int other = 16; other > 0; other >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

// Returns the sum of x over the threads of a block, which must consist of whole warps. The sum is
// bit-equal in every thread: a tree over lanes, then a tree over warps.
template <class T> DEVICE T block_sum(T x) {
    __shared__ T parts[32];
    x = warp_sum(x);
    __syncthreads(); // another thread may still read an earlier sum
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return warp_sum(lane < blockDim.x >> 5 ? parts[lane] : (T)0);
}

// Returns the maximum of x over the threads of a block, which must consist of whole warps.
DEVICE float block_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return warp_max(lane < blockDim.x >> 5 ? parts[lane] : NEGATIVE_INFINITY);
}

// Operands of products in fp8: the scale of a matrix, and its elements rounded. As fp8.rs computes, bit by bit.
#include "common.cuh"
typedef unsigned char u8;
enum { E4M3 = 0, E5M2 = 1 };

// To the nearest, ties to even; beyond the largest number infinite, NaN where the type has no infinity.
DEVICE u8 to_fp8(float x, i64 kind) {
    u32 mantissa = kind == E4M3 ? 3 : 2, bias = kind == E4M3 ? 7 : 15, infinite = kind == E4M3 ? 0x7f : 0x7c;
    u32 bits = (u32)__float_as_int(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff, cut = 23 - mantissa;
    u32 code;
    if (magnitude > 0x7f800000u) code = 0x7f;
    else if (magnitude < (128 - bias) << 23) {
        // Beside this number an f32 has the subnormals' spacing: adding it rounds to a multiple of that.
        u32 beside = (127 + 24 - bias - mantissa) << 23;
        code = (u32)__float_as_int(__fadd_rn(__int_as_float((int)magnitude), __int_as_float((int)beside))) - beside;
    } else {
        code = (magnitude - ((127 - bias) << 23) + (1u << (cut - 1)) - 1 + (magnitude >> cut & 1)) >> cut;
        if (code > infinite) code = infinite;
    }
    return (u8)(sign | code);
}

// Of each block of threads: the largest magnitude of the finite elements it looks at.
KERNEL amax(float* parts, Tensor x, i64 n) {
    float most = 0;
    EACH(i, n) {
        u32 magnitude = (u32)__float_as_int(load(x, i)) & 0x7fffffff;
        if (magnitude < 0x7f800000u) most = fmaxf(most, __int_as_float((int)magnitude));
    }
    most = block_max(most);
    if (threadIdx.x == 0) parts[blockIdx.x] = most;
}

// One block: the scale and its reciprocal, powers of two.
KERNEL scale(float* scales, const float* parts, i64 count, i64 kind) {
    float most = 0;
    EACH(i, count) most = fmaxf(most, parts[i]);
    most = block_max(most);
    if (threadIdx.x) return;
    u32 bits = (u32)__float_as_int(most);
    // The largest numbers are 1.75 · 2^8 and 1.75 · 2^15.
    int exponent = (int)(bits >> 23) - (kind == E4M3 ? 8 : 15) + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
    if (exponent < 127 - 60) exponent = 127 - 60;
    if (bits == 0) exponent = 127;
    scales[0] = __int_as_float(exponent << 23);
    scales[1] = __int_as_float((254 - exponent) << 23);
}

// q[rows, padded] of x[rows, columns], zeros behind the columns.
KERNEL quantize(u8* q, Tensor x, const float* scales, i64 rows, i64 columns, i64 padded, i64 kind) {
    EACH(i, rows * padded) {
        i64 row = i / padded, column = i % padded;
        q[i] = column < columns ? to_fp8(__fmul_rn(load(x, row * columns + column), scales[1]), kind) : (u8)0;
    }
}

// q[columns, padded] of x[rows, columns], zeros behind the rows. A block of 256 threads turns a tile of 32 × 32.
KERNEL quantize_turned(u8* q, Tensor x, const float* scales, i64 rows, i64 columns, i64 padded, i64 kind) {
    __shared__ u8 tile[32][33];
    i64 tiles = (padded + 31) / 32, row0 = blockIdx.x % tiles * 32, column0 = blockIdx.x / tiles * 32;
    i64 lane = threadIdx.x & 31, first = threadIdx.x >> 5;
    for (i64 i = first; i < 32; i += 8) {
        i64 row = row0 + i, column = column0 + lane;
        bool there = row < rows && column < columns;
        tile[i][lane] = there ? to_fp8(__fmul_rn(load(x, row * columns + column), scales[1]), kind) : (u8)0;
    }
    __syncthreads();
    for (i64 i = first; i < 32; i += 8) {
        i64 row = row0 + lane, column = column0 + i;
        if (row < padded && column < columns) q[column * padded + row] = tile[lane][i];
    }
}

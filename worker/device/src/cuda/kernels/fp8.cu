// Quantization of the operands of fp8 matmuls: computes the scale of a matrix and rounds its
// elements to fp8. The results are bit-equal to those of fp8.rs.
#include "common.cuh"
typedef unsigned char u8;
enum { E4M3 = 0, E5M2 = 1 };

// Rounds x to the nearest fp8 number, ties to even, and returns its code. Numbers beyond the
// largest number become infinite, or NaN if the format has no infinity.
DEVICE u8 round_to_fp8(float x, i64 format) {
    u32 mantissa = format == E4M3 ? 3 : 2, bias = format == E4M3 ? 7 : 15, infinite = format == E4M3 ? 0x7f : 0x7c;
    u32 bits = (u32)__float_as_int(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff, cut = 23 - mantissa;
    u32 code;
    if (magnitude > 0x7f800000u) code = 0x7f;
    else if (magnitude < (128 - bias) << 23) {
        // Near this number the spacing of f32 is that of the fp8 subnormals, so adding it rounds to
        // a multiple of it.
        u32 anchor = (127 + 24 - bias - mantissa) << 23;
        code = (u32)__float_as_int(__fadd_rn(__int_as_float((int)magnitude), __int_as_float((int)anchor))) - anchor;
    } else {
        code = (magnitude - ((127 - bias) << 23) + (1u << (cut - 1)) - 1 + (magnitude >> cut & 1)) >> cut;
        if (code > infinite) code = infinite;
    }
    return (u8)(sign | code);
}

// Converts two finite numbers to fp8 with the GPU's instruction. Returns 0 on a GPU without it.
DEVICE u32 convert_pair_to_fp8(float low, float high, i64 format) {
    u16 both = 0;
#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
    if (format == E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// Multiplies eight numbers by a factor, rounds them to fp8 and returns the codes. The GPU's
// instruction saturates infinite numbers, so it is only used if all eight are finite.
DEVICE uint2 quantize_8(float (&v)[8], float factor, i64 format) {
    u32 largest = 0, words[4];
    FOR_EIGHT(k) {
        v[k] = __fmul_rn(v[k], factor);
        u32 magnitude = (u32)__float_as_int(v[k]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
#if !defined(EMULATED) && __CUDA_ARCH__ >= 890
    bool use_instruction = largest < 0x7f800000u;
#else
    bool use_instruction = false;
#endif
#pragma unroll
    for (int k = 0; k < 4; k++)
        words[k] = use_instruction ? convert_pair_to_fp8(v[2 * k], v[2 * k + 1], format) : (u32)round_to_fp8(v[2 * k], format) | (u32)round_to_fp8(v[2 * k + 1], format) << 8;
    return {words[0] | words[1] << 16, words[2] | words[3] << 16};
}

// Writes the largest magnitude of each block's finite elements to parts[block].
KERNEL compute_block_amax(float* parts, Tensor x, i64 n) {
    float largest = 0;
    FOR_EACH_VECTOR(i, n) {
        float v[8];
        load_8(v, x, i, n - i);
        FOR_EIGHT(k) {
            u32 magnitude = (u32)__float_as_int(v[k]) & 0x7fffffff;
            if (magnitude < 0x7f800000u) largest = fmaxf(largest, __int_as_float((int)magnitude));
        }
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) parts[blockIdx.x] = largest;
}

// Computes the scale and its reciprocal from the largest magnitudes of all blocks. Both are powers
// of two. Launched with one block.
KERNEL compute_scale(float* scales, const float* parts, i64 count, i64 format) {
    float largest = 0;
    FOR_EACH_ELEMENT(i, count) largest = fmaxf(largest, parts[i]);
    largest = block_max(largest);
    if (threadIdx.x) return;
    u32 bits = (u32)__float_as_int(largest);
    // The largest numbers of the formats are 1.75 · 2^8 and 1.75 · 2^15.
    int exponent = (int)(bits >> 23) - (format == E4M3 ? 8 : 15) + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
    if (exponent < 127 - 60) exponent = 127 - 60;
    if (bits == 0) exponent = 127;
    scales[0] = __int_as_float(exponent << 23);
    scales[1] = __int_as_float((254 - exponent) << 23);
}

// Quantizes x[rows, columns] to q[rows, padded] and pads the rows with zeros. `padded` is a
// multiple of 16. `scales` has the scale and its reciprocal.
KERNEL quantize(u8* q, Tensor x, const float* scales, i64 rows, i64 columns, i64 padded, i64 format) {
    FOR_EACH_VECTOR(i, rows * padded) {
        i64 row = i / padded, column = i % padded;
        float v[8];
        load_8(v, x, row * columns + column, columns - column);
        *(uint2*)(q + i) = quantize_8(v, scales[1], format);
    }
}

#define TILE_DEPTH 128 // rows of a tile, along the sum
#define TILE_WIDTH 32  // columns of a tile

// Quantizes x[rows, columns] to its transpose q[columns, padded], whose rows are padded with zeros.
// A block of 256 threads transposes a tile: a thread reads eight columns of a row, and writes
// sixteen rows of a column.
KERNEL quantize_and_transpose(u8* q, Tensor x, const float* scales, i64 rows, i64 columns, i64 padded, i64 format) {
    __shared__ __align__(16) u8 tile[TILE_WIDTH][TILE_DEPTH + 16];
    i64 tiles = (padded + TILE_DEPTH - 1) / TILE_DEPTH, row0 = blockIdx.x % tiles * TILE_DEPTH, column0 = blockIdx.x / tiles * TILE_WIDTH;
    for (int i = (int)threadIdx.x; i < TILE_DEPTH * TILE_WIDTH / 8; i += 256) {
        int down = i / (TILE_WIDTH / 8), across = i % (TILE_WIDTH / 8) * 8;
        i64 row = row0 + down, column = column0 + across;
        float v[8] = {};
        if (row < rows && column < columns) load_8(v, x, row * columns + column, columns - column);
        uint2 codes = quantize_8(v, scales[1], format);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            tile[across + k][down] = (u8)(codes.x >> 8 * k);
            tile[across + 4 + k][down] = (u8)(codes.y >> 8 * k);
        }
    }
    __syncthreads();
    int across = (int)threadIdx.x / (TILE_DEPTH / 16), down = (int)threadIdx.x % (TILE_DEPTH / 16) * 16;
    i64 row = row0 + down, column = column0 + across;
    if (row < padded && column < columns) *(uint4*)(q + column * padded + row) = *(const uint4*)&tile[across][down];
}

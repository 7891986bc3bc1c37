// Arithmetic of PTX for which C++ has no operator: small floating-point formats, unbounded shifts,
// bit fields.
#pragma once
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptx {
inline float flush_subnormal(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float bf16_to_float(uint32_t half) { return bits_to_float(half << 16); }
// Converts x to a small floating-point format with these numbers of exponent and mantissa bits, and
// returns the code. Rounds to nearest, ties to even. Larger numbers than `largest` become infinite,
// or `largest` if `saturates`. `nan_code` is the code of NaN.
inline uint32_t to_small_float(float x, int exponent_bits, int mantissa_bits, double largest, bool saturates, uint32_t nan_code) {
    uint32_t sign = float_to_bits(x) >> 31 << (exponent_bits + mantissa_bits);
    if (std::isnan(x)) return nan_code;
    double size = std::fabs((double)x);
    int bias = (1 << (exponent_bits - 1)) - 1, exponent;
    std::frexp(size, &exponent);
    int unit = std::max(exponent - 1, 1 - bias) - mantissa_bits; // exponent of the last place
    double rounded = std::nearbyint(std::ldexp(size, -unit));
    if (std::ldexp(rounded, unit) > largest) {
        if (!saturates) return sign | ((1u << exponent_bits) - 1) << mantissa_bits;
        rounded = std::ldexp(largest, -unit);
        while (rounded >= std::ldexp(2.0, mantissa_bits)) rounded /= 2, unit++;
    }
    if (rounded >= std::ldexp(2.0, mantissa_bits)) rounded /= 2, unit++;
    uint32_t whole = (uint32_t)rounded;
    if (whole < 1u << mantissa_bits) return sign | whole; // subnormal
    return sign | (uint32_t)(unit + mantissa_bits + bias) << mantissa_bits | (whole & ((1u << mantissa_bits) - 1));
}
inline uint32_t to_bf16_bits(float x) {
    uint32_t bits = float_to_bits(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_f16_bits(float x) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7fff;
    if (size >= 0x477ff000) return sign | 0x7c00; // from 65520 on
    if (size < 0x38800000) return sign | (uint32_t)std::nearbyint(bits_to_float(size) * 0x1p24f); // below 2^-14
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}
inline uint32_t to_e4m3(float x) { return to_small_float(x, 4, 3, 448, true, 0x7f); }
inline uint32_t to_e5m2(float x) { return to_small_float(x, 5, 2, 57344, true, 0x7f); }
inline float f16_to_float(uint32_t half) {
    uint32_t sign = (half & 0x8000) << 16, size = half & 0x7fff;
    if (size > 0x7c00) return NAN;
    if (size < 0x400) return bits_to_float(sign | float_to_bits((float)size * 0x1p-24f));
    return bits_to_float(sign | (size == 0x7c00 ? 0x7f800000 : (size << 13) + (112 << 23)));
}
inline float fma_round_down(float a, float b, float c) {
    int before = fegetround();
    fesetround(FE_DOWNWARD);
    volatile float x = a, y = b, z = c, sum = std::fma(x, y, z);
    fesetround(before);
    return sum;
}
template <class T> T shift_left(T x, uint32_t by) { return by < 8 * sizeof(T) ? (T)(x << by) : 0; }
template <class T> T shift_right(T x, uint32_t by) { return x >> std::min<uint32_t>(by, 8 * sizeof(T) - 1); }
template <> inline uint16_t shift_right(uint16_t x, uint32_t by) { return by < 16 ? (uint16_t)(x >> by) : 0; }
template <> inline uint32_t shift_right(uint32_t x, uint32_t by) { return by < 32 ? x >> by : 0; }
template <> inline uint64_t shift_right(uint64_t x, uint32_t by) { return by < 64 ? x >> by : 0; }
template <class T> T insert_bits(T from, T into, uint32_t at, uint32_t bits) {
    T mask = shift_left<T>((T)(shift_left<T>(1, bits & 255) - 1), at & 255);
    return (T)((into & ~mask) | (shift_left<T>(from, at & 255) & mask));
}
// Selects four of the eight bytes of two words, each by a hexadecimal digit. If the digit's highest
// bit is set, the byte's sign is replicated instead.
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t digits) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t x = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t digit = digits >> 4 * i, byte = (uint32_t)(both >> 8 * (digit & 7)) & 255;
        x |= (digit & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return x;
}
template <class T> T divide(T a, T b) { return b == 0 ? (T)-1 : (b == (T)-1 ? (T)(0 - a) : (T)(a / b)); }
} // namespace ptx

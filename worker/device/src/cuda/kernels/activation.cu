// Rotary position embedding, GELU, SwiGLU, GeGLU.
#include "common.cuh"

// Pairs (i, i + half) of each head turned by the angle of the row's position; sign −1 turns back. A block per row.
KERNEL rope(Tensor x, const float* cosines, const float* sines, i64 t, i64 heads, i64 half, i64 stride, float sign) {
    i64 row = (i64)blockIdx.x * stride, angle = (i64)blockIdx.x % t * half;
    EACH_OF_ROW(pair, heads * half) {
        i64 i = pair % half, at = row + pair / half * 2 * half + i;
        float c = cosines[angle + i], s = sign * sines[angle + i];
        float a = load(x, at), b = load(x, at + half);
        store(x, at, a * c - b * s);
        store(x, at + half, b * c + a * s);
    }
}

// 1 / (1 + e^−x) without overflow
DEVICE float sigmoid(float x) {
    float e = expf(-fabsf(x));
    return x >= 0 ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

// ½·x·(1 + tanh u) is x·σ(2u); 2·√(2/π) = 1.595769…
DEVICE float twice_u(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }
DEVICE float gelu(float x) { return x * sigmoid(twice_u(x)); }
DEVICE float gelu_slope(float x) {
    float s = sigmoid(twice_u(x));
    return s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x);
}
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float silu_slope(float x) {
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

KERNEL gelu_forward(Tensor y, Tensor x, i64 n) {
    EACH(i, n) store(y, i, gelu(load(x, i)));
}

KERNEL gelu_backward(Tensor dx, Tensor dy, Tensor x, i64 n) {
    EACH(i, n) store(dx, i, load(dy, i) * gelu_slope(load(x, i)));
}

enum { SILU = 0, GELU = 1 };

// y = act(gate)·up; gate, then up in each row. A block per row.
KERNEL gated_forward(Tensor y, Tensor gate_up, i64 f, i64 act) {
    i64 row = (i64)blockIdx.x * f;
    EACH_OF_ROW(j, f) {
        float gate = load(gate_up, 2 * row + j), up = load(gate_up, 2 * row + f + j);
        store(y, row + j, (act == SILU ? silu(gate) : gelu(gate)) * up);
    }
}

KERNEL gated_backward(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f, i64 act) {
    i64 row = (i64)blockIdx.x * f;
    EACH_OF_ROW(j, f) {
        float gate = load(gate_up, 2 * row + j), up = load(gate_up, 2 * row + f + j), g = load(dy, row + j);
        store(dgate_up, 2 * row + j, g * up * (act == SILU ? silu_slope(gate) : gelu_slope(gate)));
        store(dgate_up, 2 * row + f + j, g * (act == SILU ? silu(gate) : gelu(gate)));
    }
}

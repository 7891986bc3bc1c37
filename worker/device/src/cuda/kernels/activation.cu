// Rotary position embedding, GELU, SwiGLU, GeGLU.
#include "common.cuh"

// Pairs (i, i + half) of each head turned by the angle of the row's position; sign −1 turns back. A block per row.
KERNEL rope(Tensor x, const float* cosines, const float* sines, i64 t, i64 heads, i64 half, i64 stride, float sign) {
    i64 row = (i64)blockIdx.x * stride, angle = (i64)blockIdx.x % t * half;
    int eights = (int)((half + 7) / 8); // of a head
    for (int part = (int)threadIdx.x; part < (int)heads * eights; part += (int)blockDim.x) {
        i64 i = part % eights * 8, at = row + part / eights * 2 * half + i, left = half - i;
        float a[8], b[8], c[8], s[8];
        load_eight(a, x, at, left);
        load_eight(b, x, at + half, left);
        load_eight(c, floats(cosines), angle + i, left);
        load_eight(s, floats(sines), angle + i, left);
        EIGHT(k) {
            float first = a[k];
            a[k] = first * c[k] - b[k] * (sign * s[k]);
            b[k] = b[k] * c[k] + first * (sign * s[k]);
        }
        store_eight(x, at, left, a);
        store_eight(x, at + half, left, b);
    }
}

// 1 / (1 + e^−x) without overflow
DEVICE float sigmoid(float x) {
    float e = __expf(-fabsf(x));
    return __fdividef(x >= 0 ? 1.0f : e, 1.0f + e);
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
    EACH_EIGHT(i, n) {
        float v[8];
        load_eight(v, x, i, n - i);
        EIGHT(k) v[k] = gelu(v[k]);
        store_eight(y, i, n - i, v);
    }
}

// dy becomes y.
KERNEL gelu_backward(Tensor dx, Tensor dy, Tensor x, i64 n) {
    EACH_EIGHT(i, n) {
        float v[8], d[8];
        load_eight(v, x, i, n - i);
        load_eight(d, dy, i, n - i);
        EIGHT(k) {
            d[k] *= gelu_slope(v[k]);
            v[k] = gelu(v[k]);
        }
        store_eight(dx, i, n - i, d);
        store_eight(dy, i, n - i, v);
    }
}

enum { SILU = 0, GELU = 1 };

// y = act(gate)·up; gate, then up in each row. A block per row.
KERNEL gated_forward(Tensor y, Tensor gate_up, i64 f, i64 act) {
    i64 row = (i64)blockIdx.x * f;
    EIGHTS_OF_ROW(j, f) {
        float gate[8], up[8];
        load_eight(gate, gate_up, 2 * row + j, f - j);
        load_eight(up, gate_up, 2 * row + f + j, f - j);
        EIGHT(k) up[k] *= act == SILU ? silu(gate[k]) : gelu(gate[k]);
        store_eight(y, row + j, f - j, up);
    }
}

// dy becomes y.
KERNEL gated_backward(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f, i64 act) {
    i64 row = (i64)blockIdx.x * f;
    EIGHTS_OF_ROW(j, f) {
        float gate[8], up[8], d[8];
        load_eight(gate, gate_up, 2 * row + j, f - j);
        load_eight(up, gate_up, 2 * row + f + j, f - j);
        load_eight(d, dy, row + j, f - j);
        EIGHT(k) {
            float through = act == SILU ? silu(gate[k]) : gelu(gate[k]);
            float slope = act == SILU ? silu_slope(gate[k]) : gelu_slope(gate[k]);
            gate[k] = d[k] * up[k] * slope;
            up[k] *= through;
            d[k] *= through;
        }
        store_eight(dgate_up, 2 * row + j, f - j, gate);
        store_eight(dgate_up, 2 * row + f + j, f - j, d);
        store_eight(dy, row + j, f - j, up);
    }
}

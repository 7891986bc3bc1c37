// Rotary position embedding, GELU, SwiGLU and GeGLU.
#include "common.cuh"

// Rotates the pairs (i, i + half) of each head by the angle of the row's position; sign −1 rotates
// back. One block per position and sequence. Thread index x counts vectors of eight elements of a
// half, y counts heads.
template <int X> DEVICE void rope_impl(Tensor x, const float* cosines, const float* sines, int heads, int half, i64 stride, float sign) {
    i64 row = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * stride, angle = (i64)blockIdx.x * half;
    for (int i = 8 * (int)threadIdx.x; i < half; i += 8 * (int)blockDim.x) {
        i64 left = half - i;
        float c[8], s[8];
        load_eight<X == ANY ? ANY : F32>(c, f32_tensor(cosines), angle + i, left);
        load_eight<X == ANY ? ANY : F32>(s, f32_tensor(sines), angle + i, left);
        EIGHT(k) s[k] *= sign;
        for (int head = (int)threadIdx.y; head < heads; head += (int)blockDim.y) {
            i64 at = row + 2 * head * half + i;
            float a[8], b[8];
            load_eight<X>(a, x, at, left);
            load_eight<X>(b, x, at + half, left);
            EIGHT(k) {
                float first = a[k];
                a[k] = fmaf(-b[k], s[k], __fmul_rn(first, c[k]));
                b[k] = fmaf(b[k], c[k], __fmul_rn(first, s[k]));
            }
            store_eight<X>(x, at, left, a);
            store_eight<X>(x, at + half, left, b);
        }
    }
}
#define ROPE Tensor x, const float *cosines, const float *sines, i64 heads, i64 half, i64 stride, float sign
KERNEL rope(ROPE) { rope_impl<ANY>(x, cosines, sines, (int)heads, (int)half, stride, sign); }
KERNEL rope_bf16(ROPE) { rope_impl<BF16>(x, cosines, sines, (int)heads, (int)half, stride, sign); }

// 1 / (1 + e^−x). If e^−x is infinite, the result is 0.
DEVICE float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-LOG2E * x)); }

// ½·x·(1 + tanh u) = x·σ(2u), with 2·√(2/π) = 1.595769….
#define TWICE_ROOT 1.5957691216057308f
DEVICE float twice_u(float x) { return x * fmaf(TWICE_ROOT * 0.044715f, x * x, TWICE_ROOT); }
struct Silu {
    DEVICE_METHOD static float share(float x) { return sigmoid(x); }
    // The derivative of x·share, given the share.
    DEVICE_METHOD static float slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }
};
struct Gelu {
    DEVICE_METHOD static float share(float x) { return sigmoid(twice_u(x)); }
    DEVICE_METHOD static float slope(float x, float s) {
        float slope_of_2u = fmaf(TWICE_ROOT * 3.0f * 0.044715f, x * x, TWICE_ROOT);
        return s * fmaf(x * slope_of_2u, 1.0f - s, 1.0f);
    }
};

template <int X> DEVICE void gelu_forward_impl(Tensor y, Tensor x, i64 n) {
    EACH_EIGHT(i, n) {
        float v[8];
        load_eight<X>(v, x, i, n - i);
        EIGHT(k) v[k] *= Gelu::share(v[k]);
        store_eight<X>(y, i, n - i, v);
    }
}
KERNEL gelu_forward(Tensor y, Tensor x, i64 n) { gelu_forward_impl<ANY>(y, x, n); }
KERNEL gelu_forward_bf16(Tensor y, Tensor x, i64 n) { gelu_forward_impl<BF16>(y, x, n); }

// Overwrites dy with y, the output of the forward pass.
template <int X> DEVICE void gelu_backward_impl(Tensor dx, Tensor dy, Tensor x, i64 n) {
    EACH_EIGHT(i, n) {
        float v[8], d[8];
        load_eight<X>(v, x, i, n - i);
        load_eight<X>(d, dy, i, n - i);
        EIGHT(k) {
            float share = Gelu::share(v[k]);
            d[k] *= Gelu::slope(v[k], share);
            v[k] *= share;
        }
        store_eight<X>(dx, i, n - i, d);
        store_eight<X>(dy, i, n - i, v);
    }
}
KERNEL gelu_backward(Tensor dx, Tensor dy, Tensor x, i64 n) { gelu_backward_impl<ANY>(dx, dy, x, n); }
KERNEL gelu_backward_bf16(Tensor dx, Tensor dy, Tensor x, i64 n) { gelu_backward_impl<BF16>(dx, dy, x, n); }

// y = act(gate)·up. A row of gate_up has gate, then up. One block per row.
template <class Act, int X> DEVICE void gated_forward_impl(Tensor y, Tensor gate_up, i64 f) {
    i64 row = (i64)blockIdx.x * f;
    EIGHTS_OF_ROW(j, f) {
        float gate[8], up[8];
        load_eight<X>(gate, gate_up, 2 * row + j, f - j);
        load_eight<X>(up, gate_up, 2 * row + f + j, f - j);
        EIGHT(k) up[k] *= gate[k] * Act::share(gate[k]);
        store_eight<X>(y, row + j, f - j, up);
    }
}
KERNEL swiglu_forward(Tensor y, Tensor gate_up, i64 f) { gated_forward_impl<Silu, ANY>(y, gate_up, f); }
KERNEL swiglu_forward_bf16(Tensor y, Tensor gate_up, i64 f) { gated_forward_impl<Silu, BF16>(y, gate_up, f); }
KERNEL geglu_forward(Tensor y, Tensor gate_up, i64 f) { gated_forward_impl<Gelu, ANY>(y, gate_up, f); }
KERNEL geglu_forward_bf16(Tensor y, Tensor gate_up, i64 f) { gated_forward_impl<Gelu, BF16>(y, gate_up, f); }

// Overwrites dy with y, the output of the forward pass.
template <class Act, int X> DEVICE void gated_backward_impl(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) {
    i64 row = (i64)blockIdx.x * f;
    EIGHTS_OF_ROW(j, f) {
        float gate[8], up[8], d[8];
        load_eight<X>(gate, gate_up, 2 * row + j, f - j);
        load_eight<X>(up, gate_up, 2 * row + f + j, f - j);
        load_eight<X>(d, dy, row + j, f - j);
        EIGHT(k) {
            float share = Act::share(gate[k]), activated = gate[k] * share;
            gate[k] = d[k] * up[k] * Act::slope(gate[k], share);
            up[k] *= activated;
            d[k] *= activated;
        }
        store_eight<X>(dgate_up, 2 * row + j, f - j, gate);
        store_eight<X>(dgate_up, 2 * row + f + j, f - j, d);
        store_eight<X>(dy, row + j, f - j, up);
    }
}
KERNEL swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { gated_backward_impl<Silu, ANY>(dgate_up, dy, gate_up, f); }
KERNEL swiglu_backward_bf16(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { gated_backward_impl<Silu, BF16>(dgate_up, dy, gate_up, f); }
KERNEL geglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { gated_backward_impl<Gelu, ANY>(dgate_up, dy, gate_up, f); }
KERNEL geglu_backward_bf16(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { gated_backward_impl<Gelu, BF16>(dgate_up, dy, gate_up, f); }

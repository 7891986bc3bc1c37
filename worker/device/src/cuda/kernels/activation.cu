// Kernels of rotary position embedding, GELU, SwiGLU and GeGLU.
#include "common.cuh"

// Rotates the pairs (i, i + half) of each head by the angle of the row's position, or by the
// negative angle if `sign` is −1. One block per position and sequence. Thread index x counts
// vectors of eight elements of a half, and thread index y counts heads. TYPE is BF16 or ANY.
template <int TYPE> DEVICE void rotate_heads(Tensor x, const float* cosines, const float* sines, int heads, int half, i64 stride, float sign) {
    i64 row = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * stride, angle = (i64)blockIdx.x * half;
    for (int i = 8 * (int)threadIdx.x; i < half; i += 8 * (int)blockDim.x) {
        i64 left = half - i;
        float c[8], s[8];
        load_8<TYPE == ANY ? ANY : F32>(c, f32_tensor(cosines), angle + i, left);
        load_8<TYPE == ANY ? ANY : F32>(s, f32_tensor(sines), angle + i, left);
        FOR_EIGHT(k) s[k] *= sign;
        for (int head = (int)threadIdx.y; head < heads; head += (int)blockDim.y) {
            i64 at = row + 2 * head * half + i;
            float a[8], b[8];
            load_8<TYPE>(a, x, at, left);
            load_8<TYPE>(b, x, at + half, left);
            FOR_EIGHT(k) {
                float first = a[k];
                a[k] = fmaf(-b[k], s[k], __fmul_rn(first, c[k]));
                b[k] = fmaf(b[k], c[k], __fmul_rn(first, s[k]));
            }
            store_8<TYPE>(x, at, left, a);
            store_8<TYPE>(x, at + half, left, b);
        }
    }
}
#define ROPE Tensor x, const float *cosines, const float *sines, i64 heads, i64 half, i64 stride, float sign
KERNEL rope(ROPE) { rotate_heads<ANY>(x, cosines, sines, (int)heads, (int)half, stride, sign); }
KERNEL rope_bf16(ROPE) { rotate_heads<BF16>(x, cosines, sines, (int)heads, (int)half, stride, sign); }

// Returns 1 / (1 + e^−x). If e^−x is infinite, the result is 0.
DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-LOG2E * x)); }

// Constant 2·√(2/π) of GELU: ½·x·(1 + tanh u) = x·σ(2u), with 2u = 2·√(2/π)·(x + 0.044715·x³).
#define TWO_SQRT_2_OVER_PI 1.5957691216057308f
DEVICE float compute_twice_u(float x) { return x * fmaf(TWO_SQRT_2_OVER_PI * 0.044715f, x * x, TWO_SQRT_2_OVER_PI); }
// The activation functions Silu and Gelu are x·share(x). `compute_share` returns share(x), and
// `compute_slope` the derivative of x·share(x), where s is share(x).
struct Silu {
    DEVICE_METHOD static float compute_share(float x) { return sigmoid(x); }
    DEVICE_METHOD static float compute_slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }
};
struct Gelu {
    DEVICE_METHOD static float compute_share(float x) { return sigmoid(compute_twice_u(x)); }
    DEVICE_METHOD static float compute_slope(float x, float s) {
        float slope_of_2u = fmaf(TWO_SQRT_2_OVER_PI * 3.0f * 0.044715f, x * x, TWO_SQRT_2_OVER_PI);
        return s * fmaf(x * slope_of_2u, 1.0f - s, 1.0f);
    }
};

// Computes y = gelu(x) for each of n elements.
template <int TYPE> DEVICE void compute_gelu(Tensor y, Tensor x, i64 n) {
    FOR_EACH_VECTOR(i, n) {
        float v[8];
        load_8<TYPE>(v, x, i, n - i);
        FOR_EIGHT(k) v[k] *= Gelu::compute_share(v[k]);
        store_8<TYPE>(y, i, n - i, v);
    }
}
KERNEL gelu_forward(Tensor y, Tensor x, i64 n) { compute_gelu<ANY>(y, x, n); }
KERNEL gelu_forward_bf16(Tensor y, Tensor x, i64 n) { compute_gelu<BF16>(y, x, n); }

// Computes dx, the gradient of GELU, and overwrites dy with y, the output of the forward pass.
template <int TYPE> DEVICE void compute_gelu_gradient(Tensor dx, Tensor dy, Tensor x, i64 n) {
    FOR_EACH_VECTOR(i, n) {
        float v[8], d[8];
        load_8<TYPE>(v, x, i, n - i);
        load_8<TYPE>(d, dy, i, n - i);
        FOR_EIGHT(k) {
            float fraction = Gelu::compute_share(v[k]);
            d[k] *= Gelu::compute_slope(v[k], fraction);
            v[k] *= fraction;
        }
        store_8<TYPE>(dx, i, n - i, d);
        store_8<TYPE>(dy, i, n - i, v);
    }
}
KERNEL gelu_backward(Tensor dx, Tensor dy, Tensor x, i64 n) { compute_gelu_gradient<ANY>(dx, dy, x, n); }
KERNEL gelu_backward_bf16(Tensor dx, Tensor dy, Tensor x, i64 n) { compute_gelu_gradient<BF16>(dx, dy, x, n); }

// Computes y = activation(gate)·up. A row of gate_up has gate, then up. One block per row.
template <class Activation, int TYPE> DEVICE void compute_gated_activation(Tensor y, Tensor gate_up, i64 f) {
    i64 row = (i64)blockIdx.x * f;
    FOR_EACH_ROW_VECTOR(j, f) {
        float gate[8], up[8];
        load_8<TYPE>(gate, gate_up, 2 * row + j, f - j);
        load_8<TYPE>(up, gate_up, 2 * row + f + j, f - j);
        FOR_EIGHT(k) up[k] *= gate[k] * Activation::compute_share(gate[k]);
        store_8<TYPE>(y, row + j, f - j, up);
    }
}
KERNEL swiglu_forward(Tensor y, Tensor gate_up, i64 f) { compute_gated_activation<Silu, ANY>(y, gate_up, f); }
KERNEL swiglu_forward_bf16(Tensor y, Tensor gate_up, i64 f) { compute_gated_activation<Silu, BF16>(y, gate_up, f); }
KERNEL geglu_forward(Tensor y, Tensor gate_up, i64 f) { compute_gated_activation<Gelu, ANY>(y, gate_up, f); }
KERNEL geglu_forward_bf16(Tensor y, Tensor gate_up, i64 f) { compute_gated_activation<Gelu, BF16>(y, gate_up, f); }

// Computes dgate_up, the gradient of the gated activation, and overwrites dy with y, the output of
// the forward pass. One block per row.
template <class Activation, int TYPE> DEVICE void compute_gated_activation_gradient(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) {
    i64 row = (i64)blockIdx.x * f;
    FOR_EACH_ROW_VECTOR(j, f) {
        float gate[8], up[8], d[8];
        load_8<TYPE>(gate, gate_up, 2 * row + j, f - j);
        load_8<TYPE>(up, gate_up, 2 * row + f + j, f - j);
        load_8<TYPE>(d, dy, row + j, f - j);
        FOR_EIGHT(k) {
            float fraction = Activation::compute_share(gate[k]), activated = gate[k] * fraction;
            gate[k] = d[k] * up[k] * Activation::compute_slope(gate[k], fraction);
            up[k] *= activated;
            d[k] *= activated;
        }
        store_8<TYPE>(dgate_up, 2 * row + j, f - j, gate);
        store_8<TYPE>(dgate_up, 2 * row + f + j, f - j, d);
        store_8<TYPE>(dy, row + j, f - j, up);
    }
}
KERNEL swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { compute_gated_activation_gradient<Silu, ANY>(dgate_up, dy, gate_up, f); }
KERNEL swiglu_backward_bf16(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { compute_gated_activation_gradient<Silu, BF16>(dgate_up, dy, gate_up, f); }
KERNEL geglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { compute_gated_activation_gradient<Gelu, ANY>(dgate_up, dy, gate_up, f); }
KERNEL geglu_backward_bf16(Tensor dgate_up, Tensor dy, Tensor gate_up, i64 f) { compute_gated_activation_gradient<Gelu, BF16>(dgate_up, dy, gate_up, f); }

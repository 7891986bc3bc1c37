// Flat vectors: casts, sums, the gradient norm's parts, optimizers. No product is fused with a sum, as on the CPU.
#include "common.cuh"

KERNEL cast(Tensor y, Tensor x, i64 n) {
    EACH(i, n) store(y, i, load(x, i));
}

KERNEL add(Tensor y, Tensor x, i64 n) {
    EACH(i, n) store(y, i, load(y, i) + load(x, i));
}

KERNEL scale(Tensor y, i64 n, float factor) {
    EACH(i, n) store(y, i, load(y, i) * factor);
}

// One block of threads per `width` elements.
KERNEL norm_blocks(double* out, Tensor x, i64 n, i64 width) {
    i64 first = (i64)blockIdx.x * width, end = first + width < n ? first + width : n;
    double sum = 0;
    for (i64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        double v = load(x, i);
        sum += v * v;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

struct AdamScalars {
    float grad_scale, keep, weight, beta2, rest2, correction2, eps, step;
    i64 from_end;
};

KERNEL adamw(Tensor p, Tensor g, float* avg, float* avg_sq, i64 n, AdamScalars h) {
    EACH(i, n) {
        float grad = __fmul_rn(load(g, i), h.grad_scale);
        float param = __fmul_rn(load(p, i), h.keep);
        float m = avg[i];
        m = __fadd_rn(h.from_end ? grad : m, __fmul_rn(h.weight, __fadd_rn(grad, -m)));
        float v = __fmul_rn(avg_sq[i], h.beta2);
        v = __fadd_rn(v, __fmul_rn(__fmul_rn(h.rest2, grad), grad));
        float denom = __fadd_rn(sqrtf(v) / h.correction2, h.eps);
        avg[i] = m;
        avg_sq[i] = v;
        store(p, i, __fadd_rn(param, __fmul_rn(h.step, m) / denom));
    }
}

// `buffer` is 0 without momentum.
KERNEL sgd(Tensor p, Tensor g, float* buffer, i64 n, float grad_scale, float decay, float momentum, float lr) {
    EACH(i, n) {
        float param = load(p, i);
        float grad = __fmul_rn(load(g, i), grad_scale);
        if (decay != 0) grad = __fadd_rn(grad, __fmul_rn(decay, param));
        if (buffer) {
            grad = __fadd_rn(__fmul_rn(momentum, buffer[i]), grad);
            buffer[i] = grad;
        }
        store(p, i, __fadd_rn(param, __fmul_rn(-lr, grad)));
    }
}

struct LionScalars {
    float grad_scale, keep, beta1, rest1, beta2, rest2, lr;
};

// The sign of 0 is 0.
KERNEL lion(Tensor p, Tensor g, float* avg, i64 n, LionScalars h) {
    EACH(i, n) {
        float grad = __fmul_rn(load(g, i), h.grad_scale), m = avg[i];
        float towards = __fadd_rn(__fmul_rn(m, h.beta1), __fmul_rn(grad, h.rest1));
        float sign = (float)(towards > 0) - (float)(towards < 0);
        store(p, i, __fadd_rn(__fmul_rn(load(p, i), h.keep), -__fmul_rn(h.lr, sign)));
        avg[i] = __fadd_rn(__fmul_rn(m, h.beta2), __fmul_rn(grad, h.rest2));
    }
}

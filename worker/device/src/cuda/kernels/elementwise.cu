// Kernels on vectors: elementwise ops, matrix transposition, dropout, stochastic rounding, sums of
// squares by block, and optimizers. Multiplications and additions are not fused, as on the CPU.
#include "common.cuh"

// Converts elements: y = x, rounded to the type of y.
KERNEL cast(Tensor y, Tensor x, i64 n) {
    FOR_EACH_VECTOR(i, n) {
        float v[8];
        load_8(v, x, i, n - i);
        store_8(y, i, n - i, v);
    }
}

// Adds elementwise: y += x.
KERNEL add(Tensor y, Tensor x, i64 n) {
    FOR_EACH_VECTOR(i, n) {
        float v[8], increment[8];
        load_8(v, y, i, n - i);
        load_8(increment, x, i, n - i);
        FOR_EIGHT(k) v[k] += increment[k];
        store_8(y, i, n - i, v);
    }
}

// Multiplies every element by a number: y *= factor.
KERNEL scale(Tensor y, i64 n, float factor) {
    FOR_EACH_VECTOR(i, n) {
        float v[8];
        load_8(v, y, i, n - i);
        FOR_EIGHT(k) v[k] *= factor;
        store_8(y, i, n - i, v);
    }
}

// Adds a number to every element: y += offset.
KERNEL add_scalar(Tensor y, i64 n, float offset) {
    FOR_EACH_ELEMENT(i, n) store(y, i, load(y, i) + offset);
}

// Computes y = a·y + b·x. Both products and the sum are rounded.
KERNEL axpby(float* y, const float* x, i64 n, float a, float b) {
    FOR_EACH_ELEMENT(i, n) y[i] = __fadd_rn(__fmul_rn(a, y[i]), __fmul_rn(b, x[i]));
}

// Limits elements smoothly to ±cap: y = cap·tanh(y / cap).
KERNEL softcap(float* y, i64 n, float cap) {
    FOR_EACH_ELEMENT(i, n) y[i] = cap * tanhf(y[i] / cap);
}

// Transposes a matrix: y[columns, rows] = x[rows, columns]ᵀ.
KERNEL transpose(float* y, const float* x, i64 rows, i64 columns) {
    FOR_EACH_ELEMENT(i, rows * columns) y[i] = x[i % rows * columns + i / rows];
}

// Applies Nesterov momentum to the gradient g in place. With g' = scale·g:
// buffer += (1 − mu)·(g' − buffer), then g = g' + mu·(buffer − g').
KERNEL nesterov_momentum(float* buffer, float* g, i64 n, float mu, float one_minus_mu, float scale) {
    FOR_EACH_ELEMENT(i, n) {
        float scaled = __fmul_rn(g[i], scale), b = buffer[i];
        b = __fadd_rn(b, __fmul_rn(one_minus_mu, __fadd_rn(scaled, -b)));
        buffer[i] = b;
        g[i] = __fadd_rn(scaled, __fmul_rn(mu, __fadd_rn(b, -scaled)));
    }
}

// Scalar arguments of `dropout`.
struct DropoutScalars {
    i64 sample, first;
    u64 threshold;
    u32 key[2];
    float keep_factor, unused;
};

// Applies dropout to consecutive samples in place. Each thread processes a block of four elements
// of a sample, with one block of Philox4x32-10. `blocks` is the number of these blocks.
KERNEL dropout(Tensor x, i64 blocks, DropoutScalars d) {
    i64 per_sample = (d.sample + 3) / 4;
    FOR_EACH_ELEMENT(i, blocks) {
        i64 sample = i / per_sample, block = i % per_sample;
        u32 c[4];
        compute_random_words(c, d.key, (u64)block, (u64)(d.first + sample), 0);
        for (i64 j = 0; j < 4 && 4 * block + j < d.sample; j++) {
            i64 at = sample * d.sample + 4 * block + j;
            store(x, at, (u64)c[j] < d.threshold ? 0.0f : __fmul_rn(load(x, at), d.keep_factor));
        }
    }
}

// Scalar arguments of `round_stochastically`.
struct RoundingScalars {
    i64 first;
    u64 step;
    u32 key[2];
};

// Rounds x to bf16 stochastically: away from zero if the sum of the lower 16 bits of x and the 16
// bits of `random` carries, otherwise towards zero. A finite number stays finite, and NaN stays
// NaN.
DEVICE u16 round_to_bf16_stochastically(float x, u32 random) {
    u32 bits = (u32)__float_as_int(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    u16 sum = (u16)((bits + random) >> 16);
    return magnitude < 0x7f800000u && (sum & 0x7fff) == 0x7f80 ? (u16)(sum - 1) : sum;
}

// Rounds the n elements of x to bf16. x is a range of a tensor. Each thread processes a block of
// four elements of the tensor, with one block of Philox4x32-10. The first and the last block may be
// only partly in x. `blocks` is the number of these blocks.
KERNEL round_stochastically(Tensor y, const float* x, i64 n, i64 blocks, RoundingScalars d) {
    FOR_EACH_ELEMENT(i, blocks) {
        i64 block = d.first / 4 + i;
        u32 c[4];
        compute_random_words(c, d.key, (u64)block, 0, d.step);
        for (i64 j = 0; j < 4; j++) {
            i64 at = 4 * block + j - d.first;
            if (at >= 0 && at < n) ((u16*)y.at)[at] = round_to_bf16_stochastically(x[at], c[j] >> 16);
        }
    }
}

// Computes out[block] = Σ x² over the block's `width` elements in f64. `width` is a multiple of 8.
// A block of threads sums one block of elements.
KERNEL sum_squares_by_block(double* out, Tensor x, i64 n, i64 width) {
    i64 first = (i64)blockIdx.x * width, end = first + width < n ? first + width : n;
    double sum = 0;
    for (i64 i = first + 8 * (i64)threadIdx.x; i < end; i += 8 * (i64)blockDim.x) {
        float v[8];
        load_8(v, x, i, end - i);
        FOR_EIGHT(k) sum += (double)v[k] * (double)v[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Scalar arguments of `adamw`.
struct AdamWScalars {
    float grad_scale, keep_factor, weight, beta2, one_minus_beta2, correction2, eps, step;
    i64 from_end;
};

// Updates parameters and both moments with AdamW. If `rounded` is present, also writes the new
// parameters to it, rounded to its type.
KERNEL adamw(Tensor p, Tensor rounded, Tensor g, float* avg, float* avg_sq, i64 n, AdamWScalars h) {
    FOR_EACH_VECTOR(i, n) {
        float param[8], grad[8], m[8], v[8];
        load_8(param, p, i, n - i);
        load_8(grad, g, i, n - i);
        load_8(m, f32_tensor(avg), i, n - i);
        load_8(v, f32_tensor(avg_sq), i, n - i);
        FOR_EIGHT(k) {
            grad[k] = __fmul_rn(grad[k], h.grad_scale);
            m[k] = __fadd_rn(h.from_end ? grad[k] : m[k], __fmul_rn(h.weight, __fadd_rn(grad[k], -m[k])));
            v[k] = __fadd_rn(__fmul_rn(v[k], h.beta2), __fmul_rn(__fmul_rn(h.one_minus_beta2, grad[k]), grad[k]));
            float denom = __fadd_rn(sqrtf(v[k]) / h.correction2, h.eps);
            param[k] = __fadd_rn(__fmul_rn(param[k], h.keep_factor), __fmul_rn(h.step, m[k]) / denom);
        }
        store_8(f32_tensor(avg), i, n - i, m);
        store_8(f32_tensor(avg_sq), i, n - i, v);
        store_8(p, i, n - i, param);
        if (rounded.at) store_8(rounded, i, n - i, param);
    }
}

// Updates parameters and the momentum buffer with SGD. `buffer` is null without momentum.
KERNEL sgd(Tensor p, Tensor g, float* buffer, i64 n, float grad_scale, float decay, float momentum, float lr) {
    FOR_EACH_ELEMENT(i, n) {
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

// Scalar arguments of `lion`.
struct LionScalars {
    float grad_scale, keep_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

// Updates parameters and the moving average with Lion. The sign of 0 is 0.
KERNEL lion(Tensor p, Tensor g, float* avg, i64 n, LionScalars h) {
    FOR_EACH_ELEMENT(i, n) {
        float grad = __fmul_rn(load(g, i), h.grad_scale), m = avg[i];
        float direction = __fadd_rn(__fmul_rn(m, h.beta1), __fmul_rn(grad, h.one_minus_beta1));
        float sign = (float)(direction > 0) - (float)(direction < 0);
        store(p, i, __fadd_rn(__fmul_rn(load(p, i), h.keep_factor), -__fmul_rn(h.lr, sign)));
        avg[i] = __fadd_rn(__fmul_rn(m, h.beta2), __fmul_rn(grad, h.one_minus_beta2));
    }
}

// Kernels on flat vectors: casts, sums, blocks of the gradient norm, dropout, optimizers.
// Multiplications and additions are not fused, as on the CPU.
#include "common.cuh"

KERNEL cast(Tensor y, Tensor x, i64 n) {
    EACH_EIGHT(i, n) {
        float v[8];
        load_eight(v, x, i, n - i);
        store_eight(y, i, n - i, v);
    }
}

KERNEL add(Tensor y, Tensor x, i64 n) {
    EACH_EIGHT(i, n) {
        float v[8], increment[8];
        load_eight(v, y, i, n - i);
        load_eight(increment, x, i, n - i);
        EIGHT(k) v[k] += increment[k];
        store_eight(y, i, n - i, v);
    }
}

KERNEL scale(Tensor y, i64 n, float factor) {
    EACH_EIGHT(i, n) {
        float v[8];
        load_eight(v, y, i, n - i);
        EIGHT(k) v[k] *= factor;
        store_eight(y, i, n - i, v);
    }
}

KERNEL offset(Tensor y, i64 n, float offset) {
    EACH(i, n) store(y, i, load(y, i) + offset);
}

KERNEL blend(float* y, const float* x, i64 n, float a, float b) {
    EACH(i, n) y[i] = __fadd_rn(__fmul_rn(a, y[i]), __fmul_rn(b, x[i]));
}

KERNEL softcap(float* y, i64 n, float cap) {
    EACH(i, n) y[i] = cap * tanhf(y[i] / cap);
}

KERNEL transpose(float* y, const float* x, i64 rows, i64 columns) {
    EACH(i, rows * columns) y[i] = x[i % rows * columns + i / rows];
}

KERNEL nesterov(float* buffer, float* g, i64 n, float mu, float one_minus_mu, float scale) {
    EACH(i, n) {
        float scaled = __fmul_rn(g[i], scale), b = buffer[i];
        b = __fadd_rn(b, __fmul_rn(one_minus_mu, __fadd_rn(scaled, -b)));
        buffer[i] = b;
        g[i] = __fadd_rn(scaled, __fmul_rn(mu, __fadd_rn(b, -scaled)));
    }
}

struct DropoutScalars {
    i64 sample, first;
    u64 threshold;
    u32 key[2];
    float keep, unused;
};

// Each thread draws random numbers for four elements of a sample (Philox4x32-10).
KERNEL dropout(Tensor x, i64 blocks, DropoutScalars d) {
    i64 per_sample = (d.sample + 3) / 4;
    EACH(i, blocks) {
        i64 sample = i / per_sample, block = i % per_sample;
        u32 c[4];
        random_words(c, d.key, (u64)block, (u64)(d.first + sample), 0);
        for (i64 j = 0; j < 4 && 4 * block + j < d.sample; j++) {
            i64 at = sample * d.sample + 4 * block + j;
            store(x, at, (u64)c[j] < d.threshold ? 0.0f : __fmul_rn(load(x, at), d.keep));
        }
    }
}

struct RoundingScalars {
    i64 first;
    u64 step;
    u32 key[2];
};

// Stochastic rounding: away from zero if the sum of the lower 16 bits and the 16 bits of `random`
// carries. A finite number stays finite, and NaN stays NaN.
DEVICE u16 to_bf16_stochastic(float x, u32 random) {
    u32 bits = (u32)__float_as_int(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
    u16 sum = (u16)((bits + random) >> 16);
    return magnitude < 0x7f800000u && (sum & 0x7fff) == 0x7f80 ? (u16)(sum - 1) : sum;
}

// Each thread draws random numbers for four elements of the whole tensor (Philox4x32-10), of which
// x has some.
KERNEL round_stochastically(Tensor y, const float* x, i64 n, i64 blocks, RoundingScalars d) {
    EACH(i, blocks) {
        i64 block = d.first / 4 + i;
        u32 c[4];
        random_words(c, d.key, (u64)block, 0, d.step);
        for (i64 j = 0; j < 4; j++) {
            i64 at = 4 * block + j - d.first;
            if (at >= 0 && at < n) ((u16*)y.at)[at] = to_bf16_stochastic(x[at], c[j] >> 16);
        }
    }
}

// out[block] = Σ x² over `width` elements, a multiple of 8. One block of threads each.
KERNEL norm_blocks(double* out, Tensor x, i64 n, i64 width) {
    i64 first = (i64)blockIdx.x * width, end = first + width < n ? first + width : n;
    double sum = 0;
    for (i64 i = first + 8 * (i64)threadIdx.x; i < end; i += 8 * (i64)blockDim.x) {
        float v[8];
        load_eight(v, x, i, end - i);
        EIGHT(k) sum += (double)v[k] * (double)v[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

struct AdamScalars {
    float grad_scale, keep, weight, beta2, one_minus_beta2, correction2, eps, step;
    i64 from_end;
};

KERNEL adamw(Tensor p, Tensor g, float* avg, float* avg_sq, i64 n, AdamScalars h) {
    EACH_EIGHT(i, n) {
        float param[8], grad[8], m[8], v[8];
        load_eight(param, p, i, n - i);
        load_eight(grad, g, i, n - i);
        load_eight(m, f32_tensor(avg), i, n - i);
        load_eight(v, f32_tensor(avg_sq), i, n - i);
        EIGHT(k) {
            grad[k] = __fmul_rn(grad[k], h.grad_scale);
            m[k] = __fadd_rn(h.from_end ? grad[k] : m[k], __fmul_rn(h.weight, __fadd_rn(grad[k], -m[k])));
            v[k] = __fadd_rn(__fmul_rn(v[k], h.beta2), __fmul_rn(__fmul_rn(h.one_minus_beta2, grad[k]), grad[k]));
            float denom = __fadd_rn(sqrtf(v[k]) / h.correction2, h.eps);
            param[k] = __fadd_rn(__fmul_rn(param[k], h.keep), __fmul_rn(h.step, m[k]) / denom);
        }
        store_eight(f32_tensor(avg), i, n - i, m);
        store_eight(f32_tensor(avg_sq), i, n - i, v);
        store_eight(p, i, n - i, param);
    }
}

// `buffer` is null without momentum.
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
    float grad_scale, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

// Lion. The sign of 0 is 0.
KERNEL lion(Tensor p, Tensor g, float* avg, i64 n, LionScalars h) {
    EACH(i, n) {
        float grad = __fmul_rn(load(g, i), h.grad_scale), m = avg[i];
        float direction = __fadd_rn(__fmul_rn(m, h.beta1), __fmul_rn(grad, h.one_minus_beta1));
        float sign = (float)(direction > 0) - (float)(direction < 0);
        store(p, i, __fadd_rn(__fmul_rn(load(p, i), h.keep), -__fmul_rn(h.lr, sign)));
        avg[i] = __fadd_rn(__fmul_rn(m, h.beta2), __fmul_rn(grad, h.one_minus_beta2));
    }
}

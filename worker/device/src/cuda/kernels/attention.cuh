// What both kinds of attention share: the shape, scores, positions that are seen. A file of kernels includes it once.

struct Attention {
    i64 t;
    i64 heads, kv_heads, dim;
    float scale, cap; // cap 0: none
};

DEVICE i64 row_width(Attention a) { return (a.heads + 2 * a.kv_heads) * a.dim; }

DEVICE float capped_score(float score, Attention a) {
    score *= a.scale;
    return a.cap > 0 ? a.cap * tanhf(score / a.cap) : score;
}
// d(capped score) / d(q·k)
DEVICE float score_slope(float capped, Attention a) {
    return a.cap > 0 ? a.scale * (1.0f - (capped / a.cap) * (capped / a.cap)) : a.scale;
}

// Sum and maximum over the four threads of a row.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The first position that a query may see; behind the sequence: none.
DEVICE i64 start_of(const u32* starts, i64 sequence, i64 query, Attention a) {
    return query < a.t ? (i64)starts[sequence * a.t + query] : a.t;
}

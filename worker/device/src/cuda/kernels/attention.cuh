// What both kinds of attention share: the shape, scores, positions that are seen. A file of kernels includes it once.

struct Attention {
    i64 t;
    i64 heads, kv_heads, dim;
    float scale, cap; // cap 0: none
    // Dropout of probabilities: the first sequence's number, what is dropped, the factor of the rest (0: nothing is dropped).
    i64 number;
    u32 key[2];
    u32 threshold;
    float keep;
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

// What decides about key `16·w + k % 16` of each 64, for w in 0..4 (AttentionDropout of ops.rs).
DEVICE void dropout_words(u32 (&c)[4], i64 sequence, i64 head, i64 query, i64 key, const Attention& a) {
    random_words(c, a.key, (u64)(key / 64 * 16 + key % 16), (u64)(a.number + sequence), (u64)head << 24 | (u64)query);
}

// Are the keys kept that word w decides about?
DEVICE bool is_kept(const u32 (&c)[4], int w, const Attention& a) {
    u32 word = w < 2 ? (w == 0 ? c[0] : c[1]) : (w == 2 ? c[2] : c[3]);
    return word >= a.threshold;
}

// What dropout makes of a probability of 1.
DEVICE float kept(i64 sequence, i64 head, i64 query, i64 key, const Attention& a) {
    if (a.keep == 0) return 1.0f;
    u32 c[4];
    dropout_words(c, sequence, head, query, key, a);
    return is_kept(c, (int)(key / 16 % 4), a) ? a.keep : 0.0f;
}

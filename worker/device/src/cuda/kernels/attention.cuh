// Common code of both attention implementations: shape, scores, masks, dropout. Each source
// includes it once.

struct Attention {
    i64 t;
    i64 heads, kv_heads, dim;
    float scale, cap; // softcap of the scores, or 0
    // Dropout of probabilities. A key is kept if its word is at least `threshold`, and scaled by
    // `keep`. keep 0: no dropout. `first_sample` is the number of the first sequence among all
    // samples.
    i64 first_sample;
    u32 key[2];
    u32 threshold;
    float keep;
};

DEVICE i64 row_width(Attention a) { return (a.heads + 2 * a.kv_heads) * a.dim; }

DEVICE float capped_score(float score, Attention a) {
    score *= a.scale;
    return a.cap > 0 ? a.cap * tanhf(score / a.cap) : score;
}
// d(capped score) / d(q·k).
DEVICE float score_slope(float capped, Attention a) {
    return a.cap > 0 ? a.scale * (1.0f - (capped / a.cap) * (capped / a.cap)) : a.scale;
}

// Sum and maximum over the four threads that share a row.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The first key that a query attends to. For a query beyond the sequence: the sequence's length.
DEVICE i64 document_start(const u32* starts, i64 sequence, i64 query, Attention a) {
    return query < a.t ? (i64)starts[sequence * a.t + query] : a.t;
}

// Random words that decide about four keys of a group of 64: word w about key `16·w + key % 16`
// (AttentionDropout in shapes.rs).
DEVICE void dropout_words(u32 (&c)[4], i64 sequence, i64 head, i64 query, i64 key, const Attention& a) {
    random_words(c, a.key, (u64)(key / 64 * 16 + key % 16), (u64)(a.first_sample + sequence), (u64)head << 24 | (u64)query);
}

// True if dropout keeps the key that word w decides about.
DEVICE bool is_kept(const u32 (&c)[4], int w, const Attention& a) {
    u32 word = w < 2 ? (w == 0 ? c[0] : c[1]) : (w == 2 ? c[2] : c[3]);
    return word >= a.threshold;
}

// The factor of a probability under dropout: 0, or 1 / (1 − rate).
DEVICE float dropout_factor(i64 sequence, i64 head, i64 query, i64 key, const Attention& a) {
    if (a.keep == 0) return 1.0f;
    u32 c[4];
    dropout_words(c, sequence, head, query, key, a);
    return is_kept(c, (int)(key / 16 % 4), a) ? a.keep : 0.0f;
}

// Common code of both attention implementations: shape, scores, masks, dropout. A source includes
// this file at most once.

// Kernel argument with the shape, scale, softcap and dropout of an attention (AttentionArg in
// attention.rs).
struct Attention {
    i64 t;
    i64 heads, kv_heads, dim;
    float scale, cap; // softcap of the scores, or 0
    // Dropout of probabilities. A key is kept if its random word is at least `threshold`, and its
    // probability is then multiplied by `keep`. If `keep` is 0, there is no dropout. `first_sample`
    // is the number of the first sequence among all samples.
    i64 first_sample;
    u32 key[2];
    u32 threshold;
    float keep;
};

// Returns the number of elements of a row of qkv.
DEVICE i64 qkv_row_width(Attention a) { return (a.heads + 2 * a.kv_heads) * a.dim; }

// Returns the score for the dot product `score` of query and key: scaled, and softcapped if there
// is a softcap.
DEVICE float compute_softcapped_score(float score, Attention a) {
    score *= a.scale;
    return a.cap > 0 ? a.cap * tanhf(score / a.cap) : score;
}
// Returns the derivative of a score with respect to the dot product q·k. `capped` is the score
// after the softcap.
DEVICE float softcap_slope_with_scale(float capped, Attention a) {
    return a.cap > 0 ? a.scale * (1.0f - (capped / a.cap) * (capped / a.cap)) : a.scale;
}

// Returns the sum of x over the four threads that share a row.
DEVICE float sum_over_row_threads(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Returns the maximum of x over the four threads that share a row.
DEVICE float max_over_row_threads(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Returns the first key to which a query attends. For a query beyond the sequence, returns the
// sequence's length.
DEVICE i64 find_first_visible_key(const u32* starts, i64 sequence, i64 query, Attention a) {
    return query < a.t ? (i64)starts[sequence * a.t + query] : a.t;
}

// Computes the random words of four keys in a group of 64 keys. Word w decides whether key
// `16·w + key % 16` of the group is dropped (AttentionDropout in ops/attention.rs).
DEVICE void compute_dropout_words(u32 (&c)[4], i64 sequence, i64 head, i64 query, i64 key, const Attention& a) {
    compute_random_words(c, a.key, (u64)(key / 64 * 16 + key % 16), (u64)(a.first_sample + sequence), (u64)head << 24 | (u64)query);
}

// Returns true if dropout keeps the key of word w.
DEVICE bool is_key_kept(const u32 (&c)[4], int w, const Attention& a) {
    u32 word = w < 2 ? (w == 0 ? c[0] : c[1]) : (w == 2 ? c[2] : c[3]);
    return word >= a.threshold;
}

// Returns the factor by which dropout multiplies a probability: 0, or 1 / (1 − rate).
DEVICE float compute_dropout_factor(i64 sequence, i64 head, i64 query, i64 key, const Attention& a) {
    if (a.keep == 0) return 1.0f;
    u32 c[4];
    compute_dropout_words(c, sequence, head, query, key, a);
    return is_key_kept(c, (int)(key / 16 % 4), a) ? a.keep : 0.0f;
}

//! Philox4x32-10 (Salmon et al., 2011), a random generator that computes numbers from a counter.
//! `kernels/common.cuh` implements it for GPUs.
//!
//! A random number is a function of key and counter, so it does not depend on the order in which
//! elements are processed.

/// Returns the four random words of Philox4x32-10 for the counter `c` (128 bits) and the key `k`
/// (64 bits).
pub fn philox4x32_10(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = u64::from(c[0]) * 0xD251_1F53;
        let p1 = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// Two 32-bit words in one 64-bit number, the first word in the low half. With this type the
/// compiler can vectorize the 64-bit multiplications.
type WordPair = u64;

/// Multiplies both 32-bit words of `pair` by `m`, and returns the pair of the high halves and the
/// pair of the low halves of the products.
#[inline(always)]
fn multiply_pair(pair: WordPair, m: u32) -> (WordPair, WordPair) {
    const LOW: u64 = 0xffff_ffff;
    let (even, odd) = ((pair & LOW) * u64::from(m), (pair >> 32) * u64::from(m));
    (even >> 32 | odd & !LOW, even & LOW | odd << 32)
}

/// Returns the Philox random words (four each) for 16 consecutive counter values, the first of
/// which is `block`, a multiple of 16. Element `[w][i]` is word `w` of block `block + i`. This
/// function is vectorized, because attention dropout needs many words.
#[inline(always)]
pub(crate) fn compute_random_words_of_16_blocks(
    key: [u32; 2],
    block: u64,
    sample: u64,
    step: u64,
) -> [[u32; 16]; 4] {
    let twice = |word: u32| u64::from(word) | u64::from(word) << 32;
    let high = (block >> 32) as u32 | ((sample >> 32) as u32) << 11 | ((step >> 32) as u32) << 22;
    let mut c: [[WordPair; 8]; 4] =
        [[0; 8], [twice(sample as u32); 8], [twice(step as u32); 8], [twice(high); 8]];
    for (i, c) in c[0].iter_mut().enumerate() {
        let first = block as u32 + 2 * i as u32;
        *c = u64::from(first) | u64::from(first + 1) << 32;
    }
    let mut k = key;
    for _ in 0..10 {
        let mut next = [[0; 8]; 4];
        for i in 0..8 {
            let (high0, low0) = multiply_pair(c[0][i], 0xD251_1F53);
            let (high1, low1) = multiply_pair(c[2][i], 0xCD9E_8D57);
            next[0][i] = high1 ^ c[1][i] ^ twice(k[0]);
            next[1][i] = low1;
            next[2][i] = high0 ^ c[3][i] ^ twice(k[1]);
            next[3][i] = low0;
        }
        c = next;
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c.map(|pairs| std::array::from_fn(|i| (pairs[i / 2] >> (32 * (i % 2))) as u32))
}

/// Returns the four random words that Philox computes from the counter (`block`, `sample`, `step`)
/// and the key.
///
/// The counter of the generator consists of `block` (43 bits), `sample` (43 bits) and `step` (42
/// bits). Elementwise ops use one word for each of four elements.
pub fn compute_random_words(key: [u32; 2], block: u64, sample: u64, step: u64) -> [u32; 4] {
    let high = (block >> 32) as u32 | ((sample >> 32) as u32) << 11 | ((step >> 32) as u32) << 22;
    philox4x32_10([block as u32, sample as u32, step as u32, high], key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_blocks_at_once_equal_single_blocks() {
        let (key, sample, step) = ([7, 0x9E37_79B9], (1 << 41) + 5, (3 << 24) + (1 << 40) + 9);
        for block in [0, 16, 1 << 20, (1 << 32) - 16, (1 << 34) + 32] {
            let blocks = compute_random_words_of_16_blocks(key, block, sample, step);
            for i in 0..16 {
                assert_eq!(
                    blocks.map(|w| w[i]),
                    compute_random_words(key, block + i as u64, sample, step),
                    "{block} {i}"
                );
            }
        }
    }
}

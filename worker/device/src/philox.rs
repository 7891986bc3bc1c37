//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), as every backend computes it.

/// One block: 128 bits of counter and 64 bits of key to 128 random bits.
pub fn philox4x32_10(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = u64::from(c[0]) * 0xD251_1F53;
        let p1 = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// Two words in one number, so that vectors of them are multiplied in place.
type Pair = u64;

/// High and low halves of the products of both words with `m`.
#[inline(always)]
fn multiply(words: Pair, m: u32) -> (Pair, Pair) {
    const LOW: u64 = 0xffff_ffff;
    let (even, odd) = ((words & LOW) * u64::from(m), (words >> 32) * u64::from(m));
    (even >> 32 | odd & !LOW, even & LOW | odd << 32)
}

/// [`words`] of the 16 blocks from `block` on, a multiple of 16: first words, second words, … As vectors, since attention needs
/// many.
#[inline(always)]
pub(crate) fn words_of_16(key: [u32; 2], block: u64, sample: u64, step: u64) -> [[u32; 16]; 4] {
    let both = |word: u32| u64::from(word) | u64::from(word) << 32;
    let high = (block >> 32) as u32 | ((sample >> 32) as u32) << 11 | ((step >> 32) as u32) << 22;
    let mut c: [[Pair; 8]; 4] = [[0; 8], [both(sample as u32); 8], [both(step as u32); 8], [both(high); 8]];
    for (i, c) in c[0].iter_mut().enumerate() {
        let first = block as u32 + 2 * i as u32;
        *c = u64::from(first) | u64::from(first + 1) << 32;
    }
    let mut k = key;
    for _ in 0..10 {
        let mut next = [[0; 8]; 4];
        for i in 0..8 {
            let (high0, low0) = multiply(c[0][i], 0xD251_1F53);
            let (high1, low1) = multiply(c[2][i], 0xCD9E_8D57);
            next[0][i] = high1 ^ c[1][i] ^ both(k[0]);
            next[1][i] = low1;
            next[2][i] = high0 ^ c[3][i] ^ both(k[1]);
            next[3][i] = low0;
        }
        c = next;
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c.map(|pairs| std::array::from_fn(|i| (pairs[i / 2] >> (32 * (i % 2))) as u32))
}

/// The four words of a block of four elements, of a sample, at a step: 43, 43 and 42 bits, one after the other in the counter.
pub fn words(key: [u32; 2], block: u64, sample: u64, step: u64) -> [u32; 4] {
    let high = (block >> 32) as u32 | ((sample >> 32) as u32) << 11 | ((step >> 32) as u32) << 22;
    philox4x32_10([block as u32, sample as u32, step as u32, high], key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_blocks_at_once_are_those_one_by_one() {
        let (key, sample, step) = ([7, 0x9E37_79B9], (1 << 41) + 5, (3 << 24) + (1 << 40) + 9);
        for block in [0, 16, 1 << 20, (1 << 32) - 16, (1 << 34) + 32] {
            let all = words_of_16(key, block, sample, step);
            for i in 0..16 {
                assert_eq!(all.map(|w| w[i]), words(key, block + i as u64, sample, step), "{block} {i}");
            }
        }
    }
}

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

/// The four words of a block of four elements, of a sample, at a step: 43, 43 and 42 bits, one after the other in the counter.
pub fn words(key: [u32; 2], block: u64, sample: u64, step: u64) -> [u32; 4] {
    let high = (block >> 32) as u32 | ((sample >> 32) as u32) << 11 | ((step >> 32) as u32) << 22;
    philox4x32_10([block as u32, sample as u32, step as u32, high], key)
}

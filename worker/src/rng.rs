//! Random numbers that do not depend on the order of calls: each is computed only from the run's
//! seed, its purpose, and numbers such as the sample and the step.
//!
//! A number does not depend on rank, thread, shard, micro-batch or order of calls, so any number of
//! workers and any sharding get the same numbers. The generator is Philox4x32-10 (Salmon et al.,
//! "Parallel random numbers: as easy as 1, 2, 3", 2011). The key is `H64(run seed, purpose,
//! scope)`, and the counter is `(element / 4, sample, step)`. Real-valued functions come from the
//! `libm` crate, not from the platform's C library, so a job gets the same weights on every
//! machine.
use device::philox::compute_random_words;
use rayon::prelude::*;

pub use device::philox::philox4x32_10;

/// What random numbers are used for, such as initial values, dropout or the order of data.
/// Different purposes never share numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Initial parameter values; the scope is the parameter's name.
    Init,
    /// Dropout masks; the scope is the layer.
    Dropout,
    /// The order of samples in an epoch.
    DataOrder,
    /// Rounding to a narrower type; the scope is the parameter's name.
    StochasticRounding,
    /// Tokens that a model generates; the scope is the prompt.
    Generation,
}

impl Purpose {
    /// Returns the purpose as a text, such as `dropout`, from which the key of its random generator
    /// is derived, so that each purpose gets different random numbers. A changed name changes the
    /// numbers of every run.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Init => "init",
            Purpose::Dropout => "dropout",
            Purpose::DataOrder => "data-order",
            Purpose::StochasticRounding => "stochastic-rounding",
            Purpose::Generation => "sample",
        }
    }
}

/// A stream of random numbers, which is identified by the run's seed, the purpose and a scope such
/// as the name of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomStream {
    key: [u32; 2],
}

/// How many of the 128 bits of the random generator's counter contain the element number divided by
/// 4.
const BLOCK_BITS: u32 = 43;
/// How many of the 128 bits of the random generator's counter contain the sample number.
const SAMPLE_BITS: u32 = 43;
/// How many of the 128 bits of the random generator's counter contain the number of the optimizer
/// step.
const STEP_BITS: u32 = 42;

impl RandomStream {
    /// Creates a stream of random numbers that is derived from the run's seed, a purpose (such as
    /// dropout) and a scope (such as the name of a parameter). Depending on the purpose, `scope` is
    /// a parameter's name, a layer or a prompt.
    pub fn new(run_seed: u64, purpose: Purpose, scope: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 random stream v1");
        hasher.update(&run_seed.to_le_bytes());
        for part in [purpose.name(), scope] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let digest = hasher.finalize();
        let b = digest.as_bytes();
        RandomStream {
            key: [u32::from_le_bytes([b[0], b[1], b[2], b[3]]), u32::from_le_bytes([b[4], b[5], b[6], b[7]])],
        }
    }

    /// Returns the key of the Philox random generator for this stream, which a dropout kernel, for
    /// example, needs to compute the random numbers of the stream.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// Computes the four random 32-bit words for the elements from `4 * block` to `4 * block + 3`
    /// in the given sample and optimizer step. Other blocks, samples and steps never have the same
    /// counter.
    ///
    /// # Panics
    ///
    /// Panics if an id exceeds its range: 2⁴³ blocks, 2⁴³ samples, 2⁴² steps.
    pub fn compute_random_words(&self, block: u64, sample: u64, step: u64) -> [u32; 4] {
        assert!(
            block >> BLOCK_BITS == 0 && sample >> SAMPLE_BITS == 0 && step >> STEP_BITS == 0,
            "block, sample or step exceeds the range of the counter"
        );
        compute_random_words(self.key, block, sample, step)
    }

    /// Computes random values with a standard normal distribution (Box-Muller method) for four
    /// elements of a tensor, from number `4 * block` to `4 * block + 3`. The absolute values are at
    /// most 6.8.
    fn compute_normals(&self, block: u64) -> [f64; 4] {
        let w = self.compute_random_words(block, 0, 0);
        let (a, b) = compute_box_muller(w[0], w[1]);
        let (c, d) = compute_box_muller(w[2], w[3]);
        [a, b, c, d]
    }

    /// Computes random values that are uniform in [0, 1) for four elements of a tensor, from number
    /// `4 * block` to `4 * block + 3`.
    fn compute_uniforms(&self, block: u64) -> [f64; 4] {
        self.compute_random_words(block, 0, 0).map(|w| f64::from(w) / 4_294_967_296.0)
    }
}

/// Converts two random words to two independent standard normal values, by the Box–Muller method.
fn compute_box_muller(a: u32, b: u32) -> (f64, f64) {
    let u = (f64::from(a) + 0.5) / 4_294_967_296.0;
    let angle = f64::from(b) * (std::f64::consts::TAU / 4_294_967_296.0);
    let radius = libm::sqrt(-2.0 * libm::log(u));
    let (sin, cos) = libm::sincos(angle);
    (radius * cos, radius * sin)
}

/// The number of elements that a thread fills with random numbers at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;

/// Fills `out` with a part of a random tensor whose values are normal with mean 0 and standard
/// deviation `std`. The part begins at the tensor's element `first_element`.
///
/// Element i is a function of (seed, purpose, tensor name, i), so every partition of the tensor
/// gets the same values.
pub fn fill_normal(out: &mut [f32], seed: u64, purpose: Purpose, tensor: &str, first_element: u64, std: f32) {
    let stream = RandomStream::new(seed, purpose, tensor);
    let std = f64::from(std);
    fill_blocks(out, first_element, |block| stream.compute_normals(block).map(|z| (z * std) as f32));
}

/// Fills `out` with a part of a random tensor whose values are uniform in [low, high]. The part
/// begins at the tensor's element `first_element`. Every partition of the tensor gets the same
/// values, as with [`fill_normal`].
pub fn fill_uniform(
    out: &mut [f32],
    seed: u64,
    purpose: Purpose,
    tensor: &str,
    first_element: u64,
    low: f32,
    high: f32,
) {
    let stream = RandomStream::new(seed, purpose, tensor);
    let (low, width) = (f64::from(low), f64::from(high) - f64::from(low));
    fill_blocks(out, first_element, |block| stream.compute_uniforms(block).map(|u| (low + u * width) as f32));
}

/// Fills `out` with the random values of consecutive tensor elements, beginning with element number
/// `first_element`, which the function `values` computes four at a time. `values` computes blocks
/// of four elements by their number, and the first and last block may be used in part.
fn fill_blocks(out: &mut [f32], first_element: u64, values: impl Fn(u64) -> [f32; 4] + Sync) {
    out.par_chunks_mut(CHUNK_ELEMENTS).enumerate().for_each(|(i, chunk)| {
        let mut element = first_element + (i * CHUNK_ELEMENTS) as u64;
        let mut rest = chunk;
        while !rest.is_empty() {
            let skip = (element % 4) as usize;
            let n = rest.len().min(4 - skip);
            let (block, after) = rest.split_at_mut(n);
            block.copy_from_slice(&values(element / 4)[skip..skip + n]);
            element += n as u64;
            rest = after;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Checks the generator Philox4x32-10 against the known-answer vectors of the Random123
    /// library.
    #[test]
    fn philox_matches_known_answers() {
        let ones = 0xffff_ffff;
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn ids_never_share_a_counter() {
        let s = RandomStream::new(1, Purpose::Dropout, "0");
        let mut seen = std::collections::HashSet::new();
        let ids = [0u64, 1, 2, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 41];
        for block in ids {
            for sample in ids {
                for step in ids {
                    assert!(
                        seen.insert(s.compute_random_words(block, sample, step)),
                        "{block} {sample} {step}"
                    );
                }
            }
        }
    }

    #[test]
    fn seeds_purposes_and_scopes_differ() {
        let base = RandomStream::new(1, Purpose::Init, "a.b");
        for other in [
            RandomStream::new(2, Purpose::Init, "a.b"),
            RandomStream::new(1, Purpose::StochasticRounding, "a.b"),
            RandomStream::new(1, Purpose::Init, "a.c"),
            RandomStream::new(1, Purpose::Init, ""),
        ] {
            assert_ne!(base.compute_random_words(0, 0, 0), other.compute_random_words(0, 0, 0));
        }
    }

    /// Checks that initial weights equal recorded values, because a change would change every loss
    /// curve.
    #[test]
    fn initial_values_do_not_change_between_versions() {
        let mut out = [0.0f32; 6];
        fill_normal(&mut out, 1234, Purpose::Init, "model.embed_tokens.weight", 0, 0.02);
        assert_eq!(out.map(f32::to_bits), PINNED_NORMALS, "{out:?}");
    }
    const PINNED_NORMALS: [u32; 6] =
        [0x3d1c_bca4, 0x3c1d_4e33, 0x3c81_2de3, 0x3d18_d2ce, 0x3c83_f2ef, 0x3cb8_a3f8];

    #[test]
    fn normal_and_uniform_values_have_the_expected_moments() {
        let n = 1 << 18;
        let mut x = vec![0.0f32; n];
        fill_normal(&mut x, 7, Purpose::Init, "w", 0, 2.0);
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
        let moment = |p: i32| x.iter().map(|&v| (f64::from(v) / 2.0).powi(p)).sum::<f64>() / n as f64;
        // The standard errors of the three statistics at this n are 0.004, 0.003 and 0.02.
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((moment(2) - 1.0).abs() < 0.015, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.1, "{}", moment(4));
        fill_uniform(&mut x, 7, Purpose::Init, "w", 0, -1.0, 3.0);
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!(x.iter().all(|&v| (-1.0..=3.0).contains(&v)));
        assert!(x.iter().any(|&v| v < -0.99) && x.iter().any(|&v| v > 2.99));
    }

    proptest! {
        #[test]
        fn every_partition_of_a_tensor_gets_the_same_values(
            len in 1usize..600,
            cuts in proptest::collection::vec(0usize..600, 0..6),
            seed: u64,
            far in prop_oneof![Just(0u64), Just((1u64 << 34) - 3)],
        ) {
            let mut whole = vec![0.0f32; len];
            fill_normal(&mut whole, seed, Purpose::Init, "w", far, 0.02);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(len)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                let mut part = vec![0.0f32; pair[1] - pair[0]];
                fill_normal(&mut part, seed, Purpose::Init, "w", far + pair[0] as u64, 0.02);
                prop_assert_eq!(&part[..], &whole[pair[0]..pair[1]]);
            }
        }
    }

    #[test]
    fn chunks_of_different_threads_are_contiguous() {
        let mut whole = vec![0.0f32; 3 * CHUNK_ELEMENTS + 5];
        fill_normal(&mut whole, 3, Purpose::Init, "w", 1, 1.0);
        let mut part = vec![0.0f32; 9];
        fill_normal(&mut part, 3, Purpose::Init, "w", 1 + (2 * CHUNK_ELEMENTS - 4) as u64, 1.0);
        assert_eq!(part[..], whole[2 * CHUNK_ELEMENTS - 4..2 * CHUNK_ELEMENTS + 5]);
    }
}

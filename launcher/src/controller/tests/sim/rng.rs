//! [`SimRng`]: the random numbers of a simulation.
use std::time::Duration;

/// The random number generator of a simulation (SplitMix64).
pub(in crate::controller::tests) struct SimRng(u64);

impl SimRng {
    /// Creates a generator whose numbers depend only on the seed.
    pub(in crate::controller::tests) fn new(seed: u64) -> Self {
        SimRng(seed)
    }

    /// Returns the next pseudo-random number, uniformly distributed over all `u64`.
    pub(in crate::controller::tests) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a random number from 0 to `n` - 1, or 0 if `n` is 0.
    pub(in crate::controller::tests) fn pick_below(&mut self, n: u64) -> u64 {
        self.next_u64() % n.max(1)
    }

    /// Returns `true` with a probability of 1 in `n`.
    pub(super) fn pick_one_in(&mut self, n: u64) -> bool {
        self.pick_below(n) == 0
    }

    /// Returns a random duration of `from` to `to` milliseconds, both included.
    pub(super) fn pick_delay(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.pick_below(to - from + 1))
    }
}

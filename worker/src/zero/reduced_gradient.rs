//! [`ReducedGradient`]: the gradient of a parameter unit after its reduction among ranks.
use device::Buf;

/// The gradient of one parameter unit (tensors that are gathered together), summed over all
/// micro-batches of a step.
pub struct ReducedGradient {
    /// The gradient of this rank's shard, with one element per trained element.
    pub owned: Buf,
    /// The gradient of all trained elements, if it was gathered.
    pub whole: Option<Buf>,
}

impl ReducedGradient {
    /// Returns the gradient of all trained elements if it was gathered, otherwise that of this
    /// rank's shard.
    pub fn largest_part(&mut self) -> &mut Buf {
        self.whole.as_mut().unwrap_or(&mut self.owned)
    }
}

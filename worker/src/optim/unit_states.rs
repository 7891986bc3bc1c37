//! [`UnitStates`]: the optimizer states of one parameter unit.
use super::state_storage::StateVector;
use std::ops::Range;

/// The optimizer states of one unit on this rank. The vectors contain trained elements only.
pub struct UnitStates {
    /// The range of the unit's flat vector that this rank updates.
    pub range: Range<usize>,
    /// The range of the unit's trained vector that corresponds to `range`.
    pub trained: Range<usize>,
    /// The first moment of AdamW and Lion, or the momentum of SGD and Muon. Empty for SGD without
    /// momentum.
    pub first: StateVector,
    /// The second moment of AdamW; empty for other optimizers. For matrices that Muon updates, its
    /// elements stay zero.
    pub second: StateVector,
}

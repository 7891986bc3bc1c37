//! [`MatchError`]: why optimizer states cannot be assigned to weights.

/// Why optimizer states cannot be assigned to weights.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatchError {
    /// The number of optimizer states differs from the number of weights.
    #[error("states of {states} weights, but the model has {weights} (some may be frozen)")]
    Count {
        /// Number of optimizer states in all parameter groups.
        states: usize,
        /// Number of weights of the model.
        weights: usize,
    },
    /// The optimizer has more than two parameter groups, but the known rules by which programs form
    /// groups give at most two.
    #[error("{groups} parameter groups, formed by an unknown rule")]
    GroupRule {
        /// Number of parameter groups of the optimizer.
        groups: usize,
    },
    /// A parameter group has a different number of states than the weights that a known rule puts
    /// into this group.
    #[error("group {group} has states of {states} weights, the usual rules give {expected}")]
    GroupSize {
        /// Index of the parameter group.
        group: usize,
        /// Number of optimizer states in the parameter group.
        states: usize,
        /// Number of weights that the rule selects.
        expected: usize,
    },
    /// An optimizer state has a different shape than the weight at its position.
    #[error("state {index} of group {group} has the shape {found:?}, {weight} has {expected:?}")]
    StateShape {
        /// Index of the parameter group.
        group: usize,
        /// Index of the optimizer state in the parameter group.
        index: usize,
        /// Shape of the optimizer state.
        found: Vec<u64>,
        /// Name of the weight.
        weight: String,
        /// Shape of the weight.
        expected: Vec<u64>,
    },
    /// The optimizer states can be assigned to the weights in several ways.
    #[error("the parameter groups match the weights in more than one way")]
    Ambiguous,
    /// The order of the model's weights is unknown, and several weights have the same shape.
    #[error("the order of the model's weights is unknown, and shapes alone do not distinguish them")]
    UnknownOrder,
    /// No weight has the shape of an optimizer state.
    #[error("no weight has the shape {0:?}")]
    NoWeightOfShape(Vec<u64>),
    /// An optimizer state that is stored by name belongs to no weight.
    #[error("the states name {0}, which is not a weight")]
    UnknownWeight(String),
    /// An optimizer state that is stored by name has a different shape than its weight.
    #[error("the state of {weight} has the shape {found:?}, the weight {expected:?}")]
    NamedShape {
        /// Name of the weight.
        weight: String,
        /// Shape of the optimizer state.
        found: Vec<u64>,
        /// Shape of the weight.
        expected: Vec<u64>,
    },
    /// The optimizer states match neither the listed weights, nor the weights with fused experts.
    #[error("{listed}; with the experts of a layer as one weight, {fused}")]
    Fused {
        /// Why the optimizer states do not match the listed weights.
        listed: Box<MatchError>,
        /// Why the optimizer states do not match the weights with fused experts.
        fused: Box<MatchError>,
    },
    /// The optimizer states match neither all weights, nor only the trained weights.
    #[error("{all_weights}; with only the weights that are trained here, {trained}")]
    Trained {
        /// Why the optimizer states do not match all weights.
        all_weights: Box<MatchError>,
        /// Why the optimizer states do not match the trained weights.
        trained: Box<MatchError>,
    },
}

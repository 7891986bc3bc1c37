//! [`UpdateRule`]: the interface of optimizers, which defines the states that an optimizer keeps
//! and how it updates a parameter.
use super::unit_states::StateViews;
use crate::param_groups::GroupHyperparams;
use ckpt::TensorRole;
use device::{Buf, Ops, View, ViewMut};
use jobspec::OptimizerSpec;

/// An optimizer, such as AdamW: defines the states that it keeps, and how it updates each
/// parameter. `rules.rs` lists all optimizers.
pub(super) trait UpdateRule {
    /// Lists the kinds of states (such as first moments) that the optimizer keeps for each
    /// parameter, in the order in which checkpoints store them.
    /// [`TensorRole::tensor_shape_for_weight`] determines which parameters have a state, and its
    /// shape.
    ///
    /// A state with as many dimensions as its parameter is sharded with the parameter. Another
    /// state is replicated: each rank that updates a part of the parameter keeps the whole state.
    fn list_state_roles(&self, spec: &OptimizerSpec) -> Vec<TensorRole>;

    /// Selects the method, such as Muon's or AdamW's, by which the optimizer updates a parameter
    /// with the shape `shape`. `is_in_layer` is false for the embedding and the head.
    fn select_method(&self, shape: &[usize], is_in_layer: bool) -> UpdateMethod;
}

/// How an optimizer updates one parameter: an optional computation on the whole tensor's gradient,
/// followed by an update of each element.
#[derive(Clone, Copy)]
pub(crate) struct UpdateMethod {
    /// Computes the direction of the update from the gradient of the whole tensor. `None` if the
    /// update of an element depends only on this element, its gradient and its states.
    pub direction: Option<&'static dyn WholeTensorUpdate>,
    /// Updates consecutive elements with their gradient or, if `direction` is given, with their
    /// part of the direction.
    pub update: ElementwiseUpdate,
}

/// A function that updates consecutive elements `p` of a parameter and the optimizer states of
/// these elements. `g` is the gradient or the direction of these elements.
#[derive(Clone, Copy)]
pub(crate) enum ElementwiseUpdate {
    /// Updates the elements in place.
    InPlace(fn(ops: &dyn Ops, p: ViewMut, g: View, states: StateViews, inputs: &UpdateInputs<'_>)),
    /// Updates the elements in place and, if `rounded` is given, also writes them to it, rounded to
    /// its type.
    WithRounding(
        fn(
            ops: &dyn Ops,
            p: ViewMut,
            rounded: Option<ViewMut>,
            g: View,
            states: StateViews,
            inputs: &UpdateInputs<'_>,
        ),
    ),
}

/// A computation, such as Muon's orthogonalization, that derives the direction of an update from
/// the gradient of a whole tensor.
pub(crate) trait WholeTensorUpdate: Sync {
    /// Returns what this computation needs memory for, such as `Muon matrices`, as out-of-memory
    /// errors name it.
    fn memory_label(&self) -> &'static str;

    /// Returns how many elements [`WholeTensorUpdate::compute_direction`] allocates for one tensor
    /// of the given shape, for the estimate of a rank's memory.
    fn count_allocated_elements(&self, shape: &[usize]) -> usize;

    /// Converts this rank's part of a tensor's gradient in place to the values that ranks then
    /// gather as a whole tensor, such as Muon's momentum. Updates the sharded states of these
    /// elements.
    fn prepare_gradient(&self, ops: &dyn Ops, g: ViewMut, states: StateViews, inputs: &UpdateInputs<'_>);

    /// Computes the direction in which a whole tensor is updated from the values that
    /// [`WholeTensorUpdate::prepare_gradient`] computed and all ranks gathered. Updates the
    /// replicated states.
    ///
    /// Every rank that updates a part of the tensor computes the whole direction, so the result
    /// does not depend on the sharding.
    fn compute_direction(
        &self,
        ops: &dyn Ops,
        prepared: View,
        states: StateViews,
        inputs: &UpdateInputs<'_>,
    ) -> Buf;
}

/// The values, such as learning rate and update number, with which an optimizer updates one
/// parameter, in addition to its gradient and its optimizer states.
pub(crate) struct UpdateInputs<'a> {
    /// The optimizer's settings in the job.
    pub spec: &'a OptimizerSpec,
    /// The hyper-parameters of the parameter's group.
    pub group: &'a GroupHyperparams,
    /// The shape of the parameter.
    pub shape: &'a [usize],
    /// The learning rate of the parameter in this step.
    pub lr: f64,
    /// The number of this update of the parameter, counted from 1.
    pub update: u64,
    /// The factor by which the summed gradient is multiplied.
    pub grad_scale: f32,
}

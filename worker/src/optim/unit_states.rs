//! [`UnitStates`]: the optimizer states that this rank has for one parameter unit (tensors that are
//! gathered together).
use super::state_storage::StateVector;
use crate::params::{ParamSpec, ParamUnit, Segment};
use ckpt::TensorRole;
use device::{Buf, Dtype, Ops, View, ViewMut};
use jobspec::OffloadTarget;
use std::{io, ops::Range};

/// The optimizer states that this rank has for one parameter unit (parameters that are gathered
/// together).
pub struct UnitStates {
    /// The range of the unit's flat vector that this rank updates.
    pub range: Range<usize>,
    /// The states of the unit, one item for each kind of state (role), in the order of the update
    /// rule.
    pub(super) roles: Vec<SameKindStates>,
}

/// The optimizer states of one kind, such as the first moment, for all trained parameters of a
/// parameter unit (tensors that are gathered together).
pub struct SameKindStates {
    pub(super) layout: StateLayout,
    pub(super) vector: StateVector,
}

/// The positions of each parameter's states in a vector of optimizer states of one kind, such as
/// first moments. The segments of states that are sharded among ranks come first, followed by the
/// segments of states that every rank has. In these segments, `flat` is the range in the state
/// vector.
pub(super) struct StateLayout {
    role: TensorRole,
    sharded: Vec<Segment>,
    replicated: Vec<Segment>,
}

impl StateLayout {
    /// Assigns positions in a vector of optimizer states of one kind to all trained elements in a
    /// range of a parameter unit (tensors that are gathered together).
    pub(super) fn new(role: TensorRole, unit: &ParamUnit, range: Range<usize>) -> Self {
        let (mut sharded, mut replicated) = (Vec::new(), Vec::new());
        for part in unit.list_trained_segments(range) {
            let param = &unit.params[part.param];
            match role.tensor_shape_for_weight(&param.shape) {
                Some(_) if is_sharded(role, param) => sharded.push(part),
                Some(shape) => {
                    let elements = 0..shape.iter().product();
                    replicated.push(Segment { elements, ..part });
                }
                None => {}
            }
        }
        let mut end = 0;
        for segment in sharded.iter_mut().chain(&mut replicated) {
            segment.flat = end..end + segment.elements.len();
            end = segment.flat.end;
        }
        StateLayout { role, sharded, replicated }
    }

    /// Returns the number of elements of the optimizer state vector that belong to sharded states,
    /// which precede the states that every rank stores in full.
    fn sharded_len(&self) -> usize {
        self.sharded.last().map_or(0, |s| s.flat.end)
    }

    /// Returns the length, in elements, of this rank's vector of optimizer states of one kind,
    /// including states that every rank stores in full.
    pub(super) fn len(&self) -> usize {
        self.replicated.last().map_or(self.sharded_len(), |s| s.flat.end)
    }

    /// Lists the parts of the optimizer state vector that belong to the range `shard` of a
    /// parameter unit's concatenated tensors, apart from states that every rank stores in full.
    /// They are adjacent in the state vector.
    fn list_sharded_segments(&self, unit: &ParamUnit, shard: Range<usize>) -> Vec<Segment> {
        let in_vector = |part: Segment| {
            let i = self.sharded.binary_search_by_key(&part.param, |s| s.param).ok()?;
            let start = self.sharded[i].flat.start + part.elements.start - self.sharded[i].elements.start;
            Some(Segment { flat: start..start + part.elements.len(), ..part })
        };
        unit.list_trained_segments(shard).into_iter().filter_map(in_vector).collect()
    }
}

/// Returns whether optimizer states of the kind `role` are sharded among ranks together with their
/// parameter, instead of stored in full on every rank.
fn is_sharded(role: TensorRole, param: &ParamSpec) -> bool {
    role.tensor_shape_for_weight(&param.shape).is_some_and(|shape| shape.len() == param.shape.len())
}

impl UnitStates {
    /// Allocates zeroed optimizer states of several kinds for the trained elements in a range of a
    /// parameter unit (tensors that are gathered together).
    ///
    /// # Errors
    ///
    /// Fails if offload storage cannot be created.
    pub(super) fn zeroed(
        ops: &dyn Ops,
        roles: &[TensorRole],
        unit: &ParamUnit,
        range: Range<usize>,
        offload: Option<&OffloadTarget>,
    ) -> io::Result<Self> {
        let allocate = |&role: &TensorRole| {
            let layout = StateLayout::new(role, unit, range.clone());
            let vector = StateVector::zeroed(ops, layout.len(), offload)?;
            Ok(SameKindStates { layout, vector })
        };
        let roles = roles.iter().map(allocate).collect::<io::Result<_>>()?;
        Ok(UnitStates { range, roles })
    }

    /// Returns the optimizer states of the parameter unit, one item for each kind of state, such as
    /// first moments.
    pub fn states_by_role(&self) -> &[SameKindStates] {
        &self.roles
    }

    /// Returns the optimizer states of the parameter unit for modification, one item for each kind
    /// of state, such as first moments.
    pub fn states_by_role_mut(&mut self) -> &mut [SameKindStates] {
        &mut self.roles
    }

    /// Returns whether any of these optimizer states is stored outside of the memory in which the
    /// device computes.
    pub(super) fn is_offloaded(&self, ops: &dyn Ops) -> bool {
        self.roles.iter().any(|states| states.vector.is_offloaded(ops))
    }
}

impl SameKindStates {
    /// Returns which kind of optimizer states these are, such as the first moment.
    pub fn role(&self) -> TensorRole {
        self.layout.role
    }

    /// Returns all optimizer states of this kind: first those that are sharded among ranks, in the
    /// order of the parameters, then those that every rank has.
    pub fn view(&self) -> View<'_> {
        self.vector.view()
    }

    /// Lists the parts of the optimizer states of this kind that a rank writes to checkpoints if it
    /// owns the range `shard` of the parameter unit. The owner of a parameter's first element
    /// writes its replicated states.
    pub fn list_saved_segments(&self, unit: &ParamUnit, shard: Range<usize>) -> Vec<Segment> {
        let begins_in_shard = |s: &&Segment| shard.contains(&unit.tensor_range(s.param).start);
        let replicated = self.layout.replicated.iter().filter(begins_in_shard).cloned();
        self.layout.list_sharded_segments(unit, shard.clone()).into_iter().chain(replicated).collect()
    }

    /// Returns the optimizer states of this kind that a rank must read from a checkpoint, first the
    /// sharded ones, then those that every rank stores in full. Each item has the segments of
    /// consecutive elements.
    pub fn list_loaded_segments_mut(
        &mut self,
        unit: &ParamUnit,
        shard: Range<usize>,
    ) -> [(Vec<Segment>, ViewMut<'_>); 2] {
        let part = self.layout.list_sharded_segments(unit, shard);
        let range = part.first().map_or(0, |s| s.flat.start)..part.last().map_or(0, |s| s.flat.end);
        let (sharded, replicated) = self.vector.view_mut().split_at(self.layout.sharded_len());
        [(part, sharded.slice(range)), (self.layout.replicated.clone(), replicated)]
    }

    /// Returns whether any optimizer state of this kind is divided among ranks, and not kept in
    /// full by every rank.
    pub fn is_any_sharded(&self, unit: &ParamUnit) -> bool {
        unit.list_trained_params().any(|p| is_sharded(self.layout.role, p))
    }

    /// Copies this rank's sharded optimizer states of this kind to a new vector, in which every
    /// trained element of the range `shard` has a place.
    pub fn pack_trained(&self, ops: &dyn Ops, unit: &ParamUnit, shard: Range<usize>) -> Buf {
        let trained = unit.to_trained_range(shard.clone());
        let mut packed = ops.zeroed(Dtype::F32, trained.len());
        for s in self.layout.list_sharded_segments(unit, shard) {
            let start = find_trained_offset(unit, &s) - trained.start;
            let to = packed.view_mut().slice(start..start + s.flat.len());
            ops.copy(to, self.vector.view().slice(s.flat));
        }
        packed
    }

    /// Overwrites this rank's sharded optimizer states of this kind with its part of `whole`, a
    /// vector for all trained elements of the parameter unit.
    pub fn unpack_trained(&mut self, ops: &dyn Ops, unit: &ParamUnit, whole: View) {
        for s in &self.layout.sharded {
            let start = find_trained_offset(unit, s);
            let states = self.vector.view_mut().slice(s.flat.clone());
            ops.copy(states, whole.slice(start..start + s.flat.len()));
        }
    }
}

/// Returns the index of the first element of the tensor part `s` in a vector of only the trained
/// elements of the parameter unit.
fn find_trained_offset(unit: &ParamUnit, s: &Segment) -> usize {
    unit.to_trained_offset(unit.tensor_range(s.param).start + s.elements.start)
}

/// Counts the elements of all optimizer states of several kinds that a rank keeps for its range of
/// a parameter unit (tensors that are gathered together).
pub fn count_state_elements(roles: &[TensorRole], unit: &ParamUnit, range: Range<usize>) -> usize {
    roles.iter().map(|&role| StateLayout::new(role, unit, range.clone()).len()).sum()
}

/// The optimizer states of one parameter unit (tensors that are gathered together), in the memory
/// in which the device computes.
pub(super) struct DeviceStates<'a>(pub(super) Vec<(&'a StateLayout, ViewMut<'a>)>);

impl DeviceStates<'_> {
    /// Returns the optimizer states of one parameter that are sharded among ranks, of which this
    /// rank has a part.
    pub(super) fn select_sharded_states(&mut self, param: usize) -> StateViews<'_> {
        self.select_states(param, |layout| &layout.sharded)
    }

    /// Returns those optimizer states of parameter number `param` that every rank has in full.
    pub(super) fn select_replicated_states(&mut self, param: usize) -> StateViews<'_> {
        self.select_states(param, |layout| &layout.replicated)
    }

    /// Returns either the sharded or the replicated optimizer states of parameter number `param`,
    /// as the function `list` selects.
    fn select_states(&mut self, param: usize, list: fn(&StateLayout) -> &[Segment]) -> StateViews<'_> {
        let mut views = Vec::new();
        for (layout, vector) in &mut self.0 {
            let segments = list(layout);
            if let Ok(i) = segments.binary_search_by_key(&param, |s| s.param) {
                views.push((layout.role, vector.slice_mut(segments[i].flat.clone())));
            }
        }
        StateViews(views)
    }
}

/// The optimizer states of one parameter as mutable slices, one for each kind of state, such as the
/// first moment.
pub(crate) struct StateViews<'a>(Vec<(TensorRole, ViewMut<'a>)>);

impl<'a> StateViews<'a> {
    /// Removes the optimizer state of the kind `role`, such as the first moment, from this
    /// collection and returns the state.
    ///
    /// # Panics
    ///
    /// Panics if the parameter has no such state, or if it was taken before.
    pub(super) fn take_state(&mut self, role: TensorRole) -> ViewMut<'a> {
        let i = self.0.iter().position(|(r, _)| *r == role);
        let i = i.unwrap_or_else(|| panic!("the parameter has no state {role}"));
        self.0.swap_remove(i).1
    }

    /// Returns mutable slices of the elements `r` of every optimizer state of the parameter.
    pub(super) fn slice_mut(&mut self, r: Range<usize>) -> StateViews<'_> {
        StateViews(self.0.iter_mut().map(|(role, view)| (*role, view.slice_mut(r.clone()))).collect())
    }
}

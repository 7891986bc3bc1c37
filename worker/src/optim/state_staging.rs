//! [`StateStagingBuffers`]: device memory in which offloaded optimizer states (stored in host
//! memory or files) are updated. While the states of one unit are updated, the states of the next
//! unit are copied in and the states of the previous unit are copied out.
use super::unit_states::{DeviceStates, SameKindStates, UnitStates};
use device::{Buf, Dtype, Ops, storage::Event};

/// Two buffers in device memory to which offloaded optimizer states are copied for an update: one
/// is used while the other is filled or emptied.
#[derive(Default)]
pub(super) struct StateStagingBuffers([StateStagingBuffer; 2]);

/// A buffer in device memory for the offloaded optimizer states of one parameter unit (tensors that
/// are gathered together) during its update.
#[derive(Default)]
struct StateStagingBuffer {
    /// One vector of optimizer states for each kind of state (role).
    vectors: Vec<Buf>,
    /// The unit whose states are in the buffer or are being copied in.
    unit: Option<usize>,
    /// The event that completes with the most recent copy to or from the buffer.
    last_copy: Event,
}

impl StateStagingBuffers {
    /// Allocates buffers in device memory that are large enough for the offloaded optimizer states
    /// of any parameter unit (tensors that are gathered together). The buffers are empty if no
    /// states are offloaded.
    pub(super) fn new(ops: &dyn Ops, units: &[UnitStates]) -> Self {
        let mut lens = vec![0; units.first().map_or(0, |st| st.roles.len())];
        for st in units.iter().filter(|st| st.is_offloaded(ops)) {
            lens.iter_mut().zip(&st.roles).for_each(|(len, states)| *len = states.vector.len().max(*len));
        }
        let buffer = || StateStagingBuffer {
            vectors: lens.iter().map(|&len| ops.zeroed(Dtype::F32, len)).collect(),
            ..StateStagingBuffer::default()
        };
        StateStagingBuffers([buffer(), buffer()])
    }

    /// Starts to copy the optimizer states of parameter unit `u` (tensors that are gathered
    /// together) from offload storage to a device buffer. Does nothing if the states are not
    /// offloaded or already in a buffer.
    pub(super) fn prefetch(&mut self, ops: &dyn Ops, u: usize, st: &mut UnitStates) {
        if !st.is_offloaded(ops) || self.0.iter().any(|buffer| buffer.unit == Some(u)) {
            return;
        }
        let buffer =
            self.0.iter_mut().find(|buffer| buffer.unit.is_none()).expect("one unit is updated at a time");
        let free = std::mem::take(&mut buffer.last_copy);
        for (states, vector) in st.roles.iter_mut().zip(&mut buffer.vectors) {
            if !states.vector.is_empty() {
                let to = vector.view_mut().slice(0..states.vector.len());
                buffer.last_copy = states.vector.start_copy_in(ops, to, &free);
            }
        }
        buffer.unit = Some(u);
    }

    /// Returns the optimizer states of parameter unit `u` (tensors that are gathered together) in
    /// device memory, where they can be updated. Copies offloaded states to this memory if
    /// [`StateStagingBuffers::prefetch`] has not done so.
    pub(super) fn fetch_to_device<'a>(
        &'a mut self,
        ops: &dyn Ops,
        u: usize,
        st: &'a mut UnitStates,
    ) -> DeviceStates<'a> {
        self.prefetch(ops, u, st);
        DeviceStates(match self.0.iter_mut().find(|buffer| buffer.unit == Some(u)) {
            None => st.roles.iter_mut().map(|states| (&states.layout, states.vector.view_mut())).collect(),
            Some(buffer) => {
                buffer.last_copy.make_stream_wait();
                let vectors = st.roles.iter().zip(&mut buffer.vectors);
                let view = |(states, vector): (&'a SameKindStates, &'a mut Buf)| {
                    (&states.layout, vector.view_mut().slice(0..states.vector.len()))
                };
                vectors.map(view).collect()
            }
        })
    }

    /// Starts to copy the updated optimizer states of parameter unit `u` (tensors that are gathered
    /// together) from their device buffer back to offload storage.
    pub(super) fn write_back(&mut self, ops: &dyn Ops, u: usize, st: &mut UnitStates) {
        let Some(buffer) = self.0.iter_mut().find(|buffer| buffer.unit == Some(u)) else { return };
        for (states, vector) in st.roles.iter_mut().zip(&buffer.vectors) {
            if !states.vector.is_empty() {
                let from = vector.view().slice(0..states.vector.len());
                buffer.last_copy = states.vector.start_copy_out(ops, from);
            }
        }
        buffer.unit = None;
    }
}

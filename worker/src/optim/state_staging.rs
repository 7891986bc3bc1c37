//! [`StateStagingBuffers`]: device memory in which offloaded optimizer states are updated. While
//! the states of one unit are updated, the states of the next unit are copied in and the states of
//! the previous unit are copied out.
use super::unit_states::UnitStates;
use device::{Buf, Dtype, Ops, ViewMut, storage::Event};

/// Two staging buffers for optimizer states, used alternately.
#[derive(Default)]
pub(super) struct StateStagingBuffers([StateStagingBuffer; 2]);

/// Device memory for the optimizer states of one unit.
#[derive(Default)]
struct StateStagingBuffer {
    vectors: [Buf; 2],
    /// The unit whose states are in the buffer or are being copied in.
    unit: Option<usize>,
    /// The event that completes with the last copy to or from the buffer.
    last_copy: Event,
}

impl StateStagingBuffers {
    /// Allocates buffers for the largest offloaded unit. The buffers are empty if no states are
    /// offloaded.
    pub(super) fn new(ops: &dyn Ops, units: &[UnitStates]) -> Self {
        let offloaded = units.iter().filter(|st| st.first.is_offloaded(ops) || st.second.is_offloaded(ops));
        let lens =
            offloaded.fold([0, 0], |most, st| [most[0].max(st.first.len()), most[1].max(st.second.len())]);
        let buffer = || StateStagingBuffer {
            vectors: lens.map(|len| ops.zeroed(Dtype::F32, len)),
            ..StateStagingBuffer::default()
        };
        StateStagingBuffers([buffer(), buffer()])
    }

    /// Starts to copy the states of unit `u` to a buffer. Does nothing if the states are not
    /// offloaded or already in a buffer.
    pub(super) fn prefetch(&mut self, ops: &dyn Ops, u: usize, st: &mut UnitStates) {
        let is_offloaded = st.first.is_offloaded(ops) || st.second.is_offloaded(ops);
        if !is_offloaded || self.0.iter().any(|buffer| buffer.unit == Some(u)) {
            return;
        }
        let buffer =
            self.0.iter_mut().find(|buffer| buffer.unit.is_none()).expect("one unit is updated at a time");
        let free = std::mem::take(&mut buffer.last_copy);
        for (states, vector) in [&mut st.first, &mut st.second].into_iter().zip(&mut buffer.vectors) {
            if !states.is_empty() {
                buffer.last_copy = states.start_copy_in(ops, vector.view_mut().slice(0..states.len()), &free);
            }
        }
        buffer.unit = Some(u);
    }

    /// Returns the states of unit `u` in the memory of the backend. Copies offloaded states to this
    /// memory if [`StateStagingBuffers::prefetch`] has not done so.
    pub(super) fn fetch_to_device<'a>(
        &'a mut self,
        ops: &dyn Ops,
        u: usize,
        st: &'a mut UnitStates,
    ) -> [ViewMut<'a>; 2] {
        self.prefetch(ops, u, st);
        let lens = [st.first.len(), st.second.len()];
        match self.0.iter_mut().find(|buffer| buffer.unit == Some(u)) {
            None => [st.first.view_mut(), st.second.view_mut()],
            Some(buffer) => {
                buffer.last_copy.make_stream_wait();
                let [first, second] = &mut buffer.vectors;
                [first.view_mut().slice(0..lens[0]), second.view_mut().slice(0..lens[1])]
            }
        }
    }

    /// Starts to copy the updated states of unit `u` back to their storage, and frees their buffer.
    pub(super) fn write_back(&mut self, ops: &dyn Ops, u: usize, st: &mut UnitStates) {
        let Some(buffer) = self.0.iter_mut().find(|buffer| buffer.unit == Some(u)) else { return };
        for (states, vector) in [&mut st.first, &mut st.second].into_iter().zip(&buffer.vectors) {
            if !states.is_empty() {
                buffer.last_copy = states.start_copy_out(ops, vector.view().slice(0..states.len()));
            }
        }
        buffer.unit = None;
    }
}

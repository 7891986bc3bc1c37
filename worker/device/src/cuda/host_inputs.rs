//! [`HostInputCache`]: integer inputs of kernels that come from the host, such as tokens, labels
//! and document starts.
//!
//! An input has a name and keeps its GPU address from one micro-batch to the next. Kernels that
//! read the input are therefore launched with the same arguments each time, which CUDA graphs need.
//! An input that is already on the GPU is not sent again, because every layer reads the same few
//! inputs.
use super::bindings::Address;
use super::error::Result;
use super::gpu::Gpu;
use super::memory::DeviceMemory;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// Maximum number of slots for inputs of one name and size. More than one slot is needed if layers
/// alternate between inputs.
const MAX_SLOTS_PER_INPUT: usize = 4;
/// Number of consecutive uploads after which a slot is added, if each of them restores the input
/// that the previous upload has overwritten.
const ALTERNATIONS_BEFORE_NEW_SLOT: u32 = 2;
/// Number of overwritten inputs whose host memory is kept. A driver that reads the host's memory
/// asynchronously may still read them.
const KEPT_UPLOADS: usize = 8;
/// Minimum size of a slot in bytes. Sizes are powers of two.
const MIN_SLOT_BYTES: usize = 256;

/// Host inputs of one thread in one stream, and their copies on the GPU. Streams do not share a
/// cache, because an upload in one stream is not visible in another.
#[derive(Default)]
pub(super) struct HostInputCache {
    /// Slots by name and slot size in bytes.
    slots: HashMap<(&'static str, usize), InputSlots>,
    /// Host memory of the inputs that were overwritten last.
    recent_uploads: VecDeque<Vec<u8>>,
}

/// GPU memory for the inputs of one name and size.
#[derive(Default)]
struct InputSlots {
    /// GPU memory of each slot, and a copy of the slot's content.
    slots: Vec<(DeviceMemory, Vec<u8>)>,
    /// Index of the slot that the next new input overwrites.
    next: usize,
    /// Content of the input that was overwritten last.
    overwritten: Vec<u8>,
    /// Number of new inputs in a row that were equal to `overwritten`.
    alternations: u32,
}

impl HostInputCache {
    /// Uploads the input `input` with the name `name`, unless a copy on the GPU already has this
    /// content. Returns its GPU address, which is valid until another input of this name is
    /// uploaded. The address of an empty input is 0.
    pub(super) fn upload_if_changed(
        &mut self,
        gpu: &Arc<Gpu>,
        name: &'static str,
        input: &[u8],
    ) -> Result<Address> {
        if input.is_empty() {
            return Ok(0);
        }
        let size = input.len().next_power_of_two().max(MIN_SLOT_BYTES);
        let slots = self.slots.entry((name, size)).or_default();
        if let Some((memory, _)) = slots.slots.iter().find(|(_, content)| content == input) {
            return Ok(memory.address());
        }
        slots.alternations = if slots.overwritten == input { slots.alternations + 1 } else { 0 };
        let is_alternating =
            slots.alternations >= ALTERNATIONS_BEFORE_NEW_SLOT && slots.slots.len() < MAX_SLOTS_PER_INPUT;
        if slots.slots.is_empty() || is_alternating {
            slots.alternations = 0;
            slots.next = slots.slots.len();
            slots.slots.push((gpu.allocate(size)?, Vec::new()));
        }
        let (index, count) = (slots.next, slots.slots.len());
        let (memory, content) = &mut slots.slots[index];
        let new = input.to_vec();
        gpu.enqueue_upload(memory.address(), &new)?;
        let old = std::mem::replace(content, new);
        slots.next = (index + 1) % count;
        let at = memory.address();
        slots.overwritten.clone_from(&old);
        self.recent_uploads.truncate(KEPT_UPLOADS - 1);
        self.recent_uploads.push_front(old);
        Ok(at)
    }
}

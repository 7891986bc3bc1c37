//! Integer inputs of kernels that come from the host: tokens, labels, where documents begin.
//!
//! An input has a name and keeps its GPU address from one micro-batch to the next, so that the
//! kernels that read it are launched with the same arguments each time, which CUDA graphs need. An
//! input that is already on the GPU is not sent again: every layer reads the same few.
use super::bindings::Address;
use super::context::GpuContext;
use super::error::Result;
use super::memory::DeviceMemory;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// Maximum number of slots for inputs of one name and size. Layers may alternate between inputs.
const MAX_SLOTS: usize = 4;
/// A slot is added when this many inputs in a row are what the previous one has just overwritten.
const ALTERNATIONS: u32 = 2;
/// Number of overwritten inputs whose host memory is kept: a driver that reads the host's memory
/// asynchronously may still read them.
const KEPT_UPLOADS: usize = 8;
/// Smallest size of a slot, bytes. Sizes are powers of two.
const MIN_SLOT_BYTES: usize = 256;

/// The inputs of one thread in one stream. Streams do not share them, because an upload in one
/// stream is not visible in another.
#[derive(Default)]
pub(super) struct HostInputs {
    /// By name and slot size.
    slots: HashMap<(&'static str, usize), InputSlots>,
    recent_uploads: VecDeque<Vec<u8>>,
}

/// The GPU memory of the inputs of one name and size.
#[derive(Default)]
struct InputSlots {
    /// Each slot's memory and content.
    slots: Vec<(DeviceMemory, Vec<u8>)>,
    /// The slot that the next new input overwrites.
    next: usize,
    /// The content that was overwritten last.
    overwritten: Vec<u8>,
    /// How many new inputs in a row were equal to `overwritten`.
    alternations: u32,
}

impl HostInputs {
    /// The GPU address of `input`, valid until another input of this name is uploaded.
    pub(super) fn upload(
        &mut self,
        gpu: &Arc<GpuContext>,
        name: &'static str,
        input: &[u8],
    ) -> Result<Address> {
        if input.is_empty() {
            return Ok(0);
        }
        let size = input.len().next_power_of_two().max(MIN_SLOT_BYTES);
        let slots = self.slots.entry((name, size)).or_default();
        if let Some((memory, _)) = slots.slots.iter().find(|(_, content)| content == input) {
            return Ok(memory.at());
        }
        slots.alternations = if slots.overwritten == input { slots.alternations + 1 } else { 0 };
        let is_alternating = slots.alternations >= ALTERNATIONS && slots.slots.len() < MAX_SLOTS;
        if slots.slots.is_empty() || is_alternating {
            slots.alternations = 0;
            slots.next = slots.slots.len();
            slots.slots.push((gpu.allocate(size)?, Vec::new()));
        }
        let (index, count) = (slots.next, slots.slots.len());
        let (memory, content) = &mut slots.slots[index];
        let new = input.to_vec();
        gpu.upload(memory.at(), &new)?;
        let old = std::mem::replace(content, new);
        slots.next = (index + 1) % count;
        let at = memory.at();
        slots.overwritten.clone_from(&old);
        self.recent_uploads.truncate(KEPT_UPLOADS - 1);
        self.recent_uploads.push_front(old);
        Ok(at)
    }
}

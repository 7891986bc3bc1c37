//! Keeps copies of integer inputs of kernels (tokens, labels, document starts) on the GPU
//! ([`HostInputCache`]), so that an input is uploaded only if it has changed.
//!
//! An input has a name and keeps its GPU address from one micro-batch to the next. Kernels that
//! read the input are therefore launched with the same arguments each time, which CUDA graphs need.
//! An input that is already on the GPU is not sent again, because every layer reads the same few
//! inputs.
use super::bindings::Address;
use super::error::Result;
use super::gpu::Gpu;
use super::memory::DeviceMemory;
use super::pinned_memory::PinnedRing;
use std::{collections::HashMap, sync::Arc};

/// Maximum number of different contents of one kernel input (one name and size, such as the labels)
/// of which copies stay on the GPU. More than one copy is needed if layers alternate between
/// inputs.
const MAX_SLOTS_PER_INPUT: usize = 4;
/// Number of consecutive alternations of a kernel input between two contents after which the GPU
/// keeps another copy of the input.
const ALTERNATIONS_BEFORE_NEW_SLOT: u32 = 2;
/// Minimum size in bytes of the GPU memory in which a copy of one kernel input is kept. Sizes are
/// powers of two.
const MIN_SLOT_BYTES: usize = 256;

/// Copies on the GPU of the integer inputs, such as tokens and labels, that one thread has uploaded
/// for kernels in one stream. Streams do not share a cache, because an upload in one stream is not
/// visible in another.
#[derive(Default)]
pub(super) struct HostInputCache {
    /// The GPU memory for inputs (slots), by the inputs' name and the size of a slot in bytes.
    slots: HashMap<(&'static str, usize), InputSlots>,
    /// The pinned host memory from which inputs are copied.
    ring: PinnedRing,
}

/// The copies on the GPU of a kernel input with one name and size, each with its content in host
/// memory.
#[derive(Default)]
struct InputSlots {
    /// GPU memory of each slot, and a copy of the slot's content.
    slots: Vec<(DeviceMemory, Vec<u8>)>,
    /// Index of the slot that the next new input overwrites.
    next: usize,
    /// Content of the input that was overwritten most recently.
    overwritten: Vec<u8>,
    /// Number of new inputs in a row that were equal to `overwritten`.
    alternations: u32,
}

impl HostInputCache {
    /// Uploads `input`, the content of the kernel input `name`, to the GPU if no copy on the GPU
    /// has this content already. Returns the GPU address of the copy, which is valid until another
    /// input of this name is uploaded. The address of an empty input is 0.
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
        self.ring.upload(gpu, memory.address(), input)?;
        slots.next = (index + 1) % count;
        let at = memory.address();
        std::mem::swap(&mut slots.overwritten, content);
        content.clear();
        content.extend_from_slice(input);
        Ok(at)
    }
}

//! Buffers in pinned host memory for copies to and from the GPU, and a ring of such buffers for
//! uploads of small inputs ([`PinnedRing`]).
use super::bindings::Address;
use super::error::Result;
use super::gpu::Gpu;
use super::streams::CudaEvent;
use crate::buffer::{Buf, Dtype, MemoryOwner};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// Maximum total size in bytes of those pinned host buffers for uploads of small inputs which have
/// the same size. If so many uploads are enqueued, the next one waits for the oldest one.
const MAX_RING_BYTES: usize = 16 << 20;
/// Minimum size in bytes of a pinned buffer through which small inputs are uploaded to the GPU.
/// Sizes are powers of two.
const MIN_BUFFER_BYTES: usize = 256;

/// Owner of a buffer in pinned host memory, which frees the memory when the buffer is dropped.
struct PinnedOwner(Arc<Gpu>);

impl MemoryOwner for PinnedOwner {
    fn release(&self, address: u64, _: usize) {
        self.0.free_pinned(address);
    }
}

impl Gpu {
    /// Allocates a buffer of `len` zeros in pinned host memory.
    pub(super) fn allocate_pinned_buffer(self: &Arc<Self>, dtype: Dtype, len: usize) -> Result<Buf> {
        if len == 0 {
            return Ok(Buf::zeroed_as(dtype, 0));
        }
        let bytes = len * dtype.size();
        let at = self.allocate_pinned(bytes)?;
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Buf::from_host_allocation(Arc::new(PinnedOwner(self.clone())), at, dtype, len))
    }
}

/// Ring of pinned host buffers for small inputs: an input is copied to the next buffer, so that its
/// upload to the GPU does not block the host. A buffer is reused when its last upload is complete.
///
/// The driver copies from pinned memory while the host continues. For other host memory, it waits
/// for the earlier work of the stream.
#[derive(Default)]
pub(super) struct PinnedRing {
    /// The buffers by their size in bytes, each with the event after its upload, oldest first.
    uploads: HashMap<usize, VecDeque<(Buf, CudaEvent)>>,
}

impl PinnedRing {
    /// Copies `bytes` to a pinned host buffer, and enqueues the upload of this buffer to the GPU
    /// address `at` on this thread's stream. Does not wait for the copy, and `bytes` may be changed
    /// afterwards.
    pub(super) fn upload(&mut self, gpu: &Arc<Gpu>, at: Address, bytes: &[u8]) -> Result<()> {
        let size = bytes.len().next_power_of_two().max(MIN_BUFFER_BYTES);
        let ring = self.uploads.entry(size).or_default();
        let reusable = match ring.front() {
            Some((_, done)) if (ring.len() + 1) * size > MAX_RING_BYTES => {
                done.synchronize()?;
                ring.pop_front().map(|(buf, _)| buf)
            }
            Some((_, done)) if done.is_reached()? => ring.pop_front().map(|(buf, _)| buf),
            _ => None,
        };
        let mut buf = match reusable {
            Some(buf) => buf,
            None => gpu.allocate_pinned_buffer(Dtype::F32, size / size_of::<f32>())?,
        };
        buf.view_mut().host_bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        gpu.enqueue_upload(at, &buf.view().host_bytes()[..bytes.len()])?;
        ring.push_back((buf, gpu.record_event()?));
        Ok(())
    }
}

impl Drop for PinnedRing {
    fn drop(&mut self) {
        for (_, done) in self.uploads.values().filter_map(VecDeque::back) {
            // An error means that the GPU has failed, and copies nothing any more.
            let _ = done.synchronize();
        }
    }
}

//! Trait [`Storage`] for the memory of a device (CPU or GPU): allocation, copies to and from host
//! memory, and streams.
use crate::buffer::{Buf, Dtype, View, ViewMut};
use diagnostic::Diagnostic;
use std::{any::Any, fmt, ops::Range, sync::Arc, time::Duration};

/// The memory and the streams of a backend (CPU or GPU), with allocation, copies and events.
///
/// Calls from all threads, together with the calls of [`crate::Ops`], take effect in the order in
/// which they are made. The exception is a thread in [`Storage::with_separate_stream`]. The calls
/// of such a thread are ordered among themselves, and are ordered relative to other streams only by
/// [`Event`]s. The CPU backend computes in the host's memory and makes no second copy of a buffer.
///
/// Calls return no errors. The first failure is recorded in the backend's status
/// ([`Storage::check_status`]), and later calls do nothing. Buffers then have unspecified content,
/// so the caller must check the status before it saves, sends or prints a result, and before a
/// result decides what it does next.
pub trait Storage: Send + Sync {
    /// Returns true if the buffers of this device are in host memory, as on CPUs.
    fn is_host(&self) -> bool;
    /// Returns the first error of any earlier call on this device (CPU or GPU), or `Ok` if no call
    /// has failed.
    fn check_status(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Allocates a buffer of `len` zeros in the device's memory for `purpose`, such as `gradients`,
    /// which an out-of-memory error names. If the memory is full, records the failure and returns a
    /// buffer without memory, which later calls do not access.
    fn zeroed_with_purpose(&self, purpose: &'static str, dtype: Dtype, len: usize) -> Buf;
    /// Allocates a buffer of `len` zeros in the device's memory for use in the current training
    /// step. See [`Storage::zeroed_with_purpose`].
    fn zeroed(&self, dtype: Dtype, len: usize) -> Buf {
        self.zeroed_with_purpose("this step", dtype, len)
    }
    /// Allocates a buffer of `len` zeros in host memory for fast copies to and from the device; the
    /// memory is pinned for GPUs. If there is no pinned memory, records the failure and returns
    /// pageable memory.
    fn alloc_staging(&self, dtype: Dtype, len: usize) -> Buf;
    /// Allocates a buffer of `len` elements in host memory for fast copies to and from the device,
    /// or returns an error.
    fn try_alloc_staging(&self, dtype: Dtype, len: usize) -> Result<Buf, DeviceError> {
        Ok(self.alloc_staging(dtype, len))
    }
    /// Copies the elements of `from` to `to`, between or within host memory and the memory of the
    /// backend. Both must have the same type and length, and either may be on the host. A copy to
    /// or from the host is complete on return.
    fn copy(&self, to: ViewMut, from: View);
    /// Sets every element of `x` to zero.
    fn fill_with_zeros(&self, x: ViewMut);
    /// Moves the elements of `x` with the indices `from` to the lower position `to` within the same
    /// buffer. The ranges may overlap.
    fn move_elements_to_lower_index(&self, x: ViewMut, from: Range<usize>, to: usize);
    /// Blocks until all work that this thread has enqueued on its stream is complete. Returns the
    /// status.
    fn synchronize(&self) -> Result<(), DeviceError> {
        self.check_status()
    }
    /// Runs `work` while the calls of this thread are issued to a new stream, and blocks until the
    /// work on that stream is complete.
    ///
    /// If two streams access the same memory, the caller must order the accesses with events. This
    /// also applies to memory that is freed in another stream than the one that used the memory.
    fn with_separate_stream(&self, work: &mut dyn FnMut()) {
        work(); // this backend's calls are complete on return
    }
    /// Records an event on this thread's stream. It is reached when all work that this thread has
    /// enqueued so far is complete.
    fn record_event(&self) -> Event {
        Event::default()
    }
    /// Makes this thread's stream wait for an event, and measures for how long the stream waits
    /// ([`Storage::take_stall_seconds`]).
    fn make_stream_wait_timed(&self, event: &Event) {
        event.make_stream_wait();
    }
    /// Returns the total seconds for which streams waited in [`Storage::make_stream_wait_timed`]
    /// since the previous call of this function. Waits that have not ended yet are counted by a
    /// later call.
    fn take_stall_seconds(&self) -> f64 {
        0.0
    }
    /// Starts a copy between host memory and device memory, which runs concurrently with later
    /// calls, and returns an event for its completion.
    ///
    /// The copy starts after all earlier calls of this thread and after the events `after`. Until
    /// the returned event is reached, `from` must not be written, `to` must not be accessed, and
    /// neither may be freed. If the host memory is not from [`Storage::alloc_staging`], the call
    /// may block until the copy is complete.
    fn copy_async(&self, to: ViewMut, from: View, _after: &[Event]) -> Event {
        self.copy(to, from);
        Event::default()
    }
    /// Starts to copy each view `from[i]` in device memory to the host buffer `to[i]`, and returns
    /// a handle to wait for the copies. The returned value owns the buffers while the copies run.
    /// The views `from` must not be written or freed before the copies are complete, as in
    /// [`Storage::copy_async`].
    fn start_download(&self, from: &[View], mut to: Vec<Buf>) -> Download {
        assert!(from.len() == to.len(), "download: {} views into {} buffers", from.len(), to.len());
        let copies = from.iter().zip(&mut to).map(|(from, to)| self.copy_async(to.view_mut(), *from, &[]));
        // copies complete in order, so the last event covers them all
        let done = copies.filter(|event| event.0.is_some()).last().unwrap_or_default();
        Download { bufs: to, done, status: self.check_status() }
    }
    /// Reports the duration of a completed training step to the device, so that a GPU can find out
    /// whether CUDA graphs make steps faster. Returns a notice of the backend that was not returned
    /// before, such as the choice, or `None`.
    fn record_step_duration(&self, _duration: Duration) -> Option<BackendNotice> {
        None
    }
    /// Returns the largest number of bytes of the backend's memory that this process had allocated
    /// at one time. Returns 0 if the backend computes in the host's memory.
    fn peak_memory_bytes(&self) -> u64;

    /// Allocates a buffer in the device's memory, copies the elements of `from` to it, and returns
    /// the buffer.
    fn clone_to_device(&self, from: View) -> Buf {
        let mut buf = self.zeroed(from.dtype(), from.len());
        self.copy(buf.view_mut(), from);
        buf
    }

    /// Allocates a buffer in host memory, copies the elements of `from` to it, and returns the
    /// buffer.
    fn clone_to_host(&self, from: View) -> Buf {
        let mut buf = Buf::zeroed_as(from.dtype(), from.len());
        self.copy(buf.view_mut(), from);
        buf
    }

    /// Returns the elements of `x` in host memory: `x` itself if it is there, otherwise a copy in
    /// the host buffer `staging`. The buffer `staging` is replaced if it is too small or has
    /// another type.
    fn to_host<'a>(&self, x: View<'a>, staging: &'a mut Buf) -> View<'a> {
        if x.is_on_host() {
            return x;
        }
        if staging.len() < x.len() || staging.dtype() != x.dtype() {
            *staging = self.alloc_staging(x.dtype(), x.len());
        }
        self.copy(staging.view_mut().slice(0..x.len()), x);
        staging.view().slice(0..x.len())
    }

    /// Returns the elements of `x` in the device's memory: `x` itself if it is there, otherwise a
    /// copy in the device buffer `buf`. The buffer `buf` is replaced if it is too small or has
    /// another type.
    fn to_device<'a>(&self, x: View<'a>, buf: &'a mut Buf) -> View<'a> {
        if x.is_on_host() == self.is_host() {
            return x;
        }
        if buf.len() < x.len() || buf.dtype() != x.dtype() {
            *buf = self.zeroed(x.dtype(), x.len());
        }
        self.copy(buf.view_mut().slice(0..x.len()), x);
        buf.view().slice(0..x.len())
    }
}

/// Message of a backend for the user, about a decision during training or about a feature that does
/// not work. The job continues.
#[derive(Clone, Debug, PartialEq)]
pub enum BackendNotice {
    /// CUDA graphs are off, because each call keeps the GPU busy for so long that graphs would not
    /// save time.
    GraphsNotNeeded {
        /// Mean seconds of GPU work for each call.
        seconds_per_call: f64,
    },
    /// Steps were timed with and without CUDA graphs. The faster way is used from now on.
    GraphsMeasured {
        /// True if CUDA graphs are used from now on.
        enabled: bool,
        /// Median seconds of a step with CUDA graphs.
        step_seconds_with: f64,
        /// Median seconds of a step without CUDA graphs.
        step_seconds_without: f64,
    },
    /// An attention shape was timed with cuDNN and with the built-in kernels. The faster of the two
    /// computes it from now on.
    AttentionMeasured {
        /// Shape and direction, such as `attention of 2 × 2048 tokens, …: forward`.
        attention: String,
        /// cuDNN's version.
        cudnn_version: String,
        /// Seconds that cuDNN's fastest plan takes.
        cudnn_seconds: f64,
        /// Seconds that this program's kernels take.
        built_in_seconds: f64,
    },
    /// A feature that does not work on this rank. Training continues without the feature. All other
    /// notices are equal on all ranks.
    Degraded(Diagnostic),
}

impl fmt::Display for BackendNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackendNotice::GraphsNotNeeded { seconds_per_call } => {
                write!(
                    f,
                    "CUDA graphs are off: each call keeps the GPU busy for {:.0} µs",
                    1e6 * seconds_per_call
                )
            }
            BackendNotice::GraphsMeasured { enabled, step_seconds_with, step_seconds_without } => write!(
                f,
                "CUDA graphs are {}: a step takes {:.2} ms with them, {:.2} ms without",
                if *enabled { "on" } else { "off" },
                1e3 * step_seconds_with,
                1e3 * step_seconds_without
            ),
            BackendNotice::AttentionMeasured {
                attention,
                cudnn_version,
                cudnn_seconds,
                built_in_seconds,
            } => {
                write!(f, "{attention} uses ")?;
                if cudnn_seconds < built_in_seconds {
                    write!(f, "cuDNN {cudnn_version}")?;
                } else {
                    f.write_str("launch's own kernels")?;
                }
                let [cudnn, built_in] = [cudnn_seconds, built_in_seconds].map(|seconds| 1e6 * seconds);
                write!(f, " ({cudnn:.0} µs with cuDNN, {built_in:.0} µs with launch's own kernels)")
            }
            BackendNotice::Degraded(diagnostic) => diagnostic.fmt(f),
        }
    }
}

/// A point in the work of a stream, for which other streams and the host can wait. The default
/// event is always reached.
#[derive(Clone, Default)]
pub struct Event(Option<Arc<dyn BackendEvent>>);

/// The methods of an [`Event`] (a point in the work of a stream), which CPUs and GPUs implement
/// separately.
pub(crate) trait BackendEvent: Send + Sync {
    /// Makes this thread's stream wait for the event before the stream's next work. The host does
    /// not block.
    fn make_stream_wait(&self);
    /// Returns whether the event is reached, or can never be reached because work before it failed.
    /// Does not block.
    fn is_reached(&self) -> bool;
    /// Blocks the calling thread until the event is reached. Fails if work before it failed.
    fn synchronize(&self) -> Result<(), DeviceError>;
}

impl Event {
    /// Wraps a GPU's or another device's event object as an [`Event`].
    pub(crate) fn new(event: impl BackendEvent + 'static) -> Self {
        Event(Some(Arc::new(event)))
    }

    /// Returns whether this is the default event, which is not recorded on a stream and always
    /// counts as reached.
    pub fn is_always_reached(&self) -> bool {
        self.0.is_none()
    }

    /// Returns whether the event is reached, or can never be reached because work before it failed.
    /// Does not block.
    pub fn is_reached(&self) -> bool {
        self.0.as_ref().is_none_or(|event| event.is_reached())
    }

    /// Makes this thread's stream wait for the event before the stream's next work. The host does
    /// not block.
    pub fn make_stream_wait(&self) {
        if let Some(event) = &self.0 {
            event.make_stream_wait();
        }
    }

    /// Blocks the calling thread until the event is reached. Fails if work before it failed.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.0.as_ref().map_or(Ok(()), |event| event.synchronize())
    }
}

/// Handle to running copies from a device to host buffers; dropping the handle waits for the
/// copies.
pub struct Download {
    bufs: Vec<Buf>,
    done: Event,
    /// The status of the backend after the copies were started.
    status: Result<(), DeviceError>,
}

impl Download {
    /// Creates the handle of running copies to the host buffers `bufs`, which are complete when the
    /// event `done` is reached. `status` is the status of the backend after the copies were
    /// started.
    pub(crate) fn new(bufs: Vec<Buf>, done: Event, status: Result<(), DeviceError>) -> Self {
        Download { bufs, done, status }
    }

    /// Returns the event that is reached when all copies of this download are complete.
    pub fn done_event(&self) -> Event {
        self.done.clone()
    }

    /// Blocks until the copies are complete, and returns the filled buffers. Fails if a copy, or
    /// work before it, failed.
    pub fn wait(mut self) -> Result<Vec<Buf>, DeviceError> {
        self.done.synchronize()?; // dropping the copies keeps the buffers
        std::mem::replace(&mut self.status, Ok(()))?;
        Ok(std::mem::take(&mut self.bufs))
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if !self.bufs.is_empty() && self.done.synchronize().is_err() {
            // The copies may still be running, so the buffers must not be freed.
            std::mem::forget(std::mem::take(&mut self.bufs));
        }
    }
}

/// Error of a call on a device (CPU or GPU), such as an allocation or a kernel launch.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(transparent)]
pub struct DeviceError(#[from] pub Diagnostic);

impl From<DeviceError> for Diagnostic {
    fn from(error: DeviceError) -> Self {
        error.0
    }
}

/// Returns the text of a panic from its payload.
pub fn extract_panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic without a message").to_owned()
}

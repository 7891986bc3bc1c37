//! Determines the CUDA stream to which a thread's GPU calls are issued.
use super::bindings::driver_sys::CUstream;
use super::context::GpuContext;
use std::cell::Cell;

/// Which CUDA stream a thread uses: `None` for the GPU's main stream, or the pair of the thread's
/// separate stream and the GPU's main stream.
pub(super) type ThreadStreamSetting = Option<(CUstream, CUstream)>;

thread_local! {
    /// Whether this thread's GPU calls are issued to the GPU's main stream (`None`) or to a
    /// separate stream of this thread.
    static THREAD_STREAM: Cell<ThreadStreamSetting> = const { Cell::new(None) };
}

/// Sets this thread's CUDA stream back to `setting`, the value that
/// [`GpuContext::set_thread_stream`] returned.
pub(super) fn restore_thread_stream(setting: ThreadStreamSetting) {
    THREAD_STREAM.set(setting);
}

impl GpuContext {
    /// Returns the CUDA stream to which this thread's GPU calls are issued: the thread's separate
    /// stream if it has one, otherwise the GPU's main stream.
    pub(super) fn current_stream(&self) -> CUstream {
        match THREAD_STREAM.get() {
            Some((stream, main)) if main == self.main_stream => stream,
            _ => self.main_stream,
        }
    }

    /// Makes this thread issue its GPU calls to `stream`, a stream of this GPU, from now on.
    /// Returns the previous setting, for [`restore_thread_stream`].
    pub(super) fn set_thread_stream(&self, stream: CUstream) -> ThreadStreamSetting {
        THREAD_STREAM.replace(Some((stream, self.main_stream)))
    }

    /// Runs `f` while this thread's GPU calls are issued to `stream`, a stream of this GPU.
    /// Restores the previous stream afterwards.
    pub(super) fn run_on_stream<T>(&self, stream: CUstream, f: impl FnOnce() -> T) -> T {
        /// Guard that restores this thread's previous stream when dropped.
        struct StreamRestorer(ThreadStreamSetting);
        impl Drop for StreamRestorer {
            fn drop(&mut self) {
                restore_thread_stream(self.0);
            }
        }
        let _restorer = StreamRestorer(self.set_thread_stream(stream));
        f()
    }
}

//! Determines the CUDA stream to which a thread's GPU calls are issued.
use super::bindings::driver_sys::CUstream;
use super::context::GpuContext;
use std::cell::Cell;

/// The CUDA stream setting of a thread: its separate stream together with the main stream of the
/// stream's GPU, or `None` if the thread uses the main stream.
pub(super) type ThreadStreamSetting = Option<(CUstream, CUstream)>;

thread_local! {
    /// The CUDA stream that this thread uses for its GPU calls.
    static THREAD_STREAM: Cell<ThreadStreamSetting> = const { Cell::new(None) };
}

/// Restores the CUDA stream setting that this thread had before a call of
/// [`GpuContext::set_thread_stream`], which returned it as `setting`.
pub(super) fn restore_thread_stream(setting: ThreadStreamSetting) {
    THREAD_STREAM.set(setting);
}

impl GpuContext {
    /// Returns the CUDA stream of this thread: its separate stream, or the GPU's main stream.
    pub(super) fn current_stream(&self) -> CUstream {
        match THREAD_STREAM.get() {
            Some((stream, main)) if main == self.main_stream => stream,
            _ => self.main_stream,
        }
    }

    /// Makes `stream`, a stream of this GPU, the stream to which this thread's GPU calls are
    /// issued. Returns the previous setting, for [`restore_thread_stream`].
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

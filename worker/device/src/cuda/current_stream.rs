//! The CUDA stream to which the calls of a thread are issued.
use super::bindings::driver_sys::CUstream;
use super::context::GpuContext;
use std::cell::Cell;

/// The separate stream of a thread, and the main stream of the GPU to which it belongs. `None` if
/// the thread uses the main stream.
pub(super) type ThreadStreamSetting = Option<(CUstream, CUstream)>;

thread_local! {
    /// This thread's stream.
    static THREAD_STREAM: Cell<ThreadStreamSetting> = const { Cell::new(None) };
}

/// Sets this thread's stream to a previous setting.
pub(super) fn restore_thread_stream(setting: ThreadStreamSetting) {
    THREAD_STREAM.set(setting);
}

impl GpuContext {
    /// Returns the stream to which this thread's calls are issued.
    pub(super) fn stream(&self) -> CUstream {
        match THREAD_STREAM.get() {
            Some((stream, main)) if main == self.main_stream => stream,
            _ => self.main_stream,
        }
    }

    /// Makes `stream`, a stream of this GPU, this thread's stream. Returns the previous setting,
    /// for [`restore_thread_stream`].
    pub(super) fn set_thread_stream(&self, stream: CUstream) -> ThreadStreamSetting {
        THREAD_STREAM.replace(Some((stream, self.main_stream)))
    }

    /// Runs `f` while `stream`, a stream of this GPU, is this thread's stream. Restores the
    /// previous stream afterwards.
    pub(super) fn run_on_stream<T>(&self, stream: CUstream, f: impl FnOnce() -> T) -> T {
        /// Restores this thread's previous stream when dropped.
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

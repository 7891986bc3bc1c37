//! The CUDA stream to which the calls of a thread are issued.
use super::bindings::{DriverApi, Handle, NON_BLOCKING};
use super::context::GpuContext;
use super::error::Result;
use std::{cell::Cell, ffi::c_int, ptr};

/// The separate stream of a thread, and the main stream of the GPU to which it belongs. `None` if
/// the thread uses the main stream.
pub(super) type ThreadStreamSetting = Option<(Handle, Handle)>;

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
    pub(super) fn stream(&self) -> Handle {
        match THREAD_STREAM.get() {
            Some((stream, main)) if main == self.main_stream => stream,
            _ => self.main_stream,
        }
    }

    /// Makes `stream`, a stream of this GPU, this thread's stream. Returns the previous setting,
    /// for [`restore_thread_stream`].
    pub(super) fn set_thread_stream(&self, stream: Handle) -> ThreadStreamSetting {
        THREAD_STREAM.replace(Some((stream, self.main_stream)))
    }

    /// Runs `f` while `stream`, a stream of this GPU, is this thread's stream. Restores the
    /// previous stream afterwards.
    pub(super) fn run_on_stream<T>(&self, stream: Handle, f: impl FnOnce() -> T) -> T {
        struct Restore(ThreadStreamSetting);
        impl Drop for Restore {
            fn drop(&mut self) {
                restore_thread_stream(self.0);
            }
        }
        let _restore = Restore(self.set_thread_stream(stream));
        f()
    }
}

impl DriverApi {
    /// Creates a CUDA stream of this priority that runs concurrently with the others.
    pub(super) fn create_stream(&self, priority: c_int) -> Result<Handle> {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.cuStreamCreateWithPriority)(&mut stream, NON_BLOCKING, priority) };
        self.check_status("cuStreamCreateWithPriority", status)?;
        Ok(stream)
    }
}

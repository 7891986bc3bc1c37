//! Kernels of the GPU: loading them, their launch configuration and arguments, and their launch.
use super::bindings::{Address, Handle, MAX_DYNAMIC_SHARED_BYTES};
use super::context::GpuContext;
use super::error::Result;
use std::{
    ffi::{CStr, c_int, c_void},
    ptr,
};

/// A loaded image of one kernel source. It stays loaded as long as the context exists.
pub(super) struct KernelModule(Handle);

/// A handle of a kernel in a loaded module, which can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelFunction(pub(super) Handle);

// SAFETY: the handle is only passed to the driver, which accepts it from any thread.
unsafe impl Send for KernelModule {}
// SAFETY: as for Send.
unsafe impl Sync for KernelModule {}
// SAFETY: the handle is only passed to the driver, which accepts it from any thread.
unsafe impl Send for KernelFunction {}
// SAFETY: as for Send.
unsafe impl Sync for KernelFunction {}

/// Launch configuration of a kernel: number of blocks, threads per block, and bytes of dynamic
/// shared memory per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchConfig {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: usize,
}

/// An argument of a kernel, which is copied byte by byte.
///
/// # Safety
///
/// The type must have the memory layout of the kernel's C parameter, without padding.
pub(super) unsafe trait KernelArg {}

// SAFETY: `i64` in the kernels' sources.
unsafe impl KernelArg for i64 {}
// SAFETY: `float` in the kernels' sources.
unsafe impl KernelArg for f32 {}
// SAFETY: a pointer in the kernels' sources.
unsafe impl KernelArg for Address {}

impl GpuContext {
    /// Loads a binary image that was compiled for this GPU from the kernel source `file`.
    pub(super) fn load_module(&self, file: &str, image: &[u8]) -> Result<KernelModule> {
        self.make_current()?;
        let mut module = ptr::null_mut();
        // SAFETY: an image carries its own length.
        let status = unsafe { (self.driver.cuModuleLoadData)(&mut module, image.as_ptr().cast()) };
        self.driver.check_status(&format!("cuModuleLoadData of {file}"), status)?;
        Ok(KernelModule(module))
    }

    /// Returns the kernel `name` of a module. Fails if the module has no such kernel.
    pub(super) fn find_function(&self, module: &KernelModule, name: &CStr) -> Result<KernelFunction> {
        self.make_current()?;
        let mut function = ptr::null_mut();
        // SAFETY: the module lives as long as the context.
        let status = unsafe { (self.driver.cuModuleGetFunction)(&mut function, module.0, name.as_ptr()) };
        self.driver.check_status(&format!("cuModuleGetFunction of {}", name.to_string_lossy()), status)?;
        Ok(KernelFunction(function))
    }

    /// Allows each block of a kernel to use up to `bytes` bytes of dynamic shared memory.
    pub(super) fn set_max_shared_memory(&self, function: KernelFunction, bytes: usize) -> Result<()> {
        self.make_current()?;
        // SAFETY: the function lives as long as the context.
        let status =
            unsafe { (self.driver.cuFuncSetAttribute)(function.0, MAX_DYNAMIC_SHARED_BYTES, bytes as c_int) };
        self.driver.check_status("cuFuncSetAttribute", status)
    }

    /// Launches a kernel on `stream` immediately.
    ///
    /// # Safety
    ///
    /// `arguments` must point to values that match the kernel's parameters in number, type and
    /// order, and that are valid during the call. Each GPU address among the values must point to
    /// all memory that the kernel accesses through it. That memory must stay allocated until the
    /// kernel is complete.
    pub(super) unsafe fn issue_launch(
        &self,
        name: &CStr,
        function: KernelFunction,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> Result<()> {
        let LaunchConfig { grid: [x, y, z], block: [bx, by, bz], shared } = config;
        // SAFETY: promised by the caller; the driver copies the arguments before it returns.
        let status = unsafe {
            (self.driver.cuLaunchKernel)(
                function.0,
                x,
                y,
                z,
                bx,
                by,
                bz,
                shared as u32,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        if status == 0 {
            Ok(())
        } else {
            let kernel = name.to_string_lossy();
            let launch = format!(
                "cuLaunchKernel of {kernel} (grid {x}×{y}×{z}, block {bx}×{by}×{bz}, {shared} bytes of shared memory)"
            );
            self.driver.check_status(&launch, status)
        }
    }
}

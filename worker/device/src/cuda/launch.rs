//! Loads compiled kernels into a GPU, and launches them with their arguments and launch
//! configurations.
use super::bindings::{
    Address,
    driver_sys::{CUfunction, CUfunction_attribute, CUmodule, CUstream},
};
use super::context::GpuContext;
use super::error::Result;
use std::{
    ffi::{CStr, c_int, c_void},
    ptr,
};

/// The compiled CUDA kernels of one source file, loaded into a GPU. They stay loaded as long as the
/// CUDA context exists.
pub(super) struct KernelModule(CUmodule);

/// A handle of a loaded kernel, with which it can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelFunction(pub(super) CUfunction);

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

/// A value that can be passed to a kernel as an argument, by copying its bytes.
///
/// # Safety
///
/// The type must have the memory layout of the kernel's C parameter, without padding.
pub(super) unsafe trait KernelArg {}

// SAFETY: `i64` in the kernels' sources.
unsafe impl KernelArg for i64 {}
// SAFETY: `i64` in the kernels' sources. Sizes are below 2⁶³.
unsafe impl KernelArg for usize {}
const _: () = assert!(size_of::<usize>() == size_of::<i64>());
// SAFETY: `float` in the kernels' sources.
unsafe impl KernelArg for f32 {}
// SAFETY: a pointer in the kernels' sources.
unsafe impl KernelArg for Address {}

impl KernelModule {
    /// Loads `image`, the compiled CUDA kernels of the source `file`, into the GPU.
    pub(super) fn load(gpu: &GpuContext, file: &str, image: &[u8]) -> Result<KernelModule> {
        gpu.make_current()?;
        let mut module = ptr::null_mut();
        // SAFETY: an image carries its own length.
        unsafe { gpu.driver.cuModuleLoadData(&mut module, image.as_ptr().cast()) }
            .map_err(|error| error.with_failed_function(format!("cuModuleLoadData of {file}")))?;
        Ok(KernelModule(module))
    }

    /// Looks up the kernel `name` in this module of loaded kernels. Fails if the module has no such
    /// kernel.
    pub(super) fn find_function(&self, gpu: &GpuContext, name: &CStr) -> Result<KernelFunction> {
        gpu.make_current()?;
        let mut function = ptr::null_mut();
        // SAFETY: the module lives as long as the context.
        unsafe { gpu.driver.cuModuleGetFunction(&mut function, self.0, name.as_ptr()) }.map_err(|error| {
            error.with_failed_function(format!("cuModuleGetFunction of {}", name.to_string_lossy()))
        })?;
        Ok(KernelFunction(function))
    }
}

impl KernelFunction {
    /// Allows each block of the kernel to use up to `bytes` bytes of shared memory. The kernel's
    /// static shared memory is a part of them, and the rest may be dynamic.
    pub(super) fn set_max_shared_memory(self, gpu: &GpuContext, bytes: usize) -> Result<()> {
        gpu.make_current()?;
        let (attribute, mut static_bytes) =
            (CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 0);
        let static_attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function lives as long as the context; writes one number.
        unsafe { gpu.driver.cuFuncGetAttribute(&mut static_bytes, static_attribute, self.0) }?;
        // SAFETY: the function lives as long as the context.
        unsafe { gpu.driver.cuFuncSetAttribute(self.0, attribute, bytes as c_int - static_bytes) }
    }

    /// Launches the kernel on `stream` immediately, without recording it for a CUDA graph.
    ///
    /// # Safety
    ///
    /// `arguments` must point to values that match the kernel's parameters in number, type and
    /// order, and that are valid during the call. Each GPU address among the values must point to
    /// all memory that the kernel accesses through it. That memory must stay allocated until the
    /// kernel is complete.
    pub(super) unsafe fn issue(
        self,
        gpu: &GpuContext,
        name: &CStr,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
        stream: CUstream,
    ) -> Result<()> {
        let LaunchConfig { grid: [x, y, z], block: [bx, by, bz], shared } = config;
        let arguments = arguments.as_mut_ptr();
        // SAFETY: promised by the caller; the driver copies the arguments before it returns.
        unsafe {
            gpu.driver.cuLaunchKernel(
                self.0, x, y, z, bx, by, bz, shared as u32, stream, arguments, ptr::null_mut()
            )
        }
        .map_err(|error| {
            let kernel = name.to_string_lossy();
            error.with_failed_function(format!(
                "cuLaunchKernel of {kernel} (grid {x}×{y}×{z}, block {bx}×{by}×{bz}, {shared} bytes of shared memory)"
            ))
        })
    }
}

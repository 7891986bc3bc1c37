//! The functions of the CUDA driver that this program calls ([`DriverApi`]).
use super::super::error::CudaError;
use super::super::library::CudaLibrary;
use super::super::library_search::{LibrarySearchPaths, OpenLibrary};
use super::cuda_library::{Status, copy_c_string, cuda_library};
use cudarc::driver::sys::*;
use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    path::PathBuf,
    ptr,
};

/// An address in GPU memory, as the CUDA driver represents it.
pub(in crate::cuda) type Address = CUdeviceptr;

cuda_library! {
    /// The CUDA driver API, from `libcuda.so.1`.
    DriverApi: cudarc::driver::sys, CUresult, Driver, "CUDA 12";
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorName(status: Status, name: *mut *const c_char);
    fn cuGetErrorString(status: Status, text: *mut *const c_char);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    fn cuMemPoolTrimTo(pool: CUmemoryPool, kept_bytes: usize);
    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventSynchronize(event: CUevent);
    fn cuEventQuery(event: CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuCtxSynchronize();
    fn cuMemAlloc_v2(address: *mut Address, bytes: usize);
    fn cuMemFree_v2(address: Address);
    fn cuMemAllocAsync(address: *mut Address, bytes: usize, stream: CUstream);
    fn cuMemFreeAsync(address: Address, stream: CUstream);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemcpyHtoDAsync_v2(to: Address, from: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Address, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: CUstream);
    fn cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(memory: *mut c_void);
    fn cuMemsetD8Async(to: Address, value: u8, bytes: usize, stream: CUstream);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: CUfunction, threads: c_int, shared_bytes: usize,
    );
    fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: CUstream, arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}

impl DriverApi {
    /// Returns the CUDA driver's name and description of the status code `status`.
    fn describe_status(&self, status: Status) -> String {
        describe_status(self.cuGetErrorName, self.cuGetErrorString, status)
    }
}

/// Type of a function of the driver that returns a text (name or description) for a status code.
type StatusTextFn = unsafe extern "C" fn(Status, *mut *const c_char) -> Status;

/// Returns the CUDA driver's name and description of the status code `status`.
pub(super) fn describe_status(
    name_function: StatusTextFn,
    text_function: StatusTextFn,
    status: Status,
) -> String {
    let (mut name, mut text) = (ptr::null(), ptr::null());
    // SAFETY: writes one pointer each, to a static string or null.
    unsafe {
        name_function(status, &mut name);
        text_function(status, &mut text);
        format!("{}, {}", copy_c_string(name), copy_c_string(text))
    }
}

//! The properties of a GPU ([`GpuProperties`]), and functions that open the CUDA driver and query
//! its version, its GPUs and error messages.
use super::bindings::{
    DriverApi,
    driver_sys::{CUdevice, CUdevice_attribute},
};
use super::error::{CudaError, Result};
use super::library::CudaLibrary;
use super::library_search::LibrarySearchPaths;
use std::{
    ffi::{CStr, c_char, c_int},
    path::PathBuf,
};

/// The oldest supported version of the CUDA driver, 12.0, as `cuDriverGetVersion` reports it.
const MIN_DRIVER_VERSION: i32 = 12000;
/// Lowest compute capability of GPUs with fp8 tensor cores: 8.9 (Ada).
const MIN_FP8_CAPABILITY: (u32, u32) = (8, 9);

/// Properties of a GPU that its driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProperties {
    /// The GPU's name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The GPU's index among those that this process sees.
    pub index: usize,
    /// Compute capability: (9, 0) is `sm_90`.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessor_count: usize,
    /// Size of the GPU's memory in bytes.
    pub memory_bytes: usize,
    /// Bytes of shared memory that one block can use.
    pub shared_memory_per_block: usize,
    /// Size of the L2 cache in bytes.
    pub l2_cache_bytes: usize,
    /// The CUDA version that the driver implements: (13, 0).
    pub driver_version: (u32, u32),
    /// Path of the driver's library.
    pub driver_path: PathBuf,
}

impl GpuProperties {
    /// Returns the GPU's architecture as NVRTC names it, such as `sm_90`.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Returns true if the GPU's tensor cores multiply fp8.
    pub fn has_fp8(&self) -> bool {
        self.capability >= MIN_FP8_CAPABILITY
    }

    /// Creates the error that this GPU does not support `feature`. `required` names the hardware or
    /// architecture that has the feature.
    pub(super) fn unsupported_error(&self, feature: &'static str, required: &'static str) -> CudaError {
        let (index, name, architecture) = (self.index, self.name.clone(), self.architecture());
        CudaError::GpuUnsupported { index, name, architecture, feature, required }
    }
}

/// Opens and initializes the CUDA driver. Returns the driver, the CUDA version that it implements,
/// and its path. Fails if the driver is too old.
pub(super) fn open_driver(paths: &LibrarySearchPaths) -> Result<(DriverApi, i32, PathBuf)> {
    let (driver, path) = DriverApi::open(paths)?;
    let mut version = 0;
    // SAFETY: the first call has no preconditions, and the second writes one integer.
    unsafe {
        driver.cuInit(0)?;
        driver.cuDriverGetVersion(&mut version)?;
    }
    if version < MIN_DRIVER_VERSION {
        return Err(CudaError::LibraryTooOld {
            library: CudaLibrary::Driver,
            path,
            found: format!("a driver for CUDA {}", format_version(version)),
            required: format!("CUDA {} or newer", format_version(MIN_DRIVER_VERSION)),
        });
    }
    Ok((driver, version, path))
}

/// Returns the CUDA version that the installed driver implements, such as (13, 0), and the driver's
/// path.
pub(super) fn query_driver_version(paths: &LibrarySearchPaths) -> Result<((u32, u32), PathBuf)> {
    open_driver(paths).map(|(_, version, path)| (split_version(version), path))
}

/// Returns the CUDA version that the installed driver implements, and the memory, in bytes, of the
/// GPU with the least memory. Fails if the driver shows this process no GPU.
pub(super) fn query_driver_version_and_smallest_memory(
    paths: &LibrarySearchPaths,
) -> Result<((u32, u32), u64)> {
    let (driver, version, _) = open_driver(paths)?;
    let mut smallest = query_total_memory(&driver, get_device(&driver, 0)?)?;
    for index in 1..count_gpus(&driver)? {
        smallest = smallest.min(query_total_memory(&driver, get_device(&driver, index)?)?);
    }
    Ok((split_version(version), smallest as u64))
}

/// Returns the number of GPUs that the driver shows this process.
fn count_gpus(driver: &DriverApi) -> Result<usize> {
    let mut count = 0;
    // SAFETY: writes one integer.
    unsafe { driver.cuDeviceGetCount(&mut count) }?;
    Ok(count.max(0) as usize)
}

/// Returns the size of a GPU's memory in bytes.
fn query_total_memory(driver: &DriverApi, device: CUdevice) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: writes one integer.
    unsafe { driver.cuDeviceTotalMem_v2(&mut bytes, device) }?;
    Ok(bytes)
}

/// Returns the driver's handle of the GPU with number `index`. Fails if there is no such GPU.
pub(super) fn get_device(driver: &DriverApi, index: usize) -> Result<CUdevice> {
    let (count, mut device) = (count_gpus(driver)?, 0);
    if index >= count {
        return Err(CudaError::GpuNotFound { index, count });
    }
    // SAFETY: writes one handle; the index is below the count.
    unsafe { driver.cuDeviceGet(&mut device, index as c_int) }?;
    Ok(device)
}

/// Returns the value of an attribute of a GPU, as the driver reports it.
pub(super) fn query_attribute(
    driver: &DriverApi,
    device: CUdevice,
    attribute: CUdevice_attribute,
) -> Result<c_int> {
    let mut value = 0;
    // SAFETY: writes one integer.
    unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, device) }?;
    Ok(value)
}

/// Queries the properties of a GPU, such as its name, memory and compute capability, from the
/// driver. `device` is the driver's handle of the GPU.
pub(super) fn query_properties(
    driver: &DriverApi,
    device: CUdevice,
    index: usize,
    version: i32,
    driver_path: PathBuf,
) -> Result<GpuProperties> {
    use CUdevice_attribute::*;
    let attribute = |which| Ok(query_attribute(driver, device, which)?.max(0) as u32);
    let mut name = [0 as c_char; 256];
    // SAFETY: writes at most 256 bytes, terminated by a zero.
    unsafe { driver.cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) }?;
    name[name.len() - 1] = 0;
    Ok(GpuProperties {
        // SAFETY: the last byte is a zero.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
        index,
        capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessor_count: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        memory_bytes: query_total_memory(driver, device)?,
        shared_memory_per_block: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        l2_cache_bytes: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        driver_version: split_version(version),
        driver_path,
    })
}

/// Splits a version number that the driver reports into major and minor version: 12090 becomes (12,
/// 9).
fn split_version(version: i32) -> (u32, u32) {
    let version = version.max(0) as u32;
    (version / 1000, version % 1000 / 10)
}

/// Formats a version number that the driver reports: 12090 becomes `12.9`.
fn format_version(version: i32) -> String {
    let (major, minor) = split_version(version);
    format!("{major}.{minor}")
}

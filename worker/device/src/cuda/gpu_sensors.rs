//! Queries a GPU's clocks, temperature and power from NVIDIA's management library NVML
//! ([`GpuSensorReadings`]). Also queries attributes of the GPU from the driver.
use super::backend::Cuda;
use super::bindings::driver_sys::CUdevice_attribute;
use super::error::{CudaError, Result};
use super::properties::query_attribute;
use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void},
    path::Path,
    ptr,
};

/// File name of NVML, NVIDIA's management library, which belongs to the driver.
const NVML_LIBRARY: &str = "libnvidia-ml.so.1";
/// The number by which NVML identifies the clock of a GPU's multiprocessors.
const NVML_CLOCK_SM: c_uint = 1;
/// The number by which NVML identifies the clock of a GPU's memory.
const NVML_CLOCK_MEMORY: c_uint = 2;
/// The number by which NVML identifies a GPU's temperature sensor.
const NVML_TEMPERATURE_GPU: c_uint = 0;
/// Bit and name of each reason that NVML reports for a GPU clock that runs below its maximum.
const THROTTLE_REASONS: [(u64, &str); 9] = [
    (0x1, "idle"),
    (0x2, "application clocks"),
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
    (0x100, "display clocks"),
];

/// Clocks, temperature and power of a GPU at one moment, and why its clocks are below their
/// maximum. Values that NVML does not report are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuSensorReadings {
    /// Clock of the multiprocessors in MHz.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory in MHz.
    pub memory_mhz: Option<u32>,
    /// Temperature in °C.
    pub temperature: Option<u32>,
    /// Power draw in W.
    pub power_watts: Option<f64>,
    /// Why the clocks are lower than they could be.
    pub throttle_reasons: Option<Vec<&'static str>>,
}

/// Why a GPU's clocks, temperature and power cannot be queried.
#[derive(Debug, thiserror::Error)]
pub enum GpuSensorError {
    /// NVML is not installed.
    #[error("{NVML_LIBRARY} was not found")]
    NotFound,
    /// NVML lacks a function.
    #[error(transparent)]
    MissingFunction(#[from] libloading::Error),
    /// A function of NVML failed.
    #[error("{function} failed with status {status}")]
    Call {
        /// Name of the function.
        function: &'static str,
        /// NVML's status code.
        status: i32,
    },
    /// A function of the driver failed.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

/// Type of a function of NVML that queries one number of a GPU, such as its power.
type GetUintFn = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_int;
/// Type of an NVML function that queries one number of a GPU, selected by a constant, such as the
/// clock of the memory.
type GetNumberedUintFn = unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_int;

impl Cuda {
    /// Queries the GPU's clocks, temperature and power from NVML, NVIDIA's management library.
    /// Fails if NVML is not usable.
    pub fn query_sensor_readings(&self) -> std::result::Result<GpuSensorReadings, GpuSensorError> {
        let bus_id = self.query_pci_bus_id()?;
        let next_to_driver = self.properties().driver_path.with_file_name(NVML_LIBRARY);
        [Path::new(NVML_LIBRARY), &next_to_driver]
            .into_iter()
            .find_map(|path| {
                // SAFETY: NVML's initializers have no preconditions.
                unsafe { libloading::Library::new(path) }.ok()
            })
            .ok_or(GpuSensorError::NotFound)
            .and_then(|nvml| query_readings_from_nvml(&nvml, &bus_id))
    }

    /// Returns the address of the GPU on the PCI bus, such as `00000000:0F:00.0`.
    pub fn query_pci_bus_id(&self) -> Result<CString> {
        let mut id = [0 as c_char; 64];
        // SAFETY: writes at most as many bytes as the buffer has, terminated by a zero.
        unsafe { self.gpu.driver.cuDeviceGetPCIBusId(id.as_mut_ptr(), id.len() as c_int, self.gpu.device) }?;
        id[id.len() - 1] = 0;
        // SAFETY: the last byte is a zero.
        Ok(unsafe { CStr::from_ptr(id.as_ptr()) }.to_owned())
    }

    /// Returns the names and values of GPU attributes from the driver, such as clock rates, memory
    /// sizes and supported features. An attribute that the driver does not know is left out.
    pub fn query_attributes(&self) -> Vec<(String, i32)> {
        use CUdevice_attribute::*;
        let attributes = [
            CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
            CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            CU_DEVICE_ATTRIBUTE_ECC_ENABLED,
            CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
            CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS,
            CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
            CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
            CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
        ];
        let query = |attribute| query_attribute(&self.gpu.driver, self.gpu.device, attribute).ok();
        let name = |attribute| {
            format!("{attribute:?}").trim_start_matches("CU_DEVICE_ATTRIBUTE_").to_ascii_lowercase()
        };
        attributes.into_iter().filter_map(|attribute| Some((name(attribute), query(attribute)?))).collect()
    }
}

/// Queries clocks, temperature and power of the GPU with the PCI address `bus_id` from NVML.
fn query_readings_from_nvml(
    nvml: &libloading::Library,
    bus_id: &CStr,
) -> std::result::Result<GpuSensorReadings, GpuSensorError> {
    // SAFETY: the functions have these types in nvml.h, and get valid pointers.
    unsafe {
        let init = nvml.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0")?;
        let shutdown = nvml.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown\0")?;
        let find = nvml.get::<unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int>(
            b"nvmlDeviceGetHandleByPciBusId_v2\0",
        )?;
        let status = init();
        if status != 0 {
            return Err(GpuSensorError::Call { function: "nvmlInit_v2", status });
        }
        let mut device = ptr::null_mut();
        let status = find(bus_id.as_ptr(), &mut device);
        let state = (status == 0).then(|| read_device_readings(nvml, device));
        shutdown();
        state.ok_or(GpuSensorError::Call { function: "nvmlDeviceGetHandleByPciBusId_v2", status })
    }
}

/// Reads clocks, temperature and power of `device`, NVML's handle of a GPU.
///
/// # Safety
///
/// `device` must be a device of the library.
unsafe fn read_device_readings(nvml: &libloading::Library, device: *mut c_void) -> GpuSensorReadings {
    let numbered = |name: &[u8], number| {
        let mut value = 0;
        // SAFETY: the function has this type in nvml.h, and writes one integer.
        let status = unsafe { nvml.get::<GetNumberedUintFn>(name).ok()?(device, number, &mut value) };
        (status == 0).then_some(value)
    };
    let power = || {
        let mut milliwatts = 0;
        // SAFETY: the function has this type in nvml.h, and writes one integer.
        let status =
            unsafe { nvml.get::<GetUintFn>(b"nvmlDeviceGetPowerUsage\0").ok()?(device, &mut milliwatts) };
        (status == 0).then_some(f64::from(milliwatts) / 1e3)
    };
    let reasons = || {
        type GetThrottleReasonsFn = unsafe extern "C" fn(*mut c_void, *mut c_ulonglong) -> c_int;
        let mut bits = 0;
        // SAFETY: the function has this type in nvml.h, and writes one integer.
        let status = unsafe {
            nvml.get::<GetThrottleReasonsFn>(b"nvmlDeviceGetCurrentClocksThrottleReasons\0").ok()?(
                device, &mut bits,
            )
        };
        let reasons = THROTTLE_REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name);
        (status == 0).then(|| reasons.collect())
    };
    GpuSensorReadings {
        sm_mhz: numbered(b"nvmlDeviceGetClockInfo\0", NVML_CLOCK_SM),
        memory_mhz: numbered(b"nvmlDeviceGetClockInfo\0", NVML_CLOCK_MEMORY),
        temperature: numbered(b"nvmlDeviceGetTemperature\0", NVML_TEMPERATURE_GPU),
        power_watts: power(),
        throttle_reasons: reasons(),
    }
}

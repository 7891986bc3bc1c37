//! Queries GPUs through the management library of the NVIDIA driver (NVML), which is loaded at run
//! time. The types and constants in this module have the values of the header nvml.h.
use diagnostic::{Diagnostic, codes::host};
use protocol::{
    control::GpuUsage,
    probe::{GpuReport, GpuStatus},
};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void},
    ptr,
};

/// The file name of NVML, the management library of the NVIDIA driver.
pub(in crate::agent) const NVML_LIBRARY: &str = "libnvidia-ml.so.1";
/// The largest number of GPUs of a host that are queried through NVML, NVIDIA's management library.
/// Further GPUs are missing in the report.
const MAX_QUERIED_GPUS: u32 = 64;
/// The largest number of processes that are read from NVML for one GPU. If more processes use the
/// GPU, the report has no processes of this GPU.
const MAX_PROCESSES: usize = 64;
/// The largest number of NVLinks of a GPU (`NVML_NVLINK_MAX_LINKS`).
const MAX_NVLINKS_PER_GPU: c_uint = 18;
/// The NVML constant (`nvmlMemoryErrorType_t`) for memory errors that ECC could not correct.
const ECC_ERROR_UNCORRECTED: c_int = 1;
/// The NVML constant (`nvmlEccCounterType_t`) that selects the counts of memory errors since the
/// driver was loaded.
const ECC_COUNTER_VOLATILE: c_int = 0;
/// The NVML constant (`nvmlGpuP2PCapsIndex_t`) for the ability to read the memory of another GPU.
const P2P_CAPABILITY_READ: c_int = 0;
/// The NVML constant (`nvmlComputeMode_t`) for GPUs that any number of processes may use.
const COMPUTE_MODE_DEFAULT: c_int = 0;

/// The bits in NVML's throttle reasons (`nvmlClocksThrottleReason…`) that indicate a fault of a
/// GPU, each with a description. Other bits, such as throttling of an idle GPU or at the power
/// limit, are normal.
const THROTTLE_REASONS: [(u64, &str); 4] = [
    (0x08, "hardware slowdown"),
    (0x20, "too hot (software thermal slowdown)"),
    (0x40, "too hot (hardware thermal slowdown)"),
    (0x80, "power brake asserted by the machine"),
];

/// Descriptions of the values 1 to 5 of `nvmlGpuP2PStatus_t`, the reasons why a GPU cannot access
/// the memory of another GPU.
const PEER_ACCESS_FAILURE_REASONS: [&str; 5] = [
    "not supported by the chipset",
    "not supported by the GPU",
    "the GPUs are too far apart on the PCI bus",
    "disabled by a registry key",
    "not supported",
];

/// An error of loading NVML, NVIDIA's management library, or of calling its functions.
#[derive(Debug, thiserror::Error)]
pub(in crate::agent) enum NvmlError {
    /// The library with this file name is missing or cannot be loaded.
    #[error("the library {0} is missing or cannot be loaded")]
    Library(String),
    /// The library has no function with this name.
    #[error("the library has no function {0}")]
    Function(String),
    /// An NVML function returned this error code (`nvmlReturn_t`).
    #[error("the NVIDIA driver reported NVML error {0}")]
    Code(c_int),
}

impl From<NvmlError> for Diagnostic {
    fn from(error: NvmlError) -> Self {
        let diagnostic = Diagnostic::error(host::GPU_DRIVER_UNUSABLE, error.to_string());
        match error {
            NvmlError::Library(name) => diagnostic.with_subject(name),
            NvmlError::Function(name) => diagnostic.with_subject(name),
            NvmlError::Code(code) => diagnostic.with_field("nvml_code", code),
        }
    }
}

/// The handle of a shared library, such as NVML, that this process has loaded at run time. The
/// library is never unloaded.
pub(super) struct SharedLibrary(*mut c_void);

impl SharedLibrary {
    /// Loads the shared library that the dynamic loader finds under the file name `name`. Fails if
    /// there is no such library.
    pub(super) fn open(name: &str) -> Result<SharedLibrary, NvmlError> {
        let text = CString::new(name).map_err(|_| NvmlError::Library(name.to_owned()))?;
        // SAFETY: the name is a C string; the initializers of the libraries that are loaded here
        // are harmless.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err(NvmlError::Library(name.to_owned())) } else { Ok(SharedLibrary(handle)) }
    }

    /// Returns a pointer to the function `name` of the loaded shared library. Fails if the library
    /// does not have the function.
    ///
    /// # Safety
    ///
    /// `F` must be the function pointer type that the vendor's header declares for the function.
    pub(super) unsafe fn load_function<F: Copy>(&self, name: &CStr) -> Result<F, NvmlError> {
        // SAFETY: the handle belongs to a loaded library, and the name is a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() || size_of::<F>() != size_of::<*mut c_void>() {
            return Err(NvmlError::Function(name.to_string_lossy().into_owned()));
        }
        // SAFETY: the caller guarantees the type, and a function pointer has the size of the
        // address.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}

/// The handle by which NVML identifies a GPU (`nvmlDevice_t`).
type DeviceHandle = *mut c_void;

/// The sizes of a GPU's total, free and used memory in bytes, in the layout in which NVML returns
/// them (`nvmlMemory_t`).
#[repr(C)]
#[derive(Default)]
struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// The pid and the used GPU memory of a process that uses a GPU, in the memory layout of NVML's
/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct NvmlProcess {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// The PCI address of a GPU, in the layout in which NVML returns it (`nvmlPciInfo_t`).
#[repr(C)]
#[derive(Default)]
struct NvmlPciInfo {
    legacy: [u8; 16],
    numbers: [c_uint; 5],
    bus: [u8; 32],
}

/// The loaded and initialized management library of the NVIDIA driver (NVML), through which GPUs
/// are queried. Dropping the value shuts NVML down.
pub(in crate::agent) struct Nvml(SharedLibrary);

/// Calls the NVML function with the given name and arguments, and converts its return code to a
/// `Result`. Each argument is written as `value => type`. Evaluates to an error if the function is
/// missing or returns an error code.
///
/// # Safety
///
/// The types must be the parameter types in nvml.h. Each pointer must be valid for the writes of
/// the function.
macro_rules! call_nvml {
    ($nvml:expr, $name:literal, $($value:expr => $type:ty),*) => {
        $nvml.0.load_function::<unsafe extern "C" fn($($type),*) -> c_int>($name).and_then(|f| check_return_code(f($($value),*)))
    };
}

impl Nvml {
    /// Loads and initializes the NVML library with the file name `name`.
    pub(in crate::agent) fn open(name: &str) -> Result<Nvml, NvmlError> {
        let nvml = Nvml(SharedLibrary::open(name)?);
        // SAFETY: the function has this type in nvml.h.
        let code = unsafe { nvml.0.load_function::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2")?() };
        if code == 0 { Ok(nvml) } else { Err(NvmlError::Code(code)) }
    }

    /// Queries the driver version and the status of all GPUs of this host through NVML, and stores
    /// the results in `report`. If the number of GPUs cannot be read, stores the error in `report`.
    /// Omits GPUs whose status cannot be read.
    pub(super) fn fill_report(&self, report: &mut GpuReport) {
        report.driver = self.query_driver_version().ok();
        match self.query_device_count() {
            Ok(count) => {
                let devices: Vec<_> = (0..count.min(MAX_QUERIED_GPUS))
                    .filter_map(|i| self.query_device_handle(i).ok())
                    .collect();
                report.gpus = devices.iter().filter_map(|d| self.query_gpu(*d, &devices).ok()).collect();
            }
            Err(error) => report.error = Some(error.into()),
        }
    }

    /// Queries the version of the NVIDIA driver.
    fn query_driver_version(&self) -> Result<String, NvmlError> {
        let mut text = [0u8; 96];
        // SAFETY: nvml.h's types; the buffer has the given length.
        unsafe {
            call_nvml!(self, c"nvmlSystemGetDriverVersion", text.as_mut_ptr().cast() => *mut c_char, 96 => c_uint)?;
        }
        Ok(decode_c_text(&text))
    }

    /// Queries the number of GPUs of this host.
    fn query_device_count(&self) -> Result<u32, NvmlError> {
        let mut count = 0;
        // SAFETY: nvml.h's types.
        unsafe { call_nvml!(self, c"nvmlDeviceGetCount_v2", &mut count => *mut c_uint)? };
        Ok(count)
    }

    /// Queries the handle of the GPU with the index `index`.
    fn query_device_handle(&self, index: u32) -> Result<DeviceHandle, NvmlError> {
        let mut device: DeviceHandle = ptr::null_mut();
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetHandleByIndex_v2", index => c_uint, &mut device => *mut DeviceHandle)?;
        }
        Ok(device)
    }

    /// Queries the status of the GPU `device`, and which of the other GPUs in `devices` it can
    /// access directly (peer to peer).
    ///
    /// Fails if the name or the memory size cannot be read. Leaves other values empty that the GPU
    /// does not report.
    fn query_gpu(&self, device: DeviceHandle, devices: &[DeviceHandle]) -> Result<GpuStatus, NvmlError> {
        let (mut name, memory) = ([0u8; 96], self.query_memory(device)?);
        // SAFETY: nvml.h's types; the buffer has the given length.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetName", device => DeviceHandle, name.as_mut_ptr().cast() => *mut c_char, 96 => c_uint)?;
        }
        Ok(GpuStatus {
            name: decode_c_text(&name),
            pci_address: self.query_pci_bus_id(device).unwrap_or_default(),
            memory: memory.total,
            memory_free: memory.free,
            processes: self.query_processes(device).unwrap_or_default(),
            uncorrected_ecc_errors: self.query_ecc_errors(device).ok(),
            remapped_rows: self.query_remapped_rows(device).unwrap_or_default(),
            throttle_reasons: self.query_throttle_reasons(device).unwrap_or_default(),
            exclusive_compute: self
                .call_integer_query(device, c"nvmlDeviceGetComputeMode")
                .is_ok_and(|mode| mode != COMPUTE_MODE_DEFAULT),
            mig_enabled: self.query_mig_enabled(device).unwrap_or_default(),
            nvlinks: (0..MAX_NVLINKS_PER_GPU)
                .filter(|link| self.query_link_is_up(device, *link).unwrap_or_default())
                .count() as u32,
            no_peer_access: self.query_missing_peer_access(device, devices),
        })
    }

    /// Queries the total, free and used memory of a GPU.
    fn query_memory(&self, device: DeviceHandle) -> Result<NvmlMemory, NvmlError> {
        let mut memory = NvmlMemory::default();
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetMemoryInfo", device => DeviceHandle, &mut memory => *mut NvmlMemory)?;
        }
        Ok(memory)
    }

    /// Queries the PCI address of a GPU, such as `00000000:17:00.0`.
    fn query_pci_bus_id(&self, device: DeviceHandle) -> Result<String, NvmlError> {
        let mut pci = NvmlPciInfo::default();
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetPciInfo_v3", device => DeviceHandle, &mut pci => *mut NvmlPciInfo)?
        };
        Ok(decode_c_text(&pci.bus))
    }

    /// Returns the pid and the used GPU memory in bytes of each process that computes on the GPU
    /// `device`. Fails if there are more than [`MAX_PROCESSES`].
    fn query_processes(&self, device: DeviceHandle) -> Result<Vec<(u32, u64)>, NvmlError> {
        let mut list = [NvmlProcess::default(); MAX_PROCESSES];
        let mut count = MAX_PROCESSES as c_uint;
        // SAFETY: nvml.h's types; at most `count` entries are written.
        unsafe {
            call_nvml!(
                self,
                c"nvmlDeviceGetComputeRunningProcesses_v3",
                device => DeviceHandle,
                &mut count => *mut c_uint,
                list.as_mut_ptr() => *mut NvmlProcess
            )?;
        }
        Ok(list.iter().take(count as usize).map(|p| (p.pid, p.used)).collect())
    }

    /// Returns the number of memory errors of a GPU that ECC could not correct since the driver was
    /// loaded.
    fn query_ecc_errors(&self, device: DeviceHandle) -> Result<u64, NvmlError> {
        let mut errors = 0;
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(
                self,
                c"nvmlDeviceGetTotalEccErrors",
                device => DeviceHandle,
                ECC_ERROR_UNCORRECTED => c_int,
                ECC_COUNTER_VOLATILE => c_int,
                &mut errors => *mut c_ulonglong
            )?;
        }
        Ok(errors)
    }

    /// Returns whether the GPU will replace defective memory rows at its next reset (row
    /// remapping), and whether such a replacement has failed.
    fn query_remapped_rows(&self, device: DeviceHandle) -> Result<(bool, bool), NvmlError> {
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(
                self,
                c"nvmlDeviceGetRemappedRows",
                device => DeviceHandle,
                &mut corrected => *mut c_uint,
                &mut uncorrected => *mut c_uint,
                &mut pending => *mut c_uint,
                &mut failed => *mut c_uint
            )?;
        }
        Ok((pending != 0, failed != 0))
    }

    /// Returns descriptions of the hardware faults that currently throttle the clocks of a GPU.
    fn query_throttle_reasons(&self, device: DeviceHandle) -> Result<Vec<String>, NvmlError> {
        let mut reasons = 0;
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetCurrentClocksThrottleReasons", device => DeviceHandle, &mut reasons => *mut c_ulonglong)?;
        }
        Ok(THROTTLE_REASONS
            .iter()
            .filter(|(bit, _)| reasons & bit != 0)
            .map(|(_, why)| (*why).to_owned())
            .collect())
    }

    /// Queries the current utilization, memory use and faults of each GPU of this host. Values that
    /// a GPU does not support are `None`.
    pub(in crate::agent) fn query_usage(&self) -> Vec<GpuUsage> {
        let count = self.query_device_count().unwrap_or(0).min(MAX_QUERIED_GPUS);
        let query = |gpu: u32| {
            let device = self.query_device_handle(gpu).ok()?;
            let memory = self.query_memory(device).ok();
            Some(GpuUsage {
                gpu,
                busy_share: self.query_busy_percent(device).ok().map(|percent| f64::from(percent) / 100.0),
                memory_used: memory.as_ref().map(|memory| memory.used),
                memory_total: memory.as_ref().map(|memory| memory.total),
                clock_reasons: self.query_throttle_reasons(device).unwrap_or_default(),
                memory_errors: self.query_ecc_errors(device).ok(),
            })
        };
        (0..count).filter_map(query).collect()
    }

    /// Queries in how many percent of the driver's latest sampling period the GPU executed kernels.
    fn query_busy_percent(&self, device: DeviceHandle) -> Result<c_uint, NvmlError> {
        // nvmlUtilization_t: the shares of the time for the GPU and for its memory, in percent.
        let mut shares = [0; 2];
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetUtilizationRates", device => DeviceHandle, &mut shares => *mut [c_uint; 2])?;
        }
        Ok(shares[0].min(100))
    }

    /// Calls the NVML function `name`, which returns one integer about a GPU, for the GPU `device`.
    /// The function must have exactly two parameters: the GPU and a pointer to the `int` result.
    fn call_integer_query(&self, device: DeviceHandle, name: &CStr) -> Result<c_int, NvmlError> {
        type IntQuery = unsafe extern "C" fn(DeviceHandle, *mut c_int) -> c_int;
        let mut number = 0;
        // SAFETY: the functions that are called here have this type in nvml.h.
        unsafe { check_return_code(self.0.load_function::<IntQuery>(name)?(device, &mut number))? };
        Ok(number)
    }

    /// Queries whether a GPU is divided into MIG instances.
    fn query_mig_enabled(&self, device: DeviceHandle) -> Result<bool, NvmlError> {
        let (mut current, mut pending) = (0, 0);
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetMigMode", device => DeviceHandle, &mut current => *mut c_uint, &mut pending => *mut c_uint)?;
        }
        Ok(current != 0)
    }

    /// Queries whether the NVLink with the index `link` of a GPU works.
    fn query_link_is_up(&self, device: DeviceHandle, link: c_uint) -> Result<bool, NvmlError> {
        let mut up = 0;
        // SAFETY: nvml.h's types.
        unsafe {
            call_nvml!(self, c"nvmlDeviceGetNvLinkState", device => DeviceHandle, link => c_uint, &mut up => *mut c_int)?;
        }
        Ok(up != 0)
    }

    /// Returns the indices of those GPUs whose memory the GPU `device` cannot access directly (peer
    /// to peer), each with the reason.
    fn query_missing_peer_access(
        &self,
        device: DeviceHandle,
        devices: &[DeviceHandle],
    ) -> Vec<(u32, String)> {
        let others = (0..).zip(devices).filter(|(_, other)| **other != device);
        let missing_access = |(index, other): (u32, &DeviceHandle)| {
            let mut status = 0;
            // SAFETY: nvml.h's types.
            let result = unsafe {
                call_nvml!(
                    self,
                    c"nvmlDeviceGetP2PStatus",
                    device => DeviceHandle,
                    *other => DeviceHandle,
                    P2P_CAPABILITY_READ => c_int,
                    &mut status => *mut c_int
                )
            };
            let why = PEER_ACCESS_FAILURE_REASONS
                .get((status as usize).checked_sub(1)?)
                .copied()
                .unwrap_or("for an unknown reason");
            result.is_ok().then(|| (index, why.to_owned()))
        };
        others.filter_map(missing_access).collect()
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: nvml.h's type; the library was initialized.
        unsafe {
            if let Ok(shutdown) = self.0.load_function::<unsafe extern "C" fn() -> c_int>(c"nvmlShutdown") {
                shutdown();
            }
        }
    }
}

/// Returns `Ok` if an NVML function returned 0 (`nvmlReturn_t`), and an error with the code
/// otherwise.
fn check_return_code(code: c_int) -> Result<(), NvmlError> {
    if code == 0 { Ok(()) } else { Err(NvmlError::Code(code)) }
}

/// Decodes the zero-terminated UTF-8 text in a buffer that NVML has filled. Replaces invalid UTF-8.
fn decode_c_text(text: &[u8]) -> String {
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{path::Path, process::Command};

    /// The C source of a fake NVML with three GPUs. The second GPU is faulty, and the third one is
    /// an old model that does not support all queries.
    const FAKE_NVML_SOURCE: &str = r#"
        #include <stdint.h>
        #include <stdio.h>
        #include <string.h>
        typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } pci;
        typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
        #define GPU(handle) ((uintptr_t)(handle) - 100)
        #define OLD(handle) if (GPU(handle) == 2) return 3
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlSystemGetDriverVersion(char *text, unsigned len) { return snprintf(text, len, "580.1") < 0; }
        int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(uintptr_t)(index + 100); return 0; }
        int nvmlDeviceGetName(void *gpu, char *text, unsigned len) { return snprintf(text, len, "gpu %d", (int)GPU(gpu)) < 0; }
        int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *m) { m[0] = 80; m[1] = 50; m[2] = 30; return 0; }
        int nvmlDeviceGetPciInfo_v3(void *gpu, pci *p) { memset(p, 7, sizeof *p); strcpy(p->text, "00000000:17:00.0"); return 0; }
        int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, process *list) {
            if (*count < 1) return 7;
            *count = GPU(gpu) == 1;
            if (*count) list[0] = (process){4242, 30, 0, 0};
            return 0;
        }
        int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *n) {
            OLD(gpu);
            *n = kind == 1 && counter == 0 && GPU(gpu) == 1 ? 5 : 0;
            return 0;
        }
        int nvmlDeviceGetRemappedRows(void *gpu, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed) {
            OLD(gpu);
            *a = *b = 9; *pending = GPU(gpu) == 1; *failed = 0;
            return 0;
        }
        int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *why) { *why = GPU(gpu) == 1 ? 0x45 : 0x1; return 0; }
        int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *shares) { OLD(gpu); shares[0] = 75; shares[1] = 20; return 0; }
        int nvmlDeviceGetComputeMode(void *gpu, int *mode) { *mode = GPU(gpu) == 1 ? 3 : 0; return 0; }
        int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *up) { OLD(gpu); if (link > 11) return 2; *up = link < 4; return 0; }
        int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) { *status = GPU(a) + GPU(b) == 3 && what == 0 ? 3 : 0; return 0; }
    "#;

    /// Compiles the fake NVML in [`FAKE_NVML_SOURCE`] to a library in a directory, and returns the
    /// path of the library.
    fn compile_fake_nvml(dir: &Path) -> String {
        let (source, library) = (dir.join("nvml.c"), dir.join("libnvml.so"));
        std::fs::write(&source, FAKE_NVML_SOURCE).expect("file");
        let compiled =
            Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(compiled.expect("cc").success());
        library.to_str().expect("a path").to_owned()
    }

    #[test]
    fn the_state_of_gpus_is_read_from_the_driver() {
        let dir = tempfile::tempdir().expect("directory");
        let mut report = GpuReport::default();
        Nvml::open(&compile_fake_nvml(dir.path())).expect("opens").fill_report(&mut report);
        assert_eq!((report.driver.as_deref(), report.error), (Some("580.1"), None));
        let healthy = GpuStatus {
            name: "gpu 0".into(),
            pci_address: "00000000:17:00.0".into(),
            memory: 80,
            memory_free: 50,
            uncorrected_ecc_errors: Some(0),
            nvlinks: 4,
            ..GpuStatus::default()
        };
        let faulty = GpuStatus {
            name: "gpu 1".into(),
            processes: vec![(4242, 30)],
            uncorrected_ecc_errors: Some(5),
            remapped_rows: (true, false),
            throttle_reasons: vec!["too hot (hardware thermal slowdown)".into()],
            exclusive_compute: true,
            no_peer_access: vec![(2, "the GPUs are too far apart on the PCI bus".into())],
            ..healthy.clone()
        };
        let unreachable = vec![(1, "the GPUs are too far apart on the PCI bus".into())];
        let old = GpuStatus {
            name: "gpu 2".into(),
            uncorrected_ecc_errors: None,
            nvlinks: 0,
            no_peer_access: unreachable,
            ..healthy.clone()
        };
        assert_eq!(report.gpus, [healthy, faulty, old]);
        let usage = Nvml::open(&compile_fake_nvml(dir.path())).expect("opens").query_usage();
        let healthy = GpuUsage {
            gpu: 0,
            busy_share: Some(0.75),
            memory_used: Some(30),
            memory_total: Some(80),
            clock_reasons: Vec::new(),
            memory_errors: Some(0),
        };
        let faulty = GpuUsage {
            gpu: 1,
            clock_reasons: vec!["too hot (hardware thermal slowdown)".into()],
            memory_errors: Some(5),
            ..healthy.clone()
        };
        let old = GpuUsage { gpu: 2, busy_share: None, memory_errors: None, ..healthy.clone() };
        assert_eq!(usage, [healthy, faulty, old]);
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = Nvml::open("libnone-such.so.7").err().expect("missing");
        assert!(matches!(error, NvmlError::Library(name) if name == "libnone-such.so.7"));
    }
}

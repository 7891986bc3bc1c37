//! Inspects the NVIDIA GPUs and the NCCL library of this host for `launch check`. The libraries are
//! loaded at run time, not linked.
use super::nvml::{NVML_LIBRARY, Nvml, SharedLibrary};
use protocol::probe::GpuReport;
use std::{ffi::c_int, fs};

/// Inspects the GPUs, their driver and the NCCL library of this host. Leaves values empty that are
/// not available.
pub(super) fn inspect_gpus() -> GpuReport {
    let devices = count_device_nodes();
    let mut report = GpuReport { devices, nccl: find_nccl(), ..GpuReport::default() };
    match Nvml::open(NVML_LIBRARY) {
        Ok(nvml) => nvml.fill_report(&mut report),
        Err(error) if devices > 0 => report.error = Some(error.into()),
        Err(_) => {}
    }
    report
}

/// Counts the device files of NVIDIA GPUs (`/dev/nvidia0`, `/dev/nvidia1`, …), without using the
/// driver's library.
fn count_device_nodes() -> u32 {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten();
    let is_device = |name: &str| {
        name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    names.filter(|e| e.file_name().to_str().is_some_and(is_device)).count() as u32
}

/// Loads the NCCL library and returns the path and the version of the library. Returns `None` if
/// the dynamic loader does not find the library or the version cannot be read.
fn find_nccl() -> Option<(String, String)> {
    let library = SharedLibrary::open("libnccl.so.2").ok()?;
    let mut code = 0;
    // SAFETY: the function has this type in nccl.h.
    let result = unsafe {
        library.load_function::<unsafe extern "C" fn(*mut c_int) -> c_int>(c"ncclGetVersion").ok()?(&mut code)
    };
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..])).find(|p| p.contains("libnccl.so"));
    // nccl.h, NCCL_VERSION: from 2.9 on the code is 10000 * major + 100 * minor + patch.
    let version = format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100);
    (result == 0).then(|| (path.unwrap_or("libnccl.so.2").to_owned(), version))
}

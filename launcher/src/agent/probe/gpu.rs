//! Inspects NVIDIA GPUs and NCCL. The libraries are loaded at run time, not linked.
use super::nvml::{Library, Nvml};
use contract::probe::GpuReport;
use std::{ffi::c_int, fs};

/// The driver's management library.
const NVML: &str = "libnvidia-ml.so.1";

/// Inspects the GPUs of this host. Values that are not available stay empty.
pub(super) fn inspect_gpus() -> GpuReport {
    let devices = device_nodes();
    let mut report = GpuReport { devices, nccl: find_nccl(), ..GpuReport::default() };
    match Nvml::open(NVML) {
        Ok(nvml) => nvml.fill_report(&mut report),
        Err(error) if devices > 0 => report.error = Some(error.into()),
        Err(_) => {}
    }
    report
}

/// The number of device nodes `/dev/nvidia0`, `/dev/nvidia1`, …
fn device_nodes() -> u32 {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten();
    let is_device = |name: &str| {
        name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    names.filter(|e| e.file_name().to_str().is_some_and(is_device)).count() as u32
}

/// The path and the version of NCCL, if the dynamic loader finds it.
fn find_nccl() -> Option<(String, String)> {
    let library = Library::open("libnccl.so.2").ok()?;
    let mut code = 0;
    // SAFETY: the type is nccl.h's.
    let result = unsafe {
        library.function::<unsafe extern "C" fn(*mut c_int) -> c_int>(c"ncclGetVersion").ok()?(&mut code)
    };
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..])).find(|p| p.contains("libnccl.so"));
    // nccl.h, NCCL_VERSION: from 2.9 on the code is 10000 * major + 100 * minor + patch.
    let version = format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100);
    (result == 0).then(|| (path.unwrap_or("libnccl.so.2").to_owned(), version))
}

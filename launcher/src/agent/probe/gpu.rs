//! NVIDIA GPUs and what they need. Nothing is linked: the libraries are looked for.
use super::nvml::{Library, Nvml};
use contract::probe::GpuLook;
use std::{ffi::c_int, fs};

/// The driver's management library.
const NVML: &str = "libnvidia-ml.so.1";

/// What can be found out.
pub(super) fn look() -> GpuLook {
    let devices = device_nodes();
    let mut found = GpuLook { devices, nccl: nccl(), ..GpuLook::default() };
    match Nvml::open(NVML) {
        Ok(nvml) => nvml.ask(&mut found),
        Err(why) if devices > 0 => found.trouble = Some(why),
        Err(_) => {}
    }
    found
}

/// `/dev/nvidia0`, `/dev/nvidia1`, …
fn device_nodes() -> u32 {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten();
    let number = |name: &str| {
        name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    names.filter(|e| e.file_name().to_str().is_some_and(number)).count() as u32
}

/// NCCL where the dynamic loader finds it, with its version.
fn nccl() -> Option<(String, String)> {
    let library = Library::open("libnccl.so.2").ok()?;
    let mut code = 0;
    // SAFETY: the type is nccl.h's.
    let result = unsafe {
        library.function::<unsafe extern "C" fn(*mut c_int) -> c_int>(c"ncclGetVersion").ok()?(&mut code)
    };
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..])).find(|p| p.contains("libnccl.so"));
    // nccl.h: NCCL_VERSION: 2.9 and later are coded as 10000 a + 100 b + c
    let version = format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100);
    (result == 0).then(|| (path.unwrap_or("libnccl.so.2").to_owned(), version))
}

//! Loads the emulator of AMX: a shared library that executes AMX instructions on machines that lack
//! them. A whole job runs with it if `LD_PRELOAD` names the library.
mod library;

pub(crate) use library::ERROR_VARIABLE;
use std::{fs, sync::OnceLock};

/// Returns true if this machine has AMX for bf16.
pub(crate) fn machine_has_amx() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    flags.split(' ').any(|flag| flag == "amx_bf16")
}

/// Ensures that the CPU backend can use AMX in this process: loads the emulator if this machine has
/// no AMX. Returns false if the CPU lacks AVX-512, without which AMX is never used.
pub(crate) fn provide_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has_avx512 = std::is_x86_feature_detected!("avx512bw") && std::is_x86_feature_detected!("avx512vl");
    #[cfg(not(target_arch = "x86_64"))]
    let has_avx512 = false;
    if has_avx512 && !machine_has_amx() {
        load();
    }
    if !has_avx512 {
        eprintln!("skipped: AMX needs a CPU with AVX-512");
    }
    has_avx512
}

/// Loads the emulator into this process. On a machine with AMX, it stays unused as soon as the
/// kernel has permitted AMX to this process.
pub(crate) fn load() {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    static LOADED: OnceLock<Library> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: the library's initialisation installs a signal handler, and nothing else.
        unsafe { Library::open(Some(library::library()), RTLD_NOW | RTLD_GLOBAL) }
            .expect("the emulator can be loaded")
    });
}

/// Returns how many products of tiles the emulator has computed in this process. The emulator must
/// be loaded.
pub(crate) fn count_products() -> u64 {
    let this_process = libloading::os::unix::Library::this();
    // SAFETY: the library declares the function with this type.
    unsafe {
        let count = this_process.get::<unsafe extern "C" fn() -> u64>(b"launch_emulated_amx_products\0");
        count.expect("the emulator is loaded")()
    }
}

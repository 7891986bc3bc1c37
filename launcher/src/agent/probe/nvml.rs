//! The NVIDIA driver's management library, loaded when it is asked. Types and numbers are nvml.h's.
use contract::probe::{Gpu, GpuLook};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void},
    ptr,
};

/// Most GPUs of a node.
const MAX_GPUS: u32 = 64;
/// Most processes of a GPU that are told.
const MAX_PROCESSES: usize = 64;
/// `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: c_uint = 18;
/// `nvmlMemoryErrorType_t`: those that couldn't be corrected.
const UNCORRECTED: c_int = 1;
/// `nvmlEccCounterType_t`: since the driver was loaded.
const VOLATILE: c_int = 0;
/// `nvmlGpuP2PCapsIndex_t`: reads of another one's memory.
const P2P_READ: c_int = 0;
/// `nvmlComputeMode_t`: any number of processes.
const SHARED: c_int = 0;

/// `nvmlClocksThrottleReason…`: those that tell of a machine that isn't well. A GPU that is idle, or works at its limit of power, is.
const SLOWED: [(u64, &str); 4] = [
    (0x08, "hardware slowdown"),
    (0x20, "too hot (software)"),
    (0x40, "too hot (hardware)"),
    (0x80, "power brake of the machine"),
];

/// `nvmlGpuP2PStatus_t`, from 1 on.
const UNREACHABLE: [&str; 5] =
    ["the chipset can't", "the GPU can't", "they are too far apart", "it is switched off", "not supported"];

/// A shared library; stays loaded.
pub(super) struct Library(*mut c_void);

impl Library {
    pub(super) fn open(name: &str) -> Result<Library, String> {
        let text = CString::new(name).map_err(|e| e.to_string())?;
        // SAFETY: the name is a C string; the libraries that are asked for have no initialisers that hurt.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            Err(format!("{name} is not there or can't be loaded"))
        } else {
            Ok(Library(handle))
        }
    }

    /// # Safety
    /// `F` is the type of the function of this name, by its vendor's header.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        // SAFETY: the handle is a library's, the name a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() || size_of::<F>() != size_of::<*mut c_void>() {
            return Err(format!("{} is missing in the library", name.to_string_lossy()));
        }
        // SAFETY: the caller vouches for the type; a function pointer is as large as the address.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}

type Device = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` (versions 2 and 3 of the functions).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Default)]
struct Pci {
    legacy: [u8; 16],
    numbers: [c_uint; 5],
    bus: [u8; 32],
}

/// The library, initialised.
pub(super) struct Nvml(Library);

/// Calls a function of the library by its name: `$nvml.0` has it, `$of` are the types of its parameters, and it returns a code.
/// To be used where the types are nvml.h's and each pointer leads to as much as the function writes.
macro_rules! call {
    ($nvml:expr, $name:literal, $($value:expr => $of:ty),*) => {
        $nvml.0.function::<unsafe extern "C" fn($($of),*) -> c_int>($name).and_then(|f| done(f($($value),*)))
    };
}

impl Nvml {
    pub(super) fn open(name: &str) -> Result<Nvml, String> {
        let nvml = Nvml(Library::open(name)?);
        // SAFETY: nvml.h's type.
        let code = unsafe { nvml.0.function::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2")?() };
        if code == 0 {
            Ok(nvml)
        } else {
            Err(format!("the NVIDIA driver does not answer (NVML error {code})"))
        }
    }

    pub(super) fn ask(&self, found: &mut GpuLook) {
        found.driver = self.driver().ok();
        match self.count() {
            Ok(count) => {
                let devices: Vec<_> = (0..count.min(MAX_GPUS)).filter_map(|i| self.device(i).ok()).collect();
                found.gpus = devices.iter().filter_map(|d| self.gpu(*d, &devices).ok()).collect();
            }
            Err(why) => found.trouble = Some(why),
        }
    }

    fn driver(&self) -> Result<String, String> {
        let mut text = [0u8; 96];
        // SAFETY: nvml.h's types; the buffer is as long as is said.
        unsafe {
            call!(self, c"nvmlSystemGetDriverVersion", text.as_mut_ptr().cast() => *mut c_char, 96 => c_uint)?;
        }
        Ok(until_nul(&text))
    }

    fn count(&self) -> Result<u32, String> {
        let mut count = 0;
        // SAFETY: nvml.h's types.
        unsafe { call!(self, c"nvmlDeviceGetCount_v2", &mut count => *mut c_uint)? };
        Ok(count)
    }

    fn device(&self, index: u32) -> Result<Device, String> {
        let mut device: Device = ptr::null_mut();
        // SAFETY: nvml.h's types.
        unsafe {
            call!(self, c"nvmlDeviceGetHandleByIndex_v2", index => c_uint, &mut device => *mut Device)?;
        }
        Ok(device)
    }

    /// Without a name and memory it isn't one that can be used; what else can't be asked stays empty: not every GPU has it.
    fn gpu(&self, device: Device, all: &[Device]) -> Result<Gpu, String> {
        let (mut name, mut memory) = ([0u8; 96], Memory::default());
        // SAFETY: nvml.h's types; the buffer is as long as is said.
        unsafe {
            call!(self, c"nvmlDeviceGetName", device => Device, name.as_mut_ptr().cast() => *mut c_char, 96 => c_uint)?;
            call!(self, c"nvmlDeviceGetMemoryInfo", device => Device, &mut memory => *mut Memory)?;
        }
        Ok(Gpu {
            name: until_nul(&name),
            bus: self.bus(device).unwrap_or_default(),
            memory: memory.total,
            memory_free: memory.free,
            processes: self.processes(device).unwrap_or_default(),
            ecc_errors: self.ecc_errors(device).ok(),
            rows: self.rows(device).unwrap_or_default(),
            slowed: self.slowed(device).unwrap_or_default(),
            exclusive: self.number(device, c"nvmlDeviceGetComputeMode").is_ok_and(|mode| mode != SHARED),
            instances: self.instances(device).unwrap_or_default(),
            nvlinks: (0..MAX_LINKS).filter(|link| self.link_is_up(device, *link).unwrap_or_default()).count()
                as u32,
            unreachable: self.unreachable(device, all),
        })
    }

    fn bus(&self, device: Device) -> Result<String, String> {
        let mut pci = Pci::default();
        // SAFETY: nvml.h's types.
        unsafe { call!(self, c"nvmlDeviceGetPciInfo_v3", device => Device, &mut pci => *mut Pci)? };
        Ok(until_nul(&pci.bus))
    }

    fn processes(&self, device: Device) -> Result<Vec<(u32, u64)>, String> {
        let mut list = [Process::default(); MAX_PROCESSES];
        let mut count = MAX_PROCESSES as c_uint;
        // SAFETY: nvml.h's types; at most `count` entries are written.
        unsafe {
            call!(
                self,
                c"nvmlDeviceGetComputeRunningProcesses_v3",
                device => Device,
                &mut count => *mut c_uint,
                list.as_mut_ptr() => *mut Process
            )?;
        }
        Ok(list.iter().take(count as usize).map(|p| (p.pid, p.used)).collect())
    }

    fn ecc_errors(&self, device: Device) -> Result<u64, String> {
        let mut errors = 0;
        // SAFETY: nvml.h's types.
        unsafe {
            call!(
                self,
                c"nvmlDeviceGetTotalEccErrors",
                device => Device,
                UNCORRECTED => c_int,
                VOLATILE => c_int,
                &mut errors => *mut c_ulonglong
            )?;
        }
        Ok(errors)
    }

    /// Bad rows of memory: replaced at the next reset, couldn't be replaced.
    fn rows(&self, device: Device) -> Result<(bool, bool), String> {
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: nvml.h's types.
        unsafe {
            call!(
                self,
                c"nvmlDeviceGetRemappedRows",
                device => Device,
                &mut corrected => *mut c_uint,
                &mut uncorrected => *mut c_uint,
                &mut pending => *mut c_uint,
                &mut failed => *mut c_uint
            )?;
        }
        Ok((pending != 0, failed != 0))
    }

    fn slowed(&self, device: Device) -> Result<Vec<String>, String> {
        let mut reasons = 0;
        // SAFETY: nvml.h's types.
        unsafe {
            call!(self, c"nvmlDeviceGetCurrentClocksThrottleReasons", device => Device, &mut reasons => *mut c_ulonglong)?;
        }
        Ok(SLOWED.iter().filter(|(bit, _)| reasons & bit != 0).map(|(_, why)| (*why).to_owned()).collect())
    }

    /// A function that tells one number of a GPU.
    fn number(&self, device: Device, name: &CStr) -> Result<c_int, String> {
        type Number = unsafe extern "C" fn(Device, *mut c_int) -> c_int;
        let mut number = 0;
        // SAFETY: nvml.h's type of the functions that are asked for here.
        unsafe { done(self.0.function::<Number>(name)?(device, &mut number))? };
        Ok(number)
    }

    fn instances(&self, device: Device) -> Result<bool, String> {
        let (mut now, mut pending) = (0, 0);
        // SAFETY: nvml.h's types.
        unsafe {
            call!(self, c"nvmlDeviceGetMigMode", device => Device, &mut now => *mut c_uint, &mut pending => *mut c_uint)?;
        }
        Ok(now != 0)
    }

    fn link_is_up(&self, device: Device, link: c_uint) -> Result<bool, String> {
        let mut up = 0;
        // SAFETY: nvml.h's types.
        unsafe {
            call!(self, c"nvmlDeviceGetNvLinkState", device => Device, link => c_uint, &mut up => *mut c_int)?;
        }
        Ok(up != 0)
    }

    fn unreachable(&self, device: Device, all: &[Device]) -> Vec<(u32, String)> {
        let others = (0..).zip(all).filter(|(_, other)| **other != device);
        let trouble = |(index, other): (u32, &Device)| {
            let mut status = 0;
            // SAFETY: nvml.h's types.
            let asked = unsafe {
                call!(
                    self,
                    c"nvmlDeviceGetP2PStatus",
                    device => Device,
                    *other => Device,
                    P2P_READ => c_int,
                    &mut status => *mut c_int
                )
            };
            let why = UNREACHABLE.get((status as usize).checked_sub(1)?).copied().unwrap_or("unknown why");
            asked.is_ok().then(|| (index, why.to_owned()))
        };
        others.filter_map(trouble).collect()
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: nvml.h's type; it was initialised.
        unsafe {
            if let Ok(shutdown) = self.0.function::<unsafe extern "C" fn() -> c_int>(c"nvmlShutdown") {
                shutdown();
            }
        }
    }
}

fn done(code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("NVML error {code}")) }
}

fn until_nul(text: &[u8]) -> String {
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{path::Path, process::Command};

    /// Answers as a driver with three GPUs does, of which the second isn't well and the third knows little.
    const DRIVER: &str = r#"
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
        int nvmlDeviceGetName(void *gpu, char *text, unsigned len) { return snprintf(text, len, "card %d", (int)GPU(gpu)) < 0; }
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
        int nvmlDeviceGetComputeMode(void *gpu, int *mode) { *mode = GPU(gpu) == 1 ? 3 : 0; return 0; }
        int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *up) { OLD(gpu); if (link > 11) return 2; *up = link < 4; return 0; }
        int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status) { *status = GPU(a) + GPU(b) == 3 && what == 0 ? 3 : 0; return 0; }
    "#;

    fn driver(dir: &Path) -> String {
        let (source, library) = (dir.join("nvml.c"), dir.join("libnvml.so"));
        std::fs::write(&source, DRIVER).expect("file");
        let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(made.expect("cc").success());
        library.to_str().expect("a path").to_owned()
    }

    #[test]
    fn gpus_as_a_driver_tells_of_them() {
        let dir = tempfile::tempdir().expect("directory");
        let mut found = GpuLook::default();
        Nvml::open(&driver(dir.path())).expect("opens").ask(&mut found);
        assert_eq!((found.driver.as_deref(), found.trouble), (Some("580.1"), None));
        let well = Gpu {
            name: "card 0".into(),
            bus: "00000000:17:00.0".into(),
            memory: 80,
            memory_free: 50,
            ecc_errors: Some(0),
            nvlinks: 4,
            ..Gpu::default()
        };
        let ill = Gpu {
            name: "card 1".into(),
            processes: vec![(4242, 30)],
            ecc_errors: Some(5),
            rows: (true, false),
            slowed: vec!["too hot (hardware)".into()],
            exclusive: true,
            unreachable: vec![(2, "they are too far apart".into())],
            ..well.clone()
        };
        let unreachable = vec![(1, "they are too far apart".into())];
        let old = Gpu { name: "card 2".into(), ecc_errors: None, nvlinks: 0, unreachable, ..well.clone() };
        assert_eq!(found.gpus, [well, ill, old]);
    }

    #[test]
    fn a_library_that_is_missing_is_named() {
        let why = Nvml::open("libnone-such.so.7").err().expect("isn't there");
        assert!(why.contains("libnone-such.so.7"), "{why}");
    }
}

//! NVIDIA GPUs, asked of the driver's own library when there is one. Nothing is linked: the libraries are looked for.
use contract::probe::{Gpu, GpuLook};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    fs, ptr,
};

/// Most GPUs of a node.
const MAX_GPUS: u32 = 64;
/// Most processes of a GPU that are told.
const MAX_PROCESSES: usize = 64;

/// What can be found out.
pub(super) fn look() -> GpuLook {
    let devices = device_nodes();
    let mut found = GpuLook { devices, nccl: nccl(), ..GpuLook::default() };
    match Nvml::open() {
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

/// A shared library; stays loaded.
struct Library(*mut c_void);

impl Library {
    fn open(name: &str) -> Result<Library, String> {
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
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
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

/// nvml.h: `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// nvml.h: `nvmlProcessInfo_t` (versions 2 and 3 of the functions).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// NVIDIA's management library, initialised.
struct Nvml(Library);

impl Nvml {
    fn open() -> Result<Nvml, String> {
        let library = Library::open("libnvidia-ml.so.1")?;
        // SAFETY: the type is nvml.h's.
        let code = unsafe { library.function::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2")?() };
        if code == 0 {
            Ok(Nvml(library))
        } else {
            Err(format!("the NVIDIA driver does not answer (NVML error {code})"))
        }
    }

    fn ask(&self, found: &mut GpuLook) {
        found.driver = self.driver().ok();
        match self.count() {
            Ok(count) => found.gpus = (0..count.min(MAX_GPUS)).filter_map(|i| self.gpu(i).ok()).collect(),
            Err(why) => found.trouble = Some(why),
        }
    }

    fn driver(&self) -> Result<String, String> {
        let mut text = [0u8; 96];
        // SAFETY: the type is nvml.h's; the buffer is as long as is said.
        let code = unsafe {
            let ask = self.0.function::<unsafe extern "C" fn(*mut c_char, c_uint) -> c_int>(
                c"nvmlSystemGetDriverVersion",
            )?;
            ask(text.as_mut_ptr().cast(), text.len() as c_uint)
        };
        done(code).map(|()| until_nul(&text))
    }

    fn count(&self) -> Result<u32, String> {
        let mut count = 0;
        // SAFETY: the type is nvml.h's.
        let code = unsafe {
            self.0.function::<unsafe extern "C" fn(*mut c_uint) -> c_int>(c"nvmlDeviceGetCount_v2")?(
                &mut count,
            )
        };
        done(code).map(|()| count)
    }

    fn gpu(&self, index: u32) -> Result<Gpu, String> {
        let mut device: Device = ptr::null_mut();
        let (mut name, mut memory) = ([0u8; 96], Memory::default());
        // SAFETY: the types are nvml.h's; each pointer leads to as much as the function writes.
        unsafe {
            type Handle = unsafe extern "C" fn(c_uint, *mut Device) -> c_int;
            done(self.0.function::<Handle>(c"nvmlDeviceGetHandleByIndex_v2")?(index, &mut device))?;
            type Name = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
            done(self.0.function::<Name>(c"nvmlDeviceGetName")?(device, name.as_mut_ptr().cast(), 96))?;
            type Info = unsafe extern "C" fn(Device, *mut Memory) -> c_int;
            done(self.0.function::<Info>(c"nvmlDeviceGetMemoryInfo")?(device, &mut memory))?;
        }
        let processes = self.processes(device).unwrap_or_default();
        Ok(Gpu { name: until_nul(&name), memory: memory.total, memory_free: memory.free, processes })
    }

    fn processes(&self, device: Device) -> Result<Vec<(u32, u64)>, String> {
        let mut list = [Process::default(); MAX_PROCESSES];
        let mut count = MAX_PROCESSES as c_uint;
        // SAFETY: the type is nvml.h's; at most `count` entries are written.
        let code = unsafe {
            type Running = unsafe extern "C" fn(Device, *mut c_uint, *mut Process) -> c_int;
            let ask = self.0.function::<Running>(c"nvmlDeviceGetComputeRunningProcesses_v3")?;
            ask(device, &mut count, list.as_mut_ptr())
        };
        done(code)?;
        Ok(list.iter().take(count as usize).map(|p| (p.pid, p.used)).collect())
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the type is nvml.h's; it was initialised.
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

//! One card: its context, its streams, work on its memory, launches.
use super::binding::{
    Address, CAPABILITY_MAJOR, CAPABILITY_MINOR, DYNAMIC_SHARED, Driver, Handle, L2_CACHE, MULTIPROCESSORS,
    NON_BLOCKING, SHARED_PER_BLOCK,
};
use super::error::{CudaError, Result};
use super::graphs::{Graphs, Piece};
use super::libs::{Places, Wanted};
use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    ptr,
    sync::{Arc, atomic::AtomicU64},
};

/// The oldest driver: CUDA 12.0, as [`Driver`] reports it.
const OLDEST_DRIVER: i32 = 12000;
/// The oldest card: Ampere. Before it there is no bf16.
const OLDEST_CARD: (u32, u32) = (8, 0);
/// The oldest whose tensor cores multiply fp8: Ada.
const OLDEST_FP8: (u32, u32) = (8, 9);

/// What is known of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub name: String,
    pub index: usize,
    /// Compute capability: (9, 0) is `sm_90`.
    pub capability: (u32, u32),
    pub multiprocessors: usize,
    /// Bytes.
    pub memory: usize,
    /// Bytes of shared memory that a block can have.
    pub shared: usize,
    /// Bytes of the cache that all blocks share.
    pub cache: usize,
    /// CUDA's version that the driver implements: (13, 0).
    pub driver: (u32, u32),
    pub driver_path: PathBuf,
}

impl Facts {
    /// As NVRTC names the architecture.
    pub fn arch(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Do its tensor cores multiply fp8?
    pub fn has_fp8(&self) -> bool {
        self.capability >= OLDEST_FP8
    }
}

/// An open card. What a thread asks for happens in the order of its calls: in the stream of the card, or in the thread's own
/// ([`super::streams`]).
pub(super) struct Card {
    pub(super) driver: Driver,
    pub(super) device: c_int,
    context: Handle,
    /// Of all threads that have none of their own.
    pub(super) stream: Handle,
    /// Of copies that go on beside them: to the host, and from it.
    pub(super) downloads: Handle,
    pub(super) uploads: Handle,
    pub(super) facts: Facts,
    /// Of the card's stream: what waits for it.
    pub(super) graphs: Graphs,
    /// Bytes that this process has of the card now, and the most that it had.
    pub(super) used: AtomicU64,
    pub(super) peak: AtomicU64,
}

// SAFETY: the driver's functions may be called from any thread; handles are only passed to it.
unsafe impl Send for Card {}
// SAFETY: as above.
unsafe impl Sync for Card {}

thread_local! {
    /// The context that this thread's calls mean.
    static CURRENT: Cell<Handle> = const { Cell::new(ptr::null_mut()) };
}

/// A driver that is new enough, CUDA's version that it implements, and its path.
fn driver(places: &Places) -> Result<(Driver, i32, PathBuf)> {
    let found = places.open(Wanted::Driver)?;
    let driver_path = found.path.clone();
    let driver = Driver::of(found)?;
    // SAFETY: no conditions.
    driver.check("cuInit", unsafe { (driver.cuInit)(0) })?;
    let version = driver.number("cuDriverGetVersion", |out| {
        // SAFETY: one number is written.
        unsafe { (driver.cuDriverGetVersion)(out) }
    })?;
    if version < OLDEST_DRIVER {
        let what =
            format!("the NVIDIA driver ({}) implements CUDA {}", driver_path.display(), dotted(version));
        return Err(CudaError::TooOld { what, needed: format!("CUDA {} or newer", dotted(OLDEST_DRIVER)) });
    }
    Ok((driver, version, driver_path))
}

/// CUDA's version that the driver implements (13, 0), and its path.
pub(super) fn version(places: &Places) -> Result<((u32, u32), PathBuf)> {
    driver(places).map(|(_, version, path)| (parts(version), path))
}

/// CUDA's version that the driver implements, if it sees a GPU.
pub(super) fn find(places: &Places) -> Result<(u32, u32)> {
    let (driver, version, _) = driver(places)?;
    driver.device(0)?;
    Ok(parts(version))
}

impl Card {
    /// Opens card `index` of those that the driver shows this process.
    pub(super) fn open(places: &Places, index: usize) -> Result<Arc<Card>> {
        let (driver, version, driver_path) = driver(places)?;
        let device = driver.device(index)?;
        let facts = driver.facts(device, index, version, driver_path)?;
        if facts.capability < OLDEST_CARD {
            let what = format!("GPU {index} ({}) is {}", facts.name, facts.arch());
            return Err(CudaError::TooOld { what, needed: "sm_80 (Ampere) or newer".to_owned() });
        }
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: one handle is written.
        driver.check("cuDevicePrimaryCtxRetain", unsafe {
            (driver.cuDevicePrimaryCtxRetain)(&mut context, device)
        })?;
        // SAFETY: the context was just made.
        driver.check("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(context) })?;
        CURRENT.set(context);
        driver.keep_freed_memory(device)?;
        // SAFETY: one handle is written.
        driver.check("cuStreamCreate", unsafe { (driver.cuStreamCreate)(&mut stream, NON_BLOCKING) })?;
        let (downloads, uploads) = (driver.stream_beside(0)?, driver.stream_beside(0)?);
        Ok(Arc::new(Card {
            driver,
            device,
            context,
            stream,
            downloads,
            uploads,
            facts,
            graphs: Graphs::default(),
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        }))
    }

    /// Makes the card's context this thread's.
    pub(super) fn enter(&self) -> Result<()> {
        if CURRENT.get() != self.context {
            // SAFETY: the context lives as long as self.
            self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.cuCtxSetCurrent)(self.context) })?;
            CURRENT.set(self.context);
        }
        Ok(())
    }

    pub(super) fn fill_zero(&self, at: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.ask(|piece| piece.zeros(at, bytes), |stream| self.fill_now(at, bytes, stream))
    }

    pub(super) fn fill_now(&self, at: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller's range.
        let code = unsafe { (self.driver.cuMemsetD8Async)(at, 0, bytes, stream) };
        self.driver.check("cuMemsetD8Async", code)
    }

    /// Host to card. Pinned bytes are read when the copy's turn comes; of others the driver takes a copy.
    pub(super) fn upload(&self, at: Address, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's range is as long.
        let code = self.in_turn(|stream| unsafe {
            (self.driver.cuMemcpyHtoDAsync_v2)(at, bytes.as_ptr().cast(), bytes.len(), stream)
        })?;
        self.driver.check("cuMemcpyHtoDAsync", code)
    }

    /// Card to host; returns when the bytes are there.
    pub(super) fn download(&self, bytes: &mut [u8], at: Address) -> Result<()> {
        if !bytes.is_empty() {
            // SAFETY: the caller's range is as long.
            let code = self.in_turn(|stream| unsafe {
                (self.driver.cuMemcpyDtoHAsync_v2)(bytes.as_mut_ptr().cast(), at, bytes.len(), stream)
            })?;
            self.driver.check("cuMemcpyDtoHAsync", code)?;
        }
        self.wait()
    }

    /// Inside the card; the ranges don't overlap.
    pub(super) fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.ask(|piece| piece.copy(to, from, bytes), |stream| self.copy_now(to, from, bytes, stream))
    }

    pub(super) fn copy_now(&self, to: Address, from: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller's ranges.
        let code = unsafe { (self.driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) };
        self.driver.check("cuMemcpyDtoDAsync", code)
    }

    /// Waits until everything that this thread asked for is done; errors of that work come out here at the latest.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: the stream lives.
        let code = self.in_turn(|stream| unsafe { (self.driver.cuStreamSynchronize)(stream) })?;
        self.driver.check("work on the GPU", code)
    }

    /// A module of an image that the compiler made for this card.
    pub(super) fn load(&self, file: &str, image: &[u8]) -> Result<Module> {
        self.enter()?;
        let mut module = ptr::null_mut();
        // SAFETY: an image carries its own length.
        let code = unsafe { (self.driver.cuModuleLoadData)(&mut module, image.as_ptr().cast()) };
        self.driver.check(&format!("cuModuleLoadData of {file}"), code)?;
        Ok(Module(module))
    }

    /// A kernel of a module, which may use as much shared memory as a block can have.
    pub(super) fn function(&self, module: &Module, name: &CStr) -> Result<Function> {
        self.enter()?;
        let mut function = ptr::null_mut();
        // SAFETY: the module lives as long as the context.
        let code = unsafe { (self.driver.cuModuleGetFunction)(&mut function, module.0, name.as_ptr()) };
        self.driver.check(&format!("cuModuleGetFunction of {}", name.to_string_lossy()), code)?;
        Ok(Function(function))
    }

    /// Lets a kernel's blocks have this much shared memory.
    pub(super) fn allow_shared(&self, function: Function, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the function lives as long as the context.
        let code = unsafe { (self.driver.cuFuncSetAttribute)(function.0, DYNAMIC_SHARED, bytes as c_int) };
        self.driver.check("cuFuncSetAttribute", code)
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel's source, in order, and every address covers what the kernel touches.
    pub(super) unsafe fn launch(
        &self,
        name: &'static CStr,
        function: Function,
        shape: Launch,
        arguments: &[&dyn Param],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let add = |piece: &mut Piece| unsafe { piece.kernel(name, function, shape, arguments) };
        self.ask(add, |stream| {
            let pointer = |a: &&dyn Param| ptr::from_ref::<dyn Param>(*a).cast_mut().cast();
            let mut pointers: Vec<*mut c_void> = arguments.iter().map(pointer).collect();
            // SAFETY: as above.
            unsafe { self.start(name, function, shape, &mut pointers, stream) }
        })
    }

    /// Starts a kernel now.
    ///
    /// # Safety
    /// As [`Card::launch`]; the pointers are those of the arguments.
    pub(super) unsafe fn start(
        &self,
        name: &CStr,
        function: Function,
        shape: Launch,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> Result<()> {
        let Launch { grid: [x, y, z], block: [bx, by, bz], shared } = shape;
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        let code = unsafe {
            (self.driver.cuLaunchKernel)(
                function.0,
                x,
                y,
                z,
                bx,
                by,
                bz,
                shared as u32,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        if code == 0 {
            Ok(())
        } else {
            self.driver.check(&format!("cuLaunchKernel of {} {shape:?}", name.to_string_lossy()), code)
        }
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            self.end_graphs();
            // SAFETY: all are given back once; nothing can be done about an error.
            unsafe {
                for stream in [self.downloads, self.uploads, self.stream] {
                    let _ = (self.driver.cuStreamSynchronize)(stream);
                    let _ = (self.driver.cuStreamDestroy_v2)(stream);
                }
                let _ = (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
            }
            CURRENT.set(ptr::null_mut());
        }
    }
}

impl Driver {
    pub(super) fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (mut name, mut text) = (ptr::null(), ptr::null());
        // SAFETY: one pointer each is written, to a text that never ends to live, or null.
        let said = unsafe {
            (self.cuGetErrorName)(code, &mut name);
            (self.cuGetErrorString)(code, &mut text);
            [name, text].map(|at: *const c_char| {
                if at.is_null() { "an unknown error".into() } else { CStr::from_ptr(at).to_string_lossy() }
            })
        };
        Err(CudaError::Call { what: what.to_owned(), code, said: said.join(", ") })
    }

    pub(super) fn number(&self, what: &str, get: impl FnOnce(&mut c_int) -> c_int) -> Result<c_int> {
        let mut value = 0;
        let code = get(&mut value);
        self.check(what, code)?;
        Ok(value)
    }

    fn device(&self, index: usize) -> Result<c_int> {
        // SAFETY: one number is written.
        let count = self.number("cuDeviceGetCount", |out| unsafe { (self.cuDeviceGetCount)(out) })?;
        let count = count.max(0) as usize;
        if index >= count {
            return Err(CudaError::NoCard { index, count });
        }
        // SAFETY: one number is written; the index is below the count.
        self.number("cuDeviceGet", |out| unsafe { (self.cuDeviceGet)(out, index as c_int) })
    }

    fn facts(&self, device: c_int, index: usize, version: i32, driver_path: PathBuf) -> Result<Facts> {
        let attribute = |which| {
            // SAFETY: one number is written.
            let value = self.number("cuDeviceGetAttribute", |out| unsafe {
                (self.cuDeviceGetAttribute)(out, which, device)
            })?;
            Ok(value.max(0) as u32)
        };
        let mut name = [0 as c_char; 256];
        // SAFETY: at most 256 bytes are written, the last a zero.
        let code = unsafe { (self.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device) };
        self.check("cuDeviceGetName", code)?;
        name[name.len() - 1] = 0;
        let mut memory = 0;
        // SAFETY: one number is written.
        self.check("cuDeviceTotalMem", unsafe { (self.cuDeviceTotalMem_v2)(&mut memory, device) })?;
        Ok(Facts {
            // SAFETY: a zero ends it.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            index,
            capability: (attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?),
            multiprocessors: attribute(MULTIPROCESSORS)? as usize,
            memory,
            shared: attribute(SHARED_PER_BLOCK)? as usize,
            cache: attribute(L2_CACHE)? as usize,
            driver: parts(version),
            driver_path,
        })
    }
}

/// 12090 is 12.9.
fn parts(version: i32) -> (u32, u32) {
    let version = version.max(0) as u32;
    (version / 1000, version % 1000 / 10)
}

fn dotted(version: i32) -> String {
    let (major, minor) = parts(version);
    format!("{major}.{minor}")
}

/// Kernels of one source; they live as long as the context.
pub(super) struct Module(Handle);

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Function(pub(super) Handle);

// SAFETY: only passed to the driver, from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Blocks, threads of each, and bytes of shared memory of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: usize,
}

/// An argument of a kernel: copied byte for byte.
///
/// # Safety
/// The type lies in memory as C lays out the kernel's parameter, and has no padding.
pub(super) unsafe trait Param {}

// SAFETY: i64 in the kernels' sources.
unsafe impl Param for i64 {}
// SAFETY: float.
unsafe impl Param for f32 {}
// SAFETY: a pointer.
unsafe impl Param for Address {}

//! Compiles this crate's CUDA kernels with NVRTC for the exact architecture of the GPU, and caches
//! them on disk.
use super::bindings::{NvrtcApi, nvrtcProgram};
use super::context::GpuContext;
use super::disk_cache;
use super::error::{CudaError, Result};
use super::kernel_text::include_kernel_text;
use super::launch::{KernelFunction, KernelModule, LaunchConfig};
use super::library::CudaLibrary;
use super::library_search::LibrarySearchPaths;
use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_int},
    panic::resume_unwind,
    path::PathBuf,
    ptr,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread::ScopedJoinHandle,
    time::Instant,
};

/// A CUDA source file that contains kernels: its name and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KernelSource {
    pub(super) file: &'static str,
    pub(super) text: &'static str,
    /// True if the kernels use instructions that only Hopper GPUs have.
    pub(super) is_for_hopper: bool,
    /// True if few jobs need the kernels. They are then compiled at their first use, and not when
    /// a job starts.
    pub(super) is_rarely_used: bool,
}

/// The architecture of Hopper GPUs such as the H100 and H200, as NVRTC names it.
const HOPPER_ARCHITECTURE: &str = "sm_90";
/// The architecture, as NVRTC names it, for kernels with instructions that only Hopper GPUs
/// support.
const HOPPER_SPECIFIC_ARCHITECTURE: &str = "sm_90a";

impl KernelSource {
    /// Returns the architecture for which NVRTC must compile this source file so that it runs on a
    /// GPU of the architecture `gpu`. Returns `None` if the GPU cannot run the kernels.
    pub(super) fn find_architecture<'a>(&self, gpu: &'a str) -> Option<&'a str> {
        match self.is_for_hopper {
            false => Some(gpu),
            true => (gpu == HOPPER_ARCHITECTURE).then_some(HOPPER_SPECIFIC_ARCHITECTURE),
        }
    }
}

/// Creates a [`KernelSource`] with the name and the text of a file in `kernels/`, which is included
/// at compile time.
macro_rules! kernel_source {
    ($file:literal) => {
        KernelSource {
            file: $file,
            text: include_kernel_text!(concat!("kernels/", $file)),
            is_for_hopper: false,
            is_rarely_used: false,
        }
    };
}

/// Names and texts of the headers that kernel sources include.
pub(super) const KERNEL_HEADERS: [(&CStr, &str); 8] = [
    (c"common.cuh", include_kernel_text!("kernels/common.cuh")),
    (c"attention.cuh", include_kernel_text!("kernels/attention.cuh")),
    (c"blocks.cuh", include_kernel_text!("kernels/blocks.cuh")),
    (c"tiles.cuh", include_kernel_text!("kernels/tiles.cuh")),
    (c"flash.cuh", include_kernel_text!("kernels/flash.cuh")),
    (c"flash_backward.cuh", include_kernel_text!("kernels/flash_backward.cuh")),
    (c"hopper.cuh", include_kernel_text!("kernels/hopper.cuh")),
    (c"flash_hopper.cuh", include_kernel_text!("kernels/flash_hopper.cuh")),
];
/// Source file of the kernels of elementwise ops, dropout, sums of squares of blocks of elements,
/// and optimizers.
pub(super) const ELEMENTWISE_SOURCE: KernelSource = kernel_source!("elementwise.cu");
/// Source file of the kernels of RMSNorm, LayerNorm, bias, and sums over rows.
pub(super) const NORM_SOURCE: KernelSource = kernel_source!("norm.cu");
/// Source file of the kernels of activation functions and rotary position embedding.
pub(super) const ACTIVATION_SOURCE: KernelSource = kernel_source!("activation.cu");
/// Source file of the kernels of the token embedding, of the router of mixture-of-experts layers,
/// and of ops on the rows of tokens that experts process.
pub(super) const EXPERT_ROWS_SOURCE: KernelSource = kernel_source!("expert_rows.cu");
/// Source file of the kernels of the cross-entropy loss.
pub(super) const CLASSIFIER_SOURCE: KernelSource = kernel_source!("classifier.cu");
/// Source file of the kernels of attention in f32 arithmetic, for all element types.
pub(super) const ATTENTION_SOURCE: KernelSource = kernel_source!("attention.cu");
/// Source file of the kernels of attention for bf16 tensors with heads of at most 128 elements,
/// which use tensor cores.
pub(super) const FLASH_SOURCE: KernelSource = kernel_source!("flash.cu");
/// Source file of the kernels of attention on tensor cores for f16 tensors with heads of at most
/// 128 elements.
pub(super) const FLASH_F16_SOURCE: KernelSource =
    KernelSource { is_rarely_used: true, ..kernel_source!("flash_f16.cu") };
/// Source file of the kernels of attention on tensor cores for bf16 tensors with heads of 129 to
/// 256 elements.
pub(super) const FLASH_256_SOURCE: KernelSource =
    KernelSource { is_rarely_used: true, ..kernel_source!("flash_256.cu") };
/// Source file of the kernels of attention on tensor cores for f16 tensors with heads of 129 to 256
/// elements.
pub(super) const FLASH_256_F16_SOURCE: KernelSource =
    KernelSource { is_rarely_used: true, ..kernel_source!("flash_256_f16.cu") };
/// Source file of the kernels of attention for bf16 tensors on the tensor cores of Hopper GPUs.
pub(super) const FLASH_HOPPER_SOURCE: KernelSource =
    KernelSource { is_for_hopper: true, ..kernel_source!("flash_hopper.cu") };
/// Source file of the kernels that round the operands of matmuls to fp8.
pub(super) const FP8_SOURCE: KernelSource = kernel_source!("fp8.cu");
/// All CUDA source files of this crate.
pub(super) const KERNEL_SOURCES: [KernelSource; 12] = [
    ELEMENTWISE_SOURCE,
    NORM_SOURCE,
    ACTIVATION_SOURCE,
    EXPERT_ROWS_SOURCE,
    CLASSIFIER_SOURCE,
    ATTENTION_SOURCE,
    FLASH_SOURCE,
    FLASH_F16_SOURCE,
    FLASH_256_SOURCE,
    FLASH_256_F16_SOURCE,
    FLASH_HOPPER_SOURCE,
    FP8_SOURCE,
];

/// Compiler options that are passed to NVRTC in addition to the architecture. Option 177 suppresses
/// the warning about a function of a header that a source does not use. With line information,
/// compute-sanitizer reports the line of an error.
const NVRTC_OPTIONS: [&CStr; 3] = [c"--std=c++17", c"--diag-suppress=177", c"--generate-line-info"];

/// The opened NVRTC library, NVIDIA's compiler of CUDA kernels at run time.
pub(super) struct Nvrtc {
    library: NvrtcApi,
    pub(super) path: PathBuf,
    /// NVRTC's major and minor version, such as (13, 0).
    pub(super) version: (u32, u32),
}

impl Nvrtc {
    /// Opens NVRTC (NVIDIA's compiler of CUDA kernels) and queries its version.
    pub(super) fn open(paths: &LibrarySearchPaths) -> Result<Nvrtc> {
        let (library, path) = NvrtcApi::open(paths)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { library.nvrtcVersion(&mut major, &mut minor) }?;
        Ok(Nvrtc { library, path, version: (major.max(0) as u32, minor.max(0) as u32) })
    }

    /// Returns the GPU architectures that this NVRTC can compile for, as numbers such as 80 and 90.
    fn query_supported_architectures(&self) -> Result<Vec<c_int>> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { self.library.nvrtcGetNumSupportedArchs(&mut count) }?;
        let mut architectures = vec![0; count.clamp(0, 1024) as usize];
        if !architectures.is_empty() {
            // SAFETY: writes as many integers as it counted.
            unsafe { self.library.nvrtcGetSupportedArchs(architectures.as_mut_ptr()) }?;
        }
        Ok(architectures)
    }

    /// Compiles a kernel source for an architecture such as `sm_90`, and returns the compiled image
    /// (cubin). The error contains the compiler's messages.
    pub(super) fn compile(&self, source: KernelSource, architecture: &str) -> Result<Vec<u8>> {
        let (text, name) = (to_c_string(source.text), to_c_string(source.file));
        let headers = KERNEL_HEADERS.map(|(_, text)| to_c_string(text));
        let texts = headers.each_ref().map(|text| text.as_ptr());
        let names = KERNEL_HEADERS.map(|(name, _)| name.as_ptr());
        let mut program = NvrtcProgram { nvrtc: self, handle: ptr::null_mut() };
        // SAFETY: every string ends in a zero; both arrays have as many elements as the count.
        unsafe {
            self.library.nvrtcCreateProgram(
                &mut program.handle,
                text.as_ptr(),
                name.as_ptr(),
                KERNEL_HEADERS.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        }?;
        let architecture = to_c_string(&format!("--gpu-architecture={architecture}"));
        let mut options = vec![architecture.as_ptr()];
        options.extend(NVRTC_OPTIONS.iter().map(|o| o.as_ptr()));
        // SAFETY: the array has as many elements as the count.
        let compiled = unsafe {
            self.library.nvrtcCompileProgram(program.handle, options.len() as c_int, options.as_ptr())
        };
        if let Err(e) = compiled {
            let log =
                program.read_log().filter(|log| !log.trim().is_empty()).unwrap_or_else(|| e.to_string());
            return Err(CudaError::KernelCompile { file: source.file, log });
        }
        let mut bytes = 0;
        // SAFETY: writes one integer.
        unsafe { self.library.nvrtcGetCUBINSize(program.handle, &mut bytes) }?;
        if bytes == 0 || bytes > disk_cache::MAX_CONTENT_BYTES {
            let message = format!("returned an image of {bytes} bytes");
            return Err(CudaError::Call { function: "nvrtcGetCUBINSize".to_owned(), status: 0, message });
        }
        let mut image = vec![0u8; bytes];
        // SAFETY: the buffer has as many bytes as NVRTC reported.
        unsafe { self.library.nvrtcGetCUBIN(program.handle, image.as_mut_ptr().cast()) }?;
        Ok(image)
    }
}

/// A program of CUDA kernels that NVRTC compiles (`nvrtcProgram`), which is destroyed when this
/// value is dropped.
struct NvrtcProgram<'a> {
    nvrtc: &'a Nvrtc,
    handle: nvrtcProgram,
}

impl NvrtcProgram<'_> {
    /// Returns NVRTC's messages about the compilation, or `None` if they cannot be read.
    fn read_log(&self) -> Option<String> {
        let library = &self.nvrtc.library;
        let mut bytes = 0;
        // SAFETY: writes one integer.
        unsafe { library.nvrtcGetProgramLogSize(self.handle, &mut bytes) }.ok()?;
        if bytes == 0 || bytes > disk_cache::MAX_CONTENT_BYTES {
            return None;
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has as many bytes as NVRTC reported.
        unsafe { library.nvrtcGetProgramLog(self.handle, log.as_mut_ptr().cast()) }.ok()?;
        log.retain(|b| *b != 0);
        Some(String::from_utf8_lossy(&log).into_owned())
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created by this library, destroyed once.
            let _ = unsafe { (self.nvrtc.library.nvrtcDestroyProgram)(&mut self.handle) };
        }
    }
}

/// Converts a text to a C string. Texts with a zero byte, which kernel sources and options do not
/// contain, become empty.
fn to_c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

// --- the cache ----------------------------------------------------------------------------------

/// The first bytes of a file in the kernel cache, which identify a compiled kernel image.
const IMAGE_MAGIC: &disk_cache::Magic = b"launch kernels 1";

/// Returns the file name under which the kernel cache stores the compiled kernels of the CUDA
/// source file `source`. The name depends on everything that determines the image: source, headers,
/// options, architecture and NVRTC's version.
fn compute_cache_file_name(source: KernelSource, architecture: &str, version: (u32, u32)) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in KERNEL_HEADERS.map(|(_, text)| text).into_iter().chain([source.text, architecture]) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    for option in NVRTC_OPTIONS {
        hasher.update(option.to_bytes_with_nul());
    }
    let hash = hasher.finalize().to_hex();
    let stem = source.file.trim_end_matches(".cu");
    format!("{stem}-{architecture}-nvrtc{}.{}-{}.cubin", version.0, version.1, &hash[..16])
}

/// Returns the names of all CUDA kernels of this crate, each with its source file. A kernel is a
/// function that is declared with `KERNEL` or `WIDE_KERNEL`.
pub(super) fn list_kernel_names() -> impl Iterator<Item = (KernelSource, CString)> {
    let declared = |line: &'static str| line.strip_prefix("WIDE_").unwrap_or(line).strip_prefix("KERNEL ");
    KERNEL_SOURCES.into_iter().flat_map(move |source| {
        let names = source.text.lines().filter_map(declared).filter_map(|rest| rest.split_once('('));
        names.map(move |(name, _)| (source, to_c_string(name)))
    })
}

/// The kernels that were launched so far, by source file and name, with the launch configuration of
/// the first launch of each kernel.
type LaunchedFunctions = HashMap<(&'static str, &'static CStr), (KernelFunction, LaunchConfig)>;

/// The CUDA kernels of one GPU, whose source files are compiled and loaded when they are first
/// needed.
pub(super) struct KernelModules {
    nvrtc: Nvrtc,
    /// The kernel cache: the directory of compiled images. If `None`, every process compiles the
    /// kernels.
    cache: Option<PathBuf>,
    /// The error of the first image that could not be written to the kernel cache.
    cache_error: OnceLock<CudaError>,
    modules: [OnceLock<KernelModule>; KERNEL_SOURCES.len()],
    /// The kernels that were launched, each with the configuration of its first launch.
    functions: Mutex<LaunchedFunctions>,
    /// The sources that NVRTC has compiled in this process, and the seconds that it needed.
    compile_seconds: Mutex<Vec<(&'static str, f64)>>,
    loading: Mutex<()>,
}

impl KernelModules {
    /// Creates the set of a GPU's kernels, of which none is compiled yet. Fails if NVRTC cannot
    /// compile for the GPU's architecture.
    pub(super) fn new(nvrtc: Nvrtc, gpu: &GpuContext, cache: Option<PathBuf>) -> Result<KernelModules> {
        let (major, minor) = gpu.properties.capability;
        if !nvrtc.query_supported_architectures()?.contains(&((major * 10 + minor) as c_int)) {
            let architecture = gpu.properties.architecture();
            return Err(CudaError::LibraryTooOld {
                library: CudaLibrary::Nvrtc,
                path: nvrtc.path,
                found: format!(
                    "NVRTC {}.{}, which does not know {architecture}",
                    nvrtc.version.0, nvrtc.version.1
                ),
                required: format!("an NVRTC that compiles for {architecture}"),
            });
        }
        Ok(KernelModules {
            nvrtc,
            cache,
            cache_error: OnceLock::new(),
            modules: Default::default(),
            functions: Mutex::default(),
            compile_seconds: Mutex::default(),
            loading: Mutex::new(()),
        })
    }

    /// Returns the opened NVRTC library (NVIDIA's compiler of CUDA kernels).
    pub(super) fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// Returns the kernel `name` of a source file, which is first compiled and loaded if necessary.
    /// The kernel can be launched with the dynamic shared memory of `config`.
    pub(super) fn get_or_load_function(
        &self,
        gpu: &GpuContext,
        source: KernelSource,
        name: &'static CStr,
        config: LaunchConfig,
    ) -> Result<KernelFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((function, _)) = functions.get(&(source.file, name)) {
            return Ok(*function);
        }
        let function = self.get_or_load_module(gpu, source)?.find_function(gpu, name)?;
        if config.shared > 0 {
            function.set_max_shared_memory(gpu, gpu.properties.shared_memory_per_block)?;
        }
        functions.insert((source.file, name), (function, config));
        Ok(function)
    }

    /// Returns the kernel `name` of a source file to query its properties, such as its registers;
    /// compiles and loads the file first if necessary.
    pub(super) fn find_function(
        &self,
        gpu: &GpuContext,
        source: KernelSource,
        name: &CStr,
    ) -> Result<KernelFunction> {
        self.get_or_load_module(gpu, source)?.find_function(gpu, name)
    }

    /// Returns the kernels that were launched so far, ordered by name, with the launch
    /// configuration of the first launch of each kernel.
    pub(super) fn list_launched_functions(&self) -> Vec<(String, KernelFunction, LaunchConfig)> {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = functions
            .iter()
            .map(|((_, name), (function, config))| (name.to_string_lossy().into_owned(), *function, *config));
        let mut launched: Vec<_> = launched.collect();
        launched.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        launched
    }

    /// Returns the kernel sources that NVRTC has compiled in this process, each with the seconds
    /// that the compilation took.
    pub(super) fn compile_seconds(&self) -> Vec<(&'static str, f64)> {
        self.lock_compile_seconds().clone()
    }

    /// Locks the list of compiled kernel sources and of the seconds that their compilation took.
    fn lock_compile_seconds(&self) -> MutexGuard<'_, Vec<(&'static str, f64)>> {
        // no code panics while it holds the lock
        self.compile_seconds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the directory in which compiled kernels are cached. Returns `None` if compiled
    /// images are not cached.
    pub(super) fn cache_directory(&self) -> Option<PathBuf> {
        self.cache.clone()
    }

    /// Returns the first error that occurred when a compiled image was written to the kernel cache,
    /// or `None` if none occurred.
    pub(super) fn cache_error(&self) -> Option<&CudaError> {
        self.cache_error.get()
    }

    /// Compiles and loads the kernel sources that `selects` accepts and that are not loaded yet.
    /// They are compiled in parallel, because one after the other takes 21 s on the host of an
    /// H100.
    pub(super) fn load_modules(
        &self,
        gpu: &GpuContext,
        selects: impl Fn(&KernelSource) -> bool,
    ) -> Result<()> {
        let _guard = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let architecture = &gpu.properties.architecture();
        let images = std::thread::scope(|scope| {
            let missing = KERNEL_SOURCES
                .iter()
                .zip(&self.modules)
                .filter(|(source, module)| selects(source) && module.get().is_none());
            let compiling: Vec<_> = missing
                .filter_map(|(source, module)| {
                    Some((source, module, source.find_architecture(architecture)?))
                })
                .map(|(source, module, architecture)| {
                    (source, module, scope.spawn(|| self.load_or_compile_image(*source, architecture)))
                })
                .collect();
            let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|p| resume_unwind(p));
            compiling
                .into_iter()
                .map(|(source, module, thread)| (source, module, join(thread)))
                .collect::<Vec<_>>()
        });
        for (source, module, image) in images {
            let loaded = KernelModule::load(gpu, source.file, &image?)?;
            module.get_or_init(|| loaded);
        }
        Ok(())
    }

    /// Returns the loaded kernels (module) of a CUDA source file, and compiles and loads the file
    /// first if necessary.
    fn get_or_load_module(&self, gpu: &GpuContext, source: KernelSource) -> Result<&KernelModule> {
        let _guard = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let index = KERNEL_SOURCES.iter().position(|s| s.file == source.file).unwrap_or(0);
        if let Some(module) = self.modules[index].get() {
            return Ok(module);
        }
        let gpu_architecture = gpu.properties.architecture();
        let architecture = source.find_architecture(&gpu_architecture).unwrap_or(&gpu_architecture);
        let image = self.load_or_compile_image(source, architecture)?;
        let module = KernelModule::load(gpu, source.file, &image)?;
        Ok(self.modules[index].get_or_init(|| module))
    }

    /// Returns the compiled image of a source file: reads the image from the kernel cache, or
    /// compiles the source and stores the image there.
    fn load_or_compile_image(&self, source: KernelSource, architecture: &str) -> Result<Vec<u8>> {
        let name = compute_cache_file_name(source, architecture, self.nvrtc.version);
        let path = self.cache.as_ref().map(|directory| directory.join(name));
        if let Some(image) = path.as_deref().and_then(|path| disk_cache::read_cache_file(path, IMAGE_MAGIC)) {
            return Ok(image);
        }
        let began = Instant::now();
        let image = self.nvrtc.compile(source, architecture)?;
        self.lock_compile_seconds().push((source.file, began.elapsed().as_secs_f64()));
        if let Some(path) = path
            && let Err(error) = disk_cache::write_cache_file(&path, IMAGE_MAGIC, &image)
        {
            // Not fatal: the next process compiles again.
            let error = error.to_string();
            self.cache_error.get_or_init(|| CudaError::KernelCacheWrite { path, error });
        }
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_for_hopper_are_compiled_for_hopper_only() {
        assert_eq!(FLASH_HOPPER_SOURCE.find_architecture("sm_90"), Some("sm_90a"));
        assert_eq!(FLASH_HOPPER_SOURCE.find_architecture("sm_100"), None);
        assert_eq!(FLASH_HOPPER_SOURCE.find_architecture("sm_80"), None);
        assert_eq!(FLASH_SOURCE.find_architecture("sm_90"), Some("sm_90"));
    }

    #[test]
    fn the_cache_name_depends_on_everything_that_decides_an_image() {
        let name = |source, architecture, version| compute_cache_file_name(source, architecture, version);
        let one = name(ELEMENTWISE_SOURCE, "sm_90", (13, 0));
        assert!(one.starts_with("elementwise-sm_90-nvrtc13.0-") && one.ends_with(".cubin"), "{one}");
        let changed = KernelSource { text: "KERNEL f() {}", ..ELEMENTWISE_SOURCE };
        for other in [
            name(ELEMENTWISE_SOURCE, "sm_80", (13, 0)),
            name(ELEMENTWISE_SOURCE, "sm_90a", (13, 0)),
            name(ELEMENTWISE_SOURCE, "sm_90", (13, 1)),
            name(changed, "sm_90", (13, 0)),
        ] {
            assert_ne!(one, other);
        }
    }
}

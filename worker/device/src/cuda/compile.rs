//! Kernels from source to card: compiled by NVRTC for exactly this card, once, then kept in a cache on disk.
use super::binding::{Compiler, Handle};
use super::card::{Card, Function, Module};
use super::error::{CudaError, Result};
use super::kept;
use super::libs::{Places, Wanted};
use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_int},
    path::PathBuf,
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

/// A source of kernels: its name and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub(super) file: &'static str,
    pub(super) text: &'static str,
}

macro_rules! source {
    ($file:literal) => {
        Source { file: $file, text: include_str!(concat!("kernels/", $file)) }
    };
}

/// What sources include, by name.
const HEADERS: [(&CStr, &str); 3] = [
    (c"common.cuh", include_str!("kernels/common.cuh")),
    (c"attention.cuh", include_str!("kernels/attention.cuh")),
    (c"tiles.cuh", include_str!("kernels/tiles.cuh")),
];
pub(super) const FLAT: Source = source!("flat.cu");
pub(super) const NORM: Source = source!("norm.cu");
pub(super) const ACTIVATION: Source = source!("activation.cu");
pub(super) const ROWS: Source = source!("rows.cu");
pub(super) const CLASSIFIER: Source = source!("classifier.cu");
pub(super) const ATTENTION: Source = source!("attention.cu");
pub(super) const FLASH: Source = source!("flash.cu");
pub(super) const FP8: Source = source!("fp8.cu");
/// All of them.
pub(super) const SOURCES: [Source; 8] = [FLAT, NORM, ACTIVATION, ROWS, CLASSIFIER, ATTENTION, FLASH, FP8];

/// Beside the architecture. Warnings about functions that one source doesn't use say nothing.
const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"--diag-suppress=177"];

/// An open compiler.
pub(super) struct Nvrtc {
    library: Compiler,
    pub(super) path: PathBuf,
    /// (13, 0)
    pub(super) version: (u32, u32),
}

impl Nvrtc {
    pub(super) fn open(places: &Places) -> Result<Nvrtc> {
        let found = places.open(Wanted::Compiler)?;
        let path = found.path.clone();
        let library = Compiler::of(found)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two numbers are written.
        let code = unsafe { (library.nvrtcVersion)(&mut major, &mut minor) };
        let nvrtc = Nvrtc { library, path, version: (major.max(0) as u32, minor.max(0) as u32) };
        nvrtc.check("nvrtcVersion", code)?;
        Ok(nvrtc)
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a text that never ends to live, or null.
        let said = unsafe {
            let at = (self.library.nvrtcGetErrorString)(code);
            if at.is_null() {
                "an unknown error".into()
            } else {
                CStr::from_ptr(at).to_string_lossy().into_owned()
            }
        };
        Err(CudaError::Call { what: what.to_owned(), code, said })
    }

    /// Architectures that this compiler knows: 80, 90, …
    pub(super) fn archs(&self) -> Result<Vec<c_int>> {
        let mut count = 0;
        // SAFETY: one number is written.
        self.check("nvrtcGetNumSupportedArchs", unsafe {
            (self.library.nvrtcGetNumSupportedArchs)(&mut count)
        })?;
        let mut archs = vec![0; count.clamp(0, 1024) as usize];
        if !archs.is_empty() {
            // SAFETY: as many numbers are written as were counted.
            self.check("nvrtcGetSupportedArchs", unsafe {
                (self.library.nvrtcGetSupportedArchs)(archs.as_mut_ptr())
            })?;
        }
        Ok(archs)
    }

    /// The image of a source for `arch` (`sm_90`).
    pub(super) fn compile(&self, source: Source, arch: &str) -> Result<Vec<u8>> {
        let (text, name) = (c_string(source.text), c_string(source.file));
        let headers = HEADERS.map(|(_, text)| c_string(text));
        let texts = headers.each_ref().map(|text| text.as_ptr());
        let names = HEADERS.map(|(name, _)| name.as_ptr());
        let mut program = Program { nvrtc: self, handle: ptr::null_mut() };
        // SAFETY: all texts end in a zero; as many headers are given as are said.
        let code = unsafe {
            (self.library.nvrtcCreateProgram)(
                &mut program.handle,
                text.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        let arch = c_string(&format!("--gpu-architecture={arch}"));
        let mut options = vec![arch.as_ptr()];
        options.extend(OPTIONS.iter().map(|o| o.as_ptr()));
        // SAFETY: as many texts as are said.
        let code = unsafe {
            (self.library.nvrtcCompileProgram)(program.handle, options.len() as c_int, options.as_ptr())
        };
        if let Err(e) = self.check("nvrtcCompileProgram", code) {
            let log = program.log().filter(|log| !log.trim().is_empty()).unwrap_or_else(|| e.to_string());
            return Err(CudaError::Compile { file: source.file, log });
        }
        let mut bytes = 0;
        // SAFETY: one number is written.
        self.check("nvrtcGetCUBINSize", unsafe {
            (self.library.nvrtcGetCUBINSize)(program.handle, &mut bytes)
        })?;
        if bytes == 0 || bytes > kept::MOST {
            let said = format!("an image of {bytes} bytes");
            return Err(CudaError::Call { what: "nvrtcGetCUBIN".to_owned(), code: 0, said });
        }
        let mut image = vec![0u8; bytes];
        // SAFETY: the image has room for as many bytes as were said.
        self.check("nvrtcGetCUBIN", unsafe {
            (self.library.nvrtcGetCUBIN)(program.handle, image.as_mut_ptr().cast())
        })?;
        Ok(image)
    }
}

/// A program that is being compiled.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl Program<'_> {
    fn log(&self) -> Option<String> {
        let library = &self.nvrtc.library;
        let mut bytes = 0;
        // SAFETY: one number is written.
        let code = unsafe { (library.nvrtcGetProgramLogSize)(self.handle, &mut bytes) };
        if code != 0 || bytes == 0 || bytes > kept::MOST {
            return None;
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: the log has room for as many bytes as were said.
        let code = unsafe { (library.nvrtcGetProgramLog)(self.handle, log.as_mut_ptr().cast()) };
        log.retain(|b| *b != 0);
        (code == 0).then(|| String::from_utf8_lossy(&log).into_owned())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by this compiler, destroyed once.
            let _ = unsafe { (self.nvrtc.library.nvrtcDestroyProgram)(&mut self.handle) };
        }
    }
}

/// Our own texts hold no zero.
fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

// --- the cache ------------------------------------------------------------------------------------------------------------

/// What a file of the cache begins with.
const MAGIC: &kept::Magic = b"launch kernels 1";

/// The file of an image: source, options, card and compiler decide.
fn cache_name(source: Source, arch: &str, version: (u32, u32)) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in HEADERS.map(|(_, text)| text).into_iter().chain([source.text, arch]) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    for option in OPTIONS {
        hasher.update(option.to_bytes_with_nul());
    }
    let hash = hasher.finalize().to_hex();
    let stem = source.file.trim_end_matches(".cu");
    format!("{stem}-{arch}-nvrtc{}.{}-{}.cubin", version.0, version.1, &hash[..16])
}

/// The kernels of one card, each source loaded when its first kernel is needed.
pub(super) struct Kernels {
    nvrtc: Nvrtc,
    /// Where images are kept; nowhere: compiled by every process.
    cache: Option<PathBuf>,
    /// Why an image couldn't be kept.
    unkept: OnceLock<String>,
    modules: [OnceLock<Module>; SOURCES.len()],
    functions: Mutex<HashMap<(&'static str, &'static CStr), Function>>,
    loading: Mutex<()>,
}

impl Kernels {
    pub(super) fn new(nvrtc: Nvrtc, card: &Card, cache: Option<PathBuf>) -> Result<Kernels> {
        let (major, minor) = card.facts.capability;
        let known = nvrtc.archs()?;
        if !known.contains(&((major * 10 + minor) as c_int)) {
            let what = format!(
                "NVRTC {}.{} ({}) doesn't know {}",
                nvrtc.version.0,
                nvrtc.version.1,
                nvrtc.path.display(),
                card.facts.arch()
            );
            return Err(CudaError::TooOld { what, needed: "an NVRTC made for this GPU".to_owned() });
        }
        Ok(Kernels {
            nvrtc,
            cache,
            unkept: OnceLock::new(),
            modules: Default::default(),
            functions: Mutex::default(),
            loading: Mutex::new(()),
        })
    }

    pub(super) fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// A kernel, ready to be launched; its blocks may have `shared` bytes of shared memory.
    pub(super) fn get(
        &self,
        card: &Card,
        source: Source,
        name: &'static CStr,
        shared: usize,
    ) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&(source.file, name)) {
            return Ok(*function);
        }
        let function = card.function(self.module(card, source)?, name)?;
        if shared > 0 {
            card.allow_shared(function, card.facts.shared)?;
        }
        functions.insert((source.file, name), function);
        Ok(function)
    }

    /// Where images are kept.
    pub(super) fn folder(&self) -> Option<PathBuf> {
        self.cache.clone()
    }

    /// Why the next process compiles again, if it does.
    pub(super) fn unkept(&self) -> Option<&str> {
        self.unkept.get().map(String::as_str)
    }

    /// Compiles and loads everything: what a first step would wait for.
    pub(super) fn load_all(&self, card: &Card) -> Result<()> {
        SOURCES.iter().try_for_each(|source| self.module(card, *source).map(drop))
    }

    fn module(&self, card: &Card, source: Source) -> Result<&Module> {
        let _one = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let at = SOURCES.iter().position(|s| s.file == source.file).unwrap_or(0);
        if let Some(module) = self.modules[at].get() {
            return Ok(module);
        }
        let image = self.image(source, &card.facts.arch())?;
        let module = card.load(source.file, &image)?;
        Ok(self.modules[at].get_or_init(|| module))
    }

    fn image(&self, source: Source, arch: &str) -> Result<Vec<u8>> {
        let path =
            self.cache.as_ref().map(|folder| folder.join(cache_name(source, arch, self.nvrtc.version)));
        if let Some(image) = path.as_deref().and_then(|path| kept::read(path, MAGIC)) {
            return Ok(image);
        }
        let image = self.nvrtc.compile(source, arch)?;
        if let Some(Err(e)) = path.as_deref().map(|path| kept::write(path, MAGIC, &image)) {
            // A home that is full or can't be written costs the next process this compilation, no more.
            let file = path.unwrap_or_default();
            self.unkept.get_or_init(|| format!("{}: {e}", file.display()));
        }
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_decides_an_image_is_in_its_name() {
        let name = |source, arch, version| cache_name(source, arch, version);
        let one = name(FLAT, "sm_90", (13, 0));
        assert!(one.starts_with("flat-sm_90-nvrtc13.0-") && one.ends_with(".cubin"), "{one}");
        let changed = Source { text: "KERNEL f() {}", ..FLAT };
        for other in
            [name(FLAT, "sm_80", (13, 0)), name(FLAT, "sm_90", (13, 1)), name(changed, "sm_90", (13, 0))]
        {
            assert_ne!(one, other);
        }
    }
}

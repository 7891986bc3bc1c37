//! Finds and opens CUDA's libraries at run time, when a job needs them.
use super::error::CudaError;
use super::library::{CudaLibrary, RejectReason, RejectedLibrary};
use libloading::Library;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Directories in which CUDA's libraries (NVRTC, cuBLASLt, cuDNN) are searched for, in addition to
/// the directories of the operating system.
#[derive(Clone, Debug, Default)]
pub struct LibrarySearchPaths {
    /// Directories from the job file. They are searched first.
    pub configured: Vec<PathBuf>,
    /// Directories from `LD_LIBRARY_PATH`.
    pub ld_library_path: Vec<PathBuf>,
    /// Prefixes of the active Python environments. Their `nvidia` packages contain libraries.
    pub python_prefixes: Vec<PathBuf>,
    /// Roots of CUDA toolkits (`CUDA_HOME`, `CUDA_PATH`).
    pub toolkit_roots: Vec<PathBuf>,
    /// Prefixes of other Python installations on this machine, searched after the toolkits.
    pub fallback_python_prefixes: Vec<PathBuf>,
    /// Major version of CUDA that the driver implements, if it is known. Libraries of a newer major
    /// version are rejected, because the driver can run neither the libraries nor the code that
    /// they generate.
    pub driver_cuda_major: Option<u32>,
}

/// System directories in which CUDA's libraries are searched for, after the directories of the
/// dynamic loader.
const SYSTEM_DIRECTORIES: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];
/// Directories into which CUDA toolkits are usually installed.
const DEFAULT_TOOLKIT_ROOTS: [&str; 3] = ["/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-12"];
/// Maximum number of entries that are read from a directory that may contain CUDA's libraries.
const MAX_DIRECTORY_ENTRIES: usize = 4096;

/// Text that stands for the dynamic loader's directories in the error that lists where a CUDA
/// library was searched for.
const DYNAMIC_LOADER_LABEL: &str = "the dynamic loader's directories";

/// An opened library, and the path at which it was found.
#[derive(Debug)]
pub struct OpenLibrary {
    /// The library, opened by the dynamic loader.
    pub library: Library,
    /// The library's path, or only its file name if the dynamic loader found it.
    pub path: PathBuf,
}

/// Returns the major version at the end of a library's file name: 13 for `libnvrtc.so.13`.
fn parse_major_version(file_name: &str) -> Option<u32> {
    file_name.rsplit_once(".so.")?.1.parse().ok()
}

impl LibrarySearchPaths {
    /// Returns a copy of these search paths that finds only libraries of CUDA's major version
    /// `major` (the version of the driver) or older.
    pub(super) fn with_driver_version(&self, major: u32) -> LibrarySearchPaths {
        LibrarySearchPaths { driver_cuda_major: Some(major), ..self.clone() }
    }

    /// Divides the file names of `library` into versions that work with the installed driver and
    /// versions that are too new for the driver, best first.
    fn partition_file_names_by_driver(&self, library: CudaLibrary) -> (Vec<&'static str>, Vec<&'static str>) {
        let newest = Some(self.driver_cuda_major.unwrap_or(u32::MAX));
        library.file_names().iter().partition(|name| parse_major_version(name) <= newest)
    }

    /// Returns the directories in which `library` is searched for, best first.
    ///
    /// The driver is not searched for in toolkits, because they contain only a stub of the driver
    /// for linking.
    pub fn list_directories(&self, library: CudaLibrary) -> Vec<PathBuf> {
        let mut directories = self.configured.clone();
        directories.extend(self.ld_library_path.iter().cloned());
        if library != CudaLibrary::Driver {
            directories.extend(
                self.python_prefixes.iter().flat_map(|prefix| list_nvidia_package_directories(prefix)),
            );
            let toolkits = self.toolkit_roots.iter().cloned().chain(DEFAULT_TOOLKIT_ROOTS.map(PathBuf::from));
            directories.extend(toolkits.flat_map(|t| [t.join("lib64"), t.join("targets/x86_64-linux/lib")]));
            let fallbacks = self.fallback_python_prefixes.iter();
            directories.extend(fallbacks.flat_map(|prefix| list_nvidia_package_directories(prefix)));
        }
        directories.retain(|directory| !directory.as_os_str().is_empty());
        directories
    }

    /// Opens `library`, a library of CUDA, from the first directory that has a usable file of it.
    /// The error lists the searched directories and the rejected files.
    pub fn open_library(&self, library: CudaLibrary) -> Result<OpenLibrary, CudaError> {
        let mut searched = Vec::new();
        let mut rejected = Vec::new();
        let (names, newer) = self.partition_file_names_by_driver(library);
        let mut open_in = |directory: &Path| {
            let opened =
                names.iter().find_map(|name| open_library_file(&directory.join(name), &mut rejected));
            if opened.is_none() {
                rejected.extend(newer.iter().filter_map(|name| self.find_too_new_file(directory.join(name))));
            }
            opened
        };
        for directory in &self.list_directories(library) {
            if let Some(opened) = open_in(directory) {
                return Ok(opened);
            }
            searched.push(directory.display().to_string());
        }
        for name in &names {
            if let Ok(library) = load_library(Path::new(name)) {
                return Ok(OpenLibrary { library, path: PathBuf::from(name) });
            }
        }
        searched.push(DYNAMIC_LOADER_LABEL.to_owned());
        for directory in SYSTEM_DIRECTORIES {
            if let Some(opened) = open_in(Path::new(directory)) {
                return Ok(opened);
            }
            searched.push(directory.to_owned());
        }
        let file_names = names.join(" or ");
        Err(if rejected.is_empty() {
            CudaError::LibraryNotFound { library, file_names, searched }
        } else {
            CudaError::LibraryUnusable { library, file_names, searched, rejected }
        })
    }

    /// Returns the library file at `path` with the reason that it is too new for the driver, or
    /// `None` if the file does not exist.
    fn find_too_new_file(&self, path: PathBuf) -> Option<RejectedLibrary> {
        let driver_cuda_major = self.driver_cuda_major.filter(|_| path.exists())?;
        Some(RejectedLibrary { path, reason: RejectReason::NewerThanDriver { driver_cuda_major } })
    }
}

/// Returns the existing `lib` directories of the `nvidia` packages of a Python environment.
fn list_nvidia_package_directories(prefix: &Path) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    // Debian's Pythons use dist-packages.
    for (lib, packages) in
        [("lib", "site-packages"), ("lib", "dist-packages"), ("local/lib", "dist-packages")]
    {
        for python in list_sorted_entries(&prefix.join(lib)) {
            let is_python = python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3"));
            if is_python {
                let packages = list_sorted_entries(&python.join(packages).join("nvidia"));
                directories.extend(packages.into_iter().map(|package| package.join("lib")));
            }
        }
    }
    directories.retain(|directory| directory.is_dir());
    directories
}

/// Returns the paths of the entries of `directory`, sorted, or no paths if the directory cannot be
/// read.
fn list_sorted_entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> =
        entries.take(MAX_DIRECTORY_ENTRIES).flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths
}

/// Opens the library file at `path` if the file exists. If opening fails, adds the reason to
/// `rejected` and returns `None`.
fn open_library_file(path: &Path, rejected: &mut Vec<RejectedLibrary>) -> Option<OpenLibrary> {
    if !path.exists() {
        return None;
    }
    preload_nvrtc_builtins(path);
    match load_library(path) {
        Ok(library) => Some(OpenLibrary { library, path: path.to_owned() }),
        Err(error) => {
            let reason = RejectReason::Loader(format_loader_error(&error));
            rejected.push(RejectedLibrary { path: path.to_owned(), reason });
            None
        }
    }
}

/// Opens the library `libnvrtc-builtins`, which NVRTC needs, from the directory of `path` if `path`
/// is the file of NVRTC. The library stays open as long as the process lives.
///
/// NVRTC opens `libnvrtc-builtins` by its bare file name. If the library is not in a directory of
/// the dynamic loader, this only works if the library is already open.
fn preload_nvrtc_builtins(path: &Path) {
    let is_nvrtc = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc.so"));
    let Some(directory) = path.parent().filter(|_| is_nvrtc) else { return };
    for file in list_sorted_entries(directory) {
        let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with("libnvrtc-builtins.so.")
            && let Ok(library) = load_library(&file)
        {
            std::mem::forget(library); // stays open as long as the process lives, as NVRTC does
        }
    }
}

/// Returns the dynamic loader's own message about `error`, the failure to open a library.
fn format_loader_error(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Opens the library at `path` with the dynamic loader. If `path` is a bare file name, searches the
/// dynamic loader's directories for it.
fn load_library(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: the initializers of NVIDIA's libraries have no preconditions. The machine's owner
    // decides which file it is.
    unsafe { Library::new(path) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unusable_library_is_reported_with_every_searched_directory() {
        let root = tempfile::tempdir().expect("temporary directory");
        let packages = root.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        fs::create_dir_all(&packages).expect("directories");
        let paths = LibrarySearchPaths {
            configured: vec![root.path().join("configured")],
            ld_library_path: vec!["/from/path".into(), "".into()],
            python_prefixes: vec![root.path().to_owned()],
            toolkit_roots: vec!["/opt/toolkit".into()],
            fallback_python_prefixes: vec![root.path().join("usr")],
            driver_cuda_major: None,
        };
        let debian = root.path().join("usr/local/lib/python3.11/dist-packages/nvidia/cublas/lib");
        fs::create_dir_all(&debian).expect("directories");
        fs::write(packages.join("libcublasLt.so.13"), "not a library").expect("a file");
        let Err(CudaError::LibraryUnusable { searched, rejected, file_names, .. }) =
            paths.open_library(CudaLibrary::CublasLt)
        else {
            panic!("opened a file that is not a library");
        };
        assert_eq!(file_names, "libcublasLt.so.13 or libcublasLt.so.12");
        let first = root.path().join("configured").display().to_string();
        assert_eq!(searched[..3], [first, "/from/path".to_owned(), packages.display().to_string()]);
        assert_eq!(searched[3], "/opt/toolkit/lib64");
        let position = |directory: &str| searched.iter().position(|one| one == directory);
        let fallback = position(&debian.display().to_string());
        assert!(
            fallback > position("/usr/local/cuda-12/lib64") && fallback < position(DYNAMIC_LOADER_LABEL),
            "{searched:?}"
        );
        let [rejected] = &rejected[..] else { panic!("{rejected:?}") };
        assert_eq!(rejected.path, packages.join("libcublasLt.so.13"));
        assert!(matches!(rejected.reason, RejectReason::Loader(_)), "{rejected:?}");
        // a toolkit only contains a stub of the driver
        assert!(paths.list_directories(CudaLibrary::Driver).iter().all(|d| !d.starts_with("/opt/toolkit")));
    }

    #[test]
    fn a_library_that_is_too_new_for_the_driver_is_rejected() {
        let root = tempfile::tempdir().expect("temporary directory");
        let paths =
            LibrarySearchPaths { configured: vec![root.path().to_owned()], ..LibrarySearchPaths::default() };
        for name in ["libnvrtc.so.13", "libnvrtc.so.12"] {
            fs::write(root.path().join(name), "not a library").expect("a file");
        }
        let open_for_driver = |driver| {
            let Err(CudaError::LibraryUnusable { rejected, file_names, .. }) =
                paths.with_driver_version(driver).open_library(CudaLibrary::Nvrtc)
            else {
                panic!("opened a file that is not a library");
            };
            (file_names, rejected)
        };
        let (names, rejected) = open_for_driver(13);
        assert_eq!((names.as_str(), rejected.len()), ("libnvrtc.so.13 or libnvrtc.so.12", 2));
        assert!(rejected.iter().all(|r| matches!(r.reason, RejectReason::Loader(_))), "{rejected:?}");
        let (names, rejected) = open_for_driver(12);
        assert_eq!((names.as_str(), rejected.len()), ("libnvrtc.so.12", 2));
        assert_eq!(rejected[1].path, root.path().join("libnvrtc.so.13"));
        assert_eq!(rejected[1].reason, RejectReason::NewerThanDriver { driver_cuda_major: 12 });
        // the driver and NCCL number their files differently
        for (library, name) in [(CudaLibrary::Driver, "libcuda.so.1"), (CudaLibrary::Nccl, "libnccl.so.2")] {
            assert_eq!(
                paths.with_driver_version(12).partition_file_names_by_driver(library),
                (vec![name], vec![])
            );
        }
    }
}

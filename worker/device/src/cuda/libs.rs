//! Finding CUDA's libraries on this machine, and opening them: nothing of CUDA is linked, and nothing is opened before a job asks for it.
use super::CudaError;
use libloading::Library;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where libraries are looked for, beside the places that every system has.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// What the job says: before everything else.
    pub job: Vec<PathBuf>,
    /// The entries of `LD_LIBRARY_PATH`.
    pub library_path: Vec<PathBuf>,
    /// Prefixes of Python environments, whose `nvidia` packages bring libraries.
    pub python: Vec<PathBuf>,
    /// Roots of toolkits (`CUDA_HOME`, `CUDA_PATH`).
    pub toolkits: Vec<PathBuf>,
    /// Prefixes of Pythons that are there without being chosen: after the toolkits.
    pub other_python: Vec<PathBuf>,
    /// CUDA's major version that the driver implements, where it is known. A library of a newer one is passed over: such a driver
    /// can't run it, and can't load the images that it makes.
    pub driver: Option<u32>,
}

/// One of CUDA's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Driver,
    Compiler,
    Blas,
    /// Attention goes without it.
    Dnn,
    Nccl,
}

impl Wanted {
    /// File names, best first.
    fn names(self) -> &'static [&'static str] {
        match self {
            Wanted::Driver => &["libcuda.so.1"],
            Wanted::Compiler => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Wanted::Blas => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Wanted::Dnn => &["libcudnn.so.9"],
            Wanted::Nccl => &["libnccl.so.2"],
        }
    }

    /// What a person calls it, and where it comes from.
    fn title(self) -> &'static str {
        match self {
            Wanted::Driver => "the NVIDIA driver",
            Wanted::Compiler => "NVRTC, CUDA's run-time compiler",
            Wanted::Blas => "cuBLASLt, CUDA's matrix products",
            Wanted::Dnn => "cuDNN, NVIDIA's attention",
            Wanted::Nccl => "NCCL, NVIDIA's collectives",
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Wanted::Driver => "does `nvidia-smi` work here? In a container: was it started with GPUs?",
            Wanted::Compiler => {
                "install a CUDA toolkit or `pip install nvidia-cuda-nvrtc`, or name its folder in LD_LIBRARY_PATH"
            }
            Wanted::Blas => {
                "install a CUDA toolkit or `pip install nvidia-cublas`, or name its folder in LD_LIBRARY_PATH"
            }
            Wanted::Dnn => {
                "install cuDNN or `pip install nvidia-cudnn-cu13`, or name its folder in LD_LIBRARY_PATH"
            }
            Wanted::Nccl => {
                "install NCCL or `pip install nvidia-nccl-cu13`, or name its folder in LD_LIBRARY_PATH"
            }
        }
    }
}

/// Folders of the system, when its own loader finds nothing.
const SYSTEM: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];
/// Roots of toolkits that installers use.
const TOOLKITS: [&str; 3] = ["/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-12"];
/// Most entries of a folder that are looked at.
const MOST_ENTRIES: usize = 4096;

/// An open library and where it was found.
pub struct Found {
    pub library: Library,
    /// Its path; only its name where the system's loader found it.
    pub path: PathBuf,
}

/// `libnvrtc.so.13` is of CUDA 13.
fn major(name: &str) -> Option<u32> {
    name.rsplit_once(".so.")?.1.parse().ok()
}

impl Places {
    /// The same places for a driver that implements this major version of CUDA.
    pub(super) fn of_driver(&self, major: u32) -> Places {
        Places { driver: Some(major), ..self.clone() }
    }

    /// File names, best first: those that the driver can work with, and those that are too new for it.
    fn names(&self, wanted: Wanted) -> (Vec<&'static str>, Vec<&'static str>) {
        wanted.names().iter().partition(|name| major(name) <= Some(self.driver.unwrap_or(u32::MAX)))
    }

    /// Folders in which the library may lie, best first. The driver belongs to the machine: toolkits only have a stand-in to link with.
    pub fn folders(&self, wanted: Wanted) -> Vec<PathBuf> {
        let mut folders = self.job.clone();
        folders.extend(self.library_path.iter().cloned());
        if wanted != Wanted::Driver {
            folders.extend(self.python.iter().flat_map(|prefix| python_packages(prefix)));
            let toolkits = self.toolkits.iter().cloned().chain(TOOLKITS.map(PathBuf::from));
            folders.extend(toolkits.flat_map(|t| [t.join("lib64"), t.join("targets/x86_64-linux/lib")]));
            folders.extend(self.other_python.iter().flat_map(|prefix| python_packages(prefix)));
        }
        folders.retain(|folder| !folder.as_os_str().is_empty());
        folders
    }

    /// Opens the library from the first place that has it.
    pub fn open(&self, wanted: Wanted) -> Result<Found, CudaError> {
        let mut searched = Vec::new();
        let mut failed = Vec::new();
        let (names, newer) = self.names(wanted);
        let mut look = |folder: &Path| {
            let found = names.iter().find_map(|name| open_file(&folder.join(name), &mut failed));
            if found.is_none() {
                failed.extend(newer.iter().filter_map(|name| self.too_new(&folder.join(name))));
            }
            found
        };
        let known = self.folders(wanted);
        for folder in &known {
            if let Some(found) = look(folder) {
                return Ok(found);
            }
            searched.push(folder.display().to_string());
        }
        for name in &names {
            if let Ok(library) = open_library(Path::new(name)) {
                return Ok(Found { library, path: PathBuf::from(name) });
            }
        }
        searched.push("where the system's loader looks".to_owned());
        for folder in SYSTEM {
            if let Some(found) = look(Path::new(folder)) {
                return Ok(found);
            }
            searched.push(folder.to_owned());
        }
        let (name, advice) = (names.join(" or "), wanted.advice());
        Err(CudaError::NotFound { what: wanted.title(), name, searched, failed, advice })
    }

    /// Why a library that is there isn't opened.
    fn too_new(&self, path: &Path) -> Option<String> {
        let driver = self.driver.filter(|_| path.exists())?;
        Some(format!("{} is of a newer CUDA than the driver, which implements {driver}", path.display()))
    }
}

/// `lib` folders of the `nvidia` packages of a Python environment.
fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    // Debian's Pythons look elsewhere than all others.
    for (lib, packages) in
        [("lib", "site-packages"), ("lib", "dist-packages"), ("local/lib", "dist-packages")]
    {
        for python in entries(&prefix.join(lib)) {
            let is_python = python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3"));
            if is_python {
                let packages = entries(&python.join(packages).join("nvidia"));
                folders.extend(packages.into_iter().map(|package| package.join("lib")));
            }
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Sorted, none where there is no such folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(listed) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = listed.take(MOST_ENTRIES).flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The library of this path; why it can't be opened is added to `failed`.
fn open_file(path: &Path, failed: &mut Vec<String>) -> Option<Found> {
    if !path.exists() {
        return None;
    }
    open_neighbours(path);
    match open_library(path) {
        Ok(library) => Some(Found { library, path: path.to_owned() }),
        Err(e) => {
            failed.push(reason(&e));
            None
        }
    }
}

/// NVRTC opens a second library by its bare name; outside the loader's folders that is only found when it is open already.
fn open_neighbours(path: &Path) {
    let is_compiler = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc.so"));
    let Some(folder) = path.parent().filter(|_| is_compiler) else { return };
    for file in entries(folder) {
        let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with("libnvrtc-builtins.so.")
            && let Ok(library) = open_library(&file)
        {
            std::mem::forget(library); // open as long as the process lives, as the compiler is
        }
    }
}

/// What the loader says.
fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

fn open_library(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: the start-up code of NVIDIA's libraries has no conditions; which file that is, the machine's owner says.
    unsafe { Library::new(path) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_every_place() {
        let folder = tempfile::tempdir().expect("folder");
        let packages = folder.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        fs::create_dir_all(&packages).expect("folders");
        let places = Places {
            job: vec![folder.path().join("of the job")],
            library_path: vec!["/from/path".into(), "".into()],
            python: vec![folder.path().to_owned()],
            toolkits: vec!["/opt/toolkit".into()],
            other_python: vec![folder.path().join("usr")],
            driver: None,
        };
        let debians = folder.path().join("usr/local/lib/python3.11/dist-packages/nvidia/cublas/lib");
        fs::create_dir_all(&debians).expect("folders");
        fs::write(packages.join("libcublasLt.so.13"), "no library").expect("a file");
        let Err(CudaError::NotFound { searched, failed, name, .. }) = places.open(Wanted::Blas) else {
            panic!("found");
        };
        assert_eq!(name, "libcublasLt.so.13 or libcublasLt.so.12");
        let first = folder.path().join("of the job").display().to_string();
        assert_eq!(searched[..3], [first, "/from/path".to_owned(), packages.display().to_string()]);
        assert_eq!(searched[3], "/opt/toolkit/lib64");
        let at = |place: &str| searched.iter().position(|one| one == place);
        let others = at(&debians.display().to_string());
        assert!(
            others > at("/usr/local/cuda-12/lib64") && others < at("where the system's loader looks"),
            "{searched:?}"
        );
        assert!(failed.len() == 1 && failed[0].contains("libcublasLt.so.13"), "{failed:?}");
        // toolkits hold a stand-in for the driver, which is never meant
        assert!(places.folders(Wanted::Driver).iter().all(|f| !f.starts_with("/opt/toolkit")));
    }

    #[test]
    fn a_library_that_is_too_new_for_the_driver_is_passed_over() {
        let folder = tempfile::tempdir().expect("folder");
        let places = Places { job: vec![folder.path().to_owned()], ..Places::default() };
        for name in ["libnvrtc.so.13", "libnvrtc.so.12"] {
            fs::write(folder.path().join(name), "no library").expect("a file");
        }
        let looked = |driver| {
            let Err(CudaError::NotFound { failed, name, .. }) =
                places.of_driver(driver).open(Wanted::Compiler)
            else {
                panic!("found");
            };
            (name, failed)
        };
        let (name, failed) = looked(13);
        assert_eq!((name.as_str(), failed.len()), ("libnvrtc.so.13 or libnvrtc.so.12", 2));
        assert!(failed.iter().all(|why| !why.contains("newer CUDA")), "{failed:?}");
        let (name, failed) = looked(12);
        assert_eq!((name.as_str(), failed.len()), ("libnvrtc.so.12", 2));
        assert!(
            failed[1].contains("libnvrtc.so.13 is of a newer CUDA than the driver, which implements 12"),
            "{failed:?}"
        );
        // those of the driver and of NCCL have numbers of their own
        for (wanted, name) in [(Wanted::Driver, "libcuda.so.1"), (Wanted::Nccl, "libnccl.so.2")] {
            assert_eq!(places.of_driver(12).names(wanted), (vec![name], vec![]));
        }
    }
}

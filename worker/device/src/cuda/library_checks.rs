//! Checks whether CUDA's libraries can be used on this machine, without opening a GPU.
use super::compile::{KERNEL_SOURCES, KernelSource, Nvrtc};
use super::error::Result;
use super::library::CudaLibrary;
use super::library_search::LibrarySearchPaths;
use super::{cudnn, matmul, properties};
use std::path::PathBuf;

/// Checks that the driver shows this process a GPU, and that the libraries that training on a GPU
/// needs can be opened. Returns the memory, in bytes, of the GPU with the least memory. Does not
/// open a GPU.
pub fn check_driver_and_libraries(paths: &LibrarySearchPaths) -> Result<u64> {
    let (driver, smallest_memory) = properties::query_driver_version_and_smallest_memory(paths)?;
    let paths = paths.with_driver_version(driver.0);
    paths.open_library(CudaLibrary::Nvrtc)?;
    paths.open_library(CudaLibrary::CublasLt)?;
    Ok(smallest_memory)
}

/// Returns the name, version and path of each library that training on a GPU needs, or the error of
/// opening the library. cuDNN is optional.
pub fn query_library_versions(paths: &LibrarySearchPaths) -> [(&'static str, Result<(String, PathBuf)>); 4] {
    let driver = properties::query_driver_version(paths);
    let paths =
        &driver.as_ref().map_or_else(|_| paths.clone(), |((major, _), _)| paths.with_driver_version(*major));
    let driver = driver.map(|((major, minor), path)| (format!("CUDA {major}.{minor}"), path));
    let nvrtc = Nvrtc::open(paths).map(|nvrtc| {
        let (major, minor) = nvrtc.version;
        (format!("{major}.{minor}"), nvrtc.path.clone())
    });
    [
        ("driver", driver),
        ("NVRTC", nvrtc),
        ("cuBLASLt", matmul::query_library_version(paths)),
        ("cuDNN", cudnn::query_library_version(paths)),
    ]
}

/// Compiles every CUDA source file that supports the GPU architecture `architecture`, such as
/// `sm_90`, and returns the files' names and compiled kernels (cubin). This needs NVRTC and no GPU.
pub fn compile_kernel_sources(
    paths: &LibrarySearchPaths,
    architecture: &str,
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let nvrtc = Nvrtc::open(paths)?;
    let compiled_for =
        |source: &'static KernelSource| Some((source, source.find_architecture(architecture)?));
    let sources = KERNEL_SOURCES.iter().filter_map(compiled_for);
    sources.map(|(source, architecture)| Ok((source.file, nvrtc.compile(*source, architecture)?))).collect()
}

//! Determines where CUDA libraries are searched for and where compiled kernels are cached, and
//! converts errors of unusable GPUs to diagnostics.
use comm::nccl::{NcclError, NcclLibrary};
use device::cuda::{AttentionBackend, CudaError, CudaLibrary, LibrarySearchPaths};
use diagnostic::{Category, Diagnostic};
use jobspec::{AttentionKernels, TrainSpec, env};
use protocol::probe::LibraryReport;
use std::path::{Path, PathBuf};

/// Collects the directories in which CUDA libraries are searched for: those in job.yaml, then those
/// that environment variables name.
pub(crate) fn collect_library_search_paths(configured: &[PathBuf], workdir: &Path) -> LibrarySearchPaths {
    let path_list = |name: &str| -> Vec<PathBuf> {
        std::env::var_os(name).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
    };
    let paths = |names: &[&str]| -> Vec<PathBuf> {
        names.iter().filter_map(std::env::var_os).filter(|v| !v.is_empty()).map(PathBuf::from).collect()
    };
    LibrarySearchPaths {
        configured: configured.iter().map(|directory| workdir.join(directory)).collect(),
        ld_library_path: path_list(env::LD_LIBRARY_PATH),
        python_prefixes: paths(&[env::VIRTUAL_ENV, env::CONDA_PREFIX]),
        toolkit_roots: paths(&[env::CUDA_HOME, env::CUDA_PATH]),
        fallback_python_prefixes: find_python_prefixes(),
        driver_cuda_major: None,
    }
}

/// Finds the installation prefixes of Python, such as `/usr` and `~/.local`, below which Python
/// packages may contain CUDA libraries.
fn find_python_prefixes() -> Vec<PathBuf> {
    let path = std::env::var_os(env::PATH).unwrap_or_default();
    let python = std::env::split_paths(&path).map(|dir| dir.join("python3")).find(|file| file.is_file());
    let resolved = python.as_ref().and_then(|file| file.canonicalize().ok());
    let prefix = |file: PathBuf| Some(file.parent()?.parent()?.to_owned());
    let user = std::env::var_os(env::HOME).map(|home| Path::new(&home).join(".local"));
    let mut prefixes: Vec<PathBuf> =
        python.into_iter().chain(resolved).filter_map(prefix).chain(user).collect();
    prefixes.dedup();
    prefixes.retain(|prefix| prefix.is_absolute());
    prefixes
}

/// Tries to open each library that training on GPUs needs, such as cuBLASLt and NCCL, and returns
/// the version or the error of each.
pub(crate) fn probe_gpu_libraries(paths: &LibrarySearchPaths) -> Vec<LibraryReport> {
    let report = |name: &str, required, result: diagnostic::Result<_>| LibraryReport {
        name: name.to_owned(),
        required,
        result,
    };
    // cuDNN is optional, because attention has another implementation.
    let gpu_libraries = device::cuda::query_library_versions(paths)
        .into_iter()
        .map(|(name, found)| report(name, name != "cuDNN", found.map_err(Diagnostic::from)));
    let nccl = NcclLibrary::open(&paths.list_directories(CudaLibrary::Nccl));
    let nccl = nccl.map(|nccl| (nccl.version(), nccl.path().to_owned())).map_err(to_unusable_nccl_error);
    gpu_libraries.chain([report("NCCL", false, nccl)]).collect()
}

/// Returns the directory in which compiled kernels are cached, or `None` if the environment names
/// no home directory.
pub(crate) fn find_kernel_cache_directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute(env::XDG_CACHE_HOME).or_else(|| Some(absolute(env::HOME)?.join(".cache")))?;
    Some(cache.join("launch/kernels"))
}

/// Returns which implementation of attention on GPUs (cuDNN or launch's own kernels) the section
/// `train` of job.yaml selects.
pub(crate) fn select_attention_backend(train: &TrainSpec) -> AttentionBackend {
    match train.attention {
        AttentionKernels::Cudnn => AttentionBackend::Cudnn,
        AttentionKernels::Auto if !train.deterministic => AttentionBackend::Auto,
        AttentionKernels::Auto | AttentionKernels::Flash => AttentionBackend::BuiltIn,
    }
}

/// Converts an error of a GPU or a CUDA library to a diagnostic whose exit code 3 stands for faults
/// of the cluster, not of the job.
pub(crate) fn to_unusable_gpu_error(error: CudaError) -> Diagnostic {
    let diagnostic = Diagnostic::from(error).with_category(Category::Cluster);
    let message = format!("cannot use a GPU: {}", diagnostic.message());
    diagnostic.with_message(message)
}

/// The help text for errors of NCCL, which advises how to communicate through host memory instead.
pub(crate) const NCCL_FALLBACK_HELP: &str =
    "set `cluster.comm_backend: host`, whose collectives use host memory";

/// Converts an NCCL error to a diagnostic whose exit code 3 stands for faults of the cluster, not
/// of the job.
pub(crate) fn to_unusable_nccl_error(error: NcclError) -> Diagnostic {
    Diagnostic::from(error).with_category(Category::Cluster).with_help(NCCL_FALLBACK_HELP)
}

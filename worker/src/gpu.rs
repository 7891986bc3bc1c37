//! [`RankDevice`]: the CPU or GPU of a rank, and the directories of CUDA libraries and of compiled
//! kernels.
use crate::{error::Result, session::AgentSession};
use comm::{
    Comm,
    nccl::{NcclComm, NcclError, NcclLibrary},
    staged::StagedComm,
};
use contract::{
    control::WorkerInit,
    env,
    job::{AttentionKernels, ClusterSpec, CommBackend, CudaGraphMode, Precision, TrainSpec},
    probe::LibraryReport,
};
use device::{
    Cuda, Ops,
    cpu::Cpu,
    cuda::{CudaError, CudaLibrary, LibrarySearchPaths},
};
use diagnostic::{Category, Diagnostic, codes};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// The longest wait until all ranks have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(120);

/// Collects the paths in which CUDA libraries are searched for: the directories that the job
/// configures, relative to `workdir`, and then those that the environment of this process names.
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

/// Finds Python installation prefixes: that of the first `python3` on the PATH, before and after
/// resolving links, and that of the user's own packages (`~/.local`).
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

/// Tries to open each library that training opens: the libraries of one GPU, and NCCL for several
/// GPUs. Returns the version or the error of each.
pub(crate) fn probe_libraries(paths: &LibrarySearchPaths) -> Vec<LibraryReport> {
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

/// Returns the directory of compiled kernels, or `None` if the environment names no home directory.
pub(crate) fn find_kernel_cache_directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute(env::XDG_CACHE_HOME).or_else(|| Some(absolute(env::HOME)?.join(".cache")))?;
    Some(cache.join("launch/kernels"))
}

/// Returns the implementation of attention that a job selects.
pub(crate) fn select_attention_backend(train: &TrainSpec) -> device::cuda::AttentionBackend {
    use device::cuda::AttentionBackend;
    match train.attention {
        AttentionKernels::Cudnn => AttentionBackend::Cudnn,
        AttentionKernels::Auto if !train.deterministic => AttentionBackend::Auto,
        AttentionKernels::Auto | AttentionKernels::Flash => AttentionBackend::BuiltIn,
    }
}

/// Converts the error of a GPU, or of a library that it needs, to a diagnostic with exit code 3.
pub(crate) fn to_unusable_gpu_error(error: CudaError) -> Diagnostic {
    let diagnostic = Diagnostic::from(error).with_category(Category::Cluster);
    let message = format!("cannot use a GPU: {}", diagnostic.message());
    diagnostic.with_message(message)
}

/// The device that a rank computes on.
pub(crate) enum RankDevice {
    Cpu(Arc<Cpu>),
    Gpu(Arc<Cuda>, LibrarySearchPaths),
}

impl RankDevice {
    /// Opens the device that the job selects: the CPUs of the host, or the one GPU that the plan
    /// makes visible to this rank.
    pub(crate) fn open(init: &WorkerInit) -> Result<RankDevice> {
        let cluster = &init.job.cluster;
        if !cluster.trains_on_gpus() {
            return Ok(RankDevice::Cpu(Arc::new(Cpu::new(init.threads as usize))));
        }
        let paths = collect_library_search_paths(&cluster.cuda_library_paths, &init.workdir);
        let cuda = Cuda::open(&paths, 0, find_kernel_cache_directory()).map_err(to_unusable_gpu_error)?;
        if let Some(train) = &init.job.train {
            configure_gpu(&cuda, train, &paths)?;
        }
        cuda.load_kernels().map_err(to_unusable_gpu_error)?;
        if let Some(error) = cuda.kernel_cache_error() {
            println!("compiled kernels are not cached: {error}");
        }
        Ok(RankDevice::Gpu(Arc::new(cuda), paths))
    }

    /// Returns the operations of this device.
    pub(crate) fn ops(&self) -> Arc<dyn Ops> {
        match self {
            RankDevice::Cpu(cpu) => cpu.clone(),
            RankDevice::Gpu(cuda, _) => cuda.clone(),
        }
    }

    /// Describes the device in one line, for the worker's log.
    pub(crate) fn describe(&self) -> String {
        match self {
            RankDevice::Cpu(cpu) => cpu.describe(),
            RankDevice::Gpu(cuda, _) => cuda.describe_gpu(),
        }
    }

    /// Returns the communicator that the engine uses. `hosts` is the communicator that transfers
    /// data from and to host memory.
    ///
    /// On a CPU, returns `hosts`. On a GPU, returns either `hosts` with copies between GPU memory
    /// and host memory, or an NCCL communicator, which is set up through `hosts`. An abort of the
    /// session also aborts NCCL.
    ///
    /// Collective: every rank must call it.
    pub(crate) fn connect_collectives(
        &self,
        session: &AgentSession,
        cluster: &ClusterSpec,
        hosts: Arc<dyn Comm>,
    ) -> Result<Arc<dyn Comm>> {
        let RankDevice::Gpu(cuda, paths) = self else { return Ok(hosts) };
        let has_own_gpu = hosts.world() > 1 && cluster.workers_per_gpu == 1;
        match cluster.comm_backend {
            CommBackend::Nccl => {}
            CommBackend::Auto if has_own_gpu => {}
            CommBackend::Auto | CommBackend::Host => {
                return Ok(Arc::new(StagedComm::new(hosts, cuda.clone())));
            }
        }
        let nccl =
            NcclLibrary::open(&paths.list_directories(CudaLibrary::Nccl)).map_err(to_unusable_nccl_error)?;
        if cluster.workers_per_gpu > 1 && !nccl.supports_gpu_sharing() {
            let message = format!(
                "{} does not support {} workers on one GPU; NCCL 2.30 or newer is required",
                nccl.describe(),
                cluster.workers_per_gpu
            );
            return Err(Diagnostic::error(codes::device::DEVICE_LIBRARY_TOO_OLD, message)
                .with_subject("cluster.workers_per_gpu")
                .with_field("workers_per_gpu", cluster.workers_per_gpu)
                .with_help(HOST_MEMORY_HELP)
                .into());
        }
        let comm = Arc::new(
            NcclComm::connect(&nccl, cuda.clone(), hosts, NCCL_TIMEOUT).map_err(to_unusable_nccl_error)?,
        );
        println!("collectives: {}", nccl.describe());
        let aborted = comm.clone();
        session.add_abort_handler(move |reason| aborted.abort(reason));
        Ok(comm)
    }
}

/// The help text for errors of NCCL.
const HOST_MEMORY_HELP: &str = "set `cluster.comm_backend: host`, whose collectives use host memory";

/// Converts an error of NCCL to a diagnostic with exit code 3.
pub(crate) fn to_unusable_nccl_error(error: NcclError) -> Diagnostic {
    Diagnostic::from(error).with_category(Category::Cluster).with_help(HOST_MEMORY_HELP)
}

/// Applies the keys of the `train` section that concern the GPU to `cuda`.
fn configure_gpu(cuda: &Cuda, train: &TrainSpec, paths: &LibrarySearchPaths) -> Result<()> {
    if train.precision == Precision::Fp8 {
        cuda.require_fp8()
            .map_err(|e| Diagnostic::from(e).with_category(Category::Job).with_subject("train.precision"))?;
    }
    if !train.deterministic {
        cuda.enable_matmul_autotuning();
    }
    if let Some(error) =
        cuda.set_attention_backend(select_attention_backend(train), paths).map_err(to_unusable_gpu_error)?
    {
        println!("attention runs without cuDNN: {error}");
    }
    match train.cuda_graphs {
        CudaGraphMode::Auto => cuda.start_graph_autotuning(),
        CudaGraphMode::Always => cuda.set_graphs_enabled(true),
        CudaGraphMode::Never => {}
    }
    Ok(())
}

//! [`RankDevice`]: the CPU or GPU of a rank, and the directories of CUDA libraries and of compiled
//! kernels.
use crate::{error::Result, session::Session};
use comm::{
    Comm,
    nccl::{NcclComm, NcclError, NcclLibrary},
    staged::StagedComm,
};
use contract::{
    control::WorkerInit,
    env,
    job::{Attention, ClusterSpec, CommBackend, CudaGraphs, Precision, TrainSpec},
    probe::LibraryReport,
};
use device::{
    Cuda, Ops,
    cpu::Cpu,
    cuda::{CudaError, CudaLibrary, LibraryPaths},
};
use diagnostic::{Category, Diagnostic, codes};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Longest wait until all ranks have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(120);

/// Where CUDA libraries are searched for: the directories that the job configures (relative to its
/// working directory), then those that the environment of this process names.
pub(crate) fn library_search_paths(configured: &[PathBuf], workdir: &Path) -> LibraryPaths {
    let path_list = |name: &str| -> Vec<PathBuf> {
        std::env::var_os(name).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
    };
    let paths = |names: &[&str]| -> Vec<PathBuf> {
        names.iter().filter_map(std::env::var_os).filter(|v| !v.is_empty()).map(PathBuf::from).collect()
    };
    LibraryPaths {
        configured: configured.iter().map(|directory| workdir.join(directory)).collect(),
        ld_library_path: path_list(env::LD_LIBRARY_PATH),
        python_prefixes: paths(&[env::VIRTUAL_ENV, env::CONDA_PREFIX]),
        toolkit_roots: paths(&[env::CUDA_HOME, env::CUDA_PATH]),
        fallback_python_prefixes: python_prefixes(),
        driver_cuda_major: None,
    }
}

/// The prefix of the first `python3` on the PATH, before and after resolving links, and the prefix
/// of the user's own packages.
fn python_prefixes() -> Vec<PathBuf> {
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

/// Tries to open each library that training opens: those of one GPU, and NCCL for several.
pub(crate) fn probe_libraries(paths: &LibraryPaths) -> Vec<LibraryReport> {
    let report = |name: &str, required, result: diagnostic::Result<_>| LibraryReport {
        name: name.to_owned(),
        required,
        result,
    };
    // Attention has an implementation without cuDNN.
    let gpu_libraries = device::cuda::library_versions(paths)
        .into_iter()
        .map(|(name, found)| report(name, name != "cuDNN", found.map_err(Diagnostic::from)));
    let nccl = NcclLibrary::open(&paths.directories(CudaLibrary::Nccl));
    let nccl = nccl.map(|nccl| (nccl.version(), nccl.path().to_owned())).map_err(unusable_nccl);
    gpu_libraries.chain([report("NCCL", false, nccl)]).collect()
}

/// The directory of compiled kernels; `None` if the environment names no home directory.
pub(crate) fn kernel_cache_directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute(env::XDG_CACHE_HOME).or_else(|| Some(absolute(env::HOME)?.join(".cache")))?;
    Some(cache.join("launch/kernels"))
}

/// The implementation of attention that a job selects.
pub(crate) fn attention_backend(train: &TrainSpec) -> device::cuda::AttentionBackend {
    use device::cuda::AttentionBackend;
    match train.attention {
        Attention::Cudnn => AttentionBackend::Cudnn,
        Attention::Auto if !train.deterministic => AttentionBackend::Auto,
        Attention::Auto | Attention::Flash => AttentionBackend::BuiltIn,
    }
}

/// Converts the error of a GPU, or of a library that it needs, to a diagnostic with exit code 3.
pub(crate) fn unusable_gpu(error: CudaError) -> Diagnostic {
    let diagnostic = Diagnostic::from(error).with_category(Category::Cluster);
    let message = format!("cannot use a GPU: {}", diagnostic.message());
    diagnostic.with_message(message)
}

/// The device that a rank computes on.
pub(crate) enum RankDevice {
    Cpu(Arc<Cpu>),
    Gpu(Arc<Cuda>, LibraryPaths),
}

impl RankDevice {
    /// Opens the device that the job selects: the CPUs of the host, or the one GPU that the plan
    /// makes visible to this rank.
    pub(crate) fn open(init: &WorkerInit) -> Result<RankDevice> {
        let cluster = &init.job.cluster;
        if !cluster.trains_on_gpus() {
            return Ok(RankDevice::Cpu(Arc::new(Cpu::new(init.threads as usize))));
        }
        let paths = library_search_paths(&cluster.cuda_library_paths, &init.workdir);
        let cuda = Cuda::open(&paths, 0, kernel_cache_directory()).map_err(unusable_gpu)?;
        if let Some(train) = &init.job.train {
            configure_gpu(&cuda, train, &paths)?;
        }
        cuda.load_kernels().map_err(unusable_gpu)?;
        if let Some(error) = cuda.kernel_cache_error() {
            println!("compiled kernels are not cached: {error}");
        }
        Ok(RankDevice::Gpu(Arc::new(cuda), paths))
    }

    /// The operations of this device.
    pub(crate) fn ops(&self) -> Arc<dyn Ops> {
        match self {
            RankDevice::Cpu(cpu) => cpu.clone(),
            RankDevice::Gpu(cuda, _) => cuda.clone(),
        }
    }

    /// One line about the device, for the worker's log.
    pub(crate) fn describe(&self) -> String {
        match self {
            RankDevice::Cpu(cpu) => cpu.describe(),
            RankDevice::Gpu(cuda, _) => cuda.describe(),
        }
    }

    /// The collectives of the engine: those of `hosts`, or NCCL, which `hosts` connects. An abort
    /// of the session also ends NCCL's. Collective.
    pub(crate) fn connect_collectives(
        &self,
        session: &Session,
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
        let nccl = NcclLibrary::open(&paths.directories(CudaLibrary::Nccl)).map_err(unusable_nccl)?;
        if cluster.workers_per_gpu > 1 && !nccl.supports_gpu_sharing() {
            let message = format!(
                "{} does not support {} workers on one GPU; NCCL 2.30 or newer is required",
                nccl.describe(),
                cluster.workers_per_gpu
            );
            return Err(Diagnostic::error(codes::device::DEVICE_LIBRARY_TOO_OLD, message)
                .with_subject("cluster.workers_per_gpu")
                .with_field("workers_per_gpu", cluster.workers_per_gpu)
                .with_help(USE_HOST_MEMORY)
                .into());
        }
        let comm =
            Arc::new(NcclComm::connect(&nccl, cuda.clone(), hosts, NCCL_TIMEOUT).map_err(unusable_nccl)?);
        println!("collectives: {}", nccl.describe());
        let aborted = comm.clone();
        session.on_abort(move |reason| aborted.abort(reason));
        Ok(comm)
    }
}

/// Advice for errors of NCCL.
const USE_HOST_MEMORY: &str = "set `cluster.comm_backend: host`, whose collectives use host memory";

/// Converts an error of NCCL to a diagnostic with exit code 3.
pub(crate) fn unusable_nccl(error: NcclError) -> Diagnostic {
    Diagnostic::from(error).with_category(Category::Cluster).with_help(USE_HOST_MEMORY)
}

/// Applies the keys of the `train` section that concern the GPU.
fn configure_gpu(cuda: &Cuda, train: &TrainSpec, paths: &LibraryPaths) -> Result<()> {
    if train.precision == Precision::Fp8 {
        cuda.require_fp8()
            .map_err(|e| Diagnostic::from(e).with_category(Category::Job).with_subject("train.precision"))?;
    }
    if !train.deterministic {
        cuda.enable_matmul_autotuning();
    }
    if let Some(error) = cuda.set_attention_backend(attention_backend(train), paths).map_err(unusable_gpu)? {
        println!("attention runs without cuDNN: {error}");
    }
    match train.cuda_graphs {
        CudaGraphs::Auto => cuda.autotune_graphs(),
        CudaGraphs::Always => cuda.set_graphs_enabled(true),
        CudaGraphs::Never => {}
    }
    Ok(())
}

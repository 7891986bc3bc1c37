//! What the worker asks of this machine about GPUs: where CUDA's libraries may lie, where compiled kernels are kept; and where a
//! rank computes.
use crate::{
    error::{Error, Result},
    session::Session,
};
use comm::{
    Comm,
    nccl::{Nccl, NcclComm},
    staged::Staged,
};
use contract::{
    control::WorkerInit,
    env,
    job::{Attention, ClusterSpec, Collectives, CudaGraphs, Numerics, Precision, TrainSpec},
    probe::LibraryLook,
};
use device::{
    Cuda, Ops,
    cpu::Cpu,
    cuda::{Places, Wanted},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Longest wait until all ranks have joined NCCL's group.
const NCCL_LIMIT: Duration = Duration::from_secs(120);

/// From the job (`cluster.cuda_libs`, relative to its working directory) and the environment of this process.
pub(crate) fn places(libs: &[PathBuf], workdir: &Path) -> Places {
    let all = |name: &str| -> Vec<PathBuf> {
        std::env::var_os(name).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
    };
    let paths = |names: &[&str]| -> Vec<PathBuf> {
        names.iter().filter_map(std::env::var_os).filter(|v| !v.is_empty()).map(PathBuf::from).collect()
    };
    Places {
        job: libs.iter().map(|folder| workdir.join(folder)).collect(),
        library_path: all(env::LD_LIBRARY_PATH),
        python: paths(&[env::VIRTUAL_ENV, env::CONDA_PREFIX]),
        toolkits: paths(&[env::CUDA_HOME, env::CUDA_PATH]),
        other_python: pythons(),
        driver: None,
    }
}

/// Prefixes of the first Python on the PATH, where it is called and where it lies, and of this user's packages.
fn pythons() -> Vec<PathBuf> {
    let path = std::env::var_os(env::PATH).unwrap_or_default();
    let called =
        std::env::split_paths(&path).map(|folder| folder.join("python3")).find(|file| file.is_file());
    let lies = called.as_ref().and_then(|file| file.canonicalize().ok());
    let prefix = |file: PathBuf| Some(file.parent()?.parent()?.to_owned());
    let own = std::env::var_os(env::HOME).map(|home| Path::new(&home).join(".local"));
    let mut all: Vec<PathBuf> = called.into_iter().chain(lies).filter_map(prefix).chain(own).collect();
    all.dedup();
    all.retain(|prefix| prefix.is_absolute());
    all
}

/// What training opens: on one GPU, and NCCL between several.
pub(crate) fn libraries(places: &Places) -> Vec<LibraryLook> {
    let look = |name: &str, needed, found: std::result::Result<_, String>| LibraryLook {
        name: name.to_owned(),
        needed,
        found,
    };
    let of_one = device::cuda::libraries(places);
    // attention goes without cuDNN
    let of_one =
        of_one.into_iter().map(|(name, found)| look(name, name != "cuDNN", found.map_err(|e| e.to_string())));
    let nccl = Nccl::open(&places.folders(Wanted::Nccl));
    let nccl = nccl.map(|nccl| (nccl.version(), nccl.path().to_owned())).map_err(|e| e.to_string());
    of_one.chain([look("NCCL", false, nccl)]).collect()
}

/// Where compiled kernels are kept: nowhere on a machine without a home.
pub(crate) fn kernel_cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = set(env::XDG_CACHE_HOME).or_else(|| Some(set(env::HOME)?.join(".cache")))?;
    Some(cache.join("launch/kernels"))
}

/// Whose attention a job asks for.
pub(crate) fn attention(train: &TrainSpec) -> device::cuda::Attention {
    use device::cuda::Attention as Whose;
    match train.attention {
        Attention::Cudnn => Whose::Dnn,
        Attention::Auto if train.numerics == Numerics::Fast => Whose::Fastest,
        Attention::Auto | Attention::Flash => Whose::Own,
    }
}

/// What a rank computes on.
pub(crate) enum Device {
    Host(Arc<Cpu>),
    Card(Arc<Cuda>, Places),
}

impl Device {
    /// Of the job: the host's CPUs, or the one GPU that the plan shows this rank.
    pub(crate) fn open(welcome: &WorkerInit) -> Result<Device> {
        let cluster = &welcome.job.cluster;
        if !cluster.trains_on_gpus() {
            return Ok(Device::Host(Arc::new(Cpu::new(welcome.threads as usize))));
        }
        let places = places(&cluster.cuda_libs, &welcome.workdir);
        let unusable = |e| Error::cluster(format!("no GPU can be used for `cluster.devices`: {e}"));
        let cuda = Cuda::open(&places, 0, kernel_cache()).map_err(unusable)?;
        if let Some(train) = &welcome.job.train {
            if train.precision == Precision::Fp8 {
                cuda.check_fp8().map_err(|e| Error::job(format!("train.precision: {e}")))?;
            }
            if train.numerics == Numerics::Fast {
                cuda.time_products();
            }
            if let Some(why) = cuda.choose_attention(attention(train), &places).map_err(unusable)? {
                println!("attention goes without cuDNN: {why}");
            }
            match train.cuda_graphs {
                CudaGraphs::Auto => cuda.try_graphs(),
                CudaGraphs::Always => cuda.use_graphs(true),
                CudaGraphs::Never => {}
            }
        }
        cuda.warm_up().map_err(unusable)?;
        if let Some(why) = cuda.unkept_kernels() {
            println!("compiled kernels aren't kept: {why}");
        }
        Ok(Device::Card(Arc::new(cuda), places))
    }

    /// Its ops.
    pub(crate) fn ops(&self) -> Arc<dyn Ops> {
        match self {
            Device::Host(cpu) => cpu.clone(),
            Device::Card(cuda, _) => cuda.clone(),
        }
    }

    /// For the log.
    pub(crate) fn describe(&self) -> String {
        match self {
            Device::Host(cpu) => cpu.describe(),
            Device::Card(cuda, _) => cuda.describe(),
        }
    }

    /// The collectives of the engine, over those of the hosts' memory. An abort ends them, too.
    pub(crate) fn collectives(
        &self,
        session: &Session,
        cluster: &ClusterSpec,
        hosts: Arc<dyn Comm>,
    ) -> Result<Arc<dyn Comm>> {
        let Device::Card(cuda, places) = self else { return Ok(hosts) };
        let own = hosts.world() > 1 && cluster.workers_per_gpu == 1;
        match cluster.collectives {
            Collectives::Nccl => {}
            Collectives::Auto if own => {}
            Collectives::Auto | Collectives::Host => return Ok(Arc::new(Staged::new(hosts, cuda.clone()))),
        }
        let without = |e: comm::nccl::NcclError| {
            Error::cluster(format!("{e}; `cluster.collectives: host` goes by way of the host's memory"))
        };
        let nccl = Nccl::open(&places.folders(Wanted::Nccl)).map_err(without)?;
        if cluster.workers_per_gpu > 1 && !nccl.shares_gpus() {
            return Err(Error::cluster(format!(
                "{} can't have two workers on a GPU, NCCL 2.30 or newer can; `cluster.collectives: host` goes by way of the host's \
                 memory",
                nccl.describe()
            )));
        }
        let comm = NcclComm::meet(&nccl, cuda.clone(), hosts, NCCL_LIMIT).map_err(without)?;
        let comm = Arc::new(comm);
        println!("collectives: {}", nccl.describe());
        let aborted = comm.clone();
        session.also_abort(move |reason| aborted.abort(reason));
        Ok(comm)
    }
}

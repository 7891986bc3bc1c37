//! [`RankDevice`]: the CPU or GPU on which a rank computes. Also creates the communicator that fits
//! the device.
use super::session::AgentSession;
use crate::{
    error::Result,
    gpu::{
        NCCL_FALLBACK_HELP, collect_library_search_paths, find_kernel_cache_directory,
        select_attention_backend, to_unusable_gpu_error, to_unusable_nccl_error,
    },
};
use comm::{
    Comm,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
};
use device::{
    Cuda, Ops,
    cpu::Cpu,
    cuda::{CudaLibrary, LibrarySearchPaths},
};
use diagnostic::{Category, Diagnostic, codes};
use jobspec::{ClusterSpec, CommBackend, CudaGraphMode, Precision, TrainSpec, env, ids::Rank};
use protocol::{control::WorkerInit, event::Event};
use std::{sync::Arc, time::Duration};

/// The longest wait until all ranks have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(120);

/// The CPU or GPU on which a rank computes.
pub(super) enum RankDevice {
    Cpu(Arc<Cpu>),
    Gpu(Arc<Cuda>, LibrarySearchPaths),
}

impl RankDevice {
    /// Opens the device on which this rank trains: the CPUs of the host, or the only GPU that is
    /// visible in the rank's environment.
    pub(super) fn open(init: &WorkerInit) -> Result<RankDevice> {
        let cluster = &init.job.cluster;
        if !cluster.trains_on_gpus() {
            return Ok(RankDevice::Cpu(Arc::new(open_cpu(init.threads as usize)?)));
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

    /// Turns CUDA graphs on or off, or begins to measure whether they are faster. Does nothing on a
    /// CPU.
    pub(super) fn configure_cuda_graphs(&self, mode: CudaGraphMode) {
        let RankDevice::Gpu(cuda, _) = self else { return };
        match mode {
            CudaGraphMode::Auto => cuda.start_graph_autotuning(),
            CudaGraphMode::Always => cuda.set_graphs_enabled(true),
            CudaGraphMode::Never => {}
        }
    }

    /// On the first rank of each host, sends the controller a warning if the CPUs of the host
    /// compute wrong results with some of their instructions, which are therefore not used.
    pub(super) fn report_rejected_instructions(
        &self,
        session: &AgentSession,
        init: &WorkerInit,
    ) -> Result<()> {
        let RankDevice::Cpu(cpu) = self else { return Ok(()) };
        match cpu.describe_rejected_instructions().filter(|_| init.local_rank == 0) {
            Some(rejected) => session.send_event(build_rejected_instructions_event(init.rank, rejected)),
            None => Ok(()),
        }
    }

    /// Returns the implementation of operations (matmuls, copies and so on) for this device.
    pub(super) fn ops(&self) -> Arc<dyn Ops> {
        match self {
            RankDevice::Cpu(cpu) => cpu.clone(),
            RankDevice::Gpu(cuda, _) => cuda.clone(),
        }
    }

    /// Describes the device in one line, for the worker's log.
    pub(super) fn describe(&self) -> String {
        match self {
            RankDevice::Cpu(cpu) => cpu.describe(),
            RankDevice::Gpu(cuda, _) => cuda.describe_gpu(),
        }
    }

    /// Returns the communicator with which this rank takes part in collectives on device memory,
    /// over NCCL or through host memory. `hosts` is the communicator that transfers data between
    /// host memories.
    ///
    /// On a CPU, returns `hosts`. On a GPU, returns either `hosts` with copies between GPU memory
    /// and host memory, or an NCCL communicator, which is set up through `hosts`. An abort of the
    /// session also aborts NCCL.
    ///
    /// Collective: every rank must call it.
    pub(super) fn connect_collectives(
        &self,
        session: &AgentSession,
        cluster: &ClusterSpec,
        hosts: Arc<dyn Comm>,
    ) -> Result<Arc<dyn Comm>> {
        let RankDevice::Gpu(cuda, paths) = self else { return Ok(hosts) };
        let has_own_gpu = hosts.world_size() > 1 && cluster.workers_per_gpu == 1;
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
                .with_help(NCCL_FALLBACK_HELP)
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

/// Builds the warning of the rank `rank` that some instructions of its CPUs are not used, for the
/// reason `rejected`.
fn build_rejected_instructions_event(rank: Rank, rejected: &str) -> Event {
    let warning = Diagnostic::warning(codes::training::CPU_INSTRUCTIONS_WRONG, rejected).with_remedy();
    Event::new_diagnostic_notice(Some(rank), rejected.to_owned(), &warning)
}

/// Opens the CPUs of the host, with the best instruction set, or with the one that the environment
/// variable `LAUNCH_MAX_CPU_ISA` names.
fn open_cpu(threads: usize) -> Result<Cpu> {
    let Some(name) = std::env::var_os(env::LAUNCH_MAX_CPU_ISA) else { return Ok(Cpu::new(threads)) };
    Cpu::with_max_instruction_set(threads, &name.to_string_lossy()).map_err(|error| {
        let message = format!("{}: {error}", env::LAUNCH_MAX_CPU_ISA);
        Diagnostic::error(codes::training::CPU_INSTRUCTION_SET_UNAVAILABLE, message)
            .with_subject(env::LAUNCH_MAX_CPU_ISA)
            .into()
    })
}

/// Configures the opened GPU `cuda` by the job's `train` section, for example whether cuDNN
/// computes attention.
fn configure_gpu(cuda: &Cuda, train: &TrainSpec, paths: &LibrarySearchPaths) -> Result<()> {
    if train.precision == Precision::Fp8 {
        cuda.require_fp8()
            .map_err(|e| Diagnostic::from(e).with_category(Category::Job).with_subject("train.precision"))?;
    }
    if !train.deterministic {
        cuda.enable_matmul_autotuning();
        cuda.enable_matmul_epilogues_where_faster();
    }
    if let Some(error) =
        cuda.set_attention_backend(select_attention_backend(train), paths).map_err(to_unusable_gpu_error)?
    {
        println!("attention runs without cuDNN: {error}");
    }
    Ok(())
}

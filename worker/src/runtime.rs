//! The process of a worker: connects to the agent and the other ranks, builds the trainer, resumes,
//! trains, and gathers the weights.
mod gather_weights;
mod samples;

use crate::{
    checkpoint_mapping::checkpoint_model_spec,
    consensus::exchange_values,
    data::TextTokenizer,
    error::{Error, Result, unwritable_checkpoint},
    gpu::RankDevice,
    host_local, network,
    params::ParamUnit,
    resume::{CheckpointDirs, PretrainedModel, ResumePoint, resume, start_from_model},
    save::{CheckpointSaver, RunMetadata, checkpoint_bytes},
    session::{Session, inherited_descriptor},
    stages::{ReadyTrainer, ResolvedSpec, RunningTrainer},
    storage_layout::{StorageLayout, detect_layout},
    train::run::{RunContext, train_until_done},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{Staging, TextFile};
use comm::{Comm, local, shm::ShmComm};
use contract::{
    control::WorkerInit,
    env,
    event::{Event, Phase},
    exit::WorkerExit,
    job::{Offload, TrainSpec, ZeroSpec},
};
use device::storage::DeviceError;
use diagnostic::{Category, Diagnostic, codes};
use gather_weights::gather_weights;
use samples::SampleSets;
use std::{
    any::Any,
    os::{fd::OwnedFd, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes of shared memory for one message of a rank; larger messages are sent in windows of this
/// size. Small, because each rank's memory counts the staging memory of every rank.
pub const STAGING_BYTES: usize = 1 << 20;

/// Runs the subcommand `launch worker`. Returns the exit code of the process.
pub fn main() -> u8 {
    ignore_signals();
    let (session, read, init) = match Session::connect() {
        Ok(joined) => joined,
        Err(e) => {
            // No agent is connected, so only the terminal can show the error.
            eprint!("launch worker: {}", diagnostic::render(e.diagnostic(), false));
            return e.exit().code();
        }
    };
    silence_device_panics();
    let result = connect_ranks(&session, read, &init).and_then(|comm| {
        let result = catch_device_errors(|| run_rank(&session, &init, comm.clone()));
        if let Err(e) = &result {
            // The other ranks get the reason before they notice that this rank ended.
            comm.abort(&format!("rank {}: {e}", init.rank));
        }
        result
    });
    record_fault_points(&init);
    match result {
        Ok(exit) => exit.code(),
        Err(e) => {
            eprint!("{}", diagnostic::render(e.diagnostic(), false));
            session.report_failure(&e);
            e.exit().code()
        }
    }
}

/// Converts the panic of a failed device operation to an error. Operations return no errors; they
/// panic with a [`DeviceError`].
fn catch_device_errors<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    let from_panic = |panic: Box<dyn Any + Send>| match panic.downcast::<DeviceError>() {
        Ok(error) => Err(error.0.with_category(Category::Failed).into()),
        Err(other) => resume_unwind(other),
    };
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(from_panic)
}

/// Suppresses the panic messages of device errors, which this rank reports as errors.
pub(crate) fn silence_device_panics() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<DeviceError>() {
            default_hook(info);
        }
    }));
}

/// Ignores the signals that a batch system or terminal sends to every process of a job. The
/// controller decides once, for all ranks, at which step to save and stop.
fn ignore_signals() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for ignored in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2] {
        // SAFETY: ignoring a signal installs no handler. It does not fail for these signals.
        _ = unsafe { signal(ignored, SigHandler::SigIgn) };
    }
}

/// Connects the ranks of the job. From then on the session aborts the collectives when the agent
/// requests it. Collective.
fn connect_ranks(session: &Arc<Session>, read: UnixStream, init: &WorkerInit) -> Result<Arc<dyn Comm>> {
    arm_fault_point(init)?;
    let limits = comm::shm::ShmLimits { staging_bytes: STAGING_BYTES, ..Default::default() };
    if init.local_world < init.world {
        return network::connect_hosts(session, read, init, inherited_shared_memory()?, limits);
    }
    let comm: Arc<dyn Comm> = match init.world {
        1 => Arc::new(local::group(1).remove(0)),
        world => {
            let fd = inherited_shared_memory()?.ok_or_else(|| {
                let message =
                    format!("{} is not set, so the other ranks cannot be reached", env::LAUNCH_SHM_FD);
                Diagnostic::error(codes::training::SHARED_MEMORY_MISSING, message)
                    .with_subject(env::LAUNCH_SHM_FD)
            })?;
            Arc::new(ShmComm::join(fd, init.rank as usize, world as usize, limits)?)
        }
    };
    let aborted = comm.clone();
    session.start_threads(read, move |reason| aborted.abort(reason))?;
    Ok(comm)
}

fn inherited_shared_memory() -> Result<Option<OwnedFd>> {
    inherited_descriptor(env::LAUNCH_SHM_FD)
}

/// Runs one rank after it is connected: builds the trainer, resumes, trains, and gathers the
/// weights. Collective.
fn run_rank(session: &Session, init: &WorkerInit, comm: Arc<dyn Comm>) -> Result<WorkerExit> {
    let job = &init.job;
    let train = &absolute_train_spec(init)?;
    let is_leader = init.rank == 0;
    limit_threads(init.threads as usize)?;
    let device = RankDevice::open(init)?;
    println!("rank {} of {}: pid {}, {}", init.rank, init.world, std::process::id(), device.describe());
    let (ops, comm) = (device.ops(), device.connect_collectives(session, &job.cluster, comm)?);

    let tokenizer = TextTokenizer::open(&train.data.tokenizer, &init.workdir)?;
    let samples = SampleSets::open(train, init, comm.as_ref())?;
    samples.send_data_warnings(session, is_leader)?;
    let mut pretrained = PretrainedModel::open(train.model.from.as_deref(), comm.as_ref())?;
    let model = ResolvedSpec::new(train, tokenizer.vocab_size())?.build_model()?;
    let parameters = model.trained_count();
    let ready = model.shard(comm, ops)?.create_optimizer()?.set_schedule();
    let root = checkpoint_root(init);
    let layout = checkpoint_layout(session, init, ready.trainer.engine.queue(), &root)?;
    check_checkpoint_storage(&ready, &root, &layout)?;

    session.set_phase(Phase::Resuming)?;
    let mut metadata = run_metadata(&ready, init, &tokenizer, &samples);
    if let Some(pretrained) = &pretrained {
        pretrained.add_texts(&mut metadata.tokenizer);
    }
    let dirs = CheckpointDirs { root: &root, workdir: &init.workdir, layout: &layout };
    let (mut running, resumed) =
        resume_or_initialise(session, init, ready, &dirs, &samples.digest, pretrained.as_mut())?;
    if let Some(resumed) = &resumed {
        (metadata.rng_generation, metadata.rng_decision) =
            resumed.rng_decision(job.resume.rng, init.world as usize);
    }
    let last = resumed.filter(|r| r.is_native).map(|r| r.path);
    let mut saver =
        CheckpointSaver::new(root.clone(), job.checkpoint.clone(), metadata, last, layout.clone());
    report_ready(session, &running, parameters, is_leader)?;
    let held_out = samples.held_out(train, &tokenizer)?;
    let run_spec = RunContext { job, session, source: &samples.train, held_out, is_leader };
    let exit = train_until_done(&mut running, &run_spec, &mut saver)?;
    if exit == WorkerExit::Done && job.checkpoint.gather_16bit_weights_on_model_save {
        session.set_phase(Phase::Gathering)?;
        gather_weights(session, running.trainer.engine.queue(), &saver, &root, &layout)?;
    }
    session.set_phase(Phase::Ending)?;
    wait_for_all_ranks(&running)?;
    Ok(exit)
}

/// The `train` section with paths relative to the working directory made absolute.
fn absolute_train_spec(init: &WorkerInit) -> Result<TrainSpec> {
    let train = init.job.train.as_ref().ok_or_else(|| {
        Error::new(codes::training::TRAIN_SECTION_MISSING, "the job has no `train` section")
    })?;
    let offload = train.zero.offload.clone().map(|offload| match offload {
        Offload::Files(directory) => Offload::Files(init.workdir.join(directory)),
        Offload::Cpu => Offload::Cpu,
    });
    Ok(TrainSpec {
        model: train.model.resolve_paths(&init.workdir),
        lora: train.lora.as_ref().map(|l| l.resolve_paths(&init.workdir)),
        zero: ZeroSpec { offload, ..train.zero.clone() },
        ..train.clone()
    })
}

/// Limits parallel work outside of the device (initialisation, tokenizing) to `threads` threads.
fn limit_threads(threads: usize) -> Result<()> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| {
        Diagnostic::error(codes::training::WORKER_THREAD_FAILED, "cannot start the thread pool")
            .with_field("threads", threads)
            .with_cause(&e)
            .into()
    })
}

/// Loads the checkpoint that the job names, or initialises the model. Returns the resume point if
/// there is one. Collective.
fn resume_or_initialise(
    session: &Session,
    init: &WorkerInit,
    mut ready: ReadyTrainer,
    dirs: &CheckpointDirs,
    data_digest: &str,
    pretrained: Option<&mut PretrainedModel>,
) -> Result<(RunningTrainer, Option<ResumePoint>)> {
    let mut send = |event| if init.rank == 0 { session.send_event(event) } else { Ok(()) };
    match resume(&mut ready, &init.job, dirs, data_digest, &mut send)? {
        Some(resumed) => Ok((ready.start_at(resumed.cursor), Some(resumed))),
        None => Ok((start_from_model(ready, pretrained, &mut send)?, None)),
    }
}

/// Reports that this rank is ready to train.
fn report_ready(session: &Session, running: &RunningTrainer, parameters: u64, is_leader: bool) -> Result<()> {
    let step = running.position.step;
    session.set_step(step);
    if !is_leader {
        return Ok(());
    }
    let train = running.train_spec();
    let tokens_per_step = running.trainer.global_batch() * u64::from(train.data.seq_len);
    session.send_event(Event::Ready { step, total_steps: train.steps, parameters, tokens_per_step })
}

/// Waits until every rank has finished its last collective. A GPU may still execute it after the
/// call, and other ranks then read this rank's memory. Collective.
fn wait_for_all_ranks(running: &RunningTrainer) -> Result<()> {
    let queue = running.trainer.engine.queue();
    queue.run(|_| Ok(()))?;
    running.trainer.ops.synchronize();
    Ok(queue.run(|comm| comm.barrier())?)
}

/// The directory of checkpoints: `checkpoint.dir` with `{name}` replaced, in the working directory.
fn checkpoint_root(init: &WorkerInit) -> PathBuf {
    let dir = init.job.checkpoint.dir.to_string_lossy().replace("{name}", &init.job.name);
    init.workdir.join(dir)
}

/// Detects which ranks share the checkpoint directory. With host-local directories, completes a
/// commit that was interrupted. Collective.
fn checkpoint_layout(
    session: &Session,
    init: &WorkerInit,
    queue: &CollectiveQueue,
    root: &Path,
) -> Result<StorageLayout> {
    if init.local_world >= init.world {
        return Ok(StorageLayout::shared(init.world as usize));
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let token = format!("{}-{}", init.run, init.attempt);
    let is_required = init.job.checkpoint.require_shared;
    let layout = detect_layout(queue, init.local_rank == 0, host.trim(), &token, root, is_required)?;
    if layout.is_shared() {
        return Ok(layout);
    }
    if init.job.checkpoint.parity {
        let message =
            "`checkpoint.parity` needs a checkpoint directory that all hosts share, and they do not";
        return Err(Diagnostic::error(codes::training::PARITY_NEEDS_SHARED_STORAGE, message)
            .with_subject("checkpoint.parity")
            .with_help("point `checkpoint.dir` at shared storage, or remove `checkpoint.parity`")
            .into());
    }
    host_local::complete_interrupted_commits(queue, &layout, root)?;
    if init.rank == 0 {
        let message = format!(
            "checkpoint.dir is not shared: each of {} directories on the hosts stores the shards of its workers",
            layout.hosts().len()
        );
        session.send_event(Event::notice(Some(0), message))?;
    }
    Ok(layout)
}

/// Checks before the first step that a checkpoint can be written: creates and removes a staging
/// directory, which also checks the free space. Collective.
fn check_checkpoint_storage(ready: &ReadyTrainer, root: &Path, layout: &StorageLayout) -> Result<()> {
    let (engine, optimizer) = (&ready.trainer.engine, &ready.trainer.optimizer);
    let rank = engine.rank();
    let result = if layout.directory_leader(rank) == rank {
        let bytes = layout.bytes_share(rank, checkpoint_bytes(engine, optimizer));
        Staging::begin(root, 0, bytes).map(drop).map_err(unwritable_checkpoint)
    } else {
        Ok(())
    };
    exchange_values(engine.queue(), result).map(drop)
}

/// The metadata that every checkpoint of this run stores.
fn run_metadata(
    ready: &ReadyTrainer,
    init: &WorkerInit,
    tokenizer: &TextTokenizer,
    samples: &SampleSets,
) -> RunMetadata {
    let train = ready.train_spec();
    let trainer = &ready.trainer;
    let units: Vec<ParamUnit> = trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let files = tokenizer.hf_files().into_iter().map(|(name, text)| TextFile { name, text });
    RunMetadata {
        model: checkpoint_model_spec(trainer.model.as_ref(), &units, train, tokenizer.eod()),
        tokenizer: files.collect(),
        job: init.job.clone(),
        data_digest: samples.digest.clone(),
        rng_generation: 0,
        rng_decision: serde_json::Value::Null,
    }
}

/// For tests: `LAUNCH_FAULT=RANK:N` kills the worker of the rank at its N-th fault point.
fn arm_fault_point(init: &WorkerInit) -> Result<()> {
    let Some(value) = std::env::var_os(env::LAUNCH_FAULT) else { return Ok(()) };
    let parsed = value
        .to_str()
        .and_then(|v| v.split_once(':'))
        .and_then(|(rank, n)| Some((rank.parse::<u32>().ok()?, n.parse().ok()?)));
    let (rank, n) = parsed.ok_or_else(|| {
        let message = format!("{}={value:?} is not of the form RANK:N", env::LAUNCH_FAULT);
        Diagnostic::error(codes::training::FAULT_INJECTION_INVALID, message).with_subject(env::LAUNCH_FAULT)
    })?;
    if rank == init.rank {
        ckpt::fault::arm(n);
    }
    Ok(())
}

/// For tests: appends the rank and the number of fault points it passed to the file that
/// `LAUNCH_FAULT_COUNT` names.
fn record_fault_points(init: &WorkerInit) {
    let Some(path) = std::env::var_os(env::LAUNCH_FAULT_COUNT) else { return };
    let line = format!("{} {}\n", init.rank, ckpt::fault::passed());
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A test that cannot read the file fails by itself.
    let _ = file.and_then(|mut f| std::io::Write::write_all(&mut f, line.as_bytes()));
}

//! The process of a worker: connects to its agent (launch's process on the host) and to the other
//! ranks, builds the trainer, resumes, trains, and writes the final weights.
mod agent_requests;
mod fault_injection;
mod gather_weights;
mod kept_resources;
mod network;
mod rank_connection;
mod rank_device;
mod samples;
mod session;
mod status_writer;
mod step_clock;
mod step_times_collector;
pub mod training_loop;
#[cfg(test)]
mod training_loop_tests;

pub(crate) use rank_connection::STAGING_BYTES;

use crate::{
    checkpoint::{
        host_local,
        memory_copies::{HostMemoryCopies, MemoryCopier},
        resume::{
            CheckpointLocations, MemoryResumeState, PretrainedModel, ResumePoint, resume_from_checkpoint,
            start_without_checkpoint,
        },
        save::{CheckpointSaver, RunMetadata, count_checkpoint_bytes},
        storage_topology::{StorageTopology, detect_topology},
    },
    consensus::require_on_all_ranks,
    data::TextTokenizer,
    error::{Error, Result, to_unwritable_checkpoint_error},
    train::running_trainer::RunningTrainer,
    trainer_stages::{ResolvedSpec, UninitializedTrainer},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::{StagingDir, TextFile};
use comm::{Comm, ObservedComm};
use debuglog::Filter;
use diagnostic::{Diagnostic, codes};
use fault_injection::{append_passed_fault_points, arm_requested_fault_point, read_endless_loop_step};
use gather_weights::gather_last_checkpoint_weights;
use jobspec::{JobSpec, OffloadTarget, TrainSpec, ZeroSpec, env};
use kept_resources::KeptResources;
use protocol::{
    control::WorkerInit,
    event::{Event, WorkerPhase},
    exit::WorkerExit,
};
use rank_connection::connect_to_other_ranks;
use rank_device::RankDevice;
use samples::SampleSets;
use session::{AgentSession, take_inherited_descriptor};
use status_writer::StatusReportingSamples;
use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};
use training_loop::{RunContext, train_until_done};

/// Runs the process of a worker, which is the subcommand `launch worker`. Returns the exit code of
/// the process.
pub fn main() -> u8 {
    ignore_signals();
    let (session, read, mut init) = match AgentSession::connect() {
        Ok(joined) => joined,
        Err(e) => {
            // No agent is connected, so only the terminal can show the error.
            eprint!("launch worker: {}", diagnostic::render(e.diagnostic(), false));
            return e.to_worker_exit().exit_code();
        }
    };
    // A rank trains without the debug log, too.
    _ = start_debug_log(&init);
    let _flush = debuglog::FlushOnDrop;
    let mut kept = KeptResources::default();
    let mut started = session.start_threads(read).and_then(|()| arm_requested_fault_point(&init));
    loop {
        let result = std::mem::replace(&mut started, Ok(()));
        let result = result.and_then(|()| run_attempt(&session, &init, &mut kept));
        if let Err(error) = &result
            && session.wait_for_leave_decision(error, &init)
        {
            // The controller may keep the reason of another rank only.
            eprint!("{}", diagnostic::render(error.diagnostic(), false));
            let next = kept.prepare_device_for_next_attempt();
            match next.and_then(|()| session.wait_for_next_attempt(init.attempt)) {
                Ok(next) => init = next,
                Err(error) => {
                    eprint!("{}", diagnostic::render(error.diagnostic(), false));
                    return error.to_worker_exit().exit_code();
                }
            }
            continue;
        }
        append_passed_fault_points(&init);
        return report_end_of_process(&session, result);
    }
}

/// Runs this rank for one attempt (one start of all workers), from connecting to the other ranks to
/// the end of training. Uses the resources in `kept`, such as the open device, that the process
/// kept from an earlier attempt. Returns when the attempt has no threads and no communicator any
/// more.
fn run_attempt(session: &AgentSession, init: &WorkerInit, kept: &mut KeptResources) -> Result<WorkerExit> {
    let _span =
        tracing::info_span!(target: "worker", "rank", rank = init.rank, attempt = init.attempt).entered();
    session.status.begin_attempt(init);
    let memory = kept.take_shared_memory(session);
    let connected = memory.and_then(|memory| connect_to_other_ranks(session, init, memory));
    let result = connected.and_then(|comm| {
        tracing::debug!(target: "worker::phase", "joined the other ranks");
        let result = train_as_rank(session, init, comm.clone(), kept);
        if let Err(e) = &result {
            // The other ranks get the reason before they notice that this rank ended.
            comm.abort(&format!("rank {}: {e}", init.rank));
        }
        result
    });
    match result {
        Err(e) if session.is_stopped_before_first_step(&e) => {
            tracing::info!(target: "worker", "stopped with another rank before the first step");
            Ok(WorkerExit::Stopped)
        }
        Err(e) => {
            tracing::warn!(target: "worker", code = e.diagnostic().code().name(), "failed");
            Err(e)
        }
        result => result,
    }
}

/// Reports the error with which this worker ends, if any, to its agent (launch's process on the
/// host) and on stderr, and returns the exit code.
fn report_end_of_process(session: &AgentSession, result: Result<WorkerExit>) -> u8 {
    match result {
        Ok(exit) => exit.exit_code(),
        Err(e) => {
            eprint!("{}", diagnostic::render(e.diagnostic(), false));
            session.report_failure(&e);
            e.to_worker_exit().exit_code()
        }
    }
}

/// Starts the debug log of this rank with the filter in `LAUNCH_LOG`, and opens its file in the run
/// directory. An invalid filter is replaced by the default one.
fn start_debug_log(init: &WorkerInit) -> std::io::Result<()> {
    let directives = std::env::var(env::LAUNCH_LOG).ok();
    let filter = Filter::from_directives_or_verbosity(directives.as_deref(), 0).unwrap_or_default();
    debuglog::start(&filter, None);
    debuglog::open_log_file(&init.run_dir.join("logs").join(format!("worker-{}.debug.log", init.rank)))?;
    tracing::info!(target: "worker", rank = init.rank, world = init.world, attempt = init.attempt,
        pid = std::process::id(), "connected to agent");
    Ok(())
}

/// Ignores the signals that a batch system or terminal sends to every process of a job, and
/// SIGXFSZ.
///
/// The controller decides once, for all ranks, at which step to save and stop. Without SIGXFSZ, a
/// write beyond the limit of file sizes (`ulimit -f`) fails with an error that names the file.
fn ignore_signals() {
    use nix::sys::signal::{SigHandler, Signal::*, signal};
    for ignored in [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ] {
        // SAFETY: ignoring a signal installs no handler. The call does not fail for these signals.
        _ = unsafe { signal(ignored, SigHandler::SigIgn) };
    }
}

/// Builds the trainer of a rank that is connected to the others, resumes or starts the run, trains,
/// and writes the final weights. Collective: every rank must call it.
fn train_as_rank(
    session: &AgentSession,
    init: &WorkerInit,
    comm: Arc<dyn Comm>,
    kept: &mut KeptResources,
) -> Result<WorkerExit> {
    let job = &init.job;
    let train = &make_train_paths_absolute(init)?;
    let is_leader = init.rank == 0;
    kept.open_device_and_tokenizer(session, init, train)?;
    let KeptResources { device: Some(device), tokenizer: Some(tokenizer), samples, memory, .. } = kept else {
        return Err(Error::new(codes::run::INTERNAL, "the device and the tokenizer are not open"));
    };
    println!("rank {} of {}: pid {}, {}", init.rank, init.world, std::process::id(), device.describe());
    let (ops, comm) = (device.ops(), connect_observed_collectives(device, (session, init), comm)?);

    let samples = open_samples(samples, (session, init), train, comm.as_ref(), tokenizer)?;
    let tokenizer = &*tokenizer;
    let mut pretrained = PretrainedModel::open(train.model.from.as_deref(), comm.as_ref())?;
    let model = ResolvedSpec::new(train, tokenizer.vocab_size())?.build_model()?;
    let parameters = model.trained_element_count();
    let ready = model.shard_model(comm, ops)?.into_uninitialized_trainer()?;
    let root = find_checkpoint_root(init);
    let layout = detect_storage_topology(session, init, ready.trainer.engine.queue(), &root)?;
    require_writable_checkpoint_storage(&ready, &root, &layout)?;

    session.set_phase(WorkerPhase::Resuming)?;
    let mut metadata = describe_run(init, &ready, &samples.digest, tokenizer, pretrained.as_ref());
    let memory = connect_memory_copies(memory, init, ready.trainer.engine.queue())?;
    let dirs =
        CheckpointLocations { root: &root, workdir: &init.workdir, layout: &layout, memory: memory.as_ref() };
    let (mut running, resumed) =
        resume_or_start_from_model(session, init, ready, &dirs, &samples.digest, pretrained.as_mut())?;
    if let Some(resumed) = &resumed {
        (metadata.rng_generation, metadata.rng_decision) =
            resumed.count_reseeds_and_record_resume(job.resume.rng, init.world as usize);
    }
    let mut saver = create_checkpoint_saver(job, &root, layout.clone(), metadata, (memory, resumed));
    report_ready_to_train(session, &running, parameters, is_leader)?;
    let held_out = samples.prepare_evaluation(train, tokenizer)?;
    if !is_leader || held_out.as_ref().is_none_or(|eval| eval.generation.is_none()) {
        // No rank but the leader decodes generated text.
        tokenizer.end_sandbox_process();
    }
    if !session.wait_for_first_step(running.trainer.engine.queue())? {
        wait_for_all_ranks(&running)?;
        return Ok(WorkerExit::Stopped);
    }
    let loops_after = read_endless_loop_step(init)?;
    let source = StatusReportingSamples { source: &samples.train, status: &session.status, loops_after };
    let run_spec = RunContext { job, session, source: &source, held_out, is_leader };
    let mut exit = train_until_done(&mut running, &run_spec, &mut saver)?;
    if exit == WorkerExit::Done && job.checkpoint.gather_16bit_weights_on_model_save {
        session.set_phase(WorkerPhase::Gathering)?;
        let queue = running.trainer.engine.queue();
        if !gather_last_checkpoint_weights(session, queue, &saver, &root, &layout)? {
            exit = WorkerExit::Stopped;
        }
    }
    session.set_phase(WorkerPhase::Ending)?;
    wait_for_all_ranks(&running)?;
    Ok(exit)
}

/// Describes the run for its checkpoints: the job, the digest of the training data, the files of
/// the tokenizer, and the batch job in which the run was started. A pretrained model replaces files
/// of the tokenizer by its own.
fn describe_run(
    init: &WorkerInit,
    ready: &UninitializedTrainer,
    data_digest: &str,
    tokenizer: &TextTokenizer,
    pretrained: Option<&PretrainedModel>,
) -> RunMetadata {
    let files = tokenizer.build_hf_tokenizer_files().into_iter();
    let files = files.map(|(name, text)| TextFile { name, text }).collect();
    let tokens = (files, tokenizer.eod_token());
    let digest = data_digest.to_owned();
    let mut metadata = RunMetadata::new(&ready.trainer, ready.train_spec(), &init.job, digest, tokens);
    metadata.batch_job = init.batch_job.as_ref().map(|batch_job| batch_job.id.clone());
    if let Some(pretrained) = pretrained {
        pretrained.update_text_files(&mut metadata.tokenizer);
    }
    metadata
}

/// Connects this rank's CPU or GPU with those of the other ranks, and returns a communicator that
/// records each collective so that hangs can be diagnosed. `hosts` transfers data between host
/// memories. Collective: every rank must call it.
fn connect_observed_collectives(
    device: &RankDevice,
    (session, init): (&AgentSession, &WorkerInit),
    hosts: Arc<dyn Comm>,
) -> Result<Arc<dyn Comm>> {
    let comm = device.connect_collectives(session, &init.job.cluster, hosts)?;
    Ok(Arc::new(ObservedComm::new(comm, session.status.clone())))
}

/// Opens the training and evaluation samples of the run, unless this process has opened them in an
/// earlier attempt (start of all workers). Then sends the warnings about the data to the
/// controller. Collective: every rank must call it.
fn open_samples<'a>(
    opened: &'a mut Option<SampleSets>,
    (session, init): (&AgentSession, &WorkerInit),
    train: &TrainSpec,
    comm: &dyn Comm,
    tokenizer: &mut TextTokenizer,
) -> Result<&'a SampleSets> {
    session.status.set_task("opening the data");
    let is_new = SampleSets::open(opened, train, init, comm, tokenizer)?;
    let samples = opened
        .as_ref()
        .ok_or_else(|| Error::new(codes::run::INTERNAL, "this rank had no turn to open the data"))?;
    tracing::debug!(target: "worker::phase", is_new, "opened data");
    if is_new {
        samples.send_data_warnings(session, init.rank == 0)?;
    }
    Ok(samples)
}

/// Creates the [`CheckpointSaver`], which saves the training state of the run as checkpoints in the
/// directory `root`. `resumed` is where the run resumed, and `memory` the access to copies of the
/// training state in the memory of hosts.
fn create_checkpoint_saver(
    job: &JobSpec,
    root: &Path,
    layout: StorageTopology,
    metadata: RunMetadata,
    (memory, resumed): (Option<HostMemoryCopies>, Option<ResumePoint>),
) -> CheckpointSaver {
    let MemoryResumeState { is_source, newest_saved, next_sequence, step_events } =
        resumed.as_ref().map_or_else(MemoryResumeState::default, |r| r.memory.clone());
    let last = match is_source {
        true => newest_saved,
        false => resumed.filter(|r| r.is_native).map(|r| r.path),
    };
    let copier = memory.map(|memory| MemoryCopier::new(memory, next_sequence));
    CheckpointSaver::new(root.to_owned(), job.checkpoint.clone(), metadata, last, layout).with_memory_copies(
        copier,
        is_source,
        step_events,
    )
}

/// Opens the shared memory in which the ranks of this host keep copies of their training states,
/// from which a failed run can resume without a checkpoint. `kept` is the memory's file descriptor,
/// which the rank inherited from its agent; `None` before the first call. Returns `None` without
/// `checkpoint.memory`. Collective: every rank must call it.
fn connect_memory_copies(
    kept: &mut Option<OwnedFd>,
    init: &WorkerInit,
    queue: &CollectiveQueue,
) -> Result<Option<HostMemoryCopies>> {
    let Some(spec) = &init.job.checkpoint.memory else { return Ok(None) };
    let missing = |message: &str| {
        Diagnostic::error(codes::training::SHARED_MEMORY_MISSING, message).with_subject(env::LAUNCH_MEMORY_FD)
    };
    if kept.is_none() {
        *kept = take_inherited_descriptor(env::LAUNCH_MEMORY_FD)?;
    }
    let memory = kept.as_ref().ok_or_else(|| {
        let name = env::LAUNCH_MEMORY_FD;
        missing(&format!("{name} is not set, so the state cannot be copied to memory"))
    })?;
    let memory = memory
        .try_clone()
        .map_err(|e| missing("the memory for copies of the state cannot be opened").with_cause(&e))?;
    HostMemoryCopies::connect(queue, memory.into(), spec, (init.local_rank, init.attempt)).map(Some)
}

/// Returns the `train` section of the job in which the paths of model, adapters and offload
/// directory are absolute. Fails if the job has no such section.
fn make_train_paths_absolute(init: &WorkerInit) -> Result<TrainSpec> {
    let train = init.job.train.as_ref().ok_or_else(|| {
        Error::new(codes::training::TRAIN_SECTION_MISSING, "the job has no `train` section")
    })?;
    let offload = train.zero.offload.clone().map(|offload| match offload {
        OffloadTarget::Files(directory) => OffloadTarget::Files(init.workdir.join(directory)),
        OffloadTarget::Cpu => OffloadTarget::Cpu,
    });
    Ok(TrainSpec {
        model: train.model.resolve_paths(&init.workdir),
        lora: train.lora.as_ref().map(|l| l.resolve_paths(&init.workdir)),
        zero: ZeroSpec { offload, ..train.zero.clone() },
        ..train.clone()
    })
}

/// Loads the checkpoint from which the job resumes or, if there is none, the pretrained model or
/// random initial weights. Returns the resume point, or `None` if the run starts at step 0.
/// Collective: every rank must call it.
fn resume_or_start_from_model(
    session: &AgentSession,
    init: &WorkerInit,
    mut ready: UninitializedTrainer,
    dirs: &CheckpointLocations,
    data_digest: &str,
    pretrained: Option<&mut PretrainedModel>,
) -> Result<(RunningTrainer, Option<ResumePoint>)> {
    let mut send = |message| if init.rank == 0 { session.send_message(&message) } else { Ok(()) };
    let batch_job = init.continued_batch_job();
    match resume_from_checkpoint(&mut ready, &init.job, dirs, batch_job, data_digest, &mut send)? {
        Some(resumed) => Ok((ready.start_at_position(resumed.cursor), Some(resumed))),
        None => Ok((start_without_checkpoint(ready, pretrained, &mut send)?, None)),
    }
}

/// Reports to the agent (launch's process on the host) that this rank has loaded its training
/// state, by sending the number of completed steps with each heartbeat. The leader also sends the
/// event that the job is ready.
fn report_ready_to_train(
    session: &AgentSession,
    running: &RunningTrainer,
    parameters: u64,
    is_leader: bool,
) -> Result<()> {
    let step = running.position.step;
    session.set_step(step);
    if !is_leader {
        return Ok(());
    }
    let train = running.train_spec();
    let tokens_per_step = running.trainer.global_batch_size() * u64::from(train.data.seq_len);
    session.send_event(Event::Ready { step, total_steps: train.steps, parameters, tokens_per_step })
}

/// Waits until every rank has finished its last collective, so that no other rank still reads this
/// rank's memory. Collective: every rank must call it.
///
/// A GPU may still execute a collective when the call has returned, and other ranks then read this
/// rank's memory.
fn wait_for_all_ranks(running: &RunningTrainer) -> Result<()> {
    let queue = running.trainer.engine.queue();
    queue.run_and_wait(|_| Ok(()))?;
    running.trainer.ops.synchronize()?;
    Ok(queue.run_and_wait(|comm| comm.barrier())?)
}

/// Returns the directory of checkpoints: `checkpoint.dir` in the working directory, with `{name}`
/// replaced by the name of the job.
fn find_checkpoint_root(init: &WorkerInit) -> PathBuf {
    let dir = init.job.checkpoint.dir.to_string_lossy().replace("{name}", &init.job.name);
    init.workdir.join(dir)
}

/// Finds out which ranks share a checkpoint directory and, if hosts have separate directories,
/// finishes committing the checkpoints that an earlier run left uncommitted. Collective: every rank
/// must call it.
fn detect_storage_topology(
    session: &AgentSession,
    init: &WorkerInit,
    queue: &CollectiveQueue,
    root: &Path,
) -> Result<StorageTopology> {
    if init.local_world >= init.world {
        return Ok(StorageTopology::for_shared_directory(init.world as usize));
    }
    let host = protocol::host_name::read_host_name();
    let token = format!("{}-{}", init.run, init.attempt);
    let is_required = init.job.checkpoint.require_shared;
    let layout = detect_topology(queue, init.local_rank == 0, &host, &token, root, is_required)?;
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
            layout.list_directory_hosts().len()
        );
        session.send_event(Event::new_notice(Some(0), message))?;
    }
    Ok(layout)
}

/// Checks before the first step that the checkpoint directory is writable and has enough free space
/// for a checkpoint. Collective: every rank must call it.
fn require_writable_checkpoint_storage(
    ready: &UninitializedTrainer,
    root: &Path,
    layout: &StorageTopology,
) -> Result<()> {
    let (engine, optimizer) = (&ready.trainer.engine, &ready.trainer.optimizer);
    let rank = engine.rank();
    let result = if layout.is_directory_leader(rank) {
        let bytes = layout.compute_directory_bytes(rank, count_checkpoint_bytes(engine, optimizer));
        StagingDir::create(root, 0, bytes).map(drop).map_err(to_unwritable_checkpoint_error)
    } else {
        Ok(())
    };
    require_on_all_ranks(engine.queue(), result)
}

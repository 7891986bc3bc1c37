//! A rank's life: join, build, resume, train, leave.
use crate::{
    agree::{agree, exchange, settle},
    data::{DataError, Dataset, Order, Split, TextTokenizer},
    error::{Error, Result},
    gpu::Device,
    model::Batch,
    network,
    params::Unit,
    resume::{Origin, Place, begin, resume},
    save::{Identity, Saver, total_bytes},
    host_local::{self, Scattered},
    session::{Session, inherited},
    stages::{Running, ScheduleBound, Spec},
    state::model_card,
    storage::{Layout, survey},
    train::{
        run::{HeldOut, Run, Show, run},
        sample::Sampling,
        step::Source,
    },
    zero::queue::Queue,
};
use ckpt::{Checkpoint, GatherOptions, Staging, TextFile};
use comm::{Comm, local, shm::ShmComm};
use contract::{
    control::WorkerInit,
    env,
    event::{Event, Phase},
    exit::WorkerExit,
    job::{Offload, SampleSpec, TrainSpec, ZeroSpec},
};
use device::storage::Stopped;
use std::{
    any::Any,
    os::{fd::OwnedFd, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Shared memory for one message of a rank, bytes. Larger ones travel in windows of this size. Chosen for
/// memory: it counts in every rank's once per rank. What other sizes would do to speed was not measured.
pub const STAGING: usize = 1 << 20;

/// The role `launch worker`: exit code of the process.
pub fn main() -> u8 {
    leave_signals_to_the_controller();
    let (session, read, welcome) = match Session::join() {
        Ok(joined) => joined,
        Err(e) => {
            // There is no agent to tell: this line goes to whoever started the process.
            eprintln!("launch worker: {e}");
            return e.exit.code();
        }
    };
    quiet_about_devices();
    let lived = join(&session, read, &welcome).and_then(|comm| {
        let lived = without_panics(|| live(&session, &welcome, comm.clone()));
        if let Err(e) = &lived {
            // Before the others only see that this rank has left.
            comm.abort(&format!("rank {}: {}", welcome.rank, e.message));
        }
        lived
    });
    count_fault_points(&welcome);
    match lived {
        Ok(exit) => exit.code(),
        Err(e) => {
            eprintln!("{e}");
            session.fatal(&e);
            e.exit.code()
        }
    }
}

/// Ops can't return errors: what fails on a device is a panic with its own payload, which is an error like others here.
fn without_panics<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    let panicked = |panic: Box<dyn Any + Send>| match panic.downcast::<Stopped>() {
        Ok(stopped) => Err(Error::failed(stopped.0)),
        Err(other) => resume_unwind(other),
    };
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(panicked)
}

/// What fails on a device is said once, as the error of this rank, not as a panic.
fn quiet_about_devices() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<Stopped>() {
            usual(info);
        }
    }));
}

/// A batch system or a terminal may signal every process of a job; when to save and stop is decided once, for all ranks
/// at the same step. SIGKILL, and signals of faults, do what they always do.
fn leave_signals_to_the_controller() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for caught in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2] {
        // SAFETY: ignoring a signal installs no handler. It can't fail for these.
        _ = unsafe { signal(caught, SigHandler::SigIgn) };
    }
}

/// The collectives of this job; from then on the session ends them when it is told to.
fn join(session: &Arc<Session>, read: UnixStream, welcome: &WorkerInit) -> Result<Arc<dyn Comm>> {
    arm_fault_point(welcome)?;
    let limits = comm::shm::Limits { staging: STAGING, ..Default::default() };
    if welcome.local_world < welcome.world {
        return network::join(session, read, welcome, shared_memory()?, limits);
    }
    let comm: Arc<dyn Comm> = match welcome.world {
        1 => Arc::new(local::group(1).remove(0)),
        world => {
            let fd = shared_memory()?.ok_or_else(|| {
                let name = env::LAUNCH_SHM_FD;
                Error::cluster(format!("{name} is not set: no shared memory to reach the other ranks"))
            })?;
            Arc::new(ShmComm::join(fd, welcome.rank as usize, world as usize, limits)?)
        }
    };
    let aborted = comm.clone();
    session.watch(read, move |reason| aborted.abort(reason)).map_err(no_threads)?;
    Ok(comm)
}

fn shared_memory() -> Result<Option<OwnedFd>> {
    inherited(env::LAUNCH_SHM_FD)
}

/// The session's threads could not be started.
pub(crate) fn no_threads(e: std::io::Error) -> Error {
    Error::cluster(format!("session threads: {e}"))
}

fn in_workdir(place: Offload, workdir: &Path) -> Offload {
    match place {
        Offload::Files(directory) => Offload::Files(workdir.join(directory)),
        Offload::Cpu => Offload::Cpu,
    }
}

/// Build, resume, train, gather.
fn live(session: &Session, welcome: &WorkerInit, comm: Arc<dyn Comm>) -> Result<WorkerExit> {
    let job = &welcome.job;
    let asked = job.train.as_ref().ok_or_else(|| Error::job("this job has no `train` section"))?;
    let train = &TrainSpec {
        model: asked.model.at(&welcome.workdir),
        lora: asked.lora.as_ref().map(|l| l.at(&welcome.workdir)),
        zero: ZeroSpec {
            offload: asked.zero.offload.clone().map(|place| in_workdir(place, &welcome.workdir)),
            ..asked.zero.clone()
        },
        ..asked.clone()
    };
    let leader = welcome.rank == 0;
    // Whatever else works in parallel here (initialisation, tokenizing) keeps to the same number of threads.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(welcome.threads as usize).build_global();
    pool.map_err(|e| Error::cluster(format!("threads: {e}")))?;
    let device = Device::open(welcome)?;
    println!("rank {} of {}: pid {}, {}", welcome.rank, welcome.world, std::process::id(), device.describe());
    let (ops, comm) = (device.ops(), device.collectives(session, &job.cluster, comm)?);

    let tokenizer = TextTokenizer::open(&train.data.tokenizer, &welcome.workdir).map_err(data_error)?;
    let samples = Samples::open(train, welcome, comm.as_ref())?;
    samples.tell(session, leader)?;
    let mut origin = Origin::open(train.model.from.as_deref(), comm.as_ref())?;
    let spec = Spec::new(train, tokenizer.vocab_size())?;
    let parameters = spec.parameters()?;
    let count = parameters.count();
    let mut bound = parameters.shard(comm, ops)?.bind_optimizer()?.bind_schedule();
    let root = checkpoint_root(welcome);
    let layout = layout(session, welcome, bound.trainer.engine.queue(), &root)?;
    storage_is_ready(&bound, &root, &layout)?;

    session.phase(Phase::Resuming)?;
    let place = Place { root: &root, workdir: &welcome.workdir, layout: &layout };
    let resumed = resume(&mut bound, job, &place, &samples.digest, &mut |event| {
        if leader { session.event(event) } else { Ok(()) }
    })?;
    let mut identity = identity(&bound, welcome, &tokenizer, &samples);
    if let Some(origin) = &origin {
        origin.carry_along(&mut identity.tokenizer);
    }
    if let Some(resumed) = &resumed {
        (identity.rng_generation, identity.rng_decision) =
            resumed.rng(job.resume.rng, welcome.world as usize);
    }
    let last = resumed.as_ref().filter(|r| r.native).map(|r| r.path.clone());
    let mut saver = Saver::new(root.clone(), job.checkpoint.clone(), identity, last, layout.clone());
    let mut running = match resumed {
        Some(r) => bound.resumed(r.cursor),
        None => {
            let tell = &mut |event| if leader { session.event(event) } else { Ok(()) };
            begin(bound, origin.as_mut(), tell)?
        }
    };
    let start = running.at;
    session.at_step(start.step);
    if leader {
        let tokens_per_step = running.trainer.global_batch() * u64::from(train.data.seq_len);
        session.event(Event::Ready {
            step: start.step,
            total_steps: train.steps,
            parameters: count,
            tokens_per_step,
        })?;
    }
    let held_out = samples.held_out(train, &tokenizer)?;
    let ended =
        run(&mut running, &Run { job, session, source: &samples.train, held_out, leader }, &mut saver)?;
    if ended == WorkerExit::Done && job.checkpoint.gather_16bit_weights_on_model_save {
        session.phase(Phase::Gathering)?;
        let queue = running.trainer.engine.queue();
        match layout.is_shared() {
            true => gather(session, queue, &saver, &root, leader)?,
            false => gather_scattered(session, queue, &saver, &root, &layout)?,
        }
    }
    session.phase(Phase::Ending)?;
    leave_together(&running)?;
    Ok(ended)
}

/// A GPU may still be at the last collective, in which others read this rank's memory: nobody leaves before all have ended it.
fn leave_together(running: &Running) -> Result<()> {
    let queue = running.trainer.engine.queue();
    queue.run(|_| Ok(()))?;
    running.trainer.ops.wait();
    Ok(queue.run(|c| c.barrier())?)
}

/// Samples in the order of the run.
struct Ordered {
    data: Dataset,
    order: Order,
}

impl Source for Ordered {
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()> {
        let Batch { b, tokens, labels, starts, .. } = batch;
        self.data.fill(&self.order, first, *b, tokens, labels, starts);
        Ok(())
    }
}

/// Training and held-out samples.
struct Samples {
    train: Ordered,
    eval: Option<Ordered>,
    digest: String,
}

impl Samples {
    /// Rank 0 builds the token caches; the others then find them.
    fn open(train: &TrainSpec, welcome: &WorkerInit, comm: &dyn Comm) -> Result<Self> {
        let open = || -> Result<Samples> {
            let (spec, dir) = (&train.data, &welcome.workdir);
            let data = Dataset::open(spec, None, Split::Train, dir).map_err(data_error)?;
            let eval = train.eval.as_ref().map(|e| {
                let files = (!e.files.is_empty()).then_some(e.files.as_slice());
                Dataset::open(spec, files, Split::HeldOut, dir).map_err(data_error)
            });
            let eval = eval.transpose()?.map(|data| Ordered { order: data.order(train.seed, false), data });
            let digest = data.digest().to_string();
            Ok(Samples { train: Ordered { order: data.order(train.seed, spec.shuffle), data }, eval, digest })
        };
        let turns: [bool; 2] = [true, false];
        let mut mine = None;
        for leader in turns {
            if (welcome.rank == 0) == leader {
                mine = Some(open());
            }
            let said = match &mine {
                Some(Err(e)) => e.message.clone(),
                _ => String::new(),
            };
            let all = comm.all_gather_bytes(said.as_bytes())?;
            if let Some(Err(e)) = mine {
                return Err(e);
            }
            if let Some((rank, why)) = all.iter().enumerate().find(|(_, b)| !b.is_empty()) {
                let message = format!("rank {rank}: {}", String::from_utf8_lossy(why));
                return Err(Error { exit: WorkerExit::Aborted, message });
            }
        }
        let samples = mine.unwrap_or_else(|| Err(Error::failed("no turn to open the data")))?;
        let digests = comm.all_gather_bytes(samples.digest.as_bytes())?;
        match digests.iter().position(|d| *d != digests[0]) {
            None => Ok(samples),
            Some(rank) => Err(Error::job(format!(
                "train.data.files: rank {rank} found other data than rank 0; the files changed while the job started, \
                 or a pattern also matches files that the run writes"
            ))),
        }
    }

    /// What a person should know of the opening.
    fn tell(&self, session: &Session, leader: bool) -> Result<()> {
        let sides = [Some(&self.train), self.eval.as_ref()];
        for message in sides.into_iter().flatten().flat_map(|s| s.data.notices()).filter(|_| leader) {
            session.event(Event::Notice { rank: Some(0), message: message.clone() })?;
        }
        Ok(())
    }

    fn held_out<'a>(
        &'a self,
        train: &'a TrainSpec,
        tokenizer: &'a TextTokenizer,
    ) -> Result<Option<HeldOut<'a>>> {
        let (Some(source), Some(spec)) = (self.eval.as_ref(), train.eval.as_ref()) else { return Ok(None) };
        let samples = u64::from(spec.samples).min(source.data.len());
        let slots = (samples / u64::from(train.batch.micro)).max(1) as usize;
        let sample = spec.sample.as_ref().map(|s| sampling(s, train.seed, tokenizer)).transpose()?;
        Ok(Some(HeldOut { source, slots, every: spec.every, sample }))
    }
}

/// What is sampled after an evaluation, and how it is shown: up to the end of the document.
fn sampling<'a>(s: &'a SampleSpec, seed: u64, tokenizer: &'a TextTokenizer) -> Result<(Sampling, Show<'a>)> {
    let mut prompt = Vec::new();
    tokenizer.encode(&s.prompt, &mut prompt).map_err(data_error)?;
    if prompt.is_empty() {
        return Err(Error::job(
            "train.eval.sample.prompt: the tokenizer makes no token of it; give another text",
        ));
    }
    let show = move |tokens: &[u32]| {
        let end = tokens.iter().position(|t| *t == tokenizer.eod()).unwrap_or(tokens.len());
        Ok((s.prompt.clone(), tokenizer.decode(&tokens[..end]).map_err(data_error)?))
    };
    Ok((Sampling::new(prompt, s.tokens, s.temperature, seed), Box::new(show)))
}

fn data_error(e: DataError) -> Error {
    let message = match e.hint() {
        Some(hint) => format!("{e}; {hint}"),
        None => e.to_string(),
    };
    Error { exit: e.exit(), message }
}

fn checkpoint_root(welcome: &WorkerInit) -> PathBuf {
    let dir = welcome.job.checkpoint.dir.to_string_lossy().replace("{name}", &welcome.job.name);
    welcome.workdir.join(dir)
}

/// Which ranks share the checkpoint directory; what a save that was cut short has left is completed where it must be.
fn layout(session: &Session, welcome: &WorkerInit, queue: &Queue, root: &Path) -> Result<Layout> {
    if welcome.local_world >= welcome.world {
        return Ok(Layout::shared(welcome.world as usize));
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let token = format!("{}-{}", welcome.run, welcome.epoch);
    let required = welcome.job.checkpoint.require_shared;
    let layout = survey(queue, welcome.local_rank == 0, host.trim(), &token, root, required)?;
    if !layout.is_shared() {
        if welcome.job.checkpoint.parity {
            return Err(Error::job(
                "checkpoint.parity needs a checkpoint.dir that all hosts share, and they don't: point it at shared \
                 storage, or leave parity out",
            ));
        }
        host_local::recover(queue, &layout, root)?;
        if welcome.rank == 0 {
            let hosts = layout.hosts().len();
            let message = format!(
                "checkpoint.dir is {hosts} directories on the hosts: each keeps the shards of its own workers"
            );
            session.event(Event::Notice { rank: Some(0), message })?;
        }
    }
    Ok(layout)
}

/// Found out before the first step: can a checkpoint be written here?
fn storage_is_ready(bound: &ScheduleBound, root: &Path, layout: &Layout) -> Result<()> {
    let (engine, optimizer) = (&bound.trainer.engine, &bound.trainer.optimizer);
    let rank = engine.rank();
    let probe = if layout.keeper(rank) == rank {
        // Made and dropped again: the directory can be written and has room.
        Staging::begin(root, 0, layout.share(rank, total_bytes(engine, optimizer)))
            .map(drop)
            .map_err(|e| Error::cluster(e.to_string()))
    } else {
        Ok(())
    };
    agree(engine.queue(), probe).map(drop)
}

fn identity(
    bound: &ScheduleBound,
    welcome: &WorkerInit,
    tokenizer: &TextTokenizer,
    samples: &Samples,
) -> Identity {
    let trainer = &bound.trainer;
    let units: Vec<Unit> = trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let files = tokenizer.hf_files().into_iter().map(|(name, text)| TextFile { name, text });
    Identity {
        model: model_card(trainer.model.as_ref(), &units, bound.train(), tokenizer.eod()),
        tokenizer: files.collect(),
        job: welcome.job.clone(),
        data_digest: samples.digest.clone(),
        rng_generation: 0,
        rng_decision: serde_json::Value::Null,
    }
}

/// Rank 0 writes the weights of the last checkpoint as a Hugging Face folder.
fn gather(session: &Session, queue: &Queue, saver: &Saver, root: &Path, leader: bool) -> Result<()> {
    let done = if leader { gather_last(session, saver, root) } else { Ok(()) };
    exchange(queue, done.as_ref().map_err(Clone::clone).map(|()| &()))?;
    done
}

/// The same when hosts keep their own shards: the others hand rank 0 what it lacks.
fn gather_scattered(
    session: &Session,
    queue: &Arc<Queue>,
    saver: &Saver,
    root: &Path,
    layout: &Layout,
) -> Result<()> {
    let Some(path) = saver.last() else { return Ok(()) };
    let opened = Scattered::open(queue, layout, path, None)?;
    if queue.comm().rank() != 0 {
        opened.serve()?;
        return exchange(queue, Ok(&())).and_then(settle).map(drop);
    }
    let done = write_weights(session, &opened, opened.checkpoint().facts().step, root);
    opened.end()?;
    exchange(queue, done.as_ref().map_err(Clone::clone).map(|()| &()))?;
    done
}

fn gather_last(session: &Session, saver: &Saver, root: &Path) -> Result<()> {
    let Some(path) = saver.last() else { return Ok(()) };
    let checkpoint = Checkpoint::open(path).map_err(|e| Error::checkpoint(e.to_string()))?;
    write_weights(session, &checkpoint, checkpoint.facts().step, root)
}

fn write_weights(session: &Session, source: &dyn ckpt::Source, step: u64, root: &Path) -> Result<()> {
    let out = root.join("weights");
    // adapters are small, and go on from what they are
    let dtype = source.adapter().is_none().then_some(ckpt::Dtype::BF16);
    let options = GatherOptions { dtype, force: true, ..GatherOptions::default() };
    let report =
        ckpt::gather(source, &out, &options, &mut |_, _| {}).map_err(|e| Error::cluster(e.to_string()))?;
    session.event(Event::Gathered { step, path: out, bytes: report.bytes })
}

/// Testing: the worker of the named rank dies at its n-th fault point.
fn arm_fault_point(welcome: &WorkerInit) -> Result<()> {
    let Some(value) = std::env::var_os(env::LAUNCH_FAULT) else { return Ok(()) };
    let parsed = value
        .to_str()
        .and_then(|v| v.split_once(':'))
        .and_then(|(r, n)| Some((r.parse::<u32>().ok()?, n.parse().ok()?)));
    let (rank, n) =
        parsed.ok_or_else(|| Error::job(format!("{}={value:?} is not RANK:N", env::LAUNCH_FAULT)))?;
    if rank == welcome.rank {
        ckpt::fault::arm(n);
    }
    Ok(())
}

/// Testing: says how many fault points this worker has passed.
fn count_fault_points(welcome: &WorkerInit) {
    let Some(path) = std::env::var_os(env::LAUNCH_FAULT_COUNT) else { return };
    let line = format!("{} {}\n", welcome.rank, ckpt::fault::passed());
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A test that can't read the file fails by itself.
    let _ = file.and_then(|mut f| std::io::Write::write_all(&mut f, line.as_bytes()));
}

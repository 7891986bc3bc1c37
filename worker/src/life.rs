//! A rank's life: join, build, resume, train, leave.
use crate::{
    agree::{agree, exchange},
    data::{DataError, Dataset, Order, Split, TextTokenizer},
    error::{Error, Result},
    model::Batch,
    params::Unit,
    resume::resume,
    save::{Identity, Saver, total_bytes},
    session::{Session, inherited},
    stages::{ScheduleBound, Spec},
    state::model_card,
    train::{
        run::{HeldOut, Run, run},
        step::Source,
    },
    zero::queue::Queue,
};
use ckpt::{Checkpoint, GatherOptions, Staging, TextFile};
use comm::{Comm, local, shm::ShmComm};
use contract::{
    control::Welcome,
    env,
    event::{Event, Phase},
    exit::WorkerExit,
    job::TrainSpec,
};
use device::{Ops, cpu::Cpu};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Shared memory for one message of a rank, bytes. Larger ones travel in windows of this size. Chosen for
/// memory: it counts in every rank's once per rank. What other sizes would do to speed was not measured.
pub const STAGING: usize = 1 << 20;

/// The role `launch worker`: exit code of the process.
pub fn main() -> u8 {
    let (session, read, welcome) = match Session::join() {
        Ok(joined) => joined,
        Err(e) => {
            // There is no agent to tell: this line goes to whoever started the process.
            eprintln!("launch worker: {e}");
            return e.exit.code();
        }
    };
    let lived = join(&welcome).and_then(|comm| {
        session.watch(read, comm.clone()).map_err(|e| Error::cluster(format!("session threads: {e}")))?;
        let lived = live(&session, &welcome, comm.clone());
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

/// The collectives of this job.
fn join(welcome: &Welcome) -> Result<Arc<dyn Comm>> {
    arm_fault_point(welcome)?;
    if welcome.world == 1 {
        return Ok(Arc::new(local::group(1).remove(0)));
    }
    let fd = inherited(env::LAUNCH_SHM_FD)?.ok_or_else(|| {
        Error::cluster(format!(
            "{} is not set: no shared memory to reach the other ranks",
            env::LAUNCH_SHM_FD
        ))
    })?;
    let (rank, world) = (welcome.rank as usize, welcome.world as usize);
    let limits = comm::shm::Limits { staging: STAGING, ..Default::default() };
    Ok(Arc::new(ShmComm::join(fd, rank, world, limits)?))
}

/// Build, resume, train, gather.
fn live(session: &Session, welcome: &Welcome, comm: Arc<dyn Comm>) -> Result<WorkerExit> {
    let job = &welcome.job;
    let train = job.train.as_ref().ok_or_else(|| Error::job("this job has no `train` section"))?;
    let leader = welcome.rank == 0;
    // Whatever else works in parallel here (initialisation, tokenizing) keeps to the same number of threads.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(welcome.threads as usize).build_global();
    pool.map_err(|e| Error::cluster(format!("threads: {e}")))?;
    let cpu = Cpu::new(welcome.threads as usize);
    println!("rank {} of {}: pid {}, {}", welcome.rank, welcome.world, std::process::id(), cpu.describe());
    let ops: Arc<dyn Ops> = Arc::new(cpu);

    let tokenizer = TextTokenizer::open(&train.data.tokenizer, &welcome.workdir).map_err(data_error)?;
    let samples = Samples::open(train, welcome, comm.as_ref())?;
    samples.tell(session, leader)?;
    let spec = Spec::new(train, tokenizer.vocab_size())?;
    let parameters = spec.parameters()?;
    let count = parameters.count();
    let mut bound = parameters.shard(comm, ops)?.bind_optimizer()?.bind_schedule();
    let root = checkpoint_root(welcome);
    storage_is_ready(&bound, &root)?;

    session.phase(Phase::Resuming)?;
    let resumed = resume(&mut bound, job, &root, &welcome.workdir, &samples.digest, &mut |event| {
        if leader { session.event(event) } else { Ok(()) }
    })?;
    let identity = identity(&bound, train, welcome, &tokenizer, &samples);
    let mut saver =
        Saver::new(root.clone(), job.checkpoint.clone(), identity, resumed.as_ref().map(|r| r.path.clone()));
    let mut running = match resumed {
        Some(r) => bound.resumed(r.cursor),
        None => bound.fresh(),
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
    let held_out = samples.held_out(train);
    let ended =
        run(&mut running, &Run { job, session, source: &samples.train, held_out, leader }, &mut saver)?;
    if ended == WorkerExit::Done && job.checkpoint.gather_16bit_weights_on_model_save {
        session.phase(Phase::Gathering)?;
        gather(session, running.trainer.engine.queue(), &saver, &root, leader)?;
    }
    session.phase(Phase::Ending)?;
    running.trainer.engine.queue().run(|c| c.barrier())?;
    Ok(ended)
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
    fn open(train: &TrainSpec, welcome: &Welcome, comm: &dyn Comm) -> Result<Self> {
        let open = || -> Result<Samples> {
            let (spec, dir) = (&train.data, &welcome.workdir);
            let data = Dataset::open(spec, None, Split::Train, dir).map_err(data_error)?;
            let eval = train.eval.as_ref().map(|e| {
                let files = (!e.files.is_empty()).then_some(e.files.as_slice());
                Dataset::open(spec, files, Split::HeldOut, dir).map_err(data_error)
            });
            let eval = eval
                .transpose()?
                .map(|data| Ordered { order: Order::new(train.seed, data.len(), false), data });
            let digest = data.digest().to_string();
            Ok(Samples {
                train: Ordered { order: Order::new(train.seed, data.len(), spec.shuffle), data },
                eval,
                digest,
            })
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

    fn held_out(&self, train: &TrainSpec) -> Option<HeldOut<'_>> {
        let (source, spec) = (self.eval.as_ref()?, train.eval.as_ref()?);
        let samples = u64::from(spec.samples).min(source.data.len());
        let slots = (samples / u64::from(train.batch.micro)).max(1) as usize;
        Some(HeldOut { source, slots, every: spec.every })
    }
}

fn data_error(e: DataError) -> Error {
    let message = match e.hint() {
        Some(hint) => format!("{e}; {hint}"),
        None => e.to_string(),
    };
    Error { exit: e.exit(), message }
}

fn checkpoint_root(welcome: &Welcome) -> PathBuf {
    let dir = welcome.job.checkpoint.dir.to_string_lossy().replace("{name}", &welcome.job.name);
    welcome.workdir.join(dir)
}

/// Found out before the first step: can a checkpoint be written here?
fn storage_is_ready(bound: &ScheduleBound, root: &Path) -> Result<()> {
    let (engine, optimizer) = (&bound.trainer.engine, &bound.trainer.optimizer);
    let probe = if engine.rank() == 0 {
        // Made and dropped again: the directory can be written and has room.
        Staging::begin(root, 0, total_bytes(engine, optimizer))
            .map(drop)
            .map_err(|e| Error::cluster(e.to_string()))
    } else {
        Ok(())
    };
    agree(engine.queue(), probe).map(drop)
}

fn identity(
    bound: &ScheduleBound,
    train: &TrainSpec,
    welcome: &Welcome,
    tokenizer: &TextTokenizer,
    samples: &Samples,
) -> Identity {
    let trainer = &bound.trainer;
    let units: Vec<Unit> = trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let files = tokenizer.hf_files().into_iter().map(|(name, text)| TextFile { name, text });
    Identity {
        model: model_card(trainer.model.as_ref(), &units, &train.model, tokenizer.eod()),
        tokenizer: files.collect(),
        job: welcome.job.clone(),
        data_digest: samples.digest.clone(),
        rng_generation: 0,
    }
}

/// Rank 0 writes the weights of the last checkpoint as a Hugging Face folder.
fn gather(session: &Session, queue: &Queue, saver: &Saver, root: &Path, leader: bool) -> Result<()> {
    let done = if leader { gather_last(session, saver, root) } else { Ok(()) };
    exchange(queue, done.as_ref().map_err(Clone::clone).map(|()| &()))?;
    done
}

fn gather_last(session: &Session, saver: &Saver, root: &Path) -> Result<()> {
    let Some(path) = saver.last() else { return Ok(()) };
    let checkpoint = Checkpoint::open(path).map_err(|e| Error::checkpoint(e.to_string()))?;
    let out = root.join("weights");
    let options = GatherOptions { dtype: Some(ckpt::Dtype::BF16), force: true, ..GatherOptions::default() };
    let report = ckpt::gather(&checkpoint, &out, &options, &mut |_, _| {})
        .map_err(|e| Error::cluster(e.to_string()))?;
    session.event(Event::Gathered { step: checkpoint.facts().step, path: out, bytes: report.bytes })
}

/// Testing: the worker of the named rank dies at its n-th fault point.
fn arm_fault_point(welcome: &Welcome) -> Result<()> {
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
fn count_fault_points(welcome: &Welcome) {
    let Some(path) = std::env::var_os(env::LAUNCH_FAULT_COUNT) else { return };
    let line = format!("{} {}\n", welcome.rank, ckpt::fault::passed());
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A test that can't read the file fails by itself.
    let _ = file.and_then(|mut f| std::io::Write::write_all(&mut f, line.as_bytes()));
}

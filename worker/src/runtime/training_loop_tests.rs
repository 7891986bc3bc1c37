//! Tests of stop requests: jobs of several ranks, whose agent the tests play.
use super::{
    agent_requests::AgentRequests,
    gather_weights::gather_last_checkpoint_weights,
    session::AgentSession,
    training_loop::{HeldOutEval, RunContext, train_until_done},
};
use crate::{
    checkpoint::{
        resume::{CheckpointLocations, resume_from_checkpoint},
        save::{CheckpointSaver, RunMetadata},
        storage_topology::StorageTopology,
    },
    error::Result,
    model::MicroBatch,
    train::{generation::GenerationRequest, step::SampleSource},
    trainer_stages::ResolvedSpec,
};
use comm::{Comm, thread_comm};
use device::Cpu;
use jobspec::{JobSource, JobSpec, load_job};
use protocol::{control::FromWorker, event::Event, exit::WorkerExit, frame};
use std::{
    io::Read,
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// The number of held-out micro-batches of an evaluation.
const EVAL_MICRO_BATCHES: usize = 7;
/// The number of steps of a job.
const STEPS: u64 = 4;
/// The size of the vocabulary.
const VOCAB: u32 = 300;

/// The moment of a stop request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum StopAt {
    /// Before this micro-batch of the run, counted from 0, is evaluated on a rank.
    Evaluated { rank: usize, micro_batch: usize },
    /// While this micro-batch of the run, counted from 0, is trained on a rank.
    Trained { rank: usize, micro_batch: usize },
    /// When rank 0 begins to gather the weights.
    Gathering,
}

/// A source of deterministic samples that requests a stop when a certain micro-batch is loaded.
struct StoppingSamples<'a> {
    requests: &'a AgentRequests,
    loaded: AtomicUsize,
    /// The number of loaded micro-batches at which the stop is requested.
    stop_at: Option<usize>,
}

impl SampleSource for StoppingSamples<'_> {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()> {
        let at = |i: usize| (first as usize * batch.seq_len + i) as u64;
        let token = |i: usize| (at(i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32 % VOCAB;
        let rows = batch.row_count();
        batch.tokens = (0..rows).map(token).collect();
        batch.labels = (1..=rows).map(token).collect();
        batch.starts.fill(0);
        if Some(self.loaded.fetch_add(1, Relaxed)) == self.stop_at {
            self.requests.request_stop();
        }
        Ok(())
    }
}

/// The settings of one process of a job.
#[derive(Clone, Copy)]
struct RunSettings {
    world: usize,
    stage: u8,
    saves_in_background: bool,
    /// The number of steps between checkpoints; 0 for a checkpoint only at the end.
    save_every: u64,
    stop: Option<StopAt>,
}

/// The result of one process of a job.
struct RunResult {
    /// The exit of each rank.
    exits: Vec<WorkerExit>,
    /// The losses, evaluations and generated texts that the leader reported.
    events: Vec<String>,
    /// The number of micro-batches that each rank evaluated.
    evaluated: Vec<usize>,
}

/// Loads the job that all tests run.
fn load_test_job(root: &Path, settings: &RunSettings) -> JobSpec {
    let RunSettings { stage, saves_in_background, save_every, .. } = *settings;
    let every = if save_every == 0 { "never".into() } else { save_every.to_string() };
    let text = format!(
        "name: test\nrun: {{workdir: {root:?}}}\ncheckpoint: {{every: {every}, async: {saves_in_background}}}\n\
         train:\n  model: {{hidden_size: 12, intermediate_size: 20, num_hidden_layers: 3, num_attention_heads: 2, \
         num_key_value_heads: 1, head_dim: 6, vocab_size: {VOCAB}}}\n  data: {{files: [none], seq_len: 9}}\n  \
         batch: {{global: 6, micro: 1}}\n  steps: {STEPS}\n  zero: {{stage: {stage}, max_live_parameters: 2000}}\n"
    );
    load_job(JobSource::Text { name: "test".into(), text }, &[]).unwrap_or_else(|e| panic!("{e:?}")).0
}

/// Reads the messages of a rank until its session ends. Returns the comparable parts of its events.
fn read_events(mut stream: UnixStream) -> Vec<String> {
    let (mut events, mut header) = (Vec::new(), [0; frame::HEADER_BYTES]);
    while stream.read_exact(&mut header).is_ok() {
        let mut body = vec![0; frame::decode_body_length(header).unwrap() as usize];
        stream.read_exact(&mut body).unwrap();
        match frame::decode_body::<FromWorker>(&body).unwrap() {
            FromWorker::Event(Event::Step { step, loss, .. }) => {
                events.push(format!("step {step}: {}", loss.to_bits()));
            }
            FromWorker::Event(Event::Eval { step, loss, tokens, .. }) => {
                events.push(format!("evaluation of step {step}: {} of {tokens} tokens", loss.to_bits()));
            }
            FromWorker::Event(Event::Sample { step, text, .. }) => {
                events.push(format!("text of step {step}: {text}"));
            }
            _ => {}
        }
    }
    events
}

/// Runs one rank of the job, from the newest checkpoint below `root` if there is one, and gathers
/// the weights. Returns the exit, and the number of evaluated micro-batches.
fn run_rank(
    root: &Path,
    settings: &RunSettings,
    comm: Arc<dyn Comm>,
    session: &AgentSession,
) -> (WorkerExit, usize) {
    let (job, rank, world) = (load_test_job(root, settings), comm.rank(), comm.world_size());
    let spec = ResolvedSpec::new(job.train.as_ref().unwrap(), VOCAB).unwrap();
    let sharded = spec.build_model().unwrap().shard_model(comm, Arc::new(Cpu::new(1))).unwrap();
    let mut ready = sharded.into_uninitialized_trainer().unwrap();
    let layout = StorageTopology::for_shared_directory(world);
    let dirs = CheckpointLocations { root, workdir: root, layout: &layout, memory: None };
    let resumed = resume_from_checkpoint(&mut ready, &job, &dirs, None, "digest", &mut |_| Ok(())).unwrap();
    let last = resumed.as_ref().map(|resumed| resumed.path.clone());
    let mut running = match resumed {
        Some(resumed) => ready.start_at_position(resumed.cursor),
        None => ready.start_with_random_params(),
    };
    let stops = |moment: Option<StopAt>, evaluates: bool| match moment {
        Some(StopAt::Evaluated { rank: r, micro_batch }) if r == rank && evaluates => Some(micro_batch),
        Some(StopAt::Trained { rank: r, micro_batch }) if r == rank && !evaluates => Some(micro_batch),
        _ => None,
    };
    let samples = |evaluates| StoppingSamples {
        requests: &session.requests,
        loaded: AtomicUsize::new(0),
        stop_at: stops(settings.stop, evaluates),
    };
    let (source, held_out) = (samples(false), samples(true));
    let train = running.train_spec().clone();
    let metadata = RunMetadata::new(&running.trainer, &train, &job, "digest".into(), (Vec::new(), 0));
    let mut saver = CheckpointSaver::new(root.into(), job.checkpoint.clone(), metadata, last, layout.clone());
    let generation = GenerationRequest::new(vec![1, 2, 3], 4, 0.0, 7);
    let run = RunContext {
        job: &job,
        session,
        source: &source,
        held_out: Some(HeldOutEval {
            source: &held_out,
            micro_batches: EVAL_MICRO_BATCHES,
            every: 2,
            generation: Some((generation, Box::new(|tokens| Ok((String::new(), format!("{tokens:?}")))))),
        }),
        is_leader: rank == 0,
    };
    let mut exit = train_until_done(&mut running, &run, &mut saver).unwrap();
    if exit == WorkerExit::Done {
        if rank == 0 && settings.stop == Some(StopAt::Gathering) {
            session.requests.request_stop();
        }
        let queue = running.trainer.engine.queue();
        if !gather_last_checkpoint_weights(session, queue, &saver, root, &layout).unwrap() {
            exit = WorkerExit::Stopped;
        }
    }
    (exit, held_out.loaded.load(Relaxed))
}

/// Runs a job with checkpoints below `root`, until it is done or was stopped.
fn run_job(root: &Path, settings: &RunSettings) -> RunResult {
    let ranks = std::thread::scope(|scope| {
        let spawn = |comm| {
            scope.spawn(move || {
                let (stream, agent) = UnixStream::pair().unwrap();
                let events = std::thread::spawn(move || read_events(agent));
                let session = AgentSession::new(stream);
                let (exit, evaluated) = run_rank(root, settings, Arc::new(comm), &session);
                drop(session);
                (exit, evaluated, events.join().unwrap())
            })
        };
        let ranks: Vec<_> = thread_comm::create_thread_group(settings.world).into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    RunResult {
        exits: ranks.iter().map(|(exit, ..)| *exit).collect(),
        evaluated: ranks.iter().map(|(_, evaluated, _)| *evaluated).collect(),
        events: ranks.into_iter().flat_map(|(.., events)| events).collect(),
    }
}

/// Runs a job to its end without a stop request, and returns its events.
fn run_undisturbed_job() -> Vec<String> {
    let root = tempfile::tempdir().unwrap();
    let settings = RunSettings { world: 1, stage: 0, saves_in_background: false, save_every: 0, stop: None };
    let result = run_job(root.path(), &settings);
    assert_eq!(result.exits, [WorkerExit::Done]);
    assert_eq!(result.events.len() as u64, STEPS + 2 * STEPS / 2, "{:?}", result.events);
    result.events
}

/// Returns the step of the newest checkpoint below `root`, and whether an evaluation is due.
fn read_newest_position(root: &Path) -> (u64, bool) {
    let checkpoint = ckpt::open_newest_native(root).unwrap().checkpoint;
    (checkpoint.run_facts().step, checkpoint.run_facts().cursor["at"]["is_evaluation_due"] == true)
}

/// Creates the settings of a process that saves only at its end.
fn create_settings(world: usize, stage: u8, stop: Option<StopAt>) -> RunSettings {
    RunSettings { world, stage, saves_in_background: true, save_every: 0, stop }
}

#[test]
fn a_stop_during_an_evaluation_takes_effect_within_a_micro_batch_and_the_resumed_run_repeats_it() {
    let expected = run_undisturbed_job();
    for (world, stage, rank, micro_batch, (resumed_world, resumed_stage)) in [
        (1, 0, 0, 0, (1, 0)),
        (1, 0, 0, 3, (2, 3)),
        (1, 3, 0, 6, (1, 1)),
        (2, 1, 1, 2, (3, 2)),
        (2, 3, 0, 5, (1, 0)),
        (3, 3, 2, 0, (2, 3)),
        (3, 2, 1, 1, (3, 3)),
        (4, 3, 3, 0, (1, 2)),
    ] {
        let context = format!("{world} workers at stage {stage}, micro-batch {micro_batch} of rank {rank}");
        let root = tempfile::tempdir().unwrap();
        let stop = Some(StopAt::Evaluated { rank, micro_batch });
        let stopped = run_job(root.path(), &create_settings(world, stage, stop));
        assert_eq!(stopped.exits, vec![WorkerExit::Stopped; world], "{context}");
        assert_eq!(stopped.evaluated[rank], micro_batch + 1, "{context}");
        assert!(stopped.evaluated.iter().all(|n| n.abs_diff(micro_batch + 1) <= 1), "{context}");
        let (step, is_evaluation_due) = read_newest_position(root.path());
        assert!(is_evaluation_due && step < STEPS || step == STEPS, "{context}: step {step}");
        let resumed = run_job(root.path(), &create_settings(resumed_world, resumed_stage, None));
        assert_eq!(resumed.exits, vec![WorkerExit::Done; resumed_world], "{context}");
        assert_eq!([stopped.events, resumed.events].concat(), expected, "{context}");
        assert_eq!(read_newest_position(root.path()), (STEPS, false), "{context}");
    }
}

#[test]
fn an_evaluation_that_is_interrupted_twice_is_reported_once() {
    let expected = run_undisturbed_job();
    let root = tempfile::tempdir().unwrap();
    let interrupt = |world, rank, micro_batch| {
        let stop = Some(StopAt::Evaluated { rank, micro_batch });
        let stopped = run_job(root.path(), &create_settings(world, 3, stop));
        assert_eq!(stopped.exits, vec![WorkerExit::Stopped; world]);
        stopped.events
    };
    let first = interrupt(2, 1, 1);
    assert_eq!(interrupt(3, 2, 0), [""; 0], "the second process repeats no step");
    assert_eq!(read_newest_position(root.path()), (2, true));
    let rest = run_job(root.path(), &create_settings(2, 1, None)).events;
    assert_eq!([first, rest].concat(), expected);
}

#[test]
fn an_interrupted_evaluation_of_the_last_step_is_repeated_once() {
    let expected = run_undisturbed_job();
    let root = tempfile::tempdir().unwrap();
    // rank 0 of two evaluates four micro-batches each time
    let stop = Some(StopAt::Evaluated { rank: 0, micro_batch: 6 });
    let stopped = run_job(root.path(), &create_settings(2, 2, stop));
    assert_eq!(stopped.exits, [WorkerExit::Stopped; 2]);
    assert_eq!(read_newest_position(root.path()), (STEPS, true));
    let resumed = run_job(root.path(), &create_settings(1, 0, None));
    assert_eq!([stopped.events, resumed.events].concat(), expected);
    assert_eq!(read_newest_position(root.path()), (STEPS, false));
    let again = run_job(root.path(), &create_settings(2, 0, None));
    assert_eq!((again.exits, again.evaluated), (vec![WorkerExit::Done; 2], vec![0, 0]));
}

/// Checks that a stop request during a step takes effect after the next exchange between the ranks.
/// If the checkpoint of the step is complete, this is before the next step.
#[test]
fn a_stop_during_a_foreground_save_needs_no_other_step() {
    let expected = run_undisturbed_job();
    for (saves_in_background, last_step) in [(false, 1), (true, 2)] {
        let root = tempfile::tempdir().unwrap();
        let stop = Some(StopAt::Trained { rank: 1, micro_batch: 2 });
        let settings = RunSettings { saves_in_background, save_every: 1, ..create_settings(2, 1, stop) };
        let stopped = run_job(root.path(), &settings);
        assert_eq!(stopped.exits, [WorkerExit::Stopped; 2]);
        assert_eq!(stopped.evaluated, [0, 0]);
        assert_eq!(read_newest_position(root.path()), (last_step, last_step == 2));
        let resumed = run_job(root.path(), &create_settings(3, 3, None));
        assert_eq!([stopped.events, resumed.events].concat(), expected);
    }
}

#[test]
fn a_stop_ends_a_gather_and_the_resumed_run_gathers_again() {
    for world in [1, 2] {
        let root = tempfile::tempdir().unwrap();
        let stopped = run_job(root.path(), &create_settings(world, 3, Some(StopAt::Gathering)));
        assert_eq!(stopped.exits, vec![WorkerExit::Stopped; world]);
        assert_eq!(read_newest_position(root.path()), (STEPS, false));
        let is_gathered = || root.path().join("weights").exists();
        assert!(!is_gathered());
        let resumed = run_job(root.path(), &create_settings(world, 3, None));
        assert_eq!((resumed.exits, resumed.events), (vec![WorkerExit::Done; world], Vec::new()));
        assert!(is_gathered());
    }
}

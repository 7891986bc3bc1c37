//! Tests built-in training on several simulated hosts with real worker processes. The test itself
//! acts as the agents. The hosts share no memory and connect over the loopback interface.
use crate::support::{self, JobDirectory, TINY_JOB};
use diagnostic::{Diagnostic, codes};
use jobspec::{InterfaceSelector, JobSource, JobSpec, env, load_job};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use protocol::{
    control::{
        FromWorker, JobSecretKey, PROTOCOL_VERSION, ToWorker, WorkerAddresses, WorkerInit, WorkerPeers,
    },
    event::Event,
    exit::WorkerExit,
    frame,
};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    net::SocketAddr,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::Child,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// The number, loss and gradient norm of each step, with the floats as bits.
type StepLosses = Vec<(u64, u64, u64)>;

/// How a worker process ended: its exit code, its final report, and the time of its end.
struct EndedWorker {
    exit_code: Option<i32>,
    /// The exit reason and error in the final report; `None` if the worker reported no failure.
    final_report: Option<(WorkerExit, Diagnostic)>,
    ended_at: Instant,
}

impl EndedWorker {
    /// Returns the error in the worker's final report. Panics if the worker reported none.
    #[track_caller]
    fn expect_error(&self) -> &Diagnostic {
        &self.final_report.as_ref().expect("a final report").1
    }
}

/// A worker process. Dropping the value kills the process.
struct WorkerProcess(Child);

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Runs the job of `job_dir` with rank r on the simulated host `hosts[r]`. `edit_job` changes the
/// job of each host, and `on_step(pids, step)` is called for every step that rank 0 reports.
/// Returns the losses, and how each rank ended.
fn run_workers(
    job_dir: &JobDirectory,
    hosts: &[u32],
    edit_job: impl Fn(u32, &mut JobSpec) + Sync,
    on_step: impl Fn(&[u32], u64) + Sync,
) -> (StepLosses, Vec<EndedWorker>) {
    run_workers_with_env(job_dir, hosts, &[], edit_job, on_step)
}

/// Runs the job of `job_dir` like [`run_workers`], with the additional environment variables
/// `variables` for all workers.
fn run_workers_with_env(
    job_dir: &JobDirectory,
    hosts: &[u32],
    variables: &[(&str, &str)],
    edit_job: impl Fn(u32, &mut JobSpec) + Sync,
    on_step: impl Fn(&[u32], u64) + Sync,
) -> (StepLosses, Vec<EndedWorker>) {
    let started = start_workers(job_dir, hosts, variables);
    let pids: Vec<u32> = started.iter().map(|(worker, _)| worker.0.id()).collect();
    let agents = TestAgents {
        hosts,
        writers: Mutex::new(started.iter().map(|(_, connection)| connection.try_clone().unwrap()).collect()),
        listening: Mutex::default(),
        losses: Mutex::default(),
    };
    let init_message = |rank: usize| build_init_message(job_dir, hosts, rank, &edit_job);
    let on_step = |step| on_step(&pids, step);
    let ended = thread::scope(|s| {
        let (agents, init_message, on_step) = (&agents, &init_message, &on_step);
        let threads: Vec<_> = started
            .into_iter()
            .enumerate()
            .map(|(rank, (mut worker, connection))| {
                s.spawn(move || {
                    let final_report = agents.serve_worker(rank, connection, init_message, on_step);
                    let exit_code = worker.0.wait().unwrap().code();
                    EndedWorker { exit_code, final_report, ended_at: Instant::now() }
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    (agents.losses.into_inner().unwrap(), ended)
}

/// Starts a worker process for each rank with additional environment variables. Rank r runs on the
/// simulated host `hosts[r]`. Returns the workers with the agent's ends of their control
/// connections.
fn start_workers(
    job_dir: &JobDirectory,
    hosts: &[u32],
    variables: &[(&str, &str)],
) -> Vec<(WorkerProcess, UnixStream)> {
    let memory: Vec<OwnedFd> = (0..=hosts.iter().copied().max().unwrap_or(0))
        .map(|_| memfd_create("hosts-test", MFdFlags::MFD_ALLOW_SEALING).unwrap())
        .collect();
    let start_worker = |(rank, host): (usize, &u32)| {
        let (agent_end, worker_end) = UnixStream::pair().unwrap();
        fcntl(&worker_end, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let log = File::create(job_dir.path(&format!("rank-{rank}.log"))).unwrap();
        let child = job_dir
            .launch_command(&["worker"])
            .env(env::LAUNCH_CONTROL_FD, worker_end.as_raw_fd().to_string())
            .env(env::LAUNCH_SHM_FD, memory[*host as usize].as_raw_fd().to_string())
            .envs(variables.iter().copied())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        (WorkerProcess(child), agent_end)
    };
    hosts.iter().enumerate().map(start_worker).collect()
}

/// Builds the first message to the worker of a rank. `edit_job` changes the job of the rank's host.
fn build_init_message(
    job_dir: &JobDirectory,
    hosts: &[u32],
    rank: usize,
    edit_job: impl Fn(u32, &mut JobSpec),
) -> ToWorker {
    let host = hosts[rank];
    let text = TINY_JOB.to_owned();
    let (mut job, _, _) = load_job(JobSource::Text { name: "job.yaml".into(), text }, &[]).unwrap();
    job.run.workdir = job_dir.path("");
    job.cluster.interface = InterfaceSelector::Named("127.0.0.0/8".into());
    edit_job(host, &mut job);
    let ranks_before = |r: usize| hosts[..r].iter().filter(|h| **h == host).count() as u32;
    ToWorker::Init(Box::new(WorkerInit {
        version: PROTOCOL_VERSION,
        rank: rank as u32,
        local_rank: ranks_before(rank),
        world: hosts.len() as u32,
        local_world: ranks_before(hosts.len()),
        threads: 1,
        attempt: ATTEMPT,
        run: "hosts-test".into(),
        run_dir: job_dir.path(""),
        workdir: job_dir.path(""),
        job,
        batch_job: None,
        continues_batch_job: false,
    }))
}

/// The number of the attempt, as the test sends it to the workers. Each run has one attempt.
const ATTEMPT: u32 = 4;

/// Plays the agents of all simulated hosts: exchanges messages with the workers as real agents do.
struct TestAgents<'a> {
    /// The host of each rank.
    hosts: &'a [u32],
    /// The connection to the worker of each rank, for writing.
    writers: Mutex<Vec<UnixStream>>,
    /// The addresses that the workers have reported so far.
    listening: Mutex<BTreeMap<u32, Vec<SocketAddr>>>,
    /// The losses that rank 0 has reported so far.
    losses: Mutex<StepLosses>,
}

impl TestAgents<'_> {
    /// Plays the agent of a worker: answers the worker's messages until the worker closes the
    /// connection. Calls `on_step` for every step that the worker reports. Returns the exit reason
    /// and error of the final report; `None` without a report.
    fn serve_worker(
        &self,
        rank: usize,
        mut connection: UnixStream,
        init_message: impl Fn(usize) -> ToWorker,
        on_step: impl Fn(u64),
    ) -> Option<(WorkerExit, Diagnostic)> {
        let mut final_report = None;
        while let Some(message) = receive_message(&mut connection) {
            match message {
                FromWorker::Hello { .. } => self.send_to_worker(rank, &init_message(rank)),
                FromWorker::Listening { addresses } => self.add_addresses(rank, addresses),
                FromWorker::Event(Event::Step { step, loss, grad_norm, .. }) => {
                    self.losses.lock().unwrap().push((step, loss.to_bits(), grad_norm.to_bits()));
                    on_step(step);
                }
                FromWorker::Fatal { exit, diagnostic } => final_report = Some((exit, diagnostic)),
                FromWorker::Event(_)
                | FromWorker::RestoredStep(_)
                | FromWorker::Progress { .. }
                | FromWorker::Left { .. }
                | FromWorker::StepTimes(_) => {}
            }
        }
        final_report
    }

    /// Sends a message to the worker of a rank. Does nothing if the worker has ended.
    fn send_to_worker(&self, rank: usize, message: &ToWorker) {
        _ = self.writers.lock().unwrap()[rank].write_all(&frame::encode_frame(message).unwrap());
    }

    /// Records the addresses at which the worker of `rank` listens. After the last rank's report,
    /// sends all addresses to all workers.
    fn add_addresses(&self, rank: usize, addresses: Vec<SocketAddr>) {
        let mut listening = self.listening.lock().unwrap();
        listening.insert(rank as u32, addresses);
        if listening.len() == self.hosts.len() {
            let member = |(r, a): (&u32, &Vec<SocketAddr>)| WorkerAddresses {
                host_index: self.hosts[*r as usize],
                addresses: a.clone(),
            };
            let members = listening.iter().map(member).collect();
            let peers = WorkerPeers { attempt: ATTEMPT, key: JobSecretKey([3; 32]), members, nccl_id: None };
            (0..self.hosts.len()).for_each(|r| self.send_to_worker(r, &ToWorker::Peers(peers.clone())));
        }
    }
}

/// Waits for the next message of a worker. Returns `None` if the worker has closed the connection.
fn receive_message(connection: &mut UnixStream) -> Option<FromWorker> {
    let mut header = [0; frame::HEADER_BYTES];
    connection.read_exact(&mut header).ok()?;
    let mut body = vec![0; frame::decode_body_length(header).unwrap() as usize];
    connection.read_exact(&mut body).ok()?;
    Some(frame::decode_body(&body).unwrap())
}

#[test]
fn losses_on_several_hosts_are_bit_equal_to_those_on_one() {
    let job_dir = JobDirectory::new();
    let expected =
        job_dir.run(&["cluster.workers_per_host=4", "resume.from=never"]).expect_success().collect_losses();
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0]] {
        job_dir.delete_checkpoints();
        let (losses, ended) = run_workers(&job_dir, hosts, |_, _| (), |_, _| ());
        assert_all_succeeded(&ended);
        assert_eq!(losses, expected, "{hosts:?}");
        let log = std::fs::read_to_string(job_dir.path("rank-1.log")).unwrap();
        let filters = [(r"127\.0\.0\.1:\d+", "127.0.0.1:[PORT]")];
        support::assert_snapshot(
            &job_dir.path(""),
            &format!("log_of_rank_1_of_{}", hosts.len()),
            &log,
            &filters,
        );
    }
}

#[test]
fn a_killed_rank_ends_all_hosts_within_a_second_and_is_reported() {
    let job_dir = JobDirectory::new();
    for victim in [0, 1, 3] {
        job_dir.delete_checkpoints();
        let killed: Mutex<Option<Instant>> = Mutex::new(None);
        let (_, ended) = run_workers(
            &job_dir,
            &[0, 0, 1, 1],
            |_, job| {
                if let Some(train) = &mut job.train {
                    train.steps = 100_000;
                }
            },
            |pids, step| {
                if step == 3 {
                    *killed.lock().unwrap() = Some(Instant::now());
                    kill(Pid::from_raw(pids[victim] as i32), Signal::SIGKILL).unwrap();
                }
            },
        );
        let killed = killed.into_inner().unwrap().unwrap();
        for (rank, e) in ended.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let (exit, error) = e.final_report.as_ref().unwrap();
            assert_eq!(
                (*exit, e.exit_code),
                (WorkerExit::Aborted, Some(WorkerExit::Aborted.exit_code().into()))
            );
            assert_eq!(error.code(), codes::collective::PEER_LOST);
            assert_eq!(error.field("peer"), Some(&victim.into()), "rank {rank}: {error:?}");
            let took = e.ended_at - killed;
            assert!(took < Duration::from_secs(1), "rank {rank} took {took:?}");
        }
    }
}

/// Changes the job to synchronous saves in a checkpoint directory that only this host uses.
fn use_host_local_storage(host: u32, job: &mut JobSpec) {
    job.checkpoint.dir = format!("checkpoints-{host}").into();
    job.checkpoint.r#async = false;
}

/// Removes the checkpoint directories of hosts 0 to 2.
fn remove_host_local_checkpoints(job_dir: &JobDirectory) {
    for host in 0..3 {
        _ = std::fs::remove_dir_all(job_dir.path(&format!("checkpoints-{host}")));
    }
}

/// Checks that every worker exited with code 0.
#[track_caller]
fn assert_all_succeeded(ended: &[EndedWorker]) {
    let ends: Vec<_> = ended.iter().map(|e| (e.exit_code, &e.final_report)).collect();
    assert!(ended.iter().all(|e| e.exit_code == Some(0)), "{ends:?}");
}

/// Returns the error that rank 0 has reported. Panics unless all ranks ended with the exit reason
/// `exit`.
#[track_caller]
fn expect_common_error(ended: &[EndedWorker], exit: WorkerExit) -> &Diagnostic {
    let ends: Vec<_> = ended.iter().map(|e| e.final_report.as_ref().expect("a final report")).collect();
    assert!(ends.iter().all(|(e, _)| *e == exit), "{ends:?}");
    &ends[0].1
}

#[test]
fn required_shared_storage_that_hosts_do_not_share_is_an_error() {
    let job_dir = JobDirectory::new();
    let require_shared = |host: u32, job: &mut JobSpec| {
        use_host_local_storage(host, job);
        job.checkpoint.require_shared = true;
    };
    let (losses, ended) = run_workers(&job_dir, &[0, 0, 1], require_shared, |_, _| ());
    assert_eq!(losses, []);
    expect_common_error(&ended, WorkerExit::Cluster);
    for e in &ended {
        assert_eq!(e.expect_error().code(), codes::training::STORAGE_NOT_SHARED, "{:?}", e.expect_error());
        // a rank reports the directory of its host, or of the host whose error reached it first
        let message = diagnostic::render(e.expect_error(), false);
        let message =
            message.replace("checkpoints-0", "checkpoints-N").replace("checkpoints-1", "checkpoints-N");
        job_dir.assert_snapshot("storage_not_shared", &message);
    }
    for host in 0..2 {
        let files = support::list_files_below(&job_dir.path(&format!("checkpoints-{host}")));
        assert!(files.is_empty(), "{files:?}");
    }
}

/// Checks that a job with host-local checkpoints resumes with bit-equal losses, whichever hosts its
/// ranks run on. Kills a rank after a save and resumes on other hosts, three times. A host without
/// shards reads all shards from the other hosts. In the last run, rank 0 gathers the weights
/// although its host wrote no shard.
#[test]
fn host_local_shards_resume_bit_equal_with_any_assignment_of_ranks_to_hosts() {
    let job_dir = JobDirectory::new();
    let set = ["train.steps=60", "checkpoint.every=15", "resume.from=never"];
    let expected = job_dir.run(&set).expect_success().collect_losses();
    let weights = |dir: &str| std::fs::read(job_dir.path(dir).join("weights/model.safetensors")).unwrap();
    let (mut at, runs) = (0, [&[0, 0, 1, 1][..], &[1, 1, 0], &[0, 1, 1, 1], &[2, 0, 1]]);
    for (n, hosts) in runs.into_iter().enumerate() {
        let train_60_steps = |host: u32, job: &mut JobSpec| {
            use_host_local_storage(host, job);
            job.checkpoint.r#async = n % 2 == 1;
            job.checkpoint.every = jobspec::SaveInterval::Steps(15);
            job.train.as_mut().unwrap().steps = 60;
        };
        let last = n + 1 == runs.len();
        let (losses, ended) = run_workers(&job_dir, hosts, train_60_steps, |pids, step| {
            if !last && step == at + 20 {
                kill(Pid::from_raw(pids[1] as i32), Signal::SIGKILL).unwrap();
            }
        });
        let first = losses[0].0 - 1;
        assert!(n == 0 || (first > 0 && first % 15 == 0 && first + 15 >= at), "{hosts:?} begin at {first}");
        assert_eq!(losses, expected[first as usize..][..losses.len()], "{hosts:?}");
        if last {
            assert_all_succeeded(&ended);
            assert_eq!(losses.last().unwrap().0, 60);
        }
        at = first + 15;
    }
    assert_eq!(weights("checkpoints-2"), weights("runs/tiny/checkpoints"));
    for (host, shard) in [(2, 0), (0, 1), (1, 2)] {
        let files = support::list_files_below(&job_dir.path(&format!("checkpoints-{host}/step-00000060")));
        assert_eq!(files, ["manifest.json".to_string(), format!("shard-{shard:05}-of-00003.safetensors")]);
    }
    let text = |host| {
        std::fs::read(job_dir.path(&format!("checkpoints-{host}/step-00000060/manifest.json"))).unwrap()
    };
    assert!(text(0) == text(1) && text(1) == text(2));
}

#[test]
fn a_missing_host_is_reported_with_its_shard() {
    let job_dir = JobDirectory::new();
    let (_, ended) = run_workers(&job_dir, &[0, 0, 1], use_host_local_storage, |_, _| ());
    assert_all_succeeded(&ended);
    let id = std::fs::read_to_string(job_dir.path("checkpoints-1/.host")).unwrap();
    let host_ids = [(&id[..8], "[HOST ID]"), (id.trim(), "[HOST ID]")];
    for hosts in [&[0, 2][..], &[0, 0]] {
        let (losses, ended) = run_workers(&job_dir, hosts, use_host_local_storage, |_, _| ());
        assert_eq!(losses, []);
        let error = expect_common_error(&ended, WorkerExit::Checkpoint);
        assert_eq!(error.code(), codes::training::RESUME_SHARD_UNREACHABLE, "{error:?}");
        let message = diagnostic::render(error, false);
        support::assert_snapshot(&job_dir.path(""), "unreachable_shard", &message, &host_ids);
    }
    let part = job_dir.path("checkpoints-0/step-00000020");
    let part = part.to_str().unwrap();
    let verified = job_dir.run_launch(&["ckpt", "verify", part]);
    let text = support::output_to_text(&verified);
    assert_eq!(verified.status.code(), Some(0), "{text}");
    support::assert_snapshot(&job_dir.path(""), "partial_checkpoint", &text, &host_ids);
    let (exit_code, error) = job_dir.expect_rejection(&["ckpt", "gather", part, "out"]);
    assert_eq!((exit_code, &error["code"]), (4, &"checkpoint-shards-on-other-hosts".into()), "{error}");
    let message = error["message"].as_str().unwrap();
    support::assert_snapshot(&job_dir.path(""), "gather_of_a_partial_checkpoint", message, &host_ids);
}

#[test]
fn a_kill_at_any_point_of_a_save_leaves_a_checkpoint_that_is_complete_on_all_hosts() {
    let job_dir = JobDirectory::new();
    let expected = job_dir.run(&["resume.from=never"]).expect_success().collect_losses();
    let hosts = [0, 0, 1];
    let count = job_dir.path("points");
    let counted = [(env::LAUNCH_FAULT, "2:0"), (env::LAUNCH_FAULT_COUNT, count.to_str().unwrap())];
    let (_, ended) = run_workers_with_env(&job_dir, &hosts, &counted, use_host_local_storage, |_, _| ());
    assert_all_succeeded(&ended);
    let points = std::fs::read_to_string(&count).unwrap();
    let line = points.lines().find_map(|l| l.strip_prefix("2 "));
    let total: usize = line.and_then(|n| n.parse().ok()).unwrap();
    assert!(total > 30, "{total} points");
    // the directory leader of host 1, from the probe of the storage to the second save, and rank 0
    let of_leader = (1..=8).map(|i| (2, i * total / 8));
    for (rank, point) in of_leader.chain([(0, total / 2), (0, total - 1)]) {
        remove_host_local_checkpoints(&job_dir);
        let fault = format!("{rank}:{point}");
        let variables = [(env::LAUNCH_FAULT, fault.as_str())];
        let (before, ended) =
            run_workers_with_env(&job_dir, &hosts, &variables, use_host_local_storage, |_, _| ());
        assert!(ended.iter().any(|e| e.exit_code != Some(0)), "{fault}");
        let (after, ended) = run_workers(&job_dir, &hosts, use_host_local_storage, |_, _| ());
        assert_all_succeeded(&ended);
        assert_eq!(before, expected[..before.len()], "{fault}");
        let first = after.first().map_or(20, |l| l.0 - 1) as usize;
        assert!([0, 10, 20].contains(&first), "{fault}: resumed at {first}");
        assert!(before.len() <= first + 10, "{fault}: a complete checkpoint was lost; resumed at {first}");
        assert_eq!(after, expected[first..], "{fault}");
        for host in 0..2 {
            let names: Vec<String> = std::fs::read_dir(job_dir.path(&format!("checkpoints-{host}")))
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .filter(|n| n.starts_with('.') && n != ".host")
                .collect();
            assert!(first == 20 || names.is_empty(), "{fault}: {names:?} remain on host {host}");
        }
    }
}

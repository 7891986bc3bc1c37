//! Built-in workers on several hosts: real worker processes whose agents this test plays. "Hosts" share no memory and meet over
//! the loopback interface.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use contract::{
    control::{FromWorker, JobKey, PeerAddress, Peers, ToWorker, VERSION, WorkerInit},
    env,
    event::Event,
    exit::WorkerExit,
    frame,
    job::{Interface, JobSpec, Source, load},
};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{Signal, kill},
    },
    unistd::Pid,
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
    process::{Child, Command, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};
use support::{JobDirectory, TINY};

/// (step, loss, gradient norm) of each step, floats as bits.
type Losses = Vec<(u64, u64, u64)>;

/// What a worker said at its end.
struct Ended {
    code: Option<i32>,
    fatal: Option<(WorkerExit, String)>,
    at: Instant,
}

/// Killed when dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Runs the job of `place` with rank r on host `hosts[r]`; `change` makes each host's job. `at_step(pids, step)` is called as rank 0
/// reports steps. Losses, and how each rank ended.
fn run(
    place: &JobDirectory,
    hosts: &[u32],
    change: impl Fn(u32, &mut JobSpec) + Sync,
    at_step: impl Fn(&[u32], u64) + Sync,
) -> (Losses, Vec<Ended>) {
    run_with(place, hosts, &[], change, at_step)
}

/// The same with environment variables for all workers.
fn run_with(
    place: &JobDirectory,
    hosts: &[u32],
    variables: &[(&str, &str)],
    change: impl Fn(u32, &mut JobSpec) + Sync,
    at_step: impl Fn(&[u32], u64) + Sync,
) -> (Losses, Vec<Ended>) {
    let world = hosts.len() as u32;
    let memory: Vec<OwnedFd> = (0..=hosts.iter().copied().max().unwrap_or(0))
        .map(|_| memfd_create("hosts-test", MFdFlags::MFD_ALLOW_SEALING).unwrap())
        .collect();
    let mut workers = Vec::new();
    let mut links = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let log = File::create(place.path(&format!("rank-{rank}.log"))).unwrap();
        let child = Command::new(std::env!("CARGO_BIN_EXE_launch"))
            .arg("worker")
            .env(env::LAUNCH_CONTROL_FD, theirs.as_raw_fd().to_string())
            .env(env::LAUNCH_SHM_FD, memory[*host as usize].as_raw_fd().to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        workers.push(Worker(child));
        links.push(ours);
    }
    let pids: Vec<u32> = workers.iter().map(|w| w.0.id()).collect();
    let writers: Mutex<Vec<UnixStream>> = Mutex::new(links.iter().map(|l| l.try_clone().unwrap()).collect());
    let tell = |rank: usize, message: &ToWorker| {
        // a worker that is gone needs no word
        _ = writers.lock().unwrap()[rank].write_all(&frame::encode(message).unwrap());
    };
    let listening: Mutex<BTreeMap<u32, Vec<SocketAddr>>> = Mutex::new(BTreeMap::new());
    let losses = Mutex::new(Losses::new());
    let welcome = |rank: usize| {
        let host = hosts[rank];
        let text = TINY.to_owned();
        let (mut job, _, _) = load(Source::Text { name: "job.yaml".into(), text }, &[]).unwrap();
        job.run.workdir = place.path("");
        job.cluster.interface = Interface::Named("127.0.0.0/8".into());
        change(host, &mut job);
        let place_of = |r: usize| hosts[..r].iter().filter(|h| **h == host).count() as u32;
        ToWorker::Init(Box::new(WorkerInit {
            version: VERSION,
            rank: rank as u32,
            local_rank: place_of(rank),
            world,
            local_world: place_of(hosts.len()),
            threads: 1,
            attempt: 4,
            run: "hosts-test".into(),
            run_dir: place.path(""),
            workdir: place.path(""),
            job,
        }))
    };
    let serve = |rank: usize, mut link: UnixStream| {
        let mut fatal = None;
        while let Some(message) = receive(&mut link) {
            match message {
                FromWorker::Hello { .. } => tell(rank, &welcome(rank)),
                FromWorker::Listening { addresses } => {
                    let mut all = listening.lock().unwrap();
                    all.insert(rank as u32, addresses);
                    if all.len() == hosts.len() {
                        let member = |(r, a): (&u32, &Vec<SocketAddr>)| PeerAddress {
                            host_index: hosts[*r as usize],
                            addresses: a.clone(),
                        };
                        let members = all.iter().map(member).collect();
                        let peers = Peers { attempt: 4, key: JobKey([3; 32]), members, nccl_id: None };
                        (0..hosts.len()).for_each(|r| tell(r, &ToWorker::Peers(peers.clone())));
                    }
                }
                FromWorker::Event(Event::Step { step, loss, grad_norm, .. }) => {
                    losses.lock().unwrap().push((step, loss.to_bits(), grad_norm.to_bits()));
                    at_step(&pids, step);
                }
                FromWorker::Fatal { exit, diagnostic } => fatal = Some((exit, diagnostic.to_string())),
                FromWorker::Event(_) | FromWorker::Progress { .. } => {}
            }
        }
        fatal
    };
    let ended = thread::scope(|s| {
        let serve = &serve;
        let threads: Vec<_> = links
            .into_iter()
            .zip(workers)
            .enumerate()
            .map(|(rank, (link, mut worker))| {
                s.spawn(move || {
                    let fatal = serve(rank, link);
                    let code = worker.0.wait().unwrap().code();
                    Ended { code, fatal, at: Instant::now() }
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    (losses.into_inner().unwrap(), ended)
}

fn receive(link: &mut UnixStream) -> Option<FromWorker> {
    let mut header = [0; frame::HEADER];
    link.read_exact(&mut header).ok()?;
    let mut body = vec![0; frame::body_length(header).unwrap() as usize];
    link.read_exact(&mut body).ok()?;
    Some(frame::decode(&body).unwrap())
}

#[test]
fn losses_over_hosts_are_bit_equal_to_one_host() {
    let place = JobDirectory::new();
    let expected = place.run(&["cluster.workers_per_host=4", "resume.from=never"]).succeeded().losses();
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0]] {
        place.delete_checkpoints();
        let (losses, ended) = run(&place, hosts, |_, _| (), |_, _| ());
        let said: Vec<_> = ended.iter().map(|e| (e.code, e.fatal.clone())).collect();
        assert!(ended.iter().all(|e| e.code == Some(0)), "{said:?}");
        assert_eq!(losses, expected, "{hosts:?}");
        let log = std::fs::read_to_string(place.path("rank-1.log")).unwrap();
        assert!(log.contains("accepts connections of its peers on 127.0.0.1:"), "{log}");
        assert!(log.contains("cluster.interface: 127.0.0.0/8"), "{log}");
    }
}

#[test]
fn a_killed_rank_ends_all_hosts_within_a_second_and_is_named() {
    let place = JobDirectory::new();
    for victim in [0, 1, 3] {
        place.delete_checkpoints();
        let killed: Mutex<Option<Instant>> = Mutex::new(None);
        let (_, ended) = run(
            &place,
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
            let (exit, message) = e.fatal.clone().unwrap();
            assert_eq!((exit, e.code), (WorkerExit::Aborted, Some(WorkerExit::Aborted.code().into())));
            assert!(message.contains(&format!("rank {victim} is gone")), "rank {rank}: {message}");
            let took = e.at - killed;
            assert!(took < Duration::from_secs(1), "rank {rank} took {took:?}");
        }
    }
}

/// Each host has a directory of its own.
fn own(host: u32, job: &mut JobSpec) {
    job.checkpoint.dir = format!("checkpoints-{host}").into();
    job.checkpoint.r#async = false;
}

fn forget(place: &JobDirectory) {
    for host in 0..3 {
        _ = std::fs::remove_dir_all(place.path(&format!("checkpoints-{host}")));
    }
}

#[track_caller]
fn all_done(ended: &[Ended]) {
    let said: Vec<_> = ended.iter().map(|e| (e.code, e.fatal.clone())).collect();
    assert!(ended.iter().all(|e| e.code == Some(0)), "{said:?}");
}

/// What rank 0 said at its end, when all ended for the same reason.
#[track_caller]
fn one_refusal(ended: &[Ended]) -> (WorkerExit, String) {
    let said: Vec<_> = ended.iter().map(|e| e.fatal.clone().expect("a refusal")).collect();
    assert!(said.iter().all(|(exit, _)| *exit == said[0].0), "{said:?}");
    said[0].clone()
}

#[test]
fn required_shared_storage_that_hosts_do_not_have_is_refused() {
    let place = JobDirectory::new();
    let own = |host: u32, job: &mut JobSpec| {
        own(host, job);
        job.checkpoint.require_shared = true;
    };
    let (losses, ended) = run(&place, &[0, 0, 1], own, |_, _| ());
    assert_eq!(losses, []);
    for e in &ended {
        let (exit, message) = e.fatal.clone().unwrap();
        assert_eq!(exit, WorkerExit::Cluster, "{message}");
        assert!(message.contains("is not shared: host "), "{message}");
        assert!(message.contains("checkpoint.require_shared: false"), "{message}");
    }
    for host in 0..2 {
        let left = support::files_below(&place.path(&format!("checkpoints-{host}")));
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Each stretch is killed after a save; the next goes on, on other hosts, with the same bits. A host that has nothing gets all
/// from the others; at the end rank 0, which wrote none of the shards, gathers the weights.
#[test]
fn shards_stay_on_their_hosts_and_any_split_goes_on_with_the_same_bits() {
    let place = JobDirectory::new();
    let set = ["train.steps=60", "checkpoint.every=15", "resume.from=never"];
    let expected = place.run(&set).succeeded().losses();
    let weights = |dir: &str| std::fs::read(place.path(dir).join("weights/model.safetensors")).unwrap();
    let (mut at, stretches) = (0, [&[0, 0, 1, 1][..], &[1, 1, 0], &[0, 1, 1, 1], &[2, 0, 1]]);
    for (n, hosts) in stretches.into_iter().enumerate() {
        let long = |host: u32, job: &mut JobSpec| {
            own(host, job);
            job.checkpoint.r#async = n % 2 == 1;
            job.checkpoint.every = contract::job::SaveInterval::Steps(15);
            job.train.as_mut().unwrap().steps = 60;
        };
        let last = n + 1 == stretches.len();
        let (losses, ended) = run(&place, hosts, long, |pids, step| {
            if !last && step == at + 20 {
                kill(Pid::from_raw(pids[1] as i32), Signal::SIGKILL).unwrap();
            }
        });
        let first = losses[0].0 - 1;
        assert!(n == 0 || (first > 0 && first % 15 == 0 && first + 15 >= at), "{hosts:?} begin at {first}");
        assert_eq!(losses, expected[first as usize..][..losses.len()], "{hosts:?}");
        if last {
            all_done(&ended);
            assert_eq!(losses.last().unwrap().0, 60);
        }
        at = first + 15;
    }
    assert_eq!(weights("checkpoints-2"), weights("runs/tiny/checkpoints"));
    for (host, shard) in [(2, 0), (0, 1), (1, 2)] {
        let files = support::files_below(&place.path(&format!("checkpoints-{host}/step-00000060")));
        assert_eq!(files, ["manifest.json".to_string(), format!("shard-{shard:05}-of-00003.safetensors")]);
    }
    let text =
        |host| std::fs::read(place.path(&format!("checkpoints-{host}/step-00000060/manifest.json"))).unwrap();
    assert!(text(0) == text(1) && text(1) == text(2));
}

#[test]
fn a_host_that_is_not_there_is_named_with_its_shard() {
    let place = JobDirectory::new();
    let (_, ended) = run(&place, &[0, 0, 1], own, |_, _| ());
    all_done(&ended);
    let id = std::fs::read_to_string(place.path("checkpoints-1/.host")).unwrap();
    for hosts in [&[0, 2][..], &[0, 0]] {
        let (losses, ended) = run(&place, hosts, own, |_, _| ());
        assert_eq!(losses, []);
        let (exit, message) = one_refusal(&ended);
        assert_eq!(exit, WorkerExit::Checkpoint, "{message}");
        assert!(message.contains("shard-00002-of-00003.safetensors"), "{message}");
        assert!(message.contains(&format!("(id {})", &id[..8])), "{message}");
    }
    let part = place.path("checkpoints-0/step-00000020");
    let part = part.to_str().unwrap();
    let verified = place.launch(&["ckpt", "verify", part]);
    let said =
        String::from_utf8_lossy(&verified.stdout).into_owned() + &String::from_utf8_lossy(&verified.stderr);
    assert_eq!(verified.status.code(), Some(0), "{said}");
    assert!(said.contains("partial") && said.contains(&id[..8]) && !said.contains("DAMAGED"), "{said}");
    let gathered = place.launch(&["ckpt", "gather", part, "out"]);
    let said = String::from_utf8_lossy(&gathered.stderr);
    assert_eq!(gathered.status.code(), Some(4), "{said}");
    assert!(
        said.contains("shard-00002-of-00003.safetensors on host") && said.contains("copy these files"),
        "{said}"
    );
}

#[test]
fn a_kill_at_any_point_of_a_save_on_one_host_leaves_a_checkpoint_that_is_whole_on_all() {
    let place = JobDirectory::new();
    let expected = place.run(&["resume.from=never"]).succeeded().losses();
    let hosts = [0, 0, 1];
    let count = place.path("points");
    let counted = [(env::LAUNCH_FAULT, "2:0"), (env::LAUNCH_FAULT_COUNT, count.to_str().unwrap())];
    let (_, ended) = run_with(&place, &hosts, &counted, own, |_, _| ());
    all_done(&ended);
    let points = std::fs::read_to_string(&count).unwrap();
    let line = points.lines().find_map(|l| l.strip_prefix("2 "));
    let total: usize = line.and_then(|n| n.parse().ok()).unwrap();
    assert!(total > 30, "{total} points");
    // The keeper of host 1, from the probe through both saves; and rank 0, which passes the same points and more.
    let of_keeper = (1..=8).map(|i| (2, i * total / 8));
    for (rank, point) in of_keeper.chain([(0, total / 2), (0, total - 1)]) {
        forget(&place);
        let fault = format!("{rank}:{point}");
        let (before, ended) = run_with(&place, &hosts, &[(env::LAUNCH_FAULT, &fault)], own, |_, _| ());
        assert!(ended.iter().any(|e| e.code != Some(0)), "{fault}");
        let (after, ended) = run(&place, &hosts, own, |_, _| ());
        all_done(&ended);
        assert_eq!(before, expected[..before.len()], "{fault}");
        let first = after.first().map_or(20, |l| l.0 - 1) as usize;
        assert!([0, 10, 20].contains(&first), "{fault}: begins after {first}");
        assert!(before.len() <= first + 10, "{fault}: a complete checkpoint was lost, begins after {first}");
        assert_eq!(after, expected[first..], "{fault}");
        for host in 0..2 {
            let names: Vec<String> = std::fs::read_dir(place.path(&format!("checkpoints-{host}")))
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .filter(|n| n.starts_with('.') && n != ".host")
                .collect();
            assert!(first == 20 || names.is_empty(), "{fault}: host {host} keeps {names:?}");
        }
    }
}

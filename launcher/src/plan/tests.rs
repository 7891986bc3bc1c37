use super::*;
use contract::{
    Source,
    control::Address,
    job::Interface,
    machine::{Gpu, Maker, Topology},
};
use proptest::prelude::*;

fn job(text: &str) -> JobSpec {
    let source = Source::Text { name: "demo.yaml".to_owned(), text: text.to_owned() };
    contract::load(source, &[]).expect("a job").0
}

fn machine(cpus: &[u32], quota: Option<f64>) -> Facts {
    let topology = Topology::flat(cpus);
    Facts {
        host: "here".to_owned(),
        cpus: cpus.to_vec(),
        quota,
        memory: 1 << 30,
        topology,
        ..Facts::default()
    }
}

fn command(workers: u32) -> JobSpec {
    job(&format!(
        "cluster: {{workers_per_host: {workers}, master_port: 4000}}\nrun: {{command: [true], workdir: /w, env: {{A: b}}}}"
    ))
}

/// A plan for the controller's own machine.
fn on(job: &JobSpec, facts: &Facts) -> Result<Plan, Vec<Finding>> {
    let here =
        Host { name: facts.host.clone(), slots: None, picked: None, local: true, facts: facts.clone() };
    plan(job, &[here], &RunId("R".to_owned()), &Epoch::default())
}

fn planned(job: &JobSpec, facts: &Facts) -> Plan {
    on(job, facts).expect("a plan")
}

#[test]
fn two_workers() {
    let plan = planned(&command(2), &machine(&[0, 1, 4, 5, 6], None));
    assert_eq!((plan.world, plan.run_dir.to_str()), (2, Some("/w/runs/demo/R")));
    assert!(plan.warnings.is_empty());
    let [node] = &plan.nodes[..] else { panic!("one node") };
    let [first, second] = &node.workers[..] else { panic!("two workers") };
    assert_eq!((&first.cpus[..], &second.cpus[..]), (&[0, 1][..], &[4, 5][..]));
    assert_eq!((second.rank, second.local_rank, second.local_world, second.threads), (1, 1, 2, 2));
    assert_eq!(second.log.to_str(), Some("/w/runs/demo/R/logs/rank-1.log"));
    let env: Vec<String> = second.env.iter().map(|(n, v)| format!("{n}={v}")).collect();
    assert_eq!(
        env,
        [
            "RANK=1",
            "LOCAL_RANK=1",
            "WORLD_SIZE=2",
            "LOCAL_WORLD_SIZE=2",
            "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=4000",
            "GROUP_RANK=0",
            "GROUP_WORLD_SIZE=1",
            "ROLE_RANK=1",
            "ROLE_WORLD_SIZE=2",
            "ROLE_NAME=default",
            "NODE_RANK=0",
            "LOCAL_SIZE=2",
            "CROSS_RANK=0",
            "CROSS_SIZE=1",
            "TORCHELASTIC_RUN_ID=R",
            "TORCHELASTIC_RESTART_COUNT=0",
            "TORCHELASTIC_MAX_RESTARTS=0",
            "TORCHELASTIC_USE_AGENT_STORE=True",
            "TORCHELASTIC_ERROR_FILE=/w/runs/demo/R/logs/rank-1.error.json",
            "OMP_NUM_THREADS=2",
            "PYTHONUNBUFFERED=1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
            "A=b"
        ]
    );
}

#[test]
fn more_workers_than_cpus_run_unbound_and_are_warned_about() {
    let plan = planned(&command(3), &machine(&[0, 1], None));
    assert!(plan.nodes[0].workers.iter().all(|w| w.cpus.is_empty() && w.threads == 1));
    assert_eq!(plan.warnings.len(), 1);
    assert_eq!(plan.warnings[0].path, "cluster.workers_per_host");
}

#[test]
fn a_time_limit_means_fewer_threads() {
    let plan = planned(&command(1), &machine(&[0, 1, 2, 3], Some(2.5)));
    assert_eq!((plan.nodes[0].workers[0].threads, plan.nodes[0].workers[0].cpus.len()), (2, 4));
    assert!(!planned(&command(3), &machine(&[0, 1, 2, 3], Some(2.0))).warnings.is_empty());
}

#[test]
fn the_job_may_set_the_threads() {
    let job = job("run: {command: [true], env: {OMP_NUM_THREADS: 3}}");
    let plan = planned(&job, &machine(&[0], None));
    let worker = &plan.nodes[0].workers[0];
    assert_eq!(worker.threads, 3);
    assert_eq!(worker.env.iter().filter(|(n, _)| n == "OMP_NUM_THREADS").count(), 1);
}

#[test]
fn the_users_own_environment_and_the_job_decide_before_launch() {
    let chosen = [("OMP_NUM_THREADS", "7"), ("PYTHONUNBUFFERED", "x")].map(|(n, v)| (n.into(), v.into()));
    let facts = Facts { chosen: chosen.to_vec(), ..machine(&[0, 1], None) };
    let values = |text: &str| {
        let env = planned(&job(text), &facts).nodes[0].workers[0].env.clone();
        let of = |name: &str| {
            let found: Vec<_> = env.iter().filter(|(n, _)| n == name).map(|(_, v)| v.clone()).collect();
            found.join(" and ")
        };
        ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHELASTIC_USE_AGENT_STORE"].map(of)
    };
    assert_eq!(values("run: {command: [true]}"), ["7", "x", "True"]);
    let own = "cluster: {store: rank0}\nrun: {command: [true], env: {OMP_NUM_THREADS: 3}}";
    assert_eq!(values(own), ["3", "x", "False"]);
    assert_eq!(
        values("train: {data: {files: [a]}}"),
        ["2", "", ""],
        "the built-in runtime has its own rules"
    );
}

#[test]
fn threads_that_are_no_number_are_refused_where_they_would_be_ignored() {
    let facts = machine(&[0, 1], None);
    let program = job("run: {command: [true], env: {OMP_NUM_THREADS: '4,2'}}");
    assert_eq!(planned(&program, &facts).nodes[0].workers[0].threads, 2);
    let trained = job("run: {env: {OMP_NUM_THREADS: '4,2'}}\ntrain: {data: {files: [a]}}");
    let problems = on(&trained, &facts).expect_err("refused");
    assert_eq!(problems[0].path, "run.env.OMP_NUM_THREADS");
}

#[test]
fn an_absent_rank_is_warned_about() {
    let plan = planned(&job("run: {command: [true], logs: {show: [0, 2]}}"), &machine(&[0, 1], None));
    let paths: Vec<&str> = plan.warnings.iter().map(|w| w.path.as_str()).collect();
    assert_eq!(paths, ["run.logs.show[1]"]);
}

#[test]
fn a_port_that_is_not_given_is_left_open() {
    let plan = planned(&job("run: {command: [true]}"), &machine(&[0], None));
    assert!(plan.nodes[0].workers[0].env.contains(&("MASTER_PORT".to_owned(), "auto".to_owned())));
}

#[test]
fn a_gpu_for_each_worker() {
    let facts = Facts { gpus: vec![gpu(0), gpu(0)], ..machine(&[0, 1, 2, 3], None) };
    let script = "run: {command: [python, a.py], visible_devices: one, local_rank_argument: true}";
    let plan = planned(&job(script), &facts);
    assert_eq!(plan.world, 2, "as many workers as GPUs");
    let second = &plan.nodes[0].workers[1];
    let of = |name: &str| second.env.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    assert_eq!(
        [of("RANK"), of("LOCAL_RANK"), of("LOCAL_WORLD_SIZE"), of("CUDA_VISIBLE_DEVICES")],
        [Some("1"), Some("0"), Some("2"), Some("1")]
    );
    assert_eq!(second.command.as_deref().map(|c| c.join(" ")).as_deref(), Some("python a.py --local_rank=0"));
    assert_eq!((second.local_rank, &second.cpus[..]), (1, &[0, 1, 2, 3][..]));
    let wrong = |text: &str| on(&job(text), &facts).expect_err("refused")[0].path.clone();
    assert_eq!(
        wrong("cluster: {workers_per_host: 3}\nrun: {command: [a], visible_devices: one}"),
        "run.visible_devices"
    );
    assert_eq!(wrong("cluster: {devices: [2]}\nrun: {command: [a]}"), "cluster.devices");
    let trained = planned(&job("cluster: {devices: cuda}\ntrain: {data: {files: [a]}}"), &facts);
    let own = |rank: usize| {
        let env = &trained.nodes[0].workers[rank].env;
        env.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").map(|(_, value)| value.clone())
    };
    assert_eq!((trained.world, own(0).as_deref(), own(1).as_deref()), (2, Some("0"), Some("1")));
    let shared = |collectives: &str| {
        let cluster = format!("cluster: {{devices: cuda, workers_per_gpu: 2, collectives: {collectives}}}");
        let plan = planned(&job(&format!("{cluster}\ntrain: {{data: {{files: [a]}}}}")), &facts);
        assert_eq!(plan.world, 4);
        plan.nodes[0].workers[3].env.contains(&("NCCL_MULTI_RANK_GPU_ENABLE".to_owned(), "1".to_owned()))
    };
    assert!(shared("nccl") && !shared("host") && !shared("auto"));
    let none = Facts { gpus: Vec::new(), ..facts.clone() };
    let refused =
        on(&job("cluster: {devices: cuda}\ntrain: {data: {files: [a]}}"), &none).expect_err("refused");
    assert_eq!(refused[0].path, "cluster.devices");
    assert_eq!(wrong("cluster: {workers_per_host: 9}\nrun: {command: [a], bind: cores}"), "run.bind");
}

fn gpu(node: u32) -> Gpu {
    Gpu { maker: Maker::Nvidia, bus: None, uuid: None, node: Some(node) }
}

/// A host elsewhere with these slots, found with these GPUs.
fn host(name: &str, slots: Option<u32>, gpus: u32) -> Host {
    let address =
        |interface: &str, ip: &str| Address { interface: interface.into(), address: ip.parse().expect("ip") };
    let addresses = vec![
        address("lo", "127.0.0.1"),
        address("eth0", "fe80::1"),
        address("eth0", "2001:db8::7"),
        address("eth0", "10.0.0.7"),
        address("ib0", "10.9.0.7"),
    ];
    let gpus = (0..gpus).map(|_| gpu(0)).collect();
    let facts = Facts { gpus, addresses, ..machine(&[0, 1, 2, 3], None) };
    Host { name: name.to_owned(), slots, picked: None, local: false, facts }
}

fn over(job: &JobSpec, hosts: &[Host], epoch: &Epoch) -> Result<Plan, Vec<Finding>> {
    plan(job, hosts, &RunId("R".to_owned()), epoch)
}

fn value(plan: &Plan, rank: usize, name: &str) -> String {
    let mut workers = plan.nodes.iter().flat_map(|n| &n.workers);
    let env = &workers.nth(rank).expect("the rank").env;
    env.iter().find(|(n, _)| n == name).expect("the name").1.clone()
}

#[test]
fn ranks_follow_the_hosts_and_every_number_is_right() {
    let job = job("run: {command: [true], workdir: /w}");
    let hosts = [host("a", Some(1), 0), host("b", Some(3), 0), host("c", Some(2), 0)];
    let epoch = Epoch { number: 2, restarts: 1, ..Epoch::default() };
    let plan = over(&job, &hosts, &epoch).expect("a plan");
    assert_eq!((plan.world, plan.hosts.join(" ")), (6, "a b c".to_owned()));
    let ranks: Vec<Vec<u32>> =
        plan.nodes.iter().map(|n| n.workers.iter().map(|w| w.rank).collect()).collect();
    assert_eq!(ranks, [vec![0], vec![1, 2, 3], vec![4, 5]]);
    assert!(plan.nodes.iter().all(|n| n.epoch == 2));
    for (name, values) in [
        ("RANK", "0 1 2 3 4 5"),
        ("LOCAL_RANK", "0 0 1 2 0 1"),
        ("LOCAL_WORLD_SIZE", "1 3 3 3 2 2"),
        ("LOCAL_SIZE", "1 3 3 3 2 2"),
        ("GROUP_RANK", "0 1 1 1 2 2"),
        ("NODE_RANK", "0 1 1 1 2 2"),
        ("CROSS_RANK", "0 1 1 1 2 2"),
        ("GROUP_WORLD_SIZE", "3 3 3 3 3 3"),
        ("CROSS_SIZE", "3 3 3 3 3 3"),
        ("WORLD_SIZE", "6 6 6 6 6 6"),
        ("ROLE_RANK", "0 1 2 3 4 5"),
        ("TORCHELASTIC_RESTART_COUNT", "1 1 1 1 1 1"),
        ("MASTER_ADDR", "10.0.0.7 10.0.0.7 10.0.0.7 10.0.0.7 10.0.0.7 10.0.0.7"),
    ] {
        let found: Vec<String> = (0..6).map(|rank| value(&plan, rank, name)).collect();
        assert_eq!(found.join(" "), values, "{name}");
    }
}

#[test]
fn the_first_hosts_address_is_numeric_and_reachable() {
    let job = job("run: {command: [true]}");
    let master = |hosts: &[Host], interface: Option<&str>| {
        let mut job = job.clone();
        job.cluster.interface = interface.map_or(Interface::Auto, |name| Interface::Named(name.into()));
        over(&job, hosts, &Epoch::default()).map(|plan| plan.master.map(|ip| ip.to_string()))
    };
    let (a, b) = (host("a", None, 0), host("b", None, 0));
    assert_eq!(master(&[a.clone(), b.clone()], None), Ok(Some("10.0.0.7".into())));
    assert_eq!(master(&[a.clone(), b.clone()], Some("ib0")), Ok(Some("10.9.0.7".into())));
    assert_eq!(master(&[a.clone(), b.clone()], Some("10.9.0.0/16")), Ok(Some("10.9.0.7".into())));
    let refused = master(&[a.clone(), b.clone()], Some("wlan0")).expect_err("refused");
    assert!(refused[0].message.contains("on the interface wlan0"), "{refused:?}");
    let mut here = a.clone();
    here.local = true;
    assert_eq!(master(&[here.clone(), b], None), Ok(Some("10.0.0.7".into())), "others have to reach it");
    assert_eq!(master(&[here], None), Ok(Some("127.0.0.1".into())));
    let mut lonely = a.clone();
    lonely.facts.addresses.truncate(2);
    assert!(master(&[lonely, a.clone()], None).expect_err("refused")[0].message.contains("no address"));
    let unknown = Host { facts: Facts::promised("u"), ..a };
    assert_eq!(master(&[unknown], None), Ok(None), "nobody was asked yet");
}

#[test]
fn each_host_gives_its_own_gpus_and_cores() {
    let one = job("run: {command: [true], visible_devices: one, bind: cores}");
    let mut b = host("b", None, 4);
    b.facts.chosen = vec![("CUDA_VISIBLE_DEVICES".into(), "3".into())];
    let plan = over(&one, &[host("a", None, 2), b], &Epoch::default()).expect("a plan");
    let of = |name: &str| (0..3).map(|rank| value(&plan, rank, name)).collect::<Vec<_>>().join(" ");
    assert_eq!(
        (plan.world, of("CUDA_VISIBLE_DEVICES"), of("LOCAL_RANK")),
        (3, "0 1 3".into(), "0 0 0".into())
    );
    let cpus: Vec<&[u32]> = plan.nodes.iter().flat_map(|n| &n.workers).map(|w| &w.cpus[..]).collect();
    assert_eq!(cpus, [&[0, 1][..], &[2, 3], &[0, 1, 2, 3]]);
    // A host that nobody has looked at yet can't refuse anything; when it is found it does.
    let two = job("cluster: {devices: [0, 2]}\nrun: {command: [true], bind: cores}");
    let unknown = Host { facts: Facts::promised("u"), ..host("u", None, 0) };
    assert_eq!(device_labels(&one, &unknown.facts, 1), ["unknown"]);
    assert_eq!(over(&two, &[unknown], &Epoch::default()).expect("a plan").world, 2);
    let why = over(&two, &[host("a", None, 2)], &Epoch::default()).expect_err("refused");
    assert_eq!(why[0].path, "cluster.devices");
}

#[test]
fn a_promise_that_is_not_kept_is_refused_with_both_numbers() {
    let auto = job("run: {command: [true]}");
    let two = job("cluster: {workers_per_host: 2}\nrun: {command: [true]}");
    let cpu = job("cluster: {devices: cpu}\nrun: {command: [true]}");
    let workers = |job: &JobSpec, host: Host| over(job, &[host], &Epoch::default()).map(|plan| plan.world);
    assert_eq!(workers(&auto, host("a", None, 4)), Ok(4), "one for each GPU");
    assert_eq!(workers(&auto, host("a", Some(3), 4)), Ok(3));
    assert_eq!(workers(&two, host("a", Some(3), 4)), Ok(2));
    assert_eq!(workers(&cpu, host("a", Some(8), 4)), Ok(8));
    assert_eq!(workers(&auto, host("a", None, 0)), Ok(1));
    let why = workers(&auto, host("a", Some(8), 4)).expect_err("refused");
    assert_eq!(why[0].message, "a was promised to have 8 slots, and 4 GPUs were found there");
    let why = workers(&two, host("a", Some(1), 0)).expect_err("refused");
    assert_eq!(why[0].message, "2 workers are asked for on a, which has 1 slots");
    assert!(workers(&auto, host("a", Some(0), 0)).is_err(), "no worker at all");
}

#[test]
fn a_restart_goes_on_from_what_the_run_has_saved() {
    let of = |from: &str, saved: Option<&str>| {
        let job = job(&format!("train: {{data: {{files: [a]}}}}\nresume: {{from: {from}}}"));
        let epoch = Epoch { resume: saved.map(PathBuf::from), ..Epoch::default() };
        let plan = over(&job, &[host("a", None, 0)], &epoch).expect("a plan");
        plan.nodes[0].job.resume.from.clone()
    };
    let path = |p: &str| ResumeFrom::Path(p.into());
    assert_eq!(of("auto", Some("/c/step-5")), ResumeFrom::Auto);
    assert_eq!(of("/old", Some("/c/step-5")), path("/c/step-5"));
    assert_eq!(of("never", Some("/c/step-5")), path("/c/step-5"));
    assert_eq!((of("/old", None), of("never", None)), (path("/old"), ResumeFrom::Never));
}

proptest! {
    /// Ranks are 0..world, each once, ascending over the hosts; local ranks count from 0 on each.
    #[test]
    fn any_hosts_have_a_whole_world(slots in proptest::collection::vec(1u32..9, 1..20)) {
        let job = job("run: {command: [true]}");
        let hosts: Vec<Host> = slots.iter().enumerate().map(|(i, s)| host(&format!("h{i}"), Some(*s), 0)).collect();
        let plan = over(&job, &hosts, &Epoch::default()).expect("a plan");
        let ranks: Vec<u32> = plan.nodes.iter().flat_map(|n| &n.workers).map(|w| w.rank).collect();
        prop_assert_eq!(ranks, (0..slots.iter().sum()).collect::<Vec<u32>>());
        for (node, slots) in plan.nodes.iter().zip(&slots) {
            let local: Vec<u32> = node.workers.iter().map(|w| w.local_rank).collect();
            prop_assert_eq!(local, (0..*slots).collect::<Vec<u32>>());
            prop_assert_eq!(node.world, plan.world);
        }
    }
}

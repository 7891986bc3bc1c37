//! Tests of plans for several hosts: ranks, addresses, GPUs, and later attempts.
use super::*;

/// Returns the value of the environment variable `name` of the worker `rank`. Panics if the
/// variable is not set.
fn find_env_value(plan: &Plan, rank: usize, name: &str) -> String {
    let mut workers = plan.host_plans.iter().flat_map(|n| &n.workers);
    let mut env = workers.nth(rank).expect("the rank").env.clone();
    plan.insert_rendezvous(&mut env);
    env.iter().find(|(n, _)| n == name).expect("the name").1.clone()
}

#[test]
fn ranks_follow_the_hosts() {
    let job = load_job_text("run: {command: [true], workdir: /w}");
    let hosts = [remote_host("a", Some(1), 0), remote_host("b", Some(3), 0), remote_host("c", Some(2), 0)];
    let attempt = Attempt { number: 2, restarts: 1, ..Attempt::default() };
    let plan = plan_hosts(&job, &hosts, &attempt).expect("a plan");
    assert_eq!((plan.world, plan.host_names.join(" ")), (6, "a b c".to_owned()));
    let ranks: Vec<Vec<u32>> =
        plan.host_plans.iter().map(|n| n.workers.iter().map(|w| w.rank).collect()).collect();
    assert_eq!(ranks, [vec![0], vec![1, 2, 3], vec![4, 5]]);
    assert!(plan.host_plans.iter().all(|n| n.attempt == 2));
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
        let found: Vec<String> = (0..6).map(|rank| find_env_value(&plan, rank, name)).collect();
        assert_eq!(found.join(" "), values, "{name}");
    }
}

#[test]
fn the_master_address_is_numeric_and_reachable() {
    let job = load_job_text("run: {command: [true]}");
    let master = |hosts: &[JobHost], interface: Option<&str>| {
        let mut job = job.clone();
        job.cluster.interface =
            interface.map_or(InterfaceSelector::Auto, |name| InterfaceSelector::Named(name.into()));
        plan_hosts(&job, hosts, &Attempt::default()).map(|plan| plan.master_address.map(|ip| ip.to_string()))
    };
    let (a, b) = (remote_host("a", None, 0), remote_host("b", None, 0));
    assert_eq!(master(&[a.clone(), b.clone()], None), Ok(Some("10.0.0.7".into())));
    assert_eq!(master(&[a.clone(), b.clone()], Some("ib0")), Ok(Some("10.9.0.7".into())));
    assert_eq!(master(&[a.clone(), b.clone()], Some("10.9.0.0/16")), Ok(Some("10.9.0.7".into())));
    let errors = master(&[a.clone(), b.clone()], Some("wlan0")).expect_err("no such interface");
    assert_eq!(errors[0].code(), codes::ADDRESS_UNREACHABLE);
    let mut local = a.clone();
    local.local = true;
    assert_eq!(master(&[local.clone(), b], None), Ok(Some("10.0.0.7".into())), "other hosts must reach it");
    assert_eq!(master(&[local], None), Ok(Some("127.0.0.1".into())));
    let mut through_ib = a.clone();
    through_ib.inventory.reached_address = Some("10.9.0.7".parse().expect("an address"));
    assert_eq!(master(&[through_ib, a.clone()], None), Ok(Some("10.9.0.7".into())), "as SSH does");
    let mut v6_only = a.clone();
    v6_only.inventory.addresses.truncate(3);
    assert_eq!(master(&[v6_only, a.clone()], None), Ok(Some("2001:db8::7".into())));
    let mut lonely = a.clone();
    lonely.inventory.addresses.truncate(2);
    lonely.inventory.addresses[1].address = "169.254.0.9".parse().expect("an address");
    let errors = master(&[lonely, a.clone()], None).expect_err("link-local addresses only");
    assert_eq!(errors[0].code(), codes::ADDRESS_UNREACHABLE);
    let unknown = JobHost { inventory: HostInventory::unknown("u"), ..a };
    assert_eq!(master(&[unknown], None), Ok(None), "the agents have not reported yet");
}

/// Checks that built-in workers do not take the address at which the user reached a host for the
/// one at which the controller did.
#[test]
fn the_ssh_connection_of_the_user_is_hidden_from_built_in_workers() {
    let job = load_job_text("cluster: {hosts: [a, b]}\ntrain: {data: {files: [a]}}");
    let mut hosts = [remote_host("a", None, 0), remote_host("b", None, 0)];
    for host in &mut hosts {
        host.inventory.reached_address = Some("10.9.0.7".parse().expect("an address"));
    }
    hosts[0].local = true;
    let hidden = |job: &JobSpec| {
        let plan = plan_hosts(job, &hosts, &Attempt::default()).expect("a plan");
        let is_hidden = |worker: &WorkerPlan| worker.env.contains(&("SSH_CONNECTION".into(), String::new()));
        plan.host_plans.iter().map(|host| host.workers.iter().all(is_hidden)).collect::<Vec<_>>()
    };
    assert_eq!(hidden(&job), [true, false]);
    let program = load_job_text("cluster: {hosts: [a, b]}\nrun: {command: [true]}");
    assert_eq!(hidden(&program), [false, false]);
}

/// Checks that the workers of each host use the interface that the job or SSH selects there, unless
/// the user or the host selects another one.
#[test]
fn libraries_use_the_selected_interface() {
    let interfaces = |job: &str, hosts: &[JobHost]| {
        let plan = plan_hosts(&load_job_text(job), hosts, &Attempt::default()).expect("a plan");
        let workers = plan.host_plans.iter().flat_map(|host| &host.workers);
        let format = |worker: &WorkerPlan| {
            let names = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"];
            let value =
                |name: &str| worker.env.iter().find(|(n, _)| n == name).map_or("-", |(_, v)| v.as_str());
            names.map(value).join(" ")
        };
        workers.map(format).collect::<Vec<_>>()
    };
    let (a, mut b) = (remote_host("a", None, 0), remote_host("b", None, 0));
    b.inventory.addresses.iter_mut().for_each(|address| address.interface.push('b'));
    let hosts = [a.clone(), b.clone()];
    let named = "cluster: {interface: 10.9.0.0/16}\nrun: {command: [true]}";
    assert_eq!(interfaces(named, &hosts), ["=ib0 ib0 ib0", "=ib0b ib0b ib0b"]);
    assert_eq!(interfaces("run: {command: [true]}", &hosts), ["- - -"; 2], "nothing selects one");
    assert_eq!(interfaces(named, &hosts[..1]), ["- - -"], "one host needs no network");
    let given = format!("{named}\n  env: {{GLOO_SOCKET_IFNAME: x}}")
        .replace("{command: [true]}", "\n  command: [true]");
    assert_eq!(interfaces(&given, &hosts), ["=ib0 x ib0", "=ib0b x ib0b"]);
    b.inventory.inherited_env = vec![("NCCL_SOCKET_IFNAME".into(), "ib".into())];
    b.inventory.reached_address = Some("10.9.0.7".parse().expect("an address"));
    assert_eq!(interfaces(named, &[a.clone(), b.clone()]), ["=ib0 ib0 ib0", "ib ib0b ib0b"]);
    assert_eq!(interfaces("run: {command: [true]}", &[a, b.clone()]), ["- - -", "- ib0b ib0b"]);
    let joined = "cluster: {hosts: join}\nrun: {command: [true]}";
    assert_eq!(interfaces(joined, &[b.clone(), b]), ["- - -"; 2], "the user reached the hosts, not launch");
    let trained = "cluster: {interface: ib0}\ntrain: {data: {files: [x]}}";
    let hosts = [remote_host("a", None, 0), remote_host("b", None, 0)];
    assert_eq!(interfaces(trained, &hosts), ["=ib0 - -", "=ib0 - -"]);
}

#[test]
fn the_built_in_training_has_a_largest_number_of_workers() {
    let count = |work: &str, hosts: usize| {
        let job = load_job_text(&format!("cluster: {{workers_per_host: 512}}\n{work}"));
        let hosts: Vec<JobHost> = (0..hosts).map(|n| remote_host(&format!("h{n}"), None, 0)).collect();
        plan_hosts(&job, &hosts, &Attempt::default()).map(|plan| plan.world).map_err(|errors| {
            assert_eq!((errors.len(), errors[0].code()), (1, codes::WORKERS_OUT_OF_RANGE), "{errors:?}");
            errors[0].field("limit").and_then(|limit| limit.as_u64())
        })
    };
    let training = "train: {data: {files: [a]}}\ncheckpoint: {memory: {copies: 1}}";
    assert_eq!(count(training, 2), Ok(1024));
    assert_eq!(count(training, 3), Err(Some(1024)));
    assert_eq!(count("run: {command: [true]}", 3), Ok(1536));
}

#[test]
fn each_host_gives_its_own_gpus_and_cores() {
    let one = load_job_text("run: {command: [true], visible_devices: one, cpu_bind: cores}");
    let mut b = remote_host("b", None, 4);
    b.inventory.inherited_env = vec![("CUDA_VISIBLE_DEVICES".into(), "3".into())];
    let plan = plan_hosts(&one, &[remote_host("a", None, 2), b], &Attempt::default()).expect("a plan");
    let values =
        |name: &str| (0..3).map(|rank| find_env_value(&plan, rank, name)).collect::<Vec<_>>().join(" ");
    assert_eq!(
        (plan.world, values("CUDA_VISIBLE_DEVICES"), values("LOCAL_RANK")),
        (3, "0 1 3".into(), "0 0 0".into())
    );
    let cpus: Vec<&[u32]> = plan.host_plans.iter().flat_map(|n| &n.workers).map(|w| &w.cpus[..]).collect();
    assert_eq!(cpus, [&[0, 1][..], &[2, 3], &[0, 1, 2, 3]]);
    // A plan accepts GPU numbers on a host without an inventory, and rejects wrong ones once the
    // inventory is known.
    let two = load_job_text("cluster: {devices: [0, 2]}\nrun: {command: [true], cpu_bind: cores}");
    let unknown = JobHost { inventory: HostInventory::unknown("u"), ..remote_host("u", None, 0) };
    assert_eq!(list_device_labels(&one, &unknown.inventory, 1), ["unknown"]);
    assert_eq!(plan_hosts(&two, &[unknown], &Attempt::default()).expect("a plan").world, 2);
    let errors = plan_hosts(&two, &[remote_host("a", None, 2)], &Attempt::default()).expect_err("two GPUs");
    assert_eq!(subject_key(&errors[0]), "cluster.devices");
}

#[test]
fn slots_that_the_gpus_cannot_serve_are_rejected_with_both_numbers() {
    let auto = load_job_text("run: {command: [true]}");
    let two = load_job_text("cluster: {workers_per_host: 2}\nrun: {command: [true]}");
    let cpu = load_job_text("cluster: {devices: cpu}\nrun: {command: [true]}");
    let workers =
        |job: &JobSpec, host: JobHost| plan_hosts(job, &[host], &Attempt::default()).map(|plan| plan.world);
    assert_eq!(workers(&auto, remote_host("a", None, 4)), Ok(4), "one for each GPU");
    assert_eq!(workers(&auto, remote_host("a", Some(3), 4)), Ok(3));
    assert_eq!(workers(&two, remote_host("a", Some(3), 4)), Ok(2));
    assert_eq!(workers(&cpu, remote_host("a", Some(8), 4)), Ok(8));
    assert_eq!(workers(&auto, remote_host("a", None, 0)), Ok(1));
    let errors = workers(&auto, remote_host("a", Some(8), 4)).expect_err("4 GPUs");
    assert_eq!(errors[0].code(), codes::SLOTS_EXCEED_GPUS);
    assert_eq!((errors[0].field("slots"), errors[0].field("gpus")), (Some(&8.into()), Some(&4.into())));
    let errors = workers(&two, remote_host("a", Some(1), 0)).expect_err("1 slot");
    assert_eq!(errors[0].code(), codes::WORKERS_EXCEED_SLOTS);
    assert_eq!((errors[0].field("workers"), errors[0].field("slots")), (Some(&2.into()), Some(&1.into())));
    assert!(workers(&auto, remote_host("a", Some(0), 0)).is_err(), "no worker at all");
}

#[test]
fn a_restart_resumes_from_the_last_checkpoint_of_the_run() {
    let resume_from = |from: &str, saved: Option<&str>| {
        let job = load_job_text(&format!("train: {{data: {{files: [a]}}}}\nresume: {{from: {from}}}"));
        let attempt = Attempt { resume: saved.map(PathBuf::from), ..Attempt::default() };
        let plan = plan_hosts(&job, &[remote_host("a", None, 0)], &attempt).expect("a plan");
        plan.host_plans[0].job.resume.from.clone()
    };
    let path = |p: &str| ResumeFrom::Path(p.into());
    assert_eq!(resume_from("auto", Some("/c/step-5")), ResumeFrom::Auto);
    assert_eq!(resume_from("/old", Some("/c/step-5")), path("/c/step-5"));
    assert_eq!(resume_from("never", Some("/c/step-5")), path("/c/step-5"));
    assert_eq!((resume_from("/old", None), resume_from("never", None)), (path("/old"), ResumeFrom::Never));
}

proptest! {
    /// Checks that a plan passes the batch job to its workers unchanged, and that exactly the
    /// attempts without a checkpoint of this run continue a batch job that was started again.
    #[test]
    fn attempts_continue_a_batch_job_unless_this_run_has_saved(
        restarts in proptest::option::of(0u32..3),
        (in_batch_job, saved, builtin) in proptest::arbitrary::any::<(bool, bool, bool)>(),
        from in proptest::sample::select(vec!["auto", "never", "/old/step-5"]),
    ) {
        let work = if builtin { "train: {data: {files: [a]}}" } else { "run: {command: [a]}\ncheckpoint: {dir: c}" };
        let work = if from == "auto" { work } else { work.trim_end_matches("\ncheckpoint: {dir: c}") };
        let job = load_job_text(&format!("{work}\nresume: {{from: {from}}}"));
        let batch_job = in_batch_job.then(|| BatchJobRecord { id: "b".into(), label: "job b".into(), restarts });
        let attempt = Attempt {
            resume: saved.then(|| PathBuf::from("/c/step-5")),
            batch_job: batch_job.clone(),
            ..Attempt::default()
        };
        let plan = plan_hosts(&job, &[remote_host("a", None, 0)], &attempt).expect("a plan");
        let continues = in_batch_job && restarts != Some(0) && !saved && builtin && from != "auto";
        prop_assert_eq!(&plan.host_plans[0].batch_job, &batch_job);
        prop_assert_eq!(plan.host_plans[0].continues_batch_job, continues);
    }

    /// Checks that ranks count from 0 in the order of the hosts, and that local ranks count from 0
    /// on each host.
    #[test]
    fn ranks_are_contiguous_over_any_hosts(slots in proptest::collection::vec(1u32..9, 1..20)) {
        let job = load_job_text("run: {command: [true]}");
        let hosts: Vec<JobHost> = slots.iter().enumerate().map(|(i, s)| remote_host(&format!("h{i}"), Some(*s), 0)).collect();
        let plan = plan_hosts(&job, &hosts, &Attempt::default()).expect("a plan");
        let ranks: Vec<u32> = plan.host_plans.iter().flat_map(|n| &n.workers).map(|w| w.rank).collect();
        prop_assert_eq!(ranks, (0..slots.iter().sum()).collect::<Vec<u32>>());
        for (node, slots) in plan.host_plans.iter().zip(&slots) {
            let local: Vec<u32> = node.workers.iter().map(|w| w.local_rank).collect();
            prop_assert_eq!(local, (0..*slots).collect::<Vec<u32>>());
            prop_assert_eq!(node.world, plan.world);
        }
    }
}

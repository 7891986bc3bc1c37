//! Tests the conversion of command lines of torchrun, accelerate and deepspeed that need GPUs or
//! several hosts. tests/end_to_end compares command lines for CPUs with the original programs.
use super::*;
use diagnostic::{Diagnostic, codes::command};
use jobspec::{
    AcceleratorKind, DeviceSelection, Document, DocumentSyntax, HostSelection, JobSource, JobSpec,
    VisibleDevices, WorkersPerHost,
};
use std::collections::BTreeMap;

/// Calls `convert` with a machine that has 8 CPUs, 4 cores and `gpus` GPUs.
fn on_machine<R>(gpus: usize, variables: &[(&str, &str)], convert: impl Fn(&DropInContext<'_>) -> R) -> R {
    with_accelerators(AcceleratorKind::Cuda, gpus, variables, convert)
}

/// Calls `convert` with a machine that has 8 CPUs, 4 cores and `gpus` accelerators of a kind.
fn with_accelerators<R>(
    kind: AcceleratorKind,
    gpus: usize,
    variables: &[(&str, &str)],
    convert: impl Fn(&DropInContext<'_>) -> R,
) -> R {
    let variables: BTreeMap<String, String> =
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let context = DropInContext {
        variables: &variables,
        python: "/venv/python",
        directory: "/work",
        cpus: 8,
        cores: 4,
        numa_nodes: 1,
        kind,
        gpus,
        installed_gpus: gpus,
    };
    convert(&context)
}

/// Splits a line at white space.
fn split(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Loads a converted job.
fn load(imported: &ImportedJob) -> JobSpec {
    let source = JobSource::Text { name: "job.yaml".to_owned(), text: imported.job.clone() };
    jobspec::load_job(source, &[]).expect("a job").0
}

/// Converts a command line of torchrun on a machine with `gpus` GPUs.
fn torchrun(line: &str, gpus: usize) -> Result<ImportedJob, Vec<Diagnostic>> {
    on_machine(gpus, &[], |machine| convert_torchrun_command(TorchProgram::Torchrun, &split(line), machine))
}

/// Converts a command line of `accelerate launch`, with the configuration `config`, on a machine
/// with `gpus` GPUs.
fn accelerate(line: &str, config: Option<&str>, gpus: usize) -> Result<ImportedJob, Vec<Diagnostic>> {
    let config = config.map(|text| Document::parse("c.yaml", text, DocumentSyntax::Yaml).expect("YAML"));
    on_machine(gpus, &[], |machine| AccelerateCommand::parse(&split(line))?.convert(config.as_ref(), machine))
}

/// Converts a command line of `deepspeed` on a machine with `gpus` GPUs. `hostfile` is the text of
/// the hostfile, and `variables` are those of the user.
fn deepspeed(
    line: &str,
    hostfile: Option<&str>,
    variables: &[(&str, &str)],
    gpus: usize,
) -> Result<ImportedJob, Vec<Diagnostic>> {
    let files = DeepSpeedFiles {
        hostfile: hostfile.map(str::to_owned),
        variables: vec!["A=b=c\n\nNCCL_DEBUG=INFO\n".into()],
    };
    on_machine(gpus, variables, |machine| DeepSpeedCommand::parse(&split(line))?.convert(&files, machine))
}

/// Returns the value of a variable of `run.env`.
fn variable<'a>(job: &'a JobSpec, name: &str) -> Option<&'a str> {
    job.run.env.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
}

/// Describes the nodes of a command line as `NODES RANK ADDRESS`, with `-` for parts that it does
/// not state. Checks that the ranks get another port than the nodes.
fn describe_nodes(imported: Result<ImportedJob, Vec<Diagnostic>>) -> String {
    let imported = match imported {
        Ok(imported) => imported,
        Err(errors) => return errors[0].subject().unwrap_or_default().to_owned(),
    };
    let Some(nodes) = &imported.nodes else { return "none".to_owned() };
    assert_eq!(load(&imported).cluster.master_port, jobspec::MasterPort::Auto);
    let rank = nodes.node_rank.map_or("-".to_owned(), |rank| rank.to_string());
    let address = nodes.rendezvous.as_ref().map_or("-".to_owned(), ToString::to_string);
    format!("{}:{} {rank} {address}", nodes.count.min, nodes.count.max)
}

#[test]
fn command_lines_that_are_started_on_each_node_describe_the_nodes() {
    for (line, expected) in [
        ("a.py", "none"),
        ("--standalone --nproc-per-node 2 a.py", "1:1 - -"),
        ("--nnodes 1 a.py", "1:1 - -"),
        ("--nnodes 4 --node-rank 2 --master-addr h --master-port 7 a.py", "4:4 2 h:7"),
        ("--nnodes 4 --node-rank 2 --master-addr h a.py", "4:4 2 h:29500"),
        ("--nnodes 4 --master-addr h a.py", "4:4 0 h:29500"),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h:7 --rdzv-id x a.py", "1:4 - h:7"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h --node-rank 1 a.py", "2:2 1 h:29400"),
        ("--nnodes 2 --rdzv-endpoint a:b a.py", "--rdzv-endpoint"),
        ("--nnodes 2 --node-rank 2 a.py", "--node-rank"),
        ("--node-rank 1 a.py", "--node-rank"),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h a.py", "--rdzv-backend"),
    ] {
        assert_eq!(describe_nodes(torchrun(line, 0)), expected, "{line}");
    }
    let config = "distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: h\n\
                  main_process_port: 7\nnum_processes: 8\n";
    for (line, config, expected) in [
        ("a.py", None, "none"),
        ("a.py", Some(config), "2:2 1 h:7"),
        ("--machine_rank 0 a.py", Some(config), "2:2 0 h:7"),
        ("--num_machines 3 --multi_gpu --num_processes 6 --main_process_ip h a.py", None, "3:3 0 h:29400"),
        ("--num_machines 3 --multi_gpu --num_processes 5 a.py", None, "--num_processes"),
        ("--machine_rank 2 a.py", Some(config), "--machine_rank"),
    ] {
        assert_eq!(describe_nodes(accelerate(line, config, 4)), expected, "{line}");
    }
    let job = load(&accelerate("a.py", Some(config), 4).expect("a job"));
    assert_eq!(job.cluster.workers_per_host, WorkersPerHost::Exactly(4));
}

#[test]
fn torchrun_starts_a_worker_per_gpu() {
    for (line, gpus, workers) in [("auto", 4, 4), ("gpu", 2, 2), ("auto", 0, 8), ("cpu", 4, 8), ("3", 4, 3)] {
        let job = load(&torchrun(&format!("--nproc-per-node {line} a.py"), gpus).expect(line));
        assert_eq!(job.cluster.workers_per_host, WorkersPerHost::Exactly(workers), "{line}");
        assert_eq!(job.cluster.hosts, HostSelection::Local);
        assert_eq!(job.run.command.expect("a command"), ["/venv/python", "-u", "a.py"]);
    }
    let count = |kind, line: &str| {
        let words = split(&format!("--nproc-per-node {line} a.py"));
        let job = with_accelerators(kind, 3, &[], |machine| {
            convert_torchrun_command(TorchProgram::Torchrun, &words, machine)
        });
        job.map(|job| load(&job).cluster.workers_per_host).ok()
    };
    let three = Some(WorkersPerHost::Exactly(3));
    for (kind, line, expected) in [
        (AcceleratorKind::Npu, "auto", three),
        (AcceleratorKind::Npu, "gpu", None),
        (AcceleratorKind::Xpu, "xpu", three),
        (AcceleratorKind::Cuda, "xpu", None),
        (AcceleratorKind::Rocm, "gpu", three),
    ] {
        assert_eq!(count(kind, line), expected, "{line} on {kind:?}");
    }
    let error = torchrun("--nproc-per-node gpu a.py", 0).expect_err("no GPU").remove(0);
    assert_eq!((error.code(), error.subject()), (command::DROP_IN_UNSUPPORTED, Some("--nproc-per-node")));
}

#[test]
fn torchruns_options_become_keys() {
    let line = "--nproc-per-node 4 --virtual-local-rank --max-restarts 2 --rdzv-endpoint localhost:4000 \
                --shutdown-timeout 7 -r 0:3 a.py";
    let imported = torchrun(line, 4).expect("a job");
    let job = load(&imported);
    assert_eq!((job.run.restarts, job.run.grace_period_ms), (2, 7000));
    assert_eq!(job.run.visible_devices, VisibleDevices::One);
    assert_eq!(job.cluster.master_port, jobspec::MasterPort::Fixed(4000));
    assert_eq!(job.run.logs.show, [1, 2, 3]);
    assert_eq!(variable(&job, "OMP_NUM_THREADS"), Some("1"));
    assert!(imported.notes.is_empty(), "{:?}", imported.notes);
    let noted = torchrun("--master-addr 10.0.0.1 --start-method fork a.py", 0).expect("a job").notes;
    let keys: Vec<&str> = noted.iter().map(|note| note.key.as_str()).collect();
    assert_eq!(keys, ["--master-addr", "--start-method"]);
}

#[test]
fn arguments_with_the_local_rank_differ_between_workers() {
    let command = |line: &str| load(&torchrun(line, 0).expect(line)).run.command.expect("a command");
    assert_eq!(command("a.py -r=${local_rank}"), ["/venv/python", "-u", "a.py", "-r=0"]);
    assert_eq!(
        command("--nproc-per-node 2 a.py -r=${local_rank}"),
        ["sh", "-c", "exec '/venv/python' '-u' 'a.py' '-r='\"$LOCAL_RANK\"''"]
    );
    let error =
        torchrun("--nproc-per-node 2 --virtual-local-rank a.py ${local_rank}", 2).expect_err("no rank");
    assert_eq!(error[0].subject(), Some("${local_rank}"));
    let legacy = |line: &str| {
        on_machine(0, &[], |machine| {
            convert_torchrun_command(TorchProgram::LegacyLaunch, &split(line), machine)
        })
    };
    let command = |line: &str| load(&legacy(line).expect(line)).run.command.expect("a command");
    assert_eq!(command("a.py x"), ["/venv/python", "-u", "a.py", "--local-rank=0", "x"]);
    assert_eq!(command("--use_env a.py x"), ["/venv/python", "-u", "a.py", "x"]);
    assert_eq!(command("--use-env --no-python ./a x"), ["./a", "x"]);
    assert_eq!(legacy("--no-python ./a").expect_err("no --use-env")[0].subject(), Some("--no-python"));
}

#[test]
fn times_of_the_rendezvous_become_keys_if_nodes_join() {
    let conf = "join_timeout=1800,last_call_timeout=5,is_host=true";
    let lines = [
        torchrun(&format!("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h --rdzv-conf {conf} a.py"), 0),
        accelerate(
            &format!(
                "--num_machines 2 --multi_gpu --num_processes 4 --main_process_ip h --rdzv_conf {conf} a.py"
            ),
            None,
            0,
        ),
    ];
    for (imported, option) in lines.into_iter().zip(["--rdzv-conf", "--rdzv_conf"]) {
        let imported = imported.expect(option);
        let join = load(&imported).cluster.join;
        assert_eq!((join.timeout_ms, join.last_call_ms), (1_800_000, 5000));
        assert_eq!(imported.notes.iter().filter(|note| note.key == option).count(), 1, "{option}");
    }
    let local = torchrun("--rdzv-conf join_timeout=7 a.py", 0).expect("a job");
    assert_eq!(load(&local).cluster.hosts, HostSelection::Local);
    assert_eq!(local.notes[0].key, "--rdzv-conf");
}

#[test]
fn accelerate_uses_all_gpus_by_default() {
    let job = load(&accelerate("a.py", None, 4).expect("a job"));
    assert_eq!(job.cluster.workers_per_host, WorkersPerHost::Exactly(4));
    let single = load(&accelerate("a.py", None, 1).expect("a job"));
    assert_eq!(single.cluster.workers_per_host, WorkersPerHost::Exactly(1));
    let command = single.run.command.expect("a command");
    assert_eq!(&command[..3], ["env", "-u", "RANK"]);
    assert_eq!(&command[command.len() - 2..], ["/venv/python", "a.py"]);
    let listed =
        accelerate("--multi_gpu --num_processes 2 --gpu_ids 1,3 --main_process_port 0 a.py", None, 4);
    assert_eq!(load(&listed.expect("a job")).cluster.devices, DeviceSelection::List(vec![1, 3]));
    let none = accelerate("--use_fsdp a.py", None, 0).expect_err("no process").remove(0);
    assert_eq!(none.subject(), Some("--num_processes"));
}

#[test]
fn options_replace_keys_of_accelerates_configuration() {
    let config = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n\
                  fsdp_config: {offload_params: false, fsdp_version: 1}\n";
    let job = load(
        &accelerate("--fsdp_offload_params true --num-processes 3 a.py", Some(config), 0).expect("a job"),
    );
    assert_eq!(variable(&job, "FSDP_OFFLOAD_PARAMS"), Some("true"));
    assert_eq!(variable(&job, "ACCELERATE_MIXED_PRECISION"), Some("bf16"));
    assert_eq!(job.cluster.workers_per_host, WorkersPerHost::Exactly(3));
    let unused = accelerate("--zero_stage 2 a.py", Some(config), 0).expect("a job").notes;
    assert_eq!(unused[0].key, "--zero_stage");
    let unknown = accelerate("a.py", Some(&format!("{config}new_key: 3\n")), 0).expect_err("an unknown key");
    assert_eq!(unknown[0].subject(), Some("new_key"));
}

#[test]
fn deepspeed_selects_gpus_of_this_machine() {
    let devices = |line: &str, variables: &[(&str, &str)]| {
        let job = load(&deepspeed(line, None, variables, 4).expect(line));
        (job.cluster.workers_per_host, job.cluster.devices)
    };
    let list = |numbers: &[u32]| DeviceSelection::List(numbers.to_vec());
    let exactly = WorkersPerHost::Exactly;
    assert_eq!(devices("a.py", &[]), (exactly(4), DeviceSelection::Auto));
    assert_eq!(devices("--num_gpus 2 a.py", &[]), (exactly(2), list(&[0, 1])));
    assert_eq!(devices("--include localhost:1,3 a.py", &[]), (exactly(2), list(&[1, 3])));
    assert_eq!(devices("-e localhost:0 a.py", &[]), (exactly(3), list(&[1, 2, 3])));
    assert_eq!(devices("a.py", &[("CUDA_VISIBLE_DEVICES", "2,3")]), (exactly(2), DeviceSelection::Auto));
    assert_eq!(
        devices("--num_gpus 2 a.py", &[("DS_ACCELERATOR", "cpu")]),
        (exactly(2), DeviceSelection::Auto)
    );
}

#[test]
fn deepspeed_runs_on_the_hosts_of_a_hostfile() {
    let hosts = Some("a slots=4\nb slots=4\nc slots=4\n");
    let line = "--hostfile h --include a@b:0,2 --ssh_port 2222 --master_port 4000 a.py x";
    let job = load(&deepspeed(line, hosts, &[("PYTHONPATH", "/p")], 0).expect("a job"));
    assert_eq!(job.cluster.hosts, HostSelection::File("h".into()));
    assert_eq!((job.cluster.include, job.cluster.ssh.port), (vec!["a@b:0,2".to_owned()], Some(2222)));
    assert!(job.run.local_rank_argument && job.run.pass_env.contains(&"NCCL*".to_owned()));
    let env: BTreeMap<String, String> = job.run.env.into_iter().collect();
    assert_eq!((env["A"].as_str(), env["NCCL_DEBUG"].as_str()), ("b=c", "INFO"));
    assert_eq!(env["PYTHONPATH"], "/work:/p");
    let limited = load(&deepspeed("-H h --num_nodes 2 --num_gpus 1 a.py", hosts, &[], 0).expect("a job"));
    assert_eq!(
        (limited.cluster.use_hosts, limited.cluster.workers_per_host),
        (Some(2), WorkersPerHost::Exactly(1))
    );
    let imported = deepspeed("-H h --num_nodes 1 --no_local_rank a.py", hosts, &[], 0).expect("a job");
    assert!(imported.notes.iter().any(|note| note.key == "--hostfile" && note.text.contains("`a`")));
    let local = load(&imported);
    assert_eq!((local.cluster.hosts, local.run.local_rank_argument), (HostSelection::Local, false));
    assert_eq!(local.cluster.workers_per_host, WorkersPerHost::Exactly(4));
    for (line, subject) in [
        ("-H h --launcher openmpi a.py", "--launcher openmpi"),
        ("-H h --launcher slurm a.py", "--launcher slurm"),
    ] {
        let error = deepspeed(line, hosts, &[], 0).expect_err(line).remove(0);
        assert_eq!(error.subject(), Some(subject), "{line}");
    }
}

#[test]
fn deepspeed_without_ssh_is_one_of_several_nodes() {
    let hosts = Some("root@a slots=2\nb slots=2\nc slots=4\n");
    let imported =
        deepspeed("-H h --num_nodes 2 --no_ssh --node_rank 1 a.py x", hosts, &[], 4).expect("a job");
    let nodes = imported.nodes.clone().expect("nodes");
    let rendezvous = nodes.rendezvous.expect("an address");
    assert_eq!((nodes.count.min, nodes.count.max, nodes.node_rank), (2, 2, Some(1)));
    assert_eq!((rendezvous.host.as_str(), rendezvous.port), ("a", 29500));
    let job = load(&imported);
    assert_eq!(job.cluster.workers_per_host, WorkersPerHost::Exactly(2));
    assert_eq!(job.cluster.devices, DeviceSelection::List(vec![0, 1]));
    assert!(job.run.local_rank_argument && imported.notes.is_empty(), "{:?}", imported.notes);
    let line = "-H h --num_gpus 3 --no_ssh --node_rank 0 --master_addr 10.0.0.7 --master_port 4000 a.py";
    let imported = deepspeed(line, hosts, &[], 0).expect("a job");
    let nodes = imported.nodes.clone().expect("nodes");
    assert_eq!((nodes.count.max, nodes.node_rank), (3, Some(0)));
    assert_eq!(nodes.rendezvous.expect("an address").to_string(), "10.0.0.7:4000");
    assert_eq!(load(&imported).cluster.workers_per_host, WorkersPerHost::Exactly(3));
    let alone = deepspeed("-H h --num_nodes 1 --no_ssh --node_rank 0 a.py", hosts, &[], 0).expect("a job");
    assert_eq!((alone.nodes.clone(), load(&alone).cluster.hosts), (None, HostSelection::Local));
    for (line, subject) in [
        ("-H h --no_ssh a.py", "--node_rank"),
        ("-H h --no_ssh --node_rank 3 a.py", "--node_rank"),
        ("-H h --no_ssh --node_rank 1 a.py", "--hostfile"),
        ("-H h --num_gpus 1 --no_ssh --node_rank 1 --master_addr [x a.py", "--master_addr"),
    ] {
        let error = deepspeed(line, hosts, &[], 0).expect_err(line).remove(0);
        assert_eq!(error.subject(), Some(subject), "{line}");
    }
}

proptest::proptest! {
    /// Checks that any argument of a script reaches the worker unchanged, except torchrun's macros.
    #[test]
    fn any_argument_reaches_the_script(words in proptest::collection::vec("[^\0$]{0,8}", 0..4)) {
        let words: Vec<String> = ["a.py", "x"].map(str::to_owned).into_iter().chain(words).collect();
        let jobs = on_machine(0, &[], |machine| [
            convert_torchrun_command(TorchProgram::Torchrun, &words, machine),
            AccelerateCommand::parse(&words).and_then(|command| command.convert(None, machine)),
            DeepSpeedCommand::parse(&words).and_then(|command| command.convert(&DeepSpeedFiles::default(), machine)),
        ]);
        for job in jobs {
            let command = load(&job.expect("a job")).run.command.expect("a command");
            proptest::prop_assert!(command.ends_with(&words), "{:?}", command);
        }
    }
}
